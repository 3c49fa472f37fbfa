"""Several ranks that keep parameters in memory by choice: the numbers of one process, and nothing kept goes to SWAP.

At stage 3 each rank keeps its own part, which is gathered for each use as ever; at stages 1 and 2 the whole.
"""

from __future__ import annotations

import doubles_rank_scenarios as scenarios
import pytest
import torch
from doubles_combinations import some_of
from doubles_python import WarmPython
from doubles_ranks import PATIENCE, Reports, run_jobs, values
from doubles_training import PlainAdamW

pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]

NAMES = some_of(["kept_all", "kept_backward", "kept_stage_2", "kept_on_a_device"], ["kept_small", "kept_stage_1"])


@pytest.fixture(scope="module")
def reports(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return run_jobs(
        warm_python,
        tmp_path_factory.mktemp("kept"),
        [(2, [*NAMES, "kept_reshard", "kept_whole_on_a_device"]), (1, ["kept_reshard"])],
    )


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], torch.nn.Module]:
    torch.manual_seed(1)
    model = scenarios.Odd()
    optimizer = PlainAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return scenarios.train(model, optimizer, steps=2, accumulate=2), model


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_one_process_and_nothing_kept_goes_to_swap(name, reports, expected):
    losses, model = expected
    found = values(reports[2, name])
    mean = torch.tensor([each["losses"] for each in found]).mean(dim=0)
    torch.testing.assert_close(mean, torch.tensor(losses), atol=1e-5, rtol=1e-5)
    for each in found:
        for parameter, values_of in model.named_parameters():
            torch.testing.assert_close(each["weights"][parameter], values_of.detach(), atol=1e-6, rtol=1e-5)
        assert each["crossed"][True] == 0
        if name != "kept_all":
            assert each["crossed"][False] > 0, "all others are paged"
        budget, reserved, high_water = each["tiers"]["HOST"]
        assert reserved <= high_water <= budget


def test_from_two_ranks_with_norms_in_float32_to_one(reports):
    two, one = values(reports[2, "kept_reshard"]), values(reports[1, "kept_reshard"])[0]
    for each in two:
        assert each["dtypes"] == one["dtypes"]
        assert all(torch.equal(each["masters"][name], one["masters"][name]) for name in one["masters"])
    norms = {name for name, dtype in one["dtypes"].items() if dtype == torch.float32}
    assert norms == {f"layers.{number}.3.{which}" for number in range(3) for which in ("weight", "bias")}


def test_whole_pages_that_are_completed_on_a_device_are_refused(reports):
    for said, untouched, left in values(reports[2, "kept_whole_on_a_device"]):
        assert "keep= with 2 ranks that compute on devices needs stage=3, found stage=2" in said
        assert untouched
        assert left == []
