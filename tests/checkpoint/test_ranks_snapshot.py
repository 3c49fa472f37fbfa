"""Snapshots of several ranks: one folder of all, continued by any other number, the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import doubles_rank_scenarios as scenarios
import pytest
import torch
from doubles_combinations import some_of
from doubles_python import WarmPython
from doubles_ranks import PATIENCE, Reports, run_jobs, values
from doubles_training import PlainAdamW

from tiermem.checkpoint.reading import open_snapshot

pytestmark = pytest.mark.timeout(PATIENCE)


def test_from_two_ranks_to_three_to_one(warm_python: WarmPython, tmp_path: Path) -> None:
    reports = run_jobs(warm_python, tmp_path, [(2, ["copied"]), (3, ["copied"]), (1, ["copied"])])
    snapshots = {}
    for size in (2, 3, 1):
        found = values(reports[size, "copied"])
        assert [each["committed"] for each in found] == [{"size": size, "rank": rank} for rank in range(size)]
        # To each rank its own, to a new one the first one's.
        left_by = {2: [None, None], 3: [(2, 0), (2, 1), (2, 0)], 1: [(3, 0)]}[size]
        assert [each["resumed"] and tuple(each["resumed"].values()) for each in found] == left_by
        assert "to be free or an empty folder" in found[0]["taken"]
        assert all("another rank could not begin a snapshot" in each["taken"] for each in found[1:])
        (path,) = tmp_path.rglob(f"copy{size}")
        snapshots[size] = open_snapshot(path)
        assert snapshots[size].manifest.world_size == size
        assert {file.rank for file in snapshots[size].manifest.files} == set(range(size))
        assert list(snapshots[size].verify()) == []
        for name, expected in values(reports[2, "copied"])[0]["masters"].items():
            assert all(torch.equal(each["masters"][name], expected) for each in found), name
    first = snapshots[2]
    for other in (snapshots[3], snapshots[1]):
        assert len(json.dumps(other.record["optimizers"])) > 10
        for one, two in zip(first.manifest.kept, other.manifest.kept, strict=True):
            assert one.names == two.names
            for plane in one.planes:
                assert torch.equal(first.whole(one, plane), other.whole(two, plane)), (one.names, plane)
    assert not list(tmp_path.rglob("*.partial"))


# Each job continues what the one before it left. What a number of ranks found is compared with what was left for it.
# To fewer ranks the snapshots above go, too.
CHAINS = some_of(
    [[(1, "begun"), (2, "continued_from_1"), (3, "continued_from_2")]], [[(4, "begun"), (1, "continued_from_4")]]
)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: " to ".join(str(size) for size, _ in chain))
def test_the_same_bits_and_the_same_training_on_another_number_of_ranks(
    chain: list, warm_python: WarmPython, tmp_path: Path
) -> None:
    reports: Reports = run_jobs(warm_python, tmp_path, [(size, [name]) for size, name in chain])
    torch.manual_seed(1)
    model = scenarios.Odd()
    optimizer = PlainAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=scenarios.CLIP)
    done = 0
    for before, (size, name) in zip([None, *chain], chain, strict=False):
        if before is not None:
            left, found = (open_snapshot(tmp_path / each) for each in (f"left by {before[0]}", f"found by {size}"))
            assert (left.manifest.world_size, found.manifest.world_size) == (before[0], size)
            planes = 0
            for one, two in zip(left.manifest.kept, found.manifest.kept, strict=True):
                assert (one.names, one.planes.keys()) == (two.names, two.planes.keys())
                for plane in one.planes:
                    planes += 1
                    assert torch.equal(left.whole(one, plane), found.whole(two, plane)), (one.names, plane)
            assert planes > 40
        reported = values(reports[size, name])
        mean = torch.tensor([each["losses"] for each in reported]).mean(dim=0)
        steps = range(done, done + len(mean))
        expected = []
        for step in steps:
            loss = scenarios.loss_of(model, scenarios.tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.detach())
        done = steps.stop
        torch.testing.assert_close(mean, torch.stack(expected), rtol=1e-5, atol=1e-5)
        for each in reported:
            assert each["steps"] == done
            for parameter, values_there in model.named_parameters():
                torch.testing.assert_close(each["weights"][parameter], values_there.detach(), rtol=1e-5, atol=1e-6)
