"""float32 training has, bit for bit, the numbers of plain PyTorch with `torch.optim.AdamW(fused=True)`.

In every update schedule and down to the least host budget there is, with released memory overwritten by NaN, so that a
value read too late shows. Losses on the way are compared as well as the final weights.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from doubles_combinations import each_of, half_of, part_of
from doubles_models import Stack
from doubles_scenarios import (
    LATE_ONLY,
    SCENARIOS,
    Scenario,
    Wide,
    channels_last_batch,
    clip_calls,
    hugging_face,
    loop,
    rows_batch,
    wide_batch,
)
from doubles_training import Outcome, check, offloaded, plain

import tiermem

try:
    HUGGING_FACE = hugging_face()
except ImportError:
    HUGGING_FACE = {}
ALL = SCENARIOS | LATE_ONLY | HUGGING_FACE
COMBINATIONS = [
    ("step", "least"),
    ("forward", "generous"),
    ("forward", "tight"),
    ("forward", "least"),
    ("backward", "generous"),
    ("backward", "tight"),
    ("backward", "least"),
    ("auto", "tight"),
]


def named(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else "-".join(value)


@functools.cache
def expected(name: str) -> Outcome:
    return plain(ALL[name].make, ALL[name].script)


def run(scenario: Scenario, directory, update: str, budget: str, **settings) -> Outcome:
    return offloaded(
        scenario.make, scenario.script, directory, update=update, budget=budget, units=scenario.units, **settings
    )


@pytest.mark.parametrize(("name", "how"), part_of(8, SCENARIOS, COMBINATIONS), ids=named)
def test_ordinary_life(name, how, tmp_path):
    update, budget = how
    check(run(ALL[name], tmp_path, update, budget), expected(name))


@pytest.mark.parametrize(
    ("name", "how"), part_of(5, LATE_ONLY, [pair for pair in COMBINATIONS if pair[0] != "backward"]), ids=named
)
def test_what_needs_gradients_until_the_step(name, how, tmp_path):
    check(run(ALL[name], tmp_path, *how), expected(name))


@pytest.mark.parametrize(
    ("name", "how"), part_of(6, HUGGING_FACE, [*COMBINATIONS[:2], *COMBINATIONS[3:6], COMBINATIONS[-2]]), ids=named
)
def test_hugging_face_models(name, how, tmp_path):
    update, budget = how
    check(run(ALL[name], tmp_path, update, budget), expected(name))


CHANGING = (2, 2, 1, 3)


def test_a_surprising_backward_is_refused_where_units_are_updated_early(tmp_path):
    """In "backward" a unit is updated when as many gradients have come as in the step before; one more is too late."""
    done = []

    def script(trainee):
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for count in CHANGING:
            for _ in range(count):
                (trainee.model(torch.randint(0, 40, (2, 5))).square().mean() / count).backward()
            optimizer.step()
            done.append(count)

    with pytest.raises(tiermem.TiermemError, match="Choose update='auto', 'forward' or 'step'"):
        offloaded(Stack, script, tmp_path, update="backward", budget="tight")
    assert done == [2, 2, 1]
    assert list(tmp_path.iterdir()) == []


class Branches(torch.nn.Module):
    """One unit of two layers, of which a step may use one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, names):
        for name in names:
            x = getattr(self, name)(x)
        return x


def test_a_gradient_of_a_parameter_that_had_none_in_the_step_before_may_come_too_late(tmp_path):
    model = Branches()
    config = tiermem.Config(
        device="cpu", swap_dirs=[tmp_path], host_memory="4MiB", update="backward", param_dtype="float32"
    )
    with tiermem.offload(model, config, units=[model]):
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(3, 4), ["first"]).sum().backward()
            optimizer.step()
        model(torch.randn(3, 4), ["first", "second"]).sum().backward()  # together they come in time
        optimizer.step()
        model(torch.randn(3, 4), ["first"]).sum().backward()
        optimizer.step()
        model(torch.randn(3, 4), ["first"]).sum().backward()
        with pytest.raises(
            tiermem.TiermemError,
            match=r"a gradient of second.* or a parameter that had none then\). Choose update='auto'",
        ):
            model(torch.randn(3, 4), ["second"]).sum().backward()


class Large(torch.nn.Sequential):
    """A gradient above the size from which torch reduces with several threads, and strided ones."""

    def __init__(self):
        super().__init__(torch.nn.Linear(6, 300), torch.nn.Linear(300, 200), torch.nn.Linear(200, 3))
        self[2].weight = torch.nn.Parameter(self[2].weight.detach().t().contiguous().t())


CLIPPED = {
    "several tiles each": (Wide, wide_batch),
    "many elements": (Large, rows_batch),
    "channels last": (SCENARIOS["channels last"].make, channels_last_batch),
}


@pytest.mark.parametrize(("name", "update"), half_of(CLIPPED, ["step", "forward"]))
def test_clipping_has_the_same_bits_where_parameters_span_tiles(name, update, tmp_path):
    """The norm is taken when a gradient arrives, of the whole of it, before it is cut into tiles."""
    make, batch = CLIPPED[name]
    for number, script in enumerate((clip_calls(batch), loop(batch, max_grad_norm=0.05))):
        directory = tmp_path / str(number)
        directory.mkdir()
        check(offloaded(make, script, directory, update=update, budget="least"), plain(make, script))


class OneMatrix(torch.nn.Linear):
    """A single parameter: its norm is the norm of all."""

    def __init__(self):
        super().__init__(6, 6, bias=False)


@pytest.mark.parametrize(
    ("update", "make", "clip"),
    each_of(["step", "forward", "backward", "auto"], [Wide, OneMatrix], [{}, {"max_grad_norm": 1.0}]),
)
def test_gradients_whose_squares_are_too_large_for_float32(update, clip, make, tmp_path):
    """They are finite, so the step counts; clipped they are zero, because torch's norm of them is infinite."""
    factors = itertools.cycle([1.0, 1e26, 1.0])

    def batch(model):
        return (wide_batch if make is Wide else rows_batch)(model) * next(factors)

    script = loop(batch, **clip)
    found = offloaded(make, script, tmp_path, update=update, budget="least" if make is Wide else "generous")
    factors = itertools.cycle([1.0, 1e26, 1.0])
    check(found, plain(make, script))
