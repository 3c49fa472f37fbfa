"""What is refused of a model, before and after it is offloaded, because it would give or lose values in silence.

Owns the looks at a model that is about to be offloaded, the hooks on `state_dict` and `load_state_dict`, and those that
are left behind when the runtime is closed. Does not know how values come or go. Guarantees that `state_dict()` never
hands out placeholders, that `load_state_dict` never writes into them or puts other parameters in their place, and that
a model whose runtime is closed, or could not begin, says so instead of computing with NaN, or being saved as NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from tiermem.errors import ConfigError, TiermemError
from tiermem.memory.slab import own_storage
from tiermem.zero3.engine import outside_inference
from tiermem.zero3.gather import Gatherer, Presence
from tiermem.zero3.hooks import BoundHook
from tiermem.zero3.made import Source, memory_of
from tiermem.zero3.placeholder import is_placeholder
from tiermem.zero3.units import ModelUnits
from tiermem.zero3.writes import absent_places, source_of

# Of each size of element, what has bits only: DLPack does not know every dtype of torch's.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_TRIES = 100_000  # of finding an element that two tensors share; as a rule a few are enough


class ModelGuards:
    """The guards of one model, from construction to `close`."""

    def __init__(self, divided: ModelUnits, gatherer: Gatherer, *others: RemovableHandle) -> None:
        """`others`: guards of other rooms, which end with these."""
        self._modules = [module for module in divided.model.modules() if _own(module)]
        self._handles: list[RemovableHandle] = [*others]
        there = all_gathered(divided, gatherer)
        given: MutableMapping[int, torch.Tensor] = WeakValueDictionary()
        for module in self._modules:
            self._handles.append(module.register_state_dict_pre_hook(_Reading(there)))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_state_dict_post_hook(_Apart(there, given)))  # type: ignore[no-untyped-call]
            loading = _Loading(there)
            self._handles.append(module.register_load_state_dict_pre_hook(loading))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """The runtime ends: allow what was refused, but refuse to compute with, or save, placeholders that stay.

        May be called again, for what has become placeholders since.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules = guard_placeholders(self._modules)


def guard_placeholders(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Have modules whose parameters are placeholders, for good, refuse to compute with them and to save them.

    Returns the others.
    """
    others = []
    for module in modules:
        if any(map(is_placeholder, _own(module))):
            module.register_forward_pre_hook(_refuse_closed)
            module.register_state_dict_pre_hook(_refuse_saving_closed)  # type: ignore[no-untyped-call]
        else:
            others.append(module)
    return others


def all_gathered(divided: ModelUnits, gatherer: Gatherer) -> Callable[[], bool]:
    """A function that says whether the values of all units are there now."""
    units = range(len(divided.units))
    return lambda: all(gatherer.presence(unit) is Presence.GATHERED for unit in units)


def refuse_unfit(model: nn.Module) -> None:
    """Raise ConfigError for what cannot be made pages without loss, before anything is looked at more closely."""
    _refuse_divided(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(f"parameter {name} has no shape yet: run the lazy module once before offload")
        if parameter.layout is not torch.strided:
            raise ConfigError(
                f"parameter {name} has the layout {parameter.layout}: pages hold dense values only; make it dense "
                "(parameter.to_dense()), or a buffer"
            )
    refuse_nested(model)
    _refuse_scripted(model)
    _refuse_overlaps(model)


def refuse_nested(model: nn.Module) -> None:
    """Raise ConfigError for a buffer that is a nested tensor: it has no shape to be kept, or compared, by."""
    for name, buffer in model.named_buffers():
        if buffer.is_nested:
            raise ConfigError(
                f"buffer {name} is a nested tensor, which no commit can hold; keep it padded "
                "(buffer.to_padded_tensor(0.0)) beside its lengths, or as an attribute that is no buffer"
            )


def _refuse_divided(model: nn.Module) -> None:
    """Refuse what torch has spread over ranks: that is done here, too, and once is enough."""
    instead = "offload the model itself, on every rank: its state is divided over them and gradients are averaged"
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel") and hasattr(module, "module"):
            raise ConfigError(f"found {kind} around a {type(module.module).__name__}; {instead}")
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                raise ConfigError(f"parameter {name} is a DTensor, of fully_shard or a tensor-parallel plan; {instead}")


def _refuse_scripted(model: nn.Module) -> None:
    """Refuse parts that TorchScript runs: no hook of ours is called inside them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ConfigError(
                f"{name or 'the model'} is a TorchScript module ({type(module).__name__}), which calls no hooks: its "
                "parameters could not come and go; offload the module that torch.jit.script or torch.jit.trace was "
                "given"
            )


def _refuse_overlaps(model: nn.Module) -> None:
    """Refuse two parameters of which one has memory of the other, unless both are frozen, and views of trained ones.

    Without memory frozen ones, too: each would get values of its own.
    """
    reaching: list[_Span] = []  # what begins before the next one, and ends after its beginning
    for span in sorted(_spans(model), key=lambda found: (found.bare, found.begin)):
        reaching = [other for other in reaching if other.bare == span.bare and other.end > span.begin]
        for other in reaching:
            if (span.changes or other.changes) and span.shares(other):
                raise ConfigError(_why_refused(other, span))
        reaching.append(span)


class _Span:
    """The bytes that a tensor covers, as numpy is told of them; on the meta device, those of a storage that has none.

    `bare`: which storage that is, else 0. `changes`: whether it is a parameter that will not keep its values of now.
    """

    def __init__(self, kind: str, name: str, tensor: torch.Tensor, source: Source | None = None) -> None:
        """`source`: where a parameter without memory would lie; if that is gone, others that would lie there count."""
        self.kind, self.name = kind, name
        self.bare = memory_of(tensor) if tensor.is_meta else 0
        self.changes = kind == "parameter" and bool(tensor.requires_grad or (self.bare and source is None))
        if source is None:
            stride, offset, address = tensor.stride(), tensor.storage_offset(), tensor.data_ptr()
        else:
            stride, offset, address = source.stride, source.offset, source.address
            self.bare = source.storage.cdata if source.storage.expired() else 0  # type: ignore[no-untyped-call]
        steps = [each * tensor.element_size() for each in stride]
        span = sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=True)) + tensor.element_size()
        # numpy takes an address of 0 for none.
        self.begin = 1 + offset * tensor.element_size() if self.bare else address
        self.end = self.begin + span
        self.__array_interface__ = {  # numpy knows no bfloat16, but elements of any size
            "data": (self.begin, True),
            "shape": tuple(tensor.shape),
            "strides": tuple(steps),
            "typestr": f"|V{tensor.element_size()}",
            "version": 3,
        }

    def shares(self, other: _Span) -> bool:
        """Whether they have a byte in common; columns in turn have none. True also where that is hard to tell."""
        # The limit may be any number, though numpy's stubs say otherwise.
        return np.may_share_memory(np.asarray(self), np.asarray(other), max_work=_TRIES)  # type: ignore[arg-type]


def _why_refused(one: _Span, other: _Span) -> str:
    if one.kind == other.kind == "parameter":
        return (
            f"parameters {one.name} and {other.name} are two parameters in one memory (tied by `.data`, or part of "
            "it?); as pages each would be trained by itself. Make them one parameter (module.weight = other.weight), "
            "or clone() one"
        )
    view, parameter = (one, other) if other.kind == "parameter" else (other, one)
    return (
        f"{view.kind} {view.name} is a view of parameter {parameter.name}; as pages the parameter would be trained and "
        f"the {view.kind} keep its values of now. clone() it, or take the view in forward"
    )


def _spans(model: nn.Module) -> Iterator[_Span]:
    parameters = dict(model.named_parameters())
    own = {id(parameter) for parameter in parameters.values()}
    for kind, name, tensor in (*(("parameter", *named) for named in parameters.items()), *_beside(model)):
        foreign = type(tensor) in (torch.Tensor, nn.Parameter) and id(tensor) not in own
        if (kind == "parameter" or foreign) and _lies(tensor):
            yield _Span(kind, name, tensor)
    for name, module, attribute, parameter in absent_places(model):
        source = source_of(module, attribute) if parameter.numel() and id(parameter) in own else None
        if source is not None:
            own.remove(id(parameter))  # in its other places it is the same
            yield _Span("parameter", name, parameter, source)


def _beside(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Buffers, and attributes that are neither parameters nor buffers, nor computed anew before they are used."""
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer
    for prefix, module in model.named_modules():
        anew = "_flat_weights" if isinstance(module, nn.RNNBase) else ""  # in each call, of what is computed by then
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", anew):
                continue
            if not (isinstance(value, torch.Tensor) and hasattr(module, f"{attribute}_orig")):
                for place, tensor in _kept_in(attribute, value):
                    yield "attribute", f"{prefix}.{place}" if prefix else place, tensor


def _kept_in(place: str, value: Any, deeper: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor and its place; or those in a list or dict, or in such in it."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif deeper and isinstance(value, (list, tuple, dict)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(each, (torch.Tensor, list, tuple, dict)):  # of a vocabulary no word is to be written out
                yield from _kept_in(f"{place}[{key!r}]", each, deeper - 1)


def _lies(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a place, and not that of a placeholder, as a closed runtime leaves them behind."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return False
    if tensor.is_meta:
        return True
    return not bool(tensor != tensor) if tensor.dim() == 0 else not is_placeholder(tensor)


def refuse_placeholders(model: nn.Module) -> None:
    """Raise ConfigError if a parameter of `model` is a placeholder: taken for weights they would be NaN."""
    for name, parameter in model.named_parameters():
        if is_placeholder(parameter):
            raise ConfigError(
                f"parameter {name} has no values: the runtime it was offloaded by was closed without "
                "restore_model=True; build the model again, or continue a commit with resume=True"
            )


class _Reading(BoundHook):
    def act(self, module: nn.Module, *_: Any) -> None:
        """`state_dict()` is about to read the module's own parameters."""
        if any(map(is_placeholder, _own(module))):
            raise TiermemError(
                f"state_dict() of {type(module).__name__} while its parameters are paged out would be full of NaN; use "
                "runtime.parameter(p) for one of them, or `with runtime.gathered(model):` around it and copy what you "
                "keep, if the whole model fits into host_memory"
            )


class _Apart(BoundHook):
    """Has each value of a `state_dict()` be a storage of its own, over the same memory.

    They are pieces of their unit's, and who saves them may take pieces of one storage for the same values: accelerate's
    `save_model` and `save_state` keep one of them and leave out the others, safetensors refuses them.
    It stays the tensor that torch has put there: writes into that count as writes into the parameter. Values of a tied
    one have one storage, as in a plain model: they are saved once.
    """

    def __init__(self, is_there: Callable[[], bool], given: MutableMapping[int, torch.Tensor]) -> None:
        """`given`: what this model has given, by address, as long as it lives."""
        super().__init__(is_there)
        self._given = given

    def act(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """`state_dict()` has read the module's own parameters, and what is below it."""
        for name in module._parameters:  # noqa: SLF001 - also those that are None, without a copy
            found = state_dict.get(prefix + name)
            if type(found) is torch.Tensor and found.numel() and not found.requires_grad:  # not with keep_vars=True
                given = self._given.get(found.data_ptr())
                with outside_inference():  # as what torch has put there
                    found.data = given if given is not None and _is_same(given, found) else _apart(found)
                self._given[found.data_ptr()] = found


def _apart(values: torch.Tensor) -> torch.Tensor:
    return own_storage(values.view(_BITS.get(values.element_size(), values.dtype))).view(values.dtype)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they show the same elements: whoever has one may have given it others."""
    first, second = ((each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (one, other))
    return first == second


class _Loading(BoundHook):
    def act(self, module: nn.Module, _: Any, __: str, local_metadata: dict[str, Any], *___: Any) -> None:
        """`load_state_dict()` is about to write into the module's own parameters."""
        if local_metadata.get("assign_to_params_buffers", False):
            raise TiermemError(
                "load_state_dict(assign=True) would put other parameters in the place of offloaded ones, and nobody "
                "would page or train them; use `with runtime.gathered(model, write=True):` and assign=False"
            )
        if any(map(is_placeholder, _own(module))):
            raise TiermemError(
                f"load_state_dict() into {type(module).__name__} while its parameters are paged out; put "
                "`with runtime.gathered(module, write=True):` around it, for the whole model if it fits into "
                "host_memory, else module by module; or load before tiermem.offload"
            )


def _refuse_closed(module: nn.Module, _: Any) -> None:
    """Left on a module for good: does nothing once its parameters have values again."""
    if any(map(is_placeholder, _own(module))):
        raise TiermemError(
            f"{type(module).__name__} was called after its runtime was closed: its parameters are gone; use "
            "close(restore_model=True) to keep them, or tiermem.offload(..., resume=True) to go on from a commit. "
            "Where offload itself has failed, build the model again"
        )


def _refuse_saving_closed(module: nn.Module, *_: Any) -> None:
    """Left on a module for good, too: `torch.save(model.state_dict())` after close would write a file of NaN."""
    if any(map(is_placeholder, _own(module))):
        raise TiermemError(
            f"state_dict() of {type(module).__name__} after its runtime was closed would be full of NaN: its "
            "parameters are gone; to keep them use close(restore_model=True), or save with the runtime before closing. "
            "Where offload itself has failed, build the model again"
        )


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))
