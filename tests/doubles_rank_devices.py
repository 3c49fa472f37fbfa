"""What ranks do in the tests with a device each, played by the processor: the scenarios of processors, once more."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doubles_rank_scenarios as scenarios
import pytest
import torch
from doubles_streams import StreamDevice
from torch import nn

import tiermem
from tiermem.pager.lease import Lease
from tiermem.planner.device import plan_tiers
from tiermem.runtime import house
from tiermem.runtime.blueprint import draw
from tiermem.runtime.company import find_company
from tiermem.zero3 import buckets

SLOW = "simulated:bandwidth=20MB/s,latency=200us"
Scenario = Callable[[Path, int, int], Any]


def least(make: Callable[[], nn.Module], directory: Path, **settings: Any) -> int:
    """What BudgetError names where `settings` give a tier a single page."""
    with pytest.raises(tiermem.BudgetError) as caught:
        tiermem.offload(make(), scenarios.config_for(directory, **settings))
    return int(re.search(r"at least (\d+) bytes", str(caught.value)).group(1))


def room_for_some(make: Callable[[], nn.Module], directory: Path, **settings: Any) -> int:
    """Device memory with which some units, not all of them, are updated on the device."""
    config = scenarios.config_for(directory, device_memory="64MiB", **settings)
    blueprint = draw(make(), config, None, company=find_company(config))
    trained = sum(size.trainable_numel > 0 for size in blueprint.sizes)
    for nbytes in range(64 << 10, 8 << 20, 16 << 10):
        with contextlib.suppress(tiermem.BudgetError):
            tiles = blueprint.footprint.tile_numel
            _, device = plan_tiers(blueprint.sizes, blueprint.host_nbytes, nbytes, 1, tile=tiles, settle=True)
            if 1 < len(device.settled) < trained:  # of the first, parameters of two elements, a rank may have none
                return nbytes
    raise AssertionError("there should be a budget between none and all")


def on(device: dict[str, Any], make: Callable[[], nn.Module], **how: Any) -> Scenario:
    """Train on processors, or on a device; memory of "least" is the least that works."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        given = {**device, **how}
        settings = {key: given[key] for key in ("device", "stage", "param_dtype") if key in given}
        if given.get("device_memory") == "least":
            given["device_memory"] = least(make, directory, device_memory=4096, **settings)
        if given.get("device_memory") == "for some":
            given["device_memory"] = room_for_some(make, directory, **settings)
        if given.get("host_memory") == "least":
            room = {"device_memory": given["device_memory"]} if "device_memory" in given else {}
            given["host_memory"] = least(make, directory, host_memory=4096, **settings, **room)
        return scenarios.trained(make, directory, rank, size, **given)

    return scenario


DEVICES: dict[str, dict[str, Any]] = {
    "processors": {},
    "roomy": {"device": "simulated", "device_memory": "8MiB"},
    "settled": {"device": "simulated", "device_memory": "8MiB", "update_on": "auto"},
    "partly_settled": {"device": SLOW, "device_memory": "for some", "update_on": "auto"},
    "tight": {"device": SLOW, "device_memory": "least"},
    "tightest": {"device": SLOW, "device_memory": "least", "host_memory": "least"},
}
RUNS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "odd": (scenarios.Odd, {"accumulate": 2}),
    "stage_2": (scenarios.Odd, {"accumulate": 2, "stage": 2}),
    "stage_1": (scenarios.Odd, {"accumulate": 2, "stage": 1}),
    "bfloat16": (scenarios.Odd, {"param_dtype": "bfloat16"}),
    "experts": (scenarios.Experts, {"batch": scenarios.routed_tokens}),
}


EARLY: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "odd": (scenarios.Odd, {"accumulate": 2}),
    "experts": (scenarios.Experts, {"accumulate": 2, "batch": scenarios.routed_tokens}),
    "stage_2": (scenarios.Odd, {"accumulate": 2, "stage": 2}),
}


def early(update: str, *, for_good: bool = False, full: int | None = None, **settings: Any) -> Scenario:
    """Steps that clip, that do not, and one that overflows on one rank; how many updates were made early, and kept.

    `for_good`: without clipping. `full`: the rank that has no room on disk for what may be undone, in every third step.
    """

    def scenario(directory: Path, rank: int, size: int) -> Any:
        torch.manual_seed(1)
        model = scenarios.Odd()
        with tiermem.offload(model, scenarios.config_for(directory, update=update, **settings)) as runtime:
            clip = not for_good
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=70.0 if clip else None)
            noted: list[Any] = []
            spent, undo = 0, runtime._house.coordinator._speculation._undo
            copies = undo._copies
            for step in range(6 if clip else 4):
                rows = scenarios.part(scenarios.tokens(step), rank, size)
                undo._copies = 1 if rank == full and step % 3 == 2 else copies
                spoilt = float("inf") if clip and step == 4 and rank == size - 1 else 1.0
                loss = scenarios.loss_of(model, rows) * (0.1 if step % 2 else 10.0)
                (loss * spoilt).backward()
                spent += bool(runtime._house.coordinator.spent)
                if step == 3 and clip:
                    with torch.no_grad():  # looked at between backward and step: what was updated early is undone
                        noted.append(float(scenarios.loss_of(model, rows)))
                with contextlib.suppress(UserWarning):
                    optimizer.step()
                optimizer.zero_grad()
                norm = None if optimizer.grad_norm is None else float(optimizer.grad_norm)
                noted.append((float(loss.detach()), optimizer.skipped, str(norm)))
            masters = list(scenarios.masters_of(runtime, scenarios.parameters_of(runtime)).values())
            total = runtime.statistics().total
        counts = (total.speculated, total.confirmed, total.redone)
        return {"noted": noted, "masters": masters, "counts": counts, "spent": spent}

    return scenario


def with_a_little() -> tuple[nn.Module, list[nn.Module]]:
    """A model, and its units: of the last one the second rank has nothing."""
    body, head = nn.Linear(64, 64), nn.Linear(64, 1, bias=False)
    return nn.Sequential(body, head), [body, head]


def rows_of(number: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(2 * number + rank))


def small(update: str, **settings: Any) -> Scenario:
    """A unit that one rank has nothing of; steps with more backwards than the one before."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        torch.manual_seed(1)
        model, units = with_a_little()
        config = scenarios.config_for(directory, update=update, **settings)
        with tiermem.offload(model, config, coalesce=0, units=units) as runtime:
            house = runtime._house
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e9)
            losses = []
            for step, count in enumerate([1, 1, 2, 1, 2]):
                for number in range(count):
                    loss = model(rows_of(10 * step + number, rank)).square().mean()
                    loss.backward()
                    losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
            masters = [runtime.master(parameter) for parameter in model.parameters()]
            total = runtime.statistics().total
            nothing = sum(shard.trainable_numel == 0 for shard in house.blueprint.shards)
        return {"losses": losses, "masters": masters, "counts": (total.confirmed, total.redone), "nothing": nothing}

    return scenario


def refused(update: str, *, clip: bool) -> Scenario:
    """Backwards that fail behind a unit that one rank has nothing of, and are dropped."""

    def refuse(_: torch.Tensor) -> None:
        raise KeyError("refused")

    def scenario(directory: Path, rank: int, size: int) -> Any:
        torch.manual_seed(1)
        model, (body, head) = with_a_little()
        config = scenarios.config_for(directory, update=update)
        with tiermem.offload(model, config, coalesce=0, units=[body, head]) as runtime:
            nothing = sum(shard.trainable_numel == 0 for shard in runtime._house.blueprint.shards)
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9 if clip else None)
            losses, warned = [], []
            for step in range(5):
                rows = rows_of(10 * step, rank)
                if step % 2:
                    hidden = body(rows)
                    hidden.register_hook(refuse)
                    with contextlib.suppress(KeyError):
                        head(hidden).square().mean().backward()
                    with warnings.catch_warnings(record=True, action="always") as caught:
                        optimizer.zero_grad()
                    warned.append(len(caught))
                loss = model(rows).square().mean()
                loss.backward()
                losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
            masters = [runtime.master(parameter) for parameter in model.parameters()]
            steps = runtime.statistics().steps
        return {"losses": losses, "masters": masters, "warned": warned, "nothing": nothing, "steps": steps}

    return scenario


def with_device(scenario: Scenario, **more: Any) -> Scenario:
    """The same with a device for every rank; `more` settings."""

    def on_device(directory: Path, rank: int, size: int) -> Any:
        plain = scenarios.config_for

        def config_for(directory: Path, **settings: Any) -> tiermem.Config:
            return plain(directory, **({"device": "simulated", "device_memory": "8MiB"} | more | settings))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scenarios, "config_for", config_for)
            return scenario(directory, rank, size)

    return on_device


def streams(*, hand_over: bool = True) -> Scenario:
    """Train where every thread has a stream of its own; what was used too early."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        device = StreamDevice()
        torch.manual_seed(1)
        model = scenarios.Odd()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(house, "open_device", lambda _: device)
            if not hand_over:
                patch.setattr(Lease, "hand_over", lambda _: None)
            config = scenarios.config_for(directory, device="simulated", device_memory="256KiB", update="step")
            with tiermem.offload(model, config) as runtime:
                ranks = runtime._house.company.computing
                patch.setattr(ranks, "all_gather", device.watch(ranks, "all_gather", 0, 1))
                patch.setattr(ranks, "exchange", device.watch(ranks, "exchange", 0, 1))
                for module in model.modules():
                    module.register_forward_pre_hook(lambda module, _: use_parameters(device, module))
                    module.register_forward_hook(lambda module, *_: use_parameters(device, module))
                real = buckets.Bucket.tensor

                def bucket(self: buckets.Bucket) -> torch.Tensor:
                    device.streams.use(found := real(self), "a bucket")
                    return found

                patch.setattr(buckets.Bucket, "tensor", bucket)
                optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
                scenarios.train(model, optimizer, rank=rank, size=size, steps=2)
        return {"early": device.streams.early, "checks": device.streams.checks}

    return scenario


def use_parameters(device: StreamDevice, module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        device.streams.use(parameter.detach(), "computation")


SCENARIOS: dict[str, Scenario] = {
    **{f"early_{update}": early(update) for update in ("step", "forward", "backward", "auto")},
    "early_device": early("backward", device="simulated", device_memory="8MiB"),
    **{
        f"early_for_good_{update}": early(update, for_good=True, param_dtype="bfloat16")
        for update in ("step", "backward")
    },
    "early_whole": early("backward", stage=2),
    "early_whole_auto": early("auto", stage=2),
    "early_whole_one_full": early("backward", stage=2, full=1),
    "early_whole_device": early("backward", stage=2, device="simulated", device_memory="8MiB"),
    "early_whole_for_good": early("backward", stage=2, for_good=True, param_dtype="bfloat16"),
    **{
        f"early_small_{update}_{stage}": small(update, stage=stage)
        for update in ("step", "backward")
        for stage in (2, 3)
    },
    **{f"early_refused_{update}": refused(update, clip=True) for update in ("step", "backward")},
    "early_refused_for_good": refused("backward", clip=False),
    **{
        f"early_{run}_{update}_{device}": on(DEVICES[device], make, **how, update=update)
        for run, (make, how) in EARLY.items()
        for update in ("step", "backward")
        for device in ("processors", "tightest", "partly_settled")
    },
    "streams": streams(),
    "streams_not_handed_over": streams(hand_over=False),
    **{f"{device}_{run}": on(DEVICES[device], make, **how) for device in DEVICES for run, (make, how) in RUNS.items()},
    **{
        f"device_{name}": with_device(scenarios.SCENARIOS[name])
        for name in ("verbs", "one_fails", "one_dies", "another_order", "committing_stage_2", "committing_stage_3")
    },
    **{
        f"settled_{name}": with_device(scenarios.SCENARIOS[name], update_on="auto")
        for name in ("verbs", "committing_stage_2", "committing_stage_3")
    },
}
