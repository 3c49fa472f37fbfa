"""From a model to pages, one unit at a time.

Owns the turning of parameters (present, on the meta device, or streamed from a file) into PARAM pages. Does not know
hooks, gradients or optimizer state: master values are handed to a callback. Guarantees that never more than one unit
has storage beyond the budget, that no uninitialised memory becomes a weight, and that parameters stay the objects they
were wherever torch permits it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from tiermem.errors import ConfigError, InvariantError
from tiermem.memory.heap import trim_heap
from tiermem.memory.mapping import Mapping, tensor_over
from tiermem.pager.page import Intent, Lane
from tiermem.pager.pager import Pager
from tiermem.zero3.engine import successor, version
from tiermem.zero3.initialise import Init, Initialiser, is_untouched, mark
from tiermem.zero3.layout import ParameterInfo, Slot, UnitLayout, memory_order, plan_layout
from tiermem.zero3.placeholder import Placeholders
from tiermem.zero3.shards import Piece, Shard
from tiermem.zero3.units import Member, ModelUnits, Unit
from tiermem.zero3.writes import forget_writes, give_made, refuse_unnoted, repeat_writes

# Smaller parameters are not worth a mapping of their own.
_MAPPED_NBYTES = 64 << 10

StoreMaster = Callable[[int, int, torch.Tensor], None]


class WeightSource(Protocol):
    """Weights read from somewhere, one parameter at a time."""

    def dtype_of(self, names: tuple[str, ...], own: torch.dtype) -> torch.dtype | None:
        """The dtype in which to ask for the parameter, which has dtype `own` in the model; None if it is not there.

        Of a buffer: whether `fill_others` gives it values.
        """

    def fill(self, names: tuple[str, ...], values: torch.Tensor) -> bool:
        """Write the parameter known by any of `names` into `values` (CPU); False if it is not there."""

    def fill_others(self, model: nn.Module) -> None:
        """Give the model what else is there: values of buffers, how it generates."""


@dataclass(frozen=True, eq=False)
class Materializer:
    """How the parameters of a model get their values, and where those go.

    `store_master(unit, parameter, values)` is called for each trainable parameter while its unit's page is being
    written: `values` are the original, uncast values (1-D, in the slot's memory order), valid during the call only.
    `init` is called on every module whose own parameters have just received storage; None means the model's own
    `_init_weights`, else each module's `reset_parameters`. `weights` win over both. `device` is where the computation
    will be, hence what placeholders say. `broadcast` makes the values those of rank 0, whatever other ranks have.
    `restored`: names of buffers that a commit gives values to afterwards.
    """

    pager: Pager
    placeholders: Placeholders
    store_master: StoreMaster
    init: Init | None = None
    weights: WeightSource | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    broadcast: Callable[[torch.Tensor], None] = lambda _: None
    restored: Container[str] = ()

    def run(self, divided: ModelUnits, shards: Sequence[Shard]) -> list[nn.Parameter]:
        """Turn every unit into pages, leave placeholders behind, and return the parameters by number; waits.

        `shards`: what this rank keeps of each unit, by number. Raises ConfigError for parameters on other devices than
        cpu or meta, or made in inference mode, and for values that nobody gave or that are lost.
        """
        _require_movable(divided)
        if self.init is None and self.weights is None:
            refuse_unnoted(divided.model)
        initialiser = self._initialiser(divided.model)
        parameters = {member.number: member.parameter for _, member in divided.members()}
        absent = {number for number, parameter in parameters.items() if parameter.is_meta}
        self._take_places(shards)
        for unit in divided.units:
            self._unit(unit, shards[unit.number], initialiser, parameters, absent)
            trim_heap()  # what initialising a unit needed lies outside the budget: it is not kept for the next one
        initialiser.run_buffers(divided.model)
        for buffer in divided.model.buffers():
            self.broadcast(buffer)
        forget_writes(divided.model)
        # Only now: while others are initialised, an absent parameter has to bear being written (see initialise).
        return self._stand_in(divided, shards)

    def adopt(self, divided: ModelUnits, shards: Sequence[Shard]) -> list[nn.Parameter]:
        """Leave placeholders in place of all parameters, whose pages exist already; returns them by number.

        What values the model has are dropped; what is kept by choice is brought to memory. Raises what `run` raises for
        devices and buffers, and what the pager raises.
        """
        _require_movable(divided)
        initialiser = self._initialiser(divided.model)
        initialiser.run_buffers(divided.model)
        for shard in shards:
            if shard.layout.kept:
                self.pager.lease([shard.layout.key], Intent.READ, lane=Lane.UPDATE).release()
        forget_writes(divided.model)
        return self._stand_in(divided, shards)

    def _initialiser(self, model: nn.Module) -> Initialiser:
        source = self.weights
        filled_later = {
            name
            for name, buffer in model.named_buffers()
            if name in self.restored or (source is not None and source.dtype_of((name,), buffer.dtype) is not None)
        }
        return Initialiser(model, self.init, filled_later)

    def _take_places(self, shards: Sequence[Shard]) -> None:
        """Have what is kept by choice in memory before all else: its frames never leave.

        Beside a device that memory is one piece, and what lay in its middle would divide what is left of it.
        """
        for shard in shards:
            if shard.layout.kept:
                key = shard.layout.key
                self.pager.add_page(key, shard.nbytes)
                with self.pager.lease([key], Intent.FRESH, lane=Lane.UPDATE) as lease:
                    lease.tensor(key).zero_()

    def _stand_in(self, divided: ModelUnits, shards: Sequence[Shard]) -> list[nn.Parameter]:
        parameters: dict[int, nn.Parameter] = {}
        for shard, unit in zip(shards, divided.units, strict=True):
            members = {member.number: member for member in unit.members}
            for slot in shard.layout.slots:
                standing = self.placeholders.of(slot.parameter, slot.shape, slot.dtype, self.device)
                member = members[slot.parameter]
                parameters[slot.parameter] = _replace(member, member.parameter, standing)
        return [parameters[number] for number in range(len(parameters))]

    def _unit(
        self,
        unit: Unit,
        shard: Shard,
        initialiser: Initialiser,
        parameters: dict[int, nn.Parameter],
        absent: set[int],
    ) -> None:
        source = self.weights
        if source is not None and all(source.dtype_of(each.names, each.parameter.dtype) for each in unit.members):
            self._write(shard, parameters, None)  # nothing to initialise, so one parameter at a time will do
            return
        aside: dict[int, torch.Tensor] = {}
        last = unit.parts[-1][1]
        for root, members in unit.parts:
            self._values(root, members, initialiser, parameters, absent)
            if members is not last:
                # Absent again at once: initialising the next root may write into this one, and must not find it.
                aside |= _take_out(members, parameters, absent)
        self._write(shard, parameters, aside)
        _take_out(last, parameters, absent)

    def _values(
        self,
        root: nn.Module,
        members: Sequence[Member],
        initialiser: Initialiser,
        parameters: dict[int, nn.Parameter],
        absent: set[int],
    ) -> None:
        """Give the members of one root their values: read, or made by initialising it."""
        fresh = [member for member in members if member.number in absent]
        bare: dict[int, int] = {}  # those that have no values yet, with torch's counts of writes into them
        for member in fresh:
            old = parameters[member.number]
            values = mark(_storage_like(old))
            places = member.places if self.init is None else ()
            made = [give_made(place.module, place.attribute, values) for place in places]
            new = parameters[member.number] = _replace(member, old, values)
            if not any(made):
                bare[member.number] = version(new)
        missing = [member for member in members if not self._load(member, parameters[member.number])]
        if any(member.number in absent for member in missing):
            initialiser.run_all(root, fresh)
            for member in fresh if self.init is None else ():
                named = ((place.module, place.attribute, place.name) for place in member.places)
                repeat_writes(named, parameters[member.number].data)
            if self.weights is not None:
                for member in members:  # the initialisation of a module writes all of its parameters
                    self._load(member, parameters[member.number])
        for member in missing:
            number = member.number
            if number in bare and is_untouched(parameters[number].detach(), bare[number]):
                raise ConfigError(
                    f"parameter {member.names[0]} was built without storage, and initialising its module left it "
                    "without values: pass init= or weights="
                )
        for member in members:
            self.broadcast(parameters[member.number].data)

    def _load(self, member: Member, parameter: nn.Parameter) -> bool:
        return self.weights is not None and self.weights.fill(member.names, parameter.data)

    def _stream(self, slot: Slot, parameter: nn.Parameter, *, kept: bool) -> torch.Tensor:
        """The values of one parameter from the weights, in memory of their own.

        What is kept by choice does not lose what its own dtype has room for to that of a model in 16 bits.
        """
        source, own = self.weights, parameter.dtype
        wanted = torch.promote_types(own, slot.dtype) if kept else own
        dtype = source.dtype_of(slot.names, wanted) if source is not None else None
        values = _storage_like(torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device="meta"))
        if source is None or not source.fill(slot.names, values):
            raise InvariantError(f"the weights of {slot.names[0]} were there and are gone")
        return values

    def _write(self, shard: Shard, parameters: dict[int, nn.Parameter], aside: dict[int, torch.Tensor] | None) -> None:
        """Put the unit's values into its page. `aside`: those of absent parameters, taken out; None: streamed."""
        layout = shard.layout
        for key, nbytes in shard.pages():
            if not (layout.kept and key == layout.key):  # that one has its place already
                self.pager.add_page(key, nbytes)
        kept, owned = _by_parameter(shard.held()), _by_parameter(shard.owned())
        # On the update's lane: values are made in host memory, and the computation fetches them from there.
        lease = self.pager.lease([layout.key], Intent.FRESH, lane=Lane.UPDATE)
        try:
            base = lease.tensor(layout.key)
            base.zero_()  # the gaps are written too: let them be the same in every run
            for slot in layout.slots:
                parameter = parameters[slot.parameter]
                if aside is None:
                    values = self._stream(slot, parameter, kept=layout.kept)
                else:
                    values = aside.pop(slot.parameter) if slot.parameter in aside else parameter.data
                flat = memory_order(values, slot, dtype=values.dtype)
                for piece in kept.get(slot.parameter, ()):
                    place = base[piece.offset : piece.offset + piece.nbytes].view(slot.dtype)
                    place.copy_(flat[piece.begin : piece.begin + piece.length])
                for piece in owned.get(slot.parameter, ()) if slot.trainable else ():
                    self.store_master(layout.unit, slot.parameter, flat[piece.begin : piece.begin + piece.length])
                # The last reference to the original values, unless their owner keeps one.
                del flat, values
                if not parameter.is_meta:
                    parameter.data = self.placeholders.of(slot.parameter, slot.shape, slot.dtype, self.device)
        except BaseException as error:
            lease.fail(error)
            raise
        lease.release()


def plan_layouts(
    divided: ModelUnits,
    *,
    dtype: torch.dtype,
    tile_numel: int,
    ranks: int = 1,
    kept_dtype: torch.dtype | None = None,
) -> tuple[UnitLayout, ...]:
    """Return the layouts of all units, by number, divided over `ranks`; kept units have `kept_dtype`, if there is one.

    Raises what `plan_layout` raises.
    """

    def layout_of(unit: Unit) -> UnitLayout:
        infos, own = [_info(each) for each in unit.members], (kept_dtype if unit.kept else None) or dtype
        planned = plan_layout(unit.number, unit.name, infos, dtype=own, tile_numel=tile_numel, ranks=ranks)
        return replace(planned, kept=unit.kept)

    return tuple(layout_of(unit) for unit in divided.units)


def _storage_like(absent: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory in the form of a meta tensor, straight from the operating system and back to it.

    Not from malloc: it keeps freed pieces (of up to 32 MiB with glibc), and with small allocations between them they
    do not fit the next unit's parameters, so that in the end memory for the whole model would have been taken.
    """
    last = sum((size - 1) * stride for size, stride in zip(absent.shape, absent.stride(), strict=True))
    nbytes = (last + 1) * absent.dtype.itemsize
    if absent.numel() == 0 or nbytes < _MAPPED_NBYTES:
        return torch.empty_strided(absent.shape, absent.stride(), dtype=absent.dtype, device="cpu")
    area = tensor_over(Mapping(nbytes).buffer(0, nbytes))  # the mapping ends with the last tensor over it
    return area.view(absent.dtype).as_strided(absent.shape, absent.stride())


def _info(member: Member) -> ParameterInfo:
    parameter = member.parameter
    return ParameterInfo(
        number=member.number,
        names=member.names,
        shape=tuple(parameter.shape),
        stride=tuple(parameter.stride()),
        dtype=parameter.dtype,
        trainable=parameter.requires_grad,
    )


def _by_parameter(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.slot.parameter, []).append(piece)
    return found


def _require_movable(divided: ModelUnits) -> None:
    for _, member in divided.members():
        parameter = member.parameter
        if parameter.is_inference():
            raise ConfigError(
                f"parameter {member.names[0]} was made in torch.inference_mode() and can never be trained: make the "
                "model outside of it"
            )
        if parameter.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"parameter {member.names[0]} is on {parameter.device}; offload takes models on cpu or meta, and "
                "brings the parameters to the device itself"
            )


def _take_out(
    members: Sequence[Member], parameters: dict[int, nn.Parameter], absent: set[int]
) -> dict[int, torch.Tensor]:
    """Make those that were absent so again; returns the values they had, by number."""
    taken: dict[int, torch.Tensor] = {}
    for member in members:
        if member.number in absent:
            old = parameters[member.number]
            taken[member.number] = old.data
            gone = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")
            parameters[member.number] = _replace(member, old, gone)
    return taken


def _replace(member: Member, old: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Give a parameter other values, to or from meta too (which `.data =` refuses); returns it, or its successor."""
    if not old.is_meta and not values.is_meta:
        old.data = values
        return old
    new = successor(old, values)
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # Somebody keeps a weak reference, as torch's recurrent modules do: register the new object instead.
        for place in member.places:
            setattr(place.module, place.attribute, new)
        return new
    return old
