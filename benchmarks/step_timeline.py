"""What the drive, the update and the computation do in the course of one step, where a goal is missed and where not.

Owns the cases, and how the events of a step become rates in short slices of it and means over its phases. Does not
train (`tiermem_contender.py` does, in a process of its own) and compares nobody. Guarantees that all bytes moved in the
step are in the slices, each move's spread evenly over the time from when it was asked for to its end.

A move counts from its request on, so with many in flight the rates of neighbouring slices flow into each other.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import arguments_of, end_on_sigterm, report
from train_step import Contender, Plan, run_one

THEME = "step_timeline"
PACKAGES = ("torch", "transformers", "numpy")
SLICES = 60
BUDGET = {"host_memory": "512MiB"}
TOGETHER = {**BUDGET, "accumulate": "8", "vertical": "yes"}
CASES = {
    "168 M parameters, 512 tokens": ("compute-bound", BUDGET),
    "537 M parameters, 64 tokens": ("io-bound", BUDGET),
    "537 M, eight micro-batches of 8 tokens together": ("io-bound-eighth", TOGETHER),
}
QUICK = {"three small layers": ("quick", {"host_memory": "8MiB"})}
HEADINGS = (
    "| phase | s | read, GB/s | written, GB/s | reads under way | writes under way | computation waits | update runs |"
)
READ, WRITTEN, WAITING, UPDATING = "swap->host", "host->swap", "waiting", "updating"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that went on from `start` to `end`, seconds since the step began; `nbytes` that it moved, if any."""

    start: float
    end: float
    nbytes: int = 0

    def share(self, start: float, end: float) -> float:
        """Return how much of it is in [start, end), from 0 to 1; what took no time is where it began."""
        if self.end <= self.start:
            return float(start <= self.start < end)
        return max(0.0, min(end, self.end) - max(start, self.start)) / (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Means:
    """What went on in a part of a step.

    Attributes:
        name: of the phase; "" for a slice.
        start, end: seconds since the step began.
        read, written: GB/s.
        reading, writing: moves that had been asked for and had not ended.
        waiting, updating: the share of the time in which the computation waited, and in which an update kernel ran.
    """

    name: str
    start: float
    end: float
    read: float
    written: float
    reading: float
    writing: float
    waiting: float
    updating: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Train each case, print what its last step looked like, write the result; return the exit code."""
    parser = arguments_of(__doc__, quick="a tiny model")
    parser.add_argument("--steps", type=int, default=5, help="after two that are not looked at; the last is shown")
    options = parser.parse_args(arguments)
    looks, failed = [], False
    for name, (workload, settings) in (QUICK if options.quick else CASES).items():
        print(name, file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            contender = Contender(name, "tiermem_contender.py", sys.executable, {**settings, "trace": str(trace)})
            run = run_one(Plan((workload,), (contender,), 1, 2, options.steps, options.directory), workload, contender)
            if run["error"] is not None:
                print(f"{name}: {run['error']}", file=sys.stderr)
                failed = True
                continue
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        looks.append({"name": name, "workload": workload, "settings": settings, **look(events)})
    body = "\n\n".join(map(text_of, looks))
    report(THEME, PACKAGES, body, {"cases": looks}, options)
    return 1 if failed else 0


def look(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last whole step of a Chrome trace: its seconds, its slices and its phases."""
    step = [event for event in events if event.get("cat") == "steps"][-1]
    start, seconds = step["ts"], step["dur"] / 1e6
    spans: dict[str, list[Span]] = {READ: [], WRITTEN: [], WAITING: [], UPDATING: []}
    backward: list[Span] = []
    for event in events:
        if event["ph"] != "X" or event["ts"] > start + step["dur"] or event["ts"] + event["dur"] < start:
            continue
        begun = (event["ts"] - start) / 1e6
        span = Span(begun, begun + event["dur"] / 1e6, event["args"].get("bytes", 0))
        lane = event["cat"]
        if lane in (READ, WRITTEN):
            spans[lane].append(span)
        elif lane == "update":
            spans[UPDATING].append(span)
        elif lane == "compute" and event["name"] == "stall":
            spans[WAITING].append(span)
        elif lane == "compute" and event["name"].startswith("backward"):
            backward.append(span)
    width = seconds / SLICES
    slices = [means("", number * width, (number + 1) * width, spans) for number in range(SLICES)]
    turn = min((span.start for span in backward), default=seconds)
    last = max((span.end for span in backward), default=seconds)
    phases = [("forward", 0.0, turn), ("backward", turn, last), ("the rest", last, seconds)]
    found = [means(*phase, spans) for phase in (*phases, ("all of it", 0.0, seconds)) if phase[2] > phase[1]]
    return {"seconds": seconds, "slices": list(map(asdict, slices)), "phases": list(map(asdict, found))}


def means(name: str, start: float, end: float, spans: dict[str, list[Span]]) -> Means:
    """Return what went on in [start, end) of a step."""
    long = end - start

    def rate(moves: Iterable[Span]) -> float:
        return sum(move.nbytes * move.share(start, end) for move in moves) / 1e9 / long

    def busy(own: Iterable[Span]) -> float:
        return sum((span.end - span.start) * span.share(start, end) for span in own) / long

    read, written = spans[READ], spans[WRITTEN]
    return Means(
        name,
        start,
        end,
        read=rate(read),
        written=rate(written),
        reading=busy(read),
        writing=busy(written),
        waiting=busy(spans[WAITING]),
        updating=busy(spans[UPDATING]),
    )


def text_of(case: dict[str, Any]) -> str:
    """Return the phases of a case as Markdown."""
    lines = [
        f"## {case['name']}: {case['seconds']:.2f} s",
        "",
        HEADINGS,
        "|---" * 8 + "|",
    ]
    lines.extend(
        f"| {phase['name']} | {phase['end'] - phase['start']:.2f} | {phase['read']:.2f} | {phase['written']:.2f} "
        f"| {phase['reading']:.1f} | {phase['writing']:.1f} | {phase['waiting']:.0%} | {phase['updating']:.0%} |"
        for phase in case["phases"]
    )
    return "\n".join(lines)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
