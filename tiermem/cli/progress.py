"""The live view of a training run on stderr.

Owns what is shown while training: a bar with figures on a terminal, a line now and then elsewhere. Does not compute
anything that the report does not also hold. Guarantees that stdout stays untouched.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tiermem.cli.process_memory import resident_bytes
from tiermem.cli.report import StepReport
from tiermem.memory.sizes import format_bytes

SECONDS_BETWEEN_LINES = 10.0


class TrainProgress:
    """Shows one run; a context manager."""

    def __init__(self, console: Console, *, steps: int, host_memory: int, baseline: int, state_bytes: int) -> None:
        self.console = console
        self.steps = steps
        self.baseline = baseline
        self.budget_text = f"budget {format_bytes(host_memory)}, plain {format_bytes(state_bytes)}"
        self.last_line = float("-inf")
        self.done = 0
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("first step: learning the order of accesses", total=steps)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step_done(self, step: StepReport) -> None:
        """Show the figures of a finished step."""
        self.done += 1
        figures = self.describe(step)
        self.bar.update(self.task, advance=1, description=figures)
        now = time.monotonic()
        is_due = now - self.last_line >= SECONDS_BETWEEN_LINES or self.done == self.steps
        if not self.console.is_terminal and is_due:
            self.last_line = now
            self.console.print(f"step {self.done}/{self.steps} {figures}", highlight=False, soft_wrap=True)

    def describe(self, step: StepReport) -> str:
        """Return the figures of a step in one line."""
        growth = format_bytes(max(0, resident_bytes() - self.baseline))
        read, written = (nbytes / step.seconds / 1e9 for nbytes in (step.bytes_read, step.bytes_written))
        return (
            f"loss {step.loss:.3f}  {step.tokens / step.seconds:,.0f} tok/s  "
            f"stall {100 * step.stall_seconds / step.seconds:.0f}%  "
            f"read {read:.2f} write {written:.2f} GB/s  "
            f"memory {growth} ({self.budget_text})"
        )
