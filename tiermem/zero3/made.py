"""Which tensors, of those made while somebody watches, have values; the memory that a parameter was made of.

Owns the watch on what is computed. Does not know parameters or modules. Guarantees that memory which nobody has written
is not taken for values: what was made out of sight, or of such memory, has none as far as is known here.

`nn.Parameter(torch.ones(n))` has its values from the start and needs no `reset_parameters`;
`nn.Parameter(torch.empty(n))` waits for one. The parameters look the same, and so may their elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

# These give memory that nobody has written.
_BARE = ("aten::empty", "aten::new_empty", "aten::_empty")
_ANOTHER_STORAGE = ("aten::resize", "aten::set_")
# From what is no tensor (a list, numpy), and from nothing but the form of a tensor.
_FROM_OUTSIDE = "aten::lift_fresh"
_OF_A_FORM = frozenset(
    f"aten::{name}"
    for name in ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full")
)


class ValueWatch:
    """Told of every operation, on one thread."""

    def __init__(self) -> None:
        # By address; the weak reference sees to it that no other storage gets the same one.
        self._written: dict[int, StorageWeakRef] = {}
        self._limit = 1 << 10

    def computed(self, name: str, given: Any, result: Any) -> None:
        """The operation `name`, which writes into none of its arguments, has returned this."""
        if name.startswith(_BARE):
            return
        if name == _FROM_OUTSIDE or name in _OF_A_FORM or all(self.has_values(each) for each in _tensors(given)):
            for each in _tensors(result):
                self._note(each)

    def wrote(self, target: torch.Tensor, name: str, given: Any, *, whole: bool) -> None:
        """The operation `name`, given these arguments, has written into `target`; `whole`: with nothing left of it."""
        others = (each for each in _tensors(given) if each is not target)
        if name.startswith(_ANOTHER_STORAGE) or not all(self.has_values(each) for each in others):
            self._written.pop(memory_of(target), None)
        elif whole and target.numel() * target.itemsize == target.untyped_storage().nbytes():
            self._note(target)

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether all of the tensor's memory is known to have been written."""
        return memory_of(tensor) in self._written

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or not memory_of(tensor) or self.has_values(tensor):
            return
        self._written[memory_of(tensor)] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        if len(self._written) > self._limit:
            self._written = {key: each for key, each in self._written.items() if not each.expired()}  # type: ignore[no-untyped-call]
            self._limit = max(self._limit, 2 * len(self._written))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_iter(tree) if isinstance(each, torch.Tensor))


def memory_of(tensor: torch.Tensor) -> int:
    """What tells the tensor's storage from all others that live; 0: it has none, as sparse ones."""
    if tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no other way to tell storages apart


@dataclass(frozen=True, slots=True)
class Source:
    """The memory that a parameter was made of, or that its `.data` became; in plain PyTorch it would lie there.

    `stride` and `offset` in elements, `address` in bytes. `seen`: what is written there later is in its values.
    `bare`: the storage that it had meanwhile.
    """

    storage: StorageWeakRef
    bare: StorageWeakRef
    stride: tuple[int, ...]
    offset: int
    address: int
    seen: bool

    @staticmethod
    def of(values: torch.Tensor, bare: torch.Tensor, *, seen: bool) -> Source:
        """Where these values lie; their memory is not kept."""
        storage, other = (StorageWeakRef(each.untyped_storage()) for each in (values, bare))  # type: ignore[no-untyped-call]
        return Source(storage, other, tuple(values.stride()), int(values.storage_offset()), values.data_ptr(), seen)

    def alias(self, bare: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
        """What of `bare`, which has no memory, is `target` in this memory; None if a part of that is not in it."""
        begin = int(target.storage_offset()) - self.offset
        ends = [
            sum((n - 1) * step for n, step in zip(each.shape, each.stride(), strict=True)) for each in (bare, target)
        ]
        if bare.dtype == target.dtype and (begin > ends[0] or begin + ends[1] < 0):
            return bare.new_empty(0)
        if tuple(bare.stride()) != self.stride or bare.dtype != target.dtype or begin < 0 or begin + ends[1] > ends[0]:
            return None
        return bare.as_strided(target.shape, target.stride(), bare.storage_offset() + begin)
