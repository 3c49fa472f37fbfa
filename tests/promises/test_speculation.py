"""Updating under backward has, bit for bit, the numbers of clipping first, whatever the step turns out to be.

Where a step is clipped, skipped, given another learning rate, more gradients or an evaluation before `step()`, what was
updated early is undone and, unless the step is skipped, done again. Compared with plain PyTorch in float32 and with
"forward" in 16 bits. In "backward" with one optimizer that does not clip it is never undone, costs nothing, and a step
that should have been skipped is an error.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from doubles_combinations import half_of, in_turn, number_of, part_of
from doubles_models import Stack
from doubles_scenarios import LATE_ONLY, Wide, accumulate, tokens_batch, wide_batch
from doubles_training import Outcome, PlainAdamW, Script, Trainee, budget_for, check, config_for, offloaded, plain, same
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import tiermem
from tiermem.optim.choice import Choice
from tiermem.runtime.undo import Undo

SPECULATING = ["backward", "auto"]
BUDGETS = ["generous", "beside", "least"]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(a step was|5 steps in a row were) skipped", UserWarning)
        yield


class Skipping(PlainAdamW):
    """torch's, with a step skipped when its norm is not finite."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if torch.nn.utils.get_total_norm(gradients).isfinite():
            super().step(closure)


def training(
    batch, scales, *, max_norm: float | None = None, lr_before_step: bool = False, count: int = 1, **settings
) -> Script:
    """One step for each scale of the loss; large ones are clipped, NaN is skipped."""

    def script(trainee: Trainee) -> None:
        make = Skipping if trainee.adamw is PlainAdamW else trainee.adamw
        optimizer = make(trainee.model.parameters(), lr=1e-2, max_grad_norm=max_norm, **settings)
        for number, scale in enumerate(scales):
            for _ in range(count):
                loss = batch(trainee.model)
                (loss * scale).backward()
                trainee.note(loss)
            if lr_before_step:
                optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            optimizer.step()
            optimizer.zero_grad()

    return script


def run(make, script, directory: Path, update: str, budget: str = "beside", **settings) -> Outcome:
    return offloaded(make, script, directory, update=update, budget=budget, **settings)


NAN = float("nan")
PATTERNS = {
    "never": [1e-3] * 5,
    "sometimes": [1e-3, 1e-3, 100.0, 1e-3, 100.0, 1e-3],
    "always": [100.0] * 4,
    "not finite": [1e-3, 1e-3, NAN, 1e-3, float("inf"), NAN, 1e-3],
    "all of it": [NAN, 1e-3, 100.0, NAN, 1e-3, 100.0, 1e-3],
}


def deep_stack() -> Stack:
    return Stack(depth=12)


@pytest.mark.parametrize(("budget", "pattern", "update"), part_of(4, [*BUDGETS, "resting"], PATTERNS, SPECULATING))
def test_clipping_has_the_bits_of_plain_training(update, pattern, budget, tmp_path):
    make = deep_stack if budget == "resting" else Stack
    script = training(tokens_batch, PATTERNS[pattern], max_norm=1.0)
    found = run(make, script, tmp_path, update, budget)
    check(found, plain(make, script))
    total = found.statistics.total
    if update == "backward":
        # A loss that is not finite spoils the first gradient already. Nothing is known in the first step that counts.
        early = [scale for scale in PATTERNS[pattern] if math.isfinite(scale)][1:]
        clipped = early.count(100.0)
        assert (total.speculated, total.confirmed, total.redone) == (len(early), len(early) - clipped, clipped)
    else:
        # Elsewhere there is nothing to hide, or no room for it.
        assert bool(total.speculated) == (budget in ("beside", "resting"))


@pytest.mark.parametrize(
    ("update", "pattern", "dtype"), in_turn(SPECULATING, ["all of it", "sometimes"], ["float16", "bfloat16"])
)
def test_sixteen_bits_have_the_bits_of_forward(update, pattern, dtype, tmp_path):
    def batch(model: nn.Module) -> torch.Tensor:
        return model(torch.randn(3, 48).to(getattr(torch, dtype))).float().square().mean()

    script = training(batch, PATTERNS[pattern], max_norm=1.0)
    outcomes = []
    for schedule in ("forward", update):
        (tmp_path / schedule).mkdir()
        outcomes.append(run(Wide, script, tmp_path / schedule, schedule, param_dtype=dtype))
    check(outcomes[1], outcomes[0])
    if update == "backward":
        assert outcomes[1].statistics.total.redone > 0


class Poisoned(torch.autograd.Function):
    """Passes values on, and multiplies gradients by NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * NAN


class PartlyBad(Wide):
    """Layers above `bad_below` get finite gradients, those below NaN."""

    bad_below = 0

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(Poisoned.apply(x) if number and number == self.bad_below else x)
        return x


@pytest.mark.parametrize(
    ("how", "budget", "ending"),
    in_turn([("backward", 1e9), ("auto", None), ("auto", 1e9)], BUDGETS, ["step", "zero_grad"]),
)
def test_a_bad_gradient_behind_good_ones_costs_nothing_but_its_step(how, budget, ending, tmp_path):
    """The last layers are updated already when the first one's gradient turns out to be NaN."""
    update, max_norm = how

    def script(trainee: Trainee) -> None:
        make = Skipping if trainee.adamw is PlainAdamW else trainee.adamw
        optimizer = make(trainee.model.parameters(), lr=1e-2, max_grad_norm=max_norm)
        for number in range(6):
            trainee.model.bad_below = 1 if number in (2, 4) else 0
            loss = wide_batch(trainee.model)
            loss.backward()
            trainee.note(loss)
            if ending == "step" or number not in (2, 4):
                optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, tiermem.AdamW) and ending == "step":
            assert optimizer.skipped == 2
            assert all(optimizer.steps_of(parameter) == 4 for parameter in trainee.model.parameters())

    found = run(PartlyBad, script, tmp_path, update, budget)
    check(found, plain(PartlyBad, script))
    if update == "backward":
        total = found.statistics.total
        assert (total.speculated, total.confirmed, total.redone) == (5, 3, 0)


# "backward" with one optimizer that does not clip: updates under backward are for good.


def said_of_zero_grad(expected: bool = True) -> contextlib.AbstractContextManager[object]:
    """That it has come too late for some gradients is a warning."""
    return (
        pytest.warns(RuntimeWarning, match="zero_grad.*those updates count") if expected else contextlib.nullcontext()
    )


def said_of_the_evaluation(expected: bool):
    said = "evaluated between backward and step, and computes with values of after the step"
    return pytest.warns(RuntimeWarning, match=said) if expected else contextlib.nullcontext()


@pytest.mark.parametrize(("budget", "ending"), in_turn(BUDGETS, ["step", "zero_grad"]))
def test_without_clipping_a_bad_gradient_behind_good_ones_is_an_error_that_ends_the_step(budget, ending, tmp_path):
    """What was updated stays so, the first layer has no gradient in that step, and training goes on."""

    def script(trainee: Trainee) -> None:
        first = list(trainee.model.layers[0].parameters())
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for number in range(6):
            # zero_grad has later updates kept so that they can be undone: see the next test.
            bad = number in ((2, 4) if ending == "step" else (2,))
            ours = trainee.adamw is not PlainAdamW
            trainee.model.bad_below = 1 if bad else 0
            loss = wide_batch(trainee.model)
            loss.backward()
            trainee.note(loss)
            if bad and trainee.adamw is PlainAdamW:
                for parameter in first:
                    parameter.grad = None
            if bad and ending == "step" and trainee.adamw is not PlainAdamW:
                with pytest.raises(tiermem.TiermemError, match=r"not finite.*max_grad_norm.*'auto', 'forward' or"):
                    optimizer.step()
            elif not bad or trainee.adamw is PlainAdamW:
                optimizer.step()
            with said_of_zero_grad(bad and ours and ending == "zero_grad"):
                optimizer.zero_grad()
        if isinstance(optimizer, tiermem.AdamW):
            assert optimizer.skipped == 0
            for parameter in trainee.model.parameters():
                without = (2 if ending == "step" else 1) if any(parameter is other for other in first) else 0
                assert optimizer.steps_of(parameter) == 6 - without

    check(run(PartlyBad, script, tmp_path, "backward", budget), plain(PartlyBad, script))


def test_after_such_a_step_a_commit_covers_what_was_updated(tmp_path):
    torch.manual_seed(0)
    model = PartlyBad()
    config = config_for(tmp_path, budget_for(model, tmp_path, "beside"), "backward", commits=True)
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            model.bad_below = 1 if number == 2 else 0
            wide_batch(model).backward()
            if number == 2:
                with pytest.raises(tiermem.TiermemError, match="between backward and step"):
                    runtime.commit()
                with pytest.raises(tiermem.TiermemError, match="not finite"):
                    optimizer.step()
            else:
                optimizer.step()
        runtime.commit().wait()
        before = {name: runtime.master(parameter) for name, parameter in model.named_parameters()}
    model = PartlyBad()
    with tiermem.offload(model, config, resume=True) as runtime:
        assert runtime._house.steps.number == 3
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        assert [optimizer.steps_of(layer.up.weight) for layer in model.layers] == [2, 3, 3]
        for name, parameter in model.named_parameters():
            assert same(runtime.master(parameter), before[name])


def test_a_backward_that_fails_is_ended_by_zero_grad(tmp_path):
    """In the middle of a unit: it is no example of how many gradients the next step brings."""
    torch.manual_seed(0)
    model = Wide()
    config = config_for(tmp_path, budget_for(model, tmp_path, "beside"), "backward")
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number in range(5):
            loss = wide_batch(model)
            if number == 2:

                def fail(_: torch.Tensor) -> None:
                    raise ValueError("in backward")

                handle = model.layers[0].up.weight.register_hook(fail)
                with pytest.raises(ValueError, match="in backward"):
                    loss.backward()
                handle.remove()
            else:
                loss.backward()
                optimizer.step()
            with said_of_zero_grad(number == 2):
                optimizer.zero_grad()
        assert [optimizer.steps_of(layer.up.weight) for layer in model.layers] == [4, 5, 5]
        runtime.settle()


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_that_are_dropped_count_once_at_most_and_with_a_warning(budget, tmp_path):
    """A loss that goes through two models and is for one of them, as a generator's through its discriminator."""

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for number in range(6):
            tokens_batch(trainee.model).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 2 and trainee.adamw is PlainAdamW:  # the first time it comes too late
                tokens_batch(trainee.model).backward()
                optimizer.step()
                optimizer.zero_grad()
            elif number >= 2:
                tokens_batch(trainee.model).backward()
                with said_of_zero_grad(number == 2):
                    optimizer.zero_grad()

    check(run(Stack, script, tmp_path, "backward", budget), plain(Stack, script))


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_graph_made_between_gradients_that_are_dropped_and_zero_grad_is_not_stale(budget, tmp_path):
    """Its values are those behind the updates that count: `zero_grad` before backward, as in many loops."""

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for number in range(6):
            loss = tokens_batch(trainee.model)
            with said_of_zero_grad(number == 3 and trainee.adamw is not PlainAdamW):
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= 2:
                tokens_batch(trainee.model).backward()
            if number == 2 and trainee.adamw is PlainAdamW:  # the first time it comes too late
                optimizer.step()

    check(run(Stack, script, tmp_path, "backward", budget), plain(Stack, script))


@pytest.mark.parametrize("budget", BUDGETS)
def test_an_optimizer_that_takes_over_from_one_that_clips_by_calls_may_clip_too(budget, tmp_path):
    """What was learned of the old one's steps goes over with the moments: no clipping comes too late."""

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for number in range(6):
            if number == 3:
                before, optimizer = optimizer, trainee.adamw(trainee.model.parameters(), lr=2e-2)
                if trainee.adamw is PlainAdamW:
                    optimizer.state.update(before.state)
            tokens_batch(trainee.model).backward()
            trainee.note(optimizer.clip_grad_norm_(0.1))
            optimizer.step()
            optimizer.zero_grad()

    check(run(Stack, script, tmp_path, "backward", budget), plain(Stack, script))


@pytest.mark.parametrize("budget", BUDGETS)
def test_without_clipping_nothing_is_protected(budget, tmp_path, monkeypatch):
    """Neither is the room for another copy asked for, nor a page written down to keep what it was."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("an update of plain backward was to be protected")

    for name in ("has_room", "protection"):
        monkeypatch.setattr(Undo, name, never)
    script = training(tokens_batch, [1e-3] * 5)
    found = run(Stack, script, tmp_path, "backward", budget)
    check(found, plain(Stack, script))
    assert found.statistics.total.speculated == 0


@pytest.mark.parametrize("max_norm", [None, 1e9])
def test_without_clipping_nothing_moves_where_all_fits(max_norm, tmp_path):
    torch.manual_seed(0)
    model = Wide()
    with tiermem.offload(model, config_for(tmp_path, "8MiB", "backward")) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), max_grad_norm=max_norm)
        moved = []
        for _ in range(5):
            wide_batch(model).backward()
            if moved:
                assert (optimizer.steps_of(model.layers[2].up.weight) > len(moved)) == (max_norm is None)  # early
            optimizer.step()
            optimizer.zero_grad()
            last = runtime.statistics().last
            moved.append((last.bytes_read, last.bytes_written))
    if max_norm is None:
        assert moved[1:] == [(0, 0)] * 4
    else:
        # The bytes before are written down; not in a step that was over before its updates had begun.
        assert sum(written for _, written in moved[1:]) > 0


def test_clipping_that_is_asked_for_too_late_changes_nothing(tmp_path):
    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for number in range(4):
            tokens_batch(trainee.model).backward()
            if number == 2 and trainee.adamw is not PlainAdamW:
                optimizer.max_grad_norm = 1e-3
                with pytest.raises(tiermem.ConfigError, match="too late"):
                    optimizer.step()
                optimizer.max_grad_norm = None
            optimizer.step()
            optimizer.zero_grad()

    check(run(Stack, script, tmp_path, "backward"), plain(Stack, script))


@pytest.mark.parametrize(("name", "budget"), part_of(3, LATE_ONLY, BUDGETS))
def test_where_gradients_are_kept_nothing_is_refused(name, budget, tmp_path):
    """Evaluation before the step, clipping calls, gradients read, one more backward: as if nothing were early."""
    make, script, _ = LATE_ONLY[name]

    def clipping(trainee: Trainee) -> None:
        ours = trainee.adamw
        trainee.adamw = lambda parameters, **settings: ours(parameters, max_grad_norm=1e9, **settings)
        script(trainee)

    found = run(make, clipping, tmp_path, "backward", budget)
    check(found, plain(make, clipping))
    assert found.statistics.total.speculated > 0


def test_clip_calls_are_served_from_the_second_step_on(tmp_path):
    make, script, _ = LATE_ONLY["clip_grad_norm_"]
    found = run(make, script, tmp_path, "backward")
    check(found, plain(make, script))
    assert found.statistics.total.redone == 3


@pytest.mark.parametrize(("update", "max_norm"), [("backward", 1e9), ("auto", None), ("auto", 1e9)])
def test_a_learning_rate_changed_before_the_step(update, max_norm, tmp_path):
    script = training(tokens_batch, [1.0] * 4, max_norm=max_norm, lr_before_step=True)
    found = run(Stack, script, tmp_path, update)
    check(found, plain(Stack, script))
    assert found.statistics.total.speculated > 0


@pytest.mark.parametrize("update", SPECULATING)
def test_accumulation_with_clipping(update, tmp_path):
    script = training(tokens_batch, PATTERNS["all of it"], max_norm=1.0, count=3)
    check(run(Stack, script, tmp_path, update), plain(Stack, script))


@pytest.mark.parametrize("counts", [(1, 2, 2, 1, 3, 1), (3, 1, 1, 4, 4)])
def test_changing_numbers_of_backwards_are_no_error_in_auto(counts, tmp_path):
    found = run(Stack, accumulate(counts, gradients=True), tmp_path, "auto")
    check(found, plain(Stack, accumulate(counts, gradients=True)))


def two_optimizers(*, skip_second: bool = False, second_clips: float | None = None) -> Script:
    """One that clips now and then and one that does not (unless told to), over parts of the same units."""

    def script(trainee: Trainee) -> None:
        make = Skipping if trainee.adamw is PlainAdamW else trainee.adamw
        named = list(trainee.model.parameters())
        first = make(named[::2], lr=1e-2, max_grad_norm=1.0)
        second = make(named[1::2], lr=2e-2, max_grad_norm=second_clips)
        for number, scale in enumerate([1e-3, 1e-3, 100.0, 1e-3, NAN, 1e-3, 100.0]):
            loss = tokens_batch(trainee.model)
            (loss * scale).backward()
            trainee.note(loss)
            first.step()
            first.zero_grad()
            if not skip_second or number not in (1, 3, 5):  # the first has kept its share then
                second.step()
                second.zero_grad()

    return script


@pytest.mark.parametrize(
    ("budget", "second", "update"), in_turn(BUDGETS, [(False, None), (True, None), (False, 1e-5)], SPECULATING)
)
def test_two_optimizers_that_clip_differently(budget, second, update, tmp_path):
    """Where the second leaves a step out, its gradients go on growing, as in plain PyTorch.

    Where it clips after the first has kept its share, the share is done again with the settings it had.
    """
    skip_second, second_clips = second
    script = two_optimizers(skip_second=skip_second, second_clips=second_clips)
    found = run(Stack, script, tmp_path, update, budget)
    check(found, plain(Stack, script))
    assert update == "auto" or found.statistics.total.speculated > 0


@pytest.mark.parametrize("update", SPECULATING)
def test_what_is_looked_at_before_the_step_is_what_was(update, tmp_path):
    torch.manual_seed(0)
    model = Wide()
    with tiermem.offload(model, config_for(tmp_path, budget_for(model, tmp_path, "beside"), update)) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9)
        for number in range(4):
            weight = model.layers[number % 3].up.weight
            before = runtime.parameter(weight), runtime.master(weight)
            wide_batch(model).backward()
            assert optimizer.steps_of(weight) == number
            with pytest.raises(tiermem.TiermemError, match="between backward and step"):
                runtime.commit()
            if number % 2:
                assert runtime.gradient(weight) is not None
                assert same(runtime.parameter(weight), before[0])
                assert same(runtime.master(weight), before[1])
            optimizer.step()
            assert optimizer.steps_of(weight) == number + 1
            optimizer.zero_grad()
            assert not same(runtime.parameter(weight), before[0])


def test_a_gradient_that_is_used_up_before_the_step_is_not_taken_for_none(tmp_path):
    torch.manual_seed(0)
    model = Wide()
    with tiermem.offload(model, config_for(tmp_path, budget_for(model, tmp_path, "beside"), "backward")) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        weight = model.layers[2].up.weight
        for number in range(3):
            wide_batch(model).backward()
            if number:
                with pytest.raises(tiermem.TiermemError, match=r"gradient of layers.2.up.weight is used up.*'auto'"):
                    runtime.gradient(weight)
            else:  # nobody knows yet how many gradients a step brings
                assert runtime.gradient(weight) is not None
            optimizer.step()
            assert runtime.gradient(weight) is None
            optimizer.zero_grad()


@pytest.mark.parametrize(("how", "budget"), half_of([("backward", None), ("backward", 1e9), ("auto", None)], BUDGETS))
def test_an_evaluation_before_the_step_is_warned_of_where_it_computes_with_what_is_behind(how, budget, tmp_path):
    update, max_norm = how
    torch.manual_seed(0)
    model = Stack()
    with tiermem.offload(model, config_for(tmp_path, budget_for(model, tmp_path, budget), update)) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=max_norm)
        for number in range(4):
            tokens_batch(model).backward()
            with torch.no_grad(), said_of_the_evaluation(number > 0 and update == "backward" and max_norm is None):
                before = tokens_batch(model)
            optimizer.step()
            optimizer.zero_grad()
            assert not before.isnan()
        runtime.settle()


def test_writing_before_the_step_is_refused_only_where_gradients_are_gone(tmp_path):
    for max_norm in (None, 1e9):
        model = Wide()
        directory = tmp_path / str(max_norm)
        directory.mkdir()
        with tiermem.offload(model, config_for(directory, "96KiB", "backward")) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), max_grad_norm=max_norm)
            for _ in range(2):
                wide_batch(model).backward()
                optimizer.step()
            wide_batch(model).backward()
            if max_norm is None:
                with pytest.raises(tiermem.TiermemError, match="gradients up"), runtime.gathered(model, write=True):
                    pass
            else:
                with runtime.gathered(model.layers[0], write=True):
                    model.layers[0].up.weight.data.zero_()
                assert not runtime.parameter(model.layers[0].up.weight).any()
            optimizer.step()
            runtime.settle()


class Event(NamedTuple):
    """What happens in one step; the two letters say what each optimizer does: step, drop its gradients, or nothing."""

    scale: float
    backwards: int
    evaluated: bool
    lr: float | None
    endings: str


EVENTS = st.lists(
    st.builds(
        Event,
        scale=st.sampled_from([1e-3, 1e-3, 1e-3, 100.0, NAN]),
        backwards=st.sampled_from([1, 1, 1, 2]),
        evaluated=st.sampled_from([False, False, False, True]),
        lr=st.sampled_from([None, None, None, 3e-3]),
        endings=st.sampled_from(["ss", "ss", "ss", "sd", "ds", "sn", "ns", "nn"]),
    ),
    min_size=3,
    max_size=8,
)

FIVE_SKIPPED = [Event(scale, 1, False, None, "ss") for scale in (*[1e-3] * 3, *[NAN] * 5)]


def life(events: Sequence[Event], clips: tuple[float | None, float | None]) -> Script:
    def script(trainee: Trainee) -> None:
        make = Skipping if trainee.adamw is PlainAdamW else trainee.adamw
        named = list(trainee.model.parameters())
        optimizers = [make(named[k::2], lr=1e-2, max_grad_norm=clip) for k, clip in enumerate(clips)]
        for event in events:
            for _ in range(event.backwards):
                loss = tokens_batch(trainee.model)
                (loss * event.scale).backward()
                trainee.note(loss)
            if event.evaluated:
                with torch.no_grad():
                    trainee.note(tokens_batch(trainee.model))
            if event.lr is not None:
                optimizers[0].param_groups[0]["lr"] = event.lr
            for optimizer, ending in zip(optimizers, event.endings, strict=True):
                if ending == "s":
                    optimizer.step()
                if ending != "n":
                    optimizer.zero_grad()

    return script


@given(
    events=EVENTS,
    clips=st.tuples(st.sampled_from([None, 1.0, 1e9]), st.sampled_from([None, 1.0])),
    update=st.sampled_from(SPECULATING),
    budget=st.sampled_from(["beside", "least"]),
)
@example(events=FIVE_SKIPPED, clips=(None, None), update="backward", budget="beside")
@settings(max_examples=number_of(6, 25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_life_of_two_optimizers(events, clips, update, budget):
    script = life(events, clips)
    with tempfile.TemporaryDirectory() as directory:
        check(run(Stack, script, Path(directory), update, budget), plain(Stack, script))


# The choice of "auto".


def choices(outcomes: list[bool]) -> list[bool]:
    choice, early = Choice(), []
    for kept in outcomes:
        early.append(choice.early)
        choice = choice.after(kept=kept)
    return early


def test_auto_turns_away_soon_and_comes_back_when_it_is_calm():
    assert choices([True] * 50) == [True] * 50
    assert choices([False] * 5) == [True, True, False, False, False]
    assert choices([True] * 20 + [False, True] * 2)[-1] is False
    once_in_ten = ([True] * 9 + [False]) * 5
    assert all(choices(once_in_ten))
    back = choices([False] * 2 + [True] * 20)
    assert back[2:].index(True) == 16
