"""What torch keeps for each thread, put aside while another computation has the thread.

Owns the list of it: grad mode and its like, inference mode, autocast, saved-tensor hooks, function and dispatch modes,
the current stream of a GPU.
Does not know who has the thread when. Guarantees that nothing the one leaves behind reaches the other.

Not in the list: the current device, but for its stream's, profilers' ranges, functorch's transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tiermem.zero3.engine import pop_hooks, push_hooks, top_hooks

KINDS = ("cpu", "cuda")  # of devices that autocast is switched on for, each by itself


def put_thread_aside() -> Callable[[], None]:
    """Make this thread as torch has it when it is new; return what makes it as it was, whatever came between."""
    # The modes first: they see who sets the others.
    stacks = [(push, _emptied(length, pop)) for length, pop, push in _stacks()]
    switches = _switches()
    before = [(switch, ask()) for switch, ask, _ in switches]
    # Its end makes it as it was now, with all dispatch keys; so it comes after the stacks, and before the rest.
    inference = torch.inference_mode(mode=False)
    inference.__enter__()
    nesting = _set_nesting(0)
    for switch, _, new in switches:
        switch(new)

    def put_back() -> None:
        for length, pop, _ in _stacks():
            _emptied(length, pop)
        inference.__exit__(None, None, None)
        _set_nesting(nesting)
        for switch, value in before:
            switch(value)
        for push, entries in stacks:
            for entry in reversed(entries):
                push(entry)

    return put_back


def _switches() -> list[tuple[Callable[[Any], Any], Callable[[], Any], Any]]:
    """How to set what has one value, how to ask for it, and what it is in a new thread."""
    # Torch's context managers set these at once; used as such they would have to be left in order.
    return [
        (torch.set_grad_enabled, torch.is_grad_enabled, True),
        (torch._C._set_fwd_grad_enabled, torch._C._is_fwd_grad_enabled, True),  # noqa: SLF001 - no public way
        (torch.autograd.set_multithreading_enabled, torch.autograd.is_multithreading_enabled, True),
        (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled, True),
        *((_setter(kind), _getter(kind), (False, torch.get_autocast_dtype(kind))) for kind in KINDS),
        *_stream(),
    ]


def _stream() -> list[tuple[Callable[[Any], Any], Callable[[], Any], Any]]:
    """As above, of the current stream, where there can be another one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [(torch.cuda.set_stream, torch.cuda.current_stream, torch.cuda.default_stream())]


def _setter(kind: str) -> Callable[[tuple[bool, torch.dtype]], None]:
    def switch(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(kind, value[0])
        torch.set_autocast_dtype(kind, value[1])

    return switch


def _getter(kind: str) -> Callable[[], tuple[bool, torch.dtype]]:
    return lambda: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


def _stacks() -> list[tuple[Callable[[], object], Callable[[], Any], Callable[[Any], Any]]]:
    """Of each stack: whether there is something on it, how to take the top, how to put something on top."""
    core: Any = torch._C  # noqa: SLF001 - no public way
    pop_dispatch = partial(core._pop_torch_dispatch_stack, None)  # noqa: SLF001
    return [
        (top_hooks, _pop_pair, lambda pair: push_hooks(*pair)),
        (core._len_torch_function_stack, core._pop_torch_function_stack, core._push_on_torch_function_stack),  # noqa: SLF001
        (core._len_torch_dispatch_stack, pop_dispatch, core._push_on_torch_dispatch_stack),  # noqa: SLF001
    ]


def _pop_pair() -> Any:
    pair = top_hooks()
    pop_hooks()
    return pair


def _emptied(length: Callable[[], object], pop: Callable[[], Any]) -> list[Any]:
    """Take everything from a stack, the top first."""
    taken = []
    while length():
        taken.append(pop())
    return taken


def _set_nesting(wanted: int) -> int:
    """Say in how many autocasts this thread is; return in how many it was. The last to leave forgets what was cast."""
    before = torch.autocast_increment_nesting() - 1
    for _ in range(before + 1 - wanted):
        torch.autocast_decrement_nesting()
    for _ in range(wanted - before - 1):
        torch.autocast_increment_nesting()
    return before
