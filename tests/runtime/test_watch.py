"""The timeline of a run shows units, stalls, moves, update kernels, steps and levels, and the stalls are explained."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from doubles_models import Stack
from doubles_scenarios import tokens_batch
from doubles_training import config_for, least_budget

import tiermem
import tiermem.zero3.conductor
from tiermem.overlap import Cause, explain_stalls
from tiermem.runtime.watch import ComputeWatch
from tiermem.stats import READ_EDGE, WRITE_EDGE, Counters
from tiermem.timeline import COMPUTE_LANE, STALL, STEP_LANE, UPDATE_LANE, Event, Timeline
from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.conductor import Act, Conductor, Operation
from tiermem.zero3.grid import one_copy


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def unit_needed(self, unit: int) -> None:
        self.calls.append(("needed", unit))

    def may_update(self, unit: int) -> bool:
        return True

    def gradients_complete(self, unit: int) -> bool:
        self.calls.append(("complete", unit))
        return unit == 1

    def known_since(self) -> list[int]:
        return [7]


def test_spans_follow_each_other_and_everything_is_passed_on() -> None:
    timeline, told = Timeline(), Told()
    watch = ComputeWatch(told, timeline, ["a", "b"])
    watch.unit_needed(0)
    watch.unit_needed(0)
    watch.unit_needed(1)
    value = torch.ones(1, requires_grad=True)
    result = value * 2
    result.register_hook(lambda gradient: watch.unit_needed(1))
    result.backward()
    assert [watch.gradients_complete(unit) for unit in (0, 1)] == [False, True]
    assert watch.known_since() == [7]
    assert told.calls == [("needed", 0), ("needed", 0), ("needed", 1), ("needed", 1), ("complete", 0), ("complete", 1)]
    first, second, third = timeline.events()
    assert [event.name for event in (first, second, third)] == ["forward a", "forward b", "backward b"]
    assert first.end <= second.start <= second.end <= third.start
    assert third.details == {"unit": 1}
    watch.close()
    assert len(timeline.events()) == 3


def test_what_the_ranks_do_together_is_noted() -> None:
    timeline = Timeline()
    conductor = Conductor(one_copy(SingleProcess()), ["a", "b"], timeline, Counters())
    assert conductor.run(Operation(Act.GATHER, 1, action=lambda prepared: 7)) == 7
    conductor.close()
    assert [event.name for event in timeline.events() if event.lane == "ranks"] == ["gather b"]


def test_waiting_for_what_the_ranks_do_together_is_a_stall_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, counters = Timeline(), Counters()
    conductor = Conductor(one_copy(SingleProcess()), ["a", "b"], timeline, counters)
    may_come, here = threading.Event(), threading.get_ident()

    def moment() -> float:
        if threading.get_ident() == here:  # the wait has begun
            may_come.set()
        return time.perf_counter()

    monkeypatch.setattr(tiermem.zero3.conductor, "time", SimpleNamespace(perf_counter=moment))

    def others_come(_: object) -> int:
        assert may_come.wait(60)
        return 7

    under_way = conductor.start(Operation(Act.GATHER, 1, action=others_come))
    assert conductor.wait(under_way) == 7
    assert conductor.wait(under_way) == 7  # it is there: nothing is waited for

    def fails(_: object) -> None:
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        conductor.run(Operation(Act.GATHER, 0, action=fails))
    step = counters.step()
    conductor.close()
    stalls = [event for event in timeline.events() if event.name == STALL]
    assert stalls[0].details == {"waits": (), "for": "ranks"}
    assert 0 < step.rank_seconds == step.stall_seconds
    assert step.rank_seconds == pytest.approx(sum(stall.end - stall.start for stall in stalls))
    whole = Event("step", STEP_LANE, stalls[0].start - 1, stalls[-1].end + 1, {})
    report = explain_stalls([whole, *timeline.events()])
    assert report.by_cause() == {Cause.RANKS: pytest.approx(step.rank_seconds)}


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_a_run_leaves_a_complete_trace(update: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack()
    budget = least_budget(model, tmp_path)
    with tiermem.offload(model, config_for(tmp_path, budget, update)) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            tokens_batch(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime.settle()
        report = runtime.timeline(tmp_path / "trace.json")
        stalled = runtime.statistics().total.stall_seconds
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [entry for entry in trace if entry["ph"] == "X"]
    lanes = {entry["cat"] for entry in spans}
    assert lanes == {COMPUTE_LANE, UPDATE_LANE, STEP_LANE, READ_EDGE, WRITE_EDGE}
    units = {entry["name"] for entry in spans if entry["cat"] == COMPUTE_LANE and entry["name"] != STALL}
    names = {layout.name for layout in runtime._house.layouts}
    assert units == {f"{phase} {name}" for phase in ("forward", "backward") for name in names}
    assert any(entry["ph"] == "C" and entry["name"] == "reserved HOST" for entry in trace)
    assert report.steps == 3
    assert report.stall_seconds <= stalled
    assert sum(report.by_cause().values()) == pytest.approx(report.stall_seconds)
