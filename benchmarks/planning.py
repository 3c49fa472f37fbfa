"""What it costs to plan: a thousand units, and a trillion parameters over 64 GPUs and 64 drives, in processor seconds.

Owns the two cases and the table. Does not check predictions: `prediction.py` holds them against measurements.
Guarantees that only the processor time of this process is counted, so that waiting for a busy machine does not matter,
and that every case is planned several times and the median reported.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import arguments_of, report

from tiermem.cli.machines import load_profile
from tiermem.planner.design import Design, PlanSettings, make_design
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.planner.predict import predict
from tiermem.planner.simulate import simulate
from tiermem.planner.workload import UnitWork, Workload, order_of, transformer

THEME = "planning"
PACKAGES = ("torch", "numpy")
UPDATES = ("forward", "backward")
RANKS, TRILLION = 64, 10**12
# A unit of a million parameters: small enough that what a unit costs beside its tiles is seen.
NUMEL, TOKENS = 1_000_000, 256

# Computation, drive and update about as slow as each other, so that all of them have something to wait for.
MACHINE = Machine(
    name="any",
    source="described: what a step takes does not matter, what it takes to plan it does",
    host=Host(flops={"bfloat16": 1e12}, update_rate={"bfloat16": 1e9}),
    drive=Drive(read=2e9, write=1.5e9, mixed=1.5e9),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan; print the table, write the result."""
    parser = arguments_of(__doc__, quick="fewer units and parameters, once", swaps=False)
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else 5
    rows = []
    for update in UPDATES:
        rows += unit_rows(8 if options.quick else 1000, update, rounds)
        rows.append(trillion_row(TRILLION // 100_000 if options.quick else TRILLION, update, rounds))
    body = table(rows)
    report(THEME, PACKAGES, body, {"rows": rows}, options)
    return 0


def unit_rows(count: int, update: str, rounds: int) -> list[dict[str, Any]]:
    """`count` equal units under a third of their state: what `tiermem plan` does, and every unit simulated."""
    units = tuple(UnitWork(f"unit {number}", NUMEL, NUMEL, 2.0 * NUMEL * TOKENS) for number in range(count))
    work = Workload("units", units, order_of([(number, number > 0) for number in range(count)]), TOKENS)
    settings = PlanSettings(host_memory=work.parameters * work.state_itemsize // 3, update=update)
    design = make_design(work, MACHINE, settings)
    return [
        planned(f"{count:,} units", work, MACHINE, settings, rounds),
        row(f"{count:,} units, each simulated", design, rounds, lambda: simulate(design).seconds),
    ]


def trillion_row(parameters: int, update: str, rounds: int) -> dict[str, Any]:
    """A transformer over 64 GPUs and 64 drives, a quarter of the nodes' memory for model state."""
    work, machine = transformer(parameters, batch=1, seq=2048), load_profile("dgx-h100")
    host = machine.host.memory // machine.ranks_per_node // 4
    settings = PlanSettings(host_memory=host, update=update, ranks=RANKS)
    return planned(f"{parameters / 1e9:,.0f} billion parameters, {RANKS} GPUs", work, machine, settings, rounds)


def planned(name: str, work: Workload, machine: Machine, settings: PlanSettings, rounds: int) -> dict[str, Any]:
    """One line of the table: the whole of `predict`, with what doubling each resource would bring."""

    def seconds() -> float:
        simulation = predict(work, machine, settings).simulation
        return simulation.seconds if simulation is not None else float("nan")

    return row(name, make_design(work, machine, settings), rounds, seconds)


def row(name: str, design: Design, rounds: int, step: Callable[[], float]) -> dict[str, Any]:
    """One line of the table: `step()` answers the seconds of a step."""
    taken, answer = [], 0.0
    for _ in range(rounds):
        began = time.process_time()
        answer = step()
        taken.append(time.process_time() - began)
    return {
        "case": name,
        "update": design.settings.update,
        "units": len(design.workload.units),
        "tiles": sum(design.tiles(unit) for unit in range(len(design.workload.units))),
        "step_seconds": answer,
        "processor_seconds": taken,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result as Markdown."""
    intro = (
        "Processor seconds of one process, median (smallest to largest). Planning is everything that `tiermem plan` "
    )
    intro += "computes: the step, and the step again with each resource doubled."
    lines = [
        intro,
        "",
        "| case | update | units | tiles of one rank | processor s | predicted step s |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        taken = each["processor_seconds"]
        spread = f"{statistics.median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f})"
        lines.append(
            f"| {each['case']} | {each['update']} | {each['units']} | {each['tiles']} | {spread} "
            f"| {each['step_seconds']:.3g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
