"""Teams of OpenMP threads: one at a time, however many computations take turns."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from doubles_training import MIB, config_for
from torch import nn

import tiermem
from tiermem.runtime import openmp

LARGE = 1 << 20  # elements: above what torch computes with one thread

needs_gnu = pytest.mark.skipif(
    openmp._pause() is None, reason="OpenMP is not GNU's here, or there is none: teams are left alone"
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    known = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(known)


def native_threads() -> int:
    """Threads of this process that Python has not made."""
    made = {thread.native_id for thread in threading.enumerate()}
    return sum(int(name) not in made for name in os.listdir("/proc/self/task"))


def compute() -> torch.Tensor:
    return torch.ones(LARGE).mul_(2).add_(1)


@needs_gnu
def test_a_team_ends_and_comes_back_with_the_next_operation() -> None:
    openmp.end_team()
    without = native_threads()
    assert float(compute().sum()) == 3 * LARGE
    assert native_threads() == without + 1
    openmp.end_team()
    assert native_threads() == without
    assert float(compute().sum()) == 3 * LARGE
    assert native_threads() == without + 1
    openmp.end_team()
    openmp.end_team()
    assert native_threads() == without, "nothing to end is no error"


@needs_gnu
def test_micro_batches_in_lockstep_have_one_team_together(tmp_path) -> None:
    torch.manual_seed(0)
    seen: list[int] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                compute()
                values = layer(values)
                compute()
                seen.append(native_threads())
            return values

    model = Watched()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, "forward"), coalesce=0) as runtime:
        openmp.end_team()
        without = native_threads()
        runtime.forward_backward([torch.randn(2, 64) for _ in range(4)], lambda batch: model(batch).sum())
        assert len(seen) == 16
        assert max(seen) <= without + 1


def test_with_another_openmp_nothing_happens(monkeypatch) -> None:
    class Loaded:
        omp_pause_resource_all = __kmpc_fork_call = None

    monkeypatch.setattr(openmp.ctypes, "CDLL", lambda name: Loaded())
    openmp._pause.cache_clear()
    try:
        openmp.end_team()
        assert openmp._pause() is None
    finally:
        openmp._pause.cache_clear()
