"""Which tensor of a file belongs to which parameter of a model.

Owns the rules of Hugging Face's files: a prefix that a head has and its base model has not, tied weights saved once,
names that a model says may be missing or left over. Does not read bytes, nor know what is converted on the way
(`conversion.py`, `pieces.py`). Guarantees that everything that does not fit is named in one error, by the file's names
where it is there: missing, surplus, wrongly shaped, of a wrong kind, and what may just have been renamed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tiermem.checkpoint.pieces import Assembly, Origin, Piece, as_it_is, assemble
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
    """`found`: the pieces of each expected tensor, by its first name. The rest are problems, in words.

    `incomplete`: pieces missing of what is there in part, which is never left to an initialisation. `copies`: what the
    file has besides under other names of a tied parameter, after what is taken; `untied`: those of other values.
    `heads`: what belongs to heads of another model around the same base.
    """

    found: dict[str, tuple[Piece, ...]] = field(default_factory=dict, init=False)
    missing: list[str] = field(default_factory=list, init=False)
    incomplete: list[str] = field(default_factory=list, init=False)
    surplus: list[str] = field(default_factory=list, init=False)
    heads: list[str] = field(default_factory=list, init=False)
    shapes: list[str] = field(default_factory=list, init=False)
    kinds: list[str] = field(default_factory=list, init=False)
    obstacles: list[str] = field(default_factory=list, init=False)
    renamed: list[str] = field(default_factory=list, init=False)
    copies: list[tuple[Expected, TensorInfo, TensorInfo]] = field(default_factory=list, init=False)
    untied: list[str] = field(default_factory=list, init=False)

    def problems(self, *, partial: bool = False) -> str:
        """All of it in one sentence, empty if everything fits; with `partial` nothing is missing, no head surplus."""
        kinds = {
            "missing from the file": [*([] if partial else self.missing), *self.incomplete],
            "not in the model": [*([] if partial else self.heads), *self.surplus],
            "of another shape": self.shapes,
            "of another kind": self.kinds,
            "to be converted by an operation that cannot be streamed": self.obstacles,
            "one parameter in the model, but of different values": self.untied,
            "perhaps renamed": [] if partial else self.renamed,
        }
        return "; ".join(f"{what}: {_listed(names)}" for what, names in kinds.items() if names)


def match(
    expected: Sequence[Expected],
    tensors: Mapping[str, TensorInfo],
    rules: Rules,
    origins: Mapping[str, Origin] | None = None,
) -> Match:
    """Find each expected tensor among a file's. Raises nothing: the problems are in the result.

    `origins`: what each of the file's tensors becomes, in natural order; by default what it is.
    """
    result = Match()
    origins = {name: Origin(name, name) for name in tensors} if origins is None else origins
    known = {name: wanted for wanted in expected for name in wanted.names}
    by_own = _by_own_name(origins, known, rules.prefix)
    assemblies = _assemblies(result, by_own, known, tensors)
    missing = []
    for wanted in expected:
        names = [name for name in wanted.names if name in assemblies]
        if names:
            _take(result, wanted, assemblies[names[0]])
            _note_copies(result, wanted, [assemblies[name] for name in names])
        elif wanted.required and not _matches(wanted.names, rules.may_miss):
            missing.append(wanted)
    left = [
        (own, member)
        for own, members in by_own.items()
        if own not in known
        for member in members
        if not _matches([own, member.name], (*rules.may_be_left_over, *_OBSOLETE))
    ]
    heads = _heads(by_own, known, rules.prefix)
    result.missing = [wanted.names[0] for wanted in missing]
    result.heads = list(dict.fromkeys(member.name for own, member in left if own in heads))
    surplus = (member.name for own, member in left if own not in heads)
    result.surplus = list(dict.fromkeys([*surplus, *result.surplus]))
    for wanted in missing:
        alike = [member.name for _, member in left if tensors[member.name].shape == wanted.shape]
        near = difflib.get_close_matches(wanted.names[0], alike, n=1, cutoff=0.4)
        result.renamed.extend(f"{name} for {wanted.names[0]}" for name in near)
    return result


def fits(name: str, known: Collection[str], prefix: str) -> bool:
    """Whether the model has such a name, with the prefix added or removed."""
    start = f"{prefix}." if prefix else ""
    return name in known or start + name in known or (name.startswith(start) and name.removeprefix(start) in known)


def _by_own_name(origins: Mapping[str, Origin], known: Mapping[str, Expected], prefix: str) -> dict[str, list[Origin]]:
    """The tensors of the file by what the model calls that which they become."""
    own_names = _own_names({origin.target: None for origin in origins.values()}, known, prefix)
    by_own: dict[str, list[Origin]] = {}
    for origin in origins.values():
        own = own_names[origin.target]
        if own is not None:
            by_own.setdefault(own, []).append(origin)
    return by_own


def _assemblies(
    result: Match,
    by_own: Mapping[str, Sequence[Origin]],
    known: Mapping[str, Expected],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Assembly]:
    """What the model's parameters are made of, by name; what is made of nothing that fits is noted and is there too."""
    found: dict[str, Assembly] = {}
    for own, members in by_own.items():
        # What has the parameter's own name comes first, then what is renamed, then what pieces are made of.
        chosen = min(members, key=lambda member: (member.recipe is not None, member.name != own))
        recipe = chosen.recipe
        taken = [chosen] if recipe is None else [member for member in members if member.recipe == recipe]
        targets = _targets(own, taken[0])
        if not any(name in known for name in targets):
            continue
        if recipe is None:
            found[own] = as_it_is(tensors[chosen.name], known[own].shape)
        elif recipe.obstacle:
            found.update((name, Assembly()) for name in targets)
            result.obstacles.extend(f"{member.name} ({recipe.obstacle}, for {own})" for member in taken)
        else:
            shapes = [known[name].shape for name in targets if name in known]
            found.update(zip(targets, assemble(recipe, taken, tensors, shapes), strict=True))
        names = {member.name for member in taken}
        result.surplus.extend(member.name for member in members if member.name not in names)
    return found


def _targets(own: str, origin: Origin) -> list[str]:
    """The names of all that is made of a tensor, the first of which is `own`."""
    if origin.recipe is None or len(origin.recipe.targets) == 1:
        return [own]
    begin, _, end = own.partition(origin.recipe.targets[0])
    return [begin + target + end for target in origin.recipe.targets]


def _take(result: Match, wanted: Expected, assembly: Assembly) -> None:
    """Note what one expected tensor is made of, and what keeps it from that."""
    result.found[wanted.names[0]] = assembly.pieces
    result.incomplete.extend(assembly.missing)
    result.surplus.extend(assembly.surplus)
    result.shapes.extend(assembly.shapes)
    for info in (piece.info for piece in assembly.pieces):
        if info.dtype != wanted.dtype and not (info.dtype in _FLOATING and wanted.dtype in _FLOATING):
            result.kinds.append(f"{info.name} (expected {wanted.dtype}, found {info.dtype})")


def _note_copies(result: Match, wanted: Expected, assemblies: Sequence[Assembly]) -> None:
    """Note what the file has under the other names of a tied parameter, where each is a tensor as it is."""
    plain = [each for each in assemblies if len(each.pieces) == 1 and each.pieces[0] == Piece(each.pieces[0].info)]
    for other in plain[1:]:
        result.shapes.extend(other.shapes)
        result.copies.append((wanted, plain[0].pieces[0].info, other.pieces[0].info))


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


def _heads(there: Collection[str], known: Collection[str], prefix: str) -> set[str]:
    """What lies beside a base of which some is there, in parts of which the model has none."""
    if not any(name in known and name.startswith(f"{prefix}.") for name in there):
        return set()
    parts = {name.partition(".")[0] for name in known}
    return {name for name in there if name.partition(".")[0] not in parts}


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
