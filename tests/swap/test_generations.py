"""Generations: a state machine against a model that keeps the bytes of every copy, and the edges by hand."""

import os
from pathlib import Path
from typing import Any

import pytest
from doubles_combinations import number_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

import swap
from swap import Extent, SwapError, SwapFullError
from swap.extents import ExtentAllocator, Piece
from swap.generations import Generations, Mark
from swap.spares import Spares

UNIT = 4096


class PaperSpace:
    """The part of a space that hands out extents, with the bytes in them: nothing is on disk."""

    def __init__(self, nbytes: int) -> None:
        self.allocator = ExtentAllocator(nbytes)
        self.contents: dict[int, str] = {}

    def allocate(self, nbytes: int) -> Extent:
        offset = self.allocator.allocate(nbytes)
        if offset is None:
            raise SwapFullError("full")
        return Extent((Piece(0, offset, nbytes),))

    def free(self, extent: Extent) -> None:
        for piece in extent.pieces:
            self.allocator.free(piece.offset, piece.nbytes)

    def claim(self, extent: Extent) -> None:
        for piece in extent.pieces:
            if not self.allocator.claim(piece.offset, piece.nbytes):
                raise SwapError("in use")

    def write(self, extent: Extent, value: str) -> None:
        for piece in extent.pieces:
            for unit in range(piece.offset, piece.offset + piece.nbytes, UNIT):
                self.contents[unit] = value

    def read(self, extent: Extent) -> set[str]:
        return {
            self.contents[unit]
            for piece in extent.pieces
            for unit in range(piece.offset, piece.offset + piece.nbytes, UNIT)
        }


def make(units: int = 64) -> tuple[PaperSpace, Generations]:
    space = PaperSpace(units * UNIT)
    return space, Generations(space)  # type: ignore[arg-type]


class GenerationsMachine(RuleBasedStateMachine):
    """Values are written to the extents handed out; whatever the model says is protected must stay what it was."""

    marks = Bundle("marks")

    def __init__(self) -> None:
        super().__init__()
        self.space, self.generations = make(24)
        self.model: dict[str, str] = {}
        self.frozen: dict[Mark, dict[str, str]] = {}
        self.writing: dict[str, Extent] = {}
        self.torn: set[str] = set()
        self.count = 0

    @rule(key=st.sampled_from("abcde"), units=st.integers(1, 3))
    def start(self, key: str, units: int) -> None:
        if key in self.writing:
            assert self.generations.extent_for_write(key, self.writing[key].nbytes) == self.writing[key]
            return
        before = self.generations.statistics()
        try:
            extent = self.generations.extent_for_write(key, units * UNIT - 5)
        except SwapFullError:
            after = self.generations.statistics()
            assert (after.current, after.marked, after.writing, after.spare) == (
                before.current,
                before.marked,
                before.writing,
                0,
            )
            return
        assert extent.nbytes == units * UNIT
        self.writing[key] = extent
        if key in self.model and self.generations._current[key].extent == extent:
            del self.model[key]
            self.torn.add(key)
        self.space.write(extent, "half")

    @rule(key=st.sampled_from("abcde"))
    def end(self, key: str) -> None:
        if key in self.writing:
            self.count += 1
            extent = self.writing.pop(key)
            self.space.write(extent, f"{key}{self.count}")
            self.generations.written(key, extent, self.count)
            self.model[key] = f"{key}{self.count}"
            self.torn.discard(key)

    @rule(key=st.sampled_from("abcde"))
    def fail(self, key: str) -> None:
        if key in self.writing:
            self.generations.failed(key, self.writing.pop(key))

    @rule(key=st.sampled_from("abcde"))
    def forget(self, key: str) -> None:
        if key in self.writing:
            with pytest.raises(SwapError, match="not ended"):
                self.generations.forget(key)
        else:
            self.generations.forget(key)
            self.model.pop(key, None)
            self.torn.discard(key)

    @precondition(lambda self: len(self.frozen) < 4)
    @rule(target=marks)
    def mark(self) -> Any:
        if self.torn:
            with pytest.raises(SwapError, match="no mark can be made"):
                self.generations.mark()
            return None
        mark = self.generations.mark()
        self.frozen[mark] = dict(self.model)
        return mark

    @rule(mark=marks)
    def release(self, mark: Mark | None) -> None:
        if mark is None:
            return
        if mark not in self.frozen:
            with pytest.raises(SwapError, match="released"):
                self.generations.release(mark)
        else:
            self.generations.release(mark)
            del self.frozen[mark]

    @rule(mark=marks)
    def restore(self, mark: Mark | None) -> None:
        if mark not in self.frozen or mark is None:
            return
        if self.writing:
            with pytest.raises(SwapError, match="not ended"):
                self.generations.restore(mark)
        else:
            self.generations.restore(mark)
            self.model = dict(self.frozen[mark])
            self.torn.clear()

    @precondition(lambda self: len(self.frozen) < 4)
    @rule(target=marks)
    def mark_nothing(self) -> Any:
        mark = self.generations.mark(empty=True)
        self.frozen[mark] = {}
        return mark

    @rule(mark=marks, key=st.sampled_from("abcde"))
    def protect(self, mark: Mark | None, key: str) -> None:
        if mark not in self.frozen or mark is None:
            return
        if key not in self.model:
            with pytest.raises(SwapError, match="no whole copy"):
                self.generations.protect(mark, key)
        elif key in self.frozen[mark] and mark.copies[key] is not self.generations.current(key):
            with pytest.raises(SwapError, match="protected once"):
                self.generations.protect(mark, key)
        else:
            self.generations.protect(mark, key)
            self.frozen[mark][key] = self.model[key]

    @rule(mark=marks, key=st.sampled_from("abcde"))
    def restore_one(self, mark: Mark | None, key: str) -> None:
        if mark not in self.frozen or mark is None:
            return
        if key in self.writing or key not in self.frozen[mark]:
            with pytest.raises(SwapError, match=r"not ended|no copy of it"):
                self.generations.restore(mark, key)
        else:
            self.generations.restore(mark, key)
            self.model[key] = self.frozen[mark][key]
            self.torn.discard(key)

    @rule()
    def trim(self) -> None:
        self.generations.trim()

    @invariant()
    def bytes_are_what_was_written(self) -> None:
        for key, value in self.model.items():
            assert self.space.read(self.generations.current(key).extent) == {value}
            assert self.generations.current(key).checksum == int(value[1:])
        for key in set("abcde") - self.model.keys():
            with pytest.raises(SwapError, match="no whole copy"):
                self.generations.current(key)
        for mark, values in self.frozen.items():
            assert {key: self.space.read(copy.extent) for key, copy in mark.copies.items()} == {
                key: {value} for key, value in values.items()
            }

    @invariant()
    def nothing_leaks(self) -> None:
        found = self.generations.statistics()
        assert self.space.allocator.allocated == found.current + found.marked + found.writing + found.spare

    def teardown(self) -> None:
        for mark in self.frozen:
            self.generations.release(mark)
        for key, extent in self.writing.items():
            self.generations.failed(key, extent)
        for key in "abcde":
            self.generations.forget(key)
        assert self.space.allocator.allocated == 0


TestGenerationsMachine = GenerationsMachine.TestCase
TestGenerationsMachine.settings = settings(
    max_examples=number_of(25, 60), stateful_step_count=40, suppress_health_check=list(HealthCheck)
)


def write(generations: Generations, key: str, nbytes: int = UNIT, checksum: int = 1) -> Extent:
    extent = generations.extent_for_write(key, nbytes)
    generations.written(key, extent, checksum)
    return extent


def test_one_mark_at_a_time_means_two_slots_in_turn() -> None:
    space, generations = make()
    slots = []
    mark = None
    for _ in range(6):
        slots.append(write(generations, "a"))
        assert write(generations, "a") == slots[-1]  # again within the generation: the same extent
        fresh = generations.mark()
        if mark is not None:
            generations.release(mark)
        mark = fresh
    assert slots[0::2] == [slots[0]] * 3
    assert slots[1::2] == [slots[1]] * 3
    assert (slots[0].slot, slots[1].slot) == (0, 1)
    assert slots[0].pieces != slots[1].pieces
    assert space.allocator.high_water == 2 * UNIT
    assert generations.trim() == UNIT
    assert write(generations, "a").slot == 0, "in turn without a spare, too"


def test_undo_goes_back_and_the_other_slot_is_used_again() -> None:
    _, generations = make()
    first = write(generations, "a", checksum=1)
    mark = generations.mark()
    second = write(generations, "a", checksum=2)
    write(generations, "new")
    generations.restore(mark)
    assert generations.current("a").checksum == 1
    assert generations.current("a").extent == first
    with pytest.raises(SwapError, match="no whole copy of 'new'"):
        generations.current("new")
    assert write(generations, "a", checksum=3) == second  # redone from the old slot, into the other


def test_undo_brings_back_what_was_forgotten_and_nobody_misses_what_came_since() -> None:
    space, generations = make()
    write(generations, "a")
    other, mark = generations.mark(empty=True), generations.mark()
    generations.forget("a")
    write(generations, "new")
    generations.failed("new", generations.extent_for_write("new", UNIT))
    extent = generations.extent_for_write("newer", UNIT)
    with pytest.raises(SwapError, match="1 writes have not ended, such as that of 'newer'"):
        generations.restore(mark)
    generations.failed("newer", extent)
    generations.restore(mark)
    assert generations.current("a") is mark.copies["a"]
    generations.release(other)
    generations.release(generations.mark())
    write(generations, "a")
    assert generations.spares(mark) == []
    later = generations.mark()
    renewed = generations.mark()
    write(generations, "a")
    assert generations.spares(renewed) == [("a", mark.copies["a"].extent)], "not what it holds itself with another"
    for each in (mark, later, renewed):
        generations.release(each)
    assert generations.statistics().spare > 0
    generations.forget("a")
    assert space.allocator.allocated == 0


def test_a_failed_write_in_place_loses_the_key_until_it_is_written_again() -> None:
    _, generations = make()
    write(generations, "a")
    generations.failed("a", generations.extent_for_write("a", UNIT))
    with pytest.raises(SwapError, match="no whole copy"):
        generations.current("a")
    with pytest.raises(SwapError, match=r"1 keys are spoilt.*'a'"):
        generations.mark()
    generations.release(generations.mark(empty=True))
    write(generations, "a")
    generations.release(generations.mark())
    generations.failed("a", generations.extent_for_write("a", UNIT))
    generations.forget("a")
    generations.mark()  # or until nobody asks for it


def test_a_full_space_names_the_marks_and_changes_nothing() -> None:
    space, generations = make(3)
    write(generations, "a", 2 * UNIT)
    mark = generations.mark()
    with pytest.raises(SwapFullError, match=r"1 marks hold copies.*commit before more is written"):
        generations.extent_for_write("a", 2 * UNIT)
    generations.release(mark)
    write(generations, "a", 2 * UNIT)
    assert space.allocator.allocated == 2 * UNIT


def test_a_key_keeps_two_spares_and_is_given_none_of_another_size() -> None:
    space = PaperSpace(8 * UNIT)
    spares = Spares(space)  # type: ignore[arg-type]
    extents = [space.allocate(UNIT) for _ in range(3)]
    for extent in extents:
        spares.give("a", extent)
    assert spares.nbytes == space.allocator.allocated == 2 * UNIT
    assert spares.take("a", UNIT) == extents[1]
    assert list(spares.items()) == [("a", extents[0])]
    assert spares.take("a", 2 * UNIT) is None
    assert (spares.nbytes, space.allocator.allocated) == (0, UNIT), "what was of another size is the space's again"


def test_spares_are_given_up_when_others_need_the_room() -> None:
    _, generations = make(4)
    write(generations, "a", 2 * UNIT)
    mark = generations.mark()
    write(generations, "a", 2 * UNIT)
    generations.release(mark)
    assert generations.statistics().spare == 2 * UNIT
    write(generations, "b", 2 * UNIT)
    assert generations.statistics().spare == 0


def test_spares_are_given_up_for_what_has_no_generations() -> None:
    space, generations = make(4)
    write(generations, "a", 2 * UNIT)
    mark = generations.mark()
    write(generations, "a", 2 * UNIT)
    with pytest.raises(SwapFullError, match=r"1 marks hold copies.*commit before more is written"):
        generations.allocate(UNIT)
    generations.release(mark)
    extent = generations.allocate(2 * UNIT)
    assert generations.statistics().spare == 0
    space.free(extent)
    assert space.allocator.allocated == 2 * UNIT


def test_a_committed_step_and_one_that_may_be_undone_need_three_copies_and_no_new_room() -> None:
    """Steady state: a mark that stays, and one that comes and goes with each write."""
    space, generations = make(6)
    for key in "ab":
        write(generations, key)
    committed = generations.mark()
    assert generations.alive() == 1
    for _ in range(5):
        undo = generations.mark(empty=True)
        for key in "ab":
            generations.protect(undo, key)
            write(generations, key)
        assert generations.alive() <= 3
        generations.release(undo)
        assert generations.alive() == 2
    assert space.allocator.allocated == 6 * UNIT
    beside = generations.mark()  # a snapshot, say; it holds the same copies
    renewed = generations.mark()
    for key in "ab":
        write(generations, key)
        generations.restore(renewed, key)
    spares = generations.spares(renewed)
    generations.release(beside)
    assert sorted(key for key, _ in spares) == ["a", "a", "b", "b"]
    generations.release(committed)
    assert generations.alive() == 1
    assert generations.statistics().spare == 4 * UNIT
    again = Generations(space)
    for _, extent in spares:
        space.free(extent)
    entries = [swap.Entry(str(key), copy.extent, 1) for key, copy in renewed.copies.items()]
    for entry in entries:
        space.free(entry.extent)
    again.adopt(entries, spares=[(str(key), extent) for key, extent in spares])
    assert again.statistics().spare == 4 * UNIT
    assert space.allocator.allocated == 6 * UNIT


def test_misuse_is_told() -> None:
    space, generations = make()
    extent = generations.extent_for_write("a", UNIT)
    with pytest.raises(SwapError, match="is not ended; found one of 8192"):
        generations.extent_for_write("a", 2 * UNIT)
    with pytest.raises(SwapError, match="hold nothing yet"):
        generations.adopt([])
    with pytest.raises(SwapError, match="expected the end of the write of 'a'"):
        generations.written("a", Extent((Piece(0, 5 * UNIT, UNIT),)))
    with pytest.raises(SwapError, match="expected the end of the write of 'b'"):
        generations.failed("b", extent)
    generations.written("a", extent)
    assert generations.extent_for_write("a", UNIT) == extent
    with pytest.raises(SwapError, match="its last write has not ended"):
        generations.current("a")
    with pytest.raises(SwapError, match=r"1 keys are being overwritten.*'a'"):
        generations.mark()
    generations.written("a", extent)
    mark = generations.mark()
    with pytest.raises(SwapError, match="expected a checksum of its bytes"):
        mark.entries()
    with pytest.raises(SwapError, match="hold nothing yet"):
        generations.adopt([])
    undo = generations.mark(empty=True)
    generations.protect(undo, "a")
    generations.written("a", generations.extent_for_write("a", UNIT))
    with pytest.raises(SwapError, match="protected once"):
        generations.protect(undo, "a")
    generations.release(undo)
    generations.restore(mark)
    generations.release(mark)
    with pytest.raises(SwapError, match="has been released"):
        generations.restore(mark)
    with pytest.raises(SwapError, match="has been released"):
        generations.protect(mark, "a")
    generations.trim()
    assert space.allocator.allocated == UNIT


def test_a_commit_is_adopted_or_nothing_is_claimed(tmp_path: Path) -> None:
    with swap.SwapSpace.open([tmp_path], name="r0", nbytes=1 << 20) as space:
        generations = Generations(space)
        for key in "abc":
            write(generations, key, 2 * UNIT, checksum=7)
        entries = generations.mark().entries()
    with swap.SwapSpace.open([tmp_path], name="r0", nbytes=1 << 20, keep=True) as space:
        generations = Generations(space)
        with pytest.raises(SwapError, match="cannot be claimed"):
            generations.adopt([*entries, swap.Entry("d", entries[0].extent, 1)])
        with pytest.raises(SwapError, match="'a' is there twice"):
            generations.adopt([*entries, entries[0]])
        with pytest.raises(KeyError):
            generations.adopt(entries[:1], {"a": 0}.__getitem__, spares=[("b", entries[1].extent)])
        assert space.statistics().allocated == 0
        mark = generations.adopt(entries)
        assert generations.current("b").checksum == 7
        assert write(generations, "b", 2 * UNIT).pieces != mark.copies["b"].extent.pieces
    assert os.listdir(tmp_path)


def test_keys_may_be_anything_that_can_be_named(tmp_path: Path) -> None:
    with swap.SwapSpace.open([tmp_path], name="r0", nbytes=1 << 20) as space:
        generations = Generations(space)
        extent = generations.extent_for_write((3, "STATE"), UNIT)
        generations.written((3, "STATE"), extent, 5)
        entries = generations.mark().entries(lambda key: "/".join(map(str, key)))
        assert [entry.key for entry in entries] == ["3/STATE"]
    with swap.SwapSpace.open([tmp_path], name="r0", nbytes=1 << 20, keep=True) as space:
        generations = Generations(space)
        generations.adopt(entries, lambda text: (int(text.split("/")[0]), text.split("/")[1]))
        assert generations.current((3, "STATE")).checksum == 5


def test_completion_threads_and_a_loop_that_marks(tmp_path: Path) -> None:
    """Real transfers that end on worker threads, while this thread marks, releases and undoes."""
    settings = swap.EngineSettings(block_size=UNIT, queue_depth=4)
    keys = [f"key{index}" for index in range(16)]
    with swap.SwapSpace.open([tmp_path], name="r0", nbytes=8 << 20, settings=settings) as space:
        generations = Generations(space)
        buffers = {key: swap.AlignedBuffer(8 * UNIT) for key in keys}
        mark: Mark | None = None
        for step in range(40):
            requests = []
            for key, buffer in buffers.items():
                buffer.view[:8] = step.to_bytes(8, "little")
                extent = generations.extent_for_write(key, buffer.nbytes)

                def done(request: swap.Request, key: str = key, extent: Extent = extent) -> None:
                    generations.written(key, extent, request.checksum)

                requests.append(space.start_write(extent, buffer.view, checksum=True, on_done=done))
            for request in requests:
                request.wait(30)
            if step % 5 == 4 and mark is not None:
                generations.restore(mark)
            fresh = generations.mark()
            if mark is not None:
                generations.release(mark)
            mark = fresh
            assert swap.verify(space, mark.entries()) == []
        found = generations.statistics()
        assert found.keys == 16
        assert space.statistics().allocated == found.current + found.marked + found.spare <= 2 * 16 * 8 * UNIT


def test_what_two_marks_hold_is_to_spare_once() -> None:
    """A commit says what there is to spare, and a resume claims it: twice would be an error."""
    _, generations = make()
    first = write(generations, "a")
    marks = [generations.mark(), generations.mark()]
    write(generations, "a")
    last = generations.mark()
    assert generations.spares(last) == [("a", first)]
    for mark in (*marks, last):
        generations.release(mark)


def test_of_a_commit_that_cannot_be_adopted_nothing_is_claimed() -> None:
    space, generations = make()
    current, spare = (Extent((Piece(0, number * UNIT, UNIT),)) for number in range(2))
    with pytest.raises(SwapError, match="in use"):
        generations.adopt([swap.Entry("a", current, 1)], spares=[("a", spare), ("a", spare)])
    assert space.allocator.allocated == 0
    generations.release(generations.adopt([swap.Entry("a", current, 1)], spares=[("a", spare)]))
