"""The ranks of a command that torchrun has started several times.

Owns the joining and leaving of the process group, and this process's part of a batch. Does not know models. Guarantees
that without torchrun nothing of it happens, and that only rank 0 has something to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tiermem.cli.terminal import terminal
from tiermem.errors import ConfigError, TiermemError


@dataclass(frozen=True, slots=True)
class Launch:
    """One of `size` processes, number `rank`.

    `neighbours` of them, itself among them, are on this machine, of which it is number `local`.
    """

    rank: int = 0
    size: int = 1
    neighbours: int = 1
    local: int = 0

    def require_divisible(self, rows: int) -> None:
        """Raise `ConfigError` unless a batch of `rows` rows can be divided evenly."""
        if rows % self.size:
            raise ConfigError(
                f"--batch {rows} cannot be divided over {self.size} ranks; give a multiple of {self.size}"
            )

    def on_machine(self, nbytes: int) -> int:
        """The part of `nbytes`, divided over all processes, that those on this machine have together."""
        return -(-nbytes * self.neighbours // self.size)

    def progress(self) -> Console:
        """Where progress is shown: stderr of rank 0."""
        return terminal(stderr=True, quiet=self.rank > 0)

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """This process's rows of a batch, [rows, length]."""
        return batch.tensor_split(self.size)[self.rank]

    def mean(self, value: float) -> float:
        """The mean of a number over all processes; they all call this."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.size

    def once(self, make: Callable[[], str]) -> str:
        """What the first process of this machine has made by `make`, on all of several; they all call this.

        Raises ConfigError on all if `make` does so on one, TiermemError if one of them is gone.
        """
        own = ("", "")
        if self.local == 0:
            try:
                own = (make(), "")
            except ConfigError as error:
                own = ("", str(error))
        told = [own] * self.size
        try:
            dist.all_gather_object(told, own)
        except RuntimeError as error:
            raise TiermemError(f"rank {self.rank} cannot begin without the others: {error}") from error
        for _, refusal in told:
            if refusal:
                raise ConfigError(refusal)
        return told[self.rank - self.local][0]


@contextmanager
def launched() -> Iterator[Launch]:
    """Join the processes that torchrun has started, if it has, and leave them at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield Launch()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(rendezvous("env://"))
        # After a restart the store may be the one before, with the addresses of processes that are gone.
        attempt = PrefixStore(f"tiermem/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:  # ValueError: part of what torchrun would have set is missing
        own = os.environ.get("RANK", "?")
        raise TiermemError(f"rank {own} cannot join the others, one of which may have ended: {error}") from error
    try:
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        yield Launch(rank, size, neighbours, local=int(os.environ.get("LOCAL_RANK", rank % neighbours)))
    finally:
        dist.destroy_process_group()
