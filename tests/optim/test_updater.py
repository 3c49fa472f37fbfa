"""The queue and the stream: order, overlap, errors, and no wait without end."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import torch
from doubles_optim import FakePager, FakeProtection, add_unit, read_parameter, write_gradient, write_parameter

from tiermem.errors import ConfigError, InvariantError, TiermemError
from tiermem.future import Future
from tiermem.optim.masters import CutBuffers, StateStore
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.updater import Updater
from tiermem.optim.updates import SegmentUpdate, Settings, UnitUpdate
from tiermem.pager.page import Intent, Kind, PageKey
from tiermem.pager.tiling import TileRange

pytestmark = pytest.mark.timeout(200)

SETTINGS = Settings(0.1, 0.9, 0.95, 1e-8, 0.1, 1)


@pytest.fixture
def pager() -> Iterator[FakePager]:
    fake = FakePager()
    yield fake
    fake.close()


def make_units(
    pager: FakePager, count: int, numel: int = 5000, dtype: torch.dtype = torch.float32
) -> dict[int, UnitState]:
    units = {}
    for unit in range(count):
        state = UnitState(unit, dtype, (Segment(unit, 0, numel),), numel, 2048)
        add_unit(pager, state, frozen_numel=100)
        write_parameter(pager, state, unit, torch.ones(numel))
        write_gradient(pager, state, unit, torch.ones(numel))
        units[unit] = state
    return units


def whole(state: UnitState, **options: object) -> UnitUpdate:
    return UnitUpdate(state.unit, tuple(SegmentUpdate(s, SETTINGS) for s in state.segments), **options)


def touched(pager: FakePager) -> list[int]:
    return [key.unit for key, intent in pager.log if key.kind is Kind.PARAM]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_every_tile_is_updated_and_given_back(pager: FakePager, depth: int) -> None:
    units = make_units(pager, 2)
    updater = Updater(pager, units, depth=depth)
    for state in units.values():
        updater.start(whole(state))
    updater.wait_all()
    assert pager.held == 0
    assert pager.most_held <= 1 + 2 * depth
    for unit, state in units.items():
        assert not updater.pending(unit)
        assert (read_parameter(pager, state, unit) < 1).all()
        assert not any(pager.is_written(PageKey(unit, Kind.GRAD, k)) for k in range(state.tiles))
        assert all(pager.is_written(PageKey(unit, Kind.STATE, k)) for k in range(state.tiles))
    done = updater.statistics()
    assert (done.units, done.tiles) == (2, 6)


def test_one_tile_at_a_time_never_holds_two(pager: FakePager) -> None:
    units = make_units(pager, 1, numel=20000)
    updater = Updater(pager, units, depth=1)
    updater.start(whole(units[0]))
    updater.wait(0)
    assert pager.most_held == 3


def test_the_next_tile_is_leased_while_the_kernel_runs(pager: FakePager) -> None:
    units = make_units(pager, 1)
    pager.gate.clear()
    updater = Updater(pager, units, depth=2)
    updater.start(whole(units[0]))
    assert _eventually(lambda: pager.held == 5)
    pager.gate.set()
    updater.wait(0)


def _eventually(condition: object) -> bool:
    pause = threading.Event()
    for _ in range(12_000):  # a minute
        if condition():  # type: ignore[operator]
            return True
        pause.wait(0.005)
    return False


def test_the_first_time_starts_from_zeros_and_later_from_what_is_there(pager: FakePager) -> None:
    units = make_units(pager, 1)
    updater = Updater(pager, units)
    updater.start(whole(units[0]))
    updater.wait(0)
    write_gradient(pager, units[0], 0, torch.ones(5000))
    updater.start(whole(units[0]))
    updater.wait(0)
    intents = [intent for key, intent in pager.log if key.kind is Kind.STATE]
    assert intents == [Intent.FRESH] * 3 + [Intent.WRITE] * 3
    first, second = StateStore(pager, units).read_moments(0, 0)
    assert torch.allclose(first, torch.full((5000,), 0.19))
    assert (second > 0).all()


def test_a_tile_without_gradients_is_not_even_read(pager: FakePager) -> None:
    state = UnitState(0, torch.float32, (Segment(0, 0, 2000), Segment(1, 2048, 2000), Segment(2, 4096, 10)), 4106, 2048)
    add_unit(pager, state)
    for parameter in range(3):
        write_parameter(pager, state, parameter, torch.ones(state.segment_of(parameter).numel))
    write_gradient(pager, state, 0, torch.ones(2000))
    write_gradient(pager, state, 2, torch.ones(10))
    updater = Updater(pager, {0: state})
    updater.start(UnitUpdate(0, tuple(SegmentUpdate(state.segments[k], SETTINGS) for k in (0, 2))))
    updater.wait(0)
    assert {key.tile for key, _ in pager.log if key.kind is Kind.STATE} == {0, 2}
    assert (read_parameter(pager, state, 1) == 1).all()


def test_nothing_to_do_leases_nothing(pager: FakePager) -> None:
    units = make_units(pager, 1)
    updater = Updater(pager, units)
    updater.start(UnitUpdate(0, ()))
    updater.wait(0)
    assert pager.log == []
    assert not pager.is_written(PageKey(0, Kind.GRAD, 0))


def test_gradients_wanted_by_another_stay(pager: FakePager) -> None:
    units = make_units(pager, 1)
    updater = Updater(pager, units)
    updater.start(whole(units[0], discard_gradients=False))
    updater.wait(0)
    assert all(pager.is_written(PageKey(0, Kind.GRAD, k)) for k in range(3))


def test_what_is_queued_behind_an_update_that_runs_is_announced_at_once_and_said_twice_is_done_once(
    pager: FakePager,
) -> None:
    units = make_units(pager, 3)
    pager.gate.clear()
    updater = Updater(pager, units)
    updater.start(whole(units[0]))
    assert _eventually(lambda: touched(pager) == [0])
    for unit in (1, 2):
        update = whole(units[unit])
        updater.start(update), updater.start(update)
    assert [group[0].unit for group in pager.agenda] == [0, 1, 2]
    pager.gate.set()
    updater.wait_all()
    assert touched(pager) == [0, 1, 2]


def test_hurry_moves_a_queued_unit_to_the_front(pager: FakePager) -> None:
    units = make_units(pager, 4)
    pager.gate.clear()
    updater = Updater(pager, units)
    for state in units.values():
        updater.start(whole(state))
    assert _eventually(lambda: touched(pager) == [0])
    updater.hurry(3)
    assert all(updater.pending(unit) for unit in range(4)), "running or queued"
    assert updater.statistics().queued == 4
    pager.gate.set()
    updater.wait(3)
    updater.wait_all()
    assert touched(pager) == [0, 3, 1, 2]
    assert not any(updater.pending(unit) for unit in range(4))


def test_hurry_keeps_the_order_of_one_units_updates_and_lets_be_what_runs(pager: FakePager) -> None:
    """The first of a unit's updates leaves its gradient to the second, which would find none the other way round."""
    units = make_units(pager, 3)
    pager.gate.clear()
    updater = Updater(pager, units)
    for unit, discard in ((0, True), (1, True), (2, False), (2, False), (2, True)):
        updater.start(whole(units[unit], discard_gradients=discard))
    assert _eventually(lambda: touched(pager) == [0])
    updater.hurry(0)
    updater.hurry(2)
    pager.gate.set()
    updater.wait_all()
    assert touched(pager) == [0, 2, 2, 2, 1]


def test_only_what_is_under_a_protection_is_withdrawn_with_it(pager: FakePager) -> None:
    units = make_units(pager, 4)
    pager.gate.clear()
    updater, protection = Updater(pager, units), FakeProtection(pager)
    updater.start(whole(units[0]))
    for unit, over in ((1, None), (2, protection), (3, FakeProtection(pager))):
        updater.start(whole(units[unit], protection=over))
    assert _eventually(lambda: touched(pager) == [0])
    assert updater.withdraw(protection) == [], "none of these has begun"
    assert not updater.pending(2)
    pager.gate.set()
    updater.wait_all()
    assert touched(pager) == [0, 1, 3]


@pytest.mark.parametrize("kind", list(Kind)[:3])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_of_a_page_is_raised_to_who_waits_and_other_units_go_on(
    pager: FakePager, kind: Kind, depth: int
) -> None:
    units = make_units(pager, 3)
    pager.faults[PageKey(1, kind, 0 if kind is Kind.PARAM else 1)] = OSError("bad block")
    updater = Updater(pager, units, depth=depth)
    for state in units.values():
        updater.start(whole(state))
    for _ in range(2):  # not only the first time
        with pytest.raises(OSError, match="bad block"):
            updater.wait(1)
    with pytest.raises(OSError, match="bad block"):
        updater.wait_all()
    updater.wait(0)
    updater.wait(2)
    assert (read_parameter(pager, units[2], 2) < 1).all()
    assert pager.held == 0
    assert updater.pending(1)
    with pytest.raises(OSError, match="bad block"):
        updater.raise_failed()


@pytest.mark.parametrize("ask", ["wait", "raise_failed"])
def test_an_error_that_is_kept_keeps_nothing_of_who_was_told(pager: FakePager, ask: str) -> None:
    """Whoever waits does so amid a forward: its frames have activations and views of parameters."""
    units = make_units(pager, 1)
    pager.faults[PageKey(0, Kind.PARAM)] = OSError("bad block")
    updater = Updater(pager, units)
    updater.start(whole(units[0]))
    with pytest.raises(OSError, match="bad block"):
        updater.wait_all()
    seen: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        activation = torch.ones(3)
        seen.append(weakref.ref(activation))
        updater.wait(0) if ask == "wait" else updater.raise_failed()

    gc.disable()
    try:
        with contextlib.suppress(OSError):
            forward()
        assert seen[0]() is None
    finally:
        gc.enable()


def test_an_error_in_the_kernel_fails_the_tile_and_the_parameters(pager: FakePager) -> None:
    units = make_units(pager, 2)
    pager.bytes[PageKey(0, Kind.STATE, 1)] = torch.zeros(64, dtype=torch.uint8)  # too small: the kernel refuses
    updater = Updater(pager, units, depth=2)
    updater.start(whole(units[0]))
    updater.start(whole(units[1]))
    with pytest.raises(InvariantError, match="STATE tile"):
        updater.wait(0)
    updater.wait(1)
    assert pager.held == 0
    assert PageKey(0, Kind.PARAM) in pager.failed
    assert PageKey(0, Kind.STATE, 1) in pager.failed
    assert PageKey(0, Kind.STATE, 0) not in pager.failed


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("again", [False, True])
def test_tiles_loaded_behind_one_whose_kernel_fails_are_given_back(pager: FakePager, depth: int, again: bool) -> None:
    """State that was never filled in is garbage then; what was there before stays good. Nobody waits for ever."""
    units = make_units(pager, 1, numel=12000)
    updater = Updater(pager, units, depth=depth)
    if again:
        updater.start(whole(units[0]))
        updater.wait(0)
        write_gradient(pager, units[0], 0, torch.ones(12000))
    pager.bytes[PageKey(0, Kind.STATE, 0)] = torch.zeros(64, dtype=torch.uint8)  # too small: the kernel refuses
    pager.gate.clear()
    before = len(pager.log)
    updater.start(whole(units[0]))
    assert _eventually(lambda: pager.held == 1 + 2 * depth)
    pager.gate.set()
    with pytest.raises(InvariantError, match="STATE tile"):
        updater.wait(0)
    assert pager.held == 0
    failed = {key.tile for key in pager.failed if key.kind is Kind.STATE}
    leased = {key.tile for key, _ in pager.log[before:] if key.kind is Kind.STATE}
    assert failed == ({0} if again else leased - {1}), (
        "the kernel of the second is asked for before the first is through"
    )


def test_a_second_update_of_a_failed_unit_fails_too(pager: FakePager) -> None:
    units = make_units(pager, 1)
    pager.faults[PageKey(0, Kind.PARAM)] = OSError("bad block")
    pager.gate.clear()
    updater = Updater(pager, units)
    updater.start(whole(units[0], discard_gradients=False))
    updater.start(whole(units[0]))
    pager.gate.set()
    with pytest.raises(OSError, match="bad block"):
        updater.wait_all()


def test_a_missing_gradient_is_not_a_lost_update(pager: FakePager) -> None:
    units = make_units(pager, 1)
    pager.start_discard([PageKey(0, Kind.GRAD, 2)])
    updater = Updater(pager, units)
    updater.start(whole(units[0]))
    with pytest.raises(InvariantError, match="gradient tile 2"):
        updater.wait(0)
    assert (read_parameter(pager, units[0], 0) == 1).all()


def test_a_loop_stopped_under_the_queue_ends_every_wait(pager: FakePager) -> None:
    units = make_units(pager, 3)
    pager.gate.clear()
    updater = Updater(pager, units)
    for state in units.values():
        updater.start(whole(state))
    assert _eventually(lambda: pager.held > 0)
    pager.stop_loop()
    pager.gate.set()
    with pytest.raises(TiermemError, match="ended before"):
        updater.wait_all()
    with pytest.raises(TiermemError, match="ended before"):
        updater.wait(2)


def test_closing_ends_what_runs_and_gives_up_what_is_queued(pager: FakePager, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for = pager.wait_for

    def wait_at_last(future: Any) -> Any:
        pager.gate.set()
        return wait_for(future)

    units = make_units(pager, 3)
    pager.gate.clear()
    updater = Updater(pager, units)
    for state in units.values():
        updater.start(whole(state))
    assert _eventually(lambda: touched(pager) == [0])
    monkeypatch.setattr(pager, "wait_for", wait_at_last)
    updater.close()
    assert pager.held == 0, "it has waited for what had begun"
    assert not updater.pending(0)
    updater.close()
    updater.wait(0)
    assert touched(pager) == [0]
    with pytest.raises(TiermemError, match="had begun"):
        updater.wait(2)
    with pytest.raises(TiermemError, match="closed"):
        updater.start(whole(units[0]))


def test_a_wait_on_the_loop_is_refused(pager: FakePager) -> None:
    units = make_units(pager, 2)
    updater = Updater(pager, units)
    updater.start(whole(units[0]))
    updater.wait(0)
    pager.gate.clear()
    updater.start(whole(units[1]))

    async def wait_there() -> None:
        updater.wait(0)  # nothing to wait for
        updater.wait(1)

    with pytest.raises(InvariantError, match="loop"):
        pager.start_task(wait_there()).result()
    pager.gate.set()
    updater.wait_all()


@pytest.mark.parametrize("ask", ["wait", "wait_all", "unfinished"])
def test_what_an_interrupt_has_left_queued_is_carried_out_for_whoever_asks(
    pager: FakePager, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    units = make_units(pager, 2)
    updater, start_task, ended = Updater(pager, units), pager.start_task, []

    def told_late(coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Whoever carried out the queue has ended, and nobody has heard of it yet."""
        ended.append(start_task(coroutine))
        return Future()

    def interrupted(coroutine: Coroutine[Any, Any, None]) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    for unit in range(2):  # the first to be queued at all, and one behind others that are done
        monkeypatch.setattr(pager, "start_task", interrupted)
        with pytest.raises(KeyboardInterrupt):
            updater.start(whole(units[unit]))
        assert touched(pager) == list(range(unit))
        monkeypatch.setattr(pager, "start_task", told_late)
        if ask == "unfinished":
            for future in updater.unfinished():
                pager.wait_for(future)
        else:
            updater.wait(unit) if ask == "wait" else updater.wait_all()
        assert touched(pager) == list(range(unit + 1))
        ended.pop().result()


@pytest.mark.parametrize("refused", ["start_task", "set_agenda"])
def test_updates_that_cannot_be_carried_out_fail_and_later_ones_are_carried_out(
    pager: FakePager, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    units = make_units(pager, 2)
    updater = Updater(pager, units)

    def fails(what: object) -> None:
        if refused == "start_task":
            what.close()
        raise TiermemError("no more")

    with monkeypatch.context() as patch, contextlib.suppress(TiermemError):
        patch.setattr(pager, refused, fails)
        updater.start(whole(units[0]))
        updater.wait(0)
    with pytest.raises(TiermemError, match="no more"):
        updater.wait(0)
    updater.start(whole(units[1]))
    updater.wait(1)
    assert touched(pager) == [1]


def test_an_update_is_announced_before_anybody_begins_with_it(
    pager: FakePager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first one gradients went to the drive, when the loop came to what was asked for after it first."""
    units, told, start_task = make_units(pager, 1), list[Any](), pager.start_task

    def noted(coroutine: Any) -> Any:
        told.extend(pager.agenda or [[]])
        return start_task(coroutine)

    monkeypatch.setattr(pager, "start_task", noted)
    updater = Updater(pager, units)
    updater.start(whole(units[0]))
    updater.wait(0)
    assert {key.unit for key in told[0]} == {0}


def test_wrong_questions_are_refused(pager: FakePager) -> None:
    with pytest.raises(ConfigError, match="depth"):
        Updater(pager, {}, depth=0)
    with pytest.raises(InvariantError, match="no optimizer state"):
        Updater(pager, {}).start(UnitUpdate(7, ()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_and_moments_come_back(pager: FakePager, dtype: torch.dtype) -> None:
    segments = (Segment(0, 0, 3000), Segment(1, 3008, 100), Segment(2, 3136, 2000))
    state = UnitState(0, dtype, segments, 5136, 2048)
    add_unit(pager, state)
    store = StateStore(pager, {0: state})
    values = {p: torch.randn(state.segment_of(p).numel) for p in range(3)}
    values[1] = torch.full((100,), 1.00390625)  # an exact tie in bfloat16
    for parameter, value in values.items():
        write_parameter(pager, state, parameter, value)
        store.store_master(0, parameter, value)
    for parameter, value in values.items():
        assert torch.equal(store.read_master(0, parameter), value)
        assert not store.read_moments(0, parameter)[0].any()
    first, second = torch.randn(3000), torch.rand(3000)
    store.store_moments(0, {0: (first, second)})
    assert torch.equal(store.read_moments(0, 0)[0], first)
    assert torch.equal(store.read_moments(0, 0)[1], second)
    assert torch.equal(store.read_master(0, 0), values[0])
    assert pager.held == 0


def test_a_cut_that_was_never_updated_has_no_moments_whatever_the_buffers_had(pager: FakePager) -> None:
    state = UnitState(0, torch.float32, (Segment(0, 0, 2048), Segment(1, 2048, 2048)), 4096, 2048)
    add_unit(pager, state)
    store, buffers, ones = StateStore(pager, {0: state}), CutBuffers(), torch.ones(2048)
    for parameter in (0, 1):
        write_parameter(pager, state, parameter, ones)
    store.store_moments(0, {0: (ones, ones)})
    for parameter, moment in ((0, ones), (1, torch.zeros(2048))):
        (cut,) = store.cuts(0, parameter)
        found = store.read_cut(0, parameter, cut, buffers)
        assert all(map(torch.equal, found, (ones, moment, moment)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_master_comes_with_its_moments_or_leaves_those_that_are_there(pager: FakePager, dtype: torch.dtype) -> None:
    state = UnitState(0, dtype, (Segment(0, 0, 5000),), 5000, 2048)
    add_unit(pager, state)
    store = StateStore(pager, {0: state})
    master, first, second = torch.randn(5000), torch.randn(5000), torch.rand(5000)
    write_parameter(pager, state, 0, master)
    parts = iter(range(3))

    def moments(cut: TileRange) -> tuple[torch.Tensor, torch.Tensor]:
        assert next(parts) == cut.tile, "asked for in order, once"
        own = slice(cut.begin, cut.begin + cut.length)
        return first[own], second[own]

    store.store_master(0, 0, master, moments)
    assert torch.equal(store.read_master(0, 0), master)
    assert all(map(torch.equal, store.read_moments(0, 0), (first, second)))
    other = torch.randn(5000)
    write_parameter(pager, state, 0, other)
    store.change_masters(0, {0: other})
    assert torch.equal(store.read_master(0, 0), other)
    out = torch.empty(5000), torch.empty(5000)
    assert all(map(torch.equal, store.read_moments(0, 0, out), (first, second)))
    assert torch.equal(out[0], first)
    assert pager.held == 0


def test_what_has_never_been_updated_is_changed_without_state(pager: FakePager) -> None:
    state = UnitState(0, torch.bfloat16, (Segment(0, 0, 3000),), 3000, 2048)
    add_unit(pager, state)
    store, value = StateStore(pager, {0: state}), torch.randn(3000).bfloat16()
    write_parameter(pager, state, 0, value)
    store.change_masters(0, {0: value})
    assert not pager.is_written(PageKey(0, Kind.STATE, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_parameters_write_no_state(pager: FakePager, dtype: torch.dtype) -> None:
    state = UnitState(0, dtype, (Segment(0, 0, 3000),), 3000, 2048)
    add_unit(pager, state)
    store, value = StateStore(pager, {0: state}), torch.randn(3000).to(dtype)
    write_parameter(pager, state, 0, value)
    store.store_master(0, 0, value.float())
    assert not pager.is_written(PageKey(0, Kind.STATE, 0))
    assert torch.equal(store.read_master(0, 0), value.float())
    assert not store.read_moments(0, 0)[1].any()


def test_exact_parameters_leave_nothing_of_what_was_there_before(pager: FakePager) -> None:
    state = UnitState(0, torch.bfloat16, (Segment(0, 0, 3000),), 3000, 2048)
    add_unit(pager, state)
    store = StateStore(pager, {0: state})
    for value in (torch.randn(3000), torch.randn(3000).bfloat16().float()):
        write_parameter(pager, state, 0, value.bfloat16())
        store.store_master(0, 0, value)
        assert torch.equal(store.read_master(0, 0), value)
        assert not any(moment.any() for moment in store.read_moments(0, 0))
        store.store_moments(0, {0: (torch.ones(3000), torch.ones(3000))})


def test_a_float16_tile_has_all_its_masters_those_that_fewer_bits_could_hold_too(pager: FakePager) -> None:
    state = UnitState(0, torch.float16, (Segment(0, 0, 500), Segment(1, 512, 500)), 1012, 2048)
    add_unit(pager, state)
    store, values = StateStore(pager, {0: state}), (torch.full((500,), 2.0**-40), torch.randn(500))
    for parameter, value in enumerate(values):
        write_parameter(pager, state, parameter, value.half())
    for parameter, value in enumerate(values):
        store.store_master(0, parameter, value)
        assert all(store.read_master(0, other).isnan().all() for other in range(parameter + 1, 2)), "not stored yet"
    for parameter, value in enumerate(values):
        assert torch.equal(store.read_master(0, parameter), value)
