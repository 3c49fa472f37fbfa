"""The few things asked of torch's autograd engine that have no public name.

Owns these calls, and the list of the names. Does not know units or pages. Guarantees that a torch which lacks one of
them is reported by name, as a TiermemError, before a model is touched.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from tiermem.errors import InvariantError, TiermemError
from tiermem.process import frames_of

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
P = ParamSpec("P")
T = TypeVar("T")

# What this package asks of torch that has no public name.
_NAMES = (
    "Tensor._backward_hooks",
    "Tensor._make_subclass",
    "Tensor._post_accumulate_grad_hooks",
    "autograd.Variable._execution_engine.queue_callback",
    "autograd._unsafe_preserve_version_counter",
    "autograd.graph.Node._sequence_nr",
    "autograd.graph._engine_run_backward",
    "_C._DisableTorchDispatch",
    "_C._autograd._get_sequence_nr",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._current_graph_task_id",
    "_C._dynamo.eval_frame.get_eval_frame_callback",
    "_C._functorch.peek_interpreter_stack",
    "_C._is_fwd_grad_enabled",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "_C._pop_torch_dispatch_stack",
    "_C._pop_torch_function_stack",
    "_C._push_on_torch_dispatch_stack",
    "_C._push_on_torch_function_stack",
    "_C._set_fwd_grad_enabled",
    "_C._storage_Use_Count",
)


def require_names() -> None:
    """Raise TiermemError for a torch that lacks what has no public name; asked before a model is touched."""
    for name in _NAMES:
        found: Any = torch
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise TiermemError(
                f"torch {torch.__version__} has no torch.{name}, which tiermem needs; use a torch version that tiermem "
                "supports"
            )


def top_hooks() -> tuple[Pack, Unpack] | None:
    """Return the pair of saved-tensor hooks autograd would call now on this thread, or None.

    Autograd calls the topmost pair only (see `torch.autograd.graph.saved_tensors_hooks`), hence whoever pushes a pair
    and wants the ones below to go on working has to find them and call them itself.
    """
    core: Any = torch._C._autograd  # noqa: SLF001 - no public way to ask
    return core._top_saved_tensors_default_hooks(False)  # type: ignore[no-any-return]  # noqa: SLF001


def push_hooks(pack: Pack, unpack: Unpack) -> None:
    """Make (pack, unpack) the topmost saved-tensor hooks of this thread."""
    torch.autograd.graph.saved_tensors_hooks(pack, unpack).__enter__()


def pop_hooks() -> None:
    """Remove the topmost saved-tensor hooks of this thread."""
    torch.autograd.graph.saved_tensors_hooks(_unused, _unused).__exit__()


def remove_hooks(pack: Pack, ours: Callable[[Pack], bool]) -> bool:
    """Remove the pair with this `pack` from this thread's saved-tensor hooks, wherever it lies among them.

    Others push and remove pairs too, and torch removes the topmost, whosever it is; after an error not always in the
    order of a `with`. A checkpoint that an interrupt goes through removes its pair before we remove ours, which lies on
    top; and where any exception leaves a checkpoint in torch 2.11, its pair stays until the exception itself is gone.
    So what lies above stays, for its owner to remove. If the pair is gone, somebody has removed it in place of his own:
    then the topmost pair whose pack is not `ours` is the one too many. Returns False, with nothing changed, if there is
    none.
    """
    taken: list[tuple[Pack, Unpack]] = []
    while (top := top_hooks()) is not None and (not taken or taken[-1][0] is not pack):
        taken.append(top)
        pop_hooks()
    surplus = next((pair for pair in reversed(taken) if pair[0] is pack), None)
    if surplus is None:
        surplus = next((pair for pair in taken if not ours(pair[0])), None)
    for pair in reversed(taken):
        if pair is not surplus:
            push_hooks(*pair)
    return surplus is not None


def backward_number() -> int:
    """Return the number of the backward running on this thread (nested ones have larger numbers), or -1."""
    return int(torch._C._current_graph_task_id())  # type: ignore[attr-defined,unused-ignore]  # noqa: SLF001


def backward_elsewhere() -> str | None:
    """The name of another thread that waits for a backward of its own, of whatever model, or None."""
    begun = torch.autograd.graph._engine_run_backward.__code__  # noqa: SLF001 - what every way into the engine calls
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return next((one.name for one in others if any(frame.f_code is begun for frame in frames_of(one.ident or 0))), None)


def call_at_backward_end(function: Callable[[], None]) -> None:
    """Have `function` called when the backward running on this thread is through (not if it fails)."""

    def end() -> None:
        unseen(function)()

    torch.autograd.Variable._execution_engine.queue_callback(end)  # noqa: SLF001


def sequence_number() -> int:
    """Return the number the next node made on this thread will have; they count up."""
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined,unused-ignore]  # noqa: SLF001


def node_number(node: torch.autograd.graph.Node) -> int:
    """Return the `sequence_number` at which a node was made. What accumulates a leaf's gradient is above all others."""
    return int(node._sequence_nr())  # noqa: SLF001 - torch documents it, under this name


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody wants to see the gradient of `parameter`; one hook after its accumulation is our own."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return bool(before) or len(after or ()) > 1


def successor(parameter: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """A parameter of the same class with other values, on whatever device, and all that was hung on the one before.

    Also the hooks on its gradient, which torch keeps with the values: the same dicts, so that who put one there can
    take it off.
    """
    new: nn.Parameter = torch.Tensor._make_subclass(type(parameter), values, parameter.requires_grad)  # noqa: SLF001
    new.__dict__.update(parameter.__dict__)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (there := getattr(parameter, hooks)) is not None:
            setattr(new, hooks, there)
    return new


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, kept out of dynamo's sight: it looks into what backward calls, where a whole step is compiled."""
    # Before the rest: it looks into this function, and would wrap each of thousands of modules; torch 2.11 warns of
    # what is asked last.
    if torch.compiler.is_dynamo_compiling():
        return torch.compiler.disable(function)  # type: ignore[no-untyped-call,no-any-return]
    if "torch._dynamo" not in sys.modules:  # importing it costs seconds
        return function
    watching = torch._C._dynamo.eval_frame.get_eval_frame_callback()  # type: ignore[attr-defined,unused-ignore]  # noqa: SLF001
    return torch.compiler.disable(function) if watching else function  # type: ignore[no-untyped-call]


def hidden(function: Callable[P, T]) -> Callable[P, T]:
    """The function, each of whose calls is `unseen`: dynamo would compile what is done around the updates, too."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return cast("T", unseen(function)(*args, **kwargs))

    return called


def unwatched(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose operations no dispatch mode sees.

    A selective checkpoint counts all operations that it sees, and has to see the same ones when it computes again. By
    then a unit that was there may be gone, or one that was brought be there still.
    """

    @functools.wraps(function)
    def carried_out(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C._DisableTorchDispatch():  # noqa: SLF001 - no public way
            return function(*args, **kwargs)

    return carried_out


def outside_inference() -> contextlib.AbstractContextManager[object]:
    """Tensors made in the body are ordinary ones, also within `torch.inference_mode()`, of which the rest stays.

    One that is made in inference mode has no key of autograd: torch has other kernels for it, with other last bits, no
    graph can save it, and nobody may write into it later.
    """
    return _ordinary() if torch.is_inference_mode_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def _ordinary() -> Iterator[None]:
    with torch.inference_mode(mode=False), torch.no_grad():  # the former would turn gradients on
        yield


def viewers(tensor: torch.Tensor) -> int:
    """Return how many tensors and storages hold on to the bytes of `tensor`."""
    count = torch._C._storage_Use_Count  # type: ignore[attr-defined,unused-ignore]  # noqa: SLF001
    return int(count(tensor.untyped_storage()._cdata))  # noqa: SLF001


def version(tensor: torch.Tensor) -> int:
    """Return how often `tensor`, or a view of it, was written in place."""
    return int(tensor._version)  # noqa: SLF001 - torch documents it, under this name


def versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The `version` of each."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - absent.py is not asked: that costs more than all of it
        return tuple(version(tensor) for tensor in tensors)


def share_versions(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a write into one of two tensors counts as one into the other, as with views of one tensor."""
    before = version(other)
    with torch.autograd._unsafe_preserve_version_counter(one):  # type: ignore[attr-defined]  # noqa: SLF001
        torch.autograd.graph.increment_version(one)
        return version(other) != before


def is_transformed() -> bool:
    """Whether this runs inside torch.func.grad, jvp or another transform that wraps tensors; vmap is not counted."""
    functorch = torch._C._functorch  # noqa: SLF001
    top = functorch.peek_interpreter_stack()
    return top is not None and top.key() != functorch.TransformType.Vmap


def _unused(_: Any) -> Any:
    raise InvariantError("these hooks are never active")
