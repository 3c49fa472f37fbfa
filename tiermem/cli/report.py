"""What a training run did, as numbers, as a table and as one sentence.

Owns the records of a run and their JSON, whose names are a contract (README.md). Does not measure anything. Guarantees
that the sentence and the table say no more than the numbers do.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass

from rich.table import Table

from tiermem.figures import format_number, format_seconds
from tiermem.look_ahead import LookAhead
from tiermem.memory.sizes import format_bytes
from tiermem.overlap import OverlapReport
from tiermem.stats import EdgeStatistics, TierStatistics
from tiermem.wear import Wear

# AdamW with everything in memory, per parameter: fp32 weight, gradient and two moments; or, in mixed precision,
# 2 bytes of weight, 2 of gradient and 12 of master weight and moments.
STATE_BYTES_PER_PARAMETER = 16
_LAST = 5  # steps whose mean is the loss at last


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step; seconds of wall clock, bytes between memory and swap files.

    `number` from 1, earlier runs that this one resumes included; `edges`: what moved over each.
    """

    loss: float
    seconds: float
    stall_seconds: float
    bytes_read: int
    bytes_written: int
    tokens: int
    number: int = 0
    edges: tuple[EdgeStatistics, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainReport:
    """A whole run. The field names are those of `tiermem train --json`.

    `timeline_error`: why the timeline that was asked for could not be written.
    """

    model: str
    parameters: int
    state_bytes: int
    host_memory: int
    baseline_rss_bytes: int
    peak_rss_bytes: int
    steps: tuple[StepReport, ...]
    wear: Wear | None = None
    tiers: tuple[TierStatistics, ...] = ()
    overlap: OverlapReport | None = None
    look_ahead: LookAhead | None = None
    timeline_error: str | None = None

    def to_json(self) -> str:
        """Return the run as one JSON object; a loss that is not finite, which JSON cannot hold, is null."""
        values = dataclasses.asdict(dataclasses.replace(self, overlap=None))
        values["overlap"] = self.overlap.to_dict() if self.overlap is not None else None
        for step in values["steps"]:
            step["loss"] = step["loss"] if math.isfinite(step["loss"]) else None
        return json.dumps(values, allow_nan=False)

    def to_table(self) -> Table:
        """Return the run as a table for a terminal."""
        table = Table(title=f"{self.model}: {self.parameters:,} parameters", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_row("state that plain AdamW keeps in memory", format_bytes(self.state_bytes))
        table.add_row("host memory budget", format_bytes(self.host_memory))
        growth = format_bytes(self.peak_rss_bytes - self.baseline_rss_bytes)
        table.add_row("peak memory of the process", f"{format_bytes(self.peak_rss_bytes)}, {growth} above its imports")
        if self.steps:
            self._add_steps(table)
        return table

    def _add_steps(self, table: Table) -> None:
        seconds = sum(step.seconds for step in self.steps)
        stalled = sum(step.stall_seconds for step in self.steps)
        read = sum(step.bytes_read for step in self.steps)
        written = sum(step.bytes_written for step in self.steps)
        tokens = sum(step.tokens for step in self.steps)
        typical = statistics.median(step.seconds for step in self.steps)
        table.add_row("steps", f"{len(self.steps)} in {format_seconds(seconds)}, median {format_seconds(typical)}")
        table.add_row("tokens per second", format_number(tokens / seconds))
        table.add_row("computation waited", f"{100 * stalled / seconds:.0f} % of the time")
        table.add_row("read from swap", f"{format_bytes(read)}, {format_number(read / seconds / 1e9)} GB/s")
        table.add_row("written to swap", f"{format_bytes(written)}, {format_number(written / seconds / 1e9)} GB/s")
        if self.look_ahead is not None:
            table.add_row("look-ahead", self.look_ahead.describe())
        if self.wear is not None:
            table.add_row("wear of the drives", describe_wear(self.wear))
        first, last = self.loss_span()
        averaged = min(_LAST, len(self.steps))
        mean = f" (mean of {averaged} steps)" if averaged > 1 else ""
        table.add_row("loss", f"{first:.3f} at first, {last:.3f} at last{mean}")

    def loss_span(self) -> tuple[float, float]:
        """Return the loss of the first step and the mean of the last few, which differ in their batches."""
        last = [step.loss for step in self.steps[-_LAST:]]
        return self.steps[0].loss, statistics.fmean(last)

    def to_sentence(self) -> str:
        """Return what happened in one sentence."""
        if not self.steps:
            return "No step was left to do: as many as --steps asks for are committed already."
        first, last = self.loss_span()
        return (
            f"{format_bytes(self.state_bytes)} of model state trained with {format_bytes(self.host_memory)} of host "
            f"memory for it; the process peaked at {format_bytes(self.peak_rss_bytes)}, of which "
            f"{format_bytes(self.baseline_rss_bytes)} were Python and its libraries; the loss went from "
            f"{first:.3f} to {last:.3f} in {len(self.steps)} step{'s' if len(self.steps) > 1 else ''}."
        )


def describe_wear(wear: Wear) -> str:
    """Return the wear in a line: bytes in all and in a day, and what is known of drive writes and days of life."""
    text = f"{format_bytes(wear.bytes_written)} in all, {format_bytes(round(wear.bytes_per_day))} in a day of this"
    if wear.drive_writes_per_day is not None:
        text += f", {format_number(wear.drive_writes_per_day)} drive writes per day"
    if wear.life_days is not None:
        text += f"; the drives last {format_number(wear.life_days)} days of it"
    return text
