"""The hooks of an offloaded model, as objects: what they call, and what becomes of them when the model is copied.

Owns the callables that are registered on modules and parameters. Does not know when anything is due: each passes on to
the scheduler. Guarantees that an offloaded model is neither copied nor pickled with its values paged out: whoever tries
is told how to do it, and a copy made while the values are there is a plain model, with hooks that do nothing.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.errors import CopyError, TiermemError
from tiermem.interrupts import empty_frames
from tiermem.zero3.cuts import Arguments
from tiermem.zero3.engine import unseen

_SHORT = (torch.bfloat16, torch.float16)
_OF_DTYPES = re.compile("dtype|scalar type|input type", re.IGNORECASE)


class BoundHook:
    """A hook that belongs to this model and to no copy of it. `is_there()`: whether the values are gathered now."""

    def __init__(self, is_there: Callable[[], bool]) -> None:
        self._is_there = is_there

    def __call__(self, *arguments: Any) -> Any:
        """What a module calls. Dynamo (torch.compile) does not look inside: it breaks its graph here and goes on."""
        try:
            return self._pass_on(*arguments)
        except BaseException as error:
            empty_frames(error)
            raise

    def _pass_on(self, *arguments: Any) -> Any:
        # Importing dynamo costs seconds and memory; whoever compiles has done so. While it does it is not to follow the
        # second question: it would wrap each of the thousands of modules, at each hook anew.
        if not torch.compiler.is_dynamo_compiling() and "torch._dynamo" not in sys.modules:
            return self.act(*arguments)
        # In place of this method, and not of a None: dynamo takes what it has compiled for one hook also for another
        # that it has not come to yet, where a model calls a layer twice.
        self._pass_on = torch.compiler.disable(self.act)  # type: ignore[method-assign,no-untyped-call]
        return self._pass_on(*arguments)

    def act(self, *arguments: Any) -> Any:
        """What there is to do; the subclasses know. Returns what torch is to take from a hook of this kind."""
        raise NotImplementedError

    def __deepcopy__(self, _: dict[int, Any]) -> _Nothing:
        self._require_gathered("copied (copy.deepcopy, AveragedModel)")
        return _Nothing()

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        self._require_gathered("pickled (torch.save of the module, sending it to another process)")
        return _Nothing, ()

    def _require_gathered(self, what: str) -> None:
        if not self._is_there():
            raise CopyError(
                f"an offloaded model was {what} while its parameters are paged out; put "
                "`with runtime.gathered(model):` around it, if it fits into host_memory, to get a plain model"
            )


class _Nothing:
    """What is left of a hook in a copy."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class LastHook:
    """A forward hook that runs after all others of its module, also those registered later; always called."""

    def __init__(self, module: nn.Module, hook: BoundHook) -> None:
        self._module = module
        self._hook = hook
        self._handle = module.register_forward_hook(hook, always_call=True)

    def renew(self) -> None:
        """Go after what was registered since the last time; back to its place if somebody has taken it off."""
        if next(reversed(self._module._forward_hooks), None) != self._handle.id:  # noqa: SLF001 - no public way to ask
            self._handle.remove()
            self._handle = self._module.register_forward_hook(self._hook, always_call=True)

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()


class BeforeCall(BoundHook):
    """Forward pre-hook with keyword arguments. `last`: what will run after the call.

    `call(module, units, args, kwargs)` returns what to call the module with, or None for what is there.
    """

    def __init__(
        self,
        call: Callable[[nn.Module, tuple[int, ...], tuple[Any, ...], dict[str, Any]], Arguments | None],
        units: tuple[int, ...],
        last: LastHook,
        is_there: Callable[[], bool],
    ) -> None:
        super().__init__(is_there)
        self._call = call
        self._units = units
        self._last = last

    def act(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The module is about to run."""
        self._last.renew()
        return self._call(module, self._units, args, kwargs)


class AfterCall(BoundHook):
    """Forward hook: a module has run, or raised."""

    def __init__(self, call: Callable[[nn.Module], None], is_there: Callable[[], bool]) -> None:
        super().__init__(is_there)
        self._call = call

    def act(self, module: nn.Module, _: Any, output: Any = None) -> None:
        """The module has run, or raised."""
        if output is None and isinstance(error := sys.exc_info()[1], (RuntimeError, ValueError)):
            _explain_dtypes(error, module)
        self._call(module)


class OutputHook(BoundHook):
    """Forward hook: bring units when backward reaches the outputs of a module.

    Only early, in general. It matters for a module that checkpoints a part of its own forward which reads its own
    parameters (most Hugging Face layers do so): nothing else is called before that part runs again.
    """

    def __init__(
        self, demand: Callable[[int], torch.Tensor], units: tuple[int, ...], is_there: Callable[[], bool]
    ) -> None:
        super().__init__(is_there)
        self._demand = demand
        self._units = units

    def act(self, _: nn.Module, __: Any, output: Any) -> None:
        """The module has run: watch its outputs."""
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: unseen(self._arrived)())  # type: ignore[no-untyped-call]

    def _arrived(self) -> None:
        try:
            for unit in self._units:
                self._demand(unit)
        except BaseException as error:
            empty_frames(error)
            raise


def watch_gradient(
    parameter: nn.Parameter, call: Callable[[int, int], int], unit: int, number: int, kept_back: Callable[[Any], bool]
) -> RemovableHandle:
    """Have `call` told when a gradient of parameter `number` has been accumulated, but for what is `kept_back`.

    It returns how many have been in this step.
    """
    others = bool(parameter._post_accumulate_grad_hooks)  # noqa: SLF001 - they come before this one
    told = False

    def arrived(parameter: torch.Tensor) -> None:
        nonlocal told
        try:
            if not kept_back(parameter) and unseen(call)(unit, number) > 1 and others and not told:
                told = True
                _warn_of_parts()
        except BaseException as error:
            empty_frames(error)
            raise

    return parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-any-return,no-untyped-call]


def _warn_of_parts() -> None:
    warnings.warn(
        "a hook registered by register_post_accumulate_grad_hook before offload sees in parameter.grad the gradient of "
        "each backward of a step by itself, where plain PyTorch has the sum so far: earlier ones are pages. What it "
        "changes is changed in that alone: use register_hook, or one backward a step",
        RuntimeWarning,
        stacklevel=2,
    )


def _explain_dtypes(error: Exception, module: nn.Module) -> None:
    """Tell why torch refuses float32, if that is it: bfloat16 is the default, and nobody may have asked for it."""
    if isinstance(error, TiermemError):  # a ConfigError is a ValueError, and says what there is to say
        return
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.dtype in _SHORT), None)
    if dtype is None or _OF_DTYPES.search(str(error)) is None or getattr(error, "__notes__", None):
        return
    name = str(dtype).removeprefix("torch.")
    error.add_note(
        f"the parameters of this model are {name} in forward and backward: Config(param_dtype={name!r}). Give it "
        f"inputs of that dtype (and buffers: model.to({dtype}) before tiermem.offload), or choose "
        "Config(param_dtype='float32')"
    )


def may_checkpoint_itself(module: nn.Module) -> bool:
    """Whether the module owns parameters and is not torch's own (those never checkpoint)."""
    own = next(module.parameters(recurse=False), None) is not None
    return own and not type(module).__module__.startswith("torch.nn.modules.")


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
