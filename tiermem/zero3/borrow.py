"""Parameters that are used outside the call of the module they belong to: gathered for the operation.

Owns the decision whether an operation reads an absent parameter as part of the computation. Does not gather: it says
which units an operation reads. Guarantees that no operation inside a call of the model, or in a backward, reads a
placeholder, that one which writes into it is an error, and that who else computes with one is told.

Why. `F.linear(x, self.embedding.weight)` for a tied output, `self.table.weight[i]`: no hook of the embedding runs, and
what is read is NaN. So it is in backward, where a checkpoint runs a function again that reads parameters and belongs
to no module, and in a loss computed after the model's call. What only looks at a model at rest (an average, a
conversion) is left alone: there the user says what is to be in memory (`runtime.gathered`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiermem.errors import TiermemError
from tiermem.zero3.absent import Operation, absent_in, each_in, is_absent
from tiermem.zero3.calls import CallStack
from tiermem.zero3.engine import backward_number
from tiermem.zero3.layout import Slot

# Attributes of a tensor that show its elements; all others are answered by a placeholder.
_SHOWING = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
# Methods and functions that a placeholder answers as the tensor would.
_ASKING = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_pinned", "data_ptr", "untyped_storage"),
    *("is_conj", "is_neg", "is_inference", "_is_view", "is_shared", "is_distributed", "is_same_size", "is_set_to"),
    *("dim_order", "storage", "retain_grad", "result_type"),
    *("__len__", "__hash__", "__repr__", "__format__", "register_hook", "register_post_accumulate_grad_hook"),
)
_MAKING = (
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
)
# What computes nothing, and so is not warned of (what is then computed from `data` is); `view_as` is how torch asks for
# a leaf's node of the graph, and `p.expand_as(p)` how others do.
_ASIDE = frozenset(("data", "detach", "view_as"))
# What is done to all parameters of a model: `Module.to`, and the like.
_CONVERTING = frozenset(
    ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous", "pin_memory")
)
_SETTING = ("__set__", "__delete__")
_LEFT_ALONE = frozenset((*_ASKING, *_MAKING, *_SETTING))
# The assignments that torch does not call `add_` and the like.
_ASSIGNING = frozenset(("__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"))
# In place by their names, though they write no elements.
_WRITING_NOTHING = frozenset({"requires_grad_", "share_memory_"})


class Borrowing:
    """The borrowed parameters of one model. `slots`: each parameter's unit and place, by its identity."""

    def __init__(
        self,
        slots: Mapping[int, tuple[int, Slot]],
        stack: CallStack,
        before: Callable[[None, tuple[int, ...], Sequence[nn.Parameter]], None],
        after: Callable[[None], None],
    ) -> None:
        """`before` and `after`: what surrounds the call of a module that reads these units; here it is an operation."""
        self._slots = slots
        self._stack = stack
        self._before = before
        self._after = after

    def answer(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], operation: Operation
    ) -> Any:
        """Carry out an operation on absent parameters, with what it reads gathered."""
        read = _read(function, args, kwargs)
        own = [parameter for parameter in absent_in(read) if id(parameter) in self._slots]
        units = dict.fromkeys(self._slots[id(parameter)][0] for parameter in own)
        # Without units it is at most what was detached of a parameter at rest.
        if not units or not self._is_computing((*args, *kwargs.values())):
            if next(absent_in(read), None) is not None:
                _warn(function, args)
            return operation()
        try:
            self._before(None, tuple(units), own)
            return operation()
        finally:
            self._after(None)

    def _is_computing(self, arguments: Sequence[Any]) -> bool:
        """Inside a call of the model, or a backward; else a loss is, where the graph goes through another argument."""
        if self._stack.calls or backward_number() >= 0:
            return True
        return torch.is_grad_enabled() and any(
            isinstance(each, torch.Tensor) and each.grad_fn is not None
            for each in each_in(arguments)
            if not is_absent(each)
        )


def _attribute(function: Callable[..., Any]) -> str:
    """The name of the attribute that is read, or "": the descriptor knows which."""
    if getattr(function, "__name__", "") != "__get__":
        return ""
    return getattr(getattr(function, "__self__", None), "__name__", "")


def _warn(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Warn of numbers made of placeholders; not of what shows or converts a whole model, which has no use for them."""
    name = _attribute(function) or getattr(function, "__name__", "")
    if name in _ASIDE or name in _CONVERTING or name.startswith("_has_"):
        return
    if name == "expand_as" and args[0] is args[-1]:
        return
    frame, level = sys._getframe(), 1  # noqa: SLF001 - documented
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("tiermem", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{name} was given a parameter whose values are paged out, and makes NaN of it: use runtime.parameter(p), "
        "a copy that no gradient comes to, or put `with runtime.gathered(module_or_parameters):` around it and, if it "
        "is trained by that, around backward",
        RuntimeWarning,
        stacklevel=level,
    )


def _read(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """The arguments whose elements an operation looks at. Raises TiermemError if it is to write an absent parameter."""
    name = getattr(function, "__name__", "")
    everything = (*args, *kwargs.values())
    if name == "__get__":
        return everything if _attribute(function) in _SHOWING else ()
    if name in _LEFT_ALONE:
        return ()
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _ASSIGNING
    written = next(absent_in(everything[:1] if in_place else (kwargs.get("out"),)), None)
    if written is not None and name not in _WRITING_NOTHING:
        raise TiermemError(
            f"a parameter of shape {tuple(written.shape)} was to be written by {name} while its values are paged out; "
            "put `with runtime.gathered(module_or_parameters, write=True):` around it"
        )
    return everything[1:] if in_place else everything
