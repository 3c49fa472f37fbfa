"""What our engine gets out of a drive, beside fio on the same file, alternating.

Owns the order of the runs: in every round each contender moves the same bytes of the same file at the same depth, and
the order is turned from round to round, so that a slow minute of a shared machine meets all of them. Does not measure
itself: fio does, and `swap.bench`. Guarantees medians, ratios between runs of one round, CPU of both; fio is optional.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import RESULTS, describe_surroundings, write_result

from swap import DATA_OFFSET
from swap.bench import PATTERNS, Case, Ground, Pattern
from swap.bench.load import Target, run_case

THEME = "io_beside_fio"
ENGINES = ("psync", "libaio", "io_uring")
BLOCK_SIZES = (1 << 20, 8 << 20)
OURS = "tiermem"
_FIO_PATTERN = {"read": "read", "write": "write", "mixed": "rw"}


@dataclass(frozen=True, slots=True)
class Contender:
    """fio with an engine, or our threads; one block size."""

    engine: str
    block_size: int

    def __str__(self) -> str:
        return f"{self.engine}, {self.block_size >> 20} MiB"


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
    fio = shutil.which(options.fio)
    sizes = BLOCK_SIZES[-1:] if options.quick else BLOCK_SIZES
    contenders = [Contender(OURS, size) for size in sizes]
    if fio is None:
        print("fio: skipped, it is not installed (Debian: apt install fio)")
    else:
        contenders += [Contender(engine, size) for engine in ENGINES for size in sizes]
    runs = run_all(options, fio, contenders)
    body = "\n\n".join(table(pattern, [run for run in runs if run.pattern == pattern]) for pattern in PATTERNS)
    settings = (
        f"One file of {options.mebibytes} MiB, {options.depth} requests in flight, direct, {options.seconds:g} s a "
        f"run, {options.rounds} rounds. CPU: user and system time of the process."
    )
    body = f"{settings}\n\n{body}" + ("" if fio else "\n\nfio: skipped, it was not installed.")
    print(body)
    results = options.results or (None if options.quick else RESULTS)
    if results is not None:
        surroundings = describe_surroundings(("numpy",))
        raw = {"surroundings": surroundings.to_markdown(), "settings": settings, "runs": [asdict(run) for run in runs]}
        print(f"\nwritten: {write_result(THEME, surroundings, body, raw, results)}")
    return 0 if any(run.error is None for run in runs) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small file, one round, no result file: does it run")
    parser.add_argument("--directory", type=Path, default=Path(), help="where the file goes (default: here)")
    parser.add_argument("--mebibytes", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run, after a second of ramp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=8, help="requests in flight")
    parser.add_argument("--fio", default="fio", help="the fio to run")
    parser.add_argument("--results", type=Path, help=f"where the result goes (default: {RESULTS.name}/)")
    return parser.parse_args(arguments)


def run_all(options: argparse.Namespace, fio: str | None, contenders: Sequence[Contender]) -> list[Run]:
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
            for pattern in PATTERNS:
                turn = number % len(contenders)
                for contender in (*contenders[turn:], *contenders[:turn]):
                    print(f"round {number + 1} of {options.rounds}: {pattern}, {contender}", file=sys.stderr)
                    if contender.engine == OURS:
                        case = Case(pattern, "threads", contender.block_size, depth, direct=ground.direct)
                        sample, _ = run_case(ground, whole, case, seconds=options.seconds)
                        rate, cores = sample.bytes_per_second / 1e9, sample.cpu_cores
                        runs.append(Run(pattern, number, str(contender), rate, cores))
                    elif fio is not None:
                        runs.append(run_fio(fio, ground, pattern, contender, options, number))
    return runs


def run_fio(
    fio: str, ground: Ground, pattern: Pattern, contender: Contender, options: argparse.Namespace, number: int
) -> Run:
    """Run fio on the data of our file: `depth` threads for psync, one thread with that depth for the others."""
    jobs = options.depth if contender.engine == "psync" else 1
    share = ground.nbytes // jobs // contender.block_size * contender.block_size
    command = [
        fio, "--name=beside", f"--filename={ground.files[0].path}", f"--ioengine={contender.engine}", "--thread",
        f"--rw={_FIO_PATTERN[pattern]}", "--rwmixread=50", f"--bs={contender.block_size}",
        f"--direct={ground.direct:d}",
        f"--numjobs={jobs}", f"--iodepth={options.depth // jobs}", f"--offset={DATA_OFFSET}", f"--size={share}",
        f"--offset_increment={share}", "--time_based", f"--runtime={round(options.seconds * 1000)}ms",
        f"--ramp_time={min(500, round(options.seconds * 150))}ms", "--group_reporting", "--allow_file_create=0",
        "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Run(pattern, number, str(contender), error=error)
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    rate = sum(job[way]["bw_bytes"] for way in ("read", "write")) / 1e9
    # fio divides the CPU time of all threads by the running time of all threads.
    return Run(pattern, number, str(contender), rate, (job["usr_cpu"] + job["sys_cpu"]) / 100 * jobs)


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
    """Say how our best does beside fio's best: the median of the ratios of each round, and the CPU for each byte."""
    ours = max((name for name in medians if name.startswith(OURS)), key=medians.__getitem__, default=None)
    theirs = max((name for name in medians if not name.startswith(OURS)), key=medians.__getitem__, default=None)
    if ours is None or theirs is None:
        return "No comparison: only one side ran."
    by_round = {(run.contender, run.round): run for run in runs if run.error is None}
    rounds = [number for name, number in by_round if name == ours and (theirs, number) in by_round]
    pairs = [(by_round[ours, number], by_round[theirs, number]) for number in rounds]
    ratios = [one.gigabytes_per_second / other.gigabytes_per_second for one, other in pairs]
    costs = [one.cpu_per_gigabyte / other.cpu_per_gigabyte for one, other in pairs if other.cpu_per_gigabyte]
    cost = f"{statistics.median(costs):.2f}" if costs else "unknown"
    return (
        f"Best against best, {ours} beside {theirs}: bandwidth {statistics.median(ratios):.3f} of fio's "
        f"({min(ratios):.2f} to {max(ratios):.2f} in a round), CPU for each byte {cost} of fio's."
    )


if __name__ == "__main__":
    sys.exit(main())
