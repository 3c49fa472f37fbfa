"""Building a model without memory for its parameters.

Owns the context manager `deferred_init`. Does not know units or how values come later (`materialize`), nor how what is
written meanwhile is kept (`assigned`). Guarantees that a parameter registered inside has no storage, while its class,
its attributes, `requires_grad` and ties stay; buffers are real.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from tiermem.zero3.assigned import WriteRecorder
from tiermem.zero3.engine import successor
from tiermem.zero3.operations import initialiser_at_work


@contextmanager
def deferred_init() -> Iterator[None]:
    """Give parameters registered inside no storage: they go to the meta device as their module receives them.

    One parameter's memory is allocated at a time, by the module's own constructor, and dropped at once:
    `tiermem.offload` initialises again (`reset_parameters`, `_init_weights`), and then repeats what constructors wrote
    besides. Values that a parameter was made of (`nn.Parameter(torch.ones(n))`) are kept for that if all are equal or
    they take no more than 4 MiB; those of one that takes another's place in any case, as tensors that are copied into
    parameters or assigned to their `.data`, and vectors that `nn.Embedding.from_pretrained` is given. With `init=` or
    `weights=` these alone count.
    Random values are drawn by `offload`, unit by unit: others than a plain model has with the same seed, or with a seed
    that is set inside. A deep copy begins with those of its original.
    What is written into parameters after the block, still without memory, is lost, as it is on the meta device, and
    `offload` refuses (not through `.data`; nor has a deep copy made there what was written): write inside it, or inside
    `runtime.gathered(..., write=True)`. What another thread builds meanwhile is as ever, and what it writes into
    parameters of this one is lost.
    """
    if any(isinstance(mode, WriteRecorder) for mode in _get_current_dispatch_mode_stack()):
        yield  # all is seen already
        return
    recorder, thread = WriteRecorder(), threading.get_ident()
    moved: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or is_lazy(parameter) or threading.get_ident() != thread:
            return None
        if parameter.is_meta:
            recorder.register(module, name, parameter, None)
            return None
        bare = moved.get(parameter)
        if bare is None:
            bare = moved[parameter] = successor(parameter, torch.empty_like(parameter, device="meta"))
        recorder.register(module, name, bare, parameter)
        return bare

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    try:
        with recorder, InitialiserWatch(recorder):
            yield
            recorder.end()
    finally:
        handle.remove()


class InitialiserWatch(TorchFunctionMode):
    """Notes the functions of `torch.nn.init` that do nothing where there is no storage, and so write nothing.

    In torch 2.13 `trunc_normal_`, `orthogonal_`, `dirac_` and `sparse_` ask for `tensor.is_meta` first: that is seen,
    and by whom.
    """

    def __init__(self, recorder: WriteRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and note who asks, or gives a parameter other memory."""
        if getattr(func, "__self__", None) is torch.Tensor.data and func.__name__ == "__set__":
            args = args[0], self._recorder.replace(args[0], args[1], sys._getframe(1))  # noqa: SLF001
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is torch.Tensor.is_meta and result:
            frame = sys._getframe(1)  # noqa: SLF001
            asking = initialiser_at_work(frame)
            if asking is not None:
                self._recorder.note(args[0], asking, frame)
        return result
