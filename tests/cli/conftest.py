"""A stand-in for the core, in plain PyTorch, so that the command line is tested without paging anything."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import swap
import tiermem


@dataclasses.dataclass(frozen=True)
class PlainConfig:
    swap_dirs: tuple[str, ...] = ()
    host_memory: int | str = "auto"
    device_memory: int | str = "auto"
    param_dtype: str = "bfloat16"
    update: str = "auto"

    @classmethod
    def load(cls, path: Path) -> PlainConfig:
        return cls(**json.loads(path.read_text()))


class PlainRuntime:
    def __init__(self, config: PlainConfig) -> None:
        self.config = dataclasses.replace(config, host_memory=1 << 20)
        self.calls: list[str] = []

    def statistics(self) -> Any:
        return SimpleNamespace(last=SimpleNamespace(seconds=1.0, stall_seconds=0.25, bytes_read=30, bytes_written=20))

    def timeline(self, path: Path) -> None:
        path.write_text("[]")

    def close(self, *, remove: bool = True) -> None:
        self.calls.append(f"close remove={remove}")


class PlainCore:
    """What the stand-in was asked for."""

    def __init__(self) -> None:
        self.runtimes: list[PlainRuntime] = []
        self.resumes: list[object] = []
        self.error: Exception | None = None

    def offload(self, model: torch.nn.Module, config: PlainConfig, *, resume: object = False) -> PlainRuntime:
        if self.error is not None:
            raise self.error
        self.resumes.append(resume)
        self.runtimes.append(PlainRuntime(config))
        return self.runtimes[-1]


class PlainAdamW(torch.optim.AdamW):
    def __init__(self, params: Any, *, max_grad_norm: float, **rest: Any) -> None:
        super().__init__(params, **rest)


class SwapError(Exception):
    pass


@pytest.fixture
def plain_core(monkeypatch: pytest.MonkeyPatch) -> PlainCore:
    core = PlainCore()
    monkeypatch.setattr(tiermem, "Config", PlainConfig, raising=False)
    monkeypatch.setattr(tiermem, "Runtime", PlainRuntime, raising=False)
    monkeypatch.setattr(tiermem, "AdamW", PlainAdamW, raising=False)
    monkeypatch.setattr(tiermem, "deferred_init", contextlib.nullcontext, raising=False)
    monkeypatch.setattr(tiermem, "offload", core.offload, raising=False)
    if not hasattr(swap, "SwapError"):
        monkeypatch.setattr(swap, "SwapError", SwapError, raising=False)
    return core
