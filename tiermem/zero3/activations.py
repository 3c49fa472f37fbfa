"""Saved tensors as pages: what autograd keeps from forward to backward, out of the way meanwhile.

Owns the saved-tensor hooks of `Runtime.offload_activations`, the numbering of saved storages and the pages that hold
their bytes. Does not know tiers, budgets or units: it leases pages and copies. Guarantees that backward gets the bytes
that were saved, that what was changed in place since is refused as plain PyTorch does, that a storage saved by many
nodes is kept once, and that its pages are forgotten when the last graph that wants them is gone.

Leases are short. A page is leased while its bytes are copied, never longer, so that tensors of any size pass through
the few bytes which the plan leaves beside parameters, gradients and updates. In between the pages are the pager's:
they stay in HOST or go to SWAP like all others. A copy that is still being written down is read from HOST.

Beside a device the pages are leased there: a tensor is copied from frame to frame by the device itself, in the order of
what was asked of it, so that nobody waits for it; the pager brings the bytes down and up beside the computation.

Numbers. The n-th storage alive is page n, its pieces are the tiles; a number is free again when its storage is. Hence
equal steps touch equal pages in an equal order, and the recorded order of a step says when each is needed next.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.errors import TiermemError
from tiermem.pager.lease import Lease, PendingLease
from tiermem.pager.page import Intent, Kind, PageKey
from tiermem.pager.pager import Pager
from tiermem.zero3.engine import (
    Pack,
    Unpack,
    backward_number,
    push_hooks,
    remove_hooks,
    share_versions,
    top_hooks,
    version,
)
from tiermem.zero3.handles import SavedTensorHooks, leave_to, refuse_changed
from tiermem.zero3.layout import view_bytes

# A view of less than this part of its storage is left alone: the rest of the storage is most likely somebody's who
# keeps it anyway (a batch is a slice of the data set), and would be copied for nothing.
_LEAST_PART = 8
_UNKNOWN = -1  # the size of a page that has to be made anew
_PROCESSOR = torch.device("cpu")


class _Bytes:
    """The bytes of one storage at one version, in pages; gone with the last saved tensor that refers to it."""

    __slots__ = ("__weakref__", "keys", "nbytes", "number", "shadow", "storage", "store", "version")

    def __init__(self, store: ActivationStore, number: int, keys: list[PageKey], tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.store = store
        self.number = number
        self.keys = keys
        self.nbytes = storage.nbytes()
        self.version = version(tensor)
        # Shares the version counter, but nothing else: assigning `.data` changes what a tensor holds and leaves its
        # counter alone. So a later change in place is seen here though the tensor itself is gone.
        self.shadow = tensor.detach()
        self.shadow.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        # Keeps the storage's name from being used again, not the storage.
        self.storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


class PagedTensor:
    """A saved tensor: which bytes, and how it lies in them. `offset` counts elements of `dtype`."""

    __slots__ = ("bytes", "dtype", "offset", "shape", "stride")

    def __init__(self, held: _Bytes, tensor: torch.Tensor) -> None:
        self.bytes = held
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())

    def restore(self) -> torch.Tensor:
        """The tensor again, on storage of its own; waits. Raises RuntimeError if it was changed in place since."""
        refuse_changed(self.bytes.shadow, self.bytes.version, self.shape)
        flat = self.bytes.store.read(self.bytes)
        return view_bytes(flat, self.dtype, self.offset, self.shape, self.stride)


class ActivationStore:
    """Saved storages as pages. Written and read on the compute thread; they may die on any."""

    def __init__(
        self,
        pager: Pager,
        touch: Callable[[PageKey], None],
        *,
        piece_nbytes: int,
        at_once: int,
        device: torch.device = _PROCESSOR,
    ) -> None:
        """`touch(key)` is told of every page written or read, in order; a page has `piece_nbytes` bytes at most.

        `at_once` pages are leased at one time while a tensor is read, one while it is written. `device`: where pages
        are leased; tensors that are elsewhere are none of the store's.
        """
        self.device = device
        self._pager = pager
        self._touch = touch
        self._piece = piece_nbytes
        self._at_once = at_once
        self._alive: weakref.WeakValueDictionary[tuple[int, int], _Bytes] = weakref.WeakValueDictionary()
        self._sizes: list[list[int]] = []  # of each number's pages, as the pager knows them
        self._free: list[int] = []
        self._dead: deque[int] = deque()

    @property
    def alive(self) -> int:
        """How many storages are kept now."""
        self._bury()
        return len(self._sizes) - len(self._free)

    def keep(self, tensor: torch.Tensor) -> PagedTensor:
        """Copy the tensor's storage into pages, unless that was done already; waits for room.

        Raises what the pager raises: CapacityError, swap.SwapFullError, an I/O error.
        """
        storage = tensor.untyped_storage()
        name = (int(storage._cdata), version(tensor))  # noqa: SLF001 - what StorageWeakRef compares too
        held = self._alive.get(name)
        # A GRU's gates are pieces of one storage that each count their own writes (`unsafe_chunk`): equal versions
        # of two of them do not say that nothing was written in between.
        if held is None or not share_versions(held.shadow, tensor):
            held = self._write(tensor)
            self._alive[name] = held
        return PagedTensor(held, tensor)

    def read(self, held: _Bytes) -> torch.Tensor:
        """The bytes, 1-D uint8, on storage of their own; waits. Asks for pieces ahead of the one being copied."""
        flat = torch.empty(held.nbytes, dtype=torch.uint8, device=self.device)
        pending: deque[PendingLease] = deque()
        try:
            for index, target in enumerate(self._pieces(flat)):
                ahead = held.keys[index + len(pending) : index + self._at_once]
                pending.extend(self._pager.start_lease([key], Intent.READ) for key in ahead)
                with pending.popleft().wait() as lease:
                    target.copy_(lease.tensor(held.keys[index]))
                self._touch(held.keys[index])
        except BaseException:
            self._distrust(held.number)
            raise
        finally:
            for lease_asked in pending:
                lease_asked.give_up()
        return flat

    def _died(self, number: int, keys: Sequence[PageKey]) -> None:
        """Nobody will ask for these bytes again. Called by a finalizer: on any thread, in the middle of anything."""
        self._pager.start_discard(keys)
        self._dead.append(number)

    def _write(self, tensor: torch.Tensor) -> _Bytes:
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())
        pieces = self._pieces(flat)
        number = self._place([piece.numel() for piece in pieces])
        held = _Bytes(self, number, [_key(number, tile) for tile in range(len(pieces))], tensor)
        # No `__del__`: while that runs, on whatever thread, `_alive` still gives out what it is about to forget.
        weakref.finalize(held, self._died, number, held.keys).atexit = False
        try:
            for key, piece in zip(held.keys, pieces, strict=True):
                with self._lease_fresh(key, piece.numel()) as lease:
                    lease.tensor(key).copy_(piece)
                self._touch(key)
        except BaseException:
            self._distrust(number)
            raise
        return held

    def _lease_fresh(self, key: PageKey, nbytes: int) -> Lease:
        asked = self._pager.start_lease([key], Intent.FRESH)
        try:
            return asked.wait()
        except Exception as error:
            # The page may have failed to be written down when nobody wanted it any more: try with a new one.
            if not asked.has_raised(error) or not self._pager.add_page(key, nbytes, replace=True):
                raise
            return self._pager.start_lease([key], Intent.FRESH).wait()

    def _pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[start : start + self._piece] for start in range(0, flat.numel(), self._piece)]

    def _place(self, sizes: list[int]) -> int:
        """The smallest free number whose pages have, or can be given, these sizes; a new one if there is none."""
        self._bury()
        tried: list[int] = []
        try:
            while True:
                if not self._free:
                    self._sizes.append([])  # first: an interrupt may come between, and a number without sizes is none
                    self._free.append(len(self._sizes) - 1)
                tried.append(heapq.heappop(self._free))
                if self._fit(tried[-1], sizes):
                    return tried.pop()
        finally:
            for number in tried:
                heapq.heappush(self._free, number)

    def _fit(self, number: int, sizes: list[int]) -> bool:
        """Give the number's first pages these sizes; False if an old page is still on its way to be forgotten."""
        known = self._sizes[number]
        for tile, wanted in enumerate(sizes):
            if tile < len(known) and known[tile] == wanted:
                continue
            known[tile : tile + 1] = [_UNKNOWN]
            if not self._pager.add_page(_key(number, tile), wanted, replace=True):
                return False
            known[tile] = wanted
        return True

    def _distrust(self, number: int) -> None:
        """A page of the number has failed, for good as the pager sees it: make all anew before they are used again."""
        self._sizes[number] = [_UNKNOWN] * len(self._sizes[number])

    def _bury(self) -> None:
        while self._dead:
            heapq.heappush(self._free, self._dead.popleft())


class ActivationHooks:
    """One pair of saved-tensor hooks. Covers the pair below, and passes on to it what is not kept in pages.

    `threshold`: bytes from which on a storage is kept in pages.
    """

    def __init__(self, store: ActivationStore, parameters: SavedTensorHooks, threshold: int) -> None:
        self._store = store
        self._parameters = parameters
        self._threshold = max(1, threshold)
        self._outer: tuple[Pack, Unpack] | None = None
        self._pair: tuple[Pack, Unpack] | None = None
        self._thread = threading.get_ident()

    @property
    def is_on_top(self) -> bool:
        """Whether autograd would call these hooks now."""
        top = top_hooks()
        return top is not None and self._pair is not None and top[0] is self._pair[0]

    def enter(self) -> None:
        """Put the hooks on top."""
        self._outer = top_hooks()
        self._pair = (self._pack, self._parameters.unpack)
        push_hooks(*self._pair)

    def leave(self) -> None:
        """Undo `enter`. Raises TiermemError, after that, if somebody else's hooks lie on top: they stay."""
        is_on_top = self.is_on_top
        self.abandon()
        if not is_on_top:
            raise TiermemError(
                "offload_activations was left while other saved-tensor hooks lie on top of it, or in another thread: "
                "leave what was entered inside it (torch.autograd.graph.saved_tensors_hooks) first, all on one thread"
            )

    def abandon(self) -> None:
        """Undo `enter` after an error, which may have left hooks of others on top: they stay there.

        Hooks are a thread's. In another one there are only those of others; ours stay where they are, and do nothing.
        """
        if self._pair is not None and self._thread == threading.get_ident():
            remove_hooks(self._pair[0], self._parameters.owns)
        self._pair = None  # a reference cycle as in `handles._Scope`

    def _pack(self, tensor: torch.Tensor) -> Any:
        handle = self._parameters.recognise(tensor)
        if handle is not None:
            return handle
        if self._pair is not None and self._is_worth_it(tensor):
            return self._store.keep(tensor)
        return leave_to(self._outer, tensor)

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) is not torch.Tensor
            or tensor.device != self._store.device
            or tensor.layout is not torch.strided
        ):
            return False
        if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or backward_number() >= 0:
            return False  # what is recomputed in backward is used at once
        nbytes = tensor.untyped_storage().nbytes()
        return nbytes >= self._threshold and tensor.numel() * tensor.itemsize * _LEAST_PART >= nbytes


def _key(number: int, tile: int) -> PageKey:
    return PageKey(number, Kind.ACTIVATION, tile)
