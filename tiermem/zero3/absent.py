"""What an absent parameter is: an object that has itself asked for, whatever operation comes to it.

Owns the class of absent parameters. Does not know units, nor what can be done about it: it asks `answer`. Guarantees
that a parameter that is present has the class it came with, so that torch and its compilers see nothing of this, and
that an absent one is neither copied nor pickled as if it had values.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tiermem.errors import CopyError, TiermemError
from tiermem.interrupts import call_out
from tiermem.zero3.engine import unseen

# What torch is asked to do, with its arguments and what carries it out.
Operation = Callable[[], Any]
Answer = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], Operation], Any]

# Attributes that show no elements and are asked for often, such as `p.grad` of every parameter in every step.
_ASKED = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "grad_fn", "is_meta", "layout", "ndim")
)

# What of a parameter at rest is at rest as well: not a parameter, but told what it is when something is made of it.
_DATA: Any = torch.Tensor.data

# Where all gradients that there are get clipped, or cleared. It is asked of each parameter, and no gradient of ours is.
_GRAD: Any = torch.Tensor.grad
_CLIPPING, _CLEARING = "torch.nn.utils.clip_grad", "torch.nn.modules.module"
# Who may ask for it: code that is not Python's, ourselves, torch, and those who leave clipping to torch.
_MAY_ASK = ("", "tiermem", "torch", "accelerate", "transformers")

# What divides a model over ranks asks where each parameter is, before it does anything.
_DEVICE: Any = torch.Tensor.device
_DIVIDING = ("torch.nn.parallel.distributed", "torch.distributed.fsdp")

# What is given parameters to say whose gradients are wanted.
_GOING_BACK = (torch.autograd.grad, torch.autograd.backward)


class Absence:
    """The absent parameters of one model."""

    def __init__(self) -> None:
        # Carries out an operation that comes to absent parameters of the model; None: it is carried out as it is.
        self.answer: Answer | None = None
        # Whether a parameter has a gradient, which is a page and not in `p.grad`; whether it had one since `zero_grad`,
        # as it still would have in plain PyTorch; whether an optimizer clips by itself.
        self.has_gradient: Callable[[nn.Parameter], bool] = lambda _: False
        self.had_gradient: Callable[[nn.Parameter], bool] = lambda _: False
        # It is cleared by hand, or by the model's `zero_grad`: it would be None in plain PyTorch, too.
        self.is_cleared: Callable[[nn.Parameter], object] = lambda _: None
        self.is_clipped: Callable[[], bool] = lambda: False
        self._kinds: dict[type, type[_Absent]] = {}
        self._marked: dict[int, nn.Parameter] = {}
        self._closed = False

    def begin(self, parameter: nn.Parameter) -> None:
        """The parameter has no values from now on. One of a class that has operations of its own stays what it is."""
        kind = type(parameter)
        if self._closed or kind.__torch_function__ is not nn.Parameter.__torch_function__:
            return
        self._marked[id(parameter)] = parameter
        parameter.__class__ = self.kind_of(kind)  # type: ignore[assignment]

    def end(self, parameter: nn.Parameter) -> None:
        """The parameter is to have its values again."""
        kind = type(parameter)
        if issubclass(kind, _Absent):
            parameter.__class__ = kind.present

    def close(self) -> None:
        """Parameters without values are ordinary ones again, from now on."""
        self._closed = True
        for parameter in self._marked.values():
            self.end(parameter)
        self._marked.clear()

    def kind_of(self, kind: type) -> type[_Absent]:
        """The class of what is a `kind` when it is present."""
        if kind not in self._kinds:
            attributes = {"present": kind, "absence": self, "__module__": kind.__module__}
            self._kinds[kind] = type(kind)(kind.__name__, (_Absent, kind), attributes)
        return self._kinds[kind]


class _Absent:
    """Mixed into the class of a parameter, in front of it."""

    present: type[nn.Parameter]
    absence: Absence

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Who asks; nobody where C code does on a thread that is not Python's, as a hook on autograd's for a device.
        if function == _GRAD.__get__:
            _refuse_search(cls.absence, args[0], sys._getframe().f_back)  # noqa: SLF001 - documented
        elif function == _DEVICE.__get__:
            _refuse_division(sys._getframe().f_back)  # noqa: SLF001 - documented
        elif function == _GRAD.__set__ and args[1] is None:
            if cls.absence.has_gradient(args[0]):
                instead = "optimizer.zero_grad(), or for some parameters requires_grad_(False) before forward"
                raise _nothing_found("p.grad = None", instead, args[0])
            cls.absence.is_cleared(args[0])
        return unseen(_operate)(function, args, kwargs or {})

    def __repr__(self: Any) -> str:
        shown = f"size={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad}"
        return f"Parameter containing:\ntensor(<paged out: see runtime.parameter(p)>, {shown})"

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        raise _refusal("copied (copy.deepcopy, AveragedModel)")

    def __reduce_ex__(self, _: Any) -> Any:
        raise _refusal("copied or pickled (copy.copy, torch.save, sending it to another process)")


def is_absent(tensor: Any) -> bool:
    """Whether it is a parameter that has no values now."""
    return issubclass(type(tensor), _Absent)


def each_in(arguments: Sequence[Any]) -> Iterator[Any]:
    """The arguments, and in place of a list what is in it."""
    for argument in arguments:
        yield from argument if isinstance(argument, (list, tuple)) else (argument,)


def absent_in(arguments: Sequence[Any]) -> Iterator[nn.Parameter]:
    """The absent parameters among arguments, also those in a list."""
    return filter(is_absent, each_in(arguments))


def _operate(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Carry out an operation, in the care of each model that has absent parameters among its arguments."""

    def plainly() -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - the public way to say so
            return call_out(function, *args, **kwargs)

    if function in _ASKED:
        return plainly()
    if function in _GOING_BACK:
        return (_through_edges(function, args, kwargs) or plainly)()
    operation: Operation = plainly
    if getattr(function, "__name__", "") == "detach":
        operation = _still_absent(plainly, args, lambda kind: kind)
    elif function == _DATA.__get__:
        operation = _still_absent(plainly, args, lambda kind: kind.absence.kind_of(torch.Tensor))
    for absence in {type(each).absence: None for each in absent_in((*args, *kwargs.values()))}:  # type: ignore[attr-defined]
        if absence.answer is not None:
            operation = partial(absence.answer, function, args, kwargs, operation)
    return operation()


def _refuse_search(absence: Absence, parameter: nn.Parameter, frame: FrameType | None) -> None:
    """Raise TiermemError where torch, which asks in `frame`, would find no gradients, do nothing, and say nothing.

    Warn where others would: they may only look.
    """
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - or this would ask here again
        lacks = parameter.grad is None  # it is there in a hook after accumulation
    asking = str(frame.f_globals.get("__name__")) if frame is not None else ""
    may_ask = asking.partition(".")[0] in _MAY_ASK
    if lacks and not may_ask and (absence.has_gradient(parameter) or absence.had_gradient(parameter)):
        warnings.warn(
            "p.grad was asked for and is None, though there is a gradient, or was until a step used it: gradients of "
            "an offloaded model are pages. What changes or measures them in p.grad (clipping by hand, noise, "
            "Lookahead) does nothing. Change them with p.register_hook(function), and read copies by "
            "runtime.gradient(p), before optimizer.step()",
            RuntimeWarning,
            stacklevel=3,
        )
    if frame is None or asking not in (_CLIPPING, _CLEARING):
        return
    if asking == _CLEARING:
        if frame.f_code.co_name == "zero_grad":
            if absence.has_gradient(parameter):
                raise _nothing_found("Module.zero_grad", "optimizer.zero_grad()", parameter)
            absence.is_cleared(parameter)
        return
    if not absence.has_gradient(parameter):
        return
    while frame is not None and frame.f_globals.get("__name__") == _CLIPPING:
        if absence.is_clipped() or frame.f_locals.get("max_norm") == math.inf:  # a norm is asked for
            return
        frame = frame.f_back
    del frame  # the error would keep it, and it the error
    use = "optimizer.clip_grad_norm_(max_norm), or tiermem.AdamW(..., max_grad_norm=). By value there is none"
    raise _nothing_found("torch.nn.utils.clip_grad_*", use, parameter)


def _refuse_division(frame: FrameType | None) -> None:
    """Raise TiermemError where torch, which asks in `frame`, is about to spread the model over ranks."""
    if frame is not None and str(frame.f_globals.get("__name__")).startswith(_DIVIDING):
        raise TiermemError(
            "DistributedDataParallel, or FSDP, of an offloaded model: its pages are divided over the ranks, and its "
            "gradients averaged, already; use the model as it is"
        )


def _nothing_found(by: str, use: str, parameter: nn.Parameter) -> TiermemError:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - the public way to say so
        assigned = parameter.grad is not None
    found = "not the gradients, but what was assigned to p.grad" if assigned else "no gradients"
    beside = "" if assigned else ", and p.grad is None"
    return TiermemError(f"{by} finds {found}: gradients of an offloaded model are pages{beside}. Use {use}")


def _through_edges(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operation | None:
    """A backward that is given edges of the graph for the absent parameters whose gradients are wanted.

    Else all of it would be one operation, in which nobody is asked what hooks, and functions that are computed again,
    do with absent parameters. None where torch is to say what is wrong: there is none, or it has no graph.
    """
    wanted = kwargs.get("inputs", args[1] if len(args) > 1 else None) or ()
    edges = [get_gradient_edge(each) if is_absent(each) and each.requires_grad else each for each in wanted]
    given = {**kwargs, "inputs": edges}
    given_too = (args[0], edges, kwargs.get("grad_outputs"), kwargs.get("grad_tensors"))
    if not edges or next(absent_in(given_too), None) is not None:
        return None
    if not kwargs.get("materialize_grads"):
        return lambda: call_out(function, args[0], **given)

    def with_zeros() -> Any:
        found = call_out(function, args[0], **(given | {"materialize_grads": False, "allow_unused": True}))
        pairs = zip(found, wanted, strict=True)
        return tuple(torch.zeros_like(each) if gradient is None else gradient for gradient, each in pairs)

    return with_zeros


def _still_absent(plainly: Operation, args: Sequence[Any], kind_of: Callable[[Any], type]) -> Operation:
    """What `detach` and `data` do: an absent one of what stays absent. `nn.Parameter` wants one of its class."""

    def operation() -> Any:
        kind, made = type(args[0]), plainly()
        return made.as_subclass(kind_of(kind)) if issubclass(kind, _Absent) else made

    return operation


def _refusal(what: str) -> CopyError:
    return CopyError(
        f"a parameter of an offloaded model was {what} while its values are paged out; put "
        "`with runtime.gathered(model_or_parameters):` around it, if they fit into host_memory, or use "
        "runtime.parameter(p), which is a copy"
    )
