"""Whether the rules behind "auto" choose as well as a search by simulation would: update schedule and look-ahead.

Owns the grids of steps, drives and budgets and the tables. Does not measure: all of it is simulated, and counts the
same on every machine. Guarantees that the rules are those that `offload` follows (the same functions answer), and that
what they choose is among what they are compared with.

The look-ahead is also refined as a run refines it: from what such a run would observe of itself (its computation and
its kernels as slow as they were beside each other), coarsely simulated. What comes of it is then simulated whole, on
the machine itself. That measured steps may take a choice back is not in it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import arguments_of, report

from tiermem.errors import CapacityError
from tiermem.optim.schedules import make_schedule
from tiermem.pager.page import Kind
from tiermem.planner.clock import carried_out
from tiermem.planner.design import Design, PlanSettings, make_design
from tiermem.planner.footprint import UnitSize
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.planner.observed import Observed, observed_design
from tiermem.planner.predict import seconds_of_step
from tiermem.planner.refining import COUNTED, SETTLING, LookAheadControl, foreseeing
from tiermem.planner.simulate import Simulation, simulate
from tiermem.planner.workload import Workload, transformer

THEME = "auto_rules"
PACKAGES = ("torch",)
UPDATES = ("backward", "forward", "step")
PARAMETERS = (50_000_000,)
FEW_PARAMETERS = 10_000_000
TOKENS = (128, 2048)
DRIVES = (1e9, 6e9)
SHARES = (0.1, 0.25, 0.5, 1.4)
# Look-ahead of these times what the rule gives.
FACTORS = (0.25, 0.5, 2.0, 4.0)
# Parameters, tokens, drives, shares of the state: where a look-ahead is refined.
REFINED = (
    ((50_000_000,), (128, 512, 2048), (1e9, 3e9, 6e9), (0.1, 0.25, 0.5, 0.75)),
    ((200_000_000,), (128, 2048), (1e9, 6e9), (0.1, 0.25, 0.5)),
)
TYPES = ("bfloat16", "float32")
# A step that is longer than the shortest by more than this share counts as lost.
LOST = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate; print the table, write the result."""
    parser = arguments_of(__doc__, quick="one small model, one drive", swaps=False)
    options = parser.parse_args(arguments)
    grid = itertools.product(PARAMETERS, TOKENS, DRIVES, SHARES)
    cases = [case for part in REFINED for case in itertools.product(*part)]
    if options.quick:
        grid = itertools.product((FEW_PARAMETERS,), TOKENS[:1], DRIVES[:1], SHARES[1::2])
        cases = [(FEW_PARAMETERS, *cases[1][1:])]
    rows = [found for case in grid if (found := compare(*case)) is not None]
    refined = [refine(*case) for case in cases]
    body = f"{table(rows)}\n\n{refined_table(refined)}"
    raw = {"rows": rows, "refined": refined}
    report(THEME, PACKAGES, body, raw, options)
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
        "fits": nbytes_of(design) <= settings.host_memory,
        "seconds": seconds_of_step(work, machine, by_rule),
        "updates": {update: seconds(work, machine, replace(settings, update=update)) for update in UPDATES},
        "look_ahead": {
            str(factor): seconds(work, machine, replace(by_rule, look_ahead=int(ahead * factor))) for factor in FACTORS
        },
    }


def refine(parameters: int, tokens: int, rate: float, share: float) -> dict[str, Any]:
    """One line: seconds of a whole step with each look-ahead that a run would consider, and which one it would try."""
    work = transformer(parameters, batch=1, seq=tokens)
    budget = int(work.parameters * (2 + work.state_itemsize) * share) // 4096 * 4096
    design = make_design(work, machine_with(rate), PlanSettings(host_memory=budget, update="backward"))
    planned = design.footprint.look_ahead
    control = LookAheadControl(planned, highest=budget // 2)
    whole = {nbytes: simulate(with_look_ahead(design, nbytes)) for nbytes in control.candidates()}
    for _ in range(SETTLING + COUNTED):
        control.measured(whole[planned].seconds)
    seen = observed_by_a_run(design, whole[planned])
    control.foreseen(carried_out(foreseeing(seen, control.candidates())))
    return {
        "parameters": parameters,
        "tokens": tokens,
        "drive": rate,
        "share": share,
        "planned": planned,
        "chosen": control.in_use,
        "reason": control.reason,
        "seconds": {str(nbytes): simulation.seconds for nbytes, simulation in whole.items()},
    }


def with_look_ahead(design: Design, nbytes: int) -> Design:
    """The design with another look-ahead."""
    return replace(design, footprint=replace(design.footprint, look_ahead=nbytes))


def observed_by_a_run(design: Design, simulation: Simulation) -> Design:
    """The design that a run would make of its own steps, were they as simulated."""
    work, drive = design.workload, design.drive
    slower = simulation.computing / sum(times.forward + times.backward + times.gradient for times in design.times)
    observed = Observed(
        forward={unit: times.forward * slower for unit, times in enumerate(design.times)},
        backward={unit: (times.backward + times.gradient) * slower for unit, times in enumerate(design.times)},
        elsewhere=0.0,
        updating=simulation.updating,
        read=drive.read,
        write=drive.write,
        mixed=drive.mixed,
    )
    sizes = [UnitSize(unit.name, unit.numel * 2, unit.trainable, 2, work.state_itemsize) for unit in work.units]
    return observed_design(observed, work.step_order, sizes, design.settings, design.footprint, types=TYPES)


def nbytes_of(design: Design) -> int:
    """Bytes of all pages."""
    return design.nbytes(Kind.PARAM, Kind.STATE, Kind.GRAD)


def rule(design: Design) -> str:
    """What "auto" is at `offload`, as `runtime.undo.choose_schedule` says: no clipping that is often taken back."""
    worthwhile = not design.footprint.serial and nbytes_of(design) > design.settings.host_memory
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


def refined_table(rows: Sequence[dict[str, Any]]) -> str:
    """What refining the look-ahead brings, as Markdown."""

    def longer(row: dict[str, Any], nbytes: int) -> float:
        return float(row["seconds"][str(nbytes)] / min(row["seconds"].values()) - 1)

    def words(found: Sequence[float]) -> str:
        lost = sum(each > LOST for each in found)
        return f"{lost} lose more than {LOST:.0%} (mean {sum(found) / len(found):.1%}, at most {max(found):.1%})"

    before = [longer(row, row["planned"]) for row in rows]
    after = [longer(row, row["chosen"]) for row in rows]
    tried = [row for row in rows if row["chosen"] != row["planned"]]
    worse = sum(longer(row, row["chosen"]) > longer(row, row["planned"]) for row in tried)
    summary = (
        f"The look-ahead refined, in {len(rows)} cases, against the shortest step among the candidates: by the rule "
        f"{words(before)}; refined {words(after)}. Another one than the rule's is tried in {len(tried)} cases, and is "
        f"longer than the rule's in {worse} of them."
    )
    lines = [
        summary,
        "",
        "| parameters, M | tokens | drive, GB/s | budget, share of the state | rule s | best | tried | its step |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        seconds, planned, chosen = row["seconds"], row["planned"], row["chosen"]
        best = min(seconds.values()) / seconds[str(planned)]
        lines.append(
            f"| {row['parameters'] / 1e6:.0f} | {row['tokens']} | {row['drive'] / 1e9:.0f} | {row['share']:.0%} "
            f"| {seconds[str(planned)]:.3g} | {best:.2f} | {f'x {chosen / planned:.2g}' if row in tried else 'none'} "
            f"| {seconds[str(chosen)] / seconds[str(planned)]:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
