"""Values for a module that was built without them.

Owns who is called to initialise what, and the marks by which forgotten values are found. Does not know pages or units
beyond their root module. Guarantees that memory nobody initialised never becomes a weight or a buffer.

Why parents are called too: many models initialise a layer's parts from the class above (a residual projection scaled
by depth, an embedding from the whole model), children first. While one unit is being initialised every other parameter
is on the meta device, where writing does nothing, so calling the parents of each unit repeats exactly that order. So
are those that are present: they have their values.

Models of transformers tie weights after their initialisation: what it writes through the name that is tied, say of the
head, is dropped there. So those names, too, are on the meta device meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.zero3.at_work import own_init
from tiermem.zero3.placeholder import is_placeholder, marker_value
from tiermem.zero3.units import Member, Place
from tiermem.zero3.writes import initialised_by, is_done, is_owner, is_reset, same_draws

Init = Callable[[nn.Module], object]

_ADVICE = "build the model under tiermem.deferred_init(), where buffers stay real, or give it values before offload"
_NEITHER = 2  # in a byte that is to be False or True: torch writes 0 and 1 only
_PART_NUMEL = 1 << 18  # elements that are looked at at a time


class Initialiser:
    """Calls `init`, or the model's own `_init_weights`, or `reset_parameters`, on the modules of a unit."""

    def __init__(self, model: nn.Module, init: Init | None, filled_later: Container[str] = ()) -> None:
        """`filled_later`: names of buffers that somebody else gives values to afterwards."""
        self._init = init
        self._filled_later = filled_later
        self._names = {id(module): name for name, module in model.named_modules()}
        self._own: dict[int, Init] = {}  # by the module that it is called with
        self._inits: dict[int, Init] = {}  # by the module whose it is
        self._parents: dict[int, list[nn.Module]] = {}
        # Beside present ones only that is called below which an absent one lies: other buffers are as they should be.
        self._present = list(_there(model)) if init is None and _has_absent(model) else []
        self._reaching = {id(each) for each in model.modules() if not self._present or _has_absent(each)}
        self._tied_later = list(_tied_later(model))
        self._note(model, None, [])

    def run_all(self, root: nn.Module, fresh: Sequence[Member]) -> None:
        """Initialise the parameters of one root, which have just received storage.

        A tied one by the module whose initialisation its values are in a plain model, wherever that lies. Raises
        ConfigError naming a meta buffer that is left without values.
        """
        chosen = {member: self._place_of(member) for member in fresh}
        below = {id(module) for module in root.modules()}
        away = [place for place in chosen.values() if id(place.module) not in below]
        here = [place for place in chosen.values() if id(place.module) in below]
        known = [member for member, place in chosen.items() if is_owner(place.module, place.attribute)]
        for start, places in (*((place.module, [place]) for place in away), *([(root, here)] if here else [])):
            others = (place for member in (fresh if away else known) for place in member.places if place not in places)
            self._run(start, places, [(place.module, place.attribute) for place in others])

    def _place_of(self, member: Member) -> Place:
        places = member.places if self._init is None else member.places[:1]
        later = {(id(module), attribute) for module, attribute in self._tied_later}
        owning = (place for place in places if is_owner(place.module, place.attribute))
        earlier = (place for place in places if (id(place.module), place.attribute) not in later)
        return next(owning, next(earlier, places[0]))

    def _run(self, root: nn.Module, fresh: Sequence[Place], elsewhere: Sequence[tuple[nn.Module, str]]) -> None:
        """Initialise at and below `root` what is `fresh`; `elsewhere`: places of what is to be left alone there."""
        owners = {id(place.module) for place in fresh}
        owned = {(id(place.module), place.attribute) for place in fresh}
        below = list(_children_first(root))
        finished = list(_finished(module for module in below if id(module) in owners)) if self._init is None else []
        buffers = [made for module in below if id(module) in owners for made in self._give_buffers_storage(module)]
        above = self._parents.get(id(root), [])
        # What a module has besides, with values of its own, is written by its initialisation, too, and is to stay.
        present = list(_present(below, fresh)) if self._init is None else []
        with torch.no_grad(), ExitStack() as stack:
            for module, attribute in (*self._tied_later, *elsewhere) if self._init is None else ():
                if (id(module), attribute) not in owned:  # else it is there only
                    stack.callback(_untie(module, attribute))
            stack.enter_context(_away([each for each in self._present if each.module not in owners]))
            self._call(below, above, owners, set())
            # As in a constructor, where `reset_parameters` comes first: what the model's own leaves out is from there.
            left = {id(module) for module in below if id(module) in owners and _has_marks(module)}
            if left and self._init is None:
                self._call(below, above, owners, left)
            for parameter, values in present:
                parameter.copy_(values)
            for module, name, buffer, values in finished:
                module._buffers[name] = buffer  # noqa: SLF001 - it may have been replaced
                if not _equal(buffer, values):
                    buffer.copy_(values)
        self._require_values(buffers)

    def _call(self, below: list[nn.Module], above: list[nn.Module], owners: set[int], reset_first: set[int]) -> None:
        for number, module in enumerate((*below, *above)):
            try:
                with same_draws(module) if number < len(below) else nullcontext():
                    self._call_one(module, owned=id(module) in owners, reset_first=id(module) in reset_first)
            except RuntimeError as error:
                name = self._names[id(module)] or "the model"
                error.add_note(
                    f"raised while {name} ({type(module).__name__}) was given values, as it was built without storage: "
                    "what else it uses may be without them, too (a weight computed from others?). Pass weights= or "
                    "init=, or build the model with its values"
                )
                raise

    def _call_one(self, module: nn.Module, *, owned: bool, reset_first: bool) -> None:
        if self._init is not None:
            if owned:
                self._init(module)
            return
        own = self._own.get(id(module))
        # It came behind the own initialisation, or was left out of it. Where there are parts, that may go to the parts.
        if owned and is_reset(module) and next(module.children(), None) is None:
            own = None
        if owned and (own is None or reset_first):
            _reset(module)
        if own is not None and (owned or id(module) in self._reaching):
            noted = [self._inits[id(each)] for each in initialised_by(module) if owned and id(each) in self._inits]
            for each in noted if own in noted else (own, *noted):
                each(module)

    def run_buffers(self, model: nn.Module) -> None:
        """Give values to the meta buffers that are left, outside all units. Raises ConfigError if that fails."""
        for module in model.modules():
            if buffers := self._give_buffers_storage(module):
                with torch.no_grad():
                    (self._init or self._own.get(id(module)) or _reset)(module)
                self._require_values(buffers)

    def _note(self, module: nn.Module, own: Init | None, parents: list[nn.Module]) -> None:
        if id(module) in self._parents:
            return
        found = own_init(module)
        if found is not None:
            own = self._inits[id(module)] = found
        if own is not None:
            self._own[id(module)] = own
        self._parents[id(module)] = parents
        for child in module.children():
            self._note(child, own, [module, *parents])

    def _give_buffers_storage(self, module: nn.Module) -> list[_Made]:
        """Give the module's meta buffers storage, marked; returns them."""
        made = []
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                path = f"{self._names[id(module)]}.{name}".removeprefix(".")
                try:
                    values = torch.empty_like(buffer, device="cpu")
                    if not values.is_sparse:
                        mark(values)
                except (RuntimeError, TypeError) as error:  # torch cannot make one of this layout, or dtype
                    raise ConfigError(f"buffer {path} is on the meta device, and {_ADVICE}: {error}") from error
                setattr(module, name, values)
                made.append(_Made(module, name, path, values, values._version))  # noqa: SLF001 - the only way to ask
        return made

    def _require_values(self, made: list[_Made]) -> None:
        for each in made:
            if each.path not in self._filled_later and each.is_untouched():
                raise ConfigError(
                    f"buffer {each.path} is on the meta device and initialising its module left it without values: "
                    f"{_ADVICE}, or pass init="
                )


class _Made(NamedTuple):
    """A buffer that has received storage; `version`: torch's count of writes into it by then."""

    module: nn.Module
    name: str
    path: str
    values: torch.Tensor
    version: int

    def is_untouched(self) -> bool:
        """Whether marks are left, or, where there are none, nobody has written or put another in its place."""
        values = getattr(self.module, self.name)
        return is_untouched(values, self.version if values is self.values else None)


def _tied_later(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The places that models of transformers tie to others once they are initialised (`all_tied_weights_keys`)."""
    for module in model.modules():
        for name in getattr(module, "all_tied_weights_keys", None) or ():
            path, _, attribute = name.rpartition(".")
            try:
                yield module.get_submodule(path), attribute
            except AttributeError:  # a part that this model was built without
                continue


def _finished(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
    """The buffers of modules that were initialised as they were made, with a copy of their values."""
    for module in filter(is_done, modules):
        for name, buffer in module.named_buffers(recurse=False):
            plain = buffer.layout is torch.strided and not buffer.is_nested
            if plain and not buffer.is_meta and 0 not in buffer.stride():  # what is expanded torch does not write
                yield module, name, buffer, buffer.detach().clone()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_complex():  # torch does not compare those of halves
        one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
    return torch.equal(one, other)


def _present(modules: Sequence[nn.Module], fresh: Sequence[Place]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The parameters beside `fresh` ones that have values, with a copy of these."""
    owners = {id(place.module) for place in fresh}
    known = {id(place.module._parameters[place.attribute]) for place in fresh}  # noqa: SLF001 - as in `_untie`
    for parameter in (each for module in modules if id(module) in owners for each in module.parameters(recurse=False)):
        if id(parameter) not in known and not parameter.is_meta and not is_placeholder(parameter):
            known.add(id(parameter))
            yield parameter, parameter.detach().clone()


def _has_absent(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _untie(module: nn.Module, attribute: str) -> Callable[[], None]:
    """Put something without storage in a parameter's place; returns what puts the parameter back."""
    tied = module._parameters.get(attribute)  # noqa: SLF001 - getattr would compute what is parametrized
    if tied is None or tied.is_meta:
        return lambda: None
    setattr(module, attribute, _without_storage(tied))
    return lambda: setattr(module, attribute, tied)


class _There(NamedTuple):
    """A parameter or buffer that has values, of the module of this identity, and what stands for it."""

    module: int
    places: dict[str, Any]
    name: str
    values: torch.Tensor
    standing: torch.Tensor


def _there(model: nn.Module) -> Iterator[_There]:
    """The parameters that are present, and the buffers beside them."""
    for module in model.modules():
        own: list[tuple[dict[str, Any], str, Any]] = []
        for places in (module._parameters, module._buffers):  # noqa: SLF001 - as in `_untie`
            own += [(places, *each) for each in places.items() if each[1] is not None and not each[1].is_meta]
        if any(isinstance(values, nn.Parameter) for _, _, values in own):
            for places, name, values in own:
                # Of others torch makes none without storage: an initialisation may write into these buffers anew.
                if values.layout is torch.strided and not (values.is_nested or values.is_quantized):
                    yield _There(id(module), places, name, values, _without_storage(values))


@contextmanager
def _away(present: Sequence[_There]) -> Iterator[None]:
    """Have others stand for what is present, past what modules do then: of thousands, for each root."""
    for each in present:
        each.places[each.name] = each.standing
    try:
        yield
    finally:
        for each in present:
            each.places[each.name] = each.values


def _without_storage(values: torch.Tensor) -> torch.Tensor:
    bare = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
    return nn.Parameter(bare, requires_grad=values.requires_grad) if isinstance(values, nn.Parameter) else bare


def mark(values: torch.Tensor) -> torch.Tensor:
    """Fill `values` with what `is_marked` finds again: NaN, the smallest integer, no bool. Returns it."""
    if values.dtype == torch.bool:
        values.view(torch.uint8).fill_(_NEITHER)
        return values
    return values.fill_(marker_value(values.dtype))


def is_untouched(values: torch.Tensor, version: int | None) -> bool:
    """Whether nobody has written what `mark` was given when torch's count of writes into it was `version`.

    Where none of its values can be a mark (see `_has_mark`) that count tells; None: it is another object.
    """
    if _has_mark(values):
        return is_marked(values)
    written = version is None or values._version != version  # noqa: SLF001 - the only way to ask
    # Through `.data` torch does not count.
    return not (written or values.numel() == 0 or (not values.is_sparse and bool(values.any())))


def is_marked(values: torch.Tensor) -> bool:
    """Whether any element still is what `mark` wrote; never where `_has_mark` is not."""
    if values.dtype.is_floating_point or values.dtype.is_complex:
        return any(bool(torch.isnan(part).any()) for part in _parts(values))
    if values.dtype == torch.bool:
        return any(bool((part == _NEITHER).any()) for part in _parts(values.view(torch.uint8)))
    least = torch.iinfo(values.dtype).min if values.dtype.is_signed else None
    return least is not None and any(bool((part == least).any()) for part in _parts(values))


def _has_mark(values: torch.Tensor) -> bool:
    """Whether a value is odd enough to be a mark: none is of unsigned integers, and sparse ones have none."""
    dtype = values.dtype
    return values.layout is torch.strided and (dtype.is_floating_point or dtype.is_signed or dtype == torch.bool)


def _parts(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """The elements in pieces: an answer for each element takes memory, which is not to be that of a whole parameter."""
    return torch.split(values.view(-1), _PART_NUMEL) if values.is_contiguous() else (values,)


def _has_marks(module: nn.Module) -> bool:
    return any(not each.is_meta and is_marked(each.data) for each in module.parameters(recurse=False))


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
