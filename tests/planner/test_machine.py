"""Machines as records: what is understood, what is refused, and that the shipped ones are sound."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tiermem.cli.machines import load_profile, profile_names
from tiermem.errors import ConfigError
from tiermem.planner.machine import machine_from_dict, machine_to_dict
from tiermem.planner.zero_table import zero_table

PLAIN: dict[str, Any] = {
    "name": "test",
    "source": "described for a test",
    "host": {"update_rate": {"float32": 1e9}, "memory": "4GiB"},
    "drive": {"read": 2e9, "write": 1e9, "mixed": 1e9},
}
DEVICE = {"memory": "1GiB", "flops": {"bfloat16": 1e12}, "to_device": 1e9, "to_host": 1e9}


def test_a_table_becomes_a_machine_and_a_table_again() -> None:
    machine = machine_from_dict(PLAIN)
    assert machine.host.memory == 4 << 30
    assert machine_from_dict(machine_to_dict(machine)) == machine


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_loads_and_says_where_it_comes_from(name: str) -> None:
    machine = load_profile(name)
    assert machine.source.startswith("described")
    assert machine.flops("bfloat16") > 0
    assert machine.update_rate("float32") > 0
    assert machine_from_dict(machine_to_dict(machine)) == machine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table["drive"].update(raed=1.0), "unknown key 'raed'.*did you mean 'read'"),
        (lambda table: table.update(hots={}), "did you mean 'host'"),
        (lambda table: table["host"]["update_rate"].update(bflaot16=1e9), "did you mean 'bfloat16'"),
        (lambda table: table["drive"].pop("write"), r"\[drive\]: expected write"),
        (lambda table: table.pop("drive"), r"expected a table \[drive\]"),
        (lambda table: table["drive"].update(read=-1.0), "drive.read: expected a number above zero"),
        (lambda table: table["drive"].update(latency=-1.0), "drive.latency: expected a number of zero or more"),
        (lambda table: table["drive"].update(read="fast"), "drive.read: expected a number"),
        (lambda table: table["drive"].update(count=0), "drive.count: expected a whole number"),
        (lambda table: table["host"].update(memory="4GB!"), "host.memory: expected a size"),
        (lambda table: table["host"].update(memory=64e9), "host.memory: expected a size in bytes, as a whole number"),
        (lambda table: table.update(host=3), "host: expected a table"),
        (lambda table: table.pop("source"), "source: expected text"),
        (lambda table: table.update(device={**DEVICE, "simulated": 1}), "device.simulated: expected true or false"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_advice(change: Any, message: str) -> None:
    table = copy.deepcopy(PLAIN)
    change(table)
    with pytest.raises(ConfigError, match=message):
        machine_from_dict(table)


def test_a_dtype_whose_speed_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"host.update_rate: expected a number for bfloat16, found float32"):
        machine_from_dict(PLAIN).update_rate("bfloat16")


def test_the_table_of_the_zero_paper() -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 GPUs.
    plain = {row.stage: row.device / 1e9 for row in zero_table(7_500_000_000, 64) if row.offload == "nothing"}
    assert plain == {
        0: pytest.approx(120),
        1: pytest.approx(31.4, abs=0.01),
        2: pytest.approx(16.6, abs=0.05),
        3: pytest.approx(1.88, abs=0.01),
    }


def test_what_is_offloaded_is_somewhere() -> None:
    for row in zero_table(13_000_000_000, 8):
        if row.stage == 3:
            assert row.device * 8 + row.host + row.nvme == pytest.approx(13e9 * 16), "sharded: every byte once"
    # 13 billion on 8 GPUs: 16 bytes a parameter over eight of them.
    sharded = next(row for row in zero_table(13_000_000_000, 8) if row.stage == 3)
    assert sharded.device / 1e9 == pytest.approx(26)
