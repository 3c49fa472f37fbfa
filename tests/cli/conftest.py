"""A stand-in for the core, in plain PyTorch, so that the command line is tested without paging anything."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tiermem.cli import beginning, machines, measure
from tiermem.cli.measure_layer import LayerShape
from tiermem.config import Config
from tiermem.overlap import OverlapReport, explain_stalls
from tiermem.planner import predict
from tiermem.stats import READ_EDGE, WRITE_EDGE, EdgeStatistics, Statistics, StepStatistics, TierStatistics


class PlainCommit:
    failed = False

    def wait(self) -> None:
        pass


class PlainRuntime:
    def __init__(self, config: Config, committed: dict[str, Any] | None = None) -> None:
        self.config = config
        self.calls: list[str] = []
        self.extras: list[Any] = []
        self.committed = committed

    def committed_optimizer_state(self) -> dict[str, Any]:
        return self.committed["optimizer"] if self.committed else {}

    def statistics(self) -> Statistics:
        edges = (EdgeStatistics(READ_EDGE, nbytes=30), EdgeStatistics(WRITE_EDGE, nbytes=20))
        last = StepStatistics(seconds=1.0, stall_seconds=0.0, edges=edges)
        return Statistics(last=last, tiers=(TierStatistics("HOST", 1 << 20, 0, 0),))

    def timeline(self, path: Path | None = None) -> OverlapReport:
        if path is not None:
            path.write_text("[]")
        return explain_stalls([])

    def commit(self, extra: Any) -> PlainCommit:
        self.calls.append(f"commit {extra['step']}")
        self.extras.append(extra["batches"])
        Path(self.config.swap_dirs[0], "committed").touch()
        return PlainCommit()

    def close(self, *, remove: bool | None = None) -> None:
        self.calls.append(f"close remove={remove}")


class PlainCore:
    """What the stand-in was asked for."""

    def __init__(self) -> None:
        self.runtimes: list[PlainRuntime] = []
        self.resumes: list[object] = []
        self.error: Exception | None = None
        self.committed: dict[str, Any] | None = None

    def offload(
        self, model: torch.nn.Module, config: Config, *, weights: object = None, resume: object = False
    ) -> PlainRuntime:
        if self.error is not None:
            raise self.error
        self.resumes.append(resume)
        committed = self.committed and self.committed | {"optimizer": PlainAdamW(model.parameters()).state_dict()}
        self.runtimes.append(PlainRuntime(config, committed))
        return self.runtimes[-1]


class PlainAdamW(torch.optim.AdamW):
    def __init__(self, params: Any, *, max_grad_norm: float = 1.0, **rest: Any) -> None:
        super().__init__(params, **rest)


@pytest.fixture
def plain_core(monkeypatch: pytest.MonkeyPatch) -> PlainCore:
    core = PlainCore()
    monkeypatch.setattr(tiermem, "Config", Config, raising=False)
    monkeypatch.setattr(tiermem, "Runtime", PlainRuntime, raising=False)
    monkeypatch.setattr(tiermem, "AdamW", PlainAdamW, raising=False)
    monkeypatch.setattr(tiermem, "deferred_init", contextlib.nullcontext, raising=False)
    monkeypatch.setattr(tiermem, "offload", core.offload, raising=False)
    monkeypatch.setattr(beginning, "times_float32", lambda dtype: 1.0)  # this processor is any
    return core


@pytest.fixture
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine, not for long, for answers that do not depend on how fast it is."""
    monkeypatch.setattr(beginning, "times_float32", lambda dtype: 1.0)
    monkeypatch.setattr(machines, "with_rates_for", lambda machine, *_, **__: machine)  # see test_measure_workload.py
    monkeypatch.setattr(measure, "ANY_LAYER", LayerShape(rows=1, seq=16, width=64, mlp=64))
    monkeypatch.setattr(measure, "_TILES", 1)


@pytest.fixture
def nothing_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan, nothing of what twice as much of each thing would bring: five more simulations, of seven."""
    monkeypatch.setattr(predict, "_relief", lambda *_: ())
