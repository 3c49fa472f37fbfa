"""Everything that only a machine with a GPU can show, by one command, in under eight minutes, into one result file.

Owns the order: the CUDA tests, the same under compute-sanitizer where that is installed, then the benchmark. Does not
test or measure anything itself, and has nothing on the GPU. Guarantees that the file is there from the beginning and
written anew as each part ends, whatever fails on the way, that it says what was not run and why, and holds the ends of
what failing parts said, that no part outlives its own limit, and that the exit code is 0 only if tests and benchmark
were run whole and passed, and compute-sanitizer too where there is one.

    python tools/gpu_suite.py                 on a machine with a GPU
    python tools/gpu_suite.py --simulated     anywhere: the same on a simulated device and a tiny model
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 470.0
# Of that, at most: tests rather stop than leave nothing to the benchmark.
_TEST_SECONDS, _SANITIZER_SECONDS, _BENCH_SECONDS = 150.0, 60.0, 400.0
_MOST_WORKERS = 8
_LAST = 10.0  # of the tests' time: when it begins no further test does, and there is a report of those that were run
_ONE_TEST = 60  # seconds: a test that hangs is ended, and its stack shown
_KEPT = 4000  # characters of what a failing test, or part, said
_VERDICTS = {True: "passed", False: "FAILED", None: "not run"}
_SANITIZED = "copy or frames or bytes"  # the tests of the copies alone: everything runs many times slower there
_ASK_SECONDS = 60.0  # torch may be read from disk for the first time
_ASK = """
import torch
free, total = torch.cuda.mem_get_info()
size = f"{total / 2**30:.0f} GiB ({free / 2**30:.0f} free)"
print(f"{torch.cuda.get_device_name()}, {size}, CUDA {torch.version.cuda}")
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the suite: whether it was finished and good (None: it cannot be run here), what it has to say."""

    name: str
    passed: bool | None
    seconds: float
    summary: str
    output: str = ""


Wanted = tuple[str, float, Callable[[float], Part]]  # a part's name, the seconds it may take, how it is run


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a command: seconds, what went wrong (None: nothing), whether it was ended, the end of its words."""

    seconds: float
    problem: str | None
    ended: bool
    output: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; write the result; return the exit code."""
    options = parse(arguments)
    ends = time.monotonic() + options.seconds
    raw: dict[str, Any] = {}
    parts: list[Part] = []
    options.device = "simulated" if options.simulated else name_device()
    path = write(options, parts, raw)  # now: what keeps it from being written is not found out behind the tests
    with tempfile.TemporaryDirectory(prefix="tiermem-gpu-suite-", dir=options.directory) as folder:
        scratch = Path(folder)
        tests: Wanted = ("tests", _TEST_SECONDS, lambda seconds: run_tests(scratch, options, seconds))
        sanitizer: Wanted = ("compute-sanitizer", _SANITIZER_SECONDS, run_sanitizer)
        bench: Wanted = ("benchmark", _BENCH_SECONDS, lambda seconds: run_benchmark(scratch, options, seconds, raw))
        # What is timed is alone.
        for together in ([tests] if options.simulated else [tests, sanitizer], [bench]):
            with ThreadPoolExecutor(len(together)) as threads:
                under_way = [threads.submit(attempt, *each, ends) for each in together]
                parts += [future.result() for future in under_way]
            path = write(options, parts, raw)
            for part in parts[-len(together) :]:
                print(f"{_VERDICTS[part.passed]}  {part.name} ({part.seconds:.0f} s): {part.summary}")
    print(f"written: {path}")
    return 1 if any(part.passed is False for part in parts) else 0


def attempt(name: str, most: float, carry_out: Callable[[float], Part], ends: float) -> Part:
    """Run a part for `most` seconds and not beyond `ends`.

    One that cannot even be run has failed, and does not keep the others from being run.
    """
    started = time.monotonic()
    try:
        return carry_out(min(most, ends - started))
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes into the result
        said = "".join(traceback.format_exception(error))[-_KEPT:]
        return Part(name, False, time.monotonic() - started, f"{type(error).__name__}: {error}", said)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="on a simulated device: does the suite run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything together")
    parser.add_argument("--tests", metavar="EXPRESSION", help="only these tests, as for pytest -k")
    parser.add_argument("--contenders", default="", metavar="REGEX", help="only contenders in whose name this is found")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed, to stand beside it")
    parser.add_argument("--directory", type=Path, help="where swap files go (default: the system's temporary folder)")
    parser.add_argument("--traces", type=Path, help="where the timelines of tiermem's runs go, if they are wanted")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the result goes")
    return parser.parse_args(arguments)


def name_device() -> str:
    """What the GPU is, or why that is not known.

    Asked by a process of its own: a GPU that has failed, or may have one process at a time, costs this one nothing.
    """
    done = run([sys.executable, "-c", _ASK], _ASK_SECONDS, dict(os.environ))
    lines = done.output.strip().splitlines()
    return lines[-1] if done.problem is None and lines else f"not known: {done.problem or 'it said nothing'}"


def run_tests(scratch: Path, options: argparse.Namespace, seconds: float) -> Part:
    """Run tests/cuda; on a machine with a GPU a skipped test is a failure, as it would hide that nothing was shown."""
    report, failures = scratch / "tests.xml", scratch / "failures.txt"
    environment = {**os.environ, "TIERMEM_GPU_SUITE": "simulated" if options.simulated else "cuda"}
    environment["TIERMEM_GPU_SUITE_SECONDS"] = str(max(1.0, seconds - _LAST))
    environment["TIERMEM_GPU_SUITE_FAILURES"] = str(failures)
    command = [sys.executable, "-m", "pytest", "tests/cuda", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += [f"--basetemp={scratch / 'tests'}"]  # swap files are to lie where the caller says
    # One line a test: if all of it has to be ended, the last one says where it was.
    command += ["-vv", "-o", f"timeout={_ONE_TEST}", "-o", f"faulthandler_timeout={_ONE_TEST - 10}"]
    command += ["-k", options.tests] if options.tests else []
    workers = min(_MOST_WORKERS, (os.cpu_count() or 1) // 2)
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(workers), "-p", "no:benchmark"]  # that plug-in warns of the other one
    done = run(command, seconds, environment)
    if not report.exists():  # ended from outside, as where a test hangs: what had failed before is known all the same
        before = failures.read_text(encoding="utf-8")[: 2 * _KEPT] if failures.exists() else ""
        return Part("tests", False, done.seconds, done.problem or "no report", before + done.output)
    suite = next(ET.parse(report).iter("testsuite"))  # noqa: S314 - written by the process above
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    summary = ", ".join(f"{number} {name}" for name, number in count.items())
    failed = {
        f"{case.get('classname')}::{case.get('name')}": (found.text or found.get("message", ""))[-_KEPT:]
        for case in suite
        for found in (*case.findall("failure"), *case.findall("error"))
    }
    good = not count["failures"] and not count["errors"] and (options.simulated or not count["skipped"])
    good = good and done.problem is None and count["tests"] > count["skipped"]
    stopped = [] if done.problem is None or failed else [done.problem]
    said = "\n\n".join(f"{name}\n{text}" for name, text in failed.items()) or ("" if good else done.output)
    return Part("tests", good, done.seconds, "; ".join([summary, *stopped, *list(failed)[:20]]), said)


def run_sanitizer(seconds: float) -> Part:
    """Run the tests of the copies under compute-sanitizer, if there is one; passed: to their end, and clean."""
    name, tool = "compute-sanitizer", shutil.which("compute-sanitizer")
    if tool is None:
        return Part(name, None, 0.0, "not installed")
    if seconds < 10:
        return Part(name, False, 0.0, f"not run: {seconds:.0f} s were left, and it needs 10 or more")
    tests = [sys.executable, "-m", "pytest", "tests/cuda/test_device.py", "-k", _SANITIZED, "-p", "no:cacheprovider"]
    environment = {**os.environ, "TIERMEM_GPU_SUITE": "cuda"}
    done = run([tool, "--error-exitcode", "9", *tests], seconds, environment)
    # Everything is many times slower there, so its limit may well be reached; what is not finished shows nothing.
    found = f"not finished: {done.problem}" if done.ended else done.problem or "clean"
    return Part(name, done.problem is None, done.seconds, found, "" if done.problem is None else done.output)


def run_benchmark(scratch: Path, options: argparse.Namespace, seconds: float, raw: dict[str, Any]) -> Part:
    """Run benchmarks/gpu_step.py; what it measured is added to `raw`."""
    answer = scratch / "benchmark.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_step.py"), "--seconds", f"{max(0.0, seconds - 5):.0f}"]
    command += ["--json", str(answer), "--directory", str(scratch), "--only", options.contenders]
    command += ["--deepspeed", options.deepspeed] if options.deepspeed else []
    command += ["--traces", str(options.traces.resolve())] if options.traces else []
    done = run([*command, *(["--simulated"] if options.simulated else [])], seconds, dict(os.environ))
    if answer.exists():
        raw.update(json.loads(answer.read_text(encoding="utf-8")))
    summary = f"{len(raw.get('runs', []))} contenders"
    summary = summary if done.problem is None else f"{summary}; {done.problem}"
    return Part("benchmark", done.problem is None, done.seconds, summary, "" if done.problem is None else done.output)


def run(command: Sequence[str], seconds: float, environment: dict[str, str]) -> Outcome:
    """Run a command in the checkout, and end it and all it has started when its time is up."""
    started = time.monotonic()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
        # A session of its own: a contender that was left behind would keep the GPU's memory from those that follow.
        running = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=words, stderr=subprocess.STDOUT, start_new_session=True
        )
        ended = False
        try:
            code = running.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            ended = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            code = running.wait()
        words.seek(0)
        output = words.read()[-2 * _KEPT :]
    taken = time.monotonic() - started
    if ended:
        return Outcome(taken, f"not done after {seconds:.0f} s", True, output)
    if code == 0:
        return Outcome(taken, None, False, output)
    print(output, file=sys.stderr)
    return Outcome(taken, f"exit code {code}: {(output.strip() or 'no output').splitlines()[-1]}", False, output)


def write(options: argparse.Namespace, parts: Sequence[Part], raw: dict[str, Any]) -> Path:
    """Write the one result: what was run on what, what came of it, the numbers."""
    sys.path.insert(0, str(ROOT / "benchmarks"))  # benchmarks are scripts, not a package
    from common import describe_surroundings, write_result

    surroundings = describe_surroundings(("torch", "numpy"))
    lines = [f"- GPU: {options.device}", "", "| part | | seconds | |", "|---|---|---|---|"]
    lines += [f"| {part.name} | {_VERDICTS[part.passed]} | {part.seconds:.0f} | {part.summary} |" for part in parts]
    body = "\n".join([*lines, "", str(raw.get("body", "The benchmark has measured nothing."))])
    record = {
        "surroundings": surroundings.to_markdown(),
        "device": options.device,
        "parts": [asdict(part) for part in parts],
        "benchmark": {name: value for name, value in raw.items() if name != "body"},
    }
    return write_result("gpu_suite", surroundings, body, record, options.results)


if __name__ == "__main__":
    sys.exit(main())
