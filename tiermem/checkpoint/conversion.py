"""What transformers converts while it loads: its own mapping, as recipes.

Owns the translation of transformers' renamings and converters into origins and recipes (`pieces.py`). Does not read
files, and knows no model by name: what is not in transformers' mapping is not converted. Guarantees that transformers
is never imported for its sake, that without it (or with a version that has no such mapping) every tensor keeps its
name, and that an operation it does not know is said to be an obstacle and never guessed.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from tiermem.checkpoint.pieces import Divide, Join, Operation, Origin, Recipe, Stack, Transpose


def find_origins(model: nn.Module, names: Iterable[str], fits: Callable[[str], bool]) -> dict[str, Origin]:
    """What each tensor of a file becomes in `model`, in natural order. `fits`: whether the model has such a name."""
    ordered = sorted(names, key=_natural)
    library = _library(model)
    if library is None:
        return {name: Origin(name, name) for name in ordered}
    transforms, loading = library
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [(each, _recipe(each, loading)) for each in transforms if isinstance(each, loading.WeightConverter)]
    origins = {}
    for name in ordered:  # some renamings depend on which came before
        renamed = name
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        origin = Origin(name, renamed)
        for converter, recipe in converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:  # at most one converter, as transformers has it
                source = converter.source_patterns.index(pattern)
                origin = Origin(name, target, recipe, source, _number(pattern, renamed))
                break
        if not fits(origin.target) and fits(name):  # saved as it is in memory
            origin = Origin(name, name)
        origins[name] = origin
    return origins


def _library(model: nn.Module) -> tuple[list[Any], Any] | None:
    """The transforms of a model of transformers, and the module of their classes."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        loading: Any = importlib.import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # before version 5 files were loaded as they are
        return None
    converter = getattr(loading, "WeightConverter", None)
    if not hasattr(mapping, "get_model_conversion_mapping") or not hasattr(converter, "rename_source_key"):
        return None
    return list(mapping.get_model_conversion_mapping(model)), loading


def _recipe(converter: Any, loading: Any) -> Recipe:
    """A converter in our words, or what keeps it from being streamed."""
    sources, targets = tuple(converter.source_patterns), tuple(converter.target_patterns)
    operations = [_operation(each, loading) for each in converter.operations]
    known = tuple(each for each in operations if each is not None)
    chain = tuple(type(each).__name__ for each in operations)
    one, dims = len(sources) == 1, [each.dim for each in known if isinstance(each, (Stack, Join))]
    possible = {
        ("Stack",): one and len(targets) == 1,
        ("Join",): len(targets) == 1,
        ("Stack", "Join"): len(targets) == 1 and not one and len(set(dims)) == 2,
        ("Divide",): one and not any("\\" in target for target in targets),
        ("Transpose",): one and len(targets) == 1,
    }
    if possible.get(chain, False):
        return Recipe(sources, targets, known)
    return Recipe(sources, targets, obstacle=", ".join(repr(each) for each in converter.operations))


def _operation(operation: Any, loading: Any) -> Operation | None:
    """One of ours that does the same; None for what is not known, or could not be streamed."""
    kind = type(operation)  # exactly: a subclass may do something else
    dim = getattr(operation, "dim", 0)
    ours: Operation | None = None
    if kind is getattr(loading, "MergeModulelist", None) and dim >= 0:
        ours = Stack(dim)
    elif kind is getattr(loading, "Concatenate", None) and dim >= 0:
        ours = Join(dim)
    elif kind is getattr(loading, "Chunk", None) and dim == 0:
        ours = None if getattr(operation, "num_shards_attribute", None) else Divide(equal=True)
    elif kind is getattr(loading, "Split", None) and dim == 0:
        ours = Divide(equal=False)
    elif kind is getattr(loading, "Transpose", None) and min(operation.dim0, operation.dim1) >= 0:
        ours = Transpose(operation.dim0, operation.dim1, bool(getattr(operation, "check_dims", False)))
    return ours


def _number(pattern: str, name: str) -> int | None:
    """The number that stands in a name where the pattern has a star."""
    if "*." not in pattern:
        return 0
    found = re.search(pattern.replace("*.", r"(?P<number>\d+)\.", 1).replace("*.", r".*\."), name)
    return int(found["number"]) if found else None


def _natural(name: str) -> list[tuple[int, str, int]]:
    """Parts in the order in which transformers takes them: numbers by value, so that expert 10 comes after expert 2."""
    parts = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        parts.append((1 if text else 0, text, int(part[len(text) :]) if part != text else -1))
    return parts
