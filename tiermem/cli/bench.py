"""`tiermem bench`: what the drives under swap directories give, and the wire to the accelerator.

Owns the command, its progress bar and its table. Does not measure: `swap.bench` does, with the engine that trains, and
`copies` for the accelerator. Guarantees that what cannot be measured is refused in one line before anything is written,
and that the files are gone when it ends, interrupted or not.
"""

from __future__ import annotations

import json as json_module
import math
import os
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from swap.bench import BenchReport, Order, Plan, make_plan, remove_leftovers, require_room, run_bench
from swap.blocks import ALIGNMENT, align_down
from swap.settings import LARGEST_QUEUE_DEPTH
from tiermem.cli import options
from tiermem.cli.copies import measure_copies
from tiermem.cli.disk import require_drawable, require_writable
from tiermem.cli.options import checked_option, number_option, path_option, whole_option
from tiermem.cli.terminal import print_object, print_table, terminal
from tiermem.errors import ConfigError
from tiermem.figures import format_number, format_seconds
from tiermem.memory.sizes import parse_bytes
from tiermem.output_file import write_whole


def _require_size(text: str) -> None:
    if align_down(parse_bytes(text)) == 0:
        raise ConfigError(f"expected at least {ALIGNMENT} bytes, found {text!r}")


def _require_block(text: str) -> None:
    if parse_bytes(text) < 1 or parse_bytes(text) % ALIGNMENT:
        raise ConfigError(f"expected a positive multiple of {ALIGNMENT} bytes, found {text!r}")


Directories = Annotated[
    list[Path], path_option("--dir", help="Directory to measure; repeatable: then alone, and striped together.")
]
Size = Annotated[
    str, checked_option("--size", _require_size, help="Size of the file made in each directory, such as 2GiB.")
]
Seconds = Annotated[
    float,
    number_option(
        "--seconds",
        expected="a positive number of seconds",
        fits=lambda seconds: 0 < seconds < math.inf,
        metavar="FLOAT",
        help="Seconds for each pattern, shared by its settings.",
    ),
]
BlockSizes = Annotated[
    list[str] | None,
    checked_option("--block-size", _require_block, help="Bytes of a request, such as 8MiB; repeatable."),
]
QueueDepths = Annotated[
    list[int] | None,
    whole_option("--queue-depth", most=LARGEST_QUEUE_DEPTH, help="Requests in flight on each device; repeatable."),
]
Backends = Annotated[
    list[str] | None, typer.Option("--backend", help="threads, aiofiles or inline (one at a time); repeatable.")
]
Quick = Annotated[bool, typer.Option("--quick", help="One setting for each pattern.")]
SteadySeconds = Annotated[
    float,
    number_option(
        "--steady-seconds",
        expected="a number of seconds, 0 or more",
        fits=lambda seconds: 0 <= seconds < math.inf,
        metavar="FLOAT 0..",
        help="Afterwards overwrite for this long, past the drive's cache.",
    ),
]
SteadyBytes = Annotated[
    str, checked_option("--steady-bytes", parse_bytes, help="Stop overwriting after this many bytes.")
]
SmallPages = Annotated[
    bool, typer.Option("--small-pages", help="Keep the memory of the requests out of huge pages, unlike training.")
]
Out = Annotated[Path | None, path_option("--out", help="Write the JSON to this file, too.")]


def bench(
    dir: Directories,  # noqa: A002 - the option's name
    size: Size = "2GiB",
    seconds: Seconds = 5.0,
    block_size: BlockSizes = None,
    queue_depth: QueueDepths = None,
    backend: Backends = None,
    quick: Quick = False,
    steady_seconds: SteadySeconds = 0.0,
    steady_bytes: SteadyBytes = "0",
    small_pages: SmallPages = False,
    json: options.Json = False,
    plot: options.Plot = None,
    out: Out = None,
) -> None:
    """Measure what the drives of directories give: block size x queue depth x backend; read, write, half and half."""
    order = Order(
        directories=tuple(dir),
        nbytes=align_down(parse_bytes(size)),
        seconds=seconds,
        block_sizes=tuple(map(parse_bytes, block_size)) if block_size else None,
        queue_depths=tuple(queue_depth) if queue_depth else None,
        backends=tuple(backend) if backend else None,
        quick=quick,
        steady_seconds=steady_seconds,
        steady_bytes=parse_bytes(steady_bytes),
        huge_pages=not small_pages,
    )
    try:
        plan = make_plan(order)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if out is not None and plot is not None and os.path.realpath(out) == os.path.realpath(plot):
        raise typer.BadParameter(f"expected different files for --out and --plot, found {out} for both")
    if out is not None:
        require_writable("--out", out)
    if plot is not None:
        require_drawable(plot)
    report = measure(plan, terminal(stderr=True))
    found = {**report.to_dict(), "copy": measure_copies()}
    if json:
        print_object(json_module.dumps(found))
    else:
        show(report, found["copy"])
    if out is not None:
        write_whole(out, json_module.dumps(found, indent=1) + "\n")
    if plot is not None:
        from tiermem.cli.bench_plot import draw

        draw(found, plot)


def measure(plan: Plan, console: Console) -> BenchReport:
    """Carry the plan out with a progress bar on `console`. Waits; raises what `run_bench` raises."""
    for left in remove_leftovers(plan.order.directories):
        console.print(f"removed {left}, left behind by a process that was killed", highlight=False, soft_wrap=True)
    require_room(plan.order.directories, plan.order.nbytes)
    estimate = plan.estimate_seconds()
    console.print(
        f"about {format_seconds(round(estimate))}; {format_number(plan.write_nbytes / 1e9)} GB are written first, then "
        "measured",
        highlight=False,
        soft_wrap=True,
    )
    with BenchProgress(console, estimate) as progress:
        return run_bench(plan, progress.begins)


class BenchProgress:
    """A bar on a terminal, a line for each pattern elsewhere; a context manager."""

    def __init__(self, console: Console, estimate: float) -> None:
        self.console = console
        self.announced = 0.0
        self.said = ""
        # Redrawn between slices only: a bar that draws itself would be measured with the engine.
        self.bar = Progress(
            BarColumn(bar_width=30),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=estimate)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bar.stop()

    def begins(self, what: str, seconds: float) -> None:
        """Show what is measured next; what was announced before is done."""
        self.bar.update(self.task, advance=self.announced, description=what)
        self.bar.refresh()
        self.announced = seconds
        first = what.partition(",")[0]
        if not self.console.is_terminal and first != self.said:
            self.said = first
            self.console.print(first, highlight=False, soft_wrap=True)


def show(report: BenchReport, copy: dict[str, Any]) -> None:
    """Print the report for people on stdout."""
    heading, *rows = report.to_rows()
    table = Table(title=", ".join(map(str, report.order.directories)), title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(heading):
        table.add_column(name, justify="left" if index < 3 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] else None)
    print_table(table, in_one_line=True)
    console = terminal()
    for line in report.to_lines():
        console.print(line, highlight=False, soft_wrap=True)
    if "skipped" in copy:
        console.print(f"copies to and from an accelerator: not measured, {copy['skipped']}", highlight=False)
    else:
        figures = ", ".join(f"{name} {value:.1f} GB/s" for name, value in copy["gigabytes_per_second"].items())
        console.print(f"{copy['device']}: {figures}", highlight=False, soft_wrap=True)
