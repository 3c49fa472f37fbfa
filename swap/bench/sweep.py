"""The sweep: fill the files, explore every case, let the best run against each other, report.

Owns the order of the slices and who is measured again. Does not know how a slice is made. Guarantees that every case of
a plan is measured, that what is called best was measured in several slices in turn with its rivals, and that the files
are removed whatever happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from swap.bench.cases import PATTERNS, Case, Measurement, Pattern, Sample, choose_best
from swap.bench.ground import Ground
from swap.bench.load import STEADY_WINDOWS, Interrupted, Series, Target, run_case
from swap.bench.plan import FINALISTS, ROUNDS, Plan
from swap.bench.report import BenchReport, DeviceResult, FirstWrite, PatternResult, SteadyState
from swap.errors import no_thread
from swap.syscalls import SystemCalls

_ATTENTION = 0.2  # seconds
_NO_END = 3600.0  # seconds for a slice that ends by bytes
_SPREAD = 0.2  # of the mean


Progress = Callable[[str, float], None]
"""Is told what begins and about how many seconds it will take."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One plan being measured on its ground."""

    plan: Plan
    ground: Ground
    progress: Progress
    halt: threading.Event

    def run(self) -> BenchReport:
        """Measure everything. Waits. Raises SwapIOError for a failed request."""
        order = self.plan.order
        first_write = [self._fill(index) for index in range(len(order.directories))]
        alone = [Target((index,), (1.0,)) for index in range(len(order.directories))]
        devices: list[DeviceResult] = []
        target = alone[0]
        if len(alone) > 1:
            devices = [self._device(index, one) for index, one in enumerate(alone)]
            target = Target(tuple(range(len(alone))), tuple(self._weights(devices)))
        results = {pattern: self._pattern(pattern, target) for pattern in PATTERNS}
        return BenchReport(
            order=order,
            direct=self.ground.direct,
            first_write=tuple(first_write),
            results=results,
            devices=tuple(devices),
            weights=target.weights,
            steady_state=self._steady(results["write"], target),
        )

    def _fill(self, index: int) -> FirstWrite:
        """Write every byte of a file twice: the first pass pays for the file system's bookkeeping, too."""
        directory = self.plan.order.directories[index]
        target, fill = Target((index,), (1.0,)), self._adapted(self.plan.fill)
        passes = []
        for name in ("first write", "overwrite"):
            self.progress(f"{name} in {directory}", self.ground.nbytes / 1e9)
            sample, _ = self._measure(target, fill, _NO_END, self.ground.nbytes)
            passes.append(Measurement(fill, sample))
        return FirstWrite(str(directory), *passes)

    def _pattern(self, pattern: Pattern, target: Target) -> PatternResult:
        plan = self.plan
        samples = {case: Sample() for case in dict.fromkeys(map(self._adapted, plan.of_pattern(pattern)))}

        def measure(case: Case, seconds: float) -> None:
            self.progress(str(case), seconds)
            samples[case] = samples[case].plus(self._measure(target, case, seconds)[0])

        for case in samples:
            measure(case, plan.slice_seconds)
        ranked = sorted(samples, key=lambda case: samples[case].bytes_per_second, reverse=True)
        finalists = ranked[:FINALISTS]
        for _ in range(ROUNDS):
            for case in finalists:
                measure(case, plan.final_seconds)
        best = choose_best(Measurement(case, samples[case]) for case in finalists)
        return PatternResult(best, tuple(Measurement(case, sample) for case, sample in samples.items()))

    def _device(self, index: int, target: Target) -> DeviceResult:
        """One directory alone, at the settings of the fill: a sweep of each would take too long."""
        found: dict[Pattern, Measurement] = {}
        for pattern in PATTERNS:
            case = self._adapted(replace(self.plan.fill, pattern=pattern))
            self.progress(f"{self.plan.order.directories[index]} alone: {case}", 2 * self.plan.slice_seconds)
            found[pattern] = Measurement(case, self._measure(target, case, 2 * self.plan.slice_seconds)[0])
        file = self.ground.files[index]
        return DeviceResult(str(self.plan.order.directories[index]), file.device, file.direct, found)

    def _weights(self, devices: Sequence[DeviceResult]) -> list[float]:
        """In proportion to the mixed pattern alone; directories on one device share what it gives."""
        numbers = [device.device for device in devices]
        return [
            max(1.0, device.found["mixed"].sample.bytes_per_second) / numbers.count(device.device) for device in devices
        ]

    def _steady(self, written: PatternResult, target: Target) -> SteadyState | None:
        order = self.plan.order
        if not (order.steady_seconds or order.steady_bytes) or written.best is None:
            return None
        case = written.best.case
        self.progress(f"steady state: {case}", order.steady_seconds or order.steady_bytes / 1e9)
        seconds = order.steady_seconds or _NO_END
        sample, series = self._measure(target, case, seconds, order.steady_bytes or None)
        return SteadyState(Measurement(case, sample), series, settled_at(series))

    def _measure(self, target: Target, case: Case, seconds: float, nbytes: int | None = None) -> tuple[Sample, Series]:
        return run_case(self.ground, target, case, seconds=seconds, nbytes=nbytes, halt=self.halt)

    def _adapted(self, case: Case) -> Case:
        """The case as this ground can run it: where direct I/O is refused, everything goes through the page cache."""
        return replace(case, direct=case.direct and self.ground.direct)


def settled_at(series: Series) -> float | None:
    """Seconds after which bandwidth stayed the same, None if it never did.

    The same: in every later stretch of `STEADY_WINDOWS` windows the highest and the lowest are within a fifth of their
    mean, the criterion by which storage is usually tested (SNIA SSS PTS, "steady state").
    """
    rates = series.bytes_per_second
    begin = None
    for start in range(len(rates) - STEADY_WINDOWS, -1, -1):
        stretch = rates[start : start + STEADY_WINDOWS]
        mean = sum(stretch) / STEADY_WINDOWS
        if mean <= 0 or max(stretch) - min(stretch) > _SPREAD * mean:
            break
        begin = start
    return None if begin is None else begin * series.window_seconds


def run_bench(
    plan: Plan, progress: Progress = lambda _what, _seconds: None, *, system: SystemCalls | None = None
) -> BenchReport:
    """Carry a plan out. Waits for about `plan.estimate_seconds()`.

    Raises SwapFullError or SwapIOError for a directory that cannot be used, SwapIOError for a failed transfer, and
    KeyboardInterrupt. In every case no file of it is left.

    All of it happens on a thread of its own, also `progress`: an interrupt is delivered to the main thread, which only
    waits here, so it can never tear the removal of the files or a transfer in two.
    """
    order, halt = plan.order, threading.Event()

    def work() -> BenchReport:
        if halt.is_set():
            raise Interrupted
        with Ground.open(
            order.directories,
            nbytes=order.nbytes,
            buffer_nbytes=plan.buffer_nbytes,
            huge_pages=order.huge_pages,
            system=system,
        ) as ground:
            return Sweep(plan, ground, progress, halt).run()

    worker = ThreadPoolExecutor(1, "swap-bench")
    try:
        try:
            running = worker.submit(work)
        except RuntimeError as error:
            raise no_thread("to measure on", error) from error
        # In short waits: a signal that another thread receives does not wake a thread that waits without end.
        while not wait([running], timeout=_ATTENTION).done:
            pass
        return running.result()
    finally:
        halt.set()
        worker.shutdown()
