"""The models `tiermem train` knows by name, and any other by its Hugging Face config.json.

Owns the table of Llama shapes. Does not build a model with storage: counting happens on the meta device. Guarantees
that every preset is an ordinary `LlamaConfig`, so that what is trained is the unmodified model of transformers.
"""

from __future__ import annotations

import copy
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiermem.cli.shortage import shortage_of
from tiermem.errors import ConfigError, TiermemError
from tiermem.memory.rounding import round_up

BYTE_VOCABULARY = 256
LLAMA3_VOCABULARY = 128256


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What distinguishes one Llama from another; widths in elements."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    key_value_heads: int
    vocabulary: int = BYTE_VOCABULARY
    tied: bool = False
    rope_theta: float = 10000.0

    def to_config(self) -> Any:
        """Return the shape as transformers writes it, a `LlamaConfig`; raises as `library`."""
        return library().LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            use_cache=False,
        )


# The small ones read bytes. 168m and 537m are the shapes of benchmarks/train_step.py. From 1b on: Llama 3.1 and 3.2.
PRESETS = {
    "llama-tiny": LlamaShape(layers=2, width=64, mlp_width=176, heads=4, key_value_heads=2),
    "llama-5m": LlamaShape(layers=6, width=256, mlp_width=688, heads=4, key_value_heads=4),
    "llama-20m": LlamaShape(layers=6, width=512, mlp_width=1408, heads=8, key_value_heads=8),
    "llama-60m": LlamaShape(layers=12, width=640, mlp_width=1728, heads=10, key_value_heads=10),
    "llama-168m": LlamaShape(12, 1024, 2728, heads=16, key_value_heads=16, vocabulary=8192),
    "llama-537m": LlamaShape(10, 2048, 5464, heads=16, key_value_heads=16, vocabulary=8192),
    "llama-1b": LlamaShape(16, 2048, 8192, 32, 8, vocabulary=LLAMA3_VOCABULARY, tied=True, rope_theta=500000.0),
    "llama-3b": LlamaShape(28, 3072, 8192, 24, 8, vocabulary=LLAMA3_VOCABULARY, tied=True, rope_theta=500000.0),
    "llama-8b": LlamaShape(32, 4096, 14336, 32, 8, vocabulary=LLAMA3_VOCABULARY, rope_theta=500000.0),
    "llama-70b": LlamaShape(80, 8192, 28672, 64, 8, vocabulary=LLAMA3_VOCABULARY, rope_theta=500000.0),
}


def library() -> Any:
    """transformers, which not everything needs. Raises `ConfigError` if it is not there."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"models come from transformers: pip install 'tiermem[hf]' ({error})") from error
    return transformers


def find_model(model: str, *, vocabulary: int = BYTE_VOCABULARY, otherwise: str = "") -> Any:
    """Return the configuration of a preset, or of a config.json (or the folder that holds one).

    A preset's vocabulary grows to `vocabulary`, rounded up to 64, if it is smaller; a config.json is taken at its word.
    Raises `ConfigError` if there is no such model, it cannot be read, or its vocabulary is too small. `otherwise`: what
    else the caller would have taken, for the first of these.
    """
    if model in PRESETS:
        config = PRESETS[model].to_config()
        if config.vocab_size < vocabulary:
            config.vocab_size = round_up(vocabulary, 64)
        return config
    if not model or not Path(model).exists():
        raise ConfigError(f'no preset and no file "{model}"; presets: {", ".join(PRESETS)}{otherwise}')
    transformers = library()
    try:
        # Code that comes with a model is not run, and nobody is asked on stdout whether it shall be.
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # every architecture checks its values in its own way
        if shortage_of(error) is not None:
            raise
        raise ConfigError(f"{model} is not a Hugging Face model configuration: {reason_of(error)}") from error
    known = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if known is not None and known < vocabulary:
        raise ConfigError(f"{model} has {known} tokens in its vocabulary, the text needs {vocabulary}")
    return config


def require_length(config: Any, model: str, seq: int) -> None:
    """Raise `ConfigError` if `config`, that of `model`, says that it takes no sequences of `seq` tokens."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and seq > limit:
        raise ConfigError(f"{model} takes at most {limit} tokens in a sequence, --seq is {seq}")


def build_model(config: Any) -> Any:
    """Return the causal language model of `config`, an unmodified transformers module; ValueError if there is none."""
    return library().AutoModelForCausalLM.from_config(config)


def convert_buffers(model: Any, config: Any, dtype: torch.dtype) -> None:
    """Give the buffers of the model of `config` the dtypes that transformers gives them where it builds in `dtype`.

    Parameters get it from the runtime, which leaves buffers alone. `model.to(dtype)` would convert too many: what
    rotary positions are computed from stays float32 in models that are loaded in bfloat16.
    """
    with torch.device("meta"):
        like = library().AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    wanted = {name: buffer.dtype for name, buffer in like.named_buffers()}
    for name, buffer in list(model.named_buffers()):
        if buffer.is_floating_point() and wanted.get(name, buffer.dtype) != buffer.dtype:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer.to(wanted[name]))


def empty_model(config: Any) -> Any:
    """Return the model without storage. Raises `ConfigError` if `config` describes none that can be built."""
    if type(config) not in library().MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"not a causal language model: transformers has none of the kind {config.model_type!r}")
    try:
        with torch.device("meta"):
            model = build_model(config)
    except Exception as error:  # whatever a model does with sizes that do not fit together
        if shortage_of(error) is not None:
            raise
        raise ConfigError(
            f"no {config.model_type} can be built with this configuration: {reason_of(error)}; correct its sizes"
        ) from error
    model.tie_weights()
    return model


def is_models_own(error: Exception) -> bool:
    """Whether a model has raised this, such as for sizes that do not go together, and not what is around it."""
    if not isinstance(error, (LookupError, RuntimeError, TypeError, ValueError)):
        return False
    if isinstance(error, TiermemError) or shortage_of(error) is not None or _is_the_devices(error):
        return False
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return names[-1].partition(".")[0] not in ("tiermem", "swap")


def _is_the_devices(error: Exception) -> bool:
    """Whether a GPU, or a library of it, has failed. A device-side assert is what it makes of an index out of range."""
    failed = isinstance(error, torch.AcceleratorError) or str(error).startswith(("CUDA ", "cuDNN "))
    return failed and "device-side assert" not in str(error)


def reason_of(error: Exception) -> str:
    """What a library says of an error, in a line; of several lines those that say where and what."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is not run; name an architecture that transformers has"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def count_parameters(config: Any) -> int:
    """Return the number of parameters of the model `config` describes, shared ones once; raises as `empty_model`."""
    return sum(parameter.numel() for parameter in empty_model(config).parameters())


def recompute_activations(model: Any) -> None:
    """Have the layers of a model of transformers computed again in backward. The verb has changed its name."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
