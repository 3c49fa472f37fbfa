"""What control groups leave a process, in both versions, nested, and when they are not there."""

import os
from pathlib import Path

import psutil
import pytest

from tiermem.memory.machine import available_cores, available_host_memory, control_group_headroom

GIB = 1 << 30


def _group(folder: Path, limit: str, usage: int, stat: str, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(stat)


def _membership(folder: Path, text: str) -> Path:
    file = folder / "membership"
    file.write_text(text)
    return file


def test_version_2_counts_every_enclosing_group_and_drops_cache(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    _group(root / "slice", str(8 * GIB), 6 * GIB, f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n", version=2)
    _group(root / "slice" / "job", "max", 3 * GIB, "", version=2)
    assert control_group_headroom(_membership(tmp_path, "0::/slice/job\n"), root) == 4 * GIB


def test_version_2_beyond_memory_high_a_process_is_slowed_down(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    _group(root / "job", "max", 3 * GIB, "", version=2)
    (root / "job" / "memory.high").write_text(f"{5 * GIB}\n")
    membership = _membership(tmp_path, "0::/job\n")
    assert control_group_headroom(membership, root) == 2 * GIB
    (root / "job" / "memory.max").write_text(f"{4 * GIB}\n")
    assert control_group_headroom(membership, root) == GIB
    (root / "job" / "memory.high").write_text("max\n")
    assert control_group_headroom(membership, root) == GIB


def test_version_1_limit_and_its_way_to_say_none(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    stat = f"total_inactive_file {GIB}\ninactive_file 7\n"
    _group(root / "memory", "9223372036854771712", 0, "", version=1)
    membership = _membership(tmp_path, "5:cpu:/job\n4:memory:/job\n0::/\n")
    assert control_group_headroom(membership, root) is None
    _group(root / "memory" / "job", str(4 * GIB), 2 * GIB, stat, version=1)
    assert control_group_headroom(membership, root) == 3 * GIB


def test_a_container_sees_its_own_group_as_the_root_of_the_mount(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    _group(root, str(2 * GIB), 3 * GIB, "", version=2)
    assert control_group_headroom(_membership(tmp_path, "0::/../outside/docker/123\n"), root) == 0


def test_no_control_groups_is_no_limit(tmp_path: Path) -> None:
    assert control_group_headroom(tmp_path / "missing", tmp_path) is None
    assert control_group_headroom(_membership(tmp_path, "0::/\nnonsense\n"), tmp_path) is None


def test_this_machine_has_some_memory() -> None:
    assert 0 < available_host_memory() <= psutil.virtual_memory().total


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("job", "around", "expected"),
    [("50000 100000", "150000 100000", 0.5), ("max 100000", "25000 50000", 0.5), ("max 100000", None, CORES)],
)
def test_of_version_2s_shares_of_time_the_smallest_counts(
    job: str, around: str | None, expected: float, tmp_path: Path
) -> None:
    (tmp_path / "slice" / "job").mkdir(parents=True)
    (tmp_path / "slice" / "job" / "cpu.max").write_text(job + "\n")
    if around is not None:
        (tmp_path / "slice" / "cpu.max").write_text(around + "\n")
    assert available_cores(_membership(tmp_path, "0::/slice/job\n"), tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("25000", 0.25), ("-1", CORES), ("99900000", CORES)])
def test_version_1s_share_of_time_and_its_way_to_say_none(quota: str, expected: float, tmp_path: Path) -> None:
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert available_cores(_membership(tmp_path, "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n"), tmp_path) == expected


def test_cores_that_it_is_not_bound_to_do_not_count(tmp_path: Path) -> None:
    if CORES == 1 or not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs two cores, and a system that binds processes to some")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cores(tmp_path / "missing", tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)
