"""Ranks that update under backward have the bits of those that update in the step, whatever had to be taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doubles_combinations import part_of, some_of
from doubles_python import WarmPython
from doubles_rank_devices import EARLY
from doubles_ranks import PATIENCE, Reports, run_jobs, values

pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]

REDONE = some_of([(2, "early_backward"), (2, "early_device")], [(3, "early_backward"), (3, "early_device")])
# Of what is alike, the others where all are asked for: whole parameters are updated by "auto" in any case.
SCHEDULES = some_of(["early_forward"], ["early_auto"])
STAGES = some_of([3], [2])
TWO = ["early_step", *SCHEDULES, *(name for size, name in REDONE if size == 2)]
THREE = [name for size, name in REDONE if size == 3]
GOOD = ["early_for_good_step", "early_for_good_backward", "early_whole_for_good"]
WHOLE = ["early_whole", "early_whole_auto", "early_whole_one_full", "early_whole_device"]
SMALL = [f"early_small_{update}_{stage}" for update in ("step", "backward") for stage in STAGES]
REFUSED = ["early_refused_step", "early_refused_backward", "early_refused_for_good"]
MET = part_of(3, EARLY, ["processors", "tightest", "partly_settled"])
RUNS = [*(f"early_{run}_step_processors" for run in EARLY), *(f"early_{run}_backward_{how}" for run, how in MET)]


@pytest.fixture(scope="module")
def reports(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    directory = tmp_path_factory.mktemp("ranks")
    jobs = [(2, [*TWO, *GOOD, *WHOLE, *SMALL, *REFUSED, *RUNS]), (3, ["early_step", *THREE])]
    return run_jobs(warm_python, directory, jobs[: 2 if THREE else 1])


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["noted"] == other["noted"], "losses, norms and skipped steps"
        assert all(map(torch.equal, one["masters"], other["masters"]))


@pytest.mark.parametrize(("size", "name"), REDONE)
def test_clipped_unclipped_skipped_and_looked_at_in_between(reports, size, name):
    """All ranks decide the same way, as they know the same norm; one rank's overflow has everybody's update undone."""
    found = values(reports[size, name])
    same(found, values(reports[size, "early_step"]))
    assert [each["noted"][-1][1] for each in found] == [1] * size
    for speculated, confirmed, redone in (each["counts"] for each in found):
        assert confirmed > 0, "a step that is not clipped"
        assert redone > 0, "one that is"
        assert speculated == confirmed + redone
    assert len({each["counts"] for each in found}) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_one_backward_more_is_taken_back_by_a_rank_too_that_had_nothing_to_update(reports, stage):
    found = values(reports[2, f"early_small_backward_{stage}"])
    for one, other in zip(found, values(reports[2, f"early_small_step_{stage}"]), strict=True):
        assert one["losses"] == other["losses"]
        assert all(map(torch.equal, one["masters"], other["masters"]))
        confirmed, redone = one["counts"]
        assert confirmed > 0
        assert redone == 2
    assert [each["nothing"] > 0 for each in found] == [False, True]


def test_gradients_are_dropped_by_a_rank_too_that_had_nothing_to_update(reports):
    found = values(reports[2, "early_refused_backward"])
    for one, other in zip(found, values(reports[2, "early_refused_step"]), strict=True):
        assert one["losses"] == other["losses"]
        assert all(map(torch.equal, one["masters"], other["masters"]))
        assert one["warned"] == [0, 0]
    assert [each["nothing"] for each in found] == [0, 1]


def test_all_ranks_say_that_what_was_for_good_counts(reports):
    one, other = values(reports[2, "early_refused_for_good"])
    assert one["warned"] == other["warned"] == [1, 0], "and from then on it can be undone"
    assert one["steps"] == other["steps"]
    assert all(map(torch.equal, one["masters"], other["masters"]))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_other_schedules(reports, name):
    same(values(reports[2, name]), values(reports[2, "early_step"]))


@pytest.mark.parametrize("name", WHOLE)
def test_ranks_with_whole_parameters_update_early_together_or_not_at_all(reports, name):
    """Also where one of them has no room for it in some steps: then nobody does, and all complete the same units."""
    found = values(reports[2, name])
    same(found, values(reports[2, "early_step"]))
    first, second = (each["counts"] for each in found)
    assert first == second
    if name != "early_whole_auto":  # which judges by what there is to hide
        speculated, confirmed, redone = first
        assert speculated == confirmed + redone
        everywhere = values(reports[2, "early_whole"])[0]["counts"]
        assert confirmed > 0
        assert (speculated < everywhere[0]) == (name == "early_whole_one_full")


@pytest.mark.parametrize("name", ["early_for_good_backward", "early_whole_for_good"])
def test_without_clipping_nothing_waits_for_the_others(reports, name):
    found = values(reports[2, name])
    same(found, values(reports[2, "early_for_good_step"]))
    for each in found:
        assert each["spent"] == 3, "in every step but the first, whose order nobody knew"
        assert each["counts"] == (0, 0, 0)


@pytest.mark.parametrize(("run", "how"), MET)
def test_micro_batches_experts_and_tight_budgets(reports, run, how):
    found = values(reports[2, f"early_{run}_backward_{how}"])
    for one, other in zip(found, values(reports[2, f"early_{run}_step_processors"]), strict=True):
        assert one["losses"] == other["losses"]
        assert one["norm"] == other["norm"]
        assert all(torch.equal(one["masters"][name], other["masters"][name]) for name in one["masters"])
