"""The optimizer users see, over a fake pager: same numbers as torch's in every schedule, and a real Optimizer."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from doubles_optim import FakeBook, FakePager, FakeUndo, add_unit, read_parameter, write_parameter
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import ConfigError, TiermemError
from tiermem.optim.adamw import AdamW
from tiermem.optim.coordinator import UpdateCoordinator
from tiermem.optim.hyperparameters import GroupReader
from tiermem.optim.kernels import Workspace
from tiermem.optim.masters import StateStore
from tiermem.optim.schedules import make_schedule
from tiermem.optim.service import Moments, UpdateService
from tiermem.optim.speculation import Speculation
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.updater import Updater
from tiermem.pager.page import Intent, Kind, PageKey
from tiermem.registry import Registry, registry
from tiermem.stats import Counters

pytestmark = pytest.mark.timeout(200)

SIZES = [[700, 3000, 5], [64, 1], [2500]]


class Service(UpdateCoordinator):
    """With what the runtime adds: where moments that are loaded go."""

    store: StateStore
    unit_of: dict[int, int]

    def prepare_moments(self, given: Mapping[int, Moments]) -> Callable[[], None]:
        def keep() -> None:
            for parameter, (first, second) in given.items():
                self.store.store_moments(self.unit_of[parameter], {parameter: (first, second)})

        return keep

    def read_moments(self, parameters: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self.store.read_moments(self.unit_of[parameter], parameter) for parameter in parameters]


class Harness:
    """Parameters of a make-believe model as pages, next to the same parameters under torch's own AdamW."""

    def __init__(
        self,
        schedule: str = "step",
        dtype: torch.dtype = torch.float32,
        sizes: list[list[int]] = SIZES,
        tile: int = 2048,
    ) -> None:
        self.pager, self.dtype, self.units = FakePager(), dtype, []
        number = 0
        for unit, numels in enumerate(sizes):
            segments, position = [], 0
            for numel in numels:
                segments.append(Segment(number, position, numel))
                position += -(-numel // 64) * 64
                number += 1
            self.units.append(UnitState(unit, dtype, tuple(segments), segments[-1].stop, tile))
            add_unit(self.pager, self.units[-1])
        by_unit = {state.unit: state for state in self.units}
        self.store, self.book = StateStore(self.pager, by_unit), FakeBook(self.pager, self.units)
        self.updater = Updater(self.pager, by_unit, workspace=Workspace(1024))
        self.undo, self.counters = FakeUndo(self.pager), Counters()
        speculation = Speculation(self.updater, self.book, self.undo, self.counters)
        self.service = Service(self.units, self.updater, self.book, make_schedule(schedule), speculation)
        self.service.store = self.store
        self.service.unit_of = {segment.parameter: state.unit for state in self.units for segment in state.segments}
        generator = torch.Generator().manual_seed(1)
        self.faces: list[torch.nn.Parameter] = []  # what the optimizer is given: placeholders of the right shape
        self.plain: list[torch.nn.Parameter] = []
        for parameter, (state, segment) in enumerate((u, s) for u in self.units for s in u.segments):
            values = torch.randn(segment.numel, generator=generator)
            write_parameter(self.pager, state, parameter, values)
            self.store.store_master(state.unit, parameter, values)
            self.faces.append(torch.nn.Parameter(torch.full((), float("nan"), dtype=dtype).expand(segment.numel)))
            self.plain.append(torch.nn.Parameter(values))
            registry.attach(self.faces[-1], self.service, parameter)

    def backward(self, seed: int, without: tuple[int, ...] = (), *, complete: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        for state in reversed(self.units):
            self.service.unit_needed(state.unit)
            for segment in reversed(state.segments):
                gradient = torch.randn(segment.numel, generator=generator).to(self.dtype)
                if segment.parameter not in without:
                    self.book.set(segment.parameter, gradient)
                    self.plain[segment.parameter].grad = gradient.to(torch.float32)
            if complete:
                self.service.gradients_complete(state.unit)

    def check_same(self) -> None:
        self.service.wait_updates()
        for parameter, plain in enumerate(self.plain):
            state = self.book.unit_of[parameter]
            assert torch.equal(read_parameter(self.pager, state, parameter), plain.detach().to(self.dtype)), parameter
            assert torch.equal(self.store.read_master(state.unit, parameter), plain.detach()), parameter

    def close(self) -> None:
        self.updater.close()
        self.pager.close()
        for face in self.faces:
            registry.detach(face)


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made = Harness(*getattr(request, "param", ()))
    yield made
    made.close()


def grouped(parameters: list[torch.nn.Parameter]) -> list[dict]:
    return [
        {"params": parameters[:2], "lr": 0.03, "weight_decay": 0.0},
        {"params": parameters[2:], "betas": (0.8, 0.99), "eps": 1e-6},
    ]


@pytest.mark.parametrize("schedule", ["step", "forward", "backward", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_numbers_in_every_schedule(schedule: str, dtype: torch.dtype) -> None:
    harness = Harness(schedule, dtype)
    ours = AdamW(grouped(harness.faces), lr=0.01)
    torchs = torch.optim.AdamW(grouped(harness.plain), lr=0.01, fused=True)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 5) for o in (ours, torchs)]
    for step in range(5):
        harness.backward(step, without=((), (1,), (0, 1, 2), (5,), ())[step])
        for optimizer in (ours, torchs):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    harness.check_same()
    assert not ours.state
    assert [ours.steps_of(p) for p in harness.faces] == [int(torchs.state[p]["step"]) for p in harness.plain]
    harness.close()


@given(
    sizes=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), min_size=1, max_size=3),
    tile=st.sampled_from([2048, 4096, 10240]),
    schedule=st.sampled_from(["step", "forward", "backward"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=15)
def test_same_numbers_for_any_layout(sizes: list[list[int]], tile: int, schedule: str, dtype: torch.dtype) -> None:
    harness = Harness(schedule, dtype, sizes, tile)
    pair = AdamW(harness.faces, lr=0.01), torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    for step in range(3):
        harness.backward(step)
        for optimizer in pair:
            optimizer.step()
    harness.check_same()
    harness.close()


@pytest.mark.parametrize("schedule", ["step", "forward", "backward", "auto"])
@pytest.mark.parametrize("by_call", [False, True])
def test_clipping_has_the_bits_of_torch(schedule: str, by_call: bool) -> None:
    harness = Harness(schedule)
    ours = AdamW(harness.faces, lr=0.01, max_grad_norm=None if by_call else 0.5)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    for step in range(4):
        harness.backward(step, without=(1,) if step == 2 else (), complete=step > 0)
        norm = torch.nn.utils.clip_grad_norm_(harness.plain, 0.5)
        if by_call:
            assert torch.equal(ours.clip_grad_norm_(0.5), norm)
        ours.step()
        torchs.step()
        assert torch.equal(ours.grad_norm, norm)
        ours.zero_grad()
        torchs.zero_grad()
    harness.check_same()
    harness.close()


def test_only_steps_skipped_in_a_row_are_said_to_be_hopeless(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=0.01)
    said = []
    for number in range(12):
        harness.backward(number)
        if number != 4:
            harness.book.set(0, torch.full((SIZES[0][0],), float("nan")))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours.step()
        said += [number] if any("in a row" in str(each.message) for each in caught) else []
    assert said == [9], "the fifth behind the good one, and once"
    assert ours.skipped == 11


@pytest.mark.parametrize("schedule", ["step", "backward", "auto"])
def test_clipping_again_clips_what_the_first_has_left(schedule: str) -> None:
    """As one who clips by calls and has `max_grad_norm` too; the coefficients are multiplied before the gradient is."""
    harness = Harness(schedule)
    ours = AdamW(harness.faces, lr=0.01, eps=1.0, max_grad_norm=2.0)  # eps: else the scale of gradients cancels out
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, eps=1.0, fused=True)
    for step, first in enumerate((1.0, 50.0, 1.0)):
        harness.backward(step)
        for max_norm in (first, 2.0):
            norm = torch.nn.utils.clip_grad_norm_(harness.plain, max_norm)
        ours.clip_grad_norm_(first)
        ours.step()
        torchs.step()
        assert torch.allclose(ours.grad_norm, norm)
        ours.zero_grad()
    harness.service.wait_updates()
    for parameter, plain in enumerate(harness.plain):
        found = read_parameter(harness.pager, harness.book.unit_of[parameter], parameter)
        assert torch.allclose(found, plain.detach(), rtol=1e-6, atol=1e-7), parameter
    harness.close()


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
def test_a_step_that_fails_before_it_updates_clips_once_when_it_is_tried_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = AdamW(harness.faces, lr=0.01, max_grad_norm=0.5)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    harness.backward(0)

    def fail(_: object) -> None:
        raise OSError(5, "injected")

    with monkeypatch.context() as broken:
        broken.setattr(harness.book, "read_norms", fail)  # asked behind the clipping
        with pytest.raises(OSError, match="injected"):
            ours.step()
    ours.step()
    torch.nn.utils.clip_grad_norm_(harness.plain, 0.5)
    torchs.step()
    harness.check_same()


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
def test_backward_keeps_what_is_not_clipped_and_redoes_the_rest(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=0.01, max_grad_norm=110.0)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    reverts = []
    for step in range(8):
        harness.backward(step)
        norm = torch.nn.utils.clip_grad_norm_(harness.plain, 110.0 if step % 3 else 10.0)
        ours.max_grad_norm = 110.0 if step % 3 else 10.0
        assert ours.steps_of(harness.faces[0]) == step
        ours.step()
        torchs.step()
        assert torch.equal(ours.grad_norm, norm)
        assert ours.steps_of(harness.faces[0]) == step + 1
        reverts.append(harness.undo.reverts)
    assert reverts == [1, 1, 1, 2, 2, 2, 3, 3]
    harness.check_same()
    assert not any(key.kind is Kind.GRAD for key in harness.pager.written)
    total = harness.counters.snapshot().total
    assert (total.speculated, total.confirmed, total.redone) == (8, 5, 3)


@pytest.mark.parametrize("max_norm", [None, 10.0, 1e9])
@pytest.mark.parametrize("some", [0, 2, 4])
def test_an_optimizer_made_between_backward_and_step_updates_what_another_has_begun(
    max_norm: float | None, some: int
) -> None:
    """All of it, or some parameters that share units with those which the other one keeps."""
    harness = Harness("backward" if max_norm is not None else "auto")
    kept = harness.faces[:some], harness.plain[:some]
    olds = [AdamW(kept[0], lr=0.01, max_grad_norm=max_norm)] if some else []
    early = AdamW(harness.faces[some:], lr=0.01, max_grad_norm=max_norm)
    harness.backward(0)
    assert harness.book.lent, "updates have begun"
    ours = [*olds, AdamW(harness.faces[some:], lr=0.02, max_grad_norm=max_norm)]
    torchs = [torch.optim.AdamW(kept[1], lr=0.01, fused=True)] if some else []
    torchs.append(torch.optim.AdamW(harness.plain[some:], lr=0.02, fused=True))
    for number in range(2):
        for mine, other in zip(ours, torchs, strict=True):
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(other.param_groups[0]["params"], max_norm)
            mine.step()
            other.step()
        harness.check_same()
        assert [mine.steps_of(face) for mine in ours for face in mine.param_groups[0]["params"]] == [number + 1] * 6
        assert not any(key.kind is Kind.GRAD for key in harness.pager.written)
        if number == 0:
            harness.backward(1)
    assert early.steps_of(harness.faces[5]) == 0
    harness.close()


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
@pytest.mark.parametrize("split", [1, 3, 4, 5])
@pytest.mark.parametrize("order", [1, -1])
def test_gradients_of_what_is_done_again_are_gone_when_it_is_done(harness: Harness, split: int, order: int) -> None:
    """The first optimizer has kept its share, in units of its own and in one that it shares, when the second clips."""
    parts = [slice(split), slice(split, None)][::order]
    norms = (1e9, 1.0)
    ours = [AdamW(harness.faces[part], max_grad_norm=norm) for part, norm in zip(parts, norms, strict=True)]
    torchs = [torch.optim.AdamW(harness.plain[part], fused=True) for part in parts]
    for step in range(2):
        harness.backward(step)
        for part, norm, mine, other in zip(parts, norms, ours, torchs, strict=True):
            torch.nn.utils.clip_grad_norm_(harness.plain[part], norm)
            mine.step()
            other.step()
        harness.check_same()
        assert harness.undo.reverts == step + 1
        assert not any(key.kind is Kind.GRAD for key in harness.pager.written)


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
def test_who_steps_again_before_the_other_has_stepped_counts_once(harness: Harness) -> None:
    ours = [AdamW(part, max_grad_norm=1e9) for part in (harness.faces[:4], harness.faces[4:])]
    torchs = [torch.optim.AdamW(part, fused=True) for part in (harness.plain[:4], harness.plain[4:])]
    for step in range(3):
        harness.backward(step)
        for first, second in (ours, torchs):
            first.step()
            first.zero_grad()
            first.step()
            first.zero_grad()
            second.step()
        harness.check_same()
        assert [ours[number > 3].steps_of(face) for number, face in enumerate(harness.faces)] == [step + 1] * 6
    total = harness.counters.snapshot().total
    assert (total.speculated, total.confirmed, harness.undo.reverts) == (3, 3, 0)


@pytest.mark.parametrize("harness", [("forward",)], indirect=True)
def test_gradients_are_dropped_behind_the_update_that_reads_their_pages(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another optimizer, for parameters of the same unit."""
    ours = [AdamW(part) for part in (harness.faces[:2], harness.faces[2:])]
    harness.pager.gate.clear()
    harness.backward(0)
    ours[0].step()
    wait, drop, pending = harness.updater.wait, harness.book.drop, []

    def waited(unit: int) -> None:
        harness.pager.gate.set()
        wait(unit)

    def dropped(parameters: Sequence[int]) -> None:
        pending.append(harness.updater.pending(0))
        drop(parameters)

    monkeypatch.setattr(harness.updater, "wait", waited)
    monkeypatch.setattr(harness.book, "drop", dropped)
    ours[1].zero_grad()
    assert pending == [False]
    harness.pager.gate.set()
    torch.optim.AdamW(harness.plain[:2], fused=True).step()
    harness.check_same()


@pytest.mark.parametrize("harness", [("auto",)], indirect=True)
def test_steps_in_which_units_are_used_before_the_step_are_learned_from_one_by_one(harness: Harness) -> None:
    """One of them is no reason to update later from then on, two are; and a step without gradients is none at all."""
    ours = AdamW(harness.faces)
    seen = []
    for step, used in enumerate((True, *[False] * 8, True, True, *[False] * 6)):
        harness.backward(step)
        assert bool(harness.book.lent) == ("forward" not in seen), "updates have begun"
        if used:
            harness.service.unit_needed(0)
            assert not harness.book.lent, "and are undone"
        for _ in range(4):
            ours.step()
        seen.append(harness.service._schedule.acts_as)
    assert seen == [*["backward"] * 10, *["forward"] * 7]


@pytest.mark.parametrize("harness", [("step",), ("forward",), ("backward",)], indirect=True)
def test_what_has_not_begun_before_the_step_is_queued_in_forward_order(harness: Harness) -> None:
    """And only "step" waits for it."""
    ours = AdamW(harness.faces, lr=0.01)
    waits = harness.service._schedule.waits
    harness.backward(0, complete=False)
    if not waits:
        harness.pager.gate.clear()
    ours.step()
    assert harness.updater.statistics().queued == (0 if waits else 3)
    harness.pager.gate.set()
    harness.service.wait_updates()
    updated = [key.unit for key, intent in harness.pager.log if key.kind is Kind.PARAM and intent is Intent.WRITE]
    assert updated == [0, 1, 2]


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
def test_updates_that_have_not_begun_are_withdrawn(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=0.01, max_grad_norm=1e9)
    harness.pager.gate.clear()
    harness.backward(0)
    revert = harness.undo.revert

    reached = []

    def opened(protection: object, running: list) -> None:
        reached.append(len(running))
        assert len(running) <= 1  # the one whose kernel the gate holds
        harness.pager.gate.set()
        revert(protection, running)

    harness.undo.revert = opened
    ours.zero_grad()
    assert harness.updater.statistics().units == reached[0]
    assert harness.updater.statistics().queued == 0
    harness.check_same()
    assert ours.steps_of(harness.faces[0]) == 0


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
def test_without_room_backward_waits_for_the_step(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=0.01, max_grad_norm=1e9)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    harness.undo.room = False
    harness.backward(0)
    assert harness.updater.statistics().queued == 0
    ours.step()
    torchs.step()
    harness.check_same()
    harness.undo.room = True
    harness.backward(1)
    ours.step()
    torchs.step()
    harness.check_same()
    assert harness.counters.snapshot().total.speculated == 1


@pytest.mark.parametrize("harness", [("backward",), ("auto",)], indirect=True)
def test_nobody_waits_for_a_device_to_say_that_gradients_are_finite(harness: Harness) -> None:
    """A unit whose norms are not known yet is put off, and told of when they are; or it waits for the step."""
    ours = AdamW(harness.faces, lr=0.01)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    late, (first, *others) = harness.service.late, [state.unit for state in harness.units]
    for step in range(3):
        harness.backward(step, complete=False)
        harness.book.unknown = set(range(6))
        assert not any(harness.service.gradients_complete(unit) for unit in reversed([first, *others]))
        assert late.known_since() == []
        assert harness.updater.statistics().queued == 0
        harness.book.unknown = {segment.parameter for segment in harness.units[0].segments}
        assert late.known_since() == others[::-1], "in the order in which they were put off"
        assert late.known_since() == [], "told once"
        assert all(harness.service.gradients_complete(unit) for unit in reversed(others))
        ours.step()
        torchs.step()
        ours.zero_grad()
        harness.book.unknown = set()
        assert late.known_since() == [], "that step is over"
        harness.check_same()


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
@pytest.mark.parametrize("ending", ["step", "zero_grad"])
def test_without_clipping_early_updates_are_for_good(harness: Harness, ending: str) -> None:
    """They need no room, and a bad gradient that comes behind them has only its own unit left out."""
    ours = AdamW(harness.faces, lr=0.01)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    harness.undo.room = False
    for step in range(4):
        bad = step == 1
        harness.backward(step, complete=not bad)
        if bad:
            harness.book.set(1, torch.full((SIZES[0][1],), float("nan")))
            for state in reversed(harness.units):
                assert harness.service.gradients_complete(state.unit) == (state.unit > 0)
            for plain in harness.plain[:3]:
                plain.grad = None
        else:
            assert ours.steps_of(harness.faces[5]) == step + 1
        torchs.step()
        if bad and ending == "step":
            with pytest.raises(TiermemError, match="not finite"):
                ours.step()
        elif not bad:
            ours.step()
        ours.zero_grad()
        assert not harness.book.gradients
        harness.check_same()
    assert [ours.steps_of(face) for face in harness.faces] == [3, 3, 3, 4, 4, 4]
    assert ours.skipped == 0
    assert harness.undo.reverts == 0


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
def test_what_is_caught_up_with_may_use_gradients_up_before_parameters_are_changed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks' only unit, exchanged just now: its update began behind the question what was used up."""
    ours = AdamW(harness.faces, lr=0.01)
    harness.backward(0, complete=False)
    monkeypatch.setattr(harness.book, "catch_up", lambda: harness.service.gradients_complete(2))
    for change in (harness.service.settle_early, lambda: AdamW(harness.faces, lr=0.01)):
        with pytest.raises(TiermemError, match="has used their gradients up"):
            change()
    ours.step()


def test_the_norm_is_added_up_in_the_order_of_the_model_whatever_the_groups(harness: Harness) -> None:
    """Its last bit, and with it every clipped update, is that of `clip_grad_norm_(model.parameters(), ...)`."""
    others = 0
    ours = AdamW([{"params": harness.faces[3:]}, {"params": harness.faces[:3]}], lr=0.01)
    for seed in range(20):
        harness.backward(seed)
        backwards = torch.nn.utils.get_total_norm([each.grad for each in (*harness.plain[3:], *harness.plain[:3])])
        expected = torch.nn.utils.get_total_norm([each.grad for each in harness.plain])
        assert torch.equal(ours.clip_grad_norm_(1.0), expected)
        others += not torch.equal(backwards, expected)
        ours.zero_grad()
    assert others, "some of these sums depend on their order"


@pytest.mark.parametrize("schedule", ["forward", "backward"])
def test_finite_gradients_count_though_their_common_norm_overflows(schedule: str) -> None:
    harness = Harness(schedule, sizes=[[1], [1]])
    ours = AdamW(harness.faces, lr=0.01)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    for parameter in (1, 0):
        harness.book.set(parameter, torch.tensor([1.5e19]))
        harness.plain[parameter].grad = torch.tensor([1.5e19])
        harness.service.gradients_complete(parameter)
    ours.step()
    torchs.step()
    assert [ours.steps_of(face) for face in harness.faces] == [1, 1]
    assert ours.skipped == 0
    harness.check_same()
    harness.close()


@pytest.mark.parametrize("harness", [("backward",)], indirect=True)
def test_backward_refuses_a_clip_call_once(harness: Harness) -> None:
    """Gradients are not kept for nothing; the call says that they are wanted."""
    ours = AdamW(harness.faces)
    harness.backward(0)
    with pytest.raises(ConfigError, match="too late"):
        ours.clip_grad_norm_(1.0)
    ours.step()
    harness.backward(1)
    assert ours.clip_grad_norm_(1.0) > 1.0
    ours.step()
    assert harness.undo.reverts == 1


@pytest.mark.parametrize("harness", [("forward",)], indirect=True)
def test_a_learning_rate_changed_later_does_not_leak_into_queued_updates(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=0.01)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    harness.backward(0)
    harness.pager.gate.clear()
    ours.step()
    torchs.step()
    ours.param_groups[0]["lr"] = 5.0
    ours.zero_grad()  # must not take the gradients away from the queued updates
    harness.pager.gate.set()
    harness.check_same()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("schedule", ["step", "forward", "auto"])
@pytest.mark.parametrize("by_call", [False, True])
def test_a_norm_that_is_not_finite_skips_the_step(bad: float, schedule: str, by_call: bool) -> None:
    harness = Harness(schedule)
    ours = AdamW(harness.faces, lr=0.01, max_grad_norm=None if by_call else 1e9)
    torchs = torch.optim.AdamW(harness.plain, lr=0.01, fused=True)

    def step() -> None:
        if by_call:
            ours.clip_grad_norm_(1e9)
        ours.step()

    def two_bad_steps() -> None:
        for seed in range(2):
            harness.backward(seed)
            harness.book.gradients[3][0] = bad
            step()

    with pytest.warns(UserWarning, match="not finite") as record:
        two_bad_steps()
    assert len(record) == 1
    assert ours.skipped == 2
    assert ours.steps_of(harness.faces[0]) == 0
    harness.backward(2)
    step()
    torchs.step()
    harness.check_same()
    harness.close()


@pytest.mark.parametrize("schedule", ["step", "forward", "backward"])
def test_two_optimizers_share_units(schedule: str) -> None:
    harness = Harness(schedule)
    split = [[0, 2, 4], [1, 3, 5]]
    ours = [AdamW([harness.faces[k] for k in part], lr=0.01 * (n + 1)) for n, part in enumerate(split)]
    torchs = [
        torch.optim.AdamW([harness.plain[k] for k in part], lr=0.01 * (n + 1), fused=True)
        for n, part in enumerate(split)
    ]
    for step in range(3):
        harness.backward(step)
        for optimizer in (*ours, *torchs):
            optimizer.step()
    harness.check_same()
    assert not any(key.kind.value == "grad" for key in harness.pager.written)
    harness.close()


def test_gradients_dropped_are_not_used(harness: Harness) -> None:
    ours = AdamW(harness.faces)
    harness.backward(0)
    ours.zero_grad()
    ours.step()
    harness.check_same()
    assert ours.steps_of(harness.faces[0]) == 0


@pytest.mark.parametrize("schedule", ["step", "forward"])
def test_an_error_of_an_update_surfaces(schedule: str) -> None:
    harness = Harness(schedule)
    ours = AdamW(harness.faces)
    harness.backward(0)
    harness.pager.faults[PageKey(1, Kind.STATE, 0)] = OSError("bad block")
    if schedule == "step":
        with pytest.raises(OSError, match="bad block"):
            ours.step()
    else:
        ours.step()
    with pytest.raises(OSError, match="bad block"):
        harness.service.unit_needed(1)
    harness.service.unit_needed(0)
    with pytest.raises(OSError, match="bad block"):
        ours.step()
    harness.close()


def taken_out(ours: AdamW) -> None:
    ours.param_groups[0]["params"].pop()


def put_in(ours: AdamW) -> None:
    ours.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(3)))


def held_twice(ours: AdamW) -> None:
    ours.param_groups.append(dict(ours.param_groups[0]))


@pytest.mark.parametrize("change", [taken_out, put_in, held_twice])
def test_parameters_put_into_groups_or_taken_out_by_hand_are_an_error(harness: Harness, change: Callable) -> None:
    ours = AdamW(harness.faces, lr=0.01)
    harness.backward(0)
    change(ours)
    with pytest.raises(ConfigError, match="by hand"):
        ours.step()
    harness.check_same()  # nothing was updated


def test_a_state_that_is_emptied_by_hand_is_an_error_that_says_how_to_begin_anew(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=0.01)
    harness.backward(0)
    ours.step()
    for forget in (ours.state.clear, ours.state.popitem, lambda: ours.state.pop(harness.faces[0], None)):
        with pytest.raises(TiermemError, match="full_state_dict"):
            forget()
    harness.backward(1)
    ours.state = defaultdict(dict)
    with pytest.raises(TiermemError, match="full_state_dict"):
        ours.step()


def test_a_state_dict_carries_steps_and_groups(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=0.01)
    for step in range(3):
        harness.backward(step, without=(1,) if step == 1 else ())
        ours.step()
    saved = ours.state_dict()
    assert [saved["state"][k]["step"] for k in range(6)] == [3, 2, 3, 3, 3, 3]
    other = AdamW(harness.faces, lr=5.0)
    for _ in range(2):  # torch's base class adds to the defaults as it loads: that is not asked of the next one
        other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.01
    assert other.steps_of(harness.faces[1]) == 2
    assert not other.state
    other.param_groups[0]["lr"] = 0.5
    settings = other.settings([0])
    assert settings[0].lr == 0.5
    for _ in range(2):  # said twice it is the same step
        other.count(settings)
    assert other.settings([0])[0].step == 5
    with pytest.raises(ConfigError, match="another optimizer"):
        ours.step()


def test_a_state_dict_without_states_leaves_counts_beside_their_moments(harness: Harness) -> None:
    """As one saved before the first step has none, and one of settings alone: it warns, and goes on as it was."""
    ours, torchs = AdamW(harness.faces, lr=5.0), torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    fresh = torch.optim.AdamW(harness.plain, lr=0.01).state_dict()
    assert not fresh["state"]
    ours.param_groups[0]["lr"] = 0.01
    for step in range(4):
        harness.backward(step)
        if step == 2:
            with pytest.warns(RuntimeWarning, match="no moments of 6 parameters .*their moments stay"):
                ours.load_state_dict(fresh)
        if step == 3:
            with pytest.warns(RuntimeWarning, match="no moments of 5 parameters"):
                ours.load_state_dict({**fresh, "state": {1: {"step": 3}}})
        ours.step()
        torchs.step()
    assert [ours.steps_of(face) for face in harness.faces] == [4] * 6
    harness.check_same()


def test_states_of_other_optimizers_are_refused_and_change_nothing(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=0.01)
    with pytest.raises(ConfigError, match="has no betas, eps: it is not AdamW's"):
        ours.load_state_dict(torch.optim.SGD(harness.plain, lr=5.0).state_dict())
    with pytest.raises(ConfigError, match="the state of Adam, which decays weights by way of their gradients"):
        ours.load_state_dict(torch.optim.Adam(harness.plain, lr=5.0, weight_decay=0.1).state_dict())
    for name, value in {"lr": "5.0", "betas": 0.9, "eps": None}.items():
        saved = ours.state_dict()
        saved["param_groups"][0] = {**saved["param_groups"][0], "weight_decay": 0.5, name: value}
        with pytest.raises(ConfigError, match="expected"):
            ours.load_state_dict(saved)
    (group,) = ours.state_dict()["param_groups"]
    for damaged in (None, {**group, "params": None}, {**group, "params": [0, [0]]}):
        with pytest.raises(ConfigError, match="of this state: expected"):
            ours.load_state_dict({"state": {}, "param_groups": [damaged]})
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["weight_decay"]) == (0.01, 0.01)
    undecayed = torch.optim.Adam(harness.plain, lr=5.0).state_dict()  # which is AdamW's too
    ours.load_state_dict({**undecayed, "state": {0: {"step": 0}}})
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["weight_decay"]) == (5.0, 0.0)


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused(harness: Harness, way: Callable[[object], object]) -> None:
    with pytest.raises(TiermemError, match=r"was copied or pickled; .*state_dict"):
        way(AdamW(harness.faces))


def test_the_state_of_torchs_own_is_taken_over(harness: Harness) -> None:
    """Counts, settings and moments; the updates that follow are those of torch's."""
    begun = torch.optim.AdamW(harness.plain, lr=0.02, betas=(0.8, 0.9), weight_decay=0.3, fused=True)
    for seed in range(3):
        begun.zero_grad()
        harness.backward(seed, without=(1,) if seed else ())
        begun.step()
    saved = copy.deepcopy(begun.state_dict())
    ours = AdamW(harness.faces)
    for parameter, values in enumerate(harness.plain):
        unit = harness.service.unit_of[parameter]
        write_parameter(harness.pager, harness.units[unit], parameter, values)
        harness.store.store_master(unit, parameter, values)
    ours.zero_grad()
    ours.load_state_dict(saved)
    assert [ours.steps_of(face) for face in harness.faces[:3]] == [3, 1, 3]
    assert ours.param_groups[0]["betas"] == (0.8, 0.9)
    assert not ours.state
    for seed in range(3, 6):
        harness.backward(seed)
        begun.step()
        ours.step()
    harness.check_same()


@pytest.mark.parametrize(
    "entry",
    [
        {"exp_avg": torch.zeros(1)},
        {"step": 1, "exp_avg": torch.zeros(1)},
        {"step": 1, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1), "max_exp_avg_sq": torch.zeros(1)},
        {"step": 1, "exp_avg": 0.0, "exp_avg_sq": torch.zeros(1)},
        {"step": 1, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1, dtype=torch.uint8)},
        {"momentum_buffer": torch.zeros(1)},
    ],
)
def test_a_state_of_another_optimizer_is_refused(harness: Harness, entry: dict[str, object]) -> None:
    ours = AdamW(harness.faces, lr=0.01)
    saved = ours.state_dict()
    saved["param_groups"][0]["lr"], saved["state"] = 5.0, {0: entry}
    with pytest.raises(ConfigError, match="this optimizer state carries"):
        ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"state": {"0": {"step": 3}}}, "parameter '0', which none of its groups has; JSON makes text of numbers"),
        ({"state": {99: {"step": 3}}}, "parameter 99, which none of its groups has"),
        ({"state": {0: None}}, "expected a dictionary, found NoneType"),
        ({"state": {0: {"step": None}}}, "step of parameter 0: expected a number"),
        ({"state": {0: {"step": "3"}}}, "step of parameter 0: expected a number"),
        ({"state": {0: {"step": -1}}}, "expected a whole number from 0 on, found -1"),
        ({"state": {0: {"step": 2.5}}}, "expected a whole number from 0 on, found 2.5"),
        ({"state": {0: {"step": math.nan}}}, "expected a whole number from 0 on, found nan"),
        ({"state": None}, "expected 'state' and 'param_groups'"),
        ({"param_groups": None}, "expected 'state' and 'param_groups'"),
        ({"param_groups": []}, r"parameter groups of \[6\], found \[\]: of another model"),
    ],
)
def test_a_state_that_fits_no_parameters_is_refused_and_changes_nothing(
    harness: Harness, part: dict[str, object], message: str
) -> None:
    """Neither counts nor groups: settings that are changed afterwards still count."""
    ours = AdamW(harness.faces, lr=0.01)
    saved = ours.state_dict()
    saved["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ConfigError, match=message):
        ours.load_state_dict({**saved, **part})
    assert (ours.param_groups[0]["lr"], ours.steps_of(harness.faces[0])) == (0.01, 0)
    ours.param_groups[0]["lr"] = 0.5
    assert ours.settings([0])[0].lr == 0.5


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_that_are_refused_do_not_come_with_a_state_dict(harness: Harness, option: str) -> None:
    ours, torchs = AdamW(harness.faces, lr=0.01), torch.optim.AdamW(harness.plain, lr=5.0, **{option: True})
    with pytest.raises(ConfigError, match=f"does not support {option}=True"):
        ours.load_state_dict(torchs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.01


def test_schedulers_hooks_and_closures_work(harness: Harness) -> None:
    ours = AdamW(harness.faces, lr=torch.tensor(0.01))
    torch.optim.lr_scheduler.OneCycleLR(AdamW(harness.faces), 0.1, total_steps=10)
    torch.optim.lr_scheduler.LambdaLR(AdamW(harness.faces), lambda step: 0.5)
    ours = AdamW(harness.faces, lr=0.01)
    seen = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        harness.backward(0)
        return 1.5

    with torch.no_grad():
        assert ours.step(closure) == 1.5
    assert seen == ["before", "after"]
    assert ours.steps_of(harness.faces[0]) == 1
    assert isinstance(harness.service, UpdateService)


def test_groups_can_be_added(harness: Harness) -> None:
    ours = AdamW(harness.faces[:3], lr=0.01)
    ours.add_param_group({"params": harness.faces[3:], "lr": 0.1})
    harness.backward(0)
    ours.step()
    torch.optim.AdamW(
        [{"params": harness.plain[:3]}, {"params": harness.plain[3:], "lr": 0.1}], lr=0.01, fused=True
    ).step()
    harness.check_same()


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"amsgrad": True}, {"max_grad_norm": 1.0}, {"params": [torch.nn.Parameter(torch.ones(2))]}]
)
def test_a_group_that_is_refused_is_not_there(harness: Harness, wrong: dict) -> None:
    ours = AdamW(harness.faces[:3], lr=0.01)
    with pytest.raises(ConfigError):
        ours.add_param_group({"params": harness.faces[3:], **wrong})
    assert len(ours.param_groups) == 1
    ours.add_param_group({"params": harness.faces[3:]})
    harness.backward(0)
    ours.step()
    torch.optim.AdamW(harness.plain, lr=0.01, fused=True).step()
    harness.check_same()


def test_groups_may_be_empty_wherever_they_are(harness: Harness) -> None:
    groups = [
        [{"params": [], "lr": 0.1}, {"params": parameters}, {"params": [], "weight_decay": 0.0}]
        for parameters in (harness.faces, harness.plain)
    ]
    ours = AdamW(groups[0], lr=0.01)
    harness.backward(0)
    ours.step()
    torch.optim.AdamW(groups[1], lr=0.01, fused=True).step()
    harness.check_same()
    with pytest.raises(ConfigError, match="this optimizer has no parameters"):
        AdamW([{"params": []}]).step()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"eps": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"weight_decay": -0.1},
        {"amsgrad": True},
        {"maximize": True},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": "1"},
        {"lr": "x"},
        {"lr": None},
        {"lr": torch.ones(2)},
        {"betas": 3},
        {"betas": (0.9,)},
        {"betas": "ab"},
        {"betas": (0.9, "x")},
        {"eps": "small"},
        {"eps": float("nan")},
        {"weight_decay": [0.1]},
    ],
)
def test_impossible_settings_are_refused(harness: Harness, options: dict) -> None:
    with pytest.raises(ConfigError):
        AdamW(harness.faces, **options)
    with pytest.raises(ConfigError):
        AdamW([{"params": harness.faces, **options}]) if "max_grad_norm" not in options else AdamW([], **options)


def test_a_norm_to_clip_by_that_is_set_later_is_refused_as_the_first_would_be(harness: Harness) -> None:
    ours = AdamW(harness.faces, max_grad_norm=1.0)
    harness.backward(0)
    for wrong, says in ((0, "must be positive"), (math.nan, "must be positive"), ("1", "expected a number")):
        ours.max_grad_norm = wrong
        with pytest.raises(ConfigError, match=f"max_grad_norm:? {says}"):
            ours.step()
    ours.max_grad_norm = 2.0
    ours.step()
    assert ours.steps_of(harness.faces[0]) == 1


def test_settings_of_another_kind_are_named_with_what_was_expected(harness: Harness) -> None:
    with pytest.raises(ConfigError, match=r"lr: expected a number, .*found '1e-3'; .*float\(\)"):
        AdamW(harness.faces, lr="1e-3")
    with pytest.raises(ConfigError, match="lr: expected a number that a float can hold"):
        AdamW(harness.faces, lr=10**400)
    with pytest.raises(ConfigError, match=r"betas: expected two numbers .*found 3"):
        AdamW(harness.faces, betas=3)
    with pytest.raises(ValueError, match="eps"):  # what torch raises
        AdamW([{"params": harness.faces, "eps": None}])


@pytest.mark.parametrize("schedule", ["step", "forward", "backward", "auto"])
@pytest.mark.parametrize(
    "setting",
    [
        {"lr": "1e-3"},
        {"lr": None},
        {"betas": 0.9},
        {"weight_decay": "x"},
        {"lr": math.nan},
        {"lr": torch.tensor(math.inf)},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": math.nan},
    ],
)
def test_settings_of_another_kind_or_that_make_no_numbers_written_into_groups_are_refused_and_can_be_mended(
    schedule: str, setting: dict
) -> None:
    """Before anything of the step is updated, though only the last group has them, and unit 0 has nothing of that."""
    harness = Harness(schedule)
    ours = AdamW([{"params": harness.faces[:3]}, {"params": harness.faces[3:]}], lr=0.01)
    torchs = torch.optim.AdamW([{"params": harness.plain[:3]}, {"params": harness.plain[3:]}], lr=0.01, fused=True)
    harness.backward(0)
    ours.step()
    torchs.step()
    good = {name: ours.param_groups[1][name] for name in setting}
    ours.param_groups[1].update(setting)

    def step() -> None:  # early updates say it in backward
        harness.backward(1)
        ours.step()

    with pytest.raises(ConfigError, match=rf"{next(iter(setting))}(\[\d\])?: expected"):
        step()
    ours.param_groups[1].update(good)
    ours.zero_grad()
    harness.check_same()
    harness.backward(1)
    ours.step()
    torchs.step()
    harness.check_same()
    harness.close()


def test_settings_are_read_again_where_the_same_object_may_hold_another_number() -> None:
    """And only there: it is asked of every group in every step."""
    reader, group = GroupReader(), {"lr": 1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    assert reader.read(group) is reader.read(group)
    assert reader.read(group) == (1.0, 0.9, 0.99, 1e-8, 0.1)
    number, other, pair, both = torch.tensor(0.5), torch.tensor(0.5), [0.5, 0.6], (torch.tensor(0.5), torch.tensor(0.6))
    for name, value, change in (
        ("lr", number, number.fill_),
        ("betas", pair, lambda beta: pair.__setitem__(1, beta)),
        ("betas", both, both[1].fill_),
        ("betas", (0.5, other), other.fill_),
    ):
        own = {**group, name: value}
        assert 0.75 not in reader.read(own)
        change(0.75)
        assert 0.75 in reader.read(own), value


@pytest.mark.parametrize("max_norm", ["1.0", None, [1.0], float("nan"), -1.0])
def test_an_impossible_norm_to_clip_to_is_refused(harness: Harness, max_norm: object) -> None:
    ours = AdamW(harness.faces)
    harness.backward(0)
    with pytest.raises(ConfigError, match="max_norm"):
        ours.clip_grad_norm_(max_norm)


def test_what_torch_accepts_without_effect_is_accepted(harness: Harness) -> None:
    AdamW(harness.faces, fused=True, foreach=None, amsgrad=False)
    with pytest.raises(TypeError, match="nonsense"):
        AdamW(harness.faces, nonsense=1)
    with pytest.raises(ConfigError, match="nonsense"):
        AdamW(harness.faces, nonsense=1)


@pytest.mark.parametrize("schedule", ["step", "forward", "backward", "auto"])
def test_a_later_optimizer_goes_on_with_the_moments_and_counts_of_the_one_before(schedule: str) -> None:
    harness = Harness(schedule)
    first, torchs = AdamW(harness.faces, lr=0.01), torch.optim.AdamW(harness.plain, lr=0.01, fused=True)
    for step in range(4):
        harness.backward(step)
        first.step()
        torchs.step()
        if step == 1:
            first = AdamW(harness.faces, lr=0.002)
            torchs.param_groups[0]["lr"] = 0.002
    harness.check_same()
    assert first.steps_of(harness.faces[0]) == 4
    harness.close()


def test_optimizers_that_share_parameters_by_mistake_are_told_so(harness: Harness) -> None:
    first = AdamW(harness.faces[:4], lr=0.01)
    second = AdamW(harness.faces[2:], lr=0.01)
    harness.backward(0)
    with pytest.raises(ConfigError, match=r"another optimizer was made since for 2 of this one's parameters"):
        first.step()
    second.step()
    third = AdamW(harness.faces[:2])
    assert third.steps_of(harness.faces[0]) == 0


def test_parameters_must_belong_to_one_runtime(harness: Harness) -> None:
    with pytest.raises(ConfigError, match="does not belong to an offloaded model"):
        AdamW([torch.nn.Parameter(torch.zeros(3))])
    other = Harness()
    with pytest.raises(ConfigError, match="two runtimes"):
        AdamW(harness.faces + other.faces)
    other.close()


def test_the_registry_keeps_nobody_alive() -> None:
    class Owner:
        pass

    register, owner, other = Registry(), Owner(), Owner()
    parameter = torch.nn.Parameter(torch.zeros(2))
    register.attach(parameter, owner, 3)
    register.attach(parameter, owner, 4)
    assert register.find(parameter).index == 4
    with pytest.raises(ConfigError, match="another runtime"):
        register.attach(parameter, other, 0)
    del owner
    assert register.find(parameter) is None
    register.attach(parameter, other, 1)
    register.detach(parameter)
    register.detach(parameter)
    assert register.find(parameter) is None
