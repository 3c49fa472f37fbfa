"""The figures of each step as TensorBoard scalars.

Owns the names of the scalars. Does not compute them. Guarantees that a missing TensorBoard is said in one line before
training begins, and that without a directory nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tiermem.cli.report import StepReport
from tiermem.errors import ConfigError


class Scalars(Protocol):
    """What TensorBoard's `SummaryWriter` offers, as far as it is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Add a point to a curve."""

    def close(self) -> None:
        """Write what is left."""


def require_scalars(directory: Path | None) -> None:
    """Raise ConfigError if a directory is given and TensorBoard is not installed."""
    if directory is not None:
        _writer_class()


@contextmanager
def open_scalars(directory: Path | None) -> Iterator[Scalars | None]:
    """Yield a writer into `directory`, or None without one. Raises ConfigError if TensorBoard is not installed."""
    if directory is None:
        yield None
        return
    writer = _writer_class()(str(directory))
    try:
        yield writer
    finally:
        writer.close()


def _writer_class() -> Callable[[str], Scalars]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs TensorBoard: pip install 'tiermem[tensorboard]'") from error
    return SummaryWriter


def add_step(writer: Scalars, step: StepReport) -> None:
    """Add the figures of a step."""
    figures = {
        "loss": step.loss,
        "tokens per second": step.tokens / step.seconds,
        "seconds/step": step.seconds,
        "seconds/stall": step.stall_seconds,
    }
    figures |= {f"gigabytes per second/{edge.name}": edge.nbytes / step.seconds / 1e9 for edge in step.edges}
    for name, value in figures.items():
        writer.add_scalar(name, value, step.number)
