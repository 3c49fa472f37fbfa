"""What of a host budget is not for pages."""

from __future__ import annotations

import pytest
import torch
from doubles_training import MIB, config_for
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tiermem
from tiermem.planner.overhead import beside_pages, budget_with, split_budget
from tiermem.runtime.blueprint import draw


@given(small=st.integers(0, 4 << 30), more=st.integers(0, 1 << 30), compiled=st.booleans())
def test_a_larger_budget_has_more_for_pages_and_small_ones_have_all(small: int, more: int, compiled: bool) -> None:
    taken = [beside_pages(budget, compiled=compiled) for budget in (small, small + more)]
    assert 0 <= taken[0] <= taken[1] <= taken[0] + more + 4096
    assert small + more - taken[1] >= small - taken[0] - 4096
    assert small > 64 * MIB or taken[0] == 0
    assert taken[0] % 4096 == 0, "a run takes it off a budget of whole frame alignments"
    assert taken[0] <= (56 if compiled else 12) * MIB


@given(blocks=st.integers(1, 1 << 20), compiled=st.booleans())
def test_the_smallest_budget_with_so_many_bytes_for_pages(blocks: int, compiled: bool) -> None:
    pages = blocks * 4096
    enough = budget_with(pages, compiled=compiled)
    assert enough - beside_pages(enough, compiled=compiled) >= pages
    less = enough - 4096
    assert less - beside_pages(less, compiled=compiled) < pages


@given(budget=st.integers(0, 4 << 30), share=st.floats(0.0, 1.5), compiled=st.booleans())
def test_a_budget_is_split_unless_pages_would_lack_what_they_must_have(
    budget: int, share: float, compiled: bool
) -> None:
    least = round(budget * share)
    pages, beside = split_budget(budget, least, compiled=compiled)
    assert pages % 4096 == 0
    assert budget - 4096 < pages + beside <= budget
    kept = beside_pages(budget, compiled=compiled)
    assert beside == (kept if budget - kept >= least else 0)


def test_the_numbers() -> None:
    assert beside_pages(512 * MIB, compiled=True) == 56 * MIB
    assert beside_pages(512 * MIB, compiled=False) == 12 * MIB
    assert beside_pages(96 * MIB, compiled=True) == 4 * MIB
    assert split_budget(512 * MIB, 456 * MIB, compiled=True) == (456 * MIB, 56 * MIB), "what they must have"


@pytest.mark.parametrize(
    ("dtype", "moments", "beside"), [("bfloat16", "float32", 16), ("float32", "int8", 16), ("float32", "float32", 12)]
)
def test_pages_have_the_rest_of_the_budget(dtype, moments, beside, tmp_path):
    config = config_for(tmp_path, 192 * MIB, "step", param_dtype=dtype, moments=moments)
    with tiermem.offload(nn.Linear(8, 8), config) as runtime:
        storage, host = runtime._house.storage, runtime.statistics().tiers[-1]
        (arena,) = storage.arenas.values()
        assert arena.capacity == (192 - beside) * MIB
        assert host.budget == 192 * MIB
        assert host.high_water == arena.high_water > 0


def test_a_budget_that_is_just_enough_is_all_for_pages(tmp_path):
    """The least budget that an error names has to work."""
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False)
    with pytest.raises(tiermem.BudgetError) as caught:
        draw(model, config_for(tmp_path, MIB, "step"), None)
    least = int(str(caught.value).split("set host_memory to ")[1].split()[0])
    assert least > 64 * MIB
    found = draw(model, config_for(tmp_path, least, "step"), None)
    assert (found.host_nbytes, found.beside_nbytes) == (least, 0)
    found = draw(model, config_for(tmp_path, 2 * least, "step"), None)
    assert found.host_nbytes + found.beside_nbytes == 2 * least
    assert found.beside_nbytes > 0
