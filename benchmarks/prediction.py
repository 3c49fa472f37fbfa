"""How near the simulated step comes to the measured one.

Owns the choice of configurations and the table. Does not simulate, train or calibrate (`calibration.py` does).
Guarantees that every prediction is made before its configuration is measured, from a calibration made right before,
that each measurement is the median of at least five steps, and that every try is in the raw result.

Beside it stands what `tiermem plan` says by itself: from its own short measurement, made anew for each model and dtype.

A machine may be another one a minute later, its drive above all. So it is calibrated again right after each
configuration, and simulated once more: what lies between both predictions is the machine's doing, whatever the model
does. A configuration on which both differ by more than `MOVED` is measured again, twice at most. The first try that
was on a machine at rest counts, whatever its error; where there was none, the last one, and it is marked.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibration import (
    MODELS,
    TINY,
    Calibration,
    Case,
    calibrate,
    host_bytes,
    measure,
    predict,
    train_once,
    work_of,
)
from common import (
    arguments_of,
    describe_surroundings,
    earlier_result,
    end_on_sigterm,
    result_folder,
    write_result,
)
from workloads import Workload

from tiermem.cli import measure as measuring
from tiermem.cli.measure import SECONDS, measure_machine
from tiermem.cli.measure_layer import LayerShape
from tiermem.cli.measure_workload import with_rates_for
from tiermem.planner import workload as planned
from tiermem.planner.machine import Machine
from tiermem.planner.tilesizes import planned_tile

THEME = "prediction"
PACKAGES = ("torch", "transformers", "numpy")
DEVICES = tuple(f"simulated:bandwidth={speed}GB/s" for speed in (1, 4, 16))
MOVED = 0.1
TRIES = 3
# Seconds for which a calibration that was made after one configuration counts as made before the next.
FRESH = 5.0
# What stands for any workload where it only has to run.
SMALL_LAYER = LayerShape(rows=1, seq=16, width=64, mlp=64)


def cases(*, quick: bool) -> list[Case]:
    """The configurations; those of one model and dtype together, which share calibrations."""
    if quick:
        return [Case("tiny", "float32", update, 0.5) for update in ("forward", "auto")]
    product = itertools.product(MODELS, ("bfloat16", "float32"), ("forward", "backward", "step", "auto"), (0.15, 0.6))
    found = [Case(model, dtype, update, share) for model, dtype, update, share in product]
    found += [Case(model, "bfloat16", update, 0.15, 2) for model in MODELS for update in ("forward", "backward")]
    found += [Case(model, "bfloat16", "forward", 0.3, device=device) for model in MODELS for device in DEVICES]
    return sorted(found, key=lambda case: (case.model, case.dtype))


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, measure, calibrate; print the table, write the result."""
    parser = arguments_of(__doc__, quick="a tiny model, two configurations")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each configuration, at least five")
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", help="configurations with all of these words")
    parser.add_argument("--add", action="store_true", help="only what today's result lacks, and add it there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so long")
    options = parser.parse_args(arguments)
    surroundings = describe_surroundings(PACKAGES)
    results = result_folder(options)
    earlier = earlier_result(THEME, surroundings, results) if options.add and results is not None else {}
    rows: list[dict[str, Any]] = list(earlier.get("rows", []))
    wanted = [case for case in cases(quick=options.quick) if all(word in describe(case) for word in options.only)]
    steps = 2 if options.quick else max(5, options.steps)
    if options.quick:
        measuring.ANY_LAYER = SMALL_LAYER
    with tempfile.TemporaryDirectory(prefix="tiermem-prediction-", dir=options.directory) as name:
        course = Course(TINY if options.quick else MODELS, Path(name), steps=steps, quick=options.quick)
        ends = time.monotonic() + options.seconds
        for case in wanted:
            tries = [line["tries"] for line in rows if of_row(line) == case]
            kept = tries[0] if tries else []
            while not_settled(kept, 1 if options.quick else TRIES) and time.monotonic() < ends:
                kept.append(course.once(case))
                rows = [line for line in rows if of_row(line) != case] + [row(case, kept)]
                if results is not None:
                    write_result(THEME, surroundings, table(rows), raw(surroundings.to_markdown(), rows), results)
    if not rows:
        print("nothing was measured")
        return 0
    print(table(rows))
    if results is not None:
        path = write_result(THEME, surroundings, table(rows), raw(surroundings.to_markdown(), rows), results)
        print(f"\nwritten: {path}")
    return 0


class Course:
    """Configurations, one after the other, with a calibration between any two."""

    def __init__(self, models: Mapping[str, Workload], folder: Path, *, steps: int, quick: bool) -> None:
        self._models = models
        self._folder = folder
        self._steps = steps
        self._quick = quick
        self._works: dict[tuple[str, str], planned.Workload] = {}
        self._machines: dict[tuple[str, str], Machine] = {}
        self._last: tuple[tuple[str, str], Calibration, float] | None = None

    def once(self, case: Case) -> dict[str, Any]:
        """One try at a configuration."""
        by_plan = predict(case, self._planning(case))
        before = self._before(case)
        foreseen = predict(case, before)
        measured = measure(self._models[case.model], case, before, self._folder, self._steps)
        after = self._calibrate(case)
        again = predict(case, after)
        found = {
            "measured": measured.median,
            "all": measured.seconds,
            "predicted": foreseen.seconds,
            "predicted_after": again.seconds,
            "error": foreseen.seconds / measured.median - 1,
            "error_after": again.seconds / measured.median - 1,
            "planned": by_plan.seconds,
            "error_planned": by_plan.seconds / measured.median - 1,
            "planned_read": by_plan.bytes_read,
            "planned_written": by_plan.bytes_written,
            "moved": again.seconds / foreseen.seconds - 1,
            "before": before.rates,
            "planning": Calibration(self._machines[case.model, case.dtype], before.work).rates,
            "after": after.rates,
            "measured_read": statistics.median(measured.read),
            "predicted_read": foreseen.bytes_read,
            "measured_written": statistics.median(measured.written),
            "predicted_written": foreseen.bytes_written,
            "seen": dataclasses.asdict(measured.observed),
            "kernels": measured.kernels,
            "measured_stalls": dict(measured.stalls),
            "predicted_stalls": dict(foreseen.stalls),
            "predicted_updating": foreseen.updating,
            "predicted_computing": foreseen.computing,
        }
        print(
            f"{describe(case)}: {foreseen.seconds:.3f} s foreseen ({again.seconds:.3f} afterwards), "
            f"{measured.median:.3f} s measured: {found['error']:+.1%}",
            flush=True,
        )
        return found

    def _planning(self, case: Case) -> Calibration:
        """What `tiermem plan` makes its prediction from."""
        key = case.model, case.dtype
        if key not in self._machines:
            seconds = 0.01 if self._quick else SECONDS
            short: dict[str, Any] = {"drive_seconds": 0.05, "nbytes": 64 << 20} if self._quick else {}
            found, seq = measure_machine([self._folder], seconds=seconds, **short), self._models[case.model].length
            work, tile = self._work(key), planned_tile(host_bytes(case, self._work(key)))
            self._machines[key] = with_rates_for(
                found, work, [self._folder], seq=seq, tile_nbytes=tile, seconds=seconds
            )
        return Calibration(self._machines[key], self._work(key))

    def _before(self, case: Case) -> Calibration:
        key = case.model, case.dtype
        if self._last is not None and self._last[0] == key and time.monotonic() - self._last[2] < FRESH:
            return self._last[1]
        return self._calibrate(case)

    def _calibrate(self, case: Case) -> Calibration:
        model, key = self._models[case.model], (case.model, case.dtype)
        found = calibrate(model, self._work(key), self._folder, quick=self._quick)
        self._last = key, found, time.monotonic()
        return found

    def _work(self, key: tuple[str, str]) -> planned.Workload:
        """The step of a model in a dtype, which has been trained for a while when it is first asked for."""
        if key not in self._works:
            model = self._models[key[0]]
            self._works[key] = work_of(model, *key)
            train_once(model, self._works[key], self._folder)
        return self._works[key]


def not_settled(tries: Sequence[Mapping[str, Any]], most: int) -> bool:
    """Whether a configuration is to be tried (again), `most` times in all."""
    return len(tries) < most and all(abs(each["moved"]) > MOVED for each in tries)


def row(case: Case, tries: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the result; the try that counts is the first on a machine at rest, or the last."""
    counts = next((each for each in tries if abs(each["moved"]) <= MOVED), tries[-1])
    return {**dataclasses.asdict(case), "counts": tries.index(counts), "tries": tries}


def of_row(line: Mapping[str, Any]) -> Case:
    """The configuration of a line of the result."""
    return Case(**{item.name: line[item.name] for item in dataclasses.fields(Case)})


def raw(surroundings: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result for programs."""
    return {"surroundings": surroundings, "rows": rows}


def describe(case: Case) -> str:
    """A configuration in words."""
    return (
        f"{case.model}, {case.dtype}, {case.update}, {case.share:.0%} of the state, {case.directories} directories, "
        f"{case.device}"
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the table comes to."""
    counting = [line["tries"][line["counts"]] for line in rows]
    tries = sum(len(line["tries"]) for line in rows)
    errors = [abs(each["error"]) for each in counting]
    moved = sum(abs(each["moved"]) > MOVED for each in counting)
    by_plan = [abs(each["error_planned"]) for each in counting]
    nearest = sum(min(abs(each["error"]), abs(each["error_after"])) <= MOVED for each in counting)
    return (
        f"{sum(error <= 0.1 for error in errors)} of {len(rows)} configurations within 10 %, median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}; {nearest} within 10 % by the calibration before "
        f"or the one after. By what `tiermem plan` measures: {sum(error <= 0.1 for error in by_plan)}, median error "
        f"{statistics.median(by_plan):.1%}, largest {max(by_plan):.1%}. {moved} were measured on a moving machine at "
        f"each try (marked *). {tries} tries in all, every one in the JSON file."
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The result as Markdown."""
    explanation = (
        "Measured: median of the steps (fastest to slowest). Predicted: from a calibration made right before; "
        "afterwards: from one made right after. Plan: from what `tiermem plan` measures by itself. Drive: reads, "
        "writes, both, GB/s, as training had it in the calibrations. Bytes: measured / predicted."
    )
    columns = (
        "| model | dtype | update | budget | files | device | measured s | predicted s | error | afterwards s | error "
        "| plan s | error | try | drive before | drive after | read GB | wrote GB |"
    )
    lines = [
        summary(rows),
        "",
        explanation,
        "",
        columns,
        "|---" * 18 + "|",
    ]
    for line in rows:
        tried = line["tries"][line["counts"]]
        read = f"{tried['measured_read'] / 1e9:.3f} / {tried['predicted_read'] / 1e9:.3f}"
        written = f"{tried['measured_written'] / 1e9:.3f} / {tried['predicted_written'] / 1e9:.3f}"
        spread = f"{min(tried['all']):.2f} to {max(tried['all']):.2f}"
        mark = "*" if abs(tried["moved"]) > MOVED else ""
        lines.append(
            f"| {line['model']} | {line['dtype']} | {line['update']} | {line['share']:.0%} | {line['directories']} "
            f"| {line['device'].removeprefix('simulated:bandwidth=')} | {tried['measured']:.3f} ({spread}) "
            f"| {tried['predicted']:.3f} | {tried['error']:+.1%} | {tried['predicted_after']:.3f} "
            f"| {tried['error_after']:+.1%} | {tried['planned']:.3f} | {tried['error_planned']:+.1%} "
            f"| {line['counts'] + 1} of {len(line['tries'])}{mark} "
            f"| {drive(tried['before'])} | {drive(tried['after'])} | {read} | {written} |"
        )
    return "\n".join(lines)


def drive(rates: Mapping[str, float]) -> str:
    """Bandwidths in words."""
    return ", ".join(f"{rates[way] / 1e9:.2f}" for way in ("read", "write", "mixed"))


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
