"""Host memory in one piece, page-locked so that a device can reach it at full speed and beside the computation.

Owns an anonymous mapping of exactly the size asked for, and which part of it the driver has locked. Does not know
frames' owners, or CUDA beyond three functions of its runtime, which it is given. Guarantees that what cannot be locked
is ordinary memory that works just as well, only slower, that there is one warning about it, and that everything is
unlocked before it is given back.

No power-of-two rounding: torch's own pinned allocator rounds up, which for a large budget can cost as much again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tiermem.errors import CapacityError
from tiermem.memory import numa
from tiermem.memory.arena import Frame
from tiermem.memory.mapping import Mapping, tensor_over
from tiermem.memory.sizes import format_bytes

# What is locked by one call: a refused one leaves the pieces before it locked, and the driver is not kept from other
# work for long.
PIECE = 1 << 30
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context of the process


class HostRegistry(Protocol):
    """Three functions of the CUDA runtime, as `torch.cuda.cudart()` has them; zero is success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> object:  # noqa: N802 - their name
        """Lock a range."""

    def cudaHostUnregister(self, address: int) -> object:  # noqa: N802 - their name
        """Unlock the range that begins there."""

    def cudaGetErrorString(self, answer: Any) -> str:  # noqa: N802 - their name
        """What an answer means; its own text says "???" for all but success."""


class PageLock:
    """A range of addresses locked in pieces, the first ones first, up to the first that is refused.

    Attributes:
        nbytes: how many bytes are locked.
        refusal: the runtime's answer to the piece that was refused; None if there was none.
        edges: where a piece ends and another one, or what stays unlocked, begins: bytes from the start, ascending.
    """

    def __init__(self, registry: HostRegistry, address: int, nbytes: int, *, piece: int = PIECE) -> None:
        self.nbytes = 0
        self.refusal: str | None = None
        self.edges: tuple[int, ...] = ()
        self._registry = registry
        self._pieces: list[int] = []
        try:
            while self.nbytes < nbytes and self.refusal is None:
                self._lock(address + self.nbytes, min(piece, nbytes - self.nbytes))
                self.edges += (self.nbytes,) if self.nbytes < nbytes and self.refusal is None else ()
        except BaseException:
            # An interrupt: a GiB takes a moment, and what stays locked would be so for whoever is next.
            with contextlib.suppress(CapacityError):  # of the piece that the interrupt came amid
                self.release()
            raise

    def _lock(self, address: int, nbytes: int) -> None:
        self._pieces.append(address)  # first: an interrupt may come as soon as it is locked
        answer = self._registry.cudaHostRegister(address, nbytes, _PORTABLE)
        if failed(answer):
            self._pieces.pop()
            self.refusal = self._registry.cudaGetErrorString(answer)
        else:
            self.nbytes += nbytes

    def release(self) -> None:
        """Unlock everything. Raises CapacityError, after trying all, if a piece is not given up. Idempotent."""
        pieces, self._pieces, self.nbytes = self._pieces, [], 0
        kept = [piece for piece in pieces if failed(self._registry.cudaHostUnregister(piece))]
        if kept:
            raise CapacityError(f"{len(kept)} of {len(pieces)} pieces of host memory could not be unlocked")


class HostSlab:
    """Host memory for a `SlabArena`: `Slab` over one mapping, locked as far as it goes.

    `registry` None: nothing is locked, as for a simulated device. `measure(tensor)` gives bytes per second of copies
    from or to memory like `tensor`; it is asked where a part stays unlocked, for the warning. `node`: the NUMA node to
    prefer (`memory/numa.py`), None: the system's choice. Raises CapacityError if the system has no room for the
    addresses.

    Attributes:
        node: the one that is preferred; None if none was asked for, or the system refused (`tiermem doctor` says why).
    """

    def __init__(
        self,
        nbytes: int,
        registry: HostRegistry | None = None,
        *,
        piece: int = PIECE,
        measure: Callable[[torch.Tensor], float] | None = None,
        node: int | None = None,
    ) -> None:
        self.nbytes = nbytes
        try:
            self._mapping = Mapping(nbytes, huge=True)
        except OSError as error:
            raise CapacityError(
                f"the system denied {format_bytes(nbytes)} of host memory ({error}); lower host_memory"
            ) from error
        self.node = None if node is None else self._placed(node)  # before anything touches the pages
        self._lock: PageLock | None = None
        if registry is not None:
            whole = tensor_over(self._mapping.buffer(0, nbytes))
            self._lock = PageLock(registry, whole.data_ptr(), nbytes, piece=piece)
            if self._lock.refusal is not None:
                try:
                    _warn(self._lock, whole, measure)
                except BaseException:  # where warnings are errors: addresses that stay locked are not to be used again
                    del whole
                    self.close()
                    raise

    @property
    def edges(self) -> tuple[int, ...]:
        """The offsets that no single copy from or to a device may go across: see `PageLock`."""
        return () if self._lock is None else self._lock.edges

    def _placed(self, node: int) -> int | None:
        try:
            return node if numa.prefer(self._mapping.address, self.nbytes, node) else None
        except OSError:  # slower copies are no reason not to train
            return None

    def frame(self, offset: int, asked: int, nbytes: int) -> Frame:
        """See `Slab`."""
        buffer = self._mapping.buffer(offset, nbytes)
        return Frame(offset, asked, tensor_over(buffer), buffer)

    def fill(self, frame: Frame, value: int) -> None:
        """Set every byte of the frame."""
        frame.tensor.fill_(value)

    def fence(self) -> None:
        """None: nobody works on host memory behind the pager's back."""

    def close(self) -> None:
        """Unlock and unmap; tensors that still look at the memory keep it, unlocked."""
        try:
            if self._lock is not None:
                self._lock.release()
        finally:
            self._mapping.close()


def failed(answer: object) -> bool:
    """Whether the runtime's answer is an error."""
    return int(answer) != 0  # type: ignore[call-overload, no-any-return]


def _warn(lock: PageLock, whole: torch.Tensor, measure: Callable[[torch.Tensor], float] | None) -> None:
    """Say once what stays unlocked and what that costs, measured on this machine."""
    cost = ""
    if measure is not None:
        unlocked = measure(whole[lock.nbytes :])
        cost = f" Copies to and from the rest were measured at {unlocked / 1e9:.1f} GB/s"
        # Of the first piece: no copy goes across the edge of one.
        cost += f", from locked memory at {measure(whole[: lock.edges[0]]) / 1e9:.1f} GB/s." if lock.edges else "."
    warnings.warn(
        f"only {format_bytes(lock.nbytes)} of {format_bytes(whole.numel())} of host memory could be page-locked "
        f"({lock.refusal}): the rest works, but slower.{cost} See `ulimit -l`, or lower host_memory",
        stacklevel=2,
    )
