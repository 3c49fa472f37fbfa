"""A commit is of all ranks or of none, wherever one of them is killed; what is resumed has the same bits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from doubles_python import WarmPython
from doubles_rank_commits import DOUBTS, EIO, LOOKING, STEPS, STRUCK
from doubles_rank_scenarios import COMMITS, KILLED
from doubles_ranks import PATIENCE, STALL, Reports, run_jobs, values

OTHER_SIZES = ["other_sizes", "other_sizes_insisting"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]


@pytest.fixture(scope="module")
def reports(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    # Whom one has been killed beside is in a world of its own; who goes on, in one with all others.
    killed = [(2, [f"killed_{when}"]) for when in KILLED]
    resumed = [f"resumed_{when}" for when in KILLED]
    doubts = [f"{what}_{place}" for place in DOUBTS for what in ("doubtful", "settled")]
    looking = [scenario.__name__ for scenario in LOOKING]
    failing = ["one_cannot_commit", "one_has_no_pages_for_a_snapshot", "one_has_no_thread"]
    together = [
        "undisturbed",
        *resumed,
        "five_steps",
        "exchanged",
        "one_cannot_replace",
        "unexpected",
        "unlooked",
        *looking,
        *failing,
        *doubts,
    ]
    jobs = [*killed, (2, together), (3, OTHER_SIZES), (1, [*OTHER_SIZES, "unexpected"])]
    return run_jobs(warm_python, tmp_path_factory.mktemp("commits"), jobs)


@pytest.mark.parametrize(("when", "begun"), KILLED.items())
def test_a_rank_killed_inside_a_commit(reports, when, begun):
    """Before it publishes, the other rank has published the commit, and all fall back to the one before, or anew."""
    survivor, dead = reports[2, f"killed_{when}"]
    assert dead is None
    assert survivor.error is not None
    assert survivor.error[0] == "TiermemError"
    assert "no word from rank 1" in survivor.error[1]
    undisturbed = values(reports[2, "undisturbed"])
    for found, expected in zip(values(reports[2, f"resumed_{when}"]), undisturbed, strict=True):
        assert found["begun"] == begun
        assert found["losses"] == expected["losses"][begun:]
        for name, weights in expected["weights"].items():
            assert torch.equal(found["weights"][name], weights), name


def test_a_commit_that_one_rank_cannot_make_is_nobodys(reports):
    first, second = values(reports[2, "one_cannot_commit"])
    assert (
        first["told"]
        == "TiermemError: another rank could not prepare a commit: rank 1: SwapFullError: the disk of rank 1 is full"
    )
    assert second["told"] == "SwapFullError: the disk of rank 1 is full"
    for each in (first, second):
        assert each["held"] == {"step": 1}
        assert each["last"] == {"step": 3}


def test_a_snapshot_for_which_one_rank_cannot_write_its_pages_back_is_an_error_on_all_at_once(reports):
    """And no more than that: training, commits and snapshots go on."""
    for rank, (report, found) in enumerate(
        zip(
            reports[2, "one_has_no_pages_for_a_snapshot"],
            values(reports[2, "one_has_no_pages_for_a_snapshot"]),
            strict=True,
        )
    ):
        (told,) = found["told"]
        assert "the drive of rank 1 has failed" in told
        assert told.startswith("OSError" if rank == 1 else "TiermemError: another rank could not write its pages back")
        assert found["held"] == {"step": 2}
        assert [name for name in found["left"] if "swap " in name or "partial" in name] == ["swap 1"]
        assert report.seconds < STALL, "nobody has waited in vain"


def test_a_rank_that_may_start_no_thread_for_a_commit_or_a_snapshot_says_so_to_all(reports):
    first, second = values(reports[2, "one_has_no_thread"])
    assert second == ["no thread for tiermem-commit", "no thread for tiermem-snapshot", "", ""]
    for told, what, own in zip(first, ("prepare a commit", "write its pages back"), second, strict=False):
        assert told == f"another rank could not {what}: rank 1: TiermemError: {own}"
    assert first[2:] == ["", ""]


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in LOOKING])
def test_units_that_are_completed_beside_a_commit_or_a_snapshot_have_room(reports, name):
    for found, expected in zip(values(reports[2, name]), values(reports[2, "unlooked"]), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
        assert len(found) == COMMITS


@pytest.mark.parametrize("name", OTHER_SIZES)
@pytest.mark.parametrize("size", [3, 1])
def test_a_commit_of_another_number_of_ranks_is_not_overlooked(reports, size, name):
    """Nobody is told that there is none, nor to start anew without more; a snapshot is the way."""
    for report in reports[size, name]:
        assert report.error is not None
        assert report.error[0] == "ResumeError"
        assert "2 ranks" in report.error[1]
        assert "resume=path" in report.error[1]


def test_a_rank_does_not_go_on_with_what_another_has_committed(reports):
    """Their parts have the same sizes: each would train the other's."""
    for report in reports[2, "exchanged"]:
        assert report.error is not None
        assert report.error[0] == "ResumeError"
        assert "rank 0 has what rank 1 has committed; rank 1 has what rank 0 has committed" in report.error[1]


def test_a_commit_that_one_rank_cannot_replace_stays_on_all(reports):
    first, second = values(reports[2, "one_cannot_replace"])
    assert first["told"].startswith("TiermemError: another rank could not open its swap files: rank 1: SwapFullError")
    assert second["told"].startswith("SwapFullError: cannot reserve")
    for found, expected in zip((first, second), values(reports[2, "undisturbed"]), strict=True):
        assert found["begun"] == 1
        assert found["losses"] == expected["losses"][1:]


def test_ranks_read_nothing_again_for_a_commit_that_nobody_expected(reports):
    """They wait for each other in it; one process alone, whose commit may take as long as it takes, does read."""
    (alone,) = values(reports[1, "unexpected"])
    assert sum(alone["read_again"]) > 0
    for each in values(reports[2, "unexpected"]):
        assert each["read_again"] == [0]
        assert each["written"] > 0


def both(reports: Reports, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = values(reports[2, f"doubtful_{place}"])
    assert first["held"] == second["held"], "two ranks believe in different commits"
    assert [bool(each) for each in first["told"]] == [bool(each) for each in second["told"]]
    return first, second


def check_goes_on(reports: Reports, place: str, begun: int) -> None:
    """What was left is gone on from at this step, on both ranks, with the bits of a run that nothing happened to."""
    undisturbed = values(reports[2, "five_steps"])
    for found, expected in zip(values(reports[2, f"settled_{place}"]), undisturbed, strict=True):
        assert found["begun"] == begun
        assert found["losses"] == expected["losses"][begun:]
        for name, weights in expected["weights"].items():
            assert torch.equal(found["weights"][name], weights), name


TAKEN_BACK = ("rename", "rename_of_both", "rename_and_taking_back", "rename_silent")
THERE = ("rename_happened", "unlink", "unlink_happened")


@pytest.mark.parametrize("place", [place for place in TAKEN_BACK if place in DOUBTS])
def test_a_commit_that_one_rank_has_not_published_is_taken_back_by_all(reports, place):
    """Also where the one that has it cannot take it back at once, and where the name may yet change, long after."""
    first, second = both(reports, place)
    assert first["held"] == [1, 1, 3, 4]
    reason = "ETIMEDOUT" if place == "rename_silent" else os.strerror(EIO)
    told = second["told"][STRUCK - 1]
    assert told.startswith("SwapIOError: rename")
    assert reason in told
    expected = "SwapIOError" if place == "rename_of_both" else "TiermemError: another rank could not publish a commit"
    assert first["told"][STRUCK - 1].startswith(expected)
    assert reason in first["told"][STRUCK - 1]
    check_goes_on(reports, place, STEPS)


@pytest.mark.parametrize("place", [place for place in THERE if place in DOUBTS])
def test_a_commit_that_is_there_after_all_is_everybodys(reports, place):
    for each in both(reports, place):
        assert each == {"told": [""] * STEPS, "held": [1, 2, 3, 4], "ended": ""}
    check_goes_on(reports, place, STEPS)


def test_where_one_rank_can_never_know_the_other_makes_sure(reports):
    """A failed fsync: training goes on with the commit before, and no rank makes another."""
    for each in both(reports, "sync"):
        assert each["held"] == [1, 1, 1, 1]
        assert all("sync in" in told for told in each["told"][1:])
        assert not each["ended"]
    check_goes_on(reports, "sync", 1)


def test_what_no_rank_can_be_sure_of_is_not_written_over(reports):
    """Training ends where it would have to; the next start finds the commit that all have."""
    for each in both(reports, "sync_and_taking_back"):
        assert each["held"][:STRUCK] == [1, 1]
        assert "it is not known whether all ranks have a commit" in each["told"][STRUCK - 1]
        assert "SwapFullError" in each["ended"]
    check_goes_on(reports, "sync_and_taking_back", STRUCK)


def test_a_commit_before_that_may_come_back_is_not_written_over(reports):
    """All have the new one, and believe so, though one cannot be sure that the old one is gone."""
    for each in both(reports, "unlink_sync"):
        assert each["told"][:STRUCK] == ["", ""]
        assert each["held"][:STRUCK] == [1, 2]
        assert "SwapFullError" in each["ended"]
    check_goes_on(reports, "unlink_sync", STRUCK)
