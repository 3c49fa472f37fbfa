"""The figures of each step as TensorBoard scalars.

Owns the names of the scalars. Does not compute them. Guarantees that a missing TensorBoard is said in one line before
training begins, and that without a directory nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiermem.cli.report import StepReport
from tiermem.errors import ConfigError


def require_scalars(directory: Path | None) -> None:
    """Raise ConfigError if a directory is given and TensorBoard is not installed."""
    if directory is not None:
        _writer_class()


@contextmanager
def open_scalars(directory: Path | None) -> Iterator[Any | None]:
    """Yield a writer into `directory`, or None without one. Raises ConfigError if TensorBoard is not installed."""
    if directory is None:
        yield None
        return
    writer = _writer_class()(str(directory))
    try:
        yield writer
    finally:
        writer.close()


def _writer_class() -> Callable[[str], Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs TensorBoard: pip install 'tiermem[tensorboard]'") from error
    return SummaryWriter


def add_step(writer: Any, step: StepReport) -> None:
    """Add the figures of a step to a `SummaryWriter` of TensorBoard's."""
    figures = {
        "loss": step.loss,
        "tokens per second": step.tokens / step.seconds,
        "seconds/step": step.seconds,
        "seconds/stall": step.stall_seconds,
    }
    figures |= {f"gigabytes per second/{edge.name}": edge.nbytes / step.seconds / 1e9 for edge in step.edges}
    for name, value in figures.items():
        writer.add_scalar(name, value, step.number)
