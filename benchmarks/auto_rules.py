"""Whether the rules behind "auto" choose as well as a search by simulation would: update schedule and look-ahead.

Owns the grid of steps, drives and budgets and the table. Does not measure: all of it is simulated, and counts the same
on every machine. Guarantees that the rules are those that `offload` follows (the same functions answer), and that what
they choose is among what they are compared with.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS, report

from tiermem.errors import CapacityError
from tiermem.optim.schedules import make_schedule
from tiermem.planner.design import Design, PlanSettings, make_design, swap_nbytes
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.planner.predict import seconds_of_step
from tiermem.planner.workload import Workload, transformer

THEME = "auto_rules"
PACKAGES = ("torch",)
UPDATES = ("backward", "forward", "step")
PARAMETERS = (50_000_000,)
TOKENS = (128, 2048)
DRIVES = (1e9, 6e9)
SHARES = (0.1, 0.25, 0.5, 1.4)
# Look-ahead of these times what the rule gives.
FACTORS = (0.25, 0.5, 2.0, 4.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate; print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small model, one drive, no result file")
    parser.add_argument("--results", type=Path, help=f"where the result goes (default: {RESULTS.name}/)")
    options = parser.parse_args(arguments)
    grid = itertools.product(PARAMETERS, TOKENS, DRIVES, SHARES)
    if options.quick:
        grid = itertools.product(PARAMETERS[:1], TOKENS[:1], DRIVES[:1], SHARES[::2])
    rows = [found for case in grid if (found := compare(*case)) is not None]
    body = table(rows)
    report(THEME, PACKAGES, body, {"rows": rows}, options.results or (None if options.quick else RESULTS))
    return 0


def compare(parameters: int, tokens: int, rate: float, share: float) -> dict[str, Any] | None:
    """One line: seconds of a step by rule, and with each other choice; None: the budget holds not even one unit."""
    work = transformer(parameters, batch=1, seq=tokens)
    machine = machine_with(rate)
    settings = PlanSettings(host_memory=int(work.parameters * (2 + work.state_itemsize) * share) // 4096 * 4096)
    try:
        design = make_design(work, machine, settings)
    except CapacityError:
        return None
    by_rule = replace(settings, update=rule(design))
    ahead = design.footprint.look_ahead
    return {
        "parameters": parameters,
        "tokens": tokens,
        "drive": rate,
        "share": share,
        "rule": by_rule.update,
        "fits": swap_nbytes(design, commits=False) <= settings.host_memory,
        "seconds": seconds_of_step(work, machine, by_rule),
        "updates": {update: seconds(work, machine, replace(settings, update=update)) for update in UPDATES},
        "look_ahead": {
            str(factor): seconds(work, machine, replace(by_rule, look_ahead=int(ahead * factor))) for factor in FACTORS
        },
    }


def rule(design: Design) -> str:
    """What "auto" is at `offload`, as `runtime.undo.choose_schedule` says: no clipping that is often taken back."""
    nbytes = swap_nbytes(design, commits=False)
    worthwhile = not design.footprint.serial and nbytes > design.settings.host_memory
    return make_schedule("auto", worthwhile=worthwhile).acts_as


def machine_with(rate: float) -> Machine:
    """Two dozen cores, or a small accelerator without its wires, and a drive that reads at `rate` bytes a second."""
    host = Host(
        flops={"bfloat16": 1e12},
        update_rate={"bfloat16": 8e8},
        compute_beside_update=0.5,
        update_beside_compute=0.3,
    )
    drive = Drive(read=rate, write=0.85 * rate, mixed=0.8 * rate)
    return Machine(name="any", source="described: the rules must do on any machine", host=host, drive=drive)


def seconds(work: Workload, machine: Machine, settings: PlanSettings) -> float | None:
    """Simulated seconds of a step; None where it does not fit."""
    try:
        return seconds_of_step(work, machine, settings)
    except CapacityError:
        return None


def loss(row: dict[str, Any], kind: str) -> float:
    """By how much the rule's step is longer than the shortest found, as a share."""
    tried = [taken for taken in row[kind].values() if taken is not None]
    return float(row["seconds"] / min([row["seconds"], *tried]) - 1)


def losses(rows: Sequence[dict[str, Any]]) -> str:
    """How much longer than the best of the choices the rule's step is, in words."""
    words = []
    for kind, name in (("updates", "update schedule"), ("look_ahead", "look-ahead")):
        found = [loss(row, kind) for row in rows]
        words.append(
            f"by the rule's {name} a step is longer by {sum(found) / len(found):.1%}, at most {max(found):.1%}"
        )
    return "; ".join(words)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result as Markdown."""
    lines = []
    for words, chosen in (
        ("paged", [row for row in rows if not row["fits"]]),
        ("in which all of it fits into the budget", [row for row in rows if row["fits"]]),
    ):
        if chosen:
            lines.append(f"- {len(chosen)} simulated cases {words}: {losses(chosen)}.")
    head = "| parameters, M | tokens | drive, GB/s | budget, share of the state | rule | step s | backward | forward "
    head += "| step | look-ahead x 1/4 | x 1/2 | x 2 | x 4 |"
    lines += ["", "Seconds of each choice as a share of the rule's.", "", head, "|---" * 13 + "|"]
    for row in rows:
        tried = [*(row["updates"][name] for name in UPDATES), *row["look_ahead"].values()]
        shares = " | ".join("does not fit" if taken is None else f"{taken / row['seconds']:.2f}" for taken in tried)
        lines.append(
            f"| {row['parameters'] / 1e6:.0f} | {row['tokens']} | {row['drive'] / 1e9:.0f} | {row['share']:.0%} "
            f"| {row['rule']} | {row['seconds']:.3g} | {shares} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
