"""Shows a training run on stderr while it goes on.

Owns where and how often: the live view on a terminal, a line now and then elsewhere. Does not compute anything that the
report does not also hold. Guarantees that stdout stays untouched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live

from tiermem.cli.live import render
from tiermem.cli.process_memory import resident_bytes
from tiermem.cli.report import StepReport
from tiermem.figures import format_number
from tiermem.memory.sizes import format_bytes
from tiermem.stats import TierStatistics

SECONDS_BETWEEN_LINES = 10.0


class TrainProgress:
    """Shows one run; a context manager."""

    def __init__(self, console: Console, *, steps: int, host_memory: int, baseline: int, state_bytes: int) -> None:
        self.console = console
        self.steps = steps
        self.baseline = baseline
        self.budget_text = f"budget {format_bytes(host_memory)}, plain {format_bytes(state_bytes)}"
        self.last_line = float("-inf")
        self.done: list[StepReport] = []
        # Drawn after each step, not by a thread that would take the interpreter lock from training.
        self.live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
            self._draw(())
        return self

    def __exit__(self, *raised: object) -> None:
        if self.live is not None:
            self.live.stop()

    def step_done(self, step: StepReport, tiers: Sequence[TierStatistics] = ()) -> None:
        """Show the figures of a finished step, and how full the tiers are."""
        self.done.append(step)
        if self.live is not None:
            self._draw(tiers)
            return
        now = time.monotonic()
        if now - self.last_line >= SECONDS_BETWEEN_LINES or step.number == self.steps:
            self.last_line = now
            self.console.print(
                f"step {step.number}/{self.steps} {self.describe(step)}", highlight=False, soft_wrap=True
            )

    def describe(self, step: StepReport) -> str:
        """Return the figures of a step in one line."""
        read, written = (format_number(n / step.seconds / 1e9) for n in (step.bytes_read, step.bytes_written))
        return (
            f"loss {step.loss:.3f}  {format_number(step.tokens / step.seconds)} tok/s  "
            f"stall {100 * step.stall_seconds / step.seconds:.0f}%  "
            f"read {read} write {written} GB/s  {self._memory()}"
        )

    def _memory(self) -> str:
        return f"memory {format_bytes(max(0, resident_bytes() - self.baseline))} ({self.budget_text})"

    def _draw(self, tiers: Sequence[TierStatistics]) -> None:
        if self.live is not None:
            view = render(self.done, total=self.steps, tiers=tiers, memory=self._memory())
            self.live.update(view, refresh=True)
