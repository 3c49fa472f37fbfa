"""Which parameters are gathered together, and whose call gathers them.

Owns the division of a model into units and the hook points. Does not know pages, bytes or hooks themselves. Guarantees
that every parameter belongs to exactly one unit, and that a module which reads parameters has a hook point that
gathers them all.

Two kinds of modules are hook points. A unit's root gathers everything its subtree reads, once for the whole layer.
Every other module that owns parameters gathers those again (a count, if the root has done it): checkpointing that
recomputes a layer calls its inner modules and not its root, and users call inner modules directly.

Frozen apart. A unit's parameters are one page, written back as a whole after an update. So where more of a root is
frozen than trained (adapters on a frozen base), it has two units: what is trained, and what is frozen, which no update
ever writes. Both are gathered for the same calls, and kept together in backward.

Kept apart. What stays in memory by choice (`keep.py`) is, in the same way, a unit beside the rest of its root.

Coalesced. A unit costs milliseconds a step whatever is in it. So small units that follow one another in the model, and
that nobody has asked for, become one of several roots, up to a given size: see `coalesce.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.zero3.coalesce import Part, coalesced
from tiermem.zero3.keep import nbytes_in

Wish = nn.Module | type[nn.Module] | str
Wanted = Callable[[nn.Module], bool] | Iterable[Wish] | Wish | None

# Torch's own modules that hold others and do call them as modules, so that their parts can be units.
_ORCHESTRATORS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

# A coalesced unit of at most this many parts is named after all of them.
_NAMED = 6


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """One attribute of one module that is a parameter."""

    module: nn.Module
    attribute: str
    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """A parameter: its number among all of the model's, and every place it is registered at, owner first."""

    number: int
    places: tuple[Place, ...]

    @property
    def parameter(self) -> nn.Parameter:
        """The object registered now."""
        found: nn.Parameter = getattr(self.places[0].module, self.places[0].attribute)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """All qualified names."""
        return tuple(place.name for place in self.places)


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """Parameters gathered together: the modules that stand for them, each with those of them that it owns.

    `kept`: whether they stay in memory by choice.
    """

    number: int
    name: str
    parts: tuple[tuple[nn.Module, tuple[Member, ...]], ...]
    kept: bool = False

    @property
    def root(self) -> nn.Module:
        """The first of the modules: the only one, unless the unit is coalesced."""
        return self.parts[0][0]

    @property
    def members(self) -> tuple[Member, ...]:
        """All of its parameters."""
        return tuple(member for _, members in self.parts for member in members)

    @property
    def is_coalesced(self) -> bool:
        """Whether small units have become this one: then no single call surrounds all uses of it."""
        return len(self.parts) > 1


@dataclass(frozen=True, eq=False, slots=True)
class HookPoint:
    """A module whose call needs the parameters of `units`."""

    module: nn.Module
    units: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ModelUnits:
    """A model divided: the units by number, and the hook points in the order of the modules.

    `small`: bytes up to which units have become one.
    """

    model: nn.Module
    units: tuple[Unit, ...]
    points: tuple[HookPoint, ...]
    small: int = 0

    def members(self) -> Iterator[tuple[int, Member]]:
        """Yield (unit number, member) over all units."""
        for unit in self.units:
            for member in unit.members:
                yield unit.number, member


def find_units(
    model: nn.Module,
    wanted: Wanted = None,
    kept: Container[int] = frozenset(),
    *,
    small: int = 0,
    dtype: torch.dtype | None = None,
) -> ModelUnits:
    """Divide `model`.

    `wanted`: modules, classes or their names (one, or several), or a predicate. By default Hugging Face's
    `_no_split_modules` hint, else the children of the outermost ModuleLists. What is left becomes one unit for every
    module that directly owns parameters. Parameters registered at several places belong to the first unit that meets
    them. `kept`: parameters, by identity, that are units apart from the rest of their roots. `small`: bytes up to which
    units that follow one another become one (see `coalesce.py`), floating-point parameters in `dtype`; those that
    `wanted` asks for stay as they are.
    Raises ConfigError for a model without parameters and for a wish that is none or matches nothing.
    """
    modules = list(model.named_modules())
    inside_atomic = _inside_atomic(modules)
    roots = _roots(model, modules, wanted, inside_atomic)
    root_of = _assign(model, roots)
    places = _places(modules)
    if not places:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to page")

    owned: dict[int, list[Member]] = {}
    for number, at in enumerate(places.values()):
        first = at[0]
        root = root_of.get(id(first.module), first.module)
        owned.setdefault(id(root), []).append(Member(number, tuple(at)))
    parts = [
        Part(name or type(model).__name__, module, part, apart, id(part[0].parameter) in kept)
        for name, module in modules
        if id(module) in owned
        for part, apart in _parts(owned[id(module)], kept)
    ]
    groups = coalesced(parts, small, dtype, asked=frozenset() if wanted is None else roots)
    units = tuple(_unit(number, group) for number, group in enumerate(groups))
    owner = {id(member.parameter): unit.number for unit in units for member in unit.members}
    return ModelUnits(model, units, tuple(_points(modules, roots, owner)), small)


def is_atomic(module: nn.Module) -> bool:
    """True for torch's own composites (and classes derived from them), which may read their children's parameters.

    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` are examples.
    """
    if isinstance(module, (*_CONTAINERS, *_ORCHESTRATORS)) or next(module.children(), None) is None:
        return False
    return any(
        base.__module__.startswith("torch.nn.modules.") for base in type(module).__mro__ if base is not nn.Module
    )


def _unit(number: int, group: Sequence[Part[Member]]) -> Unit:
    names = [f"{part.name} ({part.apart})" if part.apart else part.name for part in group]
    name = ", ".join(names) if len(names) <= _NAMED else f"{names[0]} to {names[-1]}"
    return Unit(number, name, tuple((part.root, part.members) for part in group), group[0].kept)


def _inside_atomic(modules: Sequence[tuple[str, nn.Module]]) -> set[int]:
    return {
        id(inner) for _, module in modules if is_atomic(module) for inner in module.modules() if inner is not module
    }


def _roots(
    model: nn.Module, modules: Sequence[tuple[str, nn.Module]], wanted: Wanted, inside_atomic: set[int]
) -> set[int]:
    chosen = _hinted(modules) or _list_children(model) if wanted is None else _wished(modules, wanted)
    chosen -= inside_atomic
    covered = {id(inner) for _, module in modules if id(module) in chosen for inner in module.modules()}
    atomic = {id(module) for _, module in modules if is_atomic(module)} - inside_atomic - covered
    return chosen | atomic


def _wished(modules: Sequence[tuple[str, nn.Module]], wanted: Wanted) -> set[int]:
    # Modules and classes can be called, too, but are no predicates.
    if callable(wanted) and not isinstance(wanted, (nn.Module, type)):
        chosen = {id(module) for _, module in modules if wanted(module)}
    else:
        wishes = _wishes(wanted)
        classes = {wish if isinstance(wish, str) else wish.__name__ for wish in wishes if isinstance(wish, (str, type))}
        given = {id(wish) for wish in wishes if isinstance(wish, nn.Module)}
        foreign = given - {id(module) for _, module in modules}
        if foreign:
            raise ConfigError(f"units= names {len(foreign)} module(s) that are not part of the model")
        missing = classes - {type(module).__name__ for _, module in modules}
        if missing:
            raise ConfigError(f"units= names classes the model does not have: {', '.join(sorted(missing))}")
        chosen = given | {id(module) for _, module in modules if type(module).__name__ in classes}
    if not chosen:
        raise ConfigError("units= matches no module of the model")
    return chosen


def _wishes(wanted: object) -> list[Wish]:
    one = isinstance(wanted, (str, nn.Module)) and not isinstance(wanted, nn.ModuleList)
    wishes: list[Wish] = []
    for wish in wanted if isinstance(wanted, Iterable) and not one else [wanted]:
        if not isinstance(wish, (nn.Module, str)) and not (isinstance(wish, type) and issubclass(wish, nn.Module)):
            raise ConfigError(f"units= expects modules, classes or their names, or a predicate, found {wish!r}")
        wishes.append(wish)
    return wishes


def _hinted(modules: Sequence[tuple[str, nn.Module]]) -> set[int]:
    hints: set[str] = set()
    for _, module in modules:
        hints.update(getattr(module, "_no_split_modules", None) or ())
    found = [module for _, module in modules if type(module).__name__ in hints]
    inner = {id(below) for module in found for below in module.modules() if below is not module}
    return {id(module) for module in found} - inner


def _list_children(model: nn.Module) -> set[int]:
    """The children, with parameters, of ModuleLists not inside another such child."""
    if isinstance(model, nn.ModuleList) and type(model).forward is nn.Module.forward:
        return {id(child) for child in model.children() if next(child.parameters(), None) is not None}
    found: set[int] = set()
    for child in model.children():
        found |= _list_children(child)
    return found


def _assign(model: nn.Module, roots: set[int]) -> dict[int, nn.Module]:
    """The nearest root at or above each module, for the modules that have one; the first path to a module decides."""
    root_of: dict[int, nn.Module] = {}
    seen: set[int] = set()
    pending: list[tuple[nn.Module, nn.Module | None]] = [(model, None)]
    while pending:
        module, root = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if id(module) in roots:
            root = module
        if root is not None:
            root_of[id(module)] = root
        pending.extend((child, root) for child in reversed(list(module.children())))
    return root_of


def _parts(members: Sequence[Member], kept: Container[int]) -> Iterator[tuple[tuple[Member, ...], str]]:
    """The units of one root, each with a word for what it is of it; see "Frozen apart" and "Kept apart"."""
    yield from _trained_and_frozen([member for member in members if id(member.parameter) not in kept])
    for part, apart in _trained_and_frozen([member for member in members if id(member.parameter) in kept]):
        yield part, f"kept, {apart}" if apart else "kept"


def _trained_and_frozen(members: Sequence[Member]) -> Iterator[tuple[tuple[Member, ...], str]]:
    trained = tuple(member for member in members if member.parameter.requires_grad)
    frozen = tuple(member for member in members if not member.parameter.requires_grad)
    if trained and frozen and _nbytes(frozen) > _nbytes(trained):
        yield trained, ""
        yield frozen, "frozen"
    elif members:
        yield tuple(members), ""


def _nbytes(members: Sequence[Member]) -> int:
    return sum(nbytes_in(None, member.parameter) for member in members)


def _places(modules: Sequence[tuple[str, nn.Module]]) -> dict[int, list[Place]]:
    """All places by parameter identity, in the order of `model.parameters()`."""
    places: dict[int, list[Place]] = {}
    for prefix, module in modules:
        for attribute, parameter in module._parameters.items():  # noqa: SLF001 - the registry, tied entries included
            if parameter is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                places.setdefault(id(parameter), []).append(Place(module, attribute, name))
    return places


def _points(modules: Sequence[tuple[str, nn.Module]], roots: set[int], owner: dict[int, int]) -> Iterator[HookPoint]:
    for _, module in modules:
        read = _subtree(module, roots) if id(module) in roots else [module, *_lists_of(module)]
        needed = dict.fromkeys(owner[id(parameter)] for inner in read for parameter in inner.parameters(recurse=False))
        if needed:
            yield HookPoint(module, tuple(needed))


def _lists_of(module: nn.Module) -> Iterator[nn.Module]:
    """The lists of parameters in a module, and in these: nobody calls them, so it is `module` that reads them."""
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield child
            yield from _lists_of(child)


def _subtree(root: nn.Module, roots: set[int]) -> Iterator[nn.Module]:
    """The modules of `root`, leaving out what belongs to roots below it."""
    yield root
    for child in root.children():
        if id(child) not in roots:
            yield from _subtree(child, roots)
