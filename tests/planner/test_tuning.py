"""The search for settings: right by its model, and not in love with change."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tiermem.errors import CapacityError
from tiermem.planner.design import PlanSettings
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.planner.predict import seconds_of_step
from tiermem.planner.tuning import search, tune
from tiermem.planner.workload import transformer

MIB = 1 << 20
START = PlanSettings(host_memory=64 * MIB)


def test_the_default_stays_when_nothing_is_faster_by_a_hundredth() -> None:
    tuning = search(START, lambda settings: 1.0 if settings == START else 0.995)
    assert tuning.chosen is tuning.default
    assert len(tuning.trials) > 10


def test_the_best_of_a_bowl_is_found() -> None:
    def seconds(settings: PlanSettings) -> float:
        depth = abs(settings.queue_depth - 16) / 16
        tile = abs((settings.tile_nbytes or 8 * MIB) - 4 * MIB) / MIB
        return 1 + depth + tile + (settings.update != "backward")

    tuning = search(START, seconds, updates=["backward", "step"])
    chosen = tuning.chosen.settings
    assert (chosen.queue_depth, chosen.tile_nbytes, chosen.update) == (16, 4 * MIB, "backward")
    assert tuning.chosen.seconds == min(trial.seconds for trial in tuning.trials) == 1
    assert tuning.best(3)[0] is tuning.chosen


def test_what_does_not_fit_is_passed_over() -> None:
    def seconds(settings: PlanSettings) -> float:
        if settings.look_ahead is not None:
            raise CapacityError("no room")
        return 1.0

    assert all(trial.settings.look_ahead is None for trial in search(START, seconds).trials)
    with pytest.raises(CapacityError):
        search(replace(START, look_ahead=1), seconds)


def test_a_drive_throttled_to_a_fifth_asks_for_another_depth() -> None:
    work = transformer(2_000_000, batch=2, seq=64)
    host = Host(flops={"bfloat16": 1e12}, update_rate={"bfloat16": 1e9})

    def machine(share: float) -> Machine:
        # Latency stays: what a throttle takes is bandwidth, so that fewer blocks in flight fill it.
        drive = Drive(read=5e9 * share, write=4e9 * share, mixed=4e9 * share, latency=2e-3)
        return Machine(name="test", source="described for a test", host=host, drive=drive)

    start = replace(START, host_memory=12 * MIB, queue_depth=1, block_size=1 * MIB)
    chosen = {}
    for share in (1.0, 0.2):
        tuning = tune(work, machine(share), start)
        settings = tuning.chosen.settings
        chosen[share] = (settings.queue_depth, settings.block_size, settings.look_ahead)
        assert tuning.chosen is not tuning.default
        # Right by the model: nothing on the grid of depth and block beats it by more than a hundredth.
        for depth, block in itertools.product((1, 8), (1, 16)):
            tried = replace(settings, queue_depth=depth, block_size=block * MIB)
            assert seconds_of_step(work, machine(share), tried) >= tuning.chosen.seconds * 0.99
    assert chosen[1.0] != chosen[0.2]
