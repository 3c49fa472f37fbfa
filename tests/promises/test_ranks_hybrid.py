"""Hybrid sharding: four ranks as two copies of two parts have the numbers of one process, the same bits in both copies.

Tolerance: as in `test_ranks.py`. Sums over copies are associated in another way than those of four parts.
"""

from __future__ import annotations

from typing import Any

import doubles_rank_scenarios as scenarios
import pytest
import torch
from doubles_combinations import some_of
from doubles_python import WarmPython
from doubles_rank_checks import check, plain
from doubles_rank_hybrid import DEPTH, KEPT, STEPS
from doubles_ranks import PATIENCE, Reports, run_jobs, values

pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]

# The others where all are asked for: one process is what the numbers of both arrangements are held against, too.
OTHERS = some_of(["settled"], ["device", "undivided"])
RUNS = ["odd", "bfloat16", "routed", "stage_1", *OTHERS]
VERBS = ["sub_group", "hybrid_committing", "hybrid_copied", "hybrid_kept", "wrong_meshes"]
PLAIN: dict[str, dict[str, Any]] = {
    "stage_1": {"accumulate": 2},
    "bfloat16": {},
    **{device: {} for device in OTHERS if device != "undivided"},
    "odd": {},
}


@pytest.fixture(scope="module")
def reports(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    runs = [f"hybrid_{name}" for name in RUNS]
    jobs = [(4, [*runs, *VERBS, "hybrid_differs", "hybrid_dies"])]
    return run_jobs(warm_python, tmp_path_factory.mktemp("hybrid"), jobs)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["norm"] == other["norm"]
    for name, weights in one["weights"].items():
        assert torch.equal(weights, other["weights"][name]), name
        assert torch.equal(one["masters"][name], other["masters"][name]), name


@pytest.mark.parametrize("name", PLAIN)
def test_the_numbers_of_one_process_on_all_rows(reports, name):
    """`check` also asks for the same norms, weights and masters, bit by bit, on all ranks of both copies."""
    near = {"atol": 6e-3, "rtol": 2e-2} if name == "bfloat16" else None
    check(values(reports[4, f"hybrid_{name}"]), plain(scenarios.Odd, steps=STEPS, **PLAIN[name]), near=near)


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_repeats_bit_by_bit_also_on_devices_and_begins_with_the_values_of_rank_0(reports, name):
    """Four parts of one copy have its numbers but for the last bits."""
    for one, other in zip(values(reports[4, "hybrid_odd"]), values(reports[4, f"hybrid_{name}"]), strict=True):
        if name != "undivided":
            same(one, other)
            continue
        torch.testing.assert_close(one["losses"], other["losses"], rtol=1e-5, atol=1e-5)
        for parameter, weights in one["weights"].items():
            torch.testing.assert_close(weights, other["weights"][parameter], rtol=1e-5, atol=1e-6)
    assert all(found["updated"][0] > 0 for found in values(reports[4, "hybrid_settled"]))


def test_experts_that_only_one_copy_has_tokens_for(reports):
    check(values(reports[4, "hybrid_routed"]), plain(scenarios.Experts, steps=STEPS, batch=scenarios.routed_tokens))


def test_a_mesh_names_the_ranks_that_share_a_model(reports):
    found = values(reports[4, "sub_group"])
    for pair in range(2):
        expected = plain(scenarios.Odd, batch=lambda step, pair=pair: scenarios.tokens(step + 100 * pair))
        check(found[2 * pair : 2 * pair + 2], expected)


def test_a_commit_of_both_copies_is_continued_with_the_same_bits(reports):
    for found in values(reports[4, "hybrid_committing"]):
        whole, again = found["whole"], found["again"]
        assert (whole["begun"], again["begun"]) == (0, 2)
        assert again["losses"] == whole["losses"][2:]
        for name, weights in whole["weights"].items():
            assert torch.equal(again["weights"][name], weights), name
        assert found["wrong"].startswith("ResumeError: this is not the run that was committed: world_size was 2, is 4")
        assert "resume=path" in found["wrong"]


def test_a_snapshot_is_of_one_copy_and_continued_by_any_arrangement(reports):
    found = values(reports[4, "hybrid_copied"])
    for each in found:
        ranks = {name[:10] for name in each["files"] if name.endswith("safetensors")}
        assert ranks == {"rank-00000", "rank-00001"}, "the second copy writes nothing"
        made, two, one = (each["masters"][name] for name in ("made", "two copies", "one copy"))
        assert all(map(torch.equal, made, two))
        for here, there in zip(made, one, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)
        for name, weights in each["weights"].items():
            assert torch.equal(each["saved"][name], weights), name
        assert all(map(torch.equal, made, found[0]["masters"]["made"]))


UNIT = (KEPT + 1) * KEPT * 4
EVERYTHING = DEPTH * UNIT * 4
TRANSIT = 4 * UNIT  # as without copies, see test_ranks_idioms.py
COPIES = UNIT  # what is added up over copies: half a unit that is sent, half a unit that comes
ROUNDING = DEPTH * 4 * 4096


def test_a_rank_reserves_half_of_a_copy_and_what_is_in_transit(reports):
    for found in values(reports[4, "hybrid_kept"]):
        assert EVERYTHING / 2 <= found["reserved"] <= EVERYTHING / 2 + TRANSIT + COPIES + ROUNDING


# What goes wrong


def test_meshes_that_cannot_be_served_are_refused_before_anything_is_touched(reports):
    for found in values(reports[4, "wrong_meshes"]):
        said = found["said"]
        assert all(text.startswith("ConfigError: mesh") for text in said.values())
        assert "found a mesh of shape [1, 2, 2] with the dimensions ('pipeline', 'replicate', 'shard')" in said["three"]
        assert "mesh_dim_names=('replicate', 'shard'))" in said["unnamed"]
        assert "at least two ranks in the last one" in said["not divided"]
        assert "ascend along each dimension, found [[3, 1], [2, 0]]" in said["descending"]
        assert "expects a DeviceMesh or a process group, found list" in said["something else"]
        assert found["untouched"]
        assert found["rows"] == ((0, 1), (2, 3)), "two dimensions of a larger mesh are one"


def test_copies_that_would_go_different_ways_stop(reports):
    for report in reports[4, "hybrid_differs"]:
        assert report.error[0] == "TiermemError"
        assert "the copies of the model have different gradients of unit" in report.error[1]


def test_a_rank_that_dies_stops_both_copies_and_is_named(reports):
    *living, dead = reports[4, "hybrid_dies"]
    assert dead is None
    for report in living:
        assert report.error[0] == "TiermemError"
        assert "no word from rank 3" in report.error[1]
        assert "Timed out" not in report.error[1], "noticed because the connection ended, not for want of an answer"
