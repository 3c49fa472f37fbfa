"""Locking host memory in pieces, with a runtime that refuses when the test says so."""

import warnings

import pytest
import torch

from tiermem.errors import CapacityError
from tiermem.memory.arena import FRAME_ALIGNMENT
from tiermem.memory.pagelock import HostSlab, PageLock
from tiermem.memory.slab import SlabArena
from tiermem.memory.tiers import Tier

UNIT = FRAME_ALIGNMENT


class Answer(int):
    """As the runtime's error codes: an int whose own text says nothing."""

    def __str__(self) -> str:
        return "cudaError.success" if self == 0 else "cudaError.???"


class Runtime:
    """Counts locked ranges and refuses beyond a limit, as `ulimit -l` does."""

    def __init__(self, limit: int = 1 << 60, stubborn: bool = False) -> None:
        self.limit, self.stubborn = limit, stubborn
        self.locked: dict[int, int] = {}
        self.unlocked: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Answer:  # noqa: N802
        assert flags == 1
        if sum(self.locked.values()) + nbytes > self.limit:
            return Answer(2)
        self.locked[address] = nbytes
        return Answer(0)

    def cudaHostUnregister(self, address: int) -> Answer:  # noqa: N802
        if self.stubborn:
            return Answer(7)
        del self.locked[address]
        self.unlocked.append(address)
        return Answer(0)

    def cudaGetErrorString(self, answer: Answer) -> str:  # noqa: N802
        return f"error {int(answer)} in words"


@pytest.mark.parametrize("nbytes", [1, 4, 10, 12])
def test_pieces_cover_the_range_exactly(nbytes: int) -> None:
    runtime = Runtime()
    lock = PageLock(runtime, 100, nbytes, piece=4)
    assert lock.nbytes == nbytes
    assert lock.refusal is None
    covered = [at for start, length in runtime.locked.items() for at in range(start, start + length)]
    assert covered == list(range(100, 100 + nbytes))
    assert max(runtime.locked.values()) <= 4
    lock.release()
    lock.release()
    assert runtime.locked == {}
    assert len(runtime.unlocked) == -(-nbytes // 4)


def test_the_first_refusal_ends_it_and_what_was_locked_stays() -> None:
    runtime = Runtime(limit=9)
    lock = PageLock(runtime, 0, 20, piece=4)
    assert (lock.nbytes, lock.refusal) == (8, "error 2 in words")
    lock.release()
    assert runtime.locked == {}


def test_a_piece_that_is_not_given_up_is_an_error() -> None:
    lock = PageLock(Runtime(stubborn=True), 0, 8, piece=4)
    with pytest.raises(CapacityError, match="2 of 2 pieces"):
        lock.release()


def test_a_slab_is_locked_and_its_frames_are_for_files_and_tensors() -> None:
    runtime = Runtime()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slab = HostSlab(8 * UNIT, runtime, piece=4 * UNIT)
    assert slab._lock.nbytes == 8 * UNIT == sum(runtime.locked.values())
    arena = SlabArena(slab, Tier.HOST, poison=True)
    frame = arena.allocate(UNIT + 5)
    assert frame is not None
    start = min(runtime.locked)
    assert frame.tensor.data_ptr() == start + frame.offset
    assert frame.tensor.data_ptr() % 4096 == 0
    frame.buffer[3] = 9
    assert int(frame.tensor[3]) == 9
    assert arena.fence() is None
    view = frame.tensor[:5]
    arena.close()
    assert runtime.locked == {}
    assert int(view[3]) == 9, "it lives on, unlocked"


@pytest.mark.parametrize(("limit", "of_locked"), [(0, []), (4 * UNIT, [2 * UNIT]), (7 * UNIT, [2 * UNIT])])
def test_what_cannot_be_locked_works_with_one_warning_that_names_the_cost(limit: int, of_locked: list[int]) -> None:
    """CUDA refuses a copy that goes across the edge of a piece: only within one is it measured."""
    asked: list[int] = []

    def measure(part: torch.Tensor) -> float:
        asked.append(part.numel())
        return 2e9 if len(asked) == 1 else 24e9

    with pytest.warns(UserWarning, match=r"page-locked \(error 2 in words\).*2\.0 GB/s") as caught:
        slab = HostSlab(8 * UNIT, Runtime(limit), piece=2 * UNIT, measure=measure)
    assert len(caught) == 1
    assert ("24.0 GB/s" in str(caught[0].message)) == bool(limit)
    locked = limit // (2 * UNIT) * 2 * UNIT
    assert slab._lock.nbytes == locked
    assert asked == [8 * UNIT - locked, *of_locked]
    assert SlabArena(slab, Tier.HOST).allocate(8 * UNIT) is not None
    slab.close()


def test_the_edges_of_pieces_are_told() -> None:
    assert PageLock(Runtime(), 100, 10, piece=4).edges == (4, 8)
    assert PageLock(Runtime(), 100, 8, piece=4).edges == (4,)
    assert PageLock(Runtime(limit=9), 0, 20, piece=4).edges == (4, 8), "and where it stops"
    assert PageLock(Runtime(limit=0), 0, 20, piece=4).edges == ()
    assert HostSlab(UNIT).edges == ()
    slab = HostSlab(8 * UNIT, Runtime(), piece=3 * UNIT)
    assert slab.edges == (3 * UNIT, 6 * UNIT)
    slab.close()


def test_nothing_stays_locked_where_the_warning_is_an_error() -> None:
    """The system would give the same addresses to others, and the driver take those for the memory that is gone."""
    runtime = Runtime(limit=4 * UNIT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="page-locked"):
            HostSlab(8 * UNIT, runtime, piece=4 * UNIT)
    assert runtime.locked == {}


@pytest.mark.parametrize("is_locked", [True, False])
def test_an_interrupt_amid_the_locking_leaves_nothing_locked(is_locked: bool) -> None:
    """As above. It comes before the runtime is asked for the third piece, or just behind that."""

    class Interrupted(Runtime):
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Answer:  # noqa: N802
            if len(self.locked) == 2:
                if is_locked:
                    super().cudaHostRegister(address, nbytes, flags)
                raise KeyboardInterrupt
            return super().cudaHostRegister(address, nbytes, flags)

        def cudaHostUnregister(self, address: int) -> Answer:  # noqa: N802
            return super().cudaHostUnregister(address) if address in self.locked else Answer(1)

    runtime = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        HostSlab(8 * UNIT, runtime, piece=2 * UNIT)
    assert runtime.locked == {}
