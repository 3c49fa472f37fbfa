"""Parameters that are used outside the call of the module they belong to: seen by looking at every operation.

Owns the watch, a torch function mode, and the decision whether it is still worth its cost. Does not gather: it says
which units an operation reads. Guarantees that while it watches no operation reads a placeholder, except one that
writes into it, which is left to fail as it does without.

Why. `F.linear(x, self.embedding.weight)` for a tied output, `self.table.weight[i]`: no hook of the embedding runs, and
what is read is NaN. Looking at every operation costs microseconds each, so that is done in the model's first calls in
each mode (training or not, with gradients or without), and again in some calls behind gradients that were not finite,
which may come from there; where nothing was found it ends, and where something was it goes on for good.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tiermem.zero3.gather import Gatherer, Presence

# Calls of the model in one mode, or of parts of it by themselves, in which nothing may be found before the watch ends.
_LOOKS = 8
# Attributes of a tensor that show its elements; all others are answered by a placeholder.
_SHOWING = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
# Methods and functions that a placeholder answers as the tensor would.
_ASKING = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_pinned", "data_ptr", "untyped_storage"),
    *("__len__", "__hash__", "__repr__", "__format__", "register_hook", "register_post_accumulate_grad_hook"),
)
_MAKING = (
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
)
_WRITING = ("__set__", "__delete__", "__setitem__")
_LEFT_ALONE = frozenset((*_ASKING, *_MAKING, *_WRITING))


class Borrowing:
    """The watch over one model. `units`: by the identity of each parameter."""

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[int, int],
        gatherer: Gatherer,
        before: Callable[[None, tuple[int, ...]], None],
        after: Callable[[None], None],
    ) -> None:
        """`before` and `after`: what surrounds the call of a module that reads these units; here it is an operation."""
        self._model = model
        self._units = units
        self._gatherer = gatherer
        self._before = before
        self._after = after
        self._looks: dict[tuple[bool, bool], int] = defaultdict(lambda: _LOOKS)  # by mode
        self._found = False

    def watch(self) -> TorchFunctionMode | None:
        """What to enter around an outermost call; None: the watch has ended, or the model is compiled."""
        mode = self._model.training, torch.is_grad_enabled()
        looks = self._looks[mode]
        if not (self._found or looks) or _is_compiled(self._model):
            return None
        self._looks[mode] = max(0, looks - 1)
        return _Watch(self)

    def look_again(self) -> None:
        """Something is NaN that need not be: watch the next calls as if they were the first."""
        self._looks.clear()

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out an operation, with what it reads gathered."""
        borrowed = dict.fromkeys(self._read(args, kwargs))
        if not borrowed or not _reads(function) or "out" in kwargs:
            return function(*args, **kwargs)
        self._found = True
        try:
            self._before(None, tuple(borrowed))
            return function(*args, **kwargs)
        finally:
            self._after(None)

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
        for argument in (*args, *kwargs.values()):
            for each in argument if isinstance(argument, (list, tuple)) else (argument,):
                unit = self._units.get(id(each)) if isinstance(each, nn.Parameter) else None
                if unit is not None and self._gatherer.presence(unit) is not Presence.GATHERED:
                    yield unit


class _Watch(TorchFunctionMode):
    def __init__(self, borrowing: Borrowing) -> None:
        super().__init__()
        self._borrowing = borrowing

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._borrowing.run(function, args, kwargs or {})


def _reads(function: Callable[..., Any]) -> bool:
    """Whether an operation looks at elements of its arguments, and leaves them as they are."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # an attribute: the descriptor knows which
        return getattr(getattr(function, "__self__", None), "__name__", "") in _SHOWING
    return name not in _LEFT_ALONE and (not name.endswith("_") or name.endswith("__"))


def _is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is compiled: dynamo would trace the watch, and compile again when it ends."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
