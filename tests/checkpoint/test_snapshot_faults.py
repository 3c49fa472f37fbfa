"""Snapshots that fail or were damaged: an error that says which, and never a half one that looks whole."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from doubles_combinations import half_of, number_of, some_of
from doubles_commit import Training, check_equal, make_config, undisturbed
from doubles_python import WarmPython
from torch import nn

import swap
import tiermem
from swap import SystemCalls
from tiermem.checkpoint import draft as draft_module
from tiermem.checkpoint.manifest import NAME, pack, parse
from tiermem.checkpoint.reading import open_snapshot
from tiermem.checkpoint.resharding import reshard
from tiermem.checkpoint.tensor_file import TensorReader

MADE: dict[tuple[Any, ...], dict[str, bytes]] = {}


def made(directory: Path, **settings: Any) -> Path:
    """A snapshot of a run of one step, which is made once for all who ask for one of these settings."""
    (directory / "made").mkdir()
    copy, key = directory / "copy", tuple(settings.items())
    if key not in MADE:
        training = Training(make_config(directory / "made", **settings))
        training.step()
        training.runtime.snapshot(copy, {"step": 1, "scheduler": training.scheduler.state_dict()}).wait()
        training.close()
        MADE[key] = {path.name: path.read_bytes() for path in copy.iterdir()}
        return copy
    copy.mkdir()
    for name, content in MADE[key].items():
        (copy / name).write_bytes(content)
    return copy


def refused(directory: Path, snapshot: Path, error: type[Exception] = swap.SwapError) -> str:
    """Resume it, and see it refused with nothing left."""
    (directory / "run").mkdir(exist_ok=True)
    with pytest.raises(error) as caught:
        Training(make_config(directory / "run"), resume=snapshot)
    assert list((directory / "run").iterdir()) == []
    return str(caught.value)


# Damage


@pytest.mark.parametrize("which", [NAME, "rank-00000-00001.safetensors", "rank-00000-buffers.safetensors"])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, which: str) -> None:
    path = made(tmp_path, param_dtype="bfloat16") / which
    whole = path.read_bytes()
    chance = random.Random(1)
    header = 8 + int.from_bytes(whole[:8], "little") if which != NAME else len(whole)
    places = [*chance.choices(range(len(whole)), k=20), *chance.choices(range(min(header, len(whole))), k=20)]
    for place in {*places, 0, len(whole) - 1}:
        data = bytearray(whole)
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            damage = list(open_snapshot(path.parent).verify())
        except swap.FormatError as error:
            damage = [str(error)]
        assert damage, place
        assert which in damage[0]


def test_a_flipped_bit_is_found_while_resuming(tmp_path: Path) -> None:
    snapshot = made(tmp_path)
    for path in sorted(snapshot.glob("rank*")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 4]) + whole[-1:])
        assert path.name in refused(tmp_path, snapshot, swap.ChecksumError)
        path.write_bytes(whole)
    Training(make_config(tmp_path / "run"), resume=snapshot).close()


def test_verify_never_reads_what_is_there(tmp_path: Path) -> None:
    snapshot = made(tmp_path)
    path = next(snapshot.glob("rank-00000-00001*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tmp_path / "run").mkdir()
    Training(make_config(tmp_path / "run", verify="never"), resume=snapshot).close()


@pytest.mark.parametrize("length", [0, 5, 100, -1])
@pytest.mark.parametrize("which", [NAME, "rank-00000-00001.safetensors", "rank-00000-buffers.safetensors"])
def test_files_cut_short(tmp_path: Path, which: str, length: int) -> None:
    path = made(tmp_path) / which
    path.write_bytes(path.read_bytes()[:length])
    assert which in refused(tmp_path, path.parent, swap.FormatError)


@pytest.mark.parametrize("which", ["rank-00000-00001.safetensors", "rank-00000-buffers.safetensors"])
def test_missing_files(tmp_path: Path, which: str) -> None:
    path = made(tmp_path) / which
    path.unlink()
    assert f"{which} is missing" in refused(tmp_path, path.parent, swap.FormatError)


def test_without_its_manifest_it_is_no_snapshot(tmp_path: Path) -> None:
    snapshot = made(tmp_path)
    (snapshot / NAME).unlink()
    assert "expected a snapshot" in refused(tmp_path, snapshot, tiermem.ResumeError)


def test_files_of_another_snapshot(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    snapshot, other = made(tmp_path), made(tmp_path / "other", param_dtype="bfloat16")
    name = "rank-00000-00001.safetensors"
    (snapshot / name).write_bytes((other / name).read_bytes())
    refused(tmp_path, snapshot, swap.FormatError)


# Fuzzing


def test_mutated_manifests_are_a_format_error(tmp_path: Path) -> None:
    whole = (made(tmp_path) / NAME).read_bytes()
    manifest = parse(whole, "x")
    assert pack(manifest) == whole
    chance = random.Random(3)
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            kind, place = chance.randrange(3), chance.randrange(len(data))
            if kind == 0:
                data[place] ^= 1 << chance.randrange(8)
            elif kind == 1:
                del data[place : place + chance.randint(1, 50)]
            else:
                data[place:place] = data[: chance.randint(1, 9)]
        if bytes(data) != whole:
            with pytest.raises(swap.FormatError, match="to be the manifest of a snapshot"):
                parse(bytes(data), "x")


ODD: list[Any] = [None, -1, 1 << 70, 0.5, float("nan"), "", "../x", [], [[]], {}, True, "\0", [1, 2, 3, 4, 5], 7]


def test_every_field_of_a_wrong_kind_is_a_documented_error(tmp_path: Path) -> None:
    path = made(tmp_path) / NAME
    whole = json.loads(path.read_text())
    chance = random.Random(4)
    survived, rounds = 0, number_of(500, 1500)
    for _ in range(rounds):
        changed = json.loads(json.dumps(whole))
        node: Any = changed["body"]
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = chance.choice(keys)
            inner = node[key]
            if not isinstance(inner, (dict, list)) or not inner or chance.random() < 0.2:
                node[key] = chance.choice(ODD)
                break
            node = inner
        body = json.dumps(changed["body"], separators=(",", ":")).encode()
        changed["checksum"] = xxhash.xxh3_64_hexdigest(body)
        try:
            parse(json.dumps(changed, separators=(",", ":")).encode(), "x")
        except swap.FormatError:
            continue
        survived += 1  # extra, settings and the like may be anything
    assert survived < rounds * 2 / 3


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("dtype", "expected a dtype of torch, found 'elsewhere'"),
        ("tensor", "expected tensor 'elsewhere' of .* found none"),
        ("another tensor", r"expected tensor .* as the manifest says, found \[\d+\] of torch.float32"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_a_format_error(tmp_path: Path, field: str, said: str) -> None:
    path = made(tmp_path) / NAME
    whole = json.loads(path.read_text())
    trained = [kept for kept in whole["body"]["kept"] if kept["kind"] == "trained"]
    piece = trained[0]["planes"]["master"][0]  # file, tensor, first, count, checksum
    if field == "dtype":
        trained[0]["dtype"] = "elsewhere"
    else:
        pieces = [kept["planes"]["master"][0] for kept in trained]
        other = next(each[1] for each in pieces if each[3] != piece[3])
        piece[1] = "elsewhere" if field == "tensor" else other
    body = json.dumps(whole["body"], separators=(",", ":")).encode()
    whole["checksum"] = xxhash.xxh3_64_hexdigest(body)
    path.write_text(json.dumps(whole, separators=(",", ":")))
    with pytest.raises(swap.FormatError, match=said):
        open_snapshot(path.parent)


def test_a_deep_manifest(tmp_path: Path) -> None:
    for text in (b"", b"{", b"[" * 200_000, b"null", b"\xff", b'{"format":"tiermem-snapshot","version":2}'):
        with pytest.raises(swap.FormatError, match="to be the manifest"):
            parse(text, "x")


# While it is written


class Faulty(SystemCalls):
    """Fails the `at`th call of an operation."""

    operation, at, code = "", 0, 0

    def strike(self, operation: str) -> None:
        if operation == self.operation:
            type(self).at -= 1
            if self.at < 0:
                raise OSError(self.code, os.strerror(self.code))

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        self.strike("write")
        return super().pwritev(fd, view, offset)

    def fsync(self, fd: int) -> None:
        self.strike("sync")
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self.strike("rename")
        super().rename(source, target)


def failing(monkeypatch: pytest.MonkeyPatch, operation: str, at: int, code: int) -> None:
    faulty = type("Failing", (Faulty,), {"operation": operation, "at": at, "code": code})
    monkeypatch.setattr(draft_module, "SystemCalls", faulty)


@pytest.mark.parametrize(
    ("where", "code"),
    half_of([("write", 0), ("write", 9), ("sync", 0), ("sync", 2), ("rename", 0)], [errno.EIO, errno.ENOSPC]),
)
def test_a_fault_leaves_training_unharmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, int], code: int
) -> None:
    losses, state = undisturbed(tmp_path / "plain", 4)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run"))
    found = [training.step()]
    with monkeypatch.context() as patch:
        failing(patch, *where, code)
        pending = training.runtime.snapshot(tmp_path / "copy")
        found.append(training.step())
        with pytest.raises(swap.SwapFullError if code == errno.ENOSPC else swap.SwapIOError):
            pending.wait()
    assert pending.done
    assert {path.name for path in tmp_path.iterdir()} - {"plain"} == {"run"}
    training.runtime.snapshot(tmp_path / "copy", {"step": 2, "scheduler": training.scheduler.state_dict()}).wait()
    found += [training.step(), training.step()]
    check_equal(training.state(), state)
    assert found == losses
    training.close()
    (tmp_path / "again").mkdir()
    again = Training(make_config(tmp_path / "again"), resume=tmp_path / "copy")
    assert [again.step(), again.step()] == losses[2:]
    again.close()


@pytest.mark.parametrize("then", ["snapshot", "close"])
def test_an_error_nobody_waited_for_is_raised_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run"))
    training.step()
    failing(monkeypatch, "write", 3, errno.EIO)
    training.runtime.snapshot(tmp_path / "copy")
    action: Callable[[], Any] = training.close
    if then == "snapshot":
        action = lambda: training.runtime.snapshot(tmp_path / "other")
    with pytest.raises(swap.SwapIOError, match="write"):
        action()
    training.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_real_limit_of_file_size(tmp_path: Path) -> None:
    directories = [tmp_path / f"swap{number}" for number in range(12)]
    for directory in directories:
        directory.mkdir()
    losses, _ = undisturbed(tmp_path / "plain", 3)
    training = Training(make_config(tmp_path, swap_dirs=directories, commits=False))
    found = [training.step()]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for directory in directories for path in directory.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        with pytest.raises(swap.SwapFullError, match="no room for"):
            training.runtime.snapshot(tmp_path / "copy").wait()
        found.append(training.step())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    training.runtime.snapshot(tmp_path / "copy").wait()
    found.append(training.step())
    assert found == losses
    training.close()
    assert list(open_snapshot(tmp_path / "copy").verify()) == []


def test_bytes_that_are_damaged_in_the_swap_file_never_become_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiermem.runtime import snapshots

    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run", param_dtype="bfloat16"))
    training.step()
    real = snapshots.write_part

    def after_damage(draft: Any, shard: Any, **rest: Any) -> Any:
        copy = next(iter(shard._pages._mark.copies.values()))
        with open(tmp_path / "run" / "tiermem.swapfile", "r+b") as file:
            file.seek(copy.extent.pieces[0].offset + 10)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
            os.fsync(file.fileno())
        return real(draft, shard, **rest)

    monkeypatch.setattr(snapshots, "write_part", after_damage)
    with pytest.raises(swap.ChecksumError, match=r"tiermem\.swapfile"):
        training.runtime.snapshot(tmp_path / "copy").wait()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    training.close()


KILLED = """
import os, signal, sys
sys.path.append("tests")
from pathlib import Path
from doubles_commit import Training, make_config
from tiermem.runtime import snapshots

folder = Path(sys.argv[1])
training = Training(make_config(folder / "run"))
training.step()
training.commit().wait()
snapshots.finish_snapshot = lambda *rest, **settings: os.kill(os.getpid(), signal.SIGKILL)
training.runtime.snapshot(folder / "copy").wait()
"""


def test_a_process_killed_while_writing_leaves_nothing_that_looks_whole(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    done = warm_python.run("-c", KILLED, str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    run, partial = sorted(tmp_path.iterdir(), key=lambda path: path.name.startswith("."))
    assert partial.name.startswith(".copy.")
    assert partial.name.endswith(".partial")
    with pytest.raises(tiermem.ResumeError, match="expected a snapshot"):
        open_snapshot(partial)
    training = Training(make_config(run), resume=True)
    assert training.done == 1
    training.runtime.snapshot(tmp_path / "copy").wait()
    training.close()
    assert list(open_snapshot(tmp_path / "copy").verify()) == []


# Resharding


@pytest.mark.parametrize("dtype", some_of(["bfloat16"], ["float32"]))
def test_resharded_there_and_back_it_is_the_same(tmp_path: Path, dtype: str) -> None:
    losses, _ = undisturbed(tmp_path / "plain", 3, param_dtype=dtype)
    snapshot = made(tmp_path, param_dtype=dtype)
    previous = open_snapshot(snapshot)
    for ranks in (2, 3, 5, 1):
        previous = reshard(previous, tmp_path / str(ranks), ranks=ranks)
        assert previous.manifest.world_size == ranks
        assert {file.rank for file in previous.manifest.files} == set(range(ranks))
        assert list(previous.verify()) == []
        (tmp_path / f"run{ranks}").mkdir()
        training = Training(make_config(tmp_path / f"run{ranks}", param_dtype=dtype), resume=previous.path)
        assert [training.step(), training.step()] == losses[1:]
        training.close()
    first, last = open_snapshot(snapshot), previous
    for one, other in zip(first.manifest.kept, last.manifest.kept, strict=True):
        assert one.names == other.names
        for plane in one.planes:
            assert torch.equal(first.whole(one, plane), last.whole(other, plane))


def test_what_is_resharded_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, read = open_snapshot(made(tmp_path, param_dtype="bfloat16")), []
    original = TensorReader.read

    def counting(reader: TensorReader, out: memoryview, offset: int) -> None:
        if reader._path.parent == snapshot.path:
            read.append(out.nbytes)
        original(reader, out, offset)

    monkeypatch.setattr(TensorReader, "read", counting)
    reshard(snapshot, tmp_path / "three", ranks=3)
    planes = [(kept.numel, snapshot.dtype(kept, plane)) for kept in snapshot.manifest.kept for plane in kept.planes]
    assert sum(read) == sum(numel * dtype.itemsize for numel, dtype in planes)


def test_a_parameter_without_elements_is_still_there_resharded(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.ParameterDict({"none": torch.ones(0, 4), "some": torch.ones(3)})

    for name in ("made", "run"):
        (tmp_path / name).mkdir()
    with tiermem.offload(model(), make_config(tmp_path / "made")) as runtime:
        runtime.snapshot(tmp_path / "copy").wait()
    two = reshard(open_snapshot(tmp_path / "copy"), tmp_path / "two", ranks=2)
    with tiermem.offload(model(), make_config(tmp_path / "run"), resume=two.path) as runtime:
        assert {name: tuple(each.shape) for name, each in runtime.model.named_parameters()} == {
            "none": (0, 4),
            "some": (3,),
        }


def test_damage_is_not_resharded(tmp_path: Path) -> None:
    snapshot = made(tmp_path)
    path = next(snapshot.glob("rank-00000-00001*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(swap.FormatError, match="is damaged"):
        reshard(open_snapshot(snapshot), tmp_path / "two", ranks=2)
    with pytest.raises(tiermem.ConfigError, match="number of ranks"):
        reshard(open_snapshot(snapshot), tmp_path / "two", ranks=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "made"]
