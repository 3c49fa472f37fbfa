"""The load: a fixed number of requests in flight, each followed by the next as soon as it is done.

Owns the order of the requests of one case and the clock around them. Uses an engine as anybody would; does not know
sweeps. Guarantees that measuring stops at its end or when it is interrupted, with nothing in flight any more, and that
what began or ended outside the measured window is not counted.

The requests follow each other on the threads that complete them, so that a wake-up costs the load what it costs
training: nothing, while there is work. One request is one block on each device.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from swap.bench.cases import Case, Sample
from swap.bench.ground import Ground
from swap.blocks import ALIGNMENT, align_down
from swap.engine import Engine, make_backend
from swap.errors import no_thread
from swap.files import DATA_OFFSET
from swap.requests import BlockFile, Operation, Priority, Request
from swap.settings import EngineSettings

_RAMP_SHARE = 0.15  # of a slice: threads start, the drive's queue fills
_LONGEST_RAMP = 0.5  # seconds
_DRAIN_SECONDS = 60.0
_SHORTEST_LOOK, _LONGEST_LOOK = 0.005, 0.1  # seconds between looks at whether it is over
_FOREVER = 1 << 62

STEADY_WINDOWS = 5
"""How many windows of a series must be alike for bandwidth to count as steady."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which of the ground's files a load works on, and in which proportion a request is divided among them."""

    which: tuple[int, ...]
    weights: tuple[float, ...]

    def pieces(self, block_size: int) -> list[int]:
        """Bytes of a request in each file: a whole block in the fastest, a share of one in the others."""
        top = max(self.weights)
        return [max(ALIGNMENT, align_down(int(block_size * weight / top))) for weight in self.weights]


class Load:
    """Keeps `depth` requests in flight until `limit` of them were started or it is stopped."""

    def __init__(self, engine: Engine, case: Case, files: Sequence[BlockFile], pieces: Sequence[int]) -> None:
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self.done: list[tuple[float, float]] = []  # (perf_counter at the end, seconds it took)
        self._engine = engine
        self._pattern = case.pattern
        self._spans = list(zip(files, pieces, strict=True))
        self._numbers = itertools.count()  # next() is atomic: requests are started from several threads
        self._limit = _FOREVER
        self._laps = 1
        self._lock = threading.Lock()
        self._active = 0

    def start(self, views: Sequence[memoryview], *, laps: int, limit: int = _FOREVER) -> None:
        """Start one request per view. `laps`: how many requests fill the files once. Returns when the backend does."""
        self._laps, self._limit = laps, limit
        self._active = len(views)
        for view in views:
            self._next(view)

    def stop(self) -> None:
        """Start no more requests; `finished` is set when none is in flight."""
        self._limit = 0

    def _next(self, view: memoryview) -> None:
        number = next(self._numbers)
        if number >= self._limit:
            self._retire()
            return
        writes = self._pattern == "write" or (self._pattern == "mixed" and number % 2 == 1)
        index = number
        if self._pattern == "mixed":  # half a lap apart, so that nothing is read that was just written
            index = number // 2 + (self._laps // 2 if writes else 0)
        spans = [(file, DATA_OFFSET + index % self._laps * piece, piece) for file, piece in self._spans]
        operation, priority = (
            (Operation.WRITE, Priority.WRITE_BACK) if writes else (Operation.READ, Priority.READ_AHEAD)
        )
        try:
            self._engine.start(
                operation, spans, view, priority=priority, on_done=lambda request: self._ended(view, request)
            )
        except BaseException as error:  # noqa: BLE001 - recorded; the measurement raises it
            self._fail(error.with_traceback(None))  # its frames hold views of the buffer
            self._retire()

    def _ended(self, view: memoryview, request: Request) -> None:
        if request.error is not None:
            self._fail(request.error)
        else:
            self.done.append((time.perf_counter(), request.seconds))
        self._next(view)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._limit = 0

    def _retire(self) -> None:
        with self._lock:
            self._active -= 1
            if self._active == 0:
                self.finished.set()


@dataclass(frozen=True, slots=True)
class Series:
    """Bandwidth over time: bytes per second in windows of `window_seconds` one after the other."""

    window_seconds: float
    bytes_per_second: tuple[float, ...]


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The measurement was told to stop."""


def run_case(
    ground: Ground,
    target: Target,
    case: Case,
    *,
    seconds: float,
    nbytes: int | None = None,
    halt: threading.Event | None = None,
) -> tuple[Sample, Series]:
    """Measure a case for `seconds` (less where one pass over the files ends it), or until `nbytes` are moved. Waits.

    Through the page cache one pass is all that can be measured: the second would come from memory. What is written that
    way counts as written when it is on the drive. Raises SwapIOError for a failed request, Interrupted soon after
    `halt` is set.
    """
    pieces = target.pieces(case.block_size)
    request_nbytes = sum(pieces)
    laps = min(ground.nbytes // piece for piece in pieces)
    files = ground.seen(target.which, direct=case.direct)
    limit = _FOREVER if nbytes is None else max(1, nbytes // request_nbytes)
    cached = not all(file.direct for file in files)
    if cached:
        limit = min(limit, laps)
        ground.settle()
    settings = EngineSettings(
        backend=case.backend,
        block_size=case.block_size,
        queue_depth=case.queue_depth,
        max_bytes_in_flight=case.block_size * case.queue_depth,
    )
    depth = case.queue_depth if case.backend != "inline" else 1
    views = [
        ground.buffer.view[start : start + request_nbytes] for start in range(0, request_nbytes * depth, request_nbytes)
    ]
    ramp = 0.0 if cached or nbytes is not None else min(seconds * _RAMP_SHARE, _LONGEST_RAMP)
    try:
        with Engine(settings, backend=make_backend(settings.backend, ground.system)) as engine:
            load = Load(engine, case, files, pieces)
            pass_ = _Pass(load, views, laps, limit)
            began, sampled = pass_.run(ramp=ramp, seconds=seconds, halt=halt or threading.Event())
    finally:
        for view in views:
            view.release()
    if load.error is not None:
        raise load.error
    if cached and case.pattern != "read":
        ground.settle()
        sampled = _Moment.now()
    return _sample(load.done, began, sampled, request_nbytes), _series(load.done, began, sampled, request_nbytes)


@dataclass(frozen=True, slots=True)
class _Moment:
    wall: float
    cpu: float

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.perf_counter(), time.process_time())


@dataclass(frozen=True, slots=True)
class _Pass:
    """A load set going, and the window it is measured in."""

    load: Load
    views: Sequence[memoryview]
    laps: int
    limit: int

    def run(self, *, ramp: float, seconds: float, halt: threading.Event) -> tuple[_Moment, _Moment]:
        """Return the edges of the measured window. Nothing is in flight when this returns or raises."""
        # On a thread of its own: a backend without threads works inside `start`, all the time.
        starter = threading.Thread(
            target=self.load.start, args=(self.views,), kwargs={"laps": self.laps, "limit": self.limit}
        )
        began = _Moment.now()
        try:
            starter.start()
        except RuntimeError as error:
            raise no_thread("to start transfers", error) from error
        try:
            self._wait(ramp, halt)
            if ramp:
                began = _Moment.now()
            # On a slow drive a slice lasts until every slot has been served once: no figure rests on nothing.
            self._wait(seconds, halt, enough=len(self.load.done) + len(self.views))
            ended = _Moment.now()
        finally:
            self.load.stop()
            self.load.finished.wait(_DRAIN_SECONDS)
            starter.join(_DRAIN_SECONDS)
        return began, ended

    def _wait(self, seconds: float, halt: threading.Event, *, enough: int = 0) -> None:
        """For `seconds`, and on until `enough` requests are done, but only while the drive answers."""
        load, end, seen, patience = self.load, time.monotonic() + seconds, -1, 0.0
        while not load.finished.is_set():
            if halt.is_set():
                raise Interrupted
            now, done = time.monotonic(), len(load.done)
            if done != seen:
                seen, patience = done, now + _DRAIN_SECONDS
            if now >= patience or (now >= end and done >= enough):
                return
            load.finished.wait(min(max(end - now, _SHORTEST_LOOK), _LONGEST_LOOK))


def _sample(done: Sequence[tuple[float, float]], began: _Moment, ended: _Moment, nbytes: int) -> Sample:
    inside = [seconds for moment, seconds in done if began.wall <= moment <= ended.wall]
    return Sample(nbytes * len(inside), ended.wall - began.wall, ended.cpu - began.cpu, tuple(inside))


def _series(done: Sequence[tuple[float, float]], began: _Moment, ended: _Moment, nbytes: int) -> Series:
    """At most a hundred windows, a second long where there are fewer."""
    span = max(ended.wall - began.wall, 1e-9)
    window = max(1.0, span / 100)
    counts = [0] * max(1, int(span / window))
    for moment, _ in done:
        place = int((moment - began.wall) / window)
        if moment >= began.wall and place < len(counts):
            counts[place] += nbytes
    return Series(window, tuple(count / min(window, span) for count in counts))
