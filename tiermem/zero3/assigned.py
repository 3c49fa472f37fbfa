"""What constructors write into parameters that have no storage yet: who writes what into which.

Owns the watch on operations and the decision whether a write is to be repeated; the records are in `writes.py`. Does
not know units or pages. Guarantees that a write which a module's own initialisation does not repeat (a parent that
zeroes a child's weight, a scaled projection, a parameter put in another's place) is recorded, or, where it was computed
from values that were not there, noted as lost; and that a parameter made of values which nobody initialises
(`nn.Parameter(torch.ones(n))`) has these, unless they are large and not all equal.

What is not recorded. `reset_parameters` of the module itself and the model's `_init_weights` are called again when
storage is there; what they write begins a parameter's record anew, which says whose that was.
"""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tiermem.zero3.at_work import calls_from, is_given, module_given, modules_at_work, repeated_by
from tiermem.zero3.engine import version
from tiermem.zero3.made import Source, ValueWatch, memory_of
from tiermem.zero3.operations import (
    OVERWRITING,
    Operation,
    View,
    all_equal,
    assignment,
    orthogonal_at_work,
    targets_of,
)
from tiermem.zero3.writes import Begun, Form, Writes, all_written, begin_anew, copy_writes, share_writes, writes_of

_RECONSTRUCT: CodeType = copy._reconstruct.__code__  # type: ignore[attr-defined]  # noqa: SLF001
_KEPT_NBYTES = 4 << 20  # of values that a parameter was made of; most are initialised again, and the model is large
# The same values in another form; transformers pads the bias of a head as it ties its weights, by nothing as a rule.
_CONVERTING = frozenset({"aten::_to_copy", "aten::clone", "aten::constant_pad_nd"})


class WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is written into parameters without storage while it is active, on its thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, Form] = {}  # parameters, by memory
        # By identity, too: a conversion gives a parameter other memory, and a place may be another's by now.
        self._objects: dict[int, Form] = {}
        # Constants on their way into a parameter (`weight[0] = 3.0`): torch brings them to its device first.
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._forms: dict[int, Form] = {}  # what may become a parameter's `.data`, by memory
        self._sources: dict[int, list[tuple[torch.Tensor, Writes]]] = {}  # by the memory they were made of
        self._copied: list[tuple[Writes, Begun, nn.Parameter, nn.Module, dict[int, Any]]] = []
        self._watch = ValueWatch()
        self._has_all = False

    def _recall(self, memory: int) -> None:
        """This is asked for: if it is of no parameter that is known, look at all that blocks before have made, once."""
        if self._has_all or memory in self._known or memory in self._forms:
            return
        self._has_all = True
        for module, name, writes in all_written():
            parameter = module._parameters.get(name)  # noqa: SLF001 - getattr might compute it
            if parameter is not None and parameter.is_meta and id(parameter) not in self._objects:
                writes.look(parameter)
                self._know(module, name, parameter)

    def register(self, module: nn.Module, name: str, bare: nn.Parameter, values: torch.Tensor | None) -> None:
        """A parameter without storage is about to become the module's. `values`: what it had, None if that is unknown.

        They are kept if it takes another's place, or an embedding was given them. Those that a module makes, its
        initialisation makes again, as a rule: they are kept if they are known to be values and take little.
        """
        memory = memory_of(bare)  # which may have been another's, before a conversion
        if values is None:
            self._recall(memory)
        known = self._holder(memory) or self._objects.get(id(bare))
        if known is not None and known.module is module and known.name == name:
            if not self._is_whole(bare) and known.writes.is_any:
                self._know(module, name, bare).lose("made")
            return
        begin_anew(module, name)
        if known is not None:  # a tie, or taken from a module that may not be in the model
            if self._is_whole(bare):
                share_writes(module, name, known.writes)
            elif known.writes.is_any:
                writes_of(module, name, bare).lose("made")
            return
        writes = self._know(module, name, bare)
        first = module._parameters.get(name) is None  # noqa: SLF001 - getattr might compute it
        is_made = first and not is_given(module, sys._getframe(1))  # noqa: SLF001 - documented
        if values is not None:
            self._lies(bare, writes, Source.of(values, bare, seen=not is_made and not all_equal(values)))
        if is_made:
            if values is not None and self._watch.has_values(values):
                self._keep(writes, values.detach())
        elif values is None:
            writes.lose("made")
        else:
            writes.calls.append(assignment(values.detach()))

    def _lies(self, bare: torch.Tensor, writes: Writes, source: Source) -> None:
        writes.source = source
        self._sources.setdefault(source.storage.cdata, []).append((bare, writes))

    def _note_elsewhere(self, target: torch.Tensor, operation: Operation, frame: FrameType) -> None:
        """What is written into the memory that a parameter was made of is written into the parameter."""
        for bare, writes in self._sources.get(memory_of(target), ()):
            source = writes.source
            if source is None or source.seen or source.storage.cdata != memory_of(target):
                continue
            alias = source.alias(bare, target)
            if alias is None:
                writes.lose(f"{operation.name}, into the memory it was made of,")
            elif alias.numel():
                self.note(alias, operation.on(target, alias), frame)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note it if it writes."""
        given = kwargs or {}
        result = func(*args, **given)
        name = func._schema.name  # noqa: SLF001 - torch has no other way to ask
        if func._schema.is_mutable:  # noqa: SLF001
            for target in targets_of(func, args, given):
                frame = sys._getframe(1)  # noqa: SLF001
                if not target.is_meta:
                    self._watch.wrote(target, name, (args, given), whole=name in OVERWRITING)
                    self._note_elsewhere(target, Operation(func, args, given, name), frame)
                    continue
                self._constants.pop(memory_of(target), None)
                at_work = orthogonal_at_work(frame)
                self.note(target, at_work or Operation(func, args, given, name), frame)
            return result
        if name in _CONVERTING and result.is_meta:
            form = self._form(args[0])
            if form is not None and result.shape == args[0].shape and self._is_whole(args[0]):
                self._show(result, form.module, form.name, form.writes.as_dtype(args[0].dtype, result.dtype))
            if name == "aten::clone":
                self._note_copy(args[0], result, sys._getframe(1))  # noqa: SLF001
        self._watch.computed(name, (args, given), result)
        if isinstance(result, torch.Tensor) and result.is_meta and given.get("device") is not None:
            self._note_constant(result, func, args, given)
        return result

    def _note_copy(self, original: torch.Tensor, result: torch.Tensor, frame: FrameType) -> None:
        """A deep copy of a module gets the records of the original: nobody registers its parameters."""
        found = next((each.f_locals for each in calls_from(frame) if each.f_code is _RECONSTRUCT), None)
        if found is None or not isinstance(found["x"], nn.Module):
            return
        copied, made, copies = found["x"], found["y"], found["memo"]
        for attribute, parameter in copied._parameters.items():  # noqa: SLF001
            if parameter is not None and memory_of(parameter) == memory_of(original):
                copy_writes(copied, attribute, made, copies)
                writes = writes_of(made, attribute, result)
                self._show(result, made, attribute, writes)
                owner = writes_of(copied, attribute, parameter).begun.owner()
                if owner is not None and owner is not copied:
                    self._copied.append((writes, writes.begun, parameter, owner, copies))

    def _keep(self, writes: Writes, values: torch.Tensor) -> None:
        if all_equal(values) or values.numel() * values.itemsize <= _KEPT_NBYTES:
            writes.made = assignment(values if all_equal(values) else values.clone())

    def _note_constant(self, made: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the value of one element that is made of what is there."""
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if made.numel() == 1 and not any(each.is_meta for each in given):
            with torch.no_grad():
                self._constants[memory_of(made)] = made, func(*args, **{**kwargs, "device": torch.device("cpu")})

    def note(self, target: torch.Tensor, operation: Operation, frame: FrameType) -> None:
        """An operation, called from `frame`, writes into `target`, which has no storage."""
        found = self._find(target, frame)
        if found is None:
            self._forms.pop(memory_of(target), None)  # a parameter's values no longer
            return
        bare, module, _, writes = found
        if again := repeated_by(module, frame):
            writes.clear()
            given = module if again.is_reset else module_given(bare, frame)
            writes.begun = writes.begun.again(given, again.by, is_reset=again.is_reset)
            return
        if target.numel() == bare.numel() and operation.name in OVERWRITING and not operation.reads(bare):
            writes.clear()
        try:
            args, kwargs = tree_map(lambda each: self._take(each, bare, writes), (operation.args, operation.kwargs))
        except _LostError:
            writes.lost = operation.name
            return
        func = operation.func

        def call(values: torch.Tensor) -> object:
            here = tree_map(lambda each: each.of(values) if isinstance(each, View) else each, (args, kwargs))
            return func(*here[0], **here[1])

        writes.calls.append(call)

    def replace(self, target: torch.Tensor, values: Any, frame: FrameType) -> Any:
        """A parameter without storage is about to show other memory (`.data =`); returns which. `frame`: by whom."""
        if not (isinstance(values, torch.Tensor) and target.is_meta):
            return values
        self._recall(memory_of(target))
        known = self._objects.get(id(target))
        if known is None:  # as yet: of a deep copy
            known = self._form(target)
            if known is None or known.module._parameters.get(known.name) is not target:  # noqa: SLF001 - as in `_find`
                return values
            known = known._replace(writes=writes_of(known.module, known.name, target))
        _, module, name, writes = known
        again = repeated_by(module, frame)
        if not values.is_meta:
            shown = torch.empty_like(values, device="meta")
            writes.clear()
            writes.made, writes.stride = None, tuple(shown.stride())
            kept = values.detach()  # all of it, in its memory: somebody may have yet to write it
            if not again:
                writes.calls.append(lambda place: place.copy_(kept))
            self._lies(target, writes, Source.of(kept, shown, seen=True))
            self._show(shown, module, name, writes)
            return shown
        memory, form = memory_of(values), self._form(values)
        own = memory == memory_of(target) or (form is not None and (form.module, form.name) == (module, name))
        if not own and self._holder(memory):
            return values  # another's: a tie, which `guards` refuse
        there = writes if form is None or memory == memory_of(target) else form.writes
        if again:
            writes.clear()
            writes.begun = writes.begun.again(module, again.by, is_reset=again.is_reset)
        elif own and self._is_whole(values):
            writes.become(there)  # its own values in another form, or those of before
        elif not own or there.is_any:  # else turned, or a part of them, before there is anything to lose: no loss
            writes.lose("an assignment to .data")
        if memory != memory_of(target):
            writes.source = None
            self._show(values, module, name, writes)
        return values

    def end(self) -> None:
        """Nothing more is watched: what has come into other memory out of sight is lost, but for its own values."""
        for writes, begun, parameter, owner, copies in self._copied:  # tied to one that was copied later
            made = copies.get(id(owner))
            names = [name for name, each in owner._parameters.items() if each is parameter]  # noqa: SLF001
            if made is not None and names and writes.begun is begun:
                share_writes(made, names[0], writes)
                writes.begun = replace(begun, owner=weakref.ref(made))
        for bare, module, name, writes in self._objects.values():
            here = module._parameters.get(name) is bare and bare.is_meta  # noqa: SLF001 - getattr might compute it
            if here and not self._holder(memory_of(bare)):
                self._came(module, name, bare)
            is_counted = here and not bare.is_inference()
            writes.looked = (id(bare), version(bare)) if is_counted else None

    def _came(self, module: nn.Module, name: str, bare: torch.Tensor) -> None:
        """The parameter is found in memory that is not known to be its own."""
        is_new, form = id(bare) not in self._objects, self._form(bare)
        writes = self._know(module, name, bare)
        if form is not None and (form.module, form.name) == (module, name):
            writes.become(form.writes)
        elif not is_new:
            writes.lose("torch.utils.swap_tensors")

    def _take(self, each: Any, bare: torch.Tensor, writes: Writes) -> Any:
        """What is kept of an argument: the place of the parameter's own elements, a copy of other values."""
        if not isinstance(each, torch.Tensor):
            return each
        if not each.is_meta:
            return each.detach().clone()
        if memory_of(each) in self._constants:
            return self._constants[memory_of(each)][1].reshape(()).expand(each.shape)
        if memory_of(each) != memory_of(bare) or each.dtype != bare.dtype:
            raise _LostError
        whole = each.shape == bare.shape and each.stride() == bare.stride()
        writes.needs_stride |= not whole
        return View(tuple(each.shape), tuple(each.stride()), int(each.storage_offset()), whole)

    def _know(self, module: nn.Module, name: str, bare: torch.Tensor) -> Writes:
        """Note that this parameter is, or is about to be, in that place; returns the record of it."""
        form = Form(bare, module, name, writes_of(module, name, bare))
        form = form._replace(writes=self._objects.get(id(bare), form).writes)
        self._known[memory_of(bare)] = self._objects[id(bare)] = form
        return form.writes

    def _holder(self, memory: int) -> Form | None:
        """The parameter that is known by this memory, and still has it."""
        form = self._known.get(memory)
        return form if form is not None and memory_of(form.values) == memory else None

    def _is_whole(self, values: torch.Tensor) -> bool:
        """Whether what is shown of a parameter, or of a form of its values, is all of it, the way that lies there."""
        form = self._holder(memory_of(values)) or self._forms.get(memory_of(values))
        return form is None or _place(values) == _place(form.values)

    def _form(self, values: torch.Tensor) -> Form | None:
        """Whose values these are, in whatever form, as of now."""
        if values.is_meta:
            self._recall(memory_of(values))
        return self._holder(memory_of(values)) or self._forms.get(memory_of(values))

    def _show(self, values: torch.Tensor, module: nn.Module, name: str, writes: Writes) -> None:
        """These are values of the module's parameter, as it is now: it may be given them later."""
        self._forms[memory_of(values)] = Form(values, module, name, writes.as_now())

    def _find(self, target: torch.Tensor, frame: FrameType) -> Form | None:
        """Whose parameter the target shows; one with other memory than it began with is looked for on the stack."""
        memory = memory_of(target)
        self._recall(memory)
        if known := self._holder(memory):
            return known
        form = self._forms.get(memory)
        places = [(form.module, form.name)] if form is not None else []
        working = ((module, name) for module in modules_at_work(frame) for name in module._parameters)  # noqa: SLF001
        for module, name in itertools.chain(places, working):
            parameter = module._parameters.get(name)  # noqa: SLF001 - getattr might compute it
            if parameter is not None and parameter.is_meta and memory_of(parameter) == memory:
                self._came(module, name, parameter)
                return self._objects[id(parameter)]
        return None


class _LostError(Exception):
    """An operation uses values that are not there."""


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()
