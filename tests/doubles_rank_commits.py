"""What ranks do in the tests of commits of which one rank's drive fails to say, or to know, whether they happened."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from doubles_combinations import half_of, some_of
from doubles_rank_scenarios import (
    CLIP,
    COMMITS,
    Few,
    Odd,
    committing,
    committing_few,
    config_for,
    loss_of,
    part,
    tokens,
)
from doubles_ranks import STALL

import swap
import tiermem
from swap.syscalls import SystemCalls
from tiermem.pager.pager import Pager
from tiermem.process import start_thread
from tiermem.runtime import commits
from tiermem.runtime.snapshots import Snapshots

EIO = errno.EIO
STEPS, STRUCK = 4, 2  # the steps, each with a commit, and the commit in which the drive fails
SILENCE = 2.0  # seconds after which the call that is silent is given up

# Of what is alike, the others where all are asked for.
DOUBTS = some_of(
    [
        "rename",
        "rename_happened",
        "rename_and_taking_back",
        "rename_silent",
        "sync",
        "sync_and_taking_back",
        "unlink",
        "unlink_sync",
    ],
    ["rename_of_both", "unlink_happened"],
)
# What the next calls of a kind suffer, on which rank, inside the second commit. None: nothing. "late": it happens, and
# an error is reported. "silent": it happens after it was given up.
PLACES: dict[str, dict[int, dict[str, list[Any]]]] = {
    "rename": {1: {"rename": [EIO]}},
    "rename_happened": {1: {"rename": ["late"]}},
    "rename_of_both": {0: {"rename": [EIO]}, 1: {"rename": [EIO]}},
    "rename_and_taking_back": {0: {"unlink": [EIO]}, 1: {"rename": [EIO]}},
    "rename_silent": {1: {"rename": ["silent"]}},
    "sync": {1: {"fsync": [None, EIO]}},
    "sync_and_taking_back": {0: {"unlink": [EIO]}, 1: {"fsync": [None, EIO]}},
    "unlink": {1: {"unlink": [EIO]}},
    "unlink_happened": {1: {"unlink": ["late"]}},
    "unlink_sync": {1: {"fsync": [None, None, EIO]}},
}


class Drive:
    """The system calls of this process, some of which fail in turn until `mend`."""

    def __init__(self, faults: dict[str, list[Any]]) -> None:
        self.left = {name: list(each) for name, each in faults.items()}
        self._answers = threading.Event()
        self._real = {name: getattr(SystemCalls, name) for name in faults}
        for name in faults:
            setattr(SystemCalls, name, self._call(name))

    def mend(self) -> None:
        self._answers.set()
        for name, real in self._real.items():
            setattr(SystemCalls, name, real)

    def _call(self, name: str) -> Callable[..., None]:
        def call(calls: SystemCalls, *arguments: Any) -> None:
            fault = self.left[name].pop(0) if self.left[name] else None
            if isinstance(fault, int):
                raise OSError(fault, os.strerror(fault))
            if fault == "silent" and not self._answers.wait(60):
                raise AssertionError("the test forgot to let go of the drive")
            self._real[name](calls, *arguments)
            if fault == "late":
                raise OSError(EIO, os.strerror(EIO))

        return call


@contextlib.contextmanager
def failing(faults: dict[str, list[Any]] | None) -> Iterator[None]:
    """The drive of this rank fails in here; every fault must have struck in the end."""
    drive = Drive(faults or {})
    try:
        yield
    finally:
        drive.mend()
    assert not any(drive.left.values()), f"never reached: {drive.left}"


def doubtful(place: str) -> Callable[[Path, int, int], Any]:
    """Train with a commit after every step, in the second of which a drive fails; what each rank was told, and held."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        torch.manual_seed(1)
        model = Few()
        told: list[str] = []
        held: list[int] = []
        ended = ""
        try:
            where = directory.parent.parent / f"doubt {place}"
            with tiermem.offload(model, config_for(where), coalesce=0) as runtime:
                optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
                for step in range(STEPS):
                    loss_of(model, part(tokens(step), rank, size)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    faults = PLACES[place].get(rank) if step + 1 == STRUCK else None
                    if faults == {"rename": ["silent"]}:
                        given_up_soon(runtime)
                    with failing(faults):
                        told.append(commit(runtime, step + 1))
                    held.append(runtime.committed["step"] if runtime.committed else 0)
                    wait_answered(runtime)
        except (tiermem.TiermemError, swap.SwapError) as error:
            ended = f"{type(error).__name__}: {error}"
        return {"told": told, "held": held, "ended": ended}

    scenario.__name__ = f"doubtful_{place}"
    return scenario


def commit(runtime: Any, step: int) -> str:
    try:
        runtime.commit({"step": step}).wait()
    except Exception as error:  # noqa: BLE001 - told apart by the test
        return f"{type(error).__name__}: {error}"
    return ""


def given_up_soon(runtime: Any) -> None:
    """The next rename is; of a busy drive another call may take as long, and both ranks have time for each other."""
    calls = runtime._house.storage.store._system
    patience = calls._seconds

    def rename(source: str, target: str) -> None:
        del calls.rename  # the class's own again
        calls._seconds = SILENCE
        try:
            calls.rename(source, target)
        finally:
            calls._seconds = patience

    calls.rename = rename


def wait_answered(runtime: Any) -> None:
    """Until no call is out that was given up."""
    until = time.monotonic() + 60
    while runtime._house.storage.store._system.late():
        assert time.monotonic() < until
        time.sleep(0.01)


def settled(place: str) -> Callable[[Path, int, int], Any]:
    """Go on from what the ranks of `doubtful` have left."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        return committing_few(directory.parent.parent / f"doubt {place}", rank, size, until=STEPS + 1)

    scenario.__name__ = f"settled_{place}"
    return scenario


def five_steps(directory: Path, rank: int, size: int) -> Any:
    return committing_few(directory, rank, size, until=STEPS + 1)


def exchanged(directory: Path, rank: int, size: int) -> Any:
    """The folders of the ranks have each other's names when they go on."""
    committing_few(directory, rank, size, until=1)
    torch.distributed.barrier()
    if rank == 0:
        first, second = sorted(directory.iterdir())
        first.rename(directory / "first")
        second.rename(first)
        (directory / "first").rename(second)
    torch.distributed.barrier()
    return committing_few(directory, rank, size)


def one_cannot_replace(directory: Path, rank: int, size: int) -> Any:
    """All are told to replace what they have committed, and the disk of rank 1 is full; then they go on from it."""
    committing_few(directory, rank, size, until=1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with unittest.mock.patch.object(SystemCalls, "fallocate", full if rank == 1 else SystemCalls.fallocate):
        try:
            committing_few(directory, rank, size, resume=False, overwrite=True)
        except (tiermem.TiermemError, swap.SwapError) as error:
            told = f"{type(error).__name__}: {error}"
    return {"told": told, **committing_few(directory, rank, size, resume=True)}


def unexpected(directory: Path, rank: int, size: int) -> Any:
    """Four steps and then the first commit, from a budget that does not hold them; bytes that it had to read again."""
    read_again: list[int] = []
    take = swap.take_checksums

    def note(space: swap.SwapSpace, copies: Any) -> int:
        read_again.append(take(space, copies))
        return read_again[-1]

    torch.manual_seed(1)
    model = Odd()
    with unittest.mock.patch.object(commits, "take_checksums", note):
        with tiermem.offload(model, config_for(directory, host_memory="68KiB")) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
            for step in range(4):
                loss_of(model, part(tokens(step), rank, size)).backward()
                optimizer.step()
                optimizer.zero_grad()
            written = runtime.statistics().total.bytes_written
            runtime.commit().wait()
    return {"read_again": read_again, "written": written}


def unlooked(directory: Path, rank: int, size: int) -> Any:
    """As `looking_beside`, where nothing is kept and nobody looks."""
    return committing(directory, rank, size, last=0)["losses"]


def looking_beside(stage: int, verb: str) -> Callable[[Path, int, int], Any]:
    """Each step is kept, and before that has ended, all units are used again, in a budget that holds two of them."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        looked = threading.Event()
        publish, write = commits.publish_everywhere, Snapshots._write

        def wait_and(then: Callable[..., Any]) -> Callable[..., Any]:
            def late(*arguments: Any) -> Any:
                assert looked.wait(STALL), "nobody has looked"
                return then(*arguments)

            return late

        torch.manual_seed(1)
        model = Odd()
        losses = []
        settings = {"stage": stage, "host_memory": "68KiB", "commits": verb == "commit"}
        with (
            unittest.mock.patch.object(commits, "publish_everywhere", wait_and(publish)),
            unittest.mock.patch.object(Snapshots, "_write", wait_and(write)),
            tiermem.offload(model, config_for(directory, **settings)) as runtime,
        ):
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
            for step in range(COMMITS):
                loss = loss_of(model, part(tokens(step), rank, size))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
                looked.clear()
                where = () if verb == "commit" else (directory.with_name(f"{directory.name} {step}"),)
                kept = getattr(runtime, verb)(*where)
                with torch.no_grad():
                    model(tokens(step))
                assert not kept.done
                looked.set()
                kept.wait()
        return losses

    scenario.__name__ = f"looking_beside_{verb}_{stage}"
    return scenario


def one_has_no_pages_for_a_snapshot(directory: Path, rank: int, size: int) -> Any:
    """Rank 1's drive fails as pages are written back for the first snapshot; training and keeping go on."""
    torch.manual_seed(1)
    model = Few()
    told = []
    with tiermem.offload(model, config_for(directory), coalesce=0) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
        real = Pager.start_save
        for step in range(2):
            loss_of(model, part(tokens(step), rank, size)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1 and step == 0:
                Pager.start_save = lambda *_: failed_future(OSError(EIO, "the drive of rank 1 has failed"))
            path = directory.with_name(f"{directory.name} {step}")
            try:
                runtime.snapshot(path).wait()
            except Exception as error:  # noqa: BLE001 - told apart by the test
                told.append(f"{type(error).__name__}: {error}")
            Pager.start_save = real
            runtime.commit({"step": step + 1}).wait()
        left = sorted(each.name for each in directory.parent.iterdir())
        return {"told": told, "held": runtime.committed, "left": left}


def one_has_no_thread(directory: Path, rank: int, size: int) -> Any:
    """Rank 1 may start no thread for the first commit and the first snapshot."""

    def none_left(name: str, *_: Any) -> tiermem.TiermemError:
        return tiermem.TiermemError(f"no thread for {name}")

    torch.manual_seed(1)
    model = Few()
    told = []
    with tiermem.offload(model, config_for(directory), coalesce=0) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
        for step in range(2):
            loss_of(model, part(tokens(step), rank, size)).backward()
            optimizer.step()
            optimizer.zero_grad()
            real = start_thread if rank == 0 or step == 1 else none_left
            with unittest.mock.patch.object(commits, "start_thread", real):
                for keep in (runtime.commit, partial(runtime.snapshot, directory.with_name(f"copy {step}"))):
                    try:
                        keep().wait()
                    except tiermem.TiermemError as error:
                        told.append(str(error))
                    else:
                        told.append("")
    return told


def failed_future(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


LOOKING = [looking_beside(stage, verb) for stage, verb in half_of((1, 2, 3), ("commit", "snapshot"))]
SCENARIOS: dict[str, Callable[[Path, int, int], Any]] = {
    made.__name__: made
    for made in (
        five_steps,
        exchanged,
        one_cannot_replace,
        unexpected,
        unlooked,
        one_has_no_pages_for_a_snapshot,
        one_has_no_thread,
        *LOOKING,
        *(make(place) for make in (doubtful, settled) for place in DOUBTS),
    )
}
