"""What the ranks do together is undone where it did not come about on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doubles_silence import only_what_is_held_is_silent

import swap
import tiermem
from tiermem.runtime.company import (
    Company,
    find_company,
    leave_directories,
    make_directories,
    own_directories,
    together,
)
from tiermem.zero3 import ranks as ranks_module
from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.grid import one_copy
from tiermem.zero3.ranks import Ranks, _group
from tiermem.zero3.words import Words


class Told:
    """Two ranks, of which the other one says `other`; an exception is raised instead."""

    def __init__(self, other: str | BaseException) -> None:
        self.other = other
        self.mine = ""

    def tell_text(self, text: str) -> list[str]:
        self.mine = text
        if isinstance(self.other, BaseException):
            raise self.other
        return [text, self.other]


def undone(other: str | BaseException, raised: type[BaseException] | None) -> list[str]:
    found: list[str] = []
    ranks: Any = Told(other)
    if raised is None:
        assert together(ranks, "open", lambda: "opened", found.append) == "opened"
    else:
        with pytest.raises(raised):
            together(ranks, "open", lambda: "opened", found.append)
    return found


def test_what_was_done_is_undone_unless_all_have_done_it() -> None:
    assert undone("", None) == []
    assert undone("OSError: full", tiermem.TiermemError) == ["opened"]
    assert undone(KeyboardInterrupt(), KeyboardInterrupt) == ["opened"], "an interrupt while waiting for the others"


@pytest.mark.parametrize("other", ["OSError: full", tiermem.TiermemError("no word from rank 1")])
def test_what_others_may_go_on_from_is_left_where_it_could_not_be_found_out(other: Any) -> None:
    undone: list[str] = []
    doubtful: list[Any] = []
    ranks: Any = Told(other)
    with pytest.raises(tiermem.TiermemError):
        together(ranks, "open", lambda: "opened", undone.append, lambda *found: doubtful.append(found))
    assert (undone, doubtful) == ((["opened"], []) if isinstance(other, str) else ([], [("opened", other)]))


def test_what_failed_here_is_told_and_not_undone() -> None:
    def fail() -> str:
        raise OSError("full")

    found: list[str] = []
    ranks: Any = Told("")
    with pytest.raises(OSError, match="full"):
        together(ranks, "open", fail, found.append)
    assert (ranks.mine, found) == ("OSError: full", [])


def test_what_failed_here_leaves_nothing_in_doubt() -> None:
    def fail() -> str:
        raise OSError("full")

    found: list[Any] = []
    ranks: Any = Told(tiermem.TiermemError("silent"))
    with pytest.raises(tiermem.TiermemError, match="silent"):
        together(ranks, "open", fail, found.append, doubt=lambda *each: found.append(each))
    assert (ranks.mine, found) == ("OSError: full", [])


class Line(SingleProcess):
    """One of three ranks, the second."""

    def __init__(self) -> None:
        self.reasons: list[str | None] = []

    @property
    def size(self) -> int:
        return 3

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        return [[3], list(numbers), [4]]

    def close(self, reason: str | None = None) -> None:
        self.reasons.append(reason)


def test_ranks_agree_on_the_least_and_leave_both_lines() -> None:
    computing, committing = Line(), Line()
    both = Company(one_copy(computing), committing)
    assert (both.least(2), both.least(7)) == (2, 3)
    both.close("had enough")
    assert (computing.reasons, committing.reasons) == (["had enough"], ["had enough"])


def test_who_leaves_before_the_first_word_leaves_no_word_of_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be that of many groups, one after the other."""
    names: list[str] = []

    class Lonely(Ranks):
        def tell_text(self, text: str) -> list[str]:
            names.append(self._words.name)
            return [text]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *_, **__: None)
    for name in ("0.1", "0.2"):
        Lonely(None, timeout=1.0, device=torch.device("cpu"), name=name)
    assert names == ["tiermem/0.1", "tiermem/0.2"]


@pytest.fixture
def whole() -> Iterator[Any]:
    """This process as the only one of torch.distributed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_groups_of_some_are_not_cut_out_of_one_that_is_bound_to_devices(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's would be, by a split in which all processes of the program take part; the members alone are here."""
    device, seen = torch.device("cuda", 0), []
    make = dist.distributed_c10d._new_process_group_helper

    def noting(*arguments: Any, device_id: torch.device, **more: Any) -> Any:
        seen.append((whole.bound_device_id, device_id))
        if len(seen) > 1:
            raise RuntimeError("not joined")
        return make(*arguments, device_id=device_id, **more)

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", noting)
    whole.bound_device_id = device
    group = _group("gloo", [0], 20.0, common=False)
    assert group.bound_device_id == device, "the group itself knows its device"
    with pytest.raises(tiermem.TiermemError, match="not joined"):
        _group("gloo", [0], 20.0, common=False)
    assert seen == [(None, device)] * 2
    assert whole.bound_device_id == device, "as the program has bound it, whatever happens"


def test_the_folder_of_a_rank_is_not_waited_for_on_a_silent_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, answers, line = threading.Event(), threading.Event(), Line()
    only_what_is_held_is_silent(monkeypatch, lambda: held.is_set() and not answers.is_set())
    company = Company(one_copy(line), line)
    given = tiermem.Config(device="cpu", host_memory="1MiB", swap_dirs=[tmp_path], stall_timeout=0.1)
    own = own_directories(given, company)

    def silent(real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **more: Any) -> None:
            held.set()
            answers.wait(30)
            real(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", silent(Path.mkdir))
        with pytest.raises(swap.SwapIOError, match=r"mkdir.*rank_00000.*ETIMEDOUT"):
            make_directories(own, company)
        answers.set()
    make_directories(own, company)
    held.clear()
    answers.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", silent(Path.rmdir))
        leave_directories(own, company)
        assert list(tmp_path.iterdir()), "it has not been waited for"
        answers.set()


@pytest.mark.parametrize("fails", ["first", "second", "tell", "nothing"])
def test_what_could_not_begin_leaves_no_group_open(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    opened: list[Any] = []
    closed: list[Any] = []
    told: list[str] = []

    def make(backend: str, *_: Any, **__: Any) -> object:
        if fails == ("first" if not opened else "second"):
            raise tiermem.TiermemError("not joined")
        opened.append(backend)
        return object()

    def tell(ranks: Ranks, numbers: Sequence[int]) -> list[list[int]]:
        if fails == "tell" and len(opened) == 2:
            raise tiermem.TiermemError("no word from rank 1")
        return [list(numbers)] * 2

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "destroy_process_group", closed.append)
    monkeypatch.setattr(ranks_module, "_group", make)
    monkeypatch.setattr(Ranks, "tell", tell)
    monkeypatch.setattr(Words, "leave", lambda _, reason: told.append(reason))
    given = tiermem.Config(device="cpu", host_memory="1MiB", swap_dirs=["/nowhere"])
    if fails == "nothing":
        company = find_company(given)
        assert not closed
        company.close()
    else:
        with pytest.raises(tiermem.TiermemError, match="no word from rank 1" if fails == "tell" else "not joined"):
            find_company(given)
    assert len(closed) == len(opened) == {"first": 0, "second": 1}.get(fails, 2)
    assert None not in closed, "that would be all groups there are"
    assert all("could not begin" in reason for reason in told)
    assert len(told) == {"second": 1, "tell": 1}.get(fails, 0)


def test_of_two_groups_of_one_line_none_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU's: that of messages is there when that of tensors cannot be made."""
    closed: list[Any] = []

    def make(backend: str, *_: Any, **__: Any) -> str:
        if backend == "nccl":
            raise tiermem.TiermemError("not joined")
        return backend

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "destroy_process_group", closed.append)
    monkeypatch.setattr(ranks_module, "_group", make)
    with pytest.raises(tiermem.TiermemError, match="not joined"):
        Ranks(None, timeout=1.0, device=torch.device("cuda"), name="0.1")
    assert closed == ["gloo"]
