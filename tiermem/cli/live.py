"""The live view of a training run: what is drawn after every step.

Owns the layout, as a pure function of what the report holds too. Does not know terminals, time or the runtime: who
shows it is `progress`. Guarantees a view of at most eighty columns, and that a figure nobody has is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tiermem.cli.report import StepReport
from tiermem.figures import counted, format_number
from tiermem.memory.sizes import format_bytes
from tiermem.stats import TierStatistics

WIDTH = 80
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_STEPS = 30
_BAR = 24


def render(steps: Sequence[StepReport], *, total: int, tiers: Sequence[TierStatistics], memory: str) -> RenderableType:
    """Draw a run of which `steps` are done (in this process) and the last of `total` will be step number `total`.

    `tiers` as they are now; `memory`: a line about the process's memory.
    """
    done = steps[-1].number if steps else 0
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(f"step {done}/{total}" if steps else counted(total, "step"), style="bold"),
        ProgressBar(total=total, completed=done, width=40),
        _left(steps, total),
    )
    parts: list[RenderableType] = [head]
    if steps:
        parts += [_figures(steps), _edges(steps[-1])]
    parts += [_tiers(tiers), Text(memory, style="dim")]
    return Panel(Group(*parts), title="tiermem", title_align="left", width=WIDTH)


def spark(values: Sequence[float]) -> str:
    """Draw values as blocks, the lowest and the highest at the ends of the scale; what is not finite is a gap."""
    finite = [value for value in values if math.isfinite(value)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    return "".join(
        _SPARKS[round((value - low) / span * (len(_SPARKS) - 1)) if span else 0] if math.isfinite(value) else " "
        for value in values
    )


def _left(steps: Sequence[StepReport], total: int) -> Text:
    if not steps:
        return Text("first step: learning the order of accesses", style="dim")
    seconds = round(statistics.median(step.seconds for step in steps) * (total - steps[-1].number))
    return Text(f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02} left", style="dim")


def _figures(steps: Sequence[StepReport]) -> Table:
    last = steps[-1]
    table = Table.grid(padding=(0, 2))
    table.add_row("loss", Text(f"{last.loss:.4f}", style="bold"), spark([step.loss for step in steps[-_SPARK_STEPS:]]))
    rate = last.tokens / last.seconds
    rates = [step.tokens / step.seconds for step in steps[-_SPARK_STEPS:]]
    table.add_row("tokens/s", Text(format_number(rate), style="bold"), spark(rates))
    stalls = [step.stall_seconds / step.seconds for step in steps[-_SPARK_STEPS:]]
    table.add_row("stall", Text(f"{100 * stalls[-1]:.0f} %", style="bold"), spark(stalls))
    return table


def _edges(step: StepReport) -> Table:
    table = Table.grid(padding=(0, 2))
    for edge in step.edges:
        busy = min(1.0, edge.busy_seconds / step.seconds)
        table.add_row(
            edge.name,
            ProgressBar(total=1.0, completed=busy, width=_BAR),
            f"{edge.nbytes / step.seconds / 1e9:.2f} GB/s",
            Text(f"busy {100 * busy:.0f} %, {format_bytes(edge.nbytes)}", style="dim"),
        )
    return table


def _tiers(tiers: Sequence[TierStatistics]) -> Table:
    table = Table.grid(padding=(0, 2))
    for tier in tiers:
        share = tier.reserved / tier.budget if tier.budget else 0.0
        table.add_row(
            tier.name,
            ProgressBar(total=1.0, completed=share, width=_BAR),
            f"{100 * share:.0f} %",
            Text(f"of {format_bytes(tier.budget)}, at most {format_bytes(tier.high_water)}", style="dim"),
        )
    return table
