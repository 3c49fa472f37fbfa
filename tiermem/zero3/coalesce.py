"""Small units that follow one another, made one.

Owns which of a model's units become one. Does not know hooks or pages. Guarantees that what is made one is all trained
or all frozen, takes no more than a given size together, and was neither asked for by the user nor kept by choice.

Why. A unit is gathered twice, has its gradients taken and is updated every step, by messages among threads and, where
it is paged, by transfers of their own: milliseconds, whatever is in it. A model that is no row of large layers
(convolutions with norms between them, each a module of its own) has hundreds of units of some kilobytes, and these
milliseconds are its step. Whether a unit is read 4 KiB or 1 MiB at a time is all the same to a drive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.memory.sizes import parse_bytes
from tiermem.zero3.keep import nbytes_in

# Beyond this a unit is worth its trouble: it takes a drive longer than the messages.
_LARGEST = 1 << 20
# What becomes one must stay small beside the budget, however small that is: it comes and goes as a whole.
_SHARE = 128


class _Member(Protocol):
    @property
    def parameter(self) -> nn.Parameter: ...


M = TypeVar("M", bound=_Member)


@dataclass(frozen=True, eq=False, slots=True)
class Part(Generic[M]):
    """What would be a unit by itself. `apart`: a word for what it is of its root, if that has several."""

    name: str
    root: nn.Module
    members: tuple[M, ...]
    apart: str
    kept: bool


def small_nbytes(coalesce: Any, budget: int, committed: int | None = None) -> int:
    """Bytes up to which units become one: as the user says, else as `committed`, else what suits a budget in bytes.

    Raises ConfigError for what is neither "auto" nor a size.
    """
    if coalesce == "auto":
        return min(_LARGEST, budget // _SHARE) if committed is None else committed
    if isinstance(coalesce, bool) or not isinstance(coalesce, (int, str)):
        raise ConfigError(f"coalesce: expected 'auto', a size such as '1MiB', or 0, found {coalesce!r}")
    return parse_bytes(coalesce, f"coalesce={coalesce!r}: ")


def coalesced(
    parts: Sequence[Part[M]], most: int, dtype: torch.dtype | None, *, asked: Container[int]
) -> list[list[Part[M]]]:
    """The parts in their order, in groups that become one unit each and take at most `most` bytes if they are several.

    `dtype`: of floating-point parameters; None: their own. `asked`: roots, by identity, that stay units of their own.
    """
    shared = Counter(id(part.root) for part in parts)
    groups: list[list[Part[M]]] = []
    open_nbytes, open_trained = 0, None  # of the last group, if it takes more
    for part in parts:
        nbytes = sum(nbytes_in(dtype, member.parameter) for member in part.members)
        trained = {member.parameter.requires_grad for member in part.members}
        free = not part.kept and len(trained) == 1 and id(part.root) not in asked and shared[id(part.root)] == 1
        if free and groups and open_trained == trained and open_nbytes + nbytes <= most:
            groups[-1].append(part)
            open_nbytes += nbytes
        else:
            groups.append([part])
            open_nbytes, open_trained = nbytes, trained if free else None
    return groups
