"""How a model of transformers generates text: its generation_config.json, beside weights or in a commit.

Owns the finding of it, and whether a model takes it. Does not know what stands in it, transformers does. Guarantees
that settings which the program has made itself stay, and that nothing is changed before all is read.

Why it matters: for many chat models the tokens at which generation ends stand there and nowhere else. What is trained
from such a folder, and saved, would not stop talking without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from swap import FormatError
from tiermem.checkpoint.exporting import recorded
from tiermem.checkpoint.tensor_file import read_text

GENERATION = "generation_config.json"
_LARGEST = 1 << 20


def generation_beside(model: nn.Module, weights: str | os.PathLike[str]) -> Any | None:
    """The generation settings in a folder of weights, as an object of the model's own kind; None: it keeps its own.

    Raises FormatError for a file that holds none, SwapIOError if it cannot be read.
    """
    path = Path(os.path.expanduser(os.fspath(weights))) / GENERATION
    if not _takes(model) or not path.is_file():
        return None
    return _parsed(model, read_text(path, limit=_LARGEST), repr(str(path)))


def generation_in(model: nn.Module, record: Mapping[str, Any]) -> Any | None:
    """The same from what a commit or a snapshot says. Raises FormatError."""
    text = recorded(record).files.get(GENERATION)
    return None if text is None or not _takes(model) else _parsed(model, text, f"the commit's {GENERATION}")


def take_generation(model: nn.Module, settings: Any | None) -> None:
    """Have the model generate by what was found, if anything was."""
    if settings is not None:
        model.generation_config = settings


def _takes(model: nn.Module) -> bool:
    """Whether the settings the model has are those that transformers makes for want of others."""
    return bool(getattr(getattr(model, "generation_config", None), "_from_model_config", False))


def _parsed(model: nn.Module, text: str, where: str) -> Any:
    own: Any = model.generation_config
    try:
        settings = json.loads(text)
        if not isinstance(settings, dict):
            raise TypeError(f"expected an object, found {type(settings).__name__}")
        return type(own).from_dict(settings)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"expected {where} to hold generation settings: {error}") from error
