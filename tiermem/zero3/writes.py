"""What was written into parameters that have no storage yet, to be written again when they have.

Owns the records, by module and name, from `deferred_init` until the parameters get values: a piece of process-wide
state beside `registry.py`, a weak map, because only the model connects the two. Does not know who writes (`assigned.py`
does), units or pages. Guarantees that writes are repeated in their order, or, where that cannot be, are named in an
error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tiermem.errors import ConfigError
from tiermem.zero3.engine import version
from tiermem.zero3.made import Source, memory_of


@dataclass(frozen=True, slots=True)
class Conversion:
    """Among what was written: values of one dtype became another one's."""

    found: torch.dtype
    made: torch.dtype

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """What is written into next."""
        return values.to(self.made)


class Draw:
    """What is drawn once, and is the same in the deep copies of what it is drawn for."""

    def __init__(self, call: Callable[[torch.Tensor], object] = lambda _: None) -> None:
        """`call`: draws it into a parameter, if that is known."""
        self._call = call
        self._states: dict[str, torch.Tensor] = {}

    def __call__(self, values: torch.Tensor) -> None:
        """Draw it."""
        with self.same(""):
            self._call(values)

    @contextmanager
    def same(self, what: str) -> Iterator[None]:
        """Within it torch's generator gives what it gave the first time, for the same `what`."""
        now = torch.get_rng_state()
        if what not in self._states:
            self._states[what] = now
            yield
            return
        torch.set_rng_state(self._states[what])
        try:
            yield
        finally:
            torch.set_rng_state(now)


@dataclass(frozen=True, slots=True)
class Begun:
    """Who initialises a parameter: of the modules that have it, the one that did so last.

    `is_reset`: by its `reset_parameters`, and no `_init_weights` behind it. `is_done`: somebody did, as far as was
    noted. `draw`: what copies of it have in common. `by`: whose `_init_weights` were called with the owner, in order.
    """

    owner: weakref.ref[nn.Module]
    is_reset: bool = False
    is_done: bool = False
    draw: Draw | None = None
    by: tuple[weakref.ref[nn.Module], ...] = ()

    def again(self, owner: nn.Module | None, by: nn.Module, *, is_reset: bool) -> Begun:
        """The parameter is initialised by the `_init_weights` of `by`; `owner` None: called with another module."""
        before = tuple(each for each in self.by if each() is not by)
        return Begun(
            self.owner if owner is None else weakref.ref(owner),
            is_reset=is_reset,
            is_done=True,
            by=() if is_reset else self.by if owner is None else (*before, weakref.ref(by)),
        )


@dataclass(slots=True)
class Writes:
    """What was written into one parameter, in order; `lost`: the name of an operation that cannot be repeated.

    `made`: gives it the values it was made of, if they are known; they come before whatever initialises it. `looked`:
    the parameter, by identity, and torch's count of writes into it when somebody looked last; `missed`: there have been
    more than were noted.
    """

    stride: tuple[int, ...]
    begun: Begun
    made: Callable[[torch.Tensor], object] | None = None
    calls: list[Callable[[torch.Tensor], object]] = field(default_factory=list)
    lost: str | None = None
    needs_stride: bool = False
    source: Source | None = None
    missed: bool = field(default=False, init=False)
    looked: tuple[int, int] | None = field(default=None, init=False)

    @property
    def is_any(self) -> bool:
        """Whether there is anything to repeat, or to give the parameter."""
        return bool(self.made) or any(not isinstance(call, Conversion) for call in self.calls)

    def clear(self) -> None:
        """Nothing is left of what was written before."""
        self.calls.clear()
        self.lost, self.needs_stride, self.missed = None, False, False

    def look(self, bare: torch.Tensor) -> None:
        """Nobody has noted what was written into the parameter since somebody looked."""
        if self.looked is not None and self.looked[0] == id(bare) and self.looked[1] < version(bare):
            self.missed = True

    def as_dtype(self, found: torch.dtype, made: torch.dtype) -> Writes:
        """The same in other memory, and behind it a conversion, if it is one."""
        return replace(self, calls=[*self.calls, *([Conversion(found, made)] if found != made else [])], source=None)

    def as_now(self) -> Writes:
        """The same, whatever is written from now on."""
        return replace(self, calls=list(self.calls))

    def become(self, other: Writes) -> None:
        """What was written is that of `other`."""
        for each in filter(lambda found: found.init, fields(self)):
            value = getattr(other, each.name)
            setattr(self, each.name, list(value) if each.name == "calls" else value)

    def lose(self, what: str) -> None:
        """The parameter is made of values that were not there: what it was made of before may have another shape."""
        self.lost, self.made = what, None


class Form(NamedTuple):
    """A parameter, or its values in other memory, on their way to be its `.data`; what was written into them."""

    values: torch.Tensor
    module: nn.Module
    name: str
    writes: Writes


_records: MutableMapping[nn.Module, dict[str, Writes]] = WeakIdKeyDictionary()


def writes_of(module: nn.Module, name: str, bare: torch.Tensor) -> Writes:
    """The record of the module's parameter `bare`, which has no storage."""
    return _records.setdefault(module, {}).setdefault(name, Writes(tuple(bare.stride()), Begun(weakref.ref(module))))


def all_written() -> Iterator[tuple[nn.Module, str, Writes]]:
    """Every record, of whatever model; of a tied parameter for each place."""
    for module, found in list(_records.items()):
        yield from ((module, name, writes) for name, writes in list(found.items()))


def begin_anew(module: nn.Module, name: str) -> None:
    """Forget what was written into a place: another parameter takes it."""
    _records.get(module, {}).pop(name, None)


def share_writes(module: nn.Module, name: str, writes: Writes) -> None:
    """A parameter comes into a further place: what is written into it counts there, wherever it was written first."""
    _records.setdefault(module, {})[name] = writes


def copy_writes(module: nn.Module, name: str, copy: nn.Module, copies: Mapping[int, Any]) -> None:
    """The parameter of `copy` is a copy of the module's, with all that was written into it.

    `copies`: what else was copied with it, by identity.
    """
    writes = _records.get(module, {}).get(name)
    if writes is not None:
        writes.begun = replace(writes.begun, draw=writes.begun.draw or Draw())
        writes.calls = [each if isinstance(each, (Draw, Conversion)) else Draw(each) for each in writes.calls]
        by = tuple(weakref.ref(copies.get(id(each()), each())) for each in writes.begun.by if each() is not None)
        copied = replace(writes.as_now(), begun=replace(writes.begun, owner=weakref.ref(copy), by=by), source=None)
        _records.setdefault(copy, {})[name] = copied


def forget_writes(model: nn.Module) -> None:
    """The model's parameters have their values."""
    for module in model.modules():
        _records.pop(module, None)


def give_made(module: nn.Module, attribute: str, values: torch.Tensor) -> bool:
    """Write into `values`, those of the module's parameter, what it was made of; whether that is known."""
    writes = _records.get(module, {}).get(attribute)
    return writes is not None and _make(writes, values)


def source_of(module: nn.Module, attribute: str) -> Source | None:
    """Where the module's parameter would lie in plain PyTorch, if that is memory that others may have."""
    writes, bare = _records.get(module, {}).get(attribute), module._parameters[attribute]  # noqa: SLF001
    if writes is None or writes.source is None or bare is None:
        return None
    # Behind the block it may have been converted, or be shown otherwise.
    return writes.source if writes.source.bare.cdata == memory_of(bare) and writes.stride == bare.stride() else None


def same_draws(module: nn.Module) -> AbstractContextManager[None]:
    """Within it parameters are drawn as those of what the module is a deep copy of, or of its copies.

    Its own are, or, where it has none, those of its parts.
    """
    draws: list[tuple[str, Draw | None]] = []
    for prefix, part in module.named_modules():
        if draws and draws[0][0].count(".") == 0:
            break
        found = _records.get(part, {})
        own = (name for name, parameter in part._parameters.items() if parameter is not None)  # noqa: SLF001
        draws += [(f"{prefix}.{name}".lstrip("."), found[name].begun.draw if name in found else None) for name in own]
    name, draw = draws[0] if draws else ("", None)
    return nullcontext() if draw is None or any(each is None for _, each in draws) else draw.same(name)


def is_owner(module: nn.Module, attribute: str) -> bool:
    """Whether the module's initialisation is that of its parameter, which others may have, too."""
    writes = _records.get(module, {}).get(attribute)
    return writes is not None and writes.begun.owner() is module


def initialised_by(module: nn.Module) -> list[nn.Module]:
    """Whose `_init_weights` the module was initialised by, in order, as far as was noted."""
    found = _records.get(module, {})
    noted = [found[name].begun.by for name in module._parameters if name in found]  # noqa: SLF001
    every = (each() for by in sorted(noted, key=len, reverse=True) for each in by)
    return list(dict.fromkeys(each for each in every if each is not None))


def is_done(module: nn.Module) -> bool:
    """Whether the module was initialised, as far as was noted, or has parameters that have values."""
    found = _records.get(module, {})
    own = [name for name, parameter in module._parameters.items() if parameter is not None]  # noqa: SLF001
    return bool(found) and any(name not in found or found[name].begun.is_done for name in own)


def is_reset(module: nn.Module) -> bool:
    """Whether all parameters of the module itself are, as its constructor or `reset_parameters` left them."""
    found = _records.get(module, {})
    own = [name for name, parameter in module._parameters.items() if parameter is not None]  # noqa: SLF001
    return bool(own) and all(name in found and found[name].begun.is_reset for name in own)


def refuse_unnoted(model: nn.Module) -> None:
    """Raise ConfigError if a parameter was written when nobody noted it any more.

    One that was put into a further place then has its record there, too.
    """
    known: dict[int, Writes] = {}
    for name, module, attribute, bare in absent_places(model):
        writes = _records.get(module, {}).get(attribute)
        if writes is None or writes.looked is None or writes.looked[0] != id(bare):
            continue
        known[id(bare)] = writes
        writes.look(bare)
        if writes.missed:
            raise ConfigError(
                f"parameter {name} was written behind deferred_init and before offload, where it has no storage: that "
                "is lost. Write inside the block, or in runtime.gathered(..., write=True); or pass init= or weights="
            )
    for _, module, attribute, bare in absent_places(model):
        if id(bare) in known:
            share_writes(module, attribute, known[id(bare)])
    for writes in known.values():
        writes.looked = None  # our own initialisation writes into all, too


def absent_places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every place of a parameter that has no storage: its name, the module, the attribute, the parameter."""
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():  # noqa: SLF001 - each place of what is tied
            if parameter is not None and parameter.is_meta:
                yield f"{path}.{attribute}".removeprefix("."), module, attribute, parameter


def repeat_writes(places: Iterable[tuple[nn.Module, str, str]], values: torch.Tensor) -> None:
    """Write into `values`, those of a parameter, what was written into it before it had storage, once.

    `places`: modules that have it, with its attribute and its name there. Raises ConfigError, with a name and the
    operation, where that cannot be repeated.
    """
    found: dict[int, tuple[Writes, str]] = {}
    for module, attribute, name in places:
        writes = _records.get(module, {}).get(attribute)
        if writes is not None:
            found.setdefault(id(writes), (writes, name))
    for writes, name in found.values():
        _repeat(writes, values, name)


def _make(writes: Writes, values: torch.Tensor) -> bool:
    if writes.made is None or writes.stride != tuple(values.stride()):
        return False
    with torch.no_grad():
        writes.made(values)
    return True


def _repeat(writes: Writes, values: torch.Tensor, name: str) -> None:
    moved = writes.needs_stride and tuple(values.stride()) != writes.stride
    if writes.lost is not None or moved:
        reason = "it lies differently in memory now" if moved else f"{writes.lost} of values that were not there"
        raise ConfigError(
            f"parameter {name} was written under deferred_init in a way that cannot be "
            f"repeated now ({reason}): expected constants, random numbers or tensors with values; pass init= or "
            "weights=, or build the model without deferred_init"
        )
    conversions = [call for call in writes.calls if isinstance(call, Conversion)]
    if not writes.begun.is_done:  # by its constructor; initialising its module has written into it now
        _make(writes, values)
    place = values
    if conversions and conversions[0] is not writes.calls[0]:
        place = values.to(conversions[0].found)
    with torch.no_grad():
        for call in writes.calls:
            if isinstance(call, Conversion):
                place = call(place)
            else:
                call(place)
        if place is not values:
            values.copy_(place)
