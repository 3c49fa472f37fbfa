"""What our engine gets out of a drive, beside fio on the same file, alternating.

Owns the order of the runs: in every round each contender moves the same bytes of the same file at the same depth, and
the order is turned from round to round, so that a slow minute of a shared machine meets all of them. Does not measure
itself: fio does, and `swap.bench`. Guarantees medians, ratios between runs of one round, CPU of both; fio is optional.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import fio
from common import arguments_of, describe_surroundings, earlier_result, result_folder, write_result

from swap import DATA_OFFSET
from swap.bench import PATTERNS, Case, Ground, Pattern
from swap.bench.load import Target, run_case

THEME = "io_beside_fio"
ENGINES = ("psync", "libaio", "io_uring")
BLOCK_SIZES = (1 << 20, 8 << 20)
OURS = "tiermem"


@dataclass(frozen=True, slots=True)
class Contender:
    """fio with an engine, or our threads; one block size; in huge pages or not (see fio.py)."""

    engine: str
    block_size: int
    huge_pages: bool

    def __str__(self) -> str:
        return f"{self.engine}, {self.block_size >> 20} MiB" + (", huge pages" if self.huge_pages else "")


@dataclass(frozen=True, slots=True)
class Run:
    """What one contender did once: GB/s, cores busy, and CPU seconds for each gigabyte; or why it could not."""

    pattern: str
    round: int
    contender: str
    gigabytes_per_second: float = 0.0
    cpu_cores: float = 0.0
    error: str | None = None

    @property
    def cpu_per_gigabyte(self) -> float:
        """CPU seconds for each 1e9 bytes."""
        return self.cpu_cores / self.gigabytes_per_second if self.gigabytes_per_second else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; print the tables, write the result; return the exit code."""
    options = parse(arguments)
    if options.quick:
        options.mebibytes, options.seconds, options.rounds = 64, 0.2, 1
    patterns = [pattern for pattern in PATTERNS if pattern in (options.patterns or PATTERNS)]
    program = shutil.which(options.fio)
    sizes = BLOCK_SIZES[-1:] if options.quick else BLOCK_SIZES
    contenders = [Contender(OURS, size, huge_pages=True) for size in sizes]
    if program is None:
        print("fio: skipped, it is not installed (Debian: apt install fio)")
    else:
        contenders += [
            Contender(engine, size, huge_pages=huge) for engine in ENGINES for size in sizes for huge in (False, True)
        ]
    surroundings = describe_surroundings(("numpy",))
    results = result_folder(options)
    earlier = earlier_result(THEME, surroundings, results) if options.add and results is not None else {}
    runs = [Run(**run) for run in earlier.get("runs", []) if run["pattern"] not in patterns]
    runs += run_all(options, program, contenders, patterns)
    body = "\n\n".join(
        table(pattern, found) for pattern in PATTERNS if (found := [run for run in runs if run.pattern == pattern])
    )
    settings = (
        f"One file of {options.mebibytes} MiB, {options.depth} requests in flight, direct, {options.seconds:g} s a "
        f"run, {options.rounds} rounds. CPU: user and system time of the process."
    )
    body = f"{settings}\n\n{body}" + ("" if program else "\n\nfio: skipped, it was not installed.")
    print(body)
    if results is not None:
        raw = {"surroundings": surroundings.to_markdown(), "settings": settings, "runs": [asdict(run) for run in runs]}
        print(f"\nwritten: {write_result(THEME, surroundings, body, raw, results)}")
    return 0 if any(run.error is None for run in runs) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments_of(__doc__, quick="a small file, one round")
    parser.add_argument("--mebibytes", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run, after half a second of ramp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=8, help="requests in flight")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, help="only these (default: all)")
    parser.add_argument("--add", action="store_true", help="keep the other patterns of today's result")
    parser.add_argument("--fio", default="fio", help="the fio to run")
    return parser.parse_args(arguments)


def run_all(
    options: argparse.Namespace, program: str | None, contenders: Sequence[Contender], patterns: Sequence[Pattern]
) -> list[Run]:
    """Lay the file out, then run everybody on every pattern, round by round; the file is removed at the end."""
    nbytes, depth = options.mebibytes << 20, options.depth
    whole = Target((0,), (1.0,))
    runs = []
    with Ground.open([options.directory], nbytes=nbytes, buffer_nbytes=max(BLOCK_SIZES) * depth) as ground:
        if not ground.direct:
            print("direct I/O is refused here: every figure includes a copy through the page cache", file=sys.stderr)
        fill = Case("write", "threads", max(BLOCK_SIZES), depth, direct=ground.direct)
        run_case(ground, whole, fill, seconds=3600.0, nbytes=nbytes)
        for number in range(options.rounds):
            for pattern in patterns:
                turn = number % len(contenders)
                for contender in (*contenders[turn:], *contenders[:turn]):
                    print(f"round {number + 1} of {options.rounds}: {pattern}, {contender}", file=sys.stderr)
                    if contender.engine == OURS:
                        case = Case(pattern, "threads", contender.block_size, depth, direct=ground.direct)
                        sample, _ = run_case(ground, whole, case, seconds=options.seconds)
                        rate, cores = sample.bytes_per_second / 1e9, sample.cpu_cores
                        runs.append(Run(pattern, number, str(contender), rate, cores))
                    elif program is not None:
                        runs.append(run_fio(program, ground, pattern, contender, options, number))
    return runs


def run_fio(
    program: str, ground: Ground, pattern: Pattern, contender: Contender, options: argparse.Namespace, number: int
) -> Run:
    """Run fio on the data of our file."""
    load = fio.Load(
        pattern,
        contender.engine,
        contender.block_size,
        options.depth,
        options.seconds,
        ground.nbytes,
        offset=DATA_OFFSET,
        huge_pages=contender.huge_pages,
        direct=ground.direct,
    )
    try:
        same = f"/proc/{os.getpid()}/fd/{ground.files[0].fileno()}"  # it has no name any more
        return Run(pattern, number, str(contender), *fio.run(program, same, load))
    except fio.FioError as error:
        return Run(pattern, number, str(contender), error=str(error))


def table(pattern: str, runs: Sequence[Run]) -> str:
    """Return the runs of one pattern as Markdown: medians over the rounds, and our best beside fio's best."""
    lines = [f"## {pattern}\n", "| contender | GB/s | CPU cores | CPU s/GB |", "|---|---|---|---|"]
    medians: dict[str, float] = {}
    for name in dict.fromkeys(run.contender for run in runs):
        good = [run for run in runs if run.contender == name and run.error is None]
        if not good:
            error = next(run.error for run in runs if run.contender == name)
            lines.append(f"| {name} | failed: {error} | | |")
            continue
        rates = [run.gigabytes_per_second for run in good]
        medians[name] = statistics.median(rates)
        lines.append(
            f"| {name} | {medians[name]:.2f} ({min(rates):.2f} to {max(rates):.2f}) "
            f"| {statistics.median(run.cpu_cores for run in good):.3f} "
            f"| {statistics.median(run.cpu_per_gigabyte for run in good):.4f} |"
        )
    return "\n".join([*lines, "", comparison(runs, medians)])


def comparison(runs: Sequence[Run], medians: dict[str, float]) -> str:
    """Say how we do beside fio's best: in huge pages and as fio comes; of any block size, and of 8 MiB."""
    found = []
    for size in ("", f", {BLOCK_SIZES[-1] >> 20} MiB"):
        mine = [name for name in medians if name.startswith(OURS) and size in name]
        for huge in (True, False):
            theirs = [
                name
                for name in medians
                if not name.startswith(OURS) and size in name and name.endswith("huge pages") is huge
            ]
            if mine and theirs:
                found.append(beside(*(max(names, key=medians.__getitem__) for names in (mine, theirs)), runs))
    return "\n".join(dict.fromkeys(found)) or "No comparison: only one side ran."


def beside(ours: str, theirs: str, runs: Sequence[Run]) -> str:
    """The median of the ratios of each round, and the CPU for each byte."""
    by_round = {(run.contender, run.round): run for run in runs if run.error is None}
    rounds = [number for name, number in by_round if name == ours and (theirs, number) in by_round]
    pairs = [(by_round[ours, number], by_round[theirs, number]) for number in rounds]
    ratios = [one.gigabytes_per_second / other.gigabytes_per_second for one, other in pairs]
    costs = [one.cpu_per_gigabyte / other.cpu_per_gigabyte for one, other in pairs if other.cpu_per_gigabyte]
    cost = f"{statistics.median(costs):.2f}" if costs else "unknown"
    return (
        f"- {ours} beside {theirs}: bandwidth {statistics.median(ratios):.3f} of fio's "
        f"({min(ratios):.2f} to {max(ratios):.2f} in a round), CPU for each byte {cost} of fio's."
    )


if __name__ == "__main__":
    sys.exit(main())
