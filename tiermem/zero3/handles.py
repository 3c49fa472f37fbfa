"""What autograd keeps in place of a view of a gathered parameter.

Owns the pair of saved-tensor hooks and the handles. Does not know how a unit is gathered: it asks `demand` for the
bytes. Guarantees that the graph never keeps a frame alive through tensors saved while the hooks are on, that hooks
active outside go on seeing every other tensor, and that an ordinary saved tensor changed in place is still reported.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiermem.errors import InvariantError, TiermemError
from tiermem.interrupts import call_out, empty_frames
from tiermem.zero3.absent import is_absent
from tiermem.zero3.engine import Pack, Unpack, backward_number, push_hooks, remove_hooks, top_hooks, unseen, version
from tiermem.zero3.layout import Slot, view_bytes

# Notes of dead handles are thrown away when there are this many notes, and then whenever these have doubled.
_TIDY_AT = 64


class Tally:
    """Which handles on a unit are alive, how often its values have changed since the start, and which of them when.

    Weak references, and no counting in `__del__`: an interrupt there would be swallowed, and the count wrong for good.
    """

    __slots__ = ("_changed", "_handles", "_tidy_at", "generation")

    def __init__(self) -> None:
        self.generation = 0
        self._changed: dict[int, tuple[int, int]] = {}  # by a parameter's first byte: the one after its last, and when
        self._handles: list[weakref.ref[Handle]] = []
        self._tidy_at = _TIDY_AT

    def add(self, handle: Handle) -> None:
        """Note a new handle."""
        self._handles.append(weakref.ref(handle))
        if len(self._handles) >= self._tidy_at:
            self._tidy_at = max(_TIDY_AT, 2 * self.alive)

    def change(self, slot: Slot) -> None:
        """Note that a parameter has other values than in this generation's beginning."""
        self._changed[slot.offset] = slot.offset + slot.nbytes, self.generation

    def is_stale(self, handle: Handle) -> bool:
        """Whether something of what the handle views has changed since it was made."""
        if handle.generation == self.generation:
            return False
        begin = handle.offset * handle.dtype.itemsize
        reach = sum((size - 1) * stride for size, stride in zip(handle.shape, handle.stride, strict=True))
        last = begin + reach * handle.dtype.itemsize
        return any(
            when > handle.generation and start <= last and begin < end for start, (end, when) in self._changed.items()
        )

    @property
    def are_any(self) -> bool:
        """Whether one is, for whoever asks beside the thread that makes them."""
        return any(handle() is not None for handle in tuple(self._handles))

    @property
    def alive(self) -> int:
        """How many handles are alive."""
        self._handles = [handle for handle in self._handles if handle() is not None]
        return len(self._handles)


class Handle:
    """A view of a unit's flat buffer, wherever that may be when it is needed. `offset` counts elements of `dtype`."""

    __slots__ = ("__weakref__", "dtype", "generation", "offset", "shape", "stride", "tally", "unit")

    def __init__(
        self, unit: int, tally: Tally, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
    ) -> None:
        self.tally = tally
        self.generation = tally.generation
        self.unit = unit
        self.dtype = dtype
        self.shape = shape
        self.stride = stride
        self.offset = offset
        tally.add(self)


class Kept:
    """An ordinary saved tensor. Autograd does not compare versions of hooked tensors, so that is done here."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a packed object that leads back to its own graph would never be freed.
        self.tensor = tensor.detach()
        self.version = version(self.tensor)

    def restore(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was changed in place since."""
        refuse_changed(self.tensor, self.version)
        return self.tensor


class Foreign:
    """What the hooks outside made of a tensor."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Unpack) -> None:
        self.packed = packed
        self.unpack = unpack


def leave_to(outer: tuple[Pack, Unpack] | None, tensor: torch.Tensor) -> Kept | Foreign:
    """What the graph keeps of an ordinary tensor: itself, or what the pair of hooks outside makes of it."""
    return Kept(tensor) if outer is None else Foreign(call_out(outer[0], tensor), outer[1])


class _Scope:
    """One push of the hooks: remembers the pair it covers, which autograd itself would no longer call.

    Itself the one that packs. From torch 2.14 on, what a selective checkpoint keeps beside the graph goes to the user's
    hooks, if he wants that; those of torch's own checkpoints say by these two names that they are none, and which they
    cover. So do ours: a tensor would else come to a checkpoint's hooks through them, which expect only what the graph
    saves.
    """

    __slots__ = ("hooks", "outer", "pair")
    _checkpoint_internal = True

    @property
    def _user_hooks(self) -> tuple[Pack, Unpack] | None:
        return self.outer

    def __init__(self, hooks: SavedTensorHooks, outer: tuple[Pack, Unpack] | None) -> None:
        self.hooks = hooks
        self.outer = outer
        # One object each, so that it can be recognised again on torch's stack. A reference cycle, which `leave` breaks:
        # the pair covered may be a checkpoint's, and all that this keeps would wait for the cycle collector.
        self.pair: tuple[Pack, Unpack] | None = (self, self.unpack)

    @property
    def active_pair(self) -> tuple[Pack, Unpack]:
        """The pair on torch's stack, until `leave`."""
        if self.pair is None:
            raise InvariantError("saved-tensor hooks were left twice")
        return self.pair

    def __call__(self, tensor: torch.Tensor) -> Any:
        try:
            handle = unseen(self.hooks.recognise)(tensor)
        except BaseException as error:
            empty_frames(error)
            del tensor  # this frame is not among them yet
            raise
        if handle is not None:
            return handle
        return leave_to(self.outer, tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        try:
            return unseen(self.hooks.unpack)(packed)  # type: ignore[no-any-return]
        except BaseException as error:
            empty_frames(error)
            raise


class _Stack(threading.local):
    """The pushes of this thread, as torch's own stack of hooks is each thread's own."""

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


def refuse_changed(tensor: torch.Tensor, expected: int, shape: torch.Size | None = None) -> None:
    """Raise RuntimeError, in torch's words, unless `tensor` is still at version `expected`; `shape`: if not its own."""
    found = version(tensor)
    if found != expected:
        shown = "nested" if tensor.is_nested else list(tensor.shape if shape is None else shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {shown}] is at version {found}; expected version {expected} instead."
        )


class SavedTensorHooks:
    """The hooks of one model. `frames` maps the address of each gathered frame to its unit.

    `slots`: each parameter's unit and place, by its identity; one that is absent may be saved, too.
    `demand(unit)` returns the unit's bytes as a 1-D uint8 tensor that begins its storage; it may wait.
    """

    def __init__(
        self,
        units: int,
        frames: Mapping[int, int],
        slots: Mapping[int, tuple[int, Slot]],
        demand: Callable[[int], torch.Tensor],
    ) -> None:
        self._frames = frames
        self._slots = slots
        self._places = {slot.parameter: (unit, slot) for unit, slot in slots.values()}
        self._demand = demand
        self._tallies = tuple(Tally() for _ in range(units))
        self._stack = _Stack()

    def enter(self, *, beside_others: bool = False) -> bool:
        """Put the hooks on top, unless they are there; returns whether it pushed (then `leave` must follow).

        The rule looks at the top alone, never at what lies below. So a checkpointed region pushes at the same places
        when it is recomputed, though nothing around it is there the second time, and saves the same tensors.
        `beside_others`: not over the hooks of others either. An operation in a checkpointed region that reads a
        parameter has it as an argument of the region the second time, perhaps, and is no longer seen.
        """
        outer = top_hooks()
        if outer is not None and (beside_others or self.owns(outer[0])):
            return False
        scope = _Scope(self, outer)
        push_hooks(*scope.active_pair)
        self._stack.scopes.append(scope)
        return True

    def leave(self) -> None:
        """Undo the latest `enter` that pushed; hooks of others that lie on top stay there (`remove_hooks`).

        Raises TiermemError if somebody else has removed the pair and left none of his own.
        """
        scope = self._stack.scopes[-1]
        is_removed = remove_hooks(scope.active_pair[0], self.owns)
        self._stack.scopes.pop()  # after that: what an interrupt leaves here `leave_rest` finds
        if not is_removed:
            raise TiermemError(
                "saved-tensor hooks were left in another order than they were entered: a module left a "
                "torch.autograd.graph.saved_tensors_hooks in its forward that it had not entered there, and removed "
                "tiermem's instead; leave it where it was entered"
            )
        scope.pair = None

    def leave_rest(self) -> None:
        """Undo what an interrupt has left of calls on this thread that have ended."""
        scopes = self._stack.scopes
        while scopes:
            remove_hooks(scopes[-1].active_pair[0], lambda _: True)  # none of others' in its place, should it be gone
            scopes.pop().pair = None

    def put_aside(self) -> Callable[[], None]:
        """Forget what was pushed on this thread, which is no longer on torch's stack; returns what remembers it."""
        scopes, self._stack.scopes = self._stack.scopes, []

        def put_back() -> None:
            self._stack.scopes = scopes

        return put_back

    def outstanding(self, unit: int) -> int:
        """How many saved views of this unit a living graph still has."""
        return self._tallies[unit].alive

    @property
    def any_outstanding(self) -> bool:
        """Whether a living graph has any; may be asked on every thread."""
        return any(tally.are_any for tally in self._tallies)

    def values_changed(self, parameters: Iterable[int]) -> None:
        """Say that these were updated: handles on them made before are stale; those on others of their unit are not."""
        numbers = list(parameters)
        self.may_change({self._places[number][0] for number in numbers})
        self.were_written(numbers)

    def may_change(self, units: Iterable[int]) -> None:
        """Say that values of these are about to be written: what is saved from now on may have new ones."""
        for unit in units:
            self._tallies[unit].generation += 1

    def were_written(self, parameters: Iterable[int]) -> None:
        """Say which have been since `may_change`: handles made before that are stale."""
        for number in parameters:
            unit, slot = self._places[number]
            self._tallies[unit].change(slot)

    def recognise(self, tensor: torch.Tensor) -> Handle | None:
        """Return a handle if `tensor` views the frame of a gathered unit, or is an absent parameter."""
        if is_absent(tensor) and id(tensor) in self._slots:
            unit, slot = self._slots[id(tensor)]
            return Handle(unit, self._tallies[unit], slot.dtype, slot.shape, slot.stride, slot.start)
        kind = type(tensor)
        if (kind is not torch.Tensor and not issubclass(kind, nn.Parameter)) or tensor.layout is not torch.strided:
            return None
        try:
            found = self._frames.get(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):
            return None  # a wrapper without storage
        if found is None or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset())
        return Handle(found, self._tallies[found], tensor.dtype, tensor.shape, tensor.stride(), offset)

    def restore(self, handle: Handle) -> torch.Tensor:
        """Return the view again, on whatever frame the unit has now; waits if it has none."""
        if handle.tally.is_stale(handle):
            raise RuntimeError(
                f"the graph kept parameters of unit {handle.unit} that the optimizer has updated since, or that were "
                "written inside gathered(write=True): a backward through a graph built before would use the wrong "
                "values (plain PyTorch refuses too)"
            )
        base = self._demand(handle.unit)
        if torch.is_grad_enabled() and backward_number() >= 0:
            self._cover_node()
        return view_bytes(base, handle.dtype, handle.offset, handle.shape, handle.stride)

    def _cover_node(self) -> None:
        """Have what the running node of a backward saves (`create_graph=True`) kept as handles too.

        Else the graph of the gradients would hold the frame of every unit it came by. Nobody has to leave: autograd
        gives each node the hooks that backward was called under, and forgets what was pushed meanwhile.
        """
        outer = top_hooks()
        if outer is None or not self.owns(outer[0]):
            scope = _Scope(self, outer)
            pair, scope.pair = scope.active_pair, None
            push_hooks(*pair)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor again, whatever was kept of it: a handle, itself, or what others made of it."""
        if isinstance(packed, Handle):
            return self.restore(packed)
        if isinstance(packed, Foreign):
            return call_out(packed.unpack, packed.packed)
        return packed.restore()  # type: ignore[no-any-return]

    def owns(self, pack: Pack) -> bool:
        """Whether this is one of the pack hooks that `enter` pushes."""
        return isinstance(pack, _Scope) and pack.hooks is self
