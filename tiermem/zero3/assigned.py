"""What constructors write into parameters that have no storage yet, to be written again when they have.

Owns the record of such writes, by module and name, from `deferred_init` until the parameters get values; for that a
piece of process-wide state beside `registry.py`, a weak map, because only the model connects the two. Does not know
units or pages. Guarantees that a write which a module's own initialisation does not repeat (a parent that zeroes a
child's weight, a scaled projection, a parameter put in another's place) is repeated on the real values, in its order,
or, where it was computed from values that were not there, is named in an error.

What is not recorded. `reset_parameters` of the module itself and the model's `_init_weights` are called again when
storage is there; what they write begins a parameter's record anew. A deep copy of a module (`nn.TransformerEncoder`
makes some) begins without what was written into the original.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from tiermem.errors import ConfigError

_RESETS = ("reset_parameters", "_reset_parameters")
_INITIALIZER = "_init_weights"
# Operations after which nothing is left of the values before, if they go to all elements.
_OVERWRITE = frozenset(
    f"aten::{name}_" for name in ("zero", "fill", "copy", "uniform", "normal", "random", "exponential", "bernoulli")
) | {init.__name__}


@dataclass(frozen=True, slots=True)
class _View:
    """Some elements of the parameter itself, in its memory; `whole`: all of them, as the parameter shows them."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return (
            values if self.whole else values.as_strided(self.size, self.stride, values.storage_offset() + self.offset)
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Operation:
    """A function and what it was called with."""

    func: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str


@dataclass(slots=True)
class _Writes:
    """What was written into one parameter, in order; `lost`: the name of an operation that cannot be repeated."""

    stride: tuple[int, ...]
    calls: list[Callable[[torch.Tensor], object]] = field(default_factory=list)
    lost: str | None = None
    needs_stride: bool = False

    def clear(self) -> None:
        self.calls.clear()
        self.lost, self.needs_stride = None, False


_assigned: MutableMapping[nn.Module, dict[str, _Writes]] = WeakIdKeyDictionary()


def forget_writes(model: nn.Module) -> None:
    """The model's parameters have their values."""
    for module in model.modules():
        _assigned.pop(module, None)


def repeat_writes(module: nn.Module, attribute: str, values: torch.Tensor, *, name: str) -> None:
    """Write into `values`, those of the module's parameter, what was written into it before it had storage.

    Raises ConfigError, with `name` and the operation, where that cannot be repeated.
    """
    writes = _assigned.get(module, {}).get(attribute)
    if writes is None:
        return
    moved = writes.needs_stride and tuple(values.stride()) != writes.stride
    if writes.lost is not None or moved:
        reason = "it lies differently in memory now" if moved else f"{writes.lost} of values that were not there"
        raise ConfigError(
            f"parameter {name} was written under deferred_init in a way that cannot be "
            f"repeated now ({reason}): expected constants, random numbers or tensors with values; pass init= or "
            "weights=, or build the model without deferred_init"
        )
    with torch.no_grad():
        for call in writes.calls:
            call(values)


class WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is written into parameters without storage while it is active, on its thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[nn.Module, str, nn.Parameter]] = {}
        # Constants on their way into a parameter (`weight[0] = 3.0`): torch brings them to its device first.
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def register(self, module: nn.Module, name: str, bare: nn.Parameter, values: torch.Tensor | None) -> None:
        """A parameter without storage is about to become the module's. `values`: what it had, None if that is unknown.

        They are kept only if it takes another's place: those that a module makes, its initialisation makes again.
        """
        known = self._known.get(_memory(bare))
        if known is not None and known[0] is module and known[1] == name:
            return
        _assigned.get(module, {}).pop(name, None)
        if known is not None:
            return  # a tie: the record stays where the parameter came first
        self._know(module, name, bare)
        if module._parameters.get(name) is None:  # noqa: SLF001 - getattr might compute it
            return
        writes = _writes_of(module, name, bare)
        if values is None:
            writes.lost = "made"
        else:
            writes.calls.append(_assignment(values.detach()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note it if it writes."""
        given = kwargs or {}
        result = func(*args, **given)
        if func._schema.is_mutable:  # noqa: SLF001 - torch has no other way to ask
            for target in _targets(func, args, given):
                self._constants.pop(_memory(target), None)
                self.note(target, _Operation(func, args, given, func._schema.name), sys._getframe(1))  # noqa: SLF001
        elif isinstance(result, torch.Tensor) and result.is_meta and given.get("device") is not None:
            self._note_constant(result, func, args, given)
        return result

    def _note_constant(self, made: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the value of one element that is made of what is there."""
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if made.numel() == 1 and not any(each.is_meta for each in given):
            with torch.no_grad():
                self._constants[_memory(made)] = made, func(*args, **{**kwargs, "device": torch.device("cpu")})

    def note(self, target: torch.Tensor, operation: _Operation, frame: FrameType) -> None:
        """An operation, called from `frame`, writes into `target`, which has no storage."""
        module, name, bare = self._find(target, frame)
        if module is None or bare is None:
            return
        writes = _writes_of(module, name, bare)
        if _is_repeated_anyway(module, frame):
            writes.clear()
            return
        if target.numel() == bare.numel() and operation.name in _OVERWRITE:
            writes.clear()
        try:
            args, kwargs = tree_map(lambda each: self._take(each, bare, writes), (operation.args, operation.kwargs))
        except _LostError:
            writes.lost = operation.name
            return
        func = operation.func

        def call(values: torch.Tensor) -> object:
            here = tree_map(lambda each: each.of(values) if isinstance(each, _View) else each, (args, kwargs))
            return func(*here[0], **here[1])

        writes.calls.append(call)

    def _take(self, each: Any, bare: nn.Parameter, writes: _Writes) -> Any:
        """What is kept of an argument: the place of the parameter's own elements, a copy of other values."""
        if not isinstance(each, torch.Tensor):
            return each
        if not each.is_meta:
            return each.detach().clone()
        if _memory(each) in self._constants:
            return self._constants[_memory(each)][1].reshape(()).expand(each.shape)
        if _memory(each) != _memory(bare) or each.dtype != bare.dtype:
            raise _LostError
        whole = each.shape == bare.shape and each.stride() == bare.stride()
        writes.needs_stride |= not whole
        return _View(tuple(each.shape), tuple(each.stride()), int(each.storage_offset()), whole)

    def _know(self, module: nn.Module, name: str, bare: nn.Parameter) -> None:
        self._known[_memory(bare)] = module, name, bare

    def _find(self, target: torch.Tensor, frame: FrameType) -> tuple[nn.Module | None, str, nn.Parameter | None]:
        """Whose parameter the target shows; one with other memory than it began with is looked for on the stack."""
        found = self._known.get(_memory(target))
        if found is None or _memory(found[2]) != _memory(target):
            for module in _modules_at_work(frame):
                for name, parameter in module._parameters.items():  # noqa: SLF001
                    if parameter is not None and parameter.is_meta and _memory(parameter) == _memory(target):
                        self._know(module, name, parameter)
                        return module, name, parameter
            return None, "", None
        return found


class InitialiserWatch(TorchFunctionMode):
    """Notes the functions of `torch.nn.init` that do nothing where there is no storage, and so write nothing.

    `trunc_normal_`, `orthogonal_`, `dirac_` and `sparse_` ask for `tensor.is_meta` first: that is seen, and by whom.
    """

    def __init__(self, recorder: WriteRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and note who asks."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is torch.Tensor.is_meta and result:
            frame = sys._getframe(1)  # noqa: SLF001
            asking = getattr(init, frame.f_code.co_name, None)
            if asking is not None and getattr(inspect.unwrap(asking), "__code__", None) is frame.f_code:
                given = tuple(frame.f_locals[name] for name in inspect.getargs(frame.f_code).args)
                self._recorder.note(args[0], _Operation(asking, given, {}, init.__name__), frame)
        return result


class _LostError(Exception):
    """An operation uses values that are not there."""


def _assignment(values: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Gives a parameter these values; of equal ones only one is kept."""
    first = values.flatten()[:1].clone()
    kept = first.expand(values.shape) if values.numel() and bool((values == first).all()) else values
    return lambda place: place.copy_(kept)


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors without storage that an operation writes into."""
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and each.is_meta:
                yield each


def _writes_of(module: nn.Module, name: str, bare: nn.Parameter) -> _Writes:
    return _assigned.setdefault(module, {}).setdefault(name, _Writes(tuple(bare.stride())))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _is_repeated_anyway(module: nn.Module, frame: FrameType) -> bool:
    """Whether the module's own `reset_parameters`, or the `_init_weights` of one that is at work, does this."""
    initializers: set[CodeType] = set()
    each: FrameType | None = frame
    while each is not None:
        name = each.f_code.co_name
        if name in _RESETS and _first(each) is module:
            return True
        if name == _INITIALIZER:
            initializers.add(each.f_code)
        if initializers and (working := _first(each)) is not None:
            own = initializer_of(working)
            if own is not None and getattr(inspect.unwrap(own), "__code__", None) in initializers:
                return True
        each = each.f_back
    return False


def initializer_of(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """The model's own `_init_weights`, if there is one and it is a function of a module."""
    own = getattr(module, _INITIALIZER, None)
    try:
        inspect.signature(own).bind(module)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return own


def _modules_at_work(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are running, the innermost first, each with its parts."""
    while frame is not None:
        working = _first(frame)
        if working is not None:
            yield from working.modules()
        frame = frame.f_back


def _first(frame: FrameType) -> nn.Module | None:
    """The module that a running method belongs to, or that a function was given first."""
    code = frame.f_code
    found = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return found if isinstance(found, nn.Module) and "_modules" in found.__dict__ else None
