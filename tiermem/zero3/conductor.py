"""One issuer of collectives, in one order on every rank.

Owns the thread that issues, the queue of operations, and the comparison of what the ranks are about to do. Does not
know pages or gradients: an operation is a few functions. Guarantees that operations are issued in the order in which
the computation asked for them, never from a completion; that ranks which are about to do different things all get an
error naming ranks and units instead of a hang; and that after the first error every operation raises it.

The announcement. Before an operation every rank tells the others what it is about to do. All the same: they do it.
A gradient is different: which units have one may depend on the data (experts without tokens), so a rank that
announces one is served by all, whatever they announced themselves; a rank without one contributes nothing. Then the
others announce theirs again. Anything else that differs is an error, at the same place on every rank.
"""

from __future__ import annotations

import enum
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tiermem.errands import Errands
from tiermem.errors import InvariantError, TiermemError
from tiermem.future import Future
from tiermem.stats import Counters
from tiermem.timeline import COMPUTE_LANE, RANKS_LANE, STALL, Timeline
from tiermem.zero3.collectives import by_rank, reason_of
from tiermem.zero3.grid import Grid

T = TypeVar("T")
Serve = Callable[[int, Any, Sequence[bool]], None]


class Act(enum.IntEnum):
    """What is done together."""

    GATHER = 0
    REDUCE = 1
    SETTLE = 2
    LOOK = 3
    CLOSE = 4
    COMMIT = 5
    SNAPSHOT = 6
    SAVE_PRETRAINED = 7
    STEP = 8
    DROP = 9
    CLIP = 10


_WORDS = {
    Act.GATHER: "gathers",
    Act.REDUCE: "adds up gradients of",
    Act.SETTLE: "ends a backward",
    Act.LOOK: "reads the state of",
    Act.CLOSE: "closes its runtime",
    Act.COMMIT: "commits",
    Act.SNAPSHOT: "makes a snapshot",
    Act.SAVE_PRETRAINED: "saves the model (save_pretrained)",
    Act.STEP: "steps (optimizer.step)",
    Act.DROP: "forgets gradients (optimizer.zero_grad)",
    Act.CLIP: "clips gradients (optimizer.clip_grad_norm_)",
}
_UNEQUAL_ORDER = (
    "All ranks must run the same modules and call the same methods in the same order, commit and save_pretrained too; "
    "where the data decides which modules run (experts), make what surrounds them one unit (units=), so that only its "
    "gradients differ"
)
_UNEQUAL_LENGTHS = (
    "All ranks must do the same number of steps before they close: give each as many batches as the others "
    "(DistributedSampler does), or stop all of them with the one that runs out first"
)
_UNEQUAL_WORDS = (
    "All ranks make the same optimizers, and change their settings alike: a learning rate that follows a loss needs "
    "that of all ranks (torch.distributed.all_reduce)"
)
_ISSUER = "tiermem-ranks"  # the thread


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One thing that all ranks do together.

    Attributes:
        act: what.
        unit: of which unit, or -1.
        prepare: what has to be there before; may wait, and may fail without harm to the others.
        action: given what `prepare` returned; the ranks take part in the same collectives.
        undo: gives back what `prepare` returned (None, if it was not called) where `action` is not reached.
        bucket: for REDUCE: the gradients.
        alike: in words, what else has to be the same on all ranks.
    """

    act: Act
    unit: int = -1
    prepare: Callable[[], Any] = lambda: None
    action: Callable[[Any], T] = lambda _: None  # type: ignore[assignment,return-value]
    undo: Callable[[Any], None] = lambda _: None
    bucket: Any = None
    alike: str = ""


class Conductor:
    """Issues the operations of one run. Used from the compute thread."""

    def __init__(
        self,
        grid: Grid,
        names: Sequence[str],
        timeline: Timeline,
        counters: Counters,
        begin: Callable[[], None] | None = None,
    ) -> None:
        """`grid`: who shares what; all of them keep one order. `names`: of the units, for messages.

        `timeline`: where each operation is noted, without what it prepares. `counters`: where waits are counted.
        `begin`: called once on the issuer's thread, before it prepares its first operation: what it then asks of a
        device is beside the computation.
        """
        self.grid = grid
        self._timeline = timeline
        self._counters = counters
        self._names = names
        self._issuer = Errands(_ISSUER)
        self._begin = begin
        self._serve: Serve | None = None
        self._broken: BaseException | None = None
        self._announced = 0
        self._closed = False

    def announced(self) -> int:
        """How many announcements there were until all that was started here is done; waits for that.

        The same on every rank: what is on its way may have been announced on one and not on another.
        """
        return self._announced if self._closed else self.wait(self._issuer.start(lambda: self._announced))

    def connect(self, serve: Serve) -> None:
        """Take `serve(unit, bucket or None, who sends)` for adding gradients up."""
        self._serve = serve

    def start(self, operation: Operation[T]) -> Future[T]:
        """Queue an operation; the future has its result or its error. Raises TiermemError after `close`.

        Where the system allows no thread to issue it, that is the error which everything that comes after it raises.
        """
        if self._closed and self._broken is not None:
            raise self._broken
        try:
            return self._issuer.start(lambda: self._carry_out(operation))
        except TiermemError as refusal:
            operation.undo(None)
            self._break(refusal)
            raise

    def run(self, operation: Operation[T]) -> T:
        """Do an operation now, after those queued; waits."""
        return self.wait(self.start(operation))

    def wait(self, future: Future[T]) -> T:
        """Wait for an operation on behalf of the computation; the time counts as a stall, and as one for ranks."""
        self.ended_well(future)
        return future.result()

    def ended_well(self, future: Future[T]) -> bool:
        """As `wait`; whether there is a result. If not, whatever comes next raises the error."""
        if future.done():
            return future.exception() is None
        started = time.perf_counter()
        try:
            return future.exception() is None
        finally:
            ended = time.perf_counter()
            self._counters.count(stall_seconds=ended - started, rank_seconds=ended - started)
            self._timeline.record(STALL, COMPUTE_LANE, started, ended, {"waits": (), "for": RANKS_LANE})

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left: nothing is done together any more."""
        return self._closed

    def close(self, failure: BaseException | None = None) -> None:
        """Leave together, or say why alone. May be called twice; raises nothing.

        `failure`: why, if not because of an error that is being raised.
        """
        failure = sys.exception() or failure
        self._closed = True
        if self._broken is None and self.grid.everyone.size > 1:
            try:
                self._issuer.start(lambda: self._take_leave(failure)).exception()
            except TiermemError:  # the interpreter is ending, and starts no thread any more
                self.grid.everyone.close(_farewell(failure))
        self._issuer.close()
        self._broken = self._broken or TiermemError("this runtime is closed; offload the model again to go on")

    def _take_leave(self, failure: BaseException | None) -> None:
        try:
            if failure is None:
                self._carry_out(Operation(Act.CLOSE))
        finally:
            self.grid.everyone.close(_farewell(failure))

    def _carry_out(self, operation: Operation[T]) -> T:
        failure: BaseException | None = None
        prepared = None
        try:
            if self._broken is not None:
                raise self._broken
            try:
                if self._begin is not None:
                    self._begin()
                    self._begin = None
                prepared = operation.prepare()
            except BaseException as error:  # noqa: BLE001 - told to the others, then raised
                failure = error
            started = time.perf_counter()
            while self._go_round(operation, failure):
                pass
        except BaseException as error:
            operation.undo(prepared)
            self._break(error)
            raise
        try:
            return operation.action(prepared)
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._timeline.record(self._title(operation), RANKS_LANE, started, time.perf_counter())

    def _go_round(self, operation: Operation[Any], failure: BaseException | None) -> bool:
        """Announce, and serve those who add gradients up; whether to announce again, as not all are here yet."""
        told = self._announce(operation, failure)
        self._add_up(operation, told)
        return operation.act is not Act.REDUCE and any(each[0] == Act.REDUCE for each in told)

    def _announce(self, operation: Operation[Any], failure: BaseException | None) -> list[list[int]]:
        words = zlib.crc32(operation.alike.encode())
        own = [int(operation.act), operation.unit, int(failure is not None), words]
        told = self.grid.everyone.tell(own)
        self._announced += 1
        if any(each[2] for each in told):
            reasons = self.grid.everyone.tell_text(reason_of(failure))
            if failure is not None:
                raise failure
            failed = by_rank(reasons)
            raise TiermemError(f"rank {self.grid.everyone.rank} stops because another rank has failed: {failed}")
        others = {tuple(each[:2]) for each in told if each[0] != Act.REDUCE}
        if len(others) > 1:
            ended = any(act == Act.CLOSE for act, _ in others)
            advice = _UNEQUAL_LENGTHS if ended else _UNEQUAL_ORDER
            raise TiermemError(f"the ranks do different things: {self._difference(told)}. {advice}")
        if len({each[3] for each in told if each[0] != Act.REDUCE}) > 1:
            each = enumerate(self.grid.everyone.tell_text(operation.alike))
            who = "; ".join(f"rank {rank} with {words or 'nothing yet'}" for rank, words in each)
            raise TiermemError(f"each rank {_WORDS[operation.act]} in another way: {who}. {_UNEQUAL_WORDS}")
        return told

    def _title(self, operation: Operation[Any]) -> str:
        unit = f" {self._names[operation.unit]}" if operation.unit >= 0 else ""
        return f"{operation.act.name.lower()}{unit}"

    def _difference(self, told: Sequence[Sequence[int]]) -> str:
        who: dict[str, list[str]] = {}
        for rank, (act, unit, *_) in enumerate(told):
            what = _WORDS[Act(act)] + (f" unit {unit} ({self._names[unit]})" if unit >= 0 else "")
            who.setdefault(what, []).append(str(rank))
        return ", ".join(f"rank {' and '.join(ranks)} {what}" for what, ranks in who.items())

    def _add_up(self, operation: Operation[Any], told: Sequence[Sequence[int]]) -> None:
        for unit in sorted({each[1] for each in told if each[0] == Act.REDUCE}):
            senders = [each[0] == Act.REDUCE and each[1] == unit for each in told]
            if self._serve is None:
                raise InvariantError("gradients came before anybody could take them; this is a bug in tiermem")
            self._serve(unit, operation.bucket if senders[self.grid.everyone.rank] else None, senders)

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self.grid.everyone.close(reason_of(error))


def _farewell(failure: BaseException | None) -> str:
    return f"closed its runtime because of {reason_of(failure)}" if failure is not None else "closed its runtime"
