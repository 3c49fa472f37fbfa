"""The ranks of a command that torchrun has started several times.

Owns the joining and leaving of the process group, and this process's part of a batch. Does not know models. Guarantees
that without torchrun nothing of it happens, and that only rank 0 has something to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console

from tiermem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """One of `size` processes, number `rank`."""

    rank: int = 0
    size: int = 1

    def check_rows(self, rows: int) -> None:
        """Raise `ConfigError` unless a batch of `rows` rows can be divided evenly."""
        if rows % self.size:
            raise ConfigError(
                f"--batch {rows} cannot be divided over {self.size} ranks; give a multiple of {self.size}"
            )

    def progress(self) -> Console:
        """Where progress is shown: stderr of rank 0."""
        return Console(stderr=True, quiet=self.rank > 0)

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


@contextmanager
def launched() -> Iterator[Launch]:
    """Join the processes that torchrun has started, if it has, and leave them at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield Launch()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Launch(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
