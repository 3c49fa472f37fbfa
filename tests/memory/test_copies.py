"""Copies to and from a device: each ends once, in an order that suits whoever waits."""

import threading
from collections.abc import Iterator

import pytest
import torch
from doubles_pager import is_viewed

from tiermem.errors import TiermemError
from tiermem.memory.arena import FRAME_ALIGNMENT, Frame
from tiermem.memory.copies import Copy, CopyLine
from tiermem.memory.devices import SimulatedDevice, SimulatedDirection
from tiermem.memory.links import Link

LOST = OSError(5, "injected")
SECONDS = 60.0


class Gate:
    """A flight that arrives when the test lets it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.arrived = threading.Event()
        self.error = error

    def remaining(self) -> float:
        return 0.0 if self.arrived.is_set() else 0.001

    def land(self) -> None:
        if self.error is not None:
            raise self.error


class Station:
    """Notes what is launched, and keeps it in the air."""

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}
        self.order: list[str] = []
        self.ended: list[tuple[str, BaseException | None]] = []
        self.changed = threading.Condition()
        self.naming = threading.Lock()
        self.line = CopyLine("test", self.launch)

    def launch(self, copy: Copy) -> Gate:
        with self.naming:
            name = next(name for name, known in self.copies.items() if known is copy)
        with self.changed:
            self.order.append(name)
            self.changed.notify_all()
        if name == "refused":
            raise LOST
        return self.gates[name]

    copies: dict[str, Copy]

    def start(self, name: str, *, urgent: bool = False, error: Exception | None = None) -> None:
        frame = Frame(0, 1, torch.zeros(FRAME_ALIGNMENT, dtype=torch.uint8))

        def done(raised: BaseException | None) -> None:
            with self.changed:
                self.ended.append((name, raised))
                self.changed.notify_all()

        self.gates[name] = Gate(error)
        with self.naming:  # so that it is not launched before its name is known
            self.copies = {
                **getattr(self, "copies", {}),
                name: self.line.start(frame, frame, frame.nbytes, urgent=urgent, done=done),
            }

    def wait_for(self, what: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(getattr(self, what)) >= count, SECONDS), getattr(self, what)


@pytest.fixture
def station() -> Iterator[Station]:
    made = Station()
    yield made
    for gate in made.gates.values():
        gate.arrived.set()
    made.line.close()


def test_what_somebody_waits_for_overtakes(station: Station) -> None:
    for name in ("first", "second"):
        station.start(name)
    station.wait_for("order", 2)  # both in the air: no more are launched
    for name, urgent in (("ahead", False), ("later", False), ("demand", True)):
        station.start(name, urgent=urgent)
    station.copies["later"].promote()
    for gate in station.gates.values():
        gate.arrived.set()
    station.wait_for("ended", 5)
    assert station.order == ["first", "second", "later", "demand", "ahead"]
    assert [error for _, error in station.ended] == [None] * 5


def test_an_error_at_the_launch_or_on_the_way_ends_that_copy_only(station: Station) -> None:
    station.start("refused")
    station.start("lost", error=LOST)
    station.start("good")
    for gate in station.gates.values():
        gate.arrived.set()
    station.wait_for("ended", 3)
    assert dict(station.ended) == {"refused": LOST, "lost": LOST, "good": None}


def test_closing_lets_what_was_asked_for_end(station: Station) -> None:
    station.start("one")
    station.start("two")
    station.start("three")
    closing = threading.Thread(target=station.line.close)
    closing.start()
    for gate in station.gates.values():
        gate.arrived.set()
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert [name for name, _ in station.ended] == ["one", "two", "three"]
    station.line.close()
    with pytest.raises(TiermemError, match="closed"):
        station.start("late")


def test_the_time_of_a_simulated_copy() -> None:
    now = [100.0]
    direction = SimulatedDirection(bandwidth=1000.0, latency=0.5, clock=lambda: now[0])

    def flight(nbytes: int) -> float:
        frame = Frame(0, nbytes, torch.zeros(FRAME_ALIGNMENT, dtype=torch.uint8))
        return direction.launch(Copy(frame, frame, nbytes, urgent=False, done=lambda _: None)).remaining()

    assert flight(1000) == pytest.approx(1.5)
    assert flight(2000) == pytest.approx(3.5), "after the one before, whose latency it does not wait for"
    now[0] += 10.0
    assert flight(500) == pytest.approx(1.0)


def test_bytes_travel_both_ways_at_the_end_and_not_before() -> None:
    device = SimulatedDevice(Link())
    above, below = (
        device.make_arena(4 * FRAME_ALIGNMENT, poison=True),
        device.make_host_arena(4 * FRAME_ALIGNMENT, poison=True),
    )
    down, up = below.allocate(100), above.allocate(100)
    assert down is not None
    assert up is not None
    down.tensor[:100] = torch.arange(100, dtype=torch.uint8)
    ended = threading.Semaphore(0)
    device.start_copy(down, up, 100, up=True, urgent=True, done=lambda _: ended.release())
    assert ended.acquire(timeout=SECONDS)
    assert up.tensor[:100].tolist() == list(range(100))
    up.tensor[:100] += 1
    device.start_copy(up, down, 100, up=False, urgent=False, done=lambda _: ended.release())
    assert ended.acquire(timeout=SECONDS)
    assert down.tensor[:100].tolist() == list(range(1, 101))
    assert not is_viewed(up)
    assert above.fence() is None
    device.close()
    device.close()
    for towards in (True, False):
        with pytest.raises(TiermemError, match="closed"):
            device.start_copy(down, up, 100, up=towards, urgent=True, done=lambda _: None)
