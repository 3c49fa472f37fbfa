"""A run refines its look-ahead by its first steps, goes back where they contradict, and never changes a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles_combinations import half_of
from doubles_models import Stack, small_llama
from doubles_scenarios import loop, tokens_batch
from doubles_training import check, config_for, offloaded, plain, within_budgets

import tiermem
from tiermem.look_ahead import LookAhead
from tiermem.planner.observed import Observed
from tiermem.planner.refining import COUNTED, SETTLING, LookAheadControl, Stage
from tiermem.runtime import look_ahead as module
from tiermem.runtime.look_ahead import RefinedLookAhead
from tiermem.timeline import Event

MIB = 1 << 20
RATE = 1e8
STEPS = 3 + 2 * (SETTLING + COUNTED)
FEW = 2 + SETTLING + COUNTED  # another look-ahead would be in use by then


@dataclass
class SlowDrive:
    """Says that bytes took what they take on a slow drive, where the inline backend moves them in no time.

    Each step's seconds are its bytes at RATE, a hundredth besides, and times `slower` with another look-ahead.
    """

    slower: float = 1.0
    runtime: Any = None
    moved: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def observe(self, events: list[Event], most: int) -> Observed:
        assert most == COUNTED
        assert any(event.lane == "steps" for event in events)
        units = range(len(self.runtime._house.layouts))
        share = 0.005 * self.seconds / len(units)
        return Observed(
            forward=dict.fromkeys(units, share),
            backward=dict.fromkeys(units, share),
            elsewhere=0.0,
            updating=0.01 * self.seconds,
            read=RATE,
            write=RATE,
            mixed=RATE,
        )

    @property
    def seconds(self) -> float:
        return self.moved[-1] / RATE

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step_closed = RefinedLookAhead.step_closed

        def told(choice: RefinedLookAhead, seconds: float) -> None:
            assert seconds > 0
            last = self.runtime.statistics().last
            self.moved.append(last.bytes_read + last.bytes_written)
            found = choice.look_ahead
            self.used.append(found.nbytes)
            step_closed(choice, 1.01 * self.seconds * (1.0 if found.nbytes == found.planned else self.slower))

        monkeypatch.setattr(RefinedLookAhead, "step_closed", told)
        monkeypatch.setattr(module, "observe", self.observe)
        monkeypatch.setattr(module, "SHARE", 1e9)  # all of the simulation behind one step


def train(drive: SlowDrive, directory: Path, steps: int = STEPS, **settings: Any) -> tiermem.Statistics:
    torch.manual_seed(0)
    model = small_llama(words=512, width=128, mlp_width=344, layers=4)
    chosen = {"host_memory": 2 * MIB, "update": "step", "tile_size": "256KiB"} | settings
    config = tiermem.Config(device="cpu", swap_dirs=[directory], io_backend="inline", commits=False, **chosen)
    with tiermem.offload(model, config) as runtime:
        drive.runtime = runtime
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(steps):
            tokens = torch.randint(512, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = runtime.statistics()
    within_budgets(found)
    return found


def test_a_shorter_step_is_foreseen_tried_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = SlowDrive()
    drive.patch(monkeypatch)
    found = train(drive, tmp_path).look_ahead
    assert found is not None
    assert found.nbytes != found.planned
    assert found.reason.startswith("refined: ")
    assert len(set(drive.used)) == 2
    assert min(drive.moved[-2:]) < 0.97 * min(drive.moved[SETTLING : SETTLING + COUNTED]), "it moves fewer bytes"


def test_where_steps_get_longer_it_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = SlowDrive(slower=2.0)
    drive.patch(monkeypatch)
    found = train(drive, tmp_path).look_ahead
    assert found is not None
    assert found.nbytes == found.planned
    assert found.reason.startswith("planned; with ")
    assert len(set(drive.used)) == 2, "another one was tried"
    assert drive.used[-1] == drive.used[0]


def test_a_number_that_was_given_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = SlowDrive()
    drive.patch(monkeypatch)
    found = train(drive, tmp_path, FEW, look_ahead="256KiB").look_ahead
    assert found == LookAhead(256 << 10, 256 << 10, "as configured")
    assert drive.used == []


def test_where_everything_fits_nothing_is_refined(tmp_path: Path) -> None:
    found = train(SlowDrive(), tmp_path, FEW, host_memory=64 * MIB).look_ahead
    assert found is not None
    assert found.nbytes == found.planned
    assert "nothing is moved" in found.reason


def test_beside_a_device_it_says_that_it_is_not(tmp_path: Path) -> None:
    model = Stack()
    with tiermem.offload(model, config_for(tmp_path, MIB, "step", device="simulated", device_memory=MIB)) as runtime:
        found = runtime.statistics().look_ahead
        assert found is not None
        assert "not refined beside a device" in found.reason
        assert "not refined beside a device" in found.describe()


class Restless(LookAheadControl):
    """Changes its mind behind every step."""

    def measured(self, seconds: float) -> None:
        choices = [0, 4096, self.planned, 2 * self.planned, 16 * MIB]
        self.in_use = choices[(choices.index(self.in_use) + 1) % len(choices)]


@pytest.mark.parametrize(("update", "budget"), half_of(["step", "forward", "backward"], ["tight", "least"]))
def test_the_numbers_are_those_of_plain_training_whatever_it_is(
    update: str, budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LookAheadControl", Restless)
    script = loop(tokens_batch, 8, max_grad_norm=1.0)
    found = offloaded(Stack, script, tmp_path, update=update, budget=budget)
    check(found, plain(Stack, script))
    assert found.statistics is not None
    assert found.statistics.look_ahead is not None
    assert found.statistics.look_ahead.nbytes != found.statistics.look_ahead.planned


def choice_with(course: Any, told: list[Any]) -> Any:
    """A look-ahead amid the simulation `course`; what its control is told goes to `told`."""
    control: Any = SimpleNamespace(measured=told.append, stage=Stage.FORESEEING)
    nobody: Any = None
    choice = RefinedLookAhead(control, nobody, nobody, nobody)
    choice._course = course
    return choice


def test_what_simulating_took_is_no_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    choice, moments = choice_with((None for _ in range(1000)), told), iter([10.0, 10.0, 10.5, 10.5])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    choice.step_closed(4.0)
    choice._control.stage = Stage.TRYING
    choice.step_closed(4.0)
    choice.step_closed(4.0)
    assert told == [4.0, 3.5, 4.0]


def test_a_simulation_that_was_interrupted_begins_anew() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    choice = choice_with((interrupt() for _ in range(2)), [])
    with pytest.raises(KeyboardInterrupt):
        choice._foresee(1.0)
    assert choice._course is None
