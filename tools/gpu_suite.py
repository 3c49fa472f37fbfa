"""Everything that only a machine with a GPU can show, by one command, in under eight minutes, into one result file.

Owns the order: the CUDA tests, the same under compute-sanitizer where that is installed, then the benchmark. Does not
test or measure anything itself. Guarantees that the file is written whatever fails on the way, that it says what was
not run and why, and that the exit code is 0 only if tests and benchmark were run whole and passed.

    python tools/gpu_suite.py                 on a machine with a GPU
    python tools/gpu_suite.py --simulated     anywhere: the same on a simulated device and a tiny model
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 470.0
# Of that, at most: tests rather stop than leave nothing to the benchmark.
_TEST_SECONDS, _SANITIZER_SECONDS, _BENCH_SECONDS = 150.0, 60.0, 330.0
_SANITIZED = "copy or frames or bytes"  # the tests of the copies alone: everything runs many times slower there


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the suite: whether it passed, and what it has to say."""

    name: str
    passed: bool
    seconds: float
    summary: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; write the result; return the exit code."""
    options = parse(arguments)
    ends = time.monotonic() + options.seconds
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tiermem-gpu-suite-", dir=options.directory) as scratch:
        parts = [run_tests(Path(scratch), options, min(_TEST_SECONDS, options.seconds))]
        if not options.simulated:
            parts.append(run_sanitizer(min(_SANITIZER_SECONDS, ends - time.monotonic())))
        parts.append(run_benchmark(Path(scratch), options, min(_BENCH_SECONDS, ends - time.monotonic()), raw))
    path = write(options, parts, raw)
    for part in parts:
        print(f"{'passed' if part.passed else 'FAILED'}  {part.name} ({part.seconds:.0f} s): {part.summary}")
    print(f"written: {path}")
    return 0 if all(part.passed for part in parts) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="on a simulated device: does the suite run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything together")
    parser.add_argument("--tests", metavar="EXPRESSION", help="only these tests, as for pytest -k")
    parser.add_argument("--contenders", default="", metavar="TEXT", help="only contenders with this in their name")
    parser.add_argument("--directory", type=Path, help="where swap files go (default: the system's temporary folder)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the result goes")
    return parser.parse_args(arguments)


def run_tests(scratch: Path, options: argparse.Namespace, seconds: float) -> Part:
    """Run tests/cuda; on a machine with a GPU a skipped test is a failure, as it would hide that nothing was shown."""
    report = scratch / "tests.xml"
    environment = {**os.environ, "TIERMEM_GPU_SUITE": "simulated" if options.simulated else "cuda"}
    command = [sys.executable, "-m", "pytest", "tests/cuda", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += ["-k", options.tests] if options.tests else []
    taken, done = run(command, seconds, environment)
    if not report.exists():
        return Part("tests", False, taken, done or f"not done after {seconds:.0f} s")
    suite = next(ET.parse(report).iter("testsuite"))  # noqa: S314 - written by the process above
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    summary = ", ".join(f"{number} {name}" for name, number in count.items())
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in suite if case.find("failure") is not None]
    good = not count["failures"] and not count["errors"] and (options.simulated or not count["skipped"])
    return Part("tests", good and count["tests"] > count["skipped"], taken, "; ".join([summary, *failed[:20]]))


def run_sanitizer(seconds: float) -> Part:
    """Run the tests of the copies under compute-sanitizer, if there is one and time for it."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or seconds < 10:
        return Part("compute-sanitizer", True, 0.0, "not run: " + ("no time" if tool else "not installed"))
    tests = [sys.executable, "-m", "pytest", "tests/cuda/test_device.py", "-k", _SANITIZED, "-p", "no:cacheprovider"]
    environment = {**os.environ, "TIERMEM_GPU_SUITE": "cuda"}
    taken, problem = run([tool, "--error-exitcode", "9", *tests], seconds, environment)
    return Part("compute-sanitizer", problem is None, taken, problem or "clean")


def run_benchmark(scratch: Path, options: argparse.Namespace, seconds: float, raw: dict[str, Any]) -> Part:
    """Run benchmarks/gpu_step.py; what it measured is added to `raw`."""
    answer = scratch / "benchmark.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_step.py"), "--seconds", f"{max(0.0, seconds - 5):.0f}"]
    command += ["--json", str(answer), "--directory", str(scratch), "--only", options.contenders]
    taken, problem = run([*command, *(["--simulated"] if options.simulated else [])], seconds, dict(os.environ))
    if answer.exists():
        raw.update(json.loads(answer.read_text(encoding="utf-8")))
    summary = f"{len(raw.get('runs', []))} contenders"
    return Part("benchmark", problem is None, taken, summary if problem is None else f"{summary}; {problem}")


def run(command: Sequence[str], seconds: float, environment: dict[str, str]) -> tuple[float, str | None]:
    """Run a command in the checkout; return the seconds it took, and what went wrong: None if nothing did."""
    started = time.monotonic()
    environment["PYTHONPATH"] = str(ROOT)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=max(1.0, seconds)
        )
    except subprocess.TimeoutExpired:
        return time.monotonic() - started, f"not done after {seconds:.0f} s"
    if done.returncode == 0:
        return time.monotonic() - started, None
    print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return time.monotonic() - started, f"exit code {done.returncode}: {last}"


def write(options: argparse.Namespace, parts: Sequence[Part], raw: dict[str, Any]) -> Path:
    """Write the one result: what was run on what, what came of it, the numbers."""
    sys.path.insert(0, str(ROOT / "benchmarks"))  # benchmarks are scripts, not a package
    import torch
    from common import describe_surroundings, write_result

    surroundings = describe_surroundings(("torch", "numpy"))
    device = "simulated"
    if not options.simulated and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device = f"{torch.cuda.get_device_name()}, {total / 2**30:.0f} GiB ({free / 2**30:.0f} free)"
        device += f", CUDA {torch.version.cuda}"
    lines = [f"- GPU: {device}", "", "| part | passed | seconds | |", "|---|---|---|---|"]
    lines += [
        f"| {part.name} | {'yes' if part.passed else 'no'} | {part.seconds:.0f} | {part.summary} |" for part in parts
    ]
    body = "\n".join([*lines, "", str(raw.pop("body", "The benchmark has measured nothing."))])
    record = {
        "surroundings": surroundings.to_markdown(),
        "device": device,
        "parts": [asdict(part) for part in parts],
        "benchmark": raw,
    }
    return write_result("gpu_suite", surroundings, body, record, options.results)


if __name__ == "__main__":
    sys.exit(main())
