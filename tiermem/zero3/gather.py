"""The parameters of units, present or not.

Owns what `param.data` is: a view of a leased frame, or a placeholder; and the leases for it. Does not know modules,
autograd or when a unit is due. Guarantees that a frame somebody still looks at is not given back (see "Leak guard"),
and that a write into a gathered parameter that was only lent for reading is reported.

Leak guard. When a unit is resharded its own views are gone, so the storage of its frame must have as many holders as
when the lease was granted. If it has more, a tensor somewhere still views the parameters (a module returned its weight,
a node of the graph is just using it): the lease stays, the unit *lingers*, and it is looked at again later.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tiermem.errors import InvariantError, TiermemError
from tiermem.interrupts import empty_kept_frames
from tiermem.stats import Counters
from tiermem.zero3.absent import Absence
from tiermem.zero3.engine import outside_inference, unwatched, versions, viewers
from tiermem.zero3.layout import Slot, UnitLayout, slot_of, typed_views
from tiermem.zero3.looks import FirstLooks, written_unasked
from tiermem.zero3.placeholder import Placeholders, converted, reshaped
from tiermem.zero3.replaced import replaced, take_in, unshare
from tiermem.zero3.sources import HeldUnit, UnitSource


class Presence(enum.Enum):
    """What a unit's parameters are."""

    SHARDED = "sharded"  # placeholders, no lease
    GATHERED = "gathered"  # views of the leased frame
    LINGERING = "lingering"  # placeholders, but the frame is still looked at, hence still leased


@dataclass(frozen=True, slots=True)
class GatherStatistics:
    """Counts since the start; `lingering` is the present number of units."""

    gathers: int
    lingering: int


class _UnitState:
    """One unit's lease and views.

    `holds`: module calls and loans that rely on it, `lent` of them loans. `held`: the lease, with `base` the bytes of
    its frame and `viewers` how many look at these when it is granted. `versions`: of each parameter when it was.
    `counted`: whether this lease was counted as a leak.
    """

    __slots__ = (
        "base",
        "changing",
        "counted",
        "held",
        "holds",
        "layout",
        "lent",
        "parameters",
        "presence",
        "versions",
        "viewers",
        "writable",
    )

    def __init__(self, layout: UnitLayout, parameters: Sequence[nn.Parameter]) -> None:
        self.layout = layout
        self.parameters = tuple(parameters[slot.parameter] for slot in layout.slots)
        self.presence = Presence.SHARDED
        self.holds = 0
        self.lent = 0
        self.held: HeldUnit | None = None
        self.base: torch.Tensor | None = None
        self.viewers = 0
        self.versions: tuple[int, ...] = ()
        self.writable = False
        self.counted = False
        # While parameters become views or placeholders, one by one. Still so afterwards: an interrupt has come.
        self.changing = False

    def written(self, looks: FirstLooks) -> str | None:
        """The name of a parameter that was written without permission while gathered; None: there is none."""
        if self.writable or self.base is None:
            return None
        return self.counted_writes(looks) or replaced(self.base, self.parameters, self.layout.slots)

    def counted_writes(self, looks: FirstLooks) -> str | None:
        """As `written`, of what torch counts: also while it lingers, as views that are still there count with it."""
        if self.writable or self.base is None:
            return None
        for version, before, slot in zip(versions(self.parameters), self.versions, self.layout.slots, strict=True):
            if version != before and not looks.unchanged(self.layout.unit, self.base, slot):
                return slot.names[0]
        return None


class Gatherer:
    """Gathers and reshards units by number. `parameters` by global number. One thread at a time."""

    def __init__(
        self,
        source: UnitSource,
        layouts: Sequence[UnitLayout],
        parameters: Sequence[nn.Parameter],
        placeholders: Placeholders,
        counters: Counters,
    ) -> None:
        self.source = source
        self.absence = Absence()
        self._looks = FirstLooks(layouts)
        self._units = tuple(_UnitState(layout, parameters) for layout in layouts)
        # Where each parameter lies, by its identity: unit and slot.
        self.slots = {
            id(parameters[slot.parameter]): (layout.unit, slot) for layout in layouts for slot in layout.slots
        }
        for parameter in parameters:
            self.absence.begin(parameter)
        self._placeholders = placeholders
        self._counters = counters
        self._lingering: set[int] = set()
        self._gathers = 0
        # Address of each gathered frame, to its unit; the pack hook looks here for every saved tensor.
        self.frames: dict[int, int] = {}

    def presence(self, unit: int) -> Presence:
        """What the unit's parameters are now."""
        return self._units[unit].presence

    def holds(self, unit: int) -> int:
        """How many module calls rely on the unit being gathered."""
        return self._units[unit].holds

    def hold(self, unit: int, *, lent: bool = False) -> None:
        """Count one more module call, or loan (`lend`), that relies on the unit. It must be gathered."""
        state = self._units[unit]
        if state.presence is not Presence.GATHERED:
            raise InvariantError(f"unit {unit} is held while {state.presence.value}")
        state.holds += 1
        state.lent += lent

    def unhold(self, unit: int, *, lent: bool = False) -> int:
        """Count one module call, or loan, less; returns how many are left. Does not reshard."""
        state = self._units[unit]
        if state.holds == 0:
            raise InvariantError(f"unit {unit} has no holds to give back")
        state.holds -= 1
        state.lent -= lent
        return state.holds

    def forget_calls(self) -> None:
        """No module call is in progress: let go of what an interrupt has left of those that were."""
        for unit, state in enumerate(self._units):
            if state.changing or state.holds > state.lent:
                state.holds = state.lent
                if not state.holds:
                    self.reshard(unit)
        self.recheck()

    def take_in(self, unit: int) -> None:
        """Have values that were assigned to the unit's parameters while it is lent for writing in its frame.

        Raises TiermemError, after that, for those that do not fit.
        """
        state = self._units[unit]
        if state.base is None or replaced(state.base, state.parameters, state.layout.slots) is None:
            return
        frames = [other.base for other in self._units if other.base is not None]
        for other in self._units:  # before this frame is written: what was assigned there may be a part of it
            if other.base is not None and other.writable:
                unshare(other.base, other.parameters, other.layout.slots, frames)
        take_in(state.base, state.parameters, state.layout.slots)

    @unwatched
    def gather(self, unit: int, *, writable: bool = False) -> torch.Tensor:
        """Make the unit's parameters views of its frame; waits for the frame. Returns the unit's bytes.

        `writable` takes the frame for writing, which no other lease on the unit may hinder.
        Raises what the pager raises (CapacityError, an I/O error), and TiermemError for a written placeholder.
        """
        state = self._units[unit]
        if state.presence is Presence.GATHERED and state.base is not None and not writable and not state.changing:
            return state.base
        if writable and state.presence is not Presence.SHARDED:
            raise TiermemError(f"unit {state.layout.name} is in use and cannot be written now: {self.explain(unit)}")
        self._placeholders.check(f"unit {state.layout.name}")
        if state.presence is not Presence.GATHERED and not state.changing:
            self._require_unconverted(state)
        with outside_inference():
            base = state.base if state.base is not None else self._take(state, writable=writable)
            state.changing = True
            views = typed_views(base, state.layout.slots)
            for parameter, slot in zip(state.parameters, state.layout.slots, strict=True):
                self.absence.end(parameter)
                parameter.data = slot_of(views, slot)
            views.clear()
        state.presence = Presence.GATHERED
        self._lingering.discard(unit)
        state.changing = False
        self._gathers += 1
        return base

    @unwatched
    def reshard(self, unit: int) -> bool:
        """Make the parameters placeholders and give the lease back; returns False if the unit lingers instead.

        Nothing happens, and True is returned, if it is sharded. Raises TiermemError, after resharding, if a parameter
        was written in place without permission.
        """
        state = self._units[unit]
        if state.holds:
            raise InvariantError(f"unit {unit} is resharded while {state.holds} module call(s) rely on it")
        written = None
        if state.presence is Presence.GATHERED or (state.changing and state.base is not None):
            if not state.changing:
                written = state.written(self._looks)
            state.changing = True
            self.put_placeholders(unit)
            state.presence = Presence.LINGERING
            self._lingering.add(unit)
            state.changing = False
        if written is not None:
            self._looks.forget(unit)
            state.versions = versions(state.parameters)
        free = state.held is None or self._try_release(state)
        if written is not None:
            raise written_unasked(written, "in place")
        return free

    def require_free(self, unit: int) -> None:
        """Raise TiermemError, saying why, if the unit's page is still leased here and cannot be updated."""
        if self.holds(unit) or not self.reshard(unit):
            raise TiermemError(f"unit {self._units[unit].layout.name} cannot be updated: {self.explain(unit)}")

    def start(self, unit: int) -> None:
        """Begin to fetch a unit that is gathered next. Does not wait."""
        if self._units[unit].base is None:
            self.source.start(unit)

    def count_leaks(self) -> None:
        """Note, once per lease, the units that linger where nobody has reason to look at them."""
        for unit in self._lingering:
            if not self._units[unit].counted:
                self._units[unit].counted = True
                self._counters.count(held_frames=1)

    @unwatched
    def recheck(self) -> None:
        """Release the units that linger and are no longer looked at."""
        for unit in tuple(self._lingering):
            self._try_release(self._units[unit])

    def put_placeholders(self, unit: int) -> None:
        """Set `param.data` of every parameter of the unit to a placeholder of its slot's dtype."""
        state = self._units[unit]
        for parameter, slot in zip(state.parameters, state.layout.slots, strict=True):
            self.absence.end(parameter)
            parameter.data = self._placeholders.of(slot.parameter, slot.shape, slot.dtype, parameter.device)
            self.absence.begin(parameter)

    def explain(self, unit: int) -> str:
        """Say, for an error message, why a unit is not released."""
        state = self._units[unit]
        if state.presence is Presence.SHARDED:
            return "it is not held"
        if state.holds:
            return f"{state.holds} module call(s) or `runtime.gathered` are using it; go on after they have ended"
        return (
            "a tensor that views its parameters is still alive (a module returned its weight, or somebody keeps such "
            "a tensor, or an error in whose frames there is one); clone() what is kept"
        )

    def statistics(self) -> GatherStatistics:
        """Return the counts."""
        return GatherStatistics(self._gathers, len(self._lingering))

    def _take(self, state: _UnitState, *, writable: bool) -> torch.Tensor:
        if state.held is not None:
            self._try_release(state)
        held = self.source.take(state.layout.unit, writable=writable)
        base = held.base
        if base.storage_offset() != 0:
            held.release()
            raise InvariantError(f"the frame of {state.layout.key} does not begin its storage")
        state.held, state.base, state.writable = held, base, writable
        state.viewers, state.counted = held.viewers, False
        state.versions = versions(state.parameters)  # giving them other memory does not count
        if not writable:
            self._looks.begin(state.layout.unit, base)  # not of a frame that lingers: it may have been written since
        self.frames[base.untyped_storage().data_ptr()] = state.layout.unit
        return base

    def _try_release(self, state: _UnitState) -> bool:
        if state.held is None:
            raise InvariantError(f"unit {state.layout.unit} lingers without a lease")
        written = since = None
        if state.base is not None:  # else an interrupt came while it was given back
            if viewers(state.base) > state.viewers:
                empty_kept_frames()  # those of an interrupt may look at it, and nobody needs them
                if viewers(state.base) > state.viewers:
                    return False
            since = state.counted_writes(self._looks)
            written = self._looks.changed(state.layout.unit, state.base)
            self.frames.pop(state.base.untyped_storage().data_ptr(), None)  # an interrupt may have come after it
            state.base = None
            state.presence = Presence.SHARDED
        state.held.release()
        state.held = None
        self._lingering.discard(state.layout.unit)
        if since is not None:
            raise written_unasked(since, "in place")
        if written is not None:
            raise written_unasked(written)
        return True

    def _require_unconverted(self, state: _UnitState) -> None:
        """Raise TiermemError if placeholders were converted (`model.half()`) or replaced (`parameter.data = values`).

        Mended first, so that it is said once.
        """
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - absent.py is not asked: that costs more than all of this
            for parameter, slot in zip(state.parameters, state.layout.slots, strict=True):
                if parameter.dtype != slot.dtype:
                    self._refuse_converted(slot, parameter.dtype)
                found = parameter.shape
                if found != slot.shape:
                    self.put_placeholders(state.layout.unit)
                    raise TiermemError(reshaped(slot.names[0], found, slot.shape))
                if not self._placeholders.owns(parameter):
                    self.put_placeholders(state.layout.unit)
                    raise TiermemError(
                        f"parameter {slot.names[0]} was given other values (`.data =`) while its own were paged out; "
                        "these are lost. Use `with runtime.gathered(module_or_parameters, write=True):` around it"
                    )

    def _refuse_converted(self, slot: Slot, found: torch.dtype) -> None:
        for unit, other in enumerate(self._units):
            if other.presence is Presence.SHARDED:
                self.put_placeholders(unit)
        raise converted(slot.names[0], found, slot.dtype)
