"""The model that stands for a workload, and the machine that is fitted to it by training that model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import some_of
from hypothesis import given
from hypothesis import strategies as st

from swap import SwapIOError
from tiermem.cli import machines, measure_training, measure_workload
from tiermem.cli.machines import load_profile, machine_for
from tiermem.cli.measure import BESIDES_SECONDS, measure_machine
from tiermem.cli.measure_layer import LayerShape, layer_for, operations, slowed
from tiermem.cli.measure_training import Measured
from tiermem.cli.measure_workload import Stand, stand_for, with_rates_for
from tiermem.config import Config
from tiermem.planner.design import least_host_memory
from tiermem.planner.machine import Machine
from tiermem.planner.observed import Observed
from tiermem.planner.settings import PlanSettings
from tiermem.planner.workload import Workload, transformer, unit_flops

SMALL = transformer(600_000, batch=1, seq=16)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to swap to. What is measured of single layers takes no time; what is trained, does."""
    monkeypatch.setattr(measure_workload, "layer_flops", lambda *_: 7e9)
    monkeypatch.setattr(measure_workload, "in_time", lambda dtype, device, shape, seconds: shape)
    monkeypatch.setattr(measure_workload, "slower_together", lambda *_: (0.5, 0.25))
    monkeypatch.setattr(measure_workload, "_ALONE", 1)
    monkeypatch.setattr(measure_workload, "_PAGED", 2)
    monkeypatch.setattr(measure_workload, "_MOST_LAYERS", 8)
    monkeypatch.setattr(measure_training, "_HALVINGS", 1)  # each is a simulated step
    directory = tmp_path / "swap"
    directory.mkdir()
    return directory


@given(
    parameters=st.integers(10**5, 10**12),
    batch=st.integers(1, 64),
    seq=st.integers(2, 4096),
    moments=st.sampled_from(["float32", "int8"]),
    tile=st.integers(1, 1 << 30),
)
def test_a_stand_is_of_layers_like_the_workloads_and_small(
    parameters: int, batch: int, seq: int, moments: str, tile: int
) -> None:
    work = transformer(parameters, batch=batch, seq=seq, moments=moments)
    stand = stand_for(work, seq=seq, tile_nbytes=tile)
    assert stand is not None
    like = layer_for(work, seq=seq)
    assert (stand.shape.rows, stand.shape.seq) == (like.rows, like.seq)
    assert (stand.dtype, stand.moments) == ("bfloat16", moments)
    assert 3 <= stand.layers <= 24
    numel = stand.layers * stand.shape.weights
    assert numel <= 97_000_000, "a layer's half beyond what is asked for"
    assert stand.tile_nbytes in (8 << 20, 16 << 20, 24 << 20)
    assert abs(stand.tile_nbytes - tile) <= 4 << 20 or not 8 << 20 < tile < 24 << 20
    quarter = numel * (work.itemsize + work.state_itemsize) / 4
    assert quarter > 7 * stand.tile_nbytes or stand.layers == 24 or moments == "int8"
    if like.width <= 1024:
        assert stand.shape == like
    else:
        assert stand.shape.width == 1024
        assert stand.shape.mlp / 1024 == pytest.approx(like.mlp / like.width, rel=0.01)
    assert stand_for(dataclasses.replace(work, dtype="float16"), seq=seq, tile_nbytes=tile) is None


def test_a_stand_is_divided_and_counted_as_models_are() -> None:
    shape = LayerShape(rows=2, seq=24, width=128, mlp=320)
    work = measure_workload._work(Stand(shape, 3, "float32", "int8", 8 << 20))
    assert [unit.numel for unit in work.units] == [shape.weights] * 3
    assert (work.tokens, work.dtype, work.moments) == (48, "float32", "int8")
    assert {unit.flops for unit in work.units} == {unit_flops(shape.weights, 48, seq=24, width=128)}


@pytest.mark.parametrize(
    ("dtype", "moments"), some_of([("float32", "float32"), ("bfloat16", "int8")], [("bfloat16", "float32")])
)
def test_a_machine_gets_the_rates_of_a_training_in_its_directories(
    place: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, moments: str
) -> None:
    """Layers are trained in both ways, with the workload's types."""
    configs: list[Config] = []
    train = measure_workload.train_steps

    def watched(*given: Any, **named: Any) -> Any:
        configs.append(given[3])
        assert named == {"coalesce": 0}
        return train(*given, **named)

    monkeypatch.setattr(measure_workload, "train_steps", watched)
    laptop = load_profile("laptop")
    work = dataclasses.replace(SMALL, dtype=dtype, moments=moments)
    drawn = torch.random.get_rng_state()
    fitted = with_rates_for(laptop, work, [place], seq=16, tile_nbytes=8 << 20, seconds=0.001)
    assert list(place.iterdir()) == [], "nothing of the training is left"
    assert torch.equal(torch.random.get_rng_state(), drawn)
    host, before = fitted.host, laptop.host
    assert 0 < fitted.flops(dtype) <= 7e9, "training takes longer than its products"
    assert (host.compute_beside_update, host.update_beside_compute) == (0.5, 0.25)
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    assert (host.flops[other], host.update_rate[other]) == (before.flops[other], before.update_rate[other])
    for name in ("read", "write", "mixed"):
        assert 0 < getattr(fitted.drive, name) != getattr(laptop.drive, name)
    assert 0 < fitted.update_rate(dtype) != laptop.update_rate(dtype)
    assert 0 < host.step_seconds != before.step_seconds
    assert host.lease_seconds == 2.5e-4
    assert host.tile_seconds >= 0
    assert 0 <= host.compute_beside_io <= 2
    unchanged = {"host", "drive"}
    assert all(
        getattr(fitted, item.name) == getattr(laptop, item.name)
        for item in dataclasses.fields(Machine)
        if item.name not in unchanged
    )
    alone, paged = configs
    assert (alone.update, paged.update) == ("step", "backward")
    assert {(each.param_dtype, each.moments, each.swap_paths[0]) for each in configs} == {(dtype, moments, place)}
    assert alone.host_nbytes is not None
    assert paged.host_nbytes is not None
    assert paged.host_nbytes < alone.host_nbytes / 2


def shown(stand: Stand, *_: object) -> tuple[Measured, Measured, PlanSettings]:
    """What two trainings may show: 15 ms a layer, and no step faster than a second where bytes move."""
    work, layers = measure_workload._work(stand), range(stand.layers)
    seen = Observed(
        forward=dict.fromkeys(layers, 0.005),
        backward=dict.fromkeys(layers, 0.010),
        elsewhere=1e-3,
        updating=1e-2,
        read=3e9,
        write=2e9,
        mixed=4e9,
    )
    measured = Measured((1.0,), (0,), (0,), seen, 4, 0.0, {})
    return measured, measured, PlanSettings(host_memory=2 * least_host_memory(work, 1), update="backward")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a training shows is given: it does not depend on the machine that is fitted to it."""
    monkeypatch.setattr(measure_workload, "_train", shown)


def test_what_a_layer_takes_in_training_besides_its_products_is_in_its_rate(
    place: Path, monkeypatch: pytest.MonkeyPatch, trained: None
) -> None:
    """And not in a lease's seconds, of which a gradient that arrives tile by tile takes many."""
    monkeypatch.setattr(measure_workload, "median_seconds", lambda *_: 0.010)
    monkeypatch.setattr(measure_training, "_HALVINGS", 7)
    laptop = load_profile("laptop")
    laptop = dataclasses.replace(laptop, host=dataclasses.replace(laptop.host, copy_rate=1e15))
    fitted = with_rates_for(laptop, SMALL, [place], seq=16, tile_nbytes=8 << 20, seconds=0.001)
    products = operations(layer_for(SMALL, seq=16)) / 7e9
    taken = operations(layer_for(SMALL, seq=16)) / fitted.flops("bfloat16")
    assert taken - products == pytest.approx(0.005 - 3 * 2.5e-4, rel=1e-3)
    assert (fitted.drive.read, fitted.drive.write, fitted.drive.mixed) == (3e9, 2e9, 4e9)
    assert fitted.host.compute_beside_io == pytest.approx(2.0, rel=0.01), "the most"


def test_where_a_device_computes_or_nothing_is_fast_the_machine_stays(place: Path) -> None:
    laptop, gpu = load_profile("laptop"), load_profile("rtx4090")
    assert with_rates_for(gpu, SMALL, [place], seq=16, tile_nbytes=8 << 20) is gpu
    assert (
        with_rates_for(laptop, dataclasses.replace(SMALL, dtype="float16"), [place], seq=16, tile_nbytes=8 << 20)
        is laptop
    )


def test_a_device_that_processors_play_is_as_fast_as_they_are(place: Path, trained: None) -> None:
    gpu = load_profile("rtx4090")
    assert gpu.device is not None
    played = dataclasses.replace(gpu, device=dataclasses.replace(gpu.device, simulated=True, efficiency=1.0))
    fitted = with_rates_for(played, SMALL, [place], seq=16, tile_nbytes=8 << 20, seconds=0.001)
    assert 0 < fitted.flops("bfloat16") == fitted.host.flops["bfloat16"] <= 7e9
    assert fitted.drive != played.drive


def test_without_instructions_for_a_dtype_nothing_is_trained(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which took minutes, for a computation beside which nothing else counts. What is found so is kept."""
    laptop, few = load_profile("laptop"), LayerShape(rows=1, seq=8, width=64, mlp=64)
    monkeypatch.setattr(measure_workload, "in_time", lambda *_: few)
    monkeypatch.setattr(measure_workload, "train_steps", None)
    fitted = with_rates_for(laptop, SMALL, [place], seq=16, tile_nbytes=8 << 20, seconds=0.001)
    rate = slowed(7e9, layer_for(SMALL, seq=16), BESIDES_SECONDS)
    flops = {**laptop.host.flops, "bfloat16": rate}
    assert fitted == dataclasses.replace(laptop, host=dataclasses.replace(laptop.host, flops=flops))


@pytest.mark.parametrize("scarce", ["available_host_memory", "free_together"])
def test_what_would_not_fit_is_not_trained(place: Path, monkeypatch: pytest.MonkeyPatch, scarce: str) -> None:
    laptop = load_profile("laptop")
    monkeypatch.setattr(measure_workload, scarce, lambda *_: 1 << 20)
    monkeypatch.setattr(measure_workload, "train_steps", None)
    fitted = with_rates_for(laptop, SMALL, [place], seq=16, tile_nbytes=8 << 20, seconds=0.001)
    assert fitted.flops("bfloat16") == slowed(7e9, layer_for(SMALL, seq=16), BESIDES_SECONDS) < 7e9
    assert dataclasses.replace(fitted.host, flops=laptop.host.flops) == laptop.host
    assert fitted.drive == laptop.drive
    assert fitted.source.startswith(f"{laptop.source}; no layers trained: ")


def test_what_was_not_trained_for_lack_of_room_is_trained_once_there_is_some(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trained: list[object] = []

    def train(stand: Stand, *_: object) -> tuple[Measured, Measured, PlanSettings]:
        trained.append(stand)
        return shown(stand)

    def planned(room: int, *, again: bool = False) -> tuple[int, bool]:
        monkeypatch.setattr(measure_workload, "_room", lambda _: room)
        machine = machine_for(SMALL, config, seq=16, again=again)
        assert ("no layers trained" in machine.source) is (machine.drive.read != 3e9)
        return len(trained), machine.drive.read == 3e9

    monkeypatch.setattr(machines, "measure_machine", lambda *_: load_profile("laptop"))
    monkeypatch.setattr(measure_workload, "_train", train)
    config = Config(device="cpu", host_memory="1GiB", swap_dirs=[place])
    assert planned(0) == (0, False)
    assert planned(1 << 40) == (1, True)
    assert planned(0) == (1, True), "kept"
    assert planned(0, again=True) == (1, False)
    assert planned(1 << 40) == (2, True), "what was to be measured again is not taken for it later"


def test_an_error_of_the_training_comes_to_the_caller_and_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, number: int, model: Any) -> None:
        raise SwapIOError("read", place)

    monkeypatch.setattr(measure_workload._Model, "backward", broken)
    with pytest.raises(SwapIOError, match="read"):
        with_rates_for(load_profile("laptop"), SMALL, [place], seq=16, tile_nbytes=8 << 20, seconds=0.001)
    assert list(place.iterdir()) == []


def test_a_fitted_machine_is_kept_for_its_kind_of_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    laptop = load_profile("laptop")
    calls: list[object] = []

    def measured(directories: list[Path], config: Config) -> Machine:
        calls.append("machine")
        return dataclasses.replace(laptop, source=f"measured {len(calls)}")

    def fitted(machine: Machine, workload: Workload, directories: list[Path], *, seq: int, tile_nbytes: int) -> Machine:
        calls.append(stand_for(workload, seq=seq, tile_nbytes=tile_nbytes))
        host = dataclasses.replace(machine.host, lease_seconds=len(calls) * 1e-3)
        return dataclasses.replace(machine, host=host)

    monkeypatch.setattr(machines, "measure_machine", measured)
    monkeypatch.setattr(machines, "with_rates_for", fitted)
    config = Config(device="cpu", host_memory="1GiB", swap_dirs=[tmp_path])
    work = transformer(50_000_000, batch=2, seq=128)
    fit: Callable[..., Machine] = functools.partial(machine_for, config=config, seq=128)
    first = fit(work)
    assert calls == ["machine", stand_for(work, seq=128, tile_nbytes=40 << 20)]
    assert fit(work).host.lease_seconds == first.host.lease_seconds
    deeper = dataclasses.replace(work, units=(*work.units, work.units[1]))
    assert fit(deeper).host.lease_seconds == first.host.lease_seconds, "of the same layers"
    assert len(calls) == 2
    assert fit(transformer(50_000_000, batch=1, seq=128)).host.lease_seconds != first.host.lease_seconds
    assert fit(dataclasses.replace(work, moments="int8")).host.lease_seconds != first.host.lease_seconds
    smaller = dataclasses.replace(config, host_memory="200MiB")
    assert fit(work, config=smaller).host.lease_seconds != first.host.lease_seconds, "with smaller tiles"
    assert (
        fit(work, config=dataclasses.replace(smaller, tile_size="24MiB")).host.lease_seconds == first.host.lease_seconds
    )
    assert calls.count("machine") == 1
    again = fit(work, again=True)
    assert calls.count("machine") == 2
    assert (again.source, again.host.lease_seconds) == ("measured 6", 7e-3)


def test_the_measurement_of_this_machine_can_be_fitted(place: Path, small_measurements: None, trained: None) -> None:
    measured = measure_machine([place], seconds=0.001, drive_seconds=0.01, nbytes=64 << 20)
    fitted = with_rates_for(measured, SMALL, [place], seq=16, tile_nbytes=8 << 20, seconds=0.001)
    assert fitted.source == measured.source
    assert fitted.drive.capacity == measured.drive.capacity
    assert fitted.host.lease_seconds == measured.host.lease_seconds, "what a layer takes besides is in its rate"
    assert list(place.iterdir()) == []
