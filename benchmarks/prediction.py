"""How near the simulated step comes to the measured one.

Owns the choice of configurations and the table. Does not simulate, train or calibrate (`calibration.py` does).
Guarantees that every prediction is made before its configuration is measured, and that each measurement is the median
of at least five steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration import MODELS, TINY, Case, Measured, calibrate, measure, predict
from common import RESULTS, describe_surroundings, earlier_result, write_result

from tiermem.planner.simulate import Simulation

THEME = "prediction"
PACKAGES = ("torch", "transformers", "numpy")
DEVICES = tuple(f"simulated:bandwidth={speed}GB/s" for speed in (1, 4, 16))


def cases(*, quick: bool) -> list[Case]:
    """The configurations, cheapest to explain first."""
    if quick:
        return [Case("tiny", "bfloat16", update, 0.5) for update in ("forward", "backward", "step")]
    product = itertools.product(MODELS, ("bfloat16", "float32"), ("forward", "backward", "step"), (0.15, 0.6))
    found = [Case(model, dtype, update, share) for model, dtype, update, share in product]
    found += [Case(model, "bfloat16", update, 0.15, 2) for model in MODELS for update in ("forward", "backward")]
    found += [Case(model, "bfloat16", "forward", 0.3, device=device) for model in MODELS for device in DEVICES]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, measure; print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, three configurations, no result file")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each configuration, at least five")
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", help="configurations with all of these words")
    parser.add_argument("--add", action="store_true", help="only what today's result lacks, and add it there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no configuration after so long")
    parser.add_argument("--directory", type=Path, default=Path(), help="where swap files go (default: here)")
    parser.add_argument("--results", type=Path, help=f"where the result goes (default: {RESULTS.name}/)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    surroundings = describe_surroundings(PACKAGES)
    results = options.results or (None if options.quick else RESULTS)
    earlier = earlier_result(THEME, surroundings, results) if options.add and results is not None else {}
    rows = list(earlier.get("rows", []))
    done = {describe_row(line) for line in rows}
    models = TINY if options.quick else MODELS
    chosen = [case for case in cases(quick=options.quick) if all(word in describe(case) for word in options.only)]
    chosen = [case for case in chosen if describe(case) not in done]
    if not chosen:
        print("nothing is left to be measured")
        return 0
    steps = 2 if options.quick else max(5, options.steps)
    with tempfile.TemporaryDirectory(prefix="tiermem-prediction-", dir=options.directory) as name:
        folder = Path(name)
        calibration = calibrate(models, sorted({(case.model, case.dtype) for case in chosen}), folder, options.quick)
        for case in chosen:
            if time.monotonic() - began > options.seconds:
                print(f"not begun: {describe(case)}")
                continue
            foreseen = predict(case, calibration)
            measured = measure(models[case.model], case, calibration, folder, steps)
            rows.append(row(case, foreseen, measured))
            print(
                f"{describe(case)}: {rows[-1]['predicted']:.3f} s foreseen, {rows[-1]['measured']:.3f} s measured",
                flush=True,
            )
    machines = earlier.get("machines", []) + [
        {
            "for": " ".join(key),
            **dataclasses.asdict(machine),
            "seconds": [unit.seconds for unit in calibration.work[key].units],
        }
        for key, machine in calibration.machines.items()
    ]
    body = table(rows, machines)
    print(body)
    if results is not None:
        raw = {"surroundings": surroundings.to_markdown(), "machines": machines, "rows": rows}
        print(f"\nwritten: {write_result(THEME, surroundings, body, raw, results)}")
    return 0


def row(case: Case, foreseen: Simulation, measured: Measured) -> dict[str, Any]:
    """One line of the result."""
    seconds = measured.median
    return {
        **dataclasses.asdict(case),
        "measured": seconds,
        "all": measured.seconds,
        "predicted": foreseen.seconds,
        "error": foreseen.seconds / seconds - 1,
        "measured_read": statistics.median(measured.read),
        "predicted_read": foreseen.bytes_read,
        "measured_written": statistics.median(measured.written),
        "predicted_written": foreseen.bytes_written,
        "measured_updating": measured.updating,
        "predicted_updating": foreseen.updating,
        "stalls": dict(foreseen.stalls),
    }


def describe(case: Case) -> str:
    """A configuration in words."""
    return (
        f"{case.model}, {case.dtype}, {case.update}, {case.share:.0%} of the state, {case.directories} directories, "
        f"{case.device}"
    )


def describe_row(line: dict[str, Any]) -> str:
    """The configuration of a line of the result, in words."""
    return describe(Case(**{item.name: line[item.name] for item in dataclasses.fields(Case)}))


def table(rows: Sequence[dict[str, Any]], machines: Sequence[dict[str, Any]]) -> str:
    """The result as Markdown."""
    errors = [abs(line["error"]) for line in rows]
    intro = (
        f"{sum(error <= 0.1 for error in errors)} of {len(rows)} configurations within 10 %, median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}. Measured: median of the steps (fastest to "
        f"slowest). Bytes: measured / predicted. Calibrated in the same process, before the configurations:\n\n"
        "| for | drive reads, writes, both, GB/s | M parameters/s | slower: computation, kernel | ms an access |\n"
        "|---|---|---|---|---|\n" + "\n".join(map(calibrated, machines))
    )
    lines = [
        intro,
        "",
        "| model | dtype | update | budget | files | device | measured s | predicted s | error | read GB | wrote GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in rows:
        read = f"{line['measured_read'] / 1e9:.3f} / {line['predicted_read'] / 1e9:.3f}"
        written = f"{line['measured_written'] / 1e9:.3f} / {line['predicted_written'] / 1e9:.3f}"
        spread = f"{min(line['all']):.2f} to {max(line['all']):.2f}"
        lines.append(
            f"| {line['model']} | {line['dtype']} | {line['update']} | {line['share']:.0%} | {line['directories']} "
            f"| {line['device'].removeprefix('simulated:bandwidth=')} | {line['measured']:.3f} ({spread}) "
            f"| {line['predicted']:.3f} | {line['error']:+.1%} | {read} | {written} |"
        )
    return "\n".join(lines)


def calibrated(machine: dict[str, Any]) -> str:
    """A calibration as a line of a table."""
    drive, host = machine["drive"], machine["host"]
    bandwidths = ", ".join(f"{drive[way] / 1e9:.2f}" for way in ("read", "write", "mixed"))
    return (
        f"| {machine['for']} | {bandwidths} | {host['update_rate'][machine['for'].split()[1]] / 1e6:.0f} "
        f"| {host['compute_beside_update']:.0%}, {host['update_beside_compute']:.0%} "
        f"| {host['lease_seconds'] * 1e3:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
