"""A commit is of all ranks or of none, wherever one of them is killed; what is resumed has the same bits."""

from __future__ import annotations

import pytest
import torch
from doubles_ranks import Reports, run_jobs, values

pytestmark = pytest.mark.long

WHEN = ("prepared", "published", "agreed")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    killed = [(2, [f"{what}_{when}"]) for when in WHEN for what in ("killed", "resumed")]
    jobs = [(2, ["undisturbed", "one_cannot_commit"]), *killed, (3, ["other_sizes"]), (1, ["other_sizes"])]
    return run_jobs(tmp_path_factory.mktemp("commits"), jobs)


@pytest.mark.parametrize(("when", "begun"), [("prepared", 1), ("published", 2), ("agreed", 2)])
def test_a_rank_killed_inside_a_commit(reports, when, begun):
    """Before it publishes, the other rank has published the second commit, and all fall back to the first."""
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


@pytest.mark.parametrize("size", [3, 1])
def test_a_commit_of_another_number_of_ranks_is_not_overlooked(reports, size):
    for report in reports[size, "other_sizes"]:
        assert report.error is not None
        assert report.error[0] == "ResumeError"
        assert "2 ranks" in report.error[1]
