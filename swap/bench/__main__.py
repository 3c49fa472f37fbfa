"""`python -m swap.bench DIRECTORY ...`: the instrument without torch.

Owns a small command line. Does not measure. Guarantees one line on stderr for an error and an exit code that says so;
`tiermem bench` is the same with plots, a progress bar and the accelerator.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from swap.bench.ground import require_room
from swap.bench.leftovers import remove_leftovers
from swap.bench.plan import Order, make_plan
from swap.bench.report import BenchReport
from swap.bench.sweep import run_bench
from swap.blocks import align_down
from swap.errors import SwapError

_FAILED, _WRONG_USAGE, _INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; return the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        plan = make_plan(_order(options))
        for left in remove_leftovers(plan.order.directories):
            print_line(f"removed {left}, left behind by a process that was killed")
        require_room(plan.order.directories, plan.order.nbytes)
        sys.stderr.write(
            f"about {plan.estimate_seconds():.0f} seconds, {plan.write_nbytes / 1e9:.1f} GB to be laid out\n"
        )
        _show(run_bench(plan, lambda what, _: print_line(what)), json_object=options.json)
    except ValueError as error:
        return _fail(str(error), _WRONG_USAGE)
    except (SwapError, OSError) as error:
        return _fail(str(error), _FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    return 0


def _show(report: BenchReport, *, json_object: bool) -> None:
    """Print it on stdout, now: a disk that is full is an error of this program, not of the interpreter's end."""
    if json_object:
        text = json.dumps(report.to_dict())
    else:
        rows = report.to_rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        text = "\n".join([*table, *report.to_lines()])
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or errno.EIO), "stdout") from error


def print_line(what: str) -> None:
    """Say on stderr what is being measured."""
    sys.stderr.write(f"{what}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m swap.bench", description="Bandwidth and latency of directories.")
    parser.add_argument("directories", nargs="+", type=Path, help="one or more; several are measured striped, too")
    parser.add_argument("--mebibytes", type=float, default=2048, help="size of the file in each directory")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each pattern, shared by its settings")
    parser.add_argument("--quick", action="store_true", help="one setting a pattern")
    parser.add_argument("--small-pages", action="store_true", help="keep the memory of the requests out of huge pages")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _order(options: argparse.Namespace) -> Order:
    """Raises ValueError for a size that is no number of bytes."""
    if not math.isfinite(options.mebibytes):
        raise ValueError(f"--mebibytes: expected a number, found {options.mebibytes}")
    return Order(
        directories=tuple(options.directories),
        nbytes=align_down(round(options.mebibytes * 2**20)),
        seconds=options.seconds,
        quick=options.quick,
        huge_pages=not options.small_pages,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"swap.bench: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
