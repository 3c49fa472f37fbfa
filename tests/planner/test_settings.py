"""What a user decides for a plan: what makes no sense on any machine is refused, by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tiermem.errors import ConfigError
from tiermem.planner.settings import PlanSettings
from tiermem.planner.zero_table import zero_table


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host_memory": -1}, "host_memory: expected a whole number of 0 or more, found -1; correct it"),
        ({"host_memory": math.nan}, "host_memory: .* found nan"),
        ({"host_memory": 1e9}, "host_memory: .* found 1000000000.0"),
        ({"host_memory": "1GiB"}, "host_memory: .* found '1GiB'"),
        ({"host_memory": None}, "host_memory: .* found None"),
        ({"device_memory": -4096}, r"device_memory: .* found -4096; correct it \(None: it is planned\)"),
        ({"tile_nbytes": 0}, "tile_nbytes: expected a whole number of 1 or more, found 0"),
        ({"look_ahead": -1}, "look_ahead: "),
        ({"block_size": 0}, "block_size: "),
        ({"queue_depth": True}, "queue_depth: .* found True"),
        ({"ranks": 0}, "ranks: expected a whole number of 1 or more, found 0"),
        ({"copies": -2}, "copies: "),
        ({"beside_pages": -1}, "beside_pages: "),
        ({"update": "sideways"}, "update: expected one of 'backward', 'forward', 'step', 'auto', found 'sideways'"),
        ({"update_on": "device"}, "update_on: expected one of 'host', 'auto', found 'device'"),
        ({"stage": 0}, "stage: expected one of 1, 2, 3, found 0"),
        ({"clips": "yes"}, "clips: expected one of False, True, found 'yes'"),
    ],
)
def test_settings_that_make_no_sense_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanSettings(**({"host_memory": 4096} | given))


def test_settings_that_make_sense_are_kept_as_they_are() -> None:
    settings = PlanSettings(host_memory=np.int64(4096), look_ahead=0, ranks=4, copies=2)  # type: ignore[arg-type]
    assert (settings.host_memory, settings.look_ahead, settings.tile_nbytes) == (4096, 0, None)
    assert (settings.division.parts, settings.division.copies) == (2, 2)


@pytest.mark.parametrize("wrong", [0, -8, math.nan, 1.5, None])
@pytest.mark.parametrize("name", ["parameters", "gpus", "gpus_per_node"])
def test_the_classical_table_is_of_whole_positive_numbers(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: expected a whole number of 1 or more, found {wrong}"):
        zero_table(**({"parameters": 7_500_000_000, "gpus": 64, "gpus_per_node": 8} | {name: wrong}))
