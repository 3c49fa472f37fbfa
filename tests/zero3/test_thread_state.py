"""What torch keeps for a thread, put aside and put back."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tiermem.errors import TiermemError
from tiermem.zero3.engine import require_names
from tiermem.zero3.fibers import OwnStack
from tiermem.zero3.thread_state import put_thread_aside


class Doubling(TorchFunctionMode):
    """Every sum is twice what it is."""

    def __torch_function__(self, function, _, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.sum else result


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def state() -> tuple[Any, ...]:
    """What a computation notices of the state of its thread."""
    product = torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        product.is_inference(),
        torch._C._is_fwd_grad_enabled(),
        torch.autograd.is_multithreading_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        product.dtype,
        float(torch.sum(torch.ones(3))),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
    )


def identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def also_identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "no forward gradients": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "function mode": Doubling,
    "dispatch mode": Counting,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(identity, identity),
}


def in_a_new_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", CONTEXTS)
def test_aside_a_thread_is_as_new_and_then_as_before(name: str) -> None:
    new = in_a_new_thread(state)
    assert state() == new, "this test begins in a thread as it is at first"
    with CONTEXTS[name]():
        before = state()
        assert before != new
        put_back = put_thread_aside()
        assert state() == new
        put_back()
        assert state() == before
    assert state() == new


@pytest.mark.parametrize("left", CONTEXTS)
@pytest.mark.parametrize("name", CONTEXTS)
def test_whatever_is_left_meanwhile_is_gone(name: str, left: str) -> None:
    new = state()
    with CONTEXTS[name]():
        before = state()
        put_back = put_thread_aside()
        CONTEXTS[left]().__enter__()
        put_back()
        assert state() == before
    assert state() == new


def test_stacks_come_back_in_their_order() -> None:
    outer, inner = Counting(), Counting()
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(identity, identity), hooks(also_identity, also_identity), Doubling(), Doubling(), outer, inner:
        put_thread_aside()()
        assert float(torch.sum(torch.ones(3))) == 12
        assert inner.count == outer.count > 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) == (also_identity, also_identity)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _interrupt_at(line: int, functions: tuple[str, ...]) -> Callable[..., Any]:
    """A trace that interrupts before this one, of all lines that are run in these functions."""
    left = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name not in functions:
            return None
        if event == "line" and next(left) == line:
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.skipif(not OwnStack.possible, reason="needs greenlet")
def test_an_interrupt_as_a_thread_gets_back_what_is_its_own_leaves_nothing_behind() -> None:
    """Wherever it comes: what had not been put back then had been gone."""
    calls = ["before"]

    def put_calls_aside() -> Callable[[], None]:
        taken = calls.copy()
        calls.clear()
        return lambda: calls.__setitem__(slice(None), taken)

    def leave_something() -> None:
        torch.set_grad_enabled(True)
        torch.autograd.graph.saved_tensors_hooks(also_identity, also_identity).__enter__()
        calls.append("left")

    functions = ("put_back", "_call_all", "_emptied", "_set_nesting", "switch", "_pop_pair")
    interrupted = 0
    for line in itertools.count():
        with contextlib.ExitStack() as around:
            around.enter_context(Doubling())
            around.enter_context(torch.autograd.graph.saved_tensors_hooks(identity, identity))
            around.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            around.enter_context(torch.no_grad())
            expected, found = state(), False
            fiber = OwnStack(leave_something, aside=(put_calls_aside, put_thread_aside))
            trace, before = _interrupt_at(line, functions), sys.gettrace()
            put_aside = fiber._aside[1]

            def then_traced(put_aside: Any = put_aside, trace: Any = trace) -> Callable[[], None]:
                put_back = put_aside()
                sys.settrace(trace)
                return put_back

            fiber._aside = (fiber._aside[0], then_traced)
            try:
                fiber.go()
            except KeyboardInterrupt:
                found = True
            finally:
                sys.settrace(before)
            assert state() == expected, line
            assert calls == ["before"], line
        interrupted += found
        if not found:
            break
    assert interrupted > 30


@pytest.mark.skipif(not OwnStack.possible, reason="needs greenlet")
def test_what_was_put_aside_before_an_interrupt_is_put_back() -> None:
    calls: list[str] = []

    def put_aside() -> Callable[[], None]:
        calls.append("aside")
        return lambda: calls.append("back")

    def interrupt() -> Callable[[], None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        OwnStack(lambda: None, aside=(put_aside, interrupt)).go()
    assert calls == ["aside", "back"]


def test_what_autocast_remembers_lasts_as_long_as_the_outermost_autocast() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        put_back = put_thread_aside()
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        put_back()
        assert torch.autocast_increment_nesting() == 2
        torch.autocast_decrement_nesting()
        assert torch.nn.functional.linear(weight, weight).dtype == torch.bfloat16
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_a_torch_that_has_moved_something_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    require_names()
    monkeypatch.delattr(torch._C, "_pop_torch_dispatch_stack")
    with pytest.raises(TiermemError, match=r"no torch\._C\._pop_torch_dispatch_stack"):
        require_names()


def test_the_stream_of_a_gpu_is_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["the caller's"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "a new thread's")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    put_back = put_thread_aside()
    torch.cuda.set_stream("one that a micro-batch takes for itself")
    put_back()
    assert current[1:] == ["a new thread's", "one that a micro-batch takes for itself", "the caller's"]
