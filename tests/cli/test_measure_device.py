"""Planning for the device that a configuration names: measured with the machine, and planned with."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tiermem.cli import copies, machines, main, measure_device, measure_layer
from tiermem.cli.measure import measure_machine
from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.planner.design import PlanSettings, device_memory
from tiermem.planner.device import device_most
from tiermem.planner.parts import unit_sizes
from tiermem.planner.workload import transformer

HOST_FLOPS = {"bfloat16": 2e9, "float32": 1e9}
CONFIG = 'swap_dirs = ["."]\nhost_memory = "8MiB"\ndevice_memory = "4MiB"\ndevice = "{device}"\n'


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, small_measurements: None) -> list[str]:
    """The devices that were measured; measuring is short."""
    devices: list[str] = []

    def quick(directories: Any, config: Config) -> Any:
        devices.append(config.device)
        return measure_machine(directories, config, seconds=0.001, drive_seconds=0.01, nbytes=64 << 20)

    monkeypatch.setattr(machines, "measure_machine", quick)
    return devices


def planned(capsys: pytest.CaptureFixture[str], device: str, *arguments: str) -> dict[str, Any]:
    Path("settings.toml").write_text(CONFIG.format(device=device))
    assert main.run(["plan", "llama-tiny", "--config", "settings.toml", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_plan_is_for_the_device_of_the_configuration(
    capsys: pytest.CaptureFixture[str], measured: list[str], nothing_doubled: None
) -> None:
    slow = planned(capsys, "simulated:bandwidth=20MB/s")
    assert slow["device_bytes"] == 4 << 20
    assert slow["edges_bytes"]["host->device"] > 0
    assert slow["machine"]["source"].endswith("simulated:bandwidth=20MB/s")
    quick = planned(capsys, "simulated:bandwidth=200MB/s")
    assert quick["edges_bytes"]["host->device"] == slow["edges_bytes"]["host->device"]
    assert quick["stall_seconds"]["copy"] < slow["stall_seconds"]["copy"]
    without = planned(capsys, "cpu")
    assert without["device_bytes"] == 0
    assert "host->device" not in without["edges_bytes"]
    again = planned(capsys, "simulated:bandwidth=20MB/s", "--device-memory", "6MiB")
    assert again["device_bytes"] == 6 << 20
    assert again["machine"] == slow["machine"]
    assert measured == ["simulated:bandwidth=20MB/s", "simulated:bandwidth=200MB/s", "cpu"], "each of them once"


def test_tune_searches_and_trains_with_the_device(capsys: pytest.CaptureFixture[str], measured: list[str]) -> None:
    Path("settings.toml").write_text(CONFIG.format(device="simulated"))
    sizes = ["--model", "llama-tiny", "--batch", "1", "--seq", "16", "--steps", "1", "--best", "1"]
    given = ["--config", "settings.toml", "--device-memory", "3MiB", "--moments", "int8", "--update", "forward"]
    assert main.run(["tune", *sizes, *given, "--output", "tuned.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["default_measured_seconds"] > 0
    assert found["machine"]["source"].endswith("threads, simulated")
    config = Config.load(Path("tuned.toml"))
    assert (config.device, config.device_nbytes, config.moments) == ("simulated", 3 << 20, "int8")
    assert measured == ["simulated"]


def test_a_simulated_device_is_as_fast_as_its_link_and_the_processors() -> None:
    link = "simulated:up=30MB/s,down=20MB/s"
    config = Config(device=link, device_memory="1MiB", swap_dirs=["."])
    found = measure_device.measure_device(config, HOST_FLOPS, seconds=0.001)
    assert found is not None
    assert (found.to_device, found.to_host, found.memory, found.simulated) == (30e6, 20e6, 1 << 20, True)
    assert found.flops == HOST_FLOPS
    found = measure_device.measure_device(
        Config(device="simulated", device_memory="1MiB", swap_dirs=["."]), HOST_FLOPS, seconds=0.001
    )
    assert found is not None
    assert 1e8 < found.to_device < 1e13, "one without a link is as fast as memory"
    with pytest.raises(ConfigError, match="device_memory: expected a size"):
        measure_device.measure_device(Config(device=link, swap_dirs=["."]), HOST_FLOPS, seconds=0.001)


def test_without_a_device_there_is_nothing_to_measure() -> None:
    config = Config(device="cpu", swap_dirs=["."])
    assert measure_device.measure_device(config, HOST_FLOPS, seconds=0.001) is None
    assert measure_device.device_room(config) == 0
    assert measure_device.rates_key(config) == ""
    assert not measure_device.is_real(config)


def test_room_on_the_device_is_looked_up_each_time(measured: list[str]) -> None:
    def look(nbytes: str) -> Any:
        config = Config(device="simulated", device_memory=nbytes, swap_dirs=["."])
        return machines.this_machine([Path()], config).device

    small, large = look("1MiB"), look("2MiB")
    assert (small.memory, large.memory) == (1 << 20, 2 << 20)
    assert small.to_device == large.to_device
    assert len(measured) == 1


def test_a_layer_counts_as_the_planner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operations for each weight and token and four seq x width for each token; backward twice as many."""
    gradients: list[Any] = []

    def once(work: Any, seconds: float) -> float:
        work()
        return 0.5

    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given: gradients.extend(grad(*given)))
    monkeypatch.setattr(measure_layer, "median_seconds", once)
    monkeypatch.setattr(measure_layer, "in_time", lambda dtype, device, shape, seconds: shape)
    rows, seq, width, mlp = 2, 24, 64, 96
    shape = measure_layer.LayerShape(rows=rows, seq=seq, width=width, mlp=mlp)
    found = measure_layer.layer_flops(torch.float32, torch.device("cpu"), 1.0, shape)
    weights = 4 * width * width + 3 * width * mlp
    assert found == 3 * (2 * weights + 4 * seq * width) * rows * seq / 0.5
    assert sum(gradient.numel() for gradient in gradients) == weights + rows * seq * width
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_auto_takes_no_more_of_a_device_than_the_model_can_use() -> None:
    work, machine = transformer(2_000_000, batch=1, seq=64), machines.load_profile("rtx4090")
    settings = PlanSettings(host_memory=64 << 20)
    for update_on in ("host", "auto"):
        mine = functools.partial(PlanSettings, host_memory=settings.host_memory, update_on=update_on)
        most = device_most(unit_sizes(work, mine().division, each=True), settle=update_on == "auto")
        assert device_memory(work, machine, mine()) == most < 64 << 20
        assert device_memory(work, machine, mine(device_memory=5 << 30)) == 5 << 30
    assert machine.device is not None
    large = transformer(70_000_000_000, batch=1, seq=64)
    assert device_memory(large, machine, settings) == machine.device.memory
    assert device_memory(work, machines.load_profile("laptop"), settings) == 0


def test_copies_are_measured_from_pageable_memory_where_none_can_be_locked() -> None:
    """As here, where torch finds no CUDA: training would go on with memory that is not locked."""
    with pytest.warns(UserWarning, match="cannot be page-locked"):
        memory = copies._locked_if_allowed(4096)
    assert memory.nbytes == 4096
    assert not memory.is_pinned()
