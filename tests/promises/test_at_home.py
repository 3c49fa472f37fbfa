"""Parameters at home on the device: hardly a byte of them goes to disk, but where it is wanted there; the same bits."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from doubles_combinations import some_of
from doubles_training import Outcome, Trainee, check, plain
from torch import nn

import tiermem
from tiermem.memory.arena import rounded
from tiermem.runtime.blueprint import draw

LAYERS, WIDTH, STEPS = 32, 64, 5
LAYER_NBYTES = 4 * (WIDTH + 1) * WIDTH
# Of parameters, gradients and moments together, in float32: a fifth in host memory, all parameters twice on the device.
HOST, DEVICE = LAYERS * LAYER_NBYTES * 4 // 5, 2 * LAYERS * LAYER_NBYTES


def make() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def config(directory: Path, update: str, **settings: object) -> tiermem.Config:
    given = {"device": "simulated", "device_memory": DEVICE, "host_memory": HOST, "swap_dirs": [directory]}
    given |= {"update": update, "param_dtype": "float32", "tile_size": "64KiB", "look_ahead": "64KiB"}
    return tiermem.Config(**{**given, **settings})  # type: ignore[arg-type]


def train(trainee: Trainee, steps: range = range(STEPS)) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for step in steps:
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = trainee.model(inputs).square().mean()
        loss.backward()
        trainee.note(loss)
        optimizer.step()
        optimizer.zero_grad()


def weights(runtime: tiermem.Runtime) -> dict[str, torch.Tensor]:
    return {name: runtime.parameter(parameter) for name, parameter in runtime.model.named_parameters()}


def moved(file: Path, steps: int) -> Counter[tuple[str, str]]:
    """Bytes by edge and kind of page in the last so many steps."""
    events = json.loads(file.read_text())["traceEvents"]
    starts = sorted(event["ts"] for event in events if event["name"] == "forward 0")
    found: Counter[tuple[str, str]] = Counter()
    for event in events:
        page = re.fullmatch(r"unit \d+ (\w+) tile \d+", event["name"])
        if page and "->" in event.get("cat", "") and event["ts"] >= starts[-steps]:
            found[event["cat"], page[1]] += event["args"]["bytes"]
    return found


@pytest.mark.parametrize("update", some_of(["backward"], ["forward", "step"]))
def test_their_updates_go_up_and_come_down_and_not_to_disk(update: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(2)
    (tmp_path / "swap").mkdir()
    with tiermem.offload(model, config(tmp_path / "swap", update, commits=False), coalesce=0) as runtime:
        trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
        train(trainee)
        runtime.settle()
        runtime.timeline(tmp_path / "timeline.json")
        high_water = {tier.name: (tier.high_water, tier.budget) for tier in runtime.statistics().tiers}
        found = Outcome(trainee.noted, weights(runtime))
    check(found, plain(make, train))
    bytes_moved, all_of_them = moved(tmp_path / "timeline.json", 3), LAYERS * LAYER_NBYTES
    assert bytes_moved["host->swap", "state"] > 0
    # Those that wait in host memory for their place on the device may be driven out, more of them the slower they get
    # there. Without homes all are, each step.
    assert max(bytes_moved[edge, "param"] for edge in ("host->swap", "swap->host")) <= 3 * all_of_them / 4
    assert 2 * all_of_them <= bytes_moved["host->device", "param"] <= 4 * all_of_them
    assert bytes_moved["device->host", "param"] > 0
    for high, budget in high_water.values():
        assert high <= budget


@pytest.mark.parametrize("update", some_of(["auto"], ["forward", "backward", "step"]))
def test_a_part_of_host_memory_is_theirs_where_it_holds_sixteen_of_them(update: str, tmp_path: Path) -> None:
    """In the smallest budget that has such a part everybody still finds room."""
    largest = rounded(LAYER_NBYTES)
    for host, passing in ((16 * largest - 4096, 0), (16 * largest, largest)):
        settings = config(tmp_path, update, host_memory=host, commits=False)
        assert draw(make(), settings, None).passing_nbytes == passing
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(2)
    with tiermem.offload(model, settings, coalesce=0) as runtime:
        trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
        train(trainee)
        runtime.settle()
        found = Outcome(trainee.noted, weights(runtime))
    check(found, plain(make, train))


@pytest.mark.parametrize("update", some_of(["backward"], ["auto"]))
def test_a_commit_has_them_and_a_resume_goes_on_from_there(update: str, tmp_path: Path) -> None:
    for begin, end in ((0, 3), (3, STEPS)):
        torch.manual_seed(1)
        model = make()
        with tiermem.offload(model, config(tmp_path, update), coalesce=0, resume=begin > 0) as runtime:
            train(Trainee(model, tiermem.AdamW, runtime.gradient), range(begin, end))
            runtime.commit().wait()
            found = weights(runtime)
    expected = plain(make, train).weights
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


def test_a_device_of_which_others_take_room_gives_them_up_and_the_numbers_stay(tmp_path: Path) -> None:
    """Activations are paged there, too, and are not foreseen: what has to leave comes down, and goes up again."""
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(2)
    with tiermem.offload(model, config(tmp_path, "backward", commits=False), coalesce=0) as runtime:

        def paged(trainee: Trainee) -> None:
            optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
            for step in range(STEPS):
                inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).repeat(64, 1)
                with runtime.offload_activations(1024) if trainee.adamw is tiermem.AdamW else torch.enable_grad():
                    loss = trainee.model(inputs).square().mean()
                loss.backward()
                trainee.note(loss)
                optimizer.step()
                optimizer.zero_grad()

        trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
        paged(trainee)
        found = Outcome(trainee.noted, weights(runtime))
    check(found, plain(make, paged))
