"""Which units have their old bytes in host memory: from the last one on, half of what is left at most."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles_models import Stack
from doubles_training import config_for
from hypothesis import given
from hypothesis import strategies as st

from tiermem.pager.extents import DURABLE
from tiermem.planner.logged import logged_units
from tiermem.runtime.blueprint import Blueprint, draw

MIB = 1 << 20


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 1000)), st.integers(-100, 8000))
def test_the_last_units_that_fit_into_half_of_what_is_left(nbytes, spare):
    found = logged_units(nbytes, spare)
    assert list(found) == sorted(nbytes, reverse=True)[: len(found)]
    taken = sum(nbytes[unit] for unit in found)
    assert taken <= max(0, spare // 2)
    left = sorted(nbytes.keys() - set(found))
    assert not left or taken + nbytes[left[-1]] > spare // 2


def drawn_for(directory: Path, host: int, update: str = "auto", **settings: object) -> Blueprint:
    beside = {"device": "simulated", "device_memory": 64 * MIB} | settings
    return draw(Stack(depth=6), config_for(directory, host, update, **beside), None)


def test_what_is_logged_is_what_an_update_changes_and_is_in_the_budget(tmp_path):
    without, found = drawn_for(tmp_path, 64 * MIB, "forward"), drawn_for(tmp_path, 64 * MIB)
    assert set(found.logged) == {key for key, _ in found.pages() if key.kind in DURABLE}
    assert found.beside_nbytes == without.beside_nbytes + sum(found.logged.values())
    assert found.host_nbytes + found.beside_nbytes == without.host_nbytes + without.beside_nbytes
    assert found.footprint == without.footprint
    assert not found.resting


def test_a_little_left_is_for_the_last_units_and_the_others_wait_for_the_step(tmp_path):
    without = drawn_for(tmp_path, 64 * MIB, "forward")
    fits = without.swap_nbytes(1)
    found = drawn_for(tmp_path, fits + fits // 4 * 2 + without.beside_nbytes)
    logged = {key.unit for key in found.logged}
    assert logged
    assert set(found.resting) == found.states.keys() - logged
    assert min(logged) > max(found.resting)
    assert found.swap_nbytes(1) <= found.host_nbytes, "everything fits beside the log"


@pytest.mark.parametrize("update", ["forward", "backward", "step"])
def test_no_log_where_nothing_would_use_it(update, tmp_path):
    assert not drawn_for(tmp_path, 64 * MIB, update).logged


def test_no_log_where_the_processor_computes_the_model(tmp_path):
    assert not draw(Stack(depth=6), config_for(tmp_path, 64 * MIB, "auto"), None).logged


def test_no_log_where_pages_leave_no_room(tmp_path):
    whole = drawn_for(tmp_path, 64 * MIB)
    assert whole.logged
    assert not drawn_for(tmp_path, whole.swap_nbytes(1)).logged


def test_units_updated_on_the_device_are_not_logged(tmp_path):
    found = drawn_for(tmp_path, 64 * MIB, device_memory=500_000, update_on="auto")
    settled = set(found.device.settled)
    assert settled
    assert settled.isdisjoint(key.unit for key in found.logged)
    assert settled <= found.patient
