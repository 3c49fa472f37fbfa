"""The pager's own decisions, on simulated memory and under simulated time.

Owns the residency that writes down what it is told to do. Does not decide anything: `Service`, `Residency`, `Forecast`
and `policy` are the pager's own, so that a simulated step and a real one cannot be of different minds. Guarantees that
every move ends, after the time its line takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tiermem.errors import CapacityError
from tiermem.memory.arena import rounded
from tiermem.memory.tiers import Tier
from tiermem.pager.ahead import Appetite
from tiermem.pager.edges import Chain
from tiermem.pager.forecast import LATER, Forecast
from tiermem.pager.page import Intent, Kind, Lane, Move, Page, PageKey
from tiermem.pager.plan import Plan
from tiermem.pager.residency import Residency
from tiermem.pager.schedule import Schedule
from tiermem.pager.service import LeaseRequest, Service
from tiermem.planner.clock import Clock, Pulse, Signal
from tiermem.planner.design import Design
from tiermem.planner.device import DeviceFootprint
from tiermem.planner.footprint import Footprint
from tiermem.planner.lines import Cores, DriveModel, Wire
from tiermem.planner.stands import SimulatedArena, SimulatedEdge
from tiermem.stats import Counters

# Of `swap.requests.Priority`, which nobody above the pager imports.
_DEMAND, _WRITE_BACK = 0, 2
NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Action:
    """One thing the plan does.

    Attributes:
        seconds: when, since the simulation began.
        verb: "fetch", "write" (down), "evict" or "update".
        page: the page's name.
        nbytes: its bytes.
        edge: which way it goes, such as "swap->host"; the tier for what does not move.
        reason: why now.
    """

    seconds: float
    verb: str
    page: PageKey
    nbytes: int
    edge: str
    reason: str


class RecordingResidency(Residency):
    """A residency that tells a listener what is done and why."""

    def __init__(self, chain: Chain, forecast: Forecast, counters: Counters, *, ended: Any) -> None:
        super().__init__(chain, forecast, counters, ended=ended)
        self.listener: Callable[[str, Page, str, str], None] | None = None

    def start_move(self, page: Page, target: Tier, priority: Any) -> None:
        """See `Residency`."""
        if self.listener is not None:
            edge = f"{page.nearest_valid(target).name.lower()}->{target.name.lower()}"
            if int(priority) == _WRITE_BACK:
                self.listener("write", page, edge, "its room will be wanted; used last: " + self._use(page))
            else:
                why = "demanded now" if int(priority) == _DEMAND else "read ahead; used " + self._use(page)
                self.listener("fetch", page, edge, why)
        super().start_move(page, target, priority)

    def begin_with(self, page: Page, tier: Tier) -> None:
        """Have a page on `tier` from the beginning, if it has room: no time passes for it, and nothing is counted."""
        if self.allocate(page, tier):
            page.valid.add(tier)
            self.census.note(page)

    def drop(self, page: Page, tier: Tier) -> None:
        """See `Residency`."""
        if self.listener is not None:
            self.listener("evict", page, tier.name.lower(), "of all that may go it is used last: " + self._use(page))
        super().drop(page, tier)

    def _use(self, page: Page) -> str:
        use = self.forecast.next_use(page.key, 0)
        return f"at access {use}" if use < LATER else "at no recorded access"


class Asked:
    """A lease that was asked for: what fires when the answer is there, and the error if that is the answer."""

    __slots__ = ("awaited", "error", "request", "signal")

    def __init__(self) -> None:
        self.awaited = False
        self.error: BaseException | None = None
        self.request: LeaseRequest | None = None
        self.signal = Signal()


class World:
    """Simulated tiers under a clock, with the pager's decisions."""

    def __init__(self, design: Design) -> None:
        self.design = design
        self.drive = DriveModel(design.drive)
        self.wires = [Wire(rate) for rate in design.wires or ()]  # to the device, to the host
        self.link = Wire(NANOSECONDS, latency=0.0)  # between ranks, where work is given as time
        self.cores = Cores(design.slower, lambda: self.drive.reading or self.drive.writing)
        self.clock = Clock(
            [self.cores, self.drive, *self.wires, self.link],
            settle=self._settle,
            passing=self._passing,
            stuck=self._stuck,
        )
        self.counters = Counters(clock=lambda: self.clock.now)
        self.residency = RecordingResidency(self._chain(), Forecast(), self.counters, ended=self._ended)
        self.service = Service(self.residency, appetites(design.footprint, design.device))
        self.pump = Pulse()  # due: something has happened after which the pager does its work
        self.waiting: LeaseRequest | str | None = None  # what the computation waits for
        self.stalls: dict[str, float] = {}
        for key, nbytes in design.pages():
            page = self.residency.add(key, nbytes, saved=key.kind in (Kind.PARAM, Kind.STATE))
            if page.kept:
                self.residency.begin_with(page, Tier.HOST)
            elif key.unit in design.settled and page.is_written:
                self.residency.begin_with(page, Tier.DEVICE)
        ahead, schedule = self.service.ahead, design.schedule
        plan = ahead.make_plan(schedule, ahead.rooms())
        ahead.follow(schedule, plan)
        if plan.reaches is None:  # otherwise a device above decides from use to use what is in host memory
            self._begin_as_planned(schedule, plan)

    def listen(self, listener: Callable[[Action], None]) -> None:
        """Tell `listener` everything that is done from now on."""

        def told(verb: str, page: Page, edge: str, reason: str) -> None:
            listener(Action(self.clock.now, verb, page.key, page.nbytes, edge, reason))

        self.residency.listener = told

    def _begin_as_planned(self, schedule: Schedule, plan: Plan) -> None:
        """Have in memory what the plan keeps from step to step: so it takes fewer steps until they are alike."""
        first = {access.key: position for position, access in reversed(list(enumerate(schedule.accesses)))}
        for key, position in first.items():
            page = self.residency.page(key)
            if plan.stays[position] and page.is_written and not page.kept:
                self.residency.begin_with(page, Tier.HOST)

    def lease(
        self, keys: list[PageKey], intent: Intent, lane: Lane, *, aside: bool = False
    ) -> Generator[Signal, None, None]:
        """Wait for a lease; `aside`: nobody computes meanwhile. Raises CapacityError."""
        yield from self.wait(self.ask(keys, intent, lane), aside=aside)

    def ask(self, keys: list[PageKey], intent: Intent, lane: Lane) -> Asked:
        """As `pager.Pager.start_lease`: whoever asks has to wait for it later, and to release it."""
        tier = self.residency.chain.worked_on(lane, keys[0].unit)
        asked = Asked()

        def finished(error: BaseException | None) -> None:
            asked.error = error
            self.clock.fire(asked.signal)

        pages = [self.residency.page(key) for key in keys]
        asked.request = LeaseRequest(pages, intent, lane, tier, finished, asked)
        self.service.submit(asked.request)
        self.pump.due = True
        return asked

    def wait(self, asked: Asked, *, aside: bool = False) -> Generator[Signal, None, None]:
        """Wait for what was asked for; `aside` as for `lease`. Raises CapacityError."""
        asked.awaited = True
        compute = asked.request is not None and asked.request.lane is Lane.COMPUTE and not aside
        if compute and not asked.signal.fired:
            self.waiting = asked.request
        yield asked.signal
        if compute:
            self.waiting = None
        if asked.error is not None:
            raise CapacityError(f"the simulated run ends here: {asked.error}")

    def release(self, keys: list[PageKey], lane: Lane) -> None:
        """Give a lease back."""
        tier = self.residency.chain.worked_on(lane, keys[0].unit)
        self.service.release([self.residency.page(key) for key in keys], tier)
        self.pump.due = True

    def announce(self, change: Callable[[Forecast], set[PageKey]]) -> None:
        """As `pager.core.Core.announce`, in an order that does not depend on hashes."""
        pages = self.residency.pages
        there = [key for key in change(self.residency.forecast) if pages[key].frames]
        for key in sorted(there, key=lambda key: (key.unit, key.kind.value, key.tile)):
            self.residency.census.note(pages[key])
        self.pump.due = True

    def begin_step(self) -> None:
        """As `pager.Pager.begin_step`."""
        self.service.begin_step()
        self.pump.due = True

    def discard(self, key: PageKey) -> None:
        """As `pager.Pager.start_discard`."""
        self.post(lambda: self.residency.discard(self.residency.page(key)))

    def post(self, function: Callable[[], None]) -> bool:
        """As `pager.core.Core` is asked to run a function, and to do its work after it."""
        function()
        self.pump.due = True
        return True

    def compute(self, seconds: float) -> Generator[Signal, None, None]:
        """Compute for so long, were nothing in the way."""
        if seconds > 0:
            signal = Signal()
            self.cores.compute(seconds, lambda: self.clock.fire(signal))
            yield signal

    def wait_for(self, signal: Signal, what: str) -> Generator[Signal, None, None]:
        """Have the computation wait for something else than a lease: an "update", or other "ranks"."""
        if not signal.fired:
            self.waiting = what
            yield signal
            self.waiting = None

    def update(self, key: PageKey, seconds: float) -> Generator[Signal, None, None]:
        """Run an update kernel on a STATE tile for so long, were nothing in the way."""
        if self.residency.listener is not None:
            why = "its gradient is complete, and its turn has come"
            tier = self.residency.chain.worked_on(Lane.UPDATE, key.unit)
            self.residency.listener("update", self.residency.page(key), tier.name.lower(), why)
        if seconds > 0:
            signal = Signal()
            self.cores.update(seconds, lambda: self.clock.fire(signal))
            yield signal

    def _chain(self) -> Chain:
        arenas: dict[Tier, Any] = {Tier.HOST: SimulatedArena(self.design.settings.host_memory)}
        drive = self.drive
        edges: dict[tuple[Tier, Tier], Any] = {
            (Tier.SWAP, Tier.HOST): SimulatedEdge(
                lambda nbytes, priority, done: drive.start(rounded(nbytes), write=False, priority=priority, done=done)
            ),
            (Tier.HOST, Tier.SWAP): SimulatedEdge(
                lambda nbytes, priority, done: drive.start(rounded(nbytes), write=True, priority=priority, done=done)
            ),
        }
        if self.design.device is not None:
            up, down = self.wires
            arenas[Tier.DEVICE] = SimulatedArena(self.design.device.nbytes)
            edges[Tier.HOST, Tier.DEVICE] = SimulatedEdge(
                lambda nbytes, priority, done: up.start(nbytes, priority=priority, done=done)
            )
            edges[Tier.DEVICE, Tier.HOST] = SimulatedEdge(
                lambda nbytes, priority, done: down.start(nbytes, priority=priority, done=done)
            )
        design = self.design
        return Chain(arenas=arenas, edges=edges, settled=design.settled, kept=design.kept)

    def _ended(self, page: Page, move: Move, error: BaseException | None) -> None:
        self.residency.finish_move(page, move, error)
        self.pump.due = True

    def _settle(self) -> None:
        """As `pager.core.Core`: a pump after whatever has happened to pages, none where nothing has."""
        if self.pump.due:
            self.pump.due = False
            self.service.pump()
            self.pump.beat(self.clock)

    def _stuck(self) -> bool:
        self.pump.due = self.service.resolve_standstill()
        return self.pump.due

    def _passing(self, seconds: float) -> None:
        """Say what this stretch of time is spent on, as far as the computation is concerned."""
        if self.waiting is None:
            return
        if self.cores.updating and self.waiting == "update":
            cause = "update kernel"
        elif self.link.busy and self.waiting == "ranks":
            cause = "ranks"
        elif isinstance(self.waiting, LeaseRequest) and self.waiting.short is not None and self.drive.writing:
            cause = "write"
        elif self.drive.reading:
            cause = "read"
        elif self.drive.writing:
            cause = "write"
        elif any(wire.busy for wire in self.wires):
            cause = "copy"
        else:
            cause = "update kernel"
        self.stalls[cause] = self.stalls.get(cause, 0.0) + seconds


def appetites(host: Footprint, device: DeviceFootprint | None) -> dict[Tier, Appetite]:
    """How far the pager looks ahead on each tier, here and in a run."""
    found = {Tier.HOST: Appetite(look_ahead=host.look_ahead, reserve=host.reserve, lead=host.lead)}
    if device is not None:
        found[Tier.DEVICE] = Appetite(look_ahead=min(device.look_ahead, device.nbytes), reserve=device.reserve)
    return found
