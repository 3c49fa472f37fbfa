"""What a Trainer is asked for and cannot do with an offloaded model, refused before anything has begun.

Owns the list: each entry says what was found and what to do instead. Does not change arguments and keeps nothing.
Guarantees that what passes is either tested (`README.md`) or does not touch parameters, gradients or optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.integrations.ranks import joined
from tiermem.optim.adamw import AdamW
from tiermem.registry import registry
from tiermem.runtime import Runtime

_OURS = frozenset({"adamw_torch", "adamw_torch_fused"})  # the `optim` that tiermem.AdamW is, bit for bit or by formula


def refuse_other_than_runtime(runtime: Runtime) -> None:
    """Raise ConfigError unless `runtime` is one: other trainers may be made without, so None comes easily."""
    if not isinstance(runtime, Runtime):
        raise ConfigError(f"runtime: expected what tiermem.offload has returned, found a {type(runtime).__name__}")


def refuse_model(model: nn.Module, runtime: Runtime) -> None:
    """Raise ConfigError if the Trainer would train anything but the parameters of this runtime."""
    if model is not runtime.model:
        raise ConfigError(
            f"expected the model that was offloaded, a {type(runtime.model).__name__}, found a {type(model).__name__}; "
            "leave model= out, it is runtime.model. (Adapters put on after tiermem.offload: "
            "tiermem.integrations.adapters.AdapterTrainer)"
        )
    for name, parameter in model.named_parameters():
        if registry.find(parameter) is None:
            raise ConfigError(
                f"parameter {name} was put on after tiermem.offload, or the runtime is closed: its gradient would be "
                "clipped apart from the others and it would be in no checkpoint; offload the model as it is trained"
            )


def refuse_arguments(args: Any, runtime: Runtime) -> None:
    """Raise ConfigError naming the first of the TrainingArguments that cannot be honoured."""
    for contradiction in _contradictions(args, runtime):
        raise ConfigError(f"TrainingArguments: found {contradiction}")


def refuse_checkpoints(args: Any, runtime: Runtime) -> None:
    """Raise ConfigError if checkpoints are asked for that the runtime cannot commit."""
    strategy = _text(args.save_strategy)
    if strategy != "no" and not args.save_only_model and not runtime.config.commits:
        raise ConfigError(
            f"TrainingArguments: found save_strategy={strategy!r}, and a runtime with Config(commits=False): a "
            "checkpoint is a commit of the runtime; leave commits out there, or pass save_only_model=True or "
            "save_strategy='no'"
        )


def refuse_trained_pages(model: nn.Module, runtime: Runtime) -> None:
    """Raise ConfigError unless what is trained of the model is around a runtime's model, and none of it paged."""
    if not any(module is runtime.model for module in model.modules()):
        raise ConfigError(
            f"expected adapters around the model that was offloaded, a {type(runtime.model).__name__}, found a "
            f"{type(model).__name__} without it; tiermem.offload(base, ...) first, then peft.get_peft_model(base, ...)"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and registry.find(parameter) is not None:
            raise ConfigError(
                f"parameter {name} is offloaded and to be trained: the optimizer of adapters finds no gradient of it. "
                "Give the model with its adapters, peft.get_peft_model(base, ...), which freezes the base (a "
                "peft_config= of trl puts them on too late), or train all of it with "
                "tiermem.integrations.trainer.Trainer"
            )


def refuse_senseless_adapters(model: nn.Module) -> None:
    """Raise ConfigError if what is trained of the model was made from values that were paged out."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_meta and not parameter.isfinite().all():
            raise ConfigError(
                f"expected finite values in {name}, found NaN or infinity; adapters that begin with values of the "
                "model, as trainable tokens do, are put on inside `with runtime.gathered(base, write=True):`"
            )


def require_adamw(optimizer: object) -> AdamW:
    """The same, if it is a tiermem.AdamW; ConfigError if not."""
    if isinstance(optimizer, AdamW):
        return optimizer
    raise ConfigError(
        f"optimizers: expected a tiermem.AdamW for an offloaded model, found {type(optimizer).__module__}."
        f"{type(optimizer).__name__}, which finds no gradients; or pass none, and it is made from the arguments"
    )


def refuse_optim(args: Any) -> None:
    """Raise ConfigError if the arguments ask for an optimizer that tiermem does not have."""
    optim = _text(args.optim)
    if optim not in _OURS:
        raise ConfigError(
            f"TrainingArguments: expected optim to be one of {sorted(_OURS)}, found {optim!r}; tiermem has AdamW only"
        )


def choose_clipping(own: float | None, asked: float | None) -> float | None:
    """The norm to clip by, from that of the optimizer and that of the TrainingArguments; None does not clip.

    Raises ConfigError if both are given and differ. 0 in the arguments means that they say nothing.
    """
    if not asked or asked < 0:  # transformers clips by what is above 0
        return own
    if own is not None and own != asked:
        raise ConfigError(
            f"tiermem.AdamW has max_grad_norm={own}, TrainingArguments have max_grad_norm={asked} (1.0 unless given): "
            "leave it out in AdamW, or pass max_grad_norm=0 to TrainingArguments to have AdamW's"
        )
    return asked


def _contradictions(args: Any, runtime: Runtime) -> Iterator[str]:
    """What was found and what to do, one after the other, what would divide or move the model first."""
    yield from _engines(args, runtime)
    parameter = next(runtime.model.parameters())
    if _place(args.device) != _place(parameter.device):
        yield (
            f"device {args.device}, and a runtime that computes on {parameter.device}: Trainer would move the model; "
            "choose the same in both, by use_cpu=True here or by Config(device=...)"
        )
    if args.fp16:
        yield (
            "fp16=True: accelerate's loss scaling looks for .grad, which is None here; use bf16=True, or "
            "Config(param_dtype='float16') with torch.amp.GradScaler in a loop of your own"
        )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            yield f"{name}=True: an offloaded model keeps its dtype; choose it by Config(param_dtype=...)"
    if getattr(args, "enable_jit_checkpoint", False):
        yield (
            "enable_jit_checkpoint=True: it saves between backward and step, when there is no whole step to be kept; "
            "save_steps=1 keeps every step"
        )
    if args.debug:
        yield f"debug={args.debug}: it would look at parameters that are paged out, which read as NaN; leave it out"
    if getattr(args, "sync_ref_model", False):  # of trl
        yield (
            "sync_ref_model=True: trl would mix parameters that are paged out, which read as NaN, into the reference "
            "model; leave it out, and mix runtime.parameter(p) into it in a callback of your own"
        )


def _engines(args: Any, runtime: Runtime) -> Iterator[str]:
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if getattr(args, name, None):
            yield f"{name}={getattr(args, name)!r}: tiermem pages the model, nobody else can divide it; leave it out"
    yield from _processes(args, runtime)
    if args.n_gpu > 1:
        yield (
            f"{args.n_gpu} GPUs in one process: Trainer would copy the model to each (DataParallel); start a process "
            "for each by torchrun, or set CUDA_VISIBLE_DEVICES to one"
        )


def _processes(args: Any, runtime: Runtime) -> Iterator[str]:
    size, ranks = args.world_size, runtime.statistics().ranks
    if size != joined():
        yield (
            f"world_size={size}, where {joined()} processes have joined: each would train on rows that others have, "
            "too; start them by torchrun, from whose environment TrainingArguments know (RANK, LOCAL_RANK, WORLD_SIZE)"
        )
    if size != ranks:
        yield (
            f"world_size={size}, and a model that was offloaded by {ranks}: make TrainingArguments, with which "
            "processes join, before tiermem.offload, and leave none of them out by mesh="
        )
    if size > 1:
        yield from _by_oneself(args)


def _by_oneself(args: Any) -> Iterator[str]:
    """What one of several processes would do without the others."""
    if args.save_on_each_node:
        yield (
            "save_on_each_node=True: the first process writes the weights, and all go on from its folder; leave it "
            "out, and choose an output_dir that machines share"
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True and several processes: one that runs out of memory would begin anew without the "
            "others; choose per_device_train_batch_size"
        )
    if args.ddp_broadcast_buffers:
        yield (
            "ddp_broadcast_buffers=True: there is no DistributedDataParallel here, and buffers that training changes "
            "are each process's own; leave it out"
        )


def _place(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0


def _text(value: Any) -> str:
    """An argument that may be text or one of transformers' enumerations."""
    return str(getattr(value, "value", value))
