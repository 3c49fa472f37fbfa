"""The doctor reads control groups and drives from the kernel's files, and says what each fact means."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiermem.cli import doctor, drives, main
from tiermem.cli.doctor import cgroup_limit
from tiermem.cli.drives import DriveReport, drive_node, examine_drive, is_rotational, queue_attribute
from tiermem.cli.findings import Finding, Gpu, Limits, about_cpu, about_drive, about_gpus, about_memory, about_nodes

GIB = 1 << 30
TOTAL = 64 * GIB


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/user/run\n", "sys/fs/cgroup/user/run/memory.max": f"{8 * GIB}\n"}, 8 * GIB),
        ({"proc/self/cgroup": "0::/user/run\n", "sys/fs/cgroup/user/run/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/user/run\n",
                "sys/fs/cgroup/user/run/memory.max": "max\n",
                "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
            },
            4 * GIB,
        ),
        ({"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/x\n5:cpu,memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            3 * GIB,
        ),
        ({"proc/self/cgroup": "5:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{100 * GIB}\n"}, None),
    ],
)
def test_the_tightest_control_group_counts(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    root = tree(tmp_path, files)
    assert cgroup_limit(TOTAL, root / "proc/self/cgroup", root / "sys/fs/cgroup") == expected


def _device(directory: Path) -> str:
    device = directory.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def test_a_partition_is_described_by_its_disk(tmp_path: Path) -> None:
    disk = "sys/devices/pci/nvme0n1"
    tree(tmp_path, {f"{disk}/queue/rotational": "0\n", f"{disk}/device/model": "Fast 2TB   \n", f"{disk}/p1/size": "1"})
    blocks = tmp_path / "sys/dev/block"
    blocks.mkdir(parents=True)
    (blocks / _device(tmp_path)).symlink_to(tmp_path / disk / "p1")
    assert is_rotational(tmp_path, tmp_path) is False
    assert queue_attribute(tmp_path, "device/model", tmp_path) == "Fast 2TB"
    assert queue_attribute(tmp_path, "queue/logical_block_size", tmp_path) is None
    assert is_rotational(tmp_path, tmp_path / "empty") is None


DRIVE = DriveReport("/nvme0", True, True, 1400 * 10**9, "ext4", True, False, 512, "Fast 2TB")


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({}, ""),
        ({"direct_io": False}, "ext4 or xfs"),
        ({"rotational": True}, "spins"),
        ({"logical_block": 8192}, "blocks of 8192 bytes"),
        ({"logical_block": 8192, "direct_io": False}, "blocks of 8192 bytes"),
        ({"logical_block": 4096}, ""),
        ({"exists": False}, "make or mount it"),
        ({"writable": False}, "choose another directory, or allow it"),
    ],
)
def test_a_drive_is_judged(change: dict[str, Any], advice: str) -> None:
    finding = about_drive(replace(DRIVE, **change))
    assert advice in finding.change
    assert bool(advice) == bool(finding.change)
    if not change:
        assert "about 100 billion parameters in bfloat16" in finding.means
        assert finding.found.endswith("direct I/O, blocks of 512, solid state, Fast 2TB")


def test_a_small_drive_has_room_for_more_than_nothing() -> None:
    assert "about 0.00224 billion parameters" in about_drive(replace(DRIVE, free_bytes=31_373_000)).means


@pytest.mark.parametrize("change", [{"exists": False}, {"writable": False}, {"refusal": "a quota"}])
def test_where_nothing_can_be_written_there_is_room_for_nothing(change: dict[str, Any]) -> None:
    means = about_drive(replace(DRIVE, **change)).means
    assert means.startswith("nothing can be swapped there")
    assert "room" not in means


def _by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_instruction_sets_say_how_bfloat16_is_computed() -> None:
    assert "natively" in _by_name(about_cpu("x", 8, ["avx2", "avx512_bf16", "avx512f"]))["instruction sets"].means
    emulated = _by_name(about_cpu("x", 8, ["avx2", "sse4_2"]))["instruction sets"]
    assert (emulated.found, "'float32' is many times faster" in emulated.change) == ("avx2", True)
    wide = _by_name(about_cpu("x", 8, ["avx2", "avx512f"]))["instruction sets"]
    assert (wide.found, "'float32' may be the faster one" in wide.change) == ("avx512f", True)
    assert _by_name(about_cpu(None, 8, None))["instruction sets"].found == "unknown"
    assert _by_name(about_cpu(None, 2, None))["CPU"].change != ""


def test_a_process_that_may_use_a_part_of_the_cores_is_told_so() -> None:
    whole = _by_name(about_cpu("x", 8, None, 8.0, 8))["CPU"]
    assert (whole.found, whole.change) == ("x, 8 cores", "")
    part = _by_name(about_cpu("x", 8, None, 3.5, 8))["CPU"]
    assert part.found == "x, 8 cores, 3.5 of them for this process (taskset, or a control group)"
    assert part.change.startswith("set OMP_NUM_THREADS=3:")
    assert _by_name(about_cpu("x", 8, None, 4.0, 4))["CPU"].change == ""
    assert _by_name(about_cpu("x", 8, None, 0.5, 1))["CPU"].change.startswith("so few cores")
    assert _by_name(about_cpu("x", 8, None, 0.5, 2))["CPU"].change.startswith("set OMP_NUM_THREADS=1:")


def test_limits_are_said_with_what_to_do() -> None:
    free = _by_name(about_memory(TOTAL, 32 * GIB, Limits(None, None, None, None), beside_gpu=True))
    assert all(finding.change == "" for finding in free.values())
    assert "32.00 GiB" in free["memory"].means
    tight = _by_name(about_memory(TOTAL, 32 * GIB, Limits(4 * GIB, 65536, 64, GIB), beside_gpu=True))
    assert "4.00 GiB" in tight["memory"].means
    less = _by_name(about_memory(TOTAL, 2 * GIB, Limits(4 * GIB, None, 256, None), beside_gpu=True))
    assert "2.00 GiB" in less["memory"].means
    assert less["open files"].change == ""
    assert all(finding.change for finding in tight.values())
    assert set(tight) == {"memory", "memory limit (cgroup)", "lockable memory", "open files", "file size"}
    alone = _by_name(about_memory(TOTAL, 32 * GIB, Limits(None, 65536, None, None), beside_gpu=False))
    assert alone["lockable memory"].change == "", "which nothing is to be locked into"


def test_gpus_are_listed() -> None:
    (none,) = about_gpus([])
    assert "CPU" in none.means
    old, new = about_gpus([Gpu("V100", 16 * GIB, "7.0", False), Gpu("H100", 80 * GIB, "9.0", True)])
    assert ("float16" in old.change, new.change) == (True, "")


GPU = Gpu("H100", 80 * GIB, "9.0", True, node=1)


@pytest.mark.parametrize(
    ("gpus", "node", "refused", "means", "change"),
    [
        ([GPU], 1, None, "placed on its GPU's node", ""),
        ([GPU], None, None, "placed on its GPU's node", ""),
        ([GPU], 0, None, "placed on its GPU's node", "nearer drive"),
        ([GPU], 0, "mbind: Operation not permitted", "mbind: Operation not permitted", "--preferred=1"),
        ([], 0, None, "nothing is placed", ""),
        ([replace(GPU, node=None)], 0, "denied", "nothing is placed", ""),
    ],
)
def test_what_is_on_which_node(gpus: list[Gpu], node: int | None, refused: str | None, means: str, change: str) -> None:
    (finding,) = about_nodes((0, 1), gpus, [replace(DRIVE, node=node)], refused)
    assert finding.found.startswith("memory on 0, 1")
    assert f"swap /nvme0 on {'an unknown node' if node is None else f'node {node}'}" in finding.found
    assert ("GPU 0 (H100) on node 1" in finding.found) == (gpus == [GPU])
    assert means in finding.means
    assert change in finding.change
    assert bool(change) == bool(finding.change)


def test_one_node_is_not_worth_a_word(tmp_path: Path) -> None:
    assert list(about_nodes((0,), [GPU], [DRIVE], None)) == []
    assert list(about_nodes((), [GPU], [DRIVE], None)) == []
    slot = "sys/devices/pci/0000:00:05.0"
    tree(tmp_path, {f"{slot}/numa_node": "1\n", f"{slot}/virtio0/block/vda/size": "1"})
    blocks = tmp_path / "sys/dev/block"
    blocks.mkdir(parents=True)
    (blocks / _device(tmp_path)).symlink_to(tmp_path / slot / "virtio0/block/vda")
    assert drive_node(tmp_path, tmp_path) == 1


def test_the_report_covers_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["doctor", "--json", "--swap-dir", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in report["findings"]]
    for name in ("Python", "torch", "CPU", "instruction sets", "memory", "open files", "GPU", f"swap {tmp_path}"):
        assert name in names
    assert report["open_files"] is None or report["open_files"] > 0
    assert report["cpu_model"] is None or re.search(r"\w", report["cpu_model"])


@pytest.mark.parametrize("name", ["run[a]", "run[/a]", "run:cat:"])
def test_a_directory_is_shown_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(doctor, "find_cpu", lambda: (None, None))
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / name).mkdir(parents=True)
    main.run(["doctor", "--swap-dir", str(tmp_path / name)])
    assert f"swap {tmp_path / name} " in capsys.readouterr().out


def test_no_command_prints_otherwise() -> None:
    found = [path.name for path in Path(main.__file__).parent.glob("*.py") if "Console(" in path.read_text()]
    assert found == ["terminal.py"]


def test_too_few_open_files_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_cpu", lambda: (None, None))
    monkeypatch.setattr(doctor, "soft_limit", lambda _: 8)
    assert any("ulimit -n" in problem for problem in doctor.examine([tmp_path]).problems)


def test_a_processor_that_cannot_be_asked_about_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """py-cpuinfo starts an interpreter of its own."""
    monkeypatch.setattr(sys, "executable", str(tmp_path))
    assert doctor.find_cpu() == (None, None)


def test_a_directory_that_takes_no_file_is_a_problem_and_the_rest_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(drives.tempfile, "mkstemp", refuses)
    assert main.run(["doctor", "--swap-dir", str(tmp_path), "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert f"{tmp_path} takes no new file: Read-only file system" in found["problems"]
    assert err == f"tiermem: {'; '.join(found['problems'])}\n"
    assert found["swap_dirs"][0]["refusal"] == "Read-only file system"
    (finding,) = (each for each in found["findings"] if each["name"] == f"swap {tmp_path}")
    assert "nothing can be swapped there" in finding["means"]


@pytest.mark.parametrize("call", ["file_system", "tempfile.mkstemp"])
def test_a_drive_that_does_not_answer_is_a_problem_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    """Whether it is asked what it is, or for a file: a server that is gone keeps whoever looks at the directory."""
    answered = threading.Event()

    def silent(*_: object, **__: object) -> None:
        answered.wait(60)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(f"tiermem.cli.drives.{call}", silent)
    monkeypatch.setattr(drives, "_PATIENCE", 0.1)
    report = examine_drive(tmp_path)
    answered.set()
    assert (report.direct_io, report.refusal) == (
        None,
        "its drive has not answered for 0.1 seconds; see the kernel log",
    )


def test_a_mount_whose_server_has_ended_is_a_problem_and_the_rest_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.stat

    def gone(path: Any, **options: Any) -> os.stat_result:
        if path == tmp_path:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", gone)
    assert main.run(["doctor", "--swap-dir", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == [f"{tmp_path} takes no new file: Transport endpoint is not connected"]


def test_a_full_disk_is_not_said_to_refuse_direct_io(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    report = examine_drive(tmp_path)
    assert (report.direct_io, report.refusal) == (None, None)
    assert list(tmp_path.iterdir()) == []
