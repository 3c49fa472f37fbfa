"""Who is at work as something is written, by the stack.

Owns nothing. Does not know what is written, nor into what. Guarantees that only a module whose method is running, or
that a running function was given first, is taken to be at work.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import nn

_EMBEDDINGS = (nn.Embedding.__init__.__code__, nn.EmbeddingBag.__init__.__code__)
_RESETS = ("reset_parameters", "_reset_parameters")
_OWN_INIT = "_init_weights"
_PLAIN = (bool, int, float, str)  # arguments that can be compared


class Repeated(NamedTuple):
    """What initialises a parameter when it has storage: its module's `reset_parameters`, a model's `_init_weights`."""

    by: nn.Module  # whose `_init_weights`; the module itself
    is_reset: bool


def calls_from(frame: FrameType) -> Iterator[FrameType]:
    """The calls that are running, from this one on, the innermost first."""
    each: FrameType | None = frame
    while each is not None:
        yield each
        each = each.f_back


def is_given(module: nn.Module, frame: FrameType) -> bool:
    """Whether an embedding is being made of weights that it was given, and then does not initialise."""
    for each in calls_from(frame):
        if each.f_code in _EMBEDDINGS and each.f_locals["self"] is module:
            return each.f_locals["_weight"] is not None
    return False


def repeated_by(module: nn.Module, frame: FrameType) -> Repeated | None:
    """Which function that is called again does this; None: another, or one that was given more than it will be."""
    inits: dict[CodeType | None, FrameType] = {}
    reset = False
    for each in calls_from(frame):
        name = each.f_code.co_name
        if name in _RESETS and _first(each) is module:
            if not _is_as_again(each, getattr(module, name)):
                return None
            reset = True
        if name == _OWN_INIT:
            inits[each.f_code] = each
        if inits and (working := _first(each)) is not None:
            own = own_init(working)
            called = inits.get(getattr(inspect.unwrap(own), "__code__", None)) if own is not None else None
            if called is not None and not _is_as_again(called, own):
                return None
            if called is not None:
                return Repeated(working, is_reset=reset)
    return Repeated(module, is_reset=True) if reset else None


def _is_as_again(frame: FrameType, function: Callable[..., object] | None) -> bool:
    """Whether what runs in `frame` has no other arguments than it will have when it is called again.

    In place of None it may have put what that stands for; what it assigns to by itself says nothing.
    """
    function = inspect.unwrap(function) if function is not None else None
    if function is None or getattr(function, "__code__", None) is not frame.f_code:
        return True  # what it calls of its own class's parents
    for name, parameter in inspect.signature(function).parameters.items():
        value, default = frame.f_locals.get(name), parameter.default
        is_other = type(default) in _PLAIN and not (type(value) is type(default) and value == default)
        if is_other and name not in _assigned(frame.f_code):
            return False
    return True


@functools.cache
def _assigned(code: CodeType) -> frozenset[str]:
    """The variables that a function assigns to."""
    stores = (each for each in dis.get_instructions(code) if each.opname.startswith(("STORE_FAST", "STORE_DEREF")))
    names = ((each.argval if isinstance(each.argval, tuple) else (each.argval,), each.opname) for each in stores)
    # The second of these two is read.
    return frozenset(name for found, kind in names for name in (found[:1] if kind == "STORE_FAST_LOAD_FAST" else found))


def module_given(bare: torch.Tensor, frame: FrameType) -> nn.Module | None:
    """Of the modules that `_init_weights` is called with, the one that has this parameter itself."""
    for each in calls_from(frame):
        if each.f_code.co_name == _OWN_INIT:
            for name in inspect.getargs(each.f_code).args:
                given = each.f_locals.get(name)
                if isinstance(given, nn.Module) and any(bare is own for own in given._parameters.values()):  # noqa: SLF001
                    return given
    return None


def own_init(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """The model's own `_init_weights`, if there is one and it is a function of a module.

    What wraps a model and answers for it (`__getattr__` of peft's models) has none: other parts are not the model's.
    """
    if _OWN_INIT not in vars(module) and not hasattr(type(module), _OWN_INIT):
        return None
    own = getattr(module, _OWN_INIT, None)
    try:
        inspect.signature(own).bind(module)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return own


def modules_at_work(frame: FrameType) -> Iterator[nn.Module]:
    """The modules whose methods are running, the innermost first, each with its parts."""
    for each in calls_from(frame):
        working = _first(each)
        if working is not None:
            yield from working.modules()


def _first(frame: FrameType) -> nn.Module | None:
    """The module that a running method belongs to, or that a function was given first."""
    code = frame.f_code
    found = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return found if isinstance(found, nn.Module) and "_modules" in found.__dict__ else None
