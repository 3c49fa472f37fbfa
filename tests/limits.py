"""Runs a child process under a memory limit that the kernel enforces; skips where none can be set, saying why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from memory_group import LimitedRun, run_in_group, why_not

__all__ = ["LimitedRun", "run_limited", "run_python_limited"]


def run_limited(
    arguments: Sequence[str], limit_bytes: int, *, timeout_seconds: float = 300, cwd: Path | None = None
) -> LimitedRun:
    """Run a program under a memory limit; skips the calling test, saying why, where none can be set."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return run_in_group(arguments, limit_bytes, timeout_seconds=timeout_seconds, cwd=cwd)


def run_python_limited(
    code: str, limit_bytes: int, *, timeout_seconds: float = 300, cwd: Path | None = None
) -> LimitedRun:
    """Run Python code, in this interpreter's program, under a memory limit."""
    return run_limited([sys.executable, "-c", code], limit_bytes, timeout_seconds=timeout_seconds, cwd=cwd)
