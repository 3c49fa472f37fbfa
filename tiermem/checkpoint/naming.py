"""Which tensor of a file belongs to which parameter of a model.

Owns the rules of Hugging Face's files: a prefix that a head has and its base model has not, tied weights saved once,
names that a model says may be missing or left over. Does not read bytes. Guarantees that everything that does not fit
is named in one error: missing, surplus, wrongly shaped, of a wrong kind, and what may just have been renamed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tiermem.checkpoint.tensor_file import TensorInfo

_SHOWN = 6  # names listed of each kind before "and 12 more"
# Tables that old versions of transformers saved with every layer; newer ones compute them.
_OBSOLETE = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Expected:
    """A parameter or buffer of a model. `required`: whether it must be in the file."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    required: bool = True


@dataclass(frozen=True, slots=True)
class Rules:
    """What a model says about its files. `prefix`: `base_model_prefix`; patterns are regular expressions."""

    prefix: str = ""
    may_miss: tuple[str, ...] = ()
    may_be_left_over: tuple[str, ...] = ()


@dataclass(slots=True)
class Match:
    """`found`: the file's name for each expected first name. The rest are problems, in words."""

    found: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)

    def problems(self, *, partial: bool = False) -> str:
        """All of it in one sentence, empty if everything fits; with `partial` nothing is missing."""
        kinds = {
            "missing from the file": [] if partial else self.missing,
            "not in the model": self.surplus,
            "of another shape": self.shapes,
            "of another kind": self.kinds,
            "perhaps renamed": [] if partial else self.renamed,
        }
        return "; ".join(f"{what}: {_listed(names)}" for what, names in kinds.items() if names)


def match(expected: Sequence[Expected], tensors: Mapping[str, TensorInfo], rules: Rules) -> Match:
    """Find each expected tensor among a file's. Raises nothing: the problems are in the result."""
    result = Match()
    known = {name: wanted for wanted in expected for name in wanted.names}
    own = _own_names(tensors, known, rules.prefix)
    by_own = {name: there for there, name in own.items() if name is not None}
    missing, used = [], set()
    for wanted in expected:
        names = [name for name in wanted.names if name in by_own]
        used.update(names)
        if names:
            _check(result, wanted, names[0], tensors[by_own[names[0]]])
            result.found[wanted.names[0]] = by_own[names[0]]
        elif wanted.required and not _matches(wanted.names, rules.may_miss):
            missing.append(wanted)
    left = [name for name in by_own if name not in used]
    left = [name for name in left if not _matches([name, by_own[name]], (*rules.may_be_left_over, *_OBSOLETE))]
    result.missing = [wanted.names[0] for wanted in missing]
    result.surplus = [by_own[name] for name in left]
    for wanted in missing:
        alike = [by_own[name] for name in left if tensors[by_own[name]].shape == wanted.shape]
        near = difflib.get_close_matches(wanted.names[0], alike, n=1, cutoff=0.4)
        result.renamed.extend(f"{name} for {wanted.names[0]}" for name in near)
    return result


def _own_names(tensors: Iterable[str], known: Mapping[str, Expected], prefix: str) -> dict[str, str | None]:
    """What the model would call each tensor; None for a head that belongs to another model around the same base."""
    plain: dict[str, str | None] = {name: name for name in tensors}
    if not prefix:
        return plain
    start = f"{prefix}."
    added: dict[str, str | None] = {name: name if name in known else start + name for name in plain}
    removed: dict[str, str | None] = {
        name: name if name in known else name.removeprefix(start) if name.startswith(start) else None for name in plain
    }
    return max((plain, added, removed), key=lambda names: sum(name in known for name in names.values()))


def _check(result: Match, wanted: Expected, name: str, info: TensorInfo) -> None:
    if info.shape != wanted.shape:
        result.shapes.append(f"{name} (expected {list(wanted.shape)}, found {list(info.shape)})")
    elif info.dtype != wanted.dtype and not (info.dtype in _FLOATING and wanted.dtype in _FLOATING):
        result.kinds.append(f"{name} (expected {wanted.dtype}, found {info.dtype})")


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
