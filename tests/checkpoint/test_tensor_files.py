"""Safetensors files: what is damaged is said to be, and what cannot be written leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from doubles_combinations import half_of, number_of
from doubles_silence import only_what_is_held_is_silent
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import swap
import tiermem
from swap import SystemCalls
from tiermem.checkpoint import tensor_file, tensor_writer
from tiermem.checkpoint.draft import Draft
from tiermem.checkpoint.naming import Expected, Rules, match
from tiermem.checkpoint.pretrained import plan_shards, save_pretrained, shard_names
from tiermem.checkpoint.tensor_file import DTYPES, TensorInfo, bytes_of, open_tensors
from tiermem.checkpoint.tensor_writer import TensorSpec, TensorWriter

ROOT = Path(__file__).resolve().parents[2]


class Given:
    """Tensors in memory as a source; `fail` is raised in the middle."""

    def __init__(self, tensors: dict[str, torch.Tensor], fail: Exception | None = None) -> None:
        self.tensors = tensors
        self.fail = fail

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, each.dtype, tuple(each.shape)) for name, each in self.tensors.items()]

    def blocks(self) -> Iterator[tuple[str, memoryview]]:
        for number, (name, values) in enumerate(self.tensors.items()):
            if self.fail is not None and number == len(self.tensors) - 1:
                raise self.fail
            data = bytes_of(values)
            for begin in range(0, len(data), 7):
                yield name, data[begin : begin + 7]


TENSORS = {
    "odd": torch.arange(5, dtype=torch.int8),
    "x": torch.randn(3, 5),
    "half": torch.randn(7).bfloat16(),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "flag": torch.tensor([True, False]),
    'odd "name" \\ é\n': torch.arange(3),
}


@pytest.mark.parametrize("limit", [1, 20, 64, 10**9])
def test_what_is_written_the_library_reads(tmp_path: Path, limit: int) -> None:
    save_pretrained(tmp_path / "out", Given(TENSORS), {"config.json": "{}"}, max_shard_nbytes=limit)
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_both_ways(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    values = torch.arange(12).to(torch.uint8).view(torch.uint8).repeat(2)[: 3 * dtype.itemsize]
    values = (values % 2 if dtype == torch.bool else values).view(dtype)
    save_file({"ours": values}, tmp_path / "theirs.safetensors")
    info = open_tensors(tmp_path / "theirs.safetensors").tensors["ours"]
    assert (info.dtype, info.shape, info.nbytes) == (dtype, (3,), 3 * dtype.itemsize)
    save_pretrained(tmp_path / "out", Given({"ours": values}), {}, max_shard_nbytes=10**6)
    loaded = load_file(tmp_path / "out" / "model.safetensors")["ours"]
    assert torch.equal(loaded.view(torch.uint8), values.view(torch.uint8))


def test_mutated_files_are_a_format_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "file.safetensors")
    whole = (tmp_path / "file.safetensors").read_bytes()
    fd = os.memfd_create("mutated")  # a disk would take longer than the parser
    path = Path(f"/proc/self/fd/{fd}")
    header = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(0)
    refused = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            kind, place = chance.randrange(4), chance.randrange(header)
            if kind == 0:
                data[place] ^= 1 << chance.randrange(8)
            elif kind == 1:
                data[place] = chance.choice(b'0123456789"[]{},:\\-e')
            elif kind == 2:
                del data[place : place + chance.randint(1, 9)]
            else:
                data[place:place] = data[: chance.randint(1, 9)]
        os.ftruncate(fd, len(data))
        os.pwrite(fd, data, 0)
        try:
            found = open_tensors(path)
        except swap.FormatError:
            refused += 1
        else:  # a name or a shape has changed, nothing that could not be read
            assert sum(info.nbytes for info in found.tensors.values()) + found.data_offset == len(data)
    os.close(fd)
    assert refused > 1000


def test_memory_lives_as_long_as_its_bytes_are_looked_at() -> None:
    memory = np.ones(3)
    alive = weakref.ref(memory)
    found = bytes_of(torch.from_numpy(memory))
    del memory
    assert alive() is not None
    assert bytes(found) == np.ones(3).tobytes()
    del found
    assert alive() is None


@pytest.mark.parametrize("length", [0, 3, 8, 20, -1])
def test_files_cut_short(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(2, 3)}, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(swap.FormatError, match="expected"):
        open_tensors(path)


def test_a_kind_of_number_that_torch_does_not_know_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    with pytest.raises(swap.FormatError, match=r"tensor 'x' of F4"):
        open_tensors(tmp_path / "file")


@pytest.mark.parametrize(("data", "says"), [(b"four", "at most 3 bytes, found 4"), (b"\xff", "to be text")])
def test_what_is_no_text_or_too_long_is_said_to_be(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(swap.FormatError, match=says):
        tensor_file.read_text(tmp_path / "file", limit=3)
    (tmp_path / "file").write_bytes(b"two")
    assert tensor_file.read_text(tmp_path / "file", limit=3) == "two"


def test_a_file_cut_short_after_it_was_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(2000)}, path)
    file = open_tensors(path)
    os.truncate(path, 4000)
    with file.reading() as reader, pytest.raises(swap.FormatError, match="cut short"):
        reader.read(memoryview(bytearray(8000)), file.tensors["a"].offset)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(swap.FormatError, match="to be a file"):
            open_tensors(path)
    with pytest.raises(swap.SwapIOError, match="open"):
        open_tensors(tmp_path / "nothing")


class Faulty(SystemCalls):
    """Interrupts and shortens every transfer; fails the `at`th call of `operation` with `code`."""

    def __init__(self, operation: str = "", at: int = 0, code: int = 0) -> None:
        self.operation = operation
        self.left = at
        self.code = code
        self.turn = 0

    def strike(self, operation: str) -> None:
        if operation == self.operation:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.code, os.strerror(self.code))

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self.strike("read")
        self.turn += 1
        if self.turn % 3 == 0:
            raise InterruptedError
        return super().preadv(fd, view[:11], offset)

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        self.strike("write")
        self.turn += 1
        if self.turn % 3 == 0:
            raise InterruptedError
        return super().pwritev(fd, view[:11], offset)

    def fsync(self, fd: int) -> None:
        self.strike("sync")
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self.strike("rename")
        super().rename(source, target)


class FaultyOverANetwork(Faulty):
    """Closing a file, too, says that what was written to it is lost."""

    def close(self, fd: int) -> None:
        super().close(fd)
        self.strike("close")
        if self.left < 0:
            raise OSError(self.code, os.strerror(self.code))


def write_with(system: SystemCalls, folder: Path, stall_seconds: float = 60.0) -> None:
    with Draft(folder, system=system, stall_seconds=stall_seconds) as draft:
        writer = draft.tensors("model.safetensors", Given(TENSORS).specs())
        for name, data in Given(TENSORS).blocks():
            writer.write(name, data)
        writer.finish()
        draft.text("config.json", "{}")
        draft.finish()


def test_short_and_interrupted_transfers_are_continued(tmp_path: Path) -> None:
    write_with(Faulty(), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["x"], TENSORS["x"])
    file = open_tensors(tmp_path / "out" / "model.safetensors")
    out = bytearray(60)
    with file.reading(Faulty()) as reader:
        reader.read(memoryview(out), file.tensors["x"].offset)
    assert bytes(out) == bytes(bytes_of(TENSORS["x"]))


@pytest.mark.parametrize(
    ("where", "code"),
    half_of(
        [("write", 0), ("write", 1), ("write", 70), ("sync", 0), ("sync", 1), ("sync", 2), ("rename", 0)],
        [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS],
    ),
)
def test_a_fault_leaves_nothing_that_looks_whole(tmp_path: Path, where: tuple[str, int], code: int) -> None:
    operation, at = where
    full = code in (errno.ENOSPC, errno.EDQUOT)
    error = swap.SwapFullError if full and (operation, at) != ("sync", 2) else swap.SwapIOError  # the folder
    with pytest.raises(error) as caught:
        write_with(Faulty(operation, at, code), tmp_path / "out")
    assert "of 0 bytes" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("operation", "at"), [("write", 0), ("write", 1), ("sync", 0), ("close", 0)])
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT])
def test_a_fault_that_is_said_once_more_by_closing_is_told_as_the_first(
    tmp_path: Path, operation: str, at: int, code: int
) -> None:
    with pytest.raises(swap.SwapFullError if code == errno.EDQUOT else swap.SwapIOError):
        write_with(FaultyOverANetwork(operation, at, code), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_that_does_not_say_what_is_free_is_told_as_full(tmp_path: Path) -> None:
    class Silent(Faulty):
        def free_bytes(self, path: str) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with pytest.raises(
        swap.SwapFullError, match=r"of \d{3,} bytes: .* cannot be found out \(No space left on device\)"
    ):
        write_with(Silent("write", 1, errno.ENOSPC), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_name_may_be_as_long_as_names_are(tmp_path: Path) -> None:
    for letter, count in [("x", 255), ("\N{SNOWMAN}", 85)]:  # 255 bytes
        write_with(SystemCalls(), tmp_path / (letter * count))
        assert open_tensors(tmp_path / (letter * count) / "model.safetensors").tensors
    with pytest.raises(swap.SwapIOError, match="ENAMETOOLONG"):
        write_with(SystemCalls(), tmp_path / ("x" * 256))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"):
        save_pretrained(tmp_path / "out", Given(TENSORS, ValueError("broken")), {}, max_shard_nbytes=30)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_fault_while_reading(tmp_path: Path, code: int) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "file.safetensors")
    file = open_tensors(tmp_path / "file.safetensors")
    with file.reading(Faulty("read", 3, code)) as reader, pytest.raises(swap.SwapIOError, match=errno.errorcode[code]):
        reader.read(memoryview(bytearray(400)), file.tensors["a"].offset)


def test_a_real_limit_of_file_size(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(swap.SwapFullError, match=r"no room for .*model\.safetensors"):
            save_pretrained(tmp_path / "out", Given({"a": torch.zeros(4000)}), {}, max_shard_nbytes=10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def still_open(folder: Path) -> list[str]:
    """The files below a folder of which this process has a descriptor."""
    # By `realpath`, which says nothing of a descriptor that another thread has closed since it was listed.
    found = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return [path for path in found if str(folder) in path]


def test_a_file_whose_header_cannot_be_written_is_closed(tmp_path: Path) -> None:
    with pytest.raises(swap.SwapIOError, match=r"write of 16 bytes at offset 0 .*EIO"):
        TensorWriter(tmp_path / "file", [], system=Faulty("write", 0, errno.EIO))
    assert not still_open(tmp_path)


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_what_a_file_cannot_hold_is_refused_before_there_is_one(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(swap.FormatError, match=f"two tensors called '{names[-1]}'"):
        TensorWriter(tmp_path / "file", [TensorSpec(name, torch.float32, (2,)) for name in names])
    with pytest.raises(swap.FormatError, match=r"cannot hold 'z' of torch\.complex128"):
        TensorWriter(tmp_path / "file", [TensorSpec("z", torch.complex128, (2,))])
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_takes_nothing_is_said_to(tmp_path: Path) -> None:
    class Deaf(SystemCalls):
        def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
            return 0

    with pytest.raises(swap.SwapIOError, match="the device takes no more"):
        write_with(Deaf(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_interrupted_for_ever_is_given_up(tmp_path: Path) -> None:
    class Restless(SystemCalls):
        def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

        def sleep(self, seconds: float) -> None:
            pass

    with pytest.raises(swap.SwapIOError, match=r"write of .*EINTR"):
        write_with(Restless(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_tells_how_large_the_file_is_that_has_no_room(tmp_path: Path) -> None:
    with pytest.raises(swap.SwapFullError, match=r"config\.json' of 2 bytes: "):
        with Draft(tmp_path / "out", system=Faulty("write", 0, errno.ENOSPC), stall_seconds=60.0) as draft:
            draft.text("config.json", "{}")


def test_what_is_durable_is_told_with_its_checksums(tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.int8, (3,)), TensorSpec("b", torch.float32, (2,))]
    writer = TensorWriter(tmp_path / "file", specs, metadata={"format": "pt"})
    writer.write("a", memoryview(b"abc"))
    writer.write("b", memoryview(bytes(8)).cast("f"))  # in bytes, whatever its elements
    written = writer.finish()
    assert not still_open(tmp_path)
    data = (tmp_path / "file").read_bytes()
    assert written.nbytes == len(data)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert written.header == xxhash.xxh3_64_hexdigest(data[:-11])
    assert written.tensors == {"a": xxhash.xxh3_64_hexdigest(b"abc"), "b": xxhash.xxh3_64_hexdigest(bytes(8))}
    with safe_open(tmp_path / "file", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_bytes_missing_or_too_many_are_a_bug(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "file", [TensorSpec("a", torch.float32, (2,))])
    writer.write("a", memoryview(bytes(4)))
    with pytest.raises(tiermem.InvariantError, match="4 bytes of 8"):
        writer.finish()
    with pytest.raises(tiermem.InvariantError, match="12 bytes for a tensor of 8"):
        writer.write("a", memoryview(bytes(8)))
    writer.close()
    with pytest.raises(swap.SwapIOError, match="open"):
        TensorWriter(tmp_path / "file", [])


@given(sizes=st.lists(st.integers(0, 50), max_size=30), limit=st.integers(1, 60))
def test_shards_keep_order_and_size(sizes: list[int], limit: int) -> None:
    specs = [TensorSpec(str(number), torch.uint8, (size,)) for number, size in enumerate(sizes)]
    shards = plan_shards(specs, limit)
    assert [spec for shard in shards for spec in shard] == specs
    assert all(len(shard) == 1 or sum(spec.nbytes for spec in shard) <= limit for shard in shards)
    assert len(set(shard_names(len(shards)))) == len(shards)


NAMES = st.sampled_from(["a", "b", "base.a", "base.b", "base.base.a", "head", "c.d"])
SHAPES = st.sampled_from([(2,), (3,)])
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


@settings(max_examples=number_of(120, 300))
@given(
    model=st.dictionaries(NAMES, st.tuples(SHAPES, KINDS), min_size=1),
    file=st.dictionaries(NAMES, st.tuples(SHAPES, KINDS)),
    prefix=st.sampled_from(["", "base"]),
)
def test_matching_finds_or_names_everything(model: dict[str, Any], file: dict[str, Any], prefix: str) -> None:
    expected = [Expected((name,), shape, kind) for name, (shape, kind) in model.items()]
    tensors = {name: TensorInfo(name, kind, shape, 0) for name, (shape, kind) in file.items()}
    result = match(expected, tensors, Rules(prefix))
    assert set(result.found) | set(result.missing) == set(model)
    assert not set(result.found) & set(result.missing)
    assert all(len(pieces) == 1 for pieces in result.found.values())
    there = {own: pieces[0].info.name for own, pieces in result.found.items()}
    assert len(set(there.values())) == len(there), "one tensor for two parameters"
    if not prefix:
        assert set(result.surplus) == set(file) - set(model)
    for own, name in there.items():
        if not result.problems():
            assert tensors[name].shape == model[own][0]
    if model == file:
        assert result.problems() == ""


STREAMED = """
import gc, sys, torch
from torch import nn
import tiermem
from tiermem.cli.process_memory import peak_resident_bytes, resident_bytes
from tiermem.memory.heap import return_large_blocks
return_large_blocks()
folder = sys.argv[1]
with tiermem.deferred_init():
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(int(sys.argv[2]))))
config = tiermem.Config(device="cpu", host_memory="24MiB", swap_dirs=[folder + "/swap"], param_dtype="bfloat16")
before = resident_bytes()
runtime = tiermem.offload(model, config, weights=folder + "/" + sys.argv[3])
loaded = peak_resident_bytes() - before
runtime.save_pretrained(folder + "/saved", max_shard_size="10MB")
saved = peak_resident_bytes() - before
runtime.snapshot(folder + "/copy").wait()
runtime.close()
del runtime, model
gc.collect()  # the first budget
with tiermem.deferred_init():
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(int(sys.argv[2]))))
with tiermem.offload(model, config, resume=folder + "/copy") as runtime:
    assert torch.equal(runtime.parameter(model[3].weight).unique(), torch.tensor([3.0], dtype=torch.bfloat16))
print(loaded, saved, peak_resident_bytes() - before)
"""


def test_memory_while_streaming_is_the_budget_and_one_tensor(tmp_path: Path) -> None:
    units, each = 28, 1024 * 1024 * 4
    (tmp_path / "swap").mkdir()
    values = {f"{number}.weight": torch.full((1024, 1024), float(number)) for number in range(units)}
    values["5.weight"] += 1e-6  # not what bfloat16 holds: there are states, too
    save_file(values, tmp_path / "file.safetensors")
    arguments = [sys.executable, "-c", STREAMED, str(tmp_path), str(units), "file.safetensors"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    loaded, saved, copied = map(int, done.stdout.split())
    budget = 24 << 20
    assert loaded < budget + each + (24 << 20) < units * each // 2
    assert saved < budget + each + (24 << 20)
    assert copied < budget + 3 * each + (48 << 20)  # a page and a tile are read beside the budget
    assert copied < sum(path.stat().st_size for path in (tmp_path / "copy").iterdir())
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == units * each // 2
    last = load_file(tmp_path / "saved" / index["weight_map"]["27.weight"])["27.weight"]
    assert torch.equal(last, torch.full((1024, 1024), 27.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("operation", ["pwritev", "fsync", "rename"])
def test_a_drive_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    held, go = threading.Event(), threading.Event()
    only_what_is_held_is_silent(monkeypatch, held.is_set)

    class Silent(SystemCalls):
        pass

    def hold(*_: Any) -> None:
        held.set()
        go.wait(60)

    setattr(Silent, operation, hold)
    with pytest.raises(swap.SwapIOError, match="ETIMEDOUT"):
        write_with(Silent(), tmp_path / "out", stall_seconds=1.0)
    go.set()
    until = time.monotonic() + 60.0
    while list(tmp_path.iterdir()):  # a rename is waited for: it might have given the folder its name
        assert time.monotonic() < until
        time.sleep(0.01)
    file = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(3)}, file)
    Silent.preadv = hold
    held.clear()
    go.clear()
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "STALL_SECONDS", 0.05)
        with open_tensors(file).reading(Silent()) as reader, pytest.raises(swap.SwapIOError, match="ETIMEDOUT"):
            reader.read(memoryview(bytearray(12)), 80)
    go.set()


def test_a_name_that_is_given_late_is_that_of_a_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is given between the removals of two files, had they begun."""
    held, go, named = threading.Event(), threading.Event(), threading.Event()
    only_what_is_held_is_silent(monkeypatch, held.is_set)

    class Late(SystemCalls):
        def rename(self, source: str, target: str) -> None:
            held.set()
            go.wait(60)
            super().rename(source, target)
            named.set()

    remove = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        remove(path, missing_ok)
        go.set()
        named.wait(60)

    monkeypatch.setattr(Path, "unlink", unlink)
    with Draft(tmp_path / "out", stall_seconds=1.0, system=Late()) as draft:
        for name in ("a", "b"):
            draft.text(name, name)
        with pytest.raises(swap.SwapIOError, match=r"rename.*ETIMEDOUT"):
            draft.finish()
    go.set()
    assert named.wait(60)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b"]
    while any(thread.name == "tiermem-draft" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_drive_that_does_not_answer_when_a_folder_is_begun(tmp_path: Path) -> None:
    class Silent(SystemCalls):
        def ask(self, call: Callable[[], Any]) -> Any:
            go.wait(60)
            return call()

    go = threading.Event()
    with pytest.raises(swap.SwapIOError, match=r"out.*ETIMEDOUT"):
        write_with(Silent(), tmp_path / "out", stall_seconds=0.05)
    go.set()


def test_long_files_are_synced_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    class Noting(SystemCalls):
        def fdatasync(self, fd: int) -> None:
            synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(tensor_writer, "SYNC_NBYTES", 100)
    writer = TensorWriter(tmp_path / "file", [TensorSpec("a", torch.uint8, (350,))], system=Noting())
    for _ in range(7):
        writer.write("a", memoryview(bytes(50)))
    writer.finish()
    assert len(synced) == 4
    assert synced == sorted(synced)
