"""Nothing that was committed is lost: faults of the drive, damaged files, kills, and runs that do not fit."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import number_of
from doubles_commit import Net, Training, check_equal, make_config, undisturbed
from doubles_python import WarmPython
from torch import nn

import swap
import tiermem
from swap.syscalls import SystemCalls
from tiermem.runtime import storage

ROOT = Path(__file__).resolve().parents[2]


def committed(directory: Path, steps: int = 2, **settings: Any) -> Path:
    """A directory with a run that committed and was closed."""
    directory.mkdir(exist_ok=True)
    training = Training(make_config(directory, **settings))
    for _ in range(steps):
        training.step()
        training.commit().wait()
    training.close()
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.suffix != ".lock"}


def manifest_in(directory: Path) -> Path:
    (found,) = directory.glob("*.manifest")
    return found


# What is refused


def test_a_committed_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    directory = committed(tmp_path / "run")
    before = contents(directory)
    with pytest.raises(tiermem.ResumeError, match=r"committed run \(step 2, .*resume='auto'.*overwrite=True"):
        Training(make_config(directory))
    assert contents(directory) == before
    training = Training(make_config(directory, overwrite=True))
    assert training.done == 0
    assert training.runtime.committed is None
    training.close()
    assert list(directory.iterdir()) == [], "nothing was committed, so nothing is kept"


@pytest.mark.parametrize("resume", [False, "auto", True])
def test_directories_in_another_order_do_not_replace_a_committed_run(tmp_path: Path, resume: bool | str) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    training = Training(make_config(tmp_path, swap_dirs=[first, second]))
    training.step()
    training.commit().wait()
    training.close()
    before = contents(first), contents(second)
    with pytest.raises(tiermem.ResumeError, match=r"a holds a committed run, expected it to be the first .*found .*b:"):
        Training(make_config(tmp_path, swap_dirs=[second, first]), resume=resume)
    if resume:
        with pytest.raises(
            tiermem.ResumeError, match=r"b is 2 of 2 of its run, expected 1 of 1: give all.*overwrite=True"
        ):
            Training(make_config(tmp_path, swap_dirs=[second]), resume=resume)
    else:
        other = tmp_path / "c"
        other.mkdir()
        for given in ([second], [other, second]):
            with pytest.raises(tiermem.ResumeError, match=r"b holds swap file 2 of 2 of another run, .*overwrite=True"):
                Training(make_config(tmp_path, swap_dirs=given))
    assert (contents(first), contents(second)) == before
    training = Training(make_config(tmp_path, swap_dirs=[second, first], overwrite=True))
    training.step()
    training.runtime.close(remove=False)
    # What is left of the commit is no longer one, and refuses nothing.
    Training(make_config(tmp_path, swap_dirs=[second, first]), resume="auto").close()


def test_resume_true_insists_and_auto_does_not(tmp_path: Path) -> None:
    with pytest.raises(tiermem.ResumeError, match="holds no commit"):
        Training(make_config(tmp_path), resume=True)
    training = Training(make_config(tmp_path), resume="auto")
    assert training.done == 0
    training.close()


@pytest.mark.parametrize("word", ["yes", "snapshot/path", 3])
def test_an_unknown_word_for_resume(tmp_path: Path, word: Any) -> None:
    with pytest.raises(tiermem.ConfigError, match="resume="):
        Training(make_config(tmp_path), resume=word)


@pytest.mark.parametrize("resume", [False, "auto", True])
def test_two_runs_in_one_directory(tmp_path: Path, resume: bool | str) -> None:
    training = Training(make_config(tmp_path))
    training.step()
    training.commit().wait()
    with pytest.raises(swap.SwapInUseError, match="a runtime of this process is using"):
        Training(make_config(tmp_path, overwrite=True), resume=resume)
    training.step()
    training.close()


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (lambda: Net(width=64), {}, r"parameter inner.weight was \[96, 8\], is \[64, 8\]"),
        (lambda: Net(layers=3), {}, r"parameter layers\.\S+ was (not there, is \[|\[\d.*\], is not there)"),
        (Net, {"param_dtype": "bfloat16"}, "param_dtype was float32, is bfloat16"),
        (lambda: nn.Linear(4, 4), {}, r"parameter \S+ was \[\d.*\], is not there"),
        # Its tiles would not fit into this budget.
        (lambda: Net(width=2000), {}, r"parameter inner.weight was \[96, 8\], is \[2000, 8\]"),
    ],
)
def test_another_model_is_named_by_its_first_difference(
    tmp_path: Path, model: Any, settings: dict[str, Any], message: str
) -> None:
    directory = committed(tmp_path / "run")
    before = contents(directory)
    with pytest.raises(tiermem.ResumeError, match=message):
        Training(make_config(directory, **settings), resume="auto", model=model)
    assert contents(directory) == before


def test_a_frozen_parameter_is_another_model(tmp_path: Path) -> None:
    directory = committed(tmp_path / "run")

    def other() -> Net:
        model = Net()
        model.outer.requires_grad_(False)
        return model

    with pytest.raises(tiermem.ResumeError, match=r"requires_grad of parameter outer\.weight"):
        Training(make_config(directory), resume=True, model=other)


def test_another_budget_takes_the_committed_tiles(tmp_path: Path) -> None:
    losses, state = undisturbed(tmp_path / "plain", 4)
    directory = committed(tmp_path / "run", host_memory="160KiB")
    training = Training(make_config(directory, host_memory="8MiB", tile_size="1MiB"), resume=True)
    assert [training.step(), training.step()] == losses[2:]
    check_equal(training.state(), state)
    training.close()


def test_tiles_that_do_not_fit_any_more_are_refused_with_the_least_that_works(tmp_path: Path) -> None:
    losses, _ = undisturbed(tmp_path / "plain", 3)
    directory = committed(tmp_path / "run", host_memory="8MiB")
    with pytest.raises(tiermem.ResumeError, match="tiles of 8192 elements, which do not fit: host_memory is") as caught:
        Training(make_config(directory, host_memory="100KiB"), resume=True)
    least = int(str(caught.value).split("expected at least ")[1].split(";")[0])
    with pytest.raises(tiermem.ResumeError, match=f"expected at least {least}"):
        Training(make_config(directory, host_memory=least - 1), resume=True)
    training = Training(make_config(directory, host_memory=least), resume=True)
    assert training.step() == losses[2]
    training.close()


def test_without_room_for_commits(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path, commits=False))
    small = training.runtime.statistics().tiers[0].budget
    training.step()
    with pytest.raises(tiermem.ConfigError, match="commits=False"):
        training.commit()
    training.close()
    training = Training(make_config(tmp_path))
    assert 1.6 * small < training.runtime.statistics().tiers[0].budget < 2 * small
    training.close()


# When a commit may be asked for, and what it takes


def test_a_commit_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    import torch

    for update in ("step", "backward"):
        training = Training(make_config(tmp_path, update=update))
        training.model(torch.randn(5, 8)).sum().backward()
        with pytest.raises(tiermem.TiermemError, match="between backward and step"):
            training.commit()
        training.optimizer.step()
        training.commit().wait()
        training.runtime.close(remove=True)
        assert list(tmp_path.iterdir()) == []


def test_a_commit_inside_gathered_is_refused(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    with training.runtime.gathered(training.model.outer, write=True):
        with pytest.raises(tiermem.TiermemError, match="inside gathered"):
            training.commit()
    with training.runtime.gathered(training.model.outer):
        training.commit().wait()
    training.close()


def test_what_is_written_by_hand_is_committed(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    training.step()
    training.commit()
    for layer in (training.model.outer, training.model.frozen):
        with training.runtime.gathered(layer, write=True):
            layer.weight.data.fill_(0.5)
    training.commit()
    state = training.state()
    training.close()
    training = Training(make_config(tmp_path), resume=True)
    assert (training.runtime.parameter(training.model.frozen.weight) == 0.5).all()
    check_equal(training.state(), state)
    training.close()


@pytest.mark.parametrize("extra", [{"a": object()}, {(1, 2): "a"}, [{"b": {2}}], {"c": torch.zeros(5 << 20)}])
def test_an_extra_that_cannot_be_kept(tmp_path: Path, extra: Any) -> None:
    training = Training(make_config(tmp_path))
    with pytest.raises(tiermem.ConfigError, match="extra"):
        training.runtime.commit(extra)
    with pytest.raises(
        tiermem.ConfigError, match=r"extra\['o'\]: expected .*tensors, arrays of numbers or bytes, found object"
    ):
        training.runtime.commit({"o": object()})
    kept = {"list": [1, 2.5, None, "ü"], "tuple": (1,), "nan": float("inf")}
    training.runtime.commit(kept).wait()
    assert training.runtime.committed == kept
    training.runtime.commit().wait()
    assert training.runtime.committed == {}
    training.close()


def test_files_of_a_commit_are_kept_unless_asked_otherwise(tmp_path: Path) -> None:
    directory = committed(tmp_path / "run")
    assert manifest_in(directory)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in directory.iterdir())
    training = Training(make_config(directory), resume=True)
    training.close()
    assert manifest_in(directory), "resumed, and nothing new committed: still there"
    training = Training(make_config(directory), resume=True)
    training.runtime.close(remove=True)
    assert list(directory.iterdir()) == []


# Damage


@pytest.mark.parametrize("verify", ["resume", "always"])
def test_a_flipped_bit_is_found_when_resuming(tmp_path: Path, verify: str) -> None:
    directory = committed(tmp_path / "run")
    manifest = swap.CommitStore([directory], name="tiermem").read_latest()
    assert manifest is not None
    entry = next(entry for entry in manifest.entries if entry.key.startswith("state/"))
    with (directory / "tiermem.swapfile").open("r+b") as file:
        file.seek(entry.extent.pieces[0].offset + 17)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(swap.ChecksumError, match=f"offset {entry.extent.pieces[0].offset}"):
        Training(make_config(directory, verify=verify), resume=True)
    training = Training(make_config(directory, verify="never"), resume=True)  # on one's own responsibility
    training.close()


def test_every_read_is_compared_when_asked(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path, verify="always", host_memory="160KiB"))
    for _ in range(2):
        training.step()
        training.commit()
    training.runtime.settle()
    training.close()


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    directory = committed(tmp_path / "run")
    path = manifest_in(directory)
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    before = contents(directory)
    for settings, resume in (({}, True), ({}, "auto"), ({}, False), ({"overwrite": True}, False)):
        with pytest.raises(swap.FormatError, match="damaged"):
            Training(make_config(directory, **settings), resume=resume)
    assert contents(directory) == before


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "no swap file, or an empty one, in"),
        ("empty", "no swap file, or an empty one, in"),
        ("truncated", "has been truncated"),
        ("foreign", "found something else"),
        ("other run", "are of another run"),
    ],
)
def test_swap_files_that_do_not_fit_the_commit(tmp_path: Path, how: str, said: str) -> None:
    directory = committed(tmp_path / "run")
    file = directory / "tiermem.swapfile"
    if how == "missing":
        file.unlink()
    elif how == "empty":
        os.truncate(file, 0)
    elif how == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "foreign":
        file.write_bytes(b"something else" * 1000)
    else:
        manifest = manifest_in(directory).read_bytes()
        name = manifest_in(directory).name
        manifest_in(directory).unlink()
        training = Training(make_config(directory))
        training.runtime.close(remove=False)
        (directory / name).write_bytes(manifest)
    before = contents(directory)
    with pytest.raises((tiermem.ResumeError, swap.FormatError), match=said):
        Training(make_config(directory), resume="auto")
    assert contents(directory) == before


# Faults of the drive


class Faults:
    """Makes system calls fail by name, for the calls that the number says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: dict[str, int] = {}
        for name in ("fdatasync", "fsync", "rename", "unlink", "pwritev"):
            real = getattr(SystemCalls, name)

            def call(calls: SystemCalls, *arguments: Any, name: str = name, real: Any = real) -> Any:
                code = self.codes.get(name)
                if code is not None:
                    raise OSError(code, os.strerror(code))
                return real(calls, *arguments)

            monkeypatch.setattr(SystemCalls, name, call)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def test_a_full_disk_in_a_commit_leaves_the_one_before(tmp_path: Path, faults: Faults) -> None:
    losses, state = undisturbed(tmp_path / "plain", 7)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run"))
    found = [training.step()]
    training.commit().wait()
    for _ in range(2):  # the second is to show that a failed commit costs no room
        found.append(training.step())
        faults.codes["fsync"] = errno.ENOSPC
        pending = training.commit()
        with pytest.raises(swap.SwapFullError, match="the commit before holds"):
            pending.wait()
        faults.codes.clear()
        assert training.runtime.committed["step"] == 1
    found += [training.step(), training.step()]
    faults.codes["fsync"] = errno.ENOSPC
    training.commit()
    found.append(training.step())
    with pytest.raises(swap.SwapFullError):  # nobody waited for the one before, so this one says it
        training.commit()
    faults.codes.clear()
    training.commit().wait()
    found.append(training.step())
    training.commit()
    check_equal(training.state(), state)
    assert found == losses
    training.close()


@pytest.mark.parametrize("call", ["fdatasync", "rename", "unlink"])
def test_a_drive_that_fails_in_a_commit_does_not_cost_the_one_before(tmp_path: Path, faults: Faults, call: str) -> None:
    losses, _ = undisturbed(tmp_path / "plain", 4)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run"))
    training.step()
    training.commit().wait()
    training.step()
    faults.codes[call] = errno.EIO
    training.commit()
    if call == "fdatasync":
        assert training.step() == losses[2]  # training goes on, if without commits
        training.runtime.settle()
    with pytest.raises(swap.SwapError):
        training.close()
    faults.codes.clear()
    training = Training(make_config(tmp_path / "run"), resume=True)
    assert training.done in (1, 2)
    assert training.step() == losses[training.done - 1]
    training.close()


def test_an_error_of_a_page_fails_the_commit_and_nothing_hangs(tmp_path: Path, faults: Faults) -> None:
    training = Training(make_config(tmp_path))
    training.step()
    training.commit().wait()
    training.step()
    faults.codes["pwritev"] = errno.EIO
    pending = training.commit()
    with pytest.raises(swap.SwapIOError, match="write"):
        pending.wait()
    faults.codes.clear()
    training.runtime.close()
    training = Training(make_config(tmp_path), resume=True)
    assert training.done == 1
    training.close()


@pytest.mark.parametrize("what", ["commit", "snapshot"])
def test_where_no_thread_can_be_started_nothing_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    losses, state = undisturbed(tmp_path / "plain", 3)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run"))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == f"tiermem-{what}":
            raise RuntimeError("can't start new thread")
        start(thread)

    def write(name: str) -> Any:
        return training.commit() if what == "commit" else training.runtime.snapshot(tmp_path / name)

    training.step()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(tiermem.TiermemError, match=f"no thread can be started for tiermem-{what}"):
            write("first").wait()
    assert not (tmp_path / "first").exists()
    assert training.step() == losses[1]
    write("second").wait()
    assert training.step() == losses[2]
    check_equal(training.state(), state)
    training.close()


def test_when_somebody_removes_the_swap_file_a_commit_says_so_and_a_snapshot_saves_the_run(tmp_path: Path) -> None:
    losses, state = undisturbed(tmp_path / "plain", 4)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run"))
    training.step()
    training.commit().wait()
    (swap_file,) = (tmp_path / "run").glob("*.swapfile")
    swap_file.unlink()
    training.step()
    with pytest.raises(swap.SwapIOError, match="somebody has removed this file"):
        training.commit().wait()
    assert training.runtime.committed["step"] == 1
    assert training.step() == losses[2]
    extra = {"step": training.done, "scheduler": training.scheduler.state_dict()}
    training.runtime.snapshot(tmp_path / "elsewhere", extra=extra)
    training.close()
    (tmp_path / "next").mkdir()
    training = Training(make_config(tmp_path / "next"), resume=str(tmp_path / "elsewhere"))
    assert training.step() == losses[3]
    check_equal(training.state(), state)
    training.close()


def test_a_full_disk_is_found_before_anything_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = committed(tmp_path / "run")
    before = contents(directory)
    real = os.statvfs

    class Full:
        f_bavail, f_frsize, f_blocks = 3, 4096, 1000

    monkeypatch.setattr(os, "statvfs", lambda path: Full() if Path(path) == directory else real(path))
    with pytest.raises(swap.SwapFullError, match="free"):
        Training(make_config(directory, overwrite=True, host_memory="4MiB"), model=lambda: Net(width=320))
    assert contents(directory) == before


# Kills


@pytest.mark.long
def test_a_killed_run_is_resumed_bit_for_bit(warm_python: WarmPython, tmp_path: Path) -> None:
    program = str(ROOT / "tools" / "kill_training.py")
    kills = number_of(4, 6)
    done = warm_python.run(program, str(tmp_path), "--kills", str(kills), "--steps", str(3 * kills))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills" in done.stdout
    assert "nothing lost" in done.stdout


def test_what_fails_before_a_run_is_replaced_leaves_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(make_config(tmp_path))
    training.step()
    training.commit().wait()
    training.close()

    def no_room(*_: object) -> None:
        raise swap.SwapFullError("no room for a look at the drives")

    with monkeypatch.context() as patch:
        patch.setattr("tiermem.runtime.storage._weigh", no_room)
        with pytest.raises(swap.SwapFullError, match="no room for a look"):
            Training(make_config(tmp_path, overwrite=True))

    def over_quota(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    class Denied:
        def __init__(self, *_: object, **__: object) -> None:
            raise tiermem.CapacityError("the system denied it")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "HostArena", Denied)
        with pytest.raises(tiermem.CapacityError, match="denied"):
            Training(make_config(tmp_path, overwrite=True))

    with monkeypatch.context() as patch:
        patch.setattr(swap.SystemCalls, "fallocate", over_quota)
        with pytest.raises(swap.SwapFullError, match="quota"):
            Training(make_config(tmp_path, overwrite=True))

    start = threading.Thread.start

    def no_pager(thread: threading.Thread) -> None:
        if thread.name == "tiermem-pager":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_pager)
        with pytest.raises(tiermem.TiermemError, match="can't start new thread"):
            Training(make_config(tmp_path, overwrite=True))
    Training(make_config(tmp_path), resume=True).close()


def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT."""
    real = SystemCalls.open

    def refuse(calls: SystemCalls, path: str, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(calls, path, flags, mode)

    monkeypatch.setattr(SystemCalls, "open", refuse)


@pytest.mark.filterwarnings("ignore::swap.DirectIOWarning")
def test_where_direct_io_is_insisted_on_and_refused_the_commit_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(committed(tmp_path))
    with monkeypatch.context() as patch:
        buffered(patch)
        with pytest.raises(tiermem.ConfigError, match="direct=True, but a swap directory refuses"):
            Training(make_config(tmp_path, overwrite=True, direct=True))
    assert contents(tmp_path) == before


@pytest.mark.filterwarnings("error::swap.DirectIOWarning")
def test_where_a_warning_is_an_error_the_commit_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(committed(tmp_path))
    with monkeypatch.context() as patch:
        buffered(patch)
        with pytest.raises(swap.DirectIOWarning):
            Training(make_config(tmp_path, overwrite=True))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("call", ["open", "preadv", "pwritev", "fsync", "fallocate", "lock", "ask", "truncate"])
def test_whichever_call_fails_before_a_new_run_begins_the_commit_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """In either of two directories, whose files are to become shorter."""
    names = [str(tmp_path / name) for name in "ab"]
    for name in names:
        Path(name).mkdir()
    settings = {"swap_dirs": names, "io_backend": "inline"}  # what the engine calls is no part of beginning
    training = Training(make_config(tmp_path, **settings), model=lambda: Net(width=160))
    training.step()
    training.commit().wait()
    training.close()
    before = [contents(Path(name)) for name in names]
    real, count, fails = getattr(SystemCalls, call), [0], [-1]

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] - 1 == fails[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    calls_before = []

    def noted(space: swap.SwapSpace) -> None:
        calls_before.append(count[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SystemCalls, call, counted)
        patch.setattr(swap.SwapSpace, "begin", noted)
        with pytest.raises(KeyboardInterrupt):
            Training(make_config(tmp_path, overwrite=True, **settings))
    assert [contents(Path(name)) for name in names] == before
    for number in range(calls_before[0]):
        with monkeypatch.context() as patch:
            patch.setattr(SystemCalls, call, counted)
            patch.setattr(swap.SwapSpace, "begin", noted)
            count[0], fails[0] = 0, number
            with pytest.raises((OSError, KeyboardInterrupt)):
                Training(make_config(tmp_path, overwrite=True, **settings))
        assert [contents(Path(name)) for name in names] == before, number
    Training(make_config(tmp_path, **settings), resume=True, model=lambda: Net(width=160)).close()


@pytest.mark.parametrize("resume", [False, "auto"])
def test_what_another_run_has_committed_since_it_was_looked_for_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool | str
) -> None:
    """Two programs are started at once, and one of them is soon through."""
    other, directory, real = committed(tmp_path / "other"), tmp_path / "run", storage._open_space
    directory.mkdir()

    def late(*arguments: Any) -> swap.SwapSpace:
        for path in other.iterdir():
            path.rename(directory / path.name)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_open_space", late)
        with pytest.raises(tiermem.ResumeError, match=r"holds a committed run \(step 2"):
            Training(make_config(directory), resume=resume)
    training = Training(make_config(directory), resume=True)
    assert training.done == 2
    training.close()


def test_drives_without_room_for_a_look_are_taken_for_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise swap.SwapFullError("no room")

    devices = iter(range(100))
    monkeypatch.setattr(storage, "measure_weights", no_room)
    monkeypatch.setattr(storage, "file_system_of", lambda path: next(devices))
    config = make_config(tmp_path, swap_dirs=[tmp_path / "a", tmp_path / "b"])
    assert storage._weigh(config, swap.EngineSettings()) is None
