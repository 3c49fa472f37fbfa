"""Commit and recovery: the order of things, and every fault in between."""

import errno
import json
import os
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles import FaultySystemCalls, Short, Stall
from doubles_combinations import number_of
from doubles_silence import only_what_is_held_is_silent

import swap
from swap import (
    AlignedBuffer,
    ChecksumError,
    EngineSettings,
    FormatError,
    SwapError,
    SwapFullError,
    SwapInUseError,
    SwapIOError,
    SwapSpace,
    SwapTimeoutError,
)
from swap.commit import CommitStore
from swap.generations import Generations, Mark
from swap.patience import PatientSystemCalls
from swap.recovery import find_leftovers, find_prepared, recover, verify

MIB = 1 << 20


class Run:
    """A small run: a few keys, commits on demand."""

    def __init__(self, directory: Path, *, keep: bool = False, system: Any = None) -> None:
        self.system = system or FaultySystemCalls()
        self.space = SwapSpace.open([directory], name="r0", nbytes=MIB, keep=keep, system=self.system)
        self.store = CommitStore([directory], name="r0", system=self.system)
        self.generations = Generations(self.space)
        self.mark: Mark | None = None

    def write(self, key: str, value: bytes, nbytes: int = 8192) -> None:
        extent = self.generations.extent_for_write(key, nbytes)
        with AlignedBuffer(nbytes) as buffer:
            buffer.view[:] = value * nbytes
            request = self.space.start_write(extent, buffer.view, checksum=True)
            request.wait(30)
        self.generations.written(key, extent, request.checksum)

    def commit(self, generation: int, user: dict[str, Any] | None = None) -> None:
        mark = self.generations.mark()
        self.store.write(generation, mark.entries(), user or {}, space=self.space)
        if self.mark is not None:
            self.generations.release(self.mark)
        self.mark = mark

    def two_commits(self) -> None:
        for generation in range(2):
            for key in "abc":
                self.write(key, b"%d" % generation)
            self.commit(generation, {"step": generation})


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def manifest_path(directory: Path, generation: int) -> Path:
    return directory / f"r0.{generation:020d}.manifest"


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_look_beside_a_run_that_commits_finds_a_commit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.commit(0)

    class Late(swap.SystemCalls):
        """The run commits once more between the look at the directory and that into the manifest."""

        commits = 3

        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if path.endswith(".manifest") and self.commits:
                self.commits -= 1
                run.commit(3 - self.commits)
            return super().open(path, flags, mode)

    found = find_leftovers([tmp_path], name="r0", system=Late())
    assert found.in_use
    assert found.manifest is not None
    assert found.manifest.generation == 3
    (tmp_path / f"r0.{3:020d}.manifest").unlink()
    assert find_leftovers([tmp_path], name="r0").manifest is None
    run.space.close()


def test_a_commit_is_found_again_with_all_it_holds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    user = {"step": 7, "loss": float("inf"), "text": "ümlaut\ud800", "nested": [1, None, {"x": 0.1}]}
    run.write("weird \n key \u2028", b"w")
    run.commit(7, user)
    run.space.close()
    assert stat.S_IMODE(os.stat(manifest_path(tmp_path, 7)).st_mode) == 0o600
    run = Run(tmp_path, keep=True)
    found = recover(run.space, run.store)
    assert found is not None
    assert found.manifest.user == user
    assert (found.manifest.generation, found.manifest.run_id) == (7, run.space.run_id)
    assert found.manifest.file_sizes == (MIB,)
    (entry,) = found.manifest.entries
    assert (entry.key, entry.nbytes) == ("weird \n key \u2028", 8192)
    assert found.generations.current(entry.key).checksum == entry.checksum
    run.space.close()


def test_the_steps_of_a_commit_are_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    order: list[str] = []
    for call in ("fdatasync", "fsync", "rename", "unlink"):
        real = getattr(run.system, call)

        def note(*arguments: Any, call: str = call, real: Any = real) -> None:
            target = arguments[-1]
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
            order.append(f"{call} {Path(path).name.replace('0' * 19, '')}")
            real(*arguments)

        setattr(run.system, call, note)
    run.commit(2)
    assert order == [
        "fdatasync r0.swapfile",
        "fsync r0.manifest.new",
        "rename r0.2.manifest",
        f"fsync {tmp_path.name}",
        "unlink r0.1.manifest",
        f"fsync {tmp_path.name}",
    ]
    run.space.close()


def test_what_is_not_gone_on_from_is_durably_gone_before_its_bytes_may_be_overwritten(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.system.inject("unlink", errno.EIO)
    with pytest.raises(SwapIOError):
        run.commit(2)  # both are there
    run.space.close()
    run = Run(tmp_path, keep=True)
    order: list[str] = []
    for call in ("fsync", "unlink"):
        real = getattr(run.system, call)
        setattr(run.system, call, lambda target, call=call, real=real: (order.append(call), real(target)))
    found = recover(run.space, run.store, generation=1)
    assert found is not None
    assert order == ["unlink", "fsync"]
    assert run.store._system in run.space.company, "the files stay locked until a call that was given up has ended"
    run.space.close()


def test_what_was_prepared_is_found_until_it_is_published(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert find_prepared([tmp_path], name="r0") is None
    run.store.prepare(3, [], {"step": 7}, space=run.space)
    found = find_prepared([tmp_path], name="r0")
    assert found is not None
    assert (found.generation, found.user) == (3, {"step": 7})
    assert find_leftovers([tmp_path], name="r0").manifest is None
    whole = (tmp_path / "r0.manifest.new").read_bytes()
    (tmp_path / "r0.manifest.new").write_bytes(whole[:-1])
    assert find_prepared([tmp_path], name="r0") is None
    (tmp_path / "r0.manifest.new").write_bytes(whole)
    run.store.publish()
    assert find_prepared([tmp_path], name="r0") is None
    run.space.close()


def test_what_was_prepared_is_not_waited_for_on_a_silent_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, stall = FaultySystemCalls(), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    system.inject("open", stall)
    with pytest.raises(swap.SwapIOError, match=r"r0\.manifest\.new.*ETIMEDOUT"):
        find_prepared([tmp_path], name="r0", system=system, stall_seconds=0.05)
    stall.release()


@pytest.mark.parametrize("name", ["r0.manifest.new", f"r0.{0:020d}.manifest", "r0.swapfile"])
def test_what_a_commit_looks_for_is_not_waited_for_on_a_silent_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A name is read from the drive where the system does not remember it."""
    run, held, answers = Run(tmp_path), threading.Event(), threading.Event()
    only_what_is_held_is_silent(monkeypatch, held.is_set)
    run.store = CommitStore([tmp_path], name="r0", stall_seconds=1.0)
    run.space._files[0]._system = PatientSystemCalls(None, 0.1)
    run.write("a", b"a")

    def silent(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **more: Any) -> Any:
            if path == str(tmp_path / name):
                held.set()
                answers.wait(30)
            return real(path, *arguments, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", silent(os.stat))
        patch.setattr(os, "lstat", silent(os.lstat))
        with pytest.raises(SwapIOError, match=rf"{name}.*ETIMEDOUT"):
            run.commit(0)
        answers.set()
    run.space.close()


def test_no_commit_yet_is_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.space.close()
    assert CommitStore([tmp_path], name="r0").read_latest() is None
    run = Run(tmp_path, keep=True)
    assert recover(run.space, run.store) is None
    run.space.close()


@pytest.mark.parametrize("name", ["", "r", "other"])
def test_other_ranks_and_files_are_not_looked_at(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}0.{1:020d}.manifest").write_text("poetry")
    (tmp_path / "r0.12.manifest").write_text("poetry")
    assert CommitStore([tmp_path], name="x0").read_latest() is None


def test_a_damaged_manifest_without_an_earlier_one_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.space.close()
    path = manifest_path(tmp_path, 1)
    flip(path, 100)
    before = path.read_bytes()
    with pytest.raises(FormatError, match=r"checksum.*no earlier commit to fall back to"):
        run.store.read_latest()
    with pytest.raises(FormatError, match="damaged"):
        Run(tmp_path)
    assert path.read_bytes() == before
    Run(tmp_path, keep=True).space.close()


def test_a_damaged_manifest_that_was_never_acknowledged_falls_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.write("a", b"2")
    run.system.inject("unlink", errno.EIO)
    with pytest.raises(SwapIOError, match="unlink"):
        run.commit(2)
    run.space.close()
    flip(manifest_path(tmp_path, 2), 100)
    damaged = manifest_path(tmp_path, 2).read_bytes()
    aside = manifest_path(tmp_path, 2).with_suffix(".manifest.damaged")
    aside.write_bytes(b"one put aside before")
    run = Run(tmp_path, keep=True)
    found = recover(run.space, run.store)
    assert found is not None
    assert found.manifest.user == {"step": 1}
    # The damaged one is put aside, not removed, and its number can be used again.
    assert aside.read_bytes() == b"one put aside before"
    assert aside.with_suffix(".damaged1").read_bytes() == damaged
    run.generations, run.mark = found.generations, found.mark
    run.commit(2)
    latest = run.store.read_latest()
    assert latest is not None
    assert latest.generation == 2
    run.space.close()


@pytest.mark.parametrize("content", [b"poetry", b"\0" * 500])
def test_a_foreign_manifest_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    run = Run(tmp_path)
    run.two_commits()
    path = manifest_path(tmp_path, 9)
    path.write_bytes(content)
    for use in (run.store.read_latest, CommitStore([tmp_path], name="r0").discard):
        with pytest.raises(FormatError, match="something else"):
            use()
    assert path.read_bytes() == content
    run.space.close()


def test_a_commit_replaces_nothing_that_has_come_to_where_its_manifest_is_to_be(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    path = manifest_path(tmp_path, 2)
    path.write_bytes(b"poetry")
    before = names(tmp_path)
    with pytest.raises(FormatError, match=r"expected nothing at .*left alone"):
        run.commit(2)
    assert path.read_bytes() == b"poetry"
    assert names(tmp_path) == before
    assert not run.store.in_doubt
    path.unlink()
    run.commit(2)
    run.space.close()
    found = CommitStore([tmp_path], name="r0").read_latest()
    assert found is not None
    assert found.generation == 2


def test_a_manifest_under_another_number_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    os.rename(manifest_path(tmp_path, 1), manifest_path(tmp_path, 5))
    with pytest.raises(FormatError, match="to be generation 5, found 1"):
        run.store.read_latest()
    run.space.close()


def test_links_and_directories_in_the_way_of_a_manifest(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = manifest_path(tmp_path, 3)
    path.symlink_to(victim)
    with pytest.raises(SwapIOError, match="links are not followed"):
        CommitStore([tmp_path], name="r0").read_latest()
    path.unlink()
    path.mkdir()
    with pytest.raises(FormatError, match="to be a file"):
        CommitStore([tmp_path], name="r0").read_latest()
    path.rmdir()
    (tmp_path / "r0.manifest.new").symlink_to(victim)
    run = Run(tmp_path)
    with pytest.raises(SwapIOError, match="links are not followed"):
        run.commit(0)
    run.space.close()
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("content", [b"", b"tiermem-man", b"tiermem-manifest and half of it", b"\0" * 300])
def test_what_a_killed_commit_left_is_replaced(tmp_path: Path, content: bytes) -> None:
    run = Run(tmp_path)
    (tmp_path / "r0.manifest.new").write_bytes(content)
    run.two_commits()
    assert names(tmp_path) == {"r0.lock", "r0.swapfile", manifest_path(tmp_path, 1).name}
    (tmp_path / "r0.manifest.new").write_bytes(b"poetry")
    with pytest.raises(FormatError, match="something else"):
        run.commit(2)
    assert (tmp_path / "r0.manifest.new").read_bytes() == b"poetry"
    run.space.close()


def test_a_look_for_it_that_fails_is_told_as_what_fails_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, look = Run(tmp_path), os.stat

    def fail(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(".manifest.new"):
            raise OSError(errno.EIO, "Input/output error")
        return look(path, **options)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(SwapIOError, match=r"manifest\.new"):
        run.commit(0)
    monkeypatch.undo()
    run.commit(0)
    run.space.close()


@pytest.mark.parametrize(
    ("code", "free", "said"),
    [(errno.ENOSPC, 1 << 30, "perhaps no inodes"), (errno.ENOSPC, 0, "0 bytes"), (errno.EDQUOT, 1 << 30, "quota")],
)
def test_a_full_disk_with_room_for_the_manifest_has_no_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, free: int, said: str
) -> None:
    run = Run(tmp_path)
    run.two_commits()
    monkeypatch.setattr(swap.SystemCalls, "free_bytes", lambda *_: free)
    run.system.inject("open", code)
    with pytest.raises(SwapFullError, match=said) as error:
        run.commit(2)
    assert ("inodes" in str(error.value)) == ("inodes" in said)
    run.space.close()


@pytest.mark.parametrize(
    ("call", "fault", "error"),
    [
        ("fdatasync", errno.EIO, SwapIOError),
        ("open", errno.EROFS, SwapIOError),
        ("open", errno.EMFILE, SwapIOError),
        ("pwritev", errno.EIO, SwapIOError),
        ("pwritev", errno.ENOSPC, SwapFullError),
        ("pwritev", errno.EDQUOT, SwapFullError),
        ("pwritev", Short(0), SwapIOError),
        ("fsync", errno.EIO, SwapIOError),
        ("fsync", errno.ENOSPC, SwapFullError),
        ("rename", errno.EIO, SwapIOError),
        ("unlink", errno.EIO, SwapIOError),
    ],
)
def test_a_fault_in_a_commit_leaves_the_one_before(tmp_path: Path, call: str, fault: Any, error: type) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.write("a", b"2")
    run.system.inject(call, fault)
    with pytest.raises(error):
        run.commit(2)
    latest = CommitStore([tmp_path], name="r0").read_latest()
    assert latest is not None
    assert latest.generation == (2 if call == "unlink" else 1)
    assert not (tmp_path / "r0.manifest.new").exists() or call == "rename"
    run.space.close()
    run = Run(tmp_path, keep=True)
    assert recover(run.space, run.store) is not None
    run.space.close()


@pytest.mark.parametrize("call", ["fdatasync", "rename", "unlink"])
def test_after_a_fault_that_leaves_the_disk_in_doubt_no_commit_succeeds(tmp_path: Path, call: str) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.system.inject(call, errno.EIO)
    with pytest.raises(SwapIOError):
        run.commit(2)
    with pytest.raises(SwapError, match="EIO"):
        run.commit(3)
    run.space.close()


class Reports(FaultySystemCalls):
    """Does what it is asked to, and once reports an error all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: str | None = None

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self._report("rename")

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._report("unlink")

    def _report(self, call: str) -> None:
        if self.wrong == call:
            self.wrong = None
            raise OSError(errno.EIO, "EIO")


@pytest.mark.parametrize("happened", [False, True])
@pytest.mark.parametrize("call", ["rename", "unlink"])
def test_a_look_at_the_directory_ends_the_doubt(tmp_path: Path, call: str, happened: bool) -> None:
    run = Run(tmp_path, system=Reports())
    run.two_commits()
    run.write("a", b"2")
    before, mark = run.mark, run.generations.mark()
    if happened:
        run.system.wrong = call
    else:
        run.system.inject(call, errno.EIO)
    with pytest.raises(SwapIOError):
        run.store.write(2, mark.entries(), {}, space=run.space)
    assert run.store.in_doubt
    found = run.store.resolve()
    assert not run.store.in_doubt
    new = happened or call == "unlink"
    assert (found.generation if found else None) == (2 if new else None)
    assert before is not None
    run.generations.release(before if new else mark)
    run.mark = mark if new else before
    latest = CommitStore([tmp_path], name="r0").read_latest()
    assert latest is not None
    assert latest.generation == (2 if new else 1)
    assert names(tmp_path) == {"r0.lock", "r0.swapfile", manifest_path(tmp_path, latest.generation).name}
    run.write("a", b"3")
    run.commit(3)
    run.space.close()
    run = Run(tmp_path, keep=True)
    recovered = recover(run.space, run.store)
    assert recovered is not None
    assert recovered.manifest.generation == 3
    run.space.close()


def test_a_manifest_that_somebody_has_removed_does_not_hinder_the_next_commit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    manifest_path(tmp_path, 1).unlink()
    run.commit(2)
    assert names(tmp_path) == {"r0.lock", "r0.swapfile", manifest_path(tmp_path, 2).name}
    run.space.close()


def test_a_doubt_after_a_failed_sync_cannot_be_ended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ValueError, match="no doubt"):
        run.store.resolve()
    run.two_commits()
    run.system.inject("fsync", None, errno.EIO)  # the manifest's, then that of its name
    with pytest.raises(SwapIOError):
        run.commit(2)
    for _ in range(2):
        with pytest.raises(SwapError, match=r"not known which commit holds.*EIO"):
            run.store.resolve()
    with pytest.raises(SwapError, match="EIO"):
        run.commit(3)
    run.space.close()


def test_a_drive_that_fails_again_leaves_the_doubt_until_it_answers(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    mark = run.generations.mark()
    run.system.inject("unlink", errno.EIO, errno.EIO)
    with pytest.raises(SwapIOError):
        run.store.write(2, mark.entries(), {}, space=run.space)
    with pytest.raises(SwapIOError, match="unlink"):
        run.store.resolve()
    found = run.store.resolve()
    assert found is not None
    assert found.generation == 2
    run.space.close()


def test_a_rename_that_was_given_up_keeps_others_out_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stall = Run(tmp_path), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    run.store = CommitStore([tmp_path], name="r0", system=run.system, stall_seconds=1.0)
    run.two_commits()
    run.system.inject("rename", stall)
    with pytest.raises(SwapIOError, match="ETIMEDOUT"):
        run.commit(2)
    with pytest.raises(SwapError, match="1 calls are not answered yet"):
        run.store.resolve()
    run.space.close()
    assert find_leftovers([tmp_path], name="r0").in_use
    with pytest.raises(SwapInUseError):
        Run(tmp_path, keep=True)
    stall.release()
    run = when_free(tmp_path)
    recovered = recover(run.space, run.store)
    assert recovered is not None
    assert recovered.manifest.generation == 2
    run.space.close()


def test_a_write_that_was_given_up_keeps_others_out_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall, system = Stall(), FaultySystemCalls()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    settings = EngineSettings(stall_seconds=1.0)
    space = SwapSpace.open([tmp_path], name="r0", nbytes=MIB, system=system, settings=settings)
    extent, buffer = space.allocate(4096), AlignedBuffer(4096)
    system.inject("pwritev", stall)
    space.start_write(extent, buffer.view)
    assert stall.entered.wait(60)
    with pytest.raises(SwapTimeoutError):
        space.close()
    with pytest.raises(SwapInUseError):  # what it writes late would fall into an extent of the next run
        Run(tmp_path, keep=True)
    stall.release()
    when_free(tmp_path).space.close()


def when_free(directory: Path) -> Run:
    deadline = time.monotonic() + 60
    while True:
        try:
            return Run(directory, keep=True)
        except SwapInUseError:
            assert time.monotonic() < deadline, "the lock is never given back"
            time.sleep(0.01)


def test_commits_of_a_run_that_lives_are_not_discarded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    with pytest.raises(SwapInUseError):
        Run(tmp_path)
    assert manifest_path(tmp_path, 1).exists()
    run.space.close()
    Run(tmp_path).space.close()
    assert not manifest_path(tmp_path, 1).exists()


@pytest.mark.parametrize("call", ["lock", "fallocate"])
def test_a_fresh_run_without_room_for_all_of_its_files_leaves_the_commit_before(tmp_path: Path, call: str) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    run = Run(directories[0])
    run.two_commits()
    run.space.close()
    before = {path.name: path.read_bytes() for path in directories[0].iterdir()}
    system = FaultySystemCalls()
    system.inject(call, *[None] * {"lock": 3, "fallocate": 1}[call], errno.EDQUOT)  # of the second directory
    with pytest.raises((SwapFullError, SwapIOError), match=r"/b/.*EDQUOT|/b/.*quota"):
        SwapSpace.open(directories, name="r0", nbytes=4 * MIB, system=system)
    assert manifest_path(directories[0], 1).read_bytes() == before[manifest_path(directories[0], 1).name]
    run = Run(directories[0], keep=True)
    found = recover(run.space, run.store)  # which verifies every extent
    assert found is not None
    assert found.manifest.generation == 1
    run.space.close()


def test_after_a_full_disk_the_next_commit_succeeds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.system.inject("pwritev", errno.ENOSPC)
    with pytest.raises(SwapFullError, match="the commit before holds"):
        run.commit(2)
    run.system.inject("pwritev", Short(10), errno.EINTR, Short(100))
    run.commit(3)
    latest = run.store.read_latest()
    assert latest is not None
    assert latest.generation == 3
    run.space.close()


def test_a_commit_on_a_drive_that_is_interrupted_for_ever_fails(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.system.always("pwritev", errno.EINTR)
    with pytest.raises(SwapIOError, match=r"write of .*EINTR"):
        run.commit(2)
    run.system.always("pwritev", None)
    latest = run.store.read_latest()
    assert latest is not None
    assert latest.generation == 1
    run.commit(3)
    run.space.close()


def test_a_commit_does_not_wait_for_writes_of_the_next_step(tmp_path: Path) -> None:
    from doubles import StepBackend

    backend = StepBackend()
    space = SwapSpace.open([tmp_path], name="r0", nbytes=MIB, backend=backend)
    store = CommitStore([tmp_path], name="r0")
    with AlignedBuffer(4096) as buffer:
        request = space.start_write(space.allocate(4096), buffer.view)
        store.write(0, [], {}, space=space)
        assert not request.done
        backend.run()
    space.close()


def test_unfit_commits_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    with pytest.raises(ValueError, match=r"above the last \(1\), found 1"):
        run.commit(1)
    with pytest.raises(TypeError):
        run.commit(2, {"tensor": object()})
    run.commit(2)
    run.space.close()
    with pytest.raises(SwapError, match="settle on the latest, or discard"):
        CommitStore([tmp_path], name="r0").write(3, [], {}, space=run.space)


def test_a_fresh_run_invalidates_the_old_commit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.space.close()
    manifest = manifest_path(tmp_path, 1).read_bytes()
    Run(tmp_path).space.close()
    manifest_path(tmp_path, 1).write_bytes(manifest)  # as somebody puts it back
    run = Run(tmp_path, keep=True)
    with pytest.raises(FormatError, match=r"of run .* the data it speaks of are gone"):
        recover(run.space, run.store)
    run.store.discard()
    assert recover(run.space, run.store) is None
    run.space.close()


def test_a_flipped_bit_in_any_extent_is_found(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    assert run.mark is not None
    entries = run.mark.entries()
    assert verify(run.space, entries) == []
    run.space.close()
    for entry in entries[:2]:
        flip(tmp_path / "r0.swapfile", entry.extent.pieces[0].offset + 4097)
    before = (tmp_path / "r0.swapfile").read_bytes()
    run = Run(tmp_path, keep=True)
    first = min(entry.extent.pieces[0].offset for entry in entries[:2])
    damage = f"2 extents of the last commit are damaged, the first: read of 8192 bytes at offset {first} "
    with pytest.raises(FormatError, match=damage):
        recover(run.space, run.store)
    with pytest.raises(SwapError):  # claimed by the attempt before
        recover(run.space, run.store)
    assert [type(error) for error in verify(run.space, entries)] == [ChecksumError, ChecksumError]
    run.space.close()
    assert (tmp_path / "r0.swapfile").read_bytes() == before
    run = Run(tmp_path, keep=True)
    assert recover(run.space, run.store, verify_bytes=False) is not None
    run.space.close()


def test_a_truncated_swap_file_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.space.close()
    os.truncate(tmp_path / "r0.swapfile", MIB)
    with pytest.raises(FormatError, match="it has been truncated; it was left alone"):
        Run(tmp_path, keep=True)


def test_a_missing_swap_file_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.space.close()
    (tmp_path / "r0.swapfile").unlink()
    with pytest.raises(FormatError, match="found none"):
        Run(tmp_path, keep=True)
    assert manifest_path(tmp_path, 1).exists()


def test_a_swap_file_of_another_version_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).space.close()
    path = tmp_path / "r0.swapfile"
    content = bytearray(path.read_bytes())
    content[16] = 1
    path.write_bytes(content)
    for keep in (False, True):
        with pytest.raises(FormatError, match="to be of version 2, found version 1"):
            Run(tmp_path, keep=keep)
    assert path.read_bytes() == content


def test_manifest_and_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    assert run.mark is not None
    entries = run.mark.entries()
    run.store.write(2, [*entries, swap.Entry("d", entries[0].extent, 1)], {}, space=run.space)
    run.space.close()
    run = Run(tmp_path, keep=True)
    with pytest.raises(FormatError, match=r"does not fit its swap files.*in use"):
        recover(run.space, run.store)
    run.space.close()


def test_leftovers_are_recognised(tmp_path: Path) -> None:
    found = find_leftovers([tmp_path], name="r0")
    assert (found.manifest, found.files, found.in_use) == (None, (None,), False)
    run = Run(tmp_path)
    found = find_leftovers([tmp_path], name="r0")
    assert (found.in_use, found.holder) == (True, os.getpid())
    run.two_commits()
    assert not find_leftovers([tmp_path], name="r0").resumable  # its owner lives
    run.space.close()
    found = find_leftovers([tmp_path], name="r0")
    assert (found.resumable, found.in_use) == (True, False)
    assert found.manifest is not None
    assert found.manifest.generation == 1
    Run(tmp_path).space.close()
    assert not find_leftovers([tmp_path], name="r0").resumable  # the files are another run's


def test_a_manifest_is_readable_without_this_program(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    run.space.close()
    content = manifest_path(tmp_path, 1).read_bytes()
    fields = json.loads(content[content.index(b'{"file_sizes"') :])
    assert fields["user"] == {"step": 1}
    assert [row[0] for row in fields["entries"]] == ["a", "b", "c"]


def test_hundreds_of_commits_leave_no_descriptor_and_no_file(tmp_path: Path) -> None:
    run = Run(tmp_path, system=_without_waiting())
    run.write("a", b"x", 4096)
    run.commit(0)
    before, there = len(os.listdir("/proc/self/fd")), run.space.statistics().allocated
    for generation in range(1, number_of(300, 1000)):
        run.generations.written("a", run.generations.extent_for_write("a", 4096), 1)
        run.commit(generation)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(names(tmp_path)) == 3
    assert run.space.statistics().allocated == there + 4096
    run.space.close(remove=True)


def _without_waiting() -> FaultySystemCalls:
    system = FaultySystemCalls()
    system.fsync = system.fdatasync = lambda fd: None  # type: ignore[method-assign]
    return system


# Stores that commit together: what is taken back again.


def prepared(run: Run, generation: int) -> Mark:
    run.write("a", b"%d" % generation)
    mark = run.generations.mark()
    run.store.prepare(generation, mark.entries(), {"step": generation}, space=run.space)
    return mark


def check_goes_on_from(directory: Path, run: Run, generation: int) -> None:
    """A later start finds this commit, and nothing is left of another."""
    run.space.close()
    assert names(directory) == {"r0.lock", "r0.swapfile", manifest_path(directory, generation).name}
    run = Run(directory, keep=True)
    recovered = recover(run.space, run.store)
    assert recovered is not None
    assert recovered.manifest.generation == generation
    run.space.close()


def test_the_commit_before_is_not_removed_for_one_that_is_not_published(tmp_path: Path) -> None:
    """Else nothing would be committed any more, and nothing had said so."""
    run = Run(tmp_path)
    run.two_commits()
    prepared(run, 2)
    with pytest.raises(ValueError, match="expected generation 2 to be published, found it prepared only"):
        run.store.retire()
    latest = run.store.read_latest()
    assert latest is not None
    assert latest.generation == 1
    run.store.publish()
    assert run.store.retire().generation == 2
    check_goes_on_from(tmp_path, run, 2)


@pytest.mark.parametrize("published", [False, True])
def test_a_commit_taken_back_is_durably_not_there(tmp_path: Path, published: bool) -> None:
    run = Run(tmp_path)
    run.two_commits()
    mark = prepared(run, 2)
    if published:
        run.store.publish()
    assert run.store.is_published() is published
    before = run.system.calls["fsync"]
    assert run.store.withdraw()
    assert run.system.calls["fsync"] - before == published
    run.generations.release(mark)
    assert names(tmp_path) == {"r0.lock", "r0.swapfile", manifest_path(tmp_path, 1).name}
    run.write("a", b"3")
    run.commit(3)
    check_goes_on_from(tmp_path, run, 3)


@pytest.mark.parametrize("happened", [False, True])
def test_after_a_rename_that_failed_a_look_says_whether_it_is_published(tmp_path: Path, happened: bool) -> None:
    run = Run(tmp_path, system=Reports())
    run.two_commits()
    mark = prepared(run, 2)
    if happened:
        run.system.wrong = "rename"
    else:
        run.system.inject("rename", errno.EIO)
    with pytest.raises(SwapIOError):
        run.store.publish()
    assert run.store.is_published() is happened
    if happened:
        assert not run.store.in_doubt
        run.store.retire()
        assert run.mark is not None
        run.generations.release(run.mark)
        run.mark = mark
    else:
        assert run.store.withdraw()
        run.generations.release(mark)
    run.write("a", b"3")
    run.commit(3)
    check_goes_on_from(tmp_path, run, 3)


def test_what_cannot_be_taken_back_at_once_is_removed_before_the_next_commit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    mark = prepared(run, 2)
    run.store.publish()
    run.system.inject("unlink", errno.EIO, errno.EIO)
    assert not run.store.withdraw()
    run.generations.release(mark)  # another store has made sure that nobody goes on from it
    with pytest.raises(SwapIOError, match="unlink"):
        run.commit(3)
    assert manifest_path(tmp_path, 2).exists()
    run.write("a", b"4")
    before = run.system.calls["fsync"]
    run.commit(4)
    assert run.system.calls["fsync"] - before == 2 + 3, "the directory as it is and without it; then as of any commit"
    check_goes_on_from(tmp_path, run, 4)


def test_what_a_look_at_the_directory_has_shown_is_durable(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    prepared(run, 2)
    run.system.inject("rename", errno.EIO)
    with pytest.raises(SwapIOError):
        run.store.publish()
    before = run.system.calls["fsync"]
    assert not run.store.is_published()
    assert run.system.calls["fsync"] - before == 1
    run.space.close()


def test_after_a_failed_sync_nothing_is_known_and_no_commit_is_made(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.two_commits()
    prepared(run, 2)
    run.system.inject("fsync", errno.EIO)
    with pytest.raises(SwapIOError):
        run.store.publish()
    assert not run.store.is_published()
    assert not run.store.withdraw()
    with pytest.raises(SwapError, match="no commit is possible after this"):
        run.commit(3)
    run.space.close()


def test_a_rename_that_may_yet_happen_is_waited_for_before_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stall = Run(tmp_path), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    run.store = CommitStore([tmp_path], name="r0", system=run.system, stall_seconds=1.0)
    run.two_commits()
    mark = prepared(run, 2)
    run.system.inject("rename", stall)
    with pytest.raises(SwapIOError, match="ETIMEDOUT"):
        run.store.publish()
    assert not run.store.is_published()
    assert not run.store.withdraw()
    run.generations.release(mark)
    with pytest.raises(SwapError, match=r"1 calls .* are not answered"):
        run.commit(3)
    stall.release()
    for thread in run.store._system.late():
        thread.join(60)
    assert manifest_path(tmp_path, 2).exists()  # long after it was given up
    run.store._system._seconds = 60.0
    run.write("a", b"4")
    run.commit(4)
    check_goes_on_from(tmp_path, run, 4)


def test_a_manifest_takes_the_memory_it_needs(tmp_path: Path) -> None:
    Run(tmp_path).two_commits()
    tracemalloc.start()
    try:
        assert find_leftovers([tmp_path], name="r0").manifest is not None
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
