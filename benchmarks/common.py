"""What the benchmarks share: the description of the machine, memory counters, processes that are ranks, result files.

Owns the form of a result: Markdown for people and raw JSON beside it, both named by theme, hardware and date. Imports
neither torch nor tiermem, so that a contender in another environment can use it. Guarantees that a result says what it
was measured on, with what, when and by which command.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import multiprocessing
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a measurement was made on, with, when and how."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    packages: dict[str, str]
    revision: str
    date: str
    command: str

    def to_markdown(self) -> str:
        """Return the surroundings as a list."""
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return "\n".join(
            [
                f"- hardware: {self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB of memory",
                f"- system: {self.kernel}, Python {self.python}, {packages}",
                f"- revision: {self.revision}",
                f"- date: {self.date}",
                f"- command: `{self.command}`",
            ]
        )

    def slug(self) -> str:
        """Return the hardware as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.cpu} {self.cores} cores".lower()).strip("-")


def describe_surroundings(packages: Sequence[str]) -> Surroundings:
    """Look at this machine and at the versions of `packages`."""
    return Surroundings(
        cpu=processor(),
        cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in packages},
        revision=revision(),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        command=shlex.join(["python", Path(sys.argv[0]).as_posix().removeprefix(f"{Path.cwd()}/"), *sys.argv[1:]]),
    )


def processor() -> str:
    """Return the processor's name, from where py-cpuinfo has it, too: that takes a second for everything else."""
    told = Path("/proc/cpuinfo")
    for line in told.read_text(encoding="utf-8").splitlines() if told.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    import cpuinfo

    return str(cpuinfo.get_cpu_info().get("brand_raw", platform.machine()))


def revision() -> str:
    """Return the commit being measured, marked if files differ from it; "unknown" outside a checkout.

    Results do not count: what one part has written is joined by the next one, of the same revision.
    """
    git = ["git", "-C", str(HERE)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        measured = ["status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){HERE / 'results'}"]
        changes = subprocess.run([*git, *measured], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + (" with changes" if changes.stdout.strip() else "")


def end_on_sigterm() -> None:
    """Let SIGTERM, too, end the program by an exception, so that contenders are ended and swap files removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def resident_bytes() -> int:
    """Return the bytes of memory this process occupies now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the most bytes of memory this process has occupied so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss survives exec, so a child would inherit its parent's peak; VmHWM does not.
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def drive_bytes() -> tuple[int, int]:
    """Return the bytes this process has read from and written to drives so far, by the kernel's own count.

    One instrument for every contender, whatever it says of itself: what comes from the page cache is not counted as
    read. (0, 0) where the kernel does not tell.
    """
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


_KINDS = {"MainThread": "main", "tiermem-pager": "pager", "tiermem-update": "update", "tiermem-update-share": "update"}


def thread_seconds() -> dict[str, float]:
    """Return the processor seconds of this process's threads so far, by what they do, by the kernel's own count.

    "main" is the thread that computes, "native" those that are not Python's: the ones that help it compute, and those
    of libraries. "io" are the threads of a `swap.Engine`, "ended" those that are no more (a micro-batch's). {} where
    the kernel does not tell.
    """
    names = {thread.native_id: thread.name.split("_")[0] for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for folder in Path("/proc/self/task").glob("*"):
        name = names.get(int(folder.name))
        kind = "native" if name is None else "io" if name.startswith("swap-") else _KINDS.get(name, "other")
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            found[kind] = found.get(kind, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    if found:
        found["ended"] = max(0.0, time.process_time() - sum(found.values()))
    return found


def arguments_of(description: str | None, *, quick: str, swaps: bool = True) -> argparse.ArgumentParser:
    """What every benchmark takes; `quick`: what is less with `--quick`, `swaps`: whether there are swap files."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{quick}, no result file: does it run")
    if swaps:
        parser.add_argument("--directory", type=Path, default=Path(), help="where swap files go (default: here)")
    parser.add_argument("--results", type=Path, help=f"where the result goes (default: {RESULTS.name}/)")
    return parser


def result_folder(options: argparse.Namespace) -> Path | None:
    """Where the result goes; None: nowhere, of a quick run for which no folder is named."""
    folder: Path | None = options.results or (None if options.quick else RESULTS)
    return folder


def write_result(
    theme: str, surroundings: Surroundings, body: str, raw: Mapping[str, Any], folder: Path = RESULTS
) -> Path:
    """Write `body` (Markdown) and `raw` (JSON) as one result; return the path of the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{theme}_{surroundings.slug()}_{surroundings.date}.md"
    title = theme.replace("_", " ").capitalize()
    path.write_text(f"# {title}\n\n{surroundings.to_markdown()}\n\n{body}\n", encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    return path


def report(
    theme: str, packages: Sequence[str], body: str, raw: Mapping[str, Any], options: argparse.Namespace
) -> Path | None:
    """Print `body`, and write it and `raw` as one result; return its Markdown, None if it goes nowhere."""
    print(body)
    folder = result_folder(options)
    if folder is None:
        return None
    surroundings = describe_surroundings(packages)
    path = write_result(theme, surroundings, body, {"surroundings": surroundings.to_markdown(), **raw}, folder)
    print(f"\nwritten: {path}")
    return path


def on_ranks(target: Callable[..., None], size: int, *arguments: object, seconds: float) -> list[dict[str, Any]]:
    """Return what each of `size` processes leaves in `<rank>.json` of a folder they share.

    Each calls `target(rank, *arguments, folder)`. Forked, so from a process that has imported everything and computed
    nothing. Raises RuntimeError, with their exit codes, if one has not ended well after `seconds`.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        ranks = [context.Process(target=target, args=(rank, *arguments, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(seconds)
            process.kill()
            process.join()
        files = [Path(folder, f"{rank}.json") for rank in range(size)]
        codes = [process.exitcode for process in ranks]
        if any(codes) or not all(file.exists() for file in files):
            raise RuntimeError(f"{target.__name__}{arguments} of {size} ranks did not end well, exit codes {codes}")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def earlier_result(theme: str, surroundings: Surroundings, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the raw part of today's result on this hardware, for a benchmark run in pieces; {} if there is none."""
    path = (folder / f"{theme}_{surroundings.slug()}_{surroundings.date}.md").with_suffix(".json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found
