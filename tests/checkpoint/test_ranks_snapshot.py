"""Snapshots of several ranks: one folder of all, continued by any other number, the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from doubles_ranks import run_jobs, values

from tiermem.checkpoint.reading import open_snapshot


def test_from_two_ranks_to_three_to_one(tmp_path: Path) -> None:
    reports = run_jobs(tmp_path, [(2, ["copied"]), (3, ["copied"]), (1, ["copied"])])
    snapshots = {}
    for size in (2, 3, 1):
        found = values(reports[size, "copied"])
        assert [each["committed"] for each in found] == [{"size": size}] * size
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
