"""Measuring the device for `tiermem plan`, and planning with what was measured."""

from __future__ import annotations

import json

import torch

from tiermem.cli import main
from tiermem.cli.measure_device import device_room, measure_device
from tiermem.config import Config

HOST_FLOPS = {"bfloat16": 1e9, "float16": 1e9, "float32": 1e9}


def test_a_device_is_measured_and_left_as_it_was(place, tmp_path):
    config = Config(device=place, device_memory="8MiB" if place == "simulated" else "auto", swap_dirs=[tmp_path])
    real = place != "simulated"
    before = torch.cuda.memory_allocated() if real else 0
    found = measure_device(config, HOST_FLOPS, seconds=0.02)
    assert found.simulated is not real
    assert min(found.to_device, found.to_host) > 1e8
    assert min(found.flops.values()) >= 1e9
    assert 0 < found.memory <= max(8 << 20, 2 * device_room(config))
    if real:
        assert "float32" in found.flops
        assert torch.cuda.memory_allocated() == before


def test_a_plan_is_made_for_the_device_that_is_there(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    settings = {"device": place, "device_memory": "8MiB", "host_memory": "16MiB", "swap_dirs": ["."]}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    assert main.run(["plan", "llama-tiny", "--config", "settings.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device_bytes"] == 8 << 20
    assert found["seconds_per_step"] > 0
    expected = place if place == "simulated" else torch.cuda.get_device_name()
    assert expected in found["machine"]["source"]
