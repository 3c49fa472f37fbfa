"""What every key of a DeepSpeed configuration means here: data, read by `deepspeed.py`.

Owns the words: keys that are translated, keys that have no effect and why, keys that are accepted only as switched off
and what to do otherwise. Knows no values and does nothing. A key that is in none of the tables is unknown, which is an
error: so nothing is dropped because somebody forgot it. Keys are those of DeepSpeed's sources (`runtime/constants.py`,
`precision_config.py`, `zero/config.py`, `zero/offload_config.py`), sections joined by dots.
"""

from __future__ import annotations

_PLANNED = "what is fetched when, and how much stays, is a plan made from the budgets (host_memory, device_memory)"
_GRADIENTS = "gradients are reduced unit by unit; there are no buckets to size or copies to avoid"
_BUFFERS = "pages need no buffers of their own besides host_memory"
LOGGED = "Runtime.statistics() and Runtime.timeline() say what happened"
_SAVING = "Runtime.commit, snapshot and save_pretrained save; they need no setting"
_ACTIVATIONS = "acts in DeepSpeed's own checkpointing only; Runtime.offload_activations() pages activations"
_THREADS = "how requests are queued is measured and chosen by the swap engine"

_LIMITS = (  # DeepSpeed takes these with and without stage3_ before them
    "max_live_parameters",
    "max_reuse_distance",
    "prefetch_bucket_size",
    "model_persistence_threshold",
    "module_granularity_threshold",
)

ZERO = "zero_optimization"
ACCUMULATION = "data_types.grad_accum_dtype"  # must be what it is here: the dtype of the parameters

TRANSLATED = frozenset(
    {
        "bf16.enabled",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer.type",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "aio.block_size",
        "aio.queue_depth",
        f"{ZERO}.stage",
        f"{ZERO}.offload_param.device",
        f"{ZERO}.offload_param.nvme_path",
        f"{ZERO}.offload_optimizer.device",
        f"{ZERO}.offload_optimizer.nvme_path",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "torch_adam")),
    }
)

WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            f"{ZERO}.{name}"
            for name in (
                *(f"{prefix}{name}" for prefix in ("stage3_", "") for name in _LIMITS),
                "sub_group_size",
                "memory_efficient_linear",
                "log_trace_cache_warnings",
            )
        ),
        _PLANNED,
    ),
    **dict.fromkeys(
        (f"{ZERO}.{prefix}param_persistence_threshold" for prefix in ("stage3_", "")),
        f"{_PLANNED}; offload(keep='100KiB') insists on small parameters",
    ),
    **dict.fromkeys(
        (
            f"{ZERO}.{name}"
            for name in (
                "overlap_comm",
                "contiguous_gradients",
                "reduce_scatter",
                "reduce_bucket_size",
                "allgather_partitions",
                "allgather_bucket_size",
                "use_multi_rank_bucket_allreduce",
                "round_robin_gradients",
                "stage3_use_all_reduce_for_fetch_params",
                "use_all_reduce_for_fetch_params",
                "legacy_stage1",
                "cpu_offload_use_pin_memory",
            )
        ),
        _GRADIENTS,
    ),
    **dict.fromkeys(
        (
            f"{ZERO}.offload_{what}.{name}"
            for what in ("param", "optimizer")
            for name in ("buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "fast_init")
        ),
        _BUFFERS,
    ),
    **dict.fromkeys(
        (
            f"{ZERO}.offload_optimizer.{name}"
            for name in (
                "pipeline",
                "pipeline_read",
                "pipeline_write",
                "super_offload",
                "convert_grad_on_cpu",
                "cpuadam_cores_perc",
            )
        ),
        "updates are always read, computed and written beside each other",
    ),
    **dict.fromkeys(
        (
            f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
            f"{ZERO}.stage3_gather_fp16_weights_on_model_save",
            f"{ZERO}.gather_16bit_weights_on_model_save",
            f"{ZERO}.elastic_checkpoint",
            f"{ZERO}.load_from_fp32_weights",
            f"{ZERO}.pipeline_loading_checkpoint",
            "checkpoint.tag_validation",
            "checkpoint.load_universal",
            "checkpoint.use_node_local_storage",
            "checkpoint.parallel_write.pipeline_stage",
        ),
        _SAVING,
    ),
    f"{ZERO}.ignore_unused_parameters": "parameters without a gradient are left as they are, as plain PyTorch does",
    f"{ZERO}.override_module_apply": "nothing of torch is overridden",
    **dict.fromkeys(
        (f"aio.{name}" for name in ("thread_count", "intra_op_parallelism", "single_submit", "overlap_events")),
        _THREADS,
    ),
    **dict.fromkeys(
        (
            f"activation_checkpointing.{name}"
            for name in (
                "partition_activations",
                "cpu_checkpointing",
                "contiguous_memory_optimization",
                "number_checkpoints",
                "synchronize_checkpoint_boundary",
                "profile",
            )
        ),
        _ACTIVATIONS,
    ),
    **dict.fromkeys(("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state"), LOGGED),
    "vocabulary_size": "nothing is padded to it",
    "seq_parallel_comm_data_type": "there is no sequence parallelism",
    "disable_allgather": "of no effect on what is computed; collectives are tiermem's own",
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), "the optimizer is tiermem.AdamW in any case"
    ),
    "optimizer.params.fused": "tiermem.AdamW has the bits of torch's fused one",
    **dict.fromkeys(
        (
            f"fp16.{name}"
            for name in (
                "loss_scale",
                "initial_scale_power",
                "loss_scale_window",
                "hysteresis",
                "consecutive_hysteresis",
                "min_loss_scale",
                "auto_cast",
                "fused_mode",
                "fp16_master_weights_and_grads",
            )
        ),
        "fp16 is off",
    ),
    **dict.fromkeys(
        (f"bf16.{name}" for name in ("immediate_grad_update", "check_grad_overflow")),
        "a step whose gradients are not finite is skipped in any case",
    ),
}

# Sections that log; whether they are enabled changes nothing that is computed.
LOGGING = frozenset(
    {"tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "monitor_config"}
)

# What a key must be, and what to do where it is not.
ONLY: dict[str, tuple[object, str]] = {
    "fp16.enabled": (False, "take bf16, or Config(param_dtype='float16') with torch.amp.GradScaler in your loop"),
    "bf16.bf16_master_weights_and_grads": (False, "masters are float32, split so that they cost 16 bits more"),
    "bf16.bf16_optimizer_states": (False, "for smaller moments pass moments='int8' to translate"),
    "dataloader_drop_last": (False, "pass drop_last=True to your own data loader"),
    "graph_harvesting": (False, "leave it out"),
    "use_data_before_expert_parallelism": (False, "experts are not divided over ranks by themselves"),
    f"{ZERO}.cpu_offload": (False, "write offload_optimizer: {'device': 'cpu'}"),
    f"{ZERO}.cpu_offload_param": (False, "write offload_param: {'device': 'cpu'}"),
    "communication_data_type": (None, "gradients are exchanged in the dtype of the parameters"),
    "gradient_predivide_factor": (1.0, "gradients are averaged over ranks; scale the loss instead"),
    "prescale_gradients": (False, "gradients are averaged over ranks; scale the loss instead"),
    "sparse_gradients": (False, "gradients are pages, dense ones; leave sparse=True out of the embedding"),
    "optimizer.legacy_fusion": (False, "leave it out"),
    "optimizer.params.adam_w_mode": (True, "tiermem has AdamW, whose decay is not part of the gradient"),
    "optimizer.params.bias_correction": (True, "AdamW without bias correction is not there"),
    "optimizer.params.amsgrad": (False, "amsgrad is not there"),
    "optimizer.params.fp32_optimizer_states": (True, "for smaller moments pass moments='int8' to translate"),
    f"{ZERO}.offload_param.ratio": (1.0, "how much stays is decided by host_memory"),
    f"{ZERO}.offload_optimizer.ratio": (1.0, "how much stays is decided by host_memory"),
    f"{ZERO}.zero_hpz_partition_size": (1, "hybrid sharding is offload(mesh=...), see tiermem/zero3/RANKS.md"),
    f"{ZERO}.mics_shard_size": (-1, "hybrid sharding is offload(mesh=...), see tiermem/zero3/RANKS.md"),
    f"{ZERO}.mics_hierarchical_params_gather": (False, "hybrid sharding is offload(mesh=...)"),
    f"{ZERO}.zero_quantized_weights": (False, "parameters are exchanged as they are"),
    f"{ZERO}.zero_quantized_nontrainable_weights": (False, "parameters are exchanged as they are"),
    f"{ZERO}.zero_quantized_gradients": (False, "gradients are exchanged as they are"),
    "aio.use_gds": (False, "drives are read into host memory"),
}

# Sections that change what is computed, or who computes it: accepted only as switched off.
OFF: dict[str, str] = {
    "amp": "use torch.autocast around the forward",
    "torch_autocast": "use torch.autocast around the forward",
    "autotuning": "`tiermem tune` finds settings by measurement",
    f"{ZERO}.zeropp_loco_param": "gradients are exchanged as they are",
    "elasticity": "the number of ranks is fixed; a snapshot continues with another",
    "compile": "torch.compile the units yourself, see tiermem/zero3/IDIOMS.md",
    **dict.fromkeys(
        (
            "progressive_layer_drop",
            "curriculum_learning",
            "data_efficiency",
            "eigenvalue",
            "quantize_training",
            "compression_training",
            "sparse_attention",
            "hybrid_engine",
            "nebula",
            "tensor_parallel",
            "sequence_parallel",
            "pipeline",
        ),
        "there is nothing like it here; leave it out",
    ),
}
