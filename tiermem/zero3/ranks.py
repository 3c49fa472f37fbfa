"""The ranks of a run, over torch.distributed.

Owns the process groups of one run: one for short messages (gloo), one for tensors (gloo on CPUs, NCCL on GPUs). Does
not know units or the order of operations. Guarantees that no operation waits longer than the timeout, and that one
which fails because of another rank raises a TiermemError naming the ranks that are gone, with their reason if they
left one.

Who is gone. A rank that fails or leaves writes its reason into the store of torch.distributed before it closes its
connections; the others then get an error from the transport, write a reason of their own, and look whose is missing.
Under torchrun the store is kept by the agent, so it outlives any rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import itertools
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tiermem.errors import ConfigError, TiermemError
from tiermem.zero3.words import LONGEST_TEXT, Words

_LOOK_SECONDS = 0.0002  # how often to ask a device whether an exchange has ended
_RUNS = itertools.count()  # tells the runs of one process apart in the store
_MADE = Counter[tuple[str, tuple[int, ...]]]()  # groups of some of the processes, by backend and members


class Ranks:
    """The processes of one run. Not thread-safe: one thread issues (see `conductor`)."""

    def __init__(
        self,
        members: Sequence[int] | None,
        *,
        timeout: float,
        device: torch.device,
        name: str,
        common: bool | None = None,
    ) -> None:
        """`members`: global ranks, None: all. Every one of them calls this at the same time.

        `timeout`: seconds without an answer after which an operation fails. `name`: of this group, no other one of its
        first rank's; the rest may give others. `common`: whether all processes of the program take part in making it;
        None: if all are members.
        """
        self._members = list(range(dist.get_world_size())) if members is None else list(members)
        if dist.get_rank() not in self._members:
            raise ConfigError(f"mesh= names ranks {self._members}; this process is rank {dist.get_rank()}")
        self.rank = self._members.index(dist.get_rank())
        self.size = len(self._members)
        self._timeout = timeout
        self._common = self.size == dist.get_world_size() if common is None else common
        self._messages: Any = None
        self._tensors: Any = None
        self._device = device
        self._words = Words(f"tiermem/{name}", self.rank, self.size)  # until the first one's name is known
        self._closed = False
        self._whole: Callable[[RuntimeError], TiermemError] | None = None
        self._parts: list[Ranks] = []
        try:
            self._messages = self._tensors = _group("gloo", self._members, timeout, common=self._common)
            if device.type == "cuda":
                self._tensors = _group("nccl", self._members, timeout, common=self._common)
            # The first one's name: others may have had other runs before, over some of the ranks only.
            self._words.name = f"tiermem/{self.tell_text(name)[0]}/{'-'.join(map(str, self._members))}"
        except BaseException:
            self.close()
            raise

    def part(self, rows: Sequence[Sequence[int]]) -> Ranks:
        """Cut them into rows, of ascending numbers; the line of this rank's row. All of them call this together.

        Who is lost there is lost here, and both are closed together.
        """
        for row in rows:
            members = [self._members[place] for place in row]
            if self.rank in row:
                part = Ranks(
                    members, timeout=self._timeout, device=self._device, name=self._words.name, common=self._common
                )
            elif self._common:
                for backend in ("gloo", "nccl") if self._device.type == "cuda" else ("gloo",):
                    _group(backend, members, self._timeout, common=True)
        part._whole = self._lost
        self._parts.append(part)
        return part

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """See `Collectives`."""
        all_parts, own = _apart(whole), _apart(shard)
        self._call(lambda: _gather_into()(all_parts, own, group=self._line(whole)))

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, senders: Sequence[bool]) -> None:
        """See `Collectives`."""
        received, sent = _apart(received), _apart(sent)
        length = received.numel() // self.size
        sending = senders[self.rank]
        if all(senders):
            self._call(lambda: dist.all_to_all_single(received, sent, group=self._line(received)))
            return
        packed = received[: length * sum(senders)]
        given = sent if sending else received[:0]
        incoming = [length if each else 0 for each in senders]
        outgoing = [length if sending else 0] * self.size
        self._call(lambda: dist.all_to_all_single(packed, given, incoming, outgoing, group=self._line(received)))
        # To their places, the last ones first: none lies before the place it came to, so nothing is overwritten.
        for index, sender in reversed(list(enumerate(index for index, each in enumerate(senders) if each))):
            if index != sender:
                received[sender * length : (sender + 1) * length] = received[index * length : (index + 1) * length]

    def broadcast(self, values: torch.Tensor) -> None:
        """See `Collectives`."""
        flat = values if values.is_contiguous() else values.contiguous()
        data = flat.reshape(-1).view(torch.uint8)  # any dtype
        if data.numel():
            self._call(lambda: dist.broadcast(data, src=self._members[0], group=self._messages))
        if flat is not values:
            values.copy_(flat)

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `Collectives`."""
        return self._tell(torch.tensor(list(numbers), dtype=torch.int64, device="cpu"))

    def tell_floats(self, numbers: torch.Tensor) -> list[list[float]]:
        """See `Collectives`."""
        return self._tell(self._arrived(numbers) if numbers.device.type == "cuda" else numbers)

    def tell_text(self, text: str) -> list[str]:
        """See `Collectives`."""
        data = text.encode()[:LONGEST_TEXT]
        told = self.tell([len(data), *data, *[0] * (LONGEST_TEXT - len(data))])
        return [bytes(each[1 : 1 + each[0]]).decode(errors="replace") for each in told]

    def close(self, reason: str | None = None) -> None:
        """See `Collectives`. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if reason is not None and self._whole is None:
            self._words.leave(reason)
        for part in self._parts:
            part.close(reason)
        groups = {id(each): each for each in (self._messages, self._tensors) if each is not None}
        if self._device.type == "cuda" and reason is not None and self._tensors is not None:
            with contextlib.suppress(RuntimeError):
                self._tensors.abort()  # an exchange that waits for the dead would keep the device's streams for ever
        self._messages = self._tensors = None  # the connections end with the last reference, and others see that
        while groups:
            with contextlib.suppress(RuntimeError, ValueError):  # gone with the process group of the program
                dist.destroy_process_group(groups.popitem()[1])

    def _line(self, values: torch.Tensor) -> Any:
        """Where tensors of this device travel: NCCL carries what is on GPUs, and nothing else."""
        return self._tensors if values.device.type == self._device.type else self._messages

    def _arrived(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory of what the device is still to come up with, for which nobody waits for ever.

        An exchange on GPUs has only been asked for when its call returns. If another rank dies in the middle of it, it
        never ends; here, and only here, this is noticed.
        """
        here = torch.empty_like(values, device="cpu", pin_memory=True)
        here.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(values.device))  # the current device may be another one
        until = time.monotonic() + self._timeout
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > until:
                raise self._lost(RuntimeError(f"an exchange on the device did not end within {self._timeout:g} s"))
            time.sleep(_LOOK_SECONDS)
        return here

    def _tell(self, numbers: torch.Tensor) -> list[list[Any]]:
        if not numbers.numel():
            return [[] for _ in range(self.size)]
        told = torch.empty(self.size * numbers.numel(), dtype=numbers.dtype, device="cpu")
        self._call(lambda: _gather_into()(told, numbers, group=self._messages))
        return [each.tolist() for each in told.view(self.size, -1)]

    def _call(self, operation: Callable[[], Any]) -> None:
        if self._closed:
            raise TiermemError("this rank has left the run; offload the model again to go on")
        try:
            operation()
        except RuntimeError as error:  # what torch.distributed raises, whatever has happened
            # Connections end with the last reference to their group, and the frames that have failed keep one. Whoever
            # has no connection to the dead, only one to this rank, must not have to wait for its program's end.
            traceback.clear_frames(error.__traceback__)
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> TiermemError:
        """Who is gone, and why, as far as anybody says."""
        if self._whole is not None:
            return self._whole(error)
        if self._device.type == "cuda":
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
        else:
            first = str(error).split(". This is typically")[0].rpartition("] ")[2] or type(error).__name__
        self.close(f"lost another rank ({first})")
        words = self._words.read(self._timeout)
        told = [f"rank {rank}: {word}" for rank, word in words.items() if not word.startswith("lost another rank")]
        silent = [rank for rank in range(self.size) if rank not in words and rank != self.rank]
        if silent:
            told.append(
                f"no word from rank {', '.join(map(str, silent))}: it has died, hangs, is busy or waits elsewhere for "
                f"longer than stall_timeout={self._timeout:g} s (as where it has generated fewer tokens than others: "
                "model.generate(synced_gpus=True))"
            )
        lost = [f"rank {rank} has {word}" for rank, word in words.items()]
        why = "; ".join(
            told or [*lost, f"whoever computes for longer than stall_timeout={self._timeout:g} s looks dead"]
        )
        return TiermemError(f"rank {self.rank} cannot go on without the others ({first}): {why}")


def _group(backend: str, members: Sequence[int], timeout: float, *, common: bool) -> Any:
    """A process group; `common`: whether all processes of the program take part in making it, or only its members."""
    wait = dt.timedelta(seconds=timeout)
    try:
        if common:
            return dist.new_group(list(members), timeout=wait, backend=backend)
        return _group_of_members(backend, tuple(members), wait)
    except RuntimeError as error:  # what torch.distributed raises, whatever has happened
        raise TiermemError(
            f"rank {dist.get_rank()} was not joined by all of ranks {', '.join(map(str, members))} ({error}): all of "
            "them call offload, in the same order, with the same mesh=; one may have failed before it, or come later "
            f"than stall_timeout={timeout:g} s allows, or than init_process_group(timeout=) does"
        ) from error


def _group_of_members(backend: str, members: tuple[int, ...], wait: dt.timedelta) -> Any:
    """A process group in whose making only its members take part, under a name that all of them come to.

    That of `new_group(use_local_synchronization=True)` depends on all groups that this process belongs to, in which the
    members may differ; and since torch 2.14 it counts, for its members alone, in the names of groups of all processes.
    """
    c10d: Any = dist.distributed_c10d  # its new_group takes no name
    whole: Any = dist.group.WORLD
    place = {member: place for place, member in enumerate(members)}
    # Of a whole group that is bound to devices (`init_process_group(device_id=)`) torch makes NCCL's groups by dividing
    # its own, which waits for all processes.
    device, whole.bound_device_id = whole.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(  # noqa: SLF001
            len(members),
            place[dist.get_rank()],
            list(members),
            dist.Backend(backend),
            c10d._get_default_store(),  # noqa: SLF001
            f"tiermem/{backend}/{'-'.join(map(str, members))}/{_MADE[backend, members]}",
            timeout=wait,
            device_id=device,
        )
    finally:
        whole.bound_device_id = device
    c10d._world.pg_group_ranks[group] = place  # noqa: SLF001
    _MADE[backend, members] += 1
    return group


def next_name() -> str:
    """A name for the groups of this process's next run.

    Not that of an earlier attempt of the same program under torchrun, which may have had the same store.
    """
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_RUNS)}"


def rows_of(mesh: Any) -> list[list[int]]:
    """The global ranks of a process group or a DeviceMesh, by copy of the model and part of it.

    As `torch.distributed.fsdp.fully_shard` reads a mesh: of one dimension, the ranks share one copy; of two, the first
    counts copies and the last divides each of them, and the dimensions have names. Raises ConfigError for all else.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return [list(dist.get_process_group_ranks(mesh))]
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "mesh"):
        raise ConfigError(f"mesh= expects a DeviceMesh or a process group, found {type(mesh).__name__}")
    if mesh.ndim == 1:
        return [list(dist.get_process_group_ranks(mesh.get_group()))]
    found = f"a mesh of shape {list(mesh.mesh.shape)} with the dimensions {mesh.mesh_dim_names}"
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise ConfigError(
            "mesh= expects one dimension, over which a copy of the model is divided, or two with names, [copies, "
            f"parts of each], such as init_device_mesh(kind, (2, 4), mesh_dim_names=('replicate', 'shard')); found "
            f"{found}. Take the dimensions for this model out of a larger mesh: mesh['replicate', 'shard']"
        )
    rows: list[list[int]] = mesh.mesh.tolist()
    if len(rows) > 1 and len(rows[0]) == 1:
        raise ConfigError(
            f"mesh= of two dimensions expects at least two ranks in the last one, which share a copy; found {found}. "
            "For a copy of the parameters on every rank use stage=1 or 2 and a mesh of one dimension"
        )
    if any(list(line) != sorted(line) for line in (*rows, *zip(*rows, strict=True))):
        raise ConfigError(f"mesh= expects ranks that ascend along each dimension, found {rows}")
    return rows


def _gather_into() -> Callable[..., Any]:
    # The same function, renamed in torch 2.13; the old name warns there.
    found: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return found


def _apart(values: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor that shares no storage with `values` (1-D, contiguous), on CPUs.

    The transport holds on to what it was given for a moment longer than its answer takes. Holders of frames are counted
    ("Leak guard" in gather.py), and all ranks must come to the same count.
    """
    if values.device.type != "cpu" or not values.numel():
        return values
    area = (ctypes.c_char * (values.numel() * values.element_size())).from_address(values.data_ptr())
    return torch.frombuffer(area, dtype=values.dtype)
