"""Updates on their way from an optimizer to the queue.

Owns those that are being claimed. Does not know when or why updates are asked for. Guarantees that an update is queued,
its gradients are claimed and its step is counted, all of it once or nothing, also where an interrupt (Ctrl-C) comes in
between: what is left is done by whoever comes next. Else moments would be taken for those of another step, for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiermem.optim.service import GradientBook, SettingsSource, UpdateQueue
from tiermem.optim.updates import Settings, UnitUpdate


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """An update of parameters of a unit: those for which it is to count, and itself if it is not queued yet.

    On several ranks `update` has those of the parameters of which something lies here, which may be none.
    `on_claimed()`: called when the parameters count as updated, before the update is queued; twice does no harm.
    """

    source: SettingsSource
    settings: Mapping[int, Settings]
    update: UnitUpdate | None = None
    on_claimed: Callable[[], object] = lambda: None


class Claims:
    """Used from the compute thread only."""

    def __init__(self, queue: UpdateQueue, gradients: GradientBook) -> None:
        self._queue = queue
        self._gradients = gradients
        self.left: tuple[Claim, ...] = ()
        """What is still to be done; to be set where nothing is left."""

    def make(self, claim: Claim) -> None:
        """Claim an update. Raises what the queue raises, or a signal handler while it waits: it counts, and is left."""
        self.left = (claim,)
        self.finish()

    def finish(self) -> None:
        """Do what is left. Each part does no harm if it is done twice."""
        while self.left:
            claim = self.left[0]
            claim.source.count(claim.settings)
            self._gradients.claimed(list(claim.settings))
            claim.on_claimed()
            if claim.update is not None:
                self._queue.start(claim.update)
            self.left = self.left[1:]
