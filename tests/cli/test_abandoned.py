"""What killed runs leave is removed by the next one, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles_commit import Training, make_config
from doubles_python import WarmPython

from swap import AlignedBuffer, CommitStore, SwapSpace
from tiermem.cli.abandoned import remove_abandoned
from tiermem.cli.disk import swap_directories
from tiermem.runtime.beginning import SPACE_NAME

KILLED = """
import os, signal, sys
from pathlib import Path
from swap import SwapSpace
SwapSpace.open([Path(sys.argv[1])], name="tiermem", nbytes=1 << 20)
os.kill(os.getpid(), signal.SIGKILL)
"""


def folder(parent: Path, name: str, inner: str = "") -> Path:
    path = parent / name / inner
    path.mkdir(parents=True)
    return path


def test_what_killed_processes_left_goes(
    warm_python: WarmPython, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"tiermem-swap-a": "", "tiermem-swap-b": "rank_00001", "tiermem-swap-c": "tiermem-tune-d"}
    for name, inner in names.items():
        warm_python.run("-c", KILLED, str(folder(tmp_path, name, inner)))
        assert list((tmp_path / name / inner).glob("*.swapfile"))
    monkeypatch.chdir(tmp_path)
    with swap_directories([], keep=False) as (made,):
        left = {path.name for path in tmp_path.iterdir() if list(path.rglob("*.swapfile"))}
        assert left == set()
        assert made.exists()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [f"removed {tmp_path / name}" for name in names]
    assert not (tmp_path / "tiermem-swap-a").exists()


def test_everything_else_stays(warm_python: WarmPython, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beginning = folder(tmp_path, "tiermem-swap-beginning")
    elsewhere = folder(tmp_path, "run")  # given by its user
    warm_python.run("-c", KILLED, str(elsewhere))
    foreign = folder(tmp_path, "tiermem-swap-foreign")
    (foreign / f"{SPACE_NAME}.swapfile").write_text("not one of ours")
    (foreign / f"{SPACE_NAME}.lock").write_text("not one of ours")
    (tmp_path / "tiermem-swap-link").symlink_to(elsewhere)
    training = Training(make_config(folder(tmp_path, "tiermem-swap-committed")))
    training.step()
    training.commit().wait()
    training.close()
    living = folder(tmp_path, "tiermem-swap-living")
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    with SwapSpace.open([living], name=SPACE_NAME, nbytes=1 << 20) as space, AlignedBuffer(4096) as buffer:
        remove_abandoned(tmp_path)
        space.start_write(space.allocate(4096), buffer.view).wait(30)
        assert (living / f"{SPACE_NAME}.swapfile").exists()
        (living / f"{SPACE_NAME}.lock").unlink()  # as what clears old files would have it
        remove_abandoned(tmp_path)
        assert (living / f"{SPACE_NAME}.swapfile").exists()
        space.close(remove=True)
    assert {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == before
    assert beginning.exists()
    assert CommitStore([tmp_path / "tiermem-swap-committed"], name=SPACE_NAME).read_latest() is not None
    assert capsys.readouterr().err == ""


def test_files_of_others_in_it_keep_the_folder(warm_python: WarmPython, tmp_path: Path) -> None:
    made = folder(tmp_path, "tiermem-measure-a")
    (made / "notes.txt").write_text("mine")
    warm_python.run("-c", KILLED, str(made))
    remove_abandoned(tmp_path)
    assert [path.name for path in made.iterdir()] == ["notes.txt"]
