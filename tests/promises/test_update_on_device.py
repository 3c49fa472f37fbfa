"""Units that are updated on the device: the same numbers, whichever are settled there, and nothing of them travels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from doubles_combinations import each_of, in_turn
from doubles_models import Stack
from doubles_pager import save_all
from doubles_scenarios import LATE_ONLY, SCENARIOS, Wide, loop, tokens_batch, wide_batch
from doubles_streams import StreamDevice
from doubles_training import MIB, Trainee, check, config_for, offloaded, plain
from torch import nn

import tiermem
from tiermem.memory.devices import SimulatedDevice
from tiermem.memory.tiers import Tier
from tiermem.optim import stream
from tiermem.pager.lease import Lease
from tiermem.pager.page import Intent, Kind, Lane
from tiermem.runtime.beginning import Beginning
from tiermem.runtime.blueprint import draw
from tiermem.runtime.company import find_company
from tiermem.runtime.face import Runtime
from tiermem.runtime.house import build

SOME = (
    "stack, tied embedding",
    "several tiles",
    "module used twice",
    "frozen",
    "parts of a unit without gradient",
    "exception inside a unit",
    "max_grad_norm",
    "optimizer of some parameters",
)
ALL = {"device": "simulated", "device_memory": 64 * MIB, "update_on": "auto"}


def settled(make: Callable[[], nn.Module], directory: Path, nbytes: int, units=None, **more) -> tuple[int, ...]:
    config = config_for(directory, 64 * MIB, "step", **(ALL | {"device_memory": nbytes} | more))
    device = draw(make(), config, units).device
    assert device is not None
    return device.settled


def few(make: Callable[[], nn.Module], directory: Path, units=None, **more) -> dict[str, object]:
    """Settings with which some units are settled on the device and some are not."""
    everything = settled(make, directory, 64 * MIB, units, **more)
    for nbytes in range(64 << 10, 4 * MIB, 16 << 10):
        with contextlib.suppress(tiermem.BudgetError):
            if 0 < len(settled(make, directory, nbytes, units, **more)) < len(everything):
                return ALL | {"device_memory": nbytes} | more
    raise AssertionError("there should be a budget between nothing and everything")


@pytest.mark.parametrize(
    ("name", "update", "which"),
    each_of(SOME, ["step", "forward", "backward"], ["all", "few"])
    + each_of(LATE_ONLY, ["forward", "auto"], ["all", "few"]),
)
def test_same_numbers(name, update, which, tmp_path):
    scenario = (SCENARIOS | LATE_ONLY)[name]
    settings = ALL if which == "all" else few(scenario.make, tmp_path, scenario.units)
    budget = "generous" if which == "all" else "least"
    found = offloaded(
        scenario.make, scenario.script, tmp_path, update=update, budget=budget, units=scenario.units, **settings
    )
    check(found, plain(scenario.make, scenario.script))


def train(model: nn.Module, batch, steps: range, **settings) -> None:
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, **settings)
    for number in steps:
        torch.manual_seed(number)
        batch(model).backward()
        optimizer.step()
        optimizer.zero_grad()


class Coded(nn.Module):
    """Layers large enough for 8-bit moments, their biases, and an embedding, which keep float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 72)
        self.layers = nn.ModuleList(nn.Linear(72, 72) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embed(tokens)
        for layer in self.layers:
            values = values + torch.tanh(layer(values))
        return values


def coded_batch(model: nn.Module) -> torch.Tensor:
    return model(torch.randint(30, (2, 5))).square().mean()


def states(runtime: Runtime) -> list[torch.Tensor]:
    """Every byte of optimizer state, wherever it is."""
    pager, found = runtime._house.storage.pager, []
    for key in sorted(pager.residency(), key=str):
        if key.kind is Kind.STATE:
            with pager.lease([key], Intent.READ, lane=Lane.UPDATE) as lease:
                found.append(lease.tensor(key).clone())
    return found


def masters(runtime: Runtime, model: nn.Module) -> list[torch.Tensor]:
    return [runtime.master(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("dtype", "moments", "update"),
    in_turn(["bfloat16", "float16", "float32"], ["float32", "int8"], ["step", "backward", "auto"]),
)
def test_the_bits_of_an_update_in_host_memory_with_and_without_clipping(update, dtype, moments, tmp_path):
    make, batch = (Stack, tokens_batch) if moments == "float32" else (Coded, coded_batch)
    kept = {"param_dtype": dtype, "moments": moments}
    for clipping in ({}, {"max_grad_norm": 0.05}):
        found = []
        for settings in (few(make, tmp_path, **kept), few(make, tmp_path, **kept) | {"update_on": "host"}):
            torch.manual_seed(1)
            model = make()
            config = config_for(tmp_path, 64 * MIB, update, **settings)
            with tiermem.offload(model, config) as runtime:
                train(model, batch, range(5), **clipping)
                found.append([*masters(runtime, model), *states(runtime)])
                tiles = runtime._house.updater.statistics().device_tiles
                assert (tiles > 0) is (settings["update_on"] == "auto")
        assert all(map(torch.equal, *found))


def test_what_is_settled_does_not_travel(tmp_path):
    model = Stack()
    with tiermem.offload(model, config_for(tmp_path, 64 * MIB, "step", **ALL)) as runtime:
        train(model, tokens_batch, range(1))
        before = runtime.statistics().total
        train(model, tokens_batch, range(1, 4))
        after = runtime.statistics().total
        for edge in ("host->device", "device->host", "swap->host", "host->swap"):
            assert after.edge(edge).nbytes == before.edge(edge).nbytes, edge
        assert {key.kind for key, (valid, _) in runtime._house.storage.pager.residency().items() if valid} == {
            Kind.PARAM,
            Kind.STATE,
        }
        done = runtime._house.updater.statistics()
        assert done.device_tiles == done.tiles > 0
        runtime._house.storage.pager.check_invariants()


def test_a_unit_that_had_to_leave_comes_back(tmp_path):
    """`gathered` brings every unit of a device that lacks room for them beside what is settled."""
    outcomes = []
    for settings in (few(Wide, tmp_path), few(Wide, tmp_path) | {"update_on": "host"}):
        torch.manual_seed(1)
        model = Wide()
        with tiermem.offload(model, config_for(tmp_path, 64 * MIB, "backward", **settings)) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
            for number in range(4):
                torch.manual_seed(number)
                wide_batch(model).backward()
                optimizer.step()
                with runtime.gathered(list(model.parameters())[:2], write=True), torch.no_grad():
                    next(model.parameters()).mul_(0.5)
                save_all(runtime._house.storage.pager)
                runtime._house.storage.pager.check_invariants()
            outcomes.append(masters(runtime, model))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("update", ["step", "forward", "backward", "auto"])
def test_commit_and_resume_wherever_units_are_updated_then(update, tmp_path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    whole.mkdir()
    half.mkdir()
    settings = few(Wide, tmp_path)
    torch.manual_seed(3)
    model = Wide()
    with tiermem.offload(model, config_for(whole, 64 * MIB, update, **settings)) as runtime:
        train(model, wide_batch, range(6))
        expected = masters(runtime, model)
    torch.manual_seed(3)
    model = Wide()
    with tiermem.offload(model, config_for(half, 64 * MIB, update, **settings)) as runtime:
        train(model, wide_batch, range(2))
        runtime.commit().wait()
    for number, later in enumerate((settings, settings | {"update_on": "host"}), start=1):
        model = Wide()
        with tiermem.offload(model, config_for(half, 64 * MIB, update, **later), resume=True) as runtime:
            train(model, wide_batch, range(2 * number, 2 * number + 2))
            runtime.commit().wait()
            found = masters(runtime, model)
    assert all(map(torch.equal, found, expected))


def test_early_updates_that_do_not_count_leave_settled_units_alone(tmp_path):
    """Clipped, or skipped for an infinite gradient: "backward" has the bits of "step", whatever it took back."""
    found = []
    for update in ("step", "backward"):
        torch.manual_seed(1)
        model = Wide()
        with tiermem.offload(model, config_for(tmp_path, 64 * MIB, update, **few(Wide, tmp_path))) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
            for number in range(6):
                torch.manual_seed(number)
                (wide_batch(model) * (float("inf") if number == 3 else 0.01 if number % 2 else 50.0)).backward()
                with contextlib.suppress(UserWarning):
                    optimizer.step()
                optimizer.zero_grad()
            found.append(masters(runtime, model))
            assert optimizer.skipped == 1
            if update == "backward":
                total = runtime.statistics().total
                assert total.redone > 0, "units that are not settled were updated early"
    assert all(map(torch.equal, *found))


def house_on(device: SimulatedDevice, model: nn.Module, config: tiermem.Config) -> Runtime:
    return Runtime(build(draw(model, config, None), config, Beginning(), find_company(config), device=device))


@pytest.mark.parametrize(("update", "which"), in_turn(["step", "forward", "backward"], ["all", "few"]))
def test_nobody_uses_a_frame_before_what_another_thread_asked_of_it_is_done(update, which, tmp_path, monkeypatch):
    """Computation, update and copies have a stream each; whoever comes next waits for the one before."""
    device, model = StreamDevice(), Wide()
    config = config_for(tmp_path, 64 * MIB, update, poison=False, **(ALL if which == "all" else few(Wide, tmp_path)))
    with house_on(device, model, config) as runtime:
        monkeypatch.setattr(Lease, "tensor", device.watch_leases(runtime._house.storage.arenas[Tier.DEVICE]))
        train(model, wide_batch, range(4))
        runtime.commit().wait()
        train(model, wide_batch, range(4, 6))
        assert runtime._house.updater.statistics().device_tiles > 0
    assert device.streams.checks > 20
    assert device.streams.early == []


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_kernel_that_fails_there_is_an_error_in_the_caller_and_closing_works(update, tmp_path, monkeypatch):
    model, calls = Stack(), []
    real = stream.adamw_tile

    def failing(*arguments) -> None:
        calls.append(arguments)
        if len(calls) == 4:
            raise FloatingPointError("the kernel failed")
        real(*arguments)

    monkeypatch.setattr(stream, "adamw_tile", failing)
    runtime = tiermem.offload(model, config_for(tmp_path, 64 * MIB, update, **ALL), coalesce=0)
    trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
    with pytest.raises(FloatingPointError, match="the kernel failed"):
        loop(tokens_batch, steps=3)(trainee)
    with contextlib.suppress(FloatingPointError):
        runtime.close()
    runtime.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_settled_unless_asked_for(tmp_path):
    settings = {"device": "simulated", "device_memory": 64 * MIB}
    for more in ({}, {"update_on": "host"}, {"moments": "int8"}):
        device = draw(Stack(), config_for(tmp_path, 64 * MIB, "step", **settings, **more), None).device
        assert device is not None
        assert device.settled == ()
    with pytest.raises(tiermem.ConfigError, match="update_on: expected one of 'host', 'auto'"):
        tiermem.Config(swap_dirs=[tmp_path], update_on="device")  # type: ignore[arg-type]
    # Without a device it means nothing.
    found = offloaded(Stack, loop(tokens_batch), tmp_path, update="step", budget="generous", update_on="auto")
    check(found, plain(Stack, loop(tokens_batch)))
