"""Several drives: pages are striped over them in proportion to what they give, and each is reported."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles_commit import Net, Training, make_config, undisturbed

import swap
import tiermem
from swap import probe


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another device than `tmp_path`."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no file system in memory here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        if os.stat(name).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("there is one file system only")
        yield Path(name)


@pytest.mark.filterwarnings("ignore::swap.DirectIOWarning")
def test_two_drives_share_in_proportion_and_are_reported_one_by_one(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = probe.measure

    def measure(directory: Path, **settings: Any) -> probe.Bandwidth:
        # Beside other work a disk had a fifteenth of all, or half: with less than a page of what there is, nothing.
        rate = 3e9 if directory == elsewhere else 1e9
        return probe.Bandwidth(rate, rate, real(directory, **settings).device)

    monkeypatch.setattr(probe, "measure", measure)
    (tmp_path / "here").mkdir()
    directories = [str(tmp_path / "here"), str(elsewhere)]
    losses, _ = undisturbed(tmp_path / "plain", 4)
    training = Training(make_config(tmp_path, swap_dirs=directories))
    assert [training.step() for _ in range(2)] == losses[:2]
    training.commit().wait()
    statistics = training.runtime.statistics()
    assert [drive.directories for drive in statistics.drives] == [(name,) for name in directories]
    shares = [drive.share for drive in statistics.drives]
    assert shares == pytest.approx([0.25, 0.75]), "measured, not assumed to be equal"
    tier = statistics.tiers[0]
    assert sum(drive.reserved for drive in statistics.drives) == tier.reserved
    assert sum(drive.budget for drive in statistics.drives) == tier.budget
    assert sum(drive.bytes_written for drive in statistics.drives) >= statistics.total.bytes_written > 0
    assert all(drive.busy_seconds > 0 and drive.bytes_per_second > 0 for drive in statistics.drives)
    for name in directories:
        assert name in statistics.table()
    training.close()
    training = Training(make_config(tmp_path, swap_dirs=directories), resume=True)
    assert [training.step() for _ in range(2)] == losses[2:]
    training.close()


def test_directories_on_one_drive_are_reported_as_one(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a", "b")]
    for name in names:
        os.mkdir(name)
    training = Training(make_config(tmp_path, swap_dirs=names))
    training.step()
    (drive,) = training.runtime.statistics().drives
    assert drive.directories == tuple(names)
    assert drive.share == pytest.approx(1)
    training.close()


def test_a_drive_without_direct_io_is_used_unless_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = swap.SystemCalls.open

    def without(calls: swap.SystemCalls, path: str, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(calls, path, flags, mode)

    monkeypatch.setattr(swap.SystemCalls, "open", without)
    with pytest.warns(swap.DirectIOWarning):
        Training(make_config(tmp_path)).close()
    with pytest.warns(swap.DirectIOWarning), pytest.raises(tiermem.ConfigError, match="direct=True, but a swap"):
        Training(make_config(tmp_path, direct=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error::swap.DirectIOWarning")
def test_who_wants_no_direct_io_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = swap.SystemCalls.open, []

    def noting(calls: swap.SystemCalls, path: str, flags: int, mode: int = 0o600) -> int:
        asked.append(bool(flags & os.O_DIRECT))
        return real(calls, path, flags, mode)

    monkeypatch.setattr(swap.SystemCalls, "open", noting)
    training = Training(make_config(tmp_path, direct=False))
    training.step()
    assert training.runtime.statistics().total.bytes_written > 0
    training.close()
    assert asked
    assert not any(asked)


def test_direct_io_is_not_to_be_had_of_aiofiles(tmp_path: Path) -> None:
    with pytest.raises(tiermem.ConfigError, match="direct=True, but io_backend"):
        Training(make_config(tmp_path, direct=True, io_backend="aiofiles"))
    assert list(tmp_path.iterdir()) == []


def test_a_commit_for_whose_successor_there_is_no_room_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(make_config(tmp_path))
    training.step()
    training.commit().wait()
    training.close()
    monkeypatch.setattr(swap.SystemCalls, "free_bytes", lambda *_: 0)
    with pytest.raises(swap.SwapFullError, match=r"swap files need \d+ bytes, .*commits=False"):
        Training(make_config(tmp_path, overwrite=True), model=lambda: Net(layers=4))
    Training(make_config(tmp_path), resume=True).close()


def test_a_drive_that_does_not_say_what_is_free_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(swap.SystemCalls, "free_bytes", silent)
    training = Training(make_config(tmp_path))
    training.step()
    training.close()
