"""The updates of a step that begin before it is known whether they count.

Owns, for the step under way, which updates began under backward, the protection under which they may be undone, and
which of their optimizers have stepped since. Does not know norms or schedules: the coordinator judges. Guarantees that
all of it is either kept, when every optimizer concerned has stepped and kept its share, or taken back, so that
parameters, moments, step counts and gradients are those before, bit for bit; and that what an optimizer had kept before
others made it necessary to take all back is done again, with the settings it had.

Where nobody is expected to ask for that, updates are for good instead: they use their gradients up, count at once, are
under no protection, and cost what they would cost after the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tiermem.optim.claims import Claim, Claims
from tiermem.optim.service import GradientBook, SettingsSource, Undo, UpdateQueue
from tiermem.optim.updates import Settings, UnitUpdate
from tiermem.pager.protection import Protection
from tiermem.stats import Counters


@dataclass(frozen=True, slots=True)
class _Share:
    """What one optimizer has of an early update.

    `settings`: of all parameters that it is for. On several ranks `update` has those of which something lies here,
    which may be none; all ranks take back, keep and count the same.
    """

    source: SettingsSource
    update: UnitUpdate
    settings: Mapping[int, Settings]


class Speculation:
    """Early updates and their undoing. Used from the compute thread only."""

    def __init__(self, queue: UpdateQueue, gradients: GradientBook, undo: Undo, counters: Counters) -> None:
        self._queue = queue
        self._gradients = gradients
        self._undo = undo
        self._counters = counters
        self.claims = Claims(queue, gradients)
        """The way to the queue for what is for good, and what an interrupt has left on it."""
        self._protection: Protection | None = None
        self._shares: list[_Share] = []
        self._units: set[int] = set()  # of the shares
        self._kept: set[SettingsSource] = set()
        self.given_up = False
        """Whether no early update of this step begins any more."""
        self._spent: dict[int, Settings] = {}  # with what was used
        self.spoiled = False
        """Whether something was taken back since the last `end_step`."""

    def begin(self, *, for_good: bool) -> bool:
        """Whether an early update may be started now; may wait for a commit. The first one of a step decides how.

        `for_good`: it will not have to be taken back.
        """
        if not self.may_begin(for_good=for_good):
            self.give_up()
            return False
        if self._protection is None and not self._spent and not for_good:
            self._protection = self._undo.protection()
        return True

    def may_begin(self, *, for_good: bool) -> bool:
        """What `begin` would say; changes nothing. What it has said holds until the end of the step, or `give_up`."""
        if self.given_up:
            return False
        return for_good or self._protection is not None or bool(self._spent) or self._undo.has_room()

    def start(self, source: SettingsSource, update: UnitUpdate, settings: Mapping[int, Settings]) -> None:
        """Queue an early update of parameters of `source`; `begin` must have allowed it.

        `settings`: those of all these parameters, whether anything of them is in `update` or not.
        """
        if self._protection is None:
            self._spent.update(settings)
            self.claims.make(Claim(source, settings, update))
            return
        update = replace(update, protection=self._protection)
        self._shares.append(_Share(source, update, settings))
        self._units.add(update.unit)
        self._gradients.borrowed(list(settings))
        self._queue.start(update)

    def give_up(self) -> None:
        """No early update of this step begins any more."""
        self.given_up = True

    def end_step(self) -> None:
        """An optimizer has stepped, or dropped its gradients: what comes next is another step, if all have."""
        self.given_up, self.spoiled = bool(self._shares), False
        self._spent.clear()

    @property
    def spent(self) -> Collection[int]:
        """The parameters that were updated early in this step, for good: their gradients are used up."""
        return self._spent.keys()

    def is_outdated(self, source: SettingsSource) -> bool:
        """Whether settings of `source` have changed since it updated parameters early, for good."""
        now = source.settings(self._spent)
        return any(replace(now[number], step=used.step) != used for number, used in self._spent.items())

    def holds(self, unit: int) -> bool:
        """Whether a unit has such an update."""
        return unit in self._units

    def settings(self, source: SettingsSource) -> Mapping[int, Settings]:
        """The parameters of `source` that were updated early and not kept yet, with the settings that were used."""
        return {
            parameter: settings
            for share in self._shares
            if share.source is source and source not in self._kept
            for parameter, settings in share.settings.items()
        }

    def keep(self, source: SettingsSource) -> None:
        """The share of `source` counts; once that holds for everybody concerned, nothing can be taken back."""
        shares = [share for share in self._shares if share.source is source and source not in self._kept]
        left = tuple(Claim(source, share.settings) for share in shares)
        kept, claims = self._kept | {source}, self.claims
        # At once, as in `_close`: the rest is done by whoever comes next, should an interrupt come.
        self._kept, claims.left = kept, left
        self.finish()

    def finish(self) -> None:
        """Do what an interrupt has left undone of what counts."""
        self.claims.finish()
        if self._protection is not None and self._shares and self._kept >= {share.source for share in self._shares}:
            self._protection.confirm()
            self._counters.count(speculated=1, confirmed=1)
            self._close()

    def take_back(self, *, redone: bool) -> None:
        """Undo everything; waits. What was kept by its optimizer is queued again, the other gradients are present.

        `redone`: for the statistics, whether the rest is going to be updated in this step again.
        Raises TiermemError, and changes nothing, if somebody keeps a view of parameters concerned.
        """
        self.finish()
        if self._protection is None:
            return
        self._gradients.require_free({share.update.unit for share in self._shares})
        self._undo.revert(self._protection, self._queue.withdraw(self._protection))
        shares, kept = self._shares, self._kept
        self.spoiled = True
        self.give_up()
        undone = [share for share in shares if share.source not in kept]
        wanted = {share.update.unit for share in undone}
        self._gradients.given_back(wanted, [parameter for share in undone for parameter in share.settings])
        again = []
        for share in sorted(shares, key=lambda share: share.update.unit):
            if share.source in kept:
                last = share.update.discard_gradients and share.update.unit not in wanted
                update = replace(share.update, protection=None, discard_gradients=last)
                again.append(Claim(share.source, {}, update))  # it counts already
        self._close(again)  # from here on it is not done again, should an interrupt come
        self.claims.finish()
        self._counters.count(speculated=1, redone=redone)

    def _close(self, left: Sequence[Claim] = ()) -> None:
        """Nothing can be taken back any more; `left` is to be done."""
        shares: list[_Share] = []
        units: set[int] = set()
        kept: set[SettingsSource] = set()
        claims, rest = self.claims, tuple(left)
        # All of it or nothing: an interrupt comes where something is called, so nothing is called in between.
        self._protection, self._shares, self._units, self._kept, claims.left = None, shares, units, kept, rest
