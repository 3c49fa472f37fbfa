"""Backward on a thread that is not the caller's, as torch's engine has one for each GPU: the same numbers.

Hooks and what a checkpoint computes again run there: what is noted for each thread is another thread's in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from doubles_combinations import each_of, some_of
from doubles_scenarios import LATE_ONLY, SCENARIOS
from doubles_training import check, offloaded, plain

from tiermem.zero3.engine import backward_number
from tiermem.zero3.step_gradients import StepGradients

# Those in which something is noted for the thread that is at work, or is computed again.
SOME = (
    "module used twice",
    "exception inside a unit",
    "checkpoint, reentrant",
    "checkpoint, not reentrant",
    "checkpoint inside the layer",
    "two backwards a step",
    "lstm",
)
OTHERS = ("stack, tied embedding", "frozen", "branches", "evaluation between steps")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """The threads on which gradients arrive; every backward runs on a thread of its own, those inside it there too."""
    run, arrived, accumulated = torch.autograd._engine_run_backward, list[threading.Thread](), StepGradients.catch_up

    def catch_up(gradients: StepGradients, unit: int) -> None:
        if backward_number() >= 0:
            arrived.append(threading.current_thread())
        accumulated(gradients, unit)

    count = torch.get_num_threads()  # a new thread has another: other last bits
    with ThreadPoolExecutor(1, "pt_autograd", lambda: torch.set_num_threads(count)) as threads:

        def elsewhere(*arguments: Any, **named: Any) -> Any:
            if backward_number() >= 0 or not torch.autograd.is_multithreading_enabled():
                return run(*arguments, **named)
            future = threads.submit(run, *arguments, **named)
            try:
                return future.result()
            finally:
                del future  # it keeps the error that it raises, and that this frame: a circle

        monkeypatch.setattr(torch.autograd, "_engine_run_backward", elsewhere)
        monkeypatch.setattr(StepGradients, "catch_up", catch_up)
        yield arrived
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("name", "budget", "update"),
    each_of(some_of(SOME, OTHERS), ["least", "generous"], ["backward", "auto"])
    + each_of(LATE_ONLY, ["least", "generous"], ["auto"]),
)
def test_same_numbers(name, budget, update, engine, tmp_path):
    scenario = (SCENARIOS | LATE_ONLY)[name]
    expected = plain(scenario.make, scenario.script)
    found = offloaded(scenario.make, scenario.script, tmp_path, update=update, budget=budget, units=scenario.units)
    check(found, expected)
    assert engine
    assert threading.current_thread() not in engine


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_beside_a_device(update, engine, tmp_path):
    scenario = SCENARIOS["checkpoint, reentrant"]
    expected = plain(scenario.make, scenario.script)
    device = {"device": "simulated", "device_memory": "8MiB"}
    found = offloaded(scenario.make, scenario.script, tmp_path, update=update, budget="generous", **device)
    check(found, expected)
    assert engine
    assert threading.current_thread() not in engine
