"""A signal handler that asks for something, or raises an error of its own: it is told, nothing hangs or is lost."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from doubles_models import Stack
from doubles_together import leased_pages
from doubles_training import budget_for, config_for

import tiermem
from tiermem.pager.pager import Pager
from tiermem.runtime.commits import Commits
from tiermem.stats import Counters


class PreemptedError(Exception):
    """What a program's handler raises."""


def begin(directory, update="forward", budget="tight", *, resume=False):
    directory.mkdir(exist_ok=True)
    torch.manual_seed(1)
    model = Stack()
    plain = copy.deepcopy(model)
    config = config_for(directory, budget_for(model, directory, budget), update)
    runtime = tiermem.offload(model, config, coalesce=0, resume=resume)
    return model, plain, runtime, tiermem.AdamW(model.parameters(), lr=1e-2)


def batch() -> torch.Tensor:
    return torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(3))


def step(model, optimizer) -> torch.Tensor:
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def verbs_of(runtime, model, optimizer, directory):
    weight = model.head.weight

    def lend() -> None:
        with runtime.gathered(model):
            pass

    return {
        "commit": runtime.commit,
        "snapshot": lambda: runtime.snapshot(directory / "snapshot"),
        "save_pretrained": lambda: runtime.save_pretrained(directory / "saved"),
        "close": runtime.close,
        "settle": runtime.settle,
        "gathered": lend,
        "parameter": lambda: runtime.parameter(weight),
        "master": lambda: runtime.master(weight),
        "gradient": lambda: runtime.gradient(weight),
        "forward_backward": lambda: runtime.forward_backward([batch()], lambda each: model(each).sum()),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "clip": lambda: optimizer.clip_grad_norm_(1.0),
        "full_state_dict": optimizer.full_state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(optimizer.state_dict()),
    }


# Of a step some 1,700 functions of ours, each of which a signal may interrupt.
STRIDE = 29


@pytest.mark.parametrize(("update", "budget"), [("forward", "tight"), ("step", "generous"), ("backward", "tight")])
def test_a_handler_that_asks_in_the_middle_of_something_is_told_so(update, budget, tmp_path):
    """It waited for ever for a lock, changed what was being changed, or left a forward without parameters."""
    model, plain, runtime, optimizer = begin(tmp_path / "swap", update, budget)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    with runtime:
        pending = runtime.commit()
        pending.wait()
        verbs = {**verbs_of(runtime, model, optimizer, tmp_path), "wait": pending.wait}
        names, passed, refused = list(verbs), 0, set()

        def handle(frame, event, argument):
            nonlocal passed
            if event == "call" and frame.f_globals.get("__name__", "").startswith(("tiermem", "swap")):
                passed += 1
                if passed % STRIDE == 0:
                    name = names[passed // STRIDE % len(names)]
                    sys.settrace(None)
                    with pytest.raises(tiermem.TiermemError, match=r"in the middle of (tiermem|swap).*flag"):
                        verbs[name]()
                    runtime.statistics()
                    refused.add(name)
                    sys.settrace(handle)

        for _ in range(2):
            sys.settrace(handle)
            try:
                found = step(model, optimizer)
            finally:
                sys.settrace(None)
            assert torch.equal(found, step(plain, other))
        assert refused == set(names)
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)
        assert not leased_pages(runtime)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_would_be_of_half_a_step_is_refused_inside_a_pass(where, tmp_path):
    model, plain, runtime, optimizer = begin(tmp_path / "swap")
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    with runtime:
        verbs = verbs_of(runtime, model, optimizer, tmp_path)
        asked = []

        def ask(*_):
            for name in ("commit", "snapshot", "save_pretrained"):
                with pytest.raises(tiermem.TiermemError, match=f"{name} inside a forward or backward.*flag"):
                    verbs[name]()
                asked.append(name)

        if where == "forward":
            model.layers[1].up.register_forward_hook(ask)
        else:
            model.head.register_forward_hook(lambda _, __, output: output.register_hook(ask) and None)
        assert torch.equal(step(model, optimizer), step(plain, other))
        assert len(asked) == 3
        runtime.commit({"step": 1}).wait()
        assert torch.equal(step(model, optimizer), step(plain, other))


def test_what_our_functions_call_of_others_may_ask(tmp_path):
    """A closure, a loss, a hook: they are in the middle of something of ours, and belong there."""
    model, plain, runtime, optimizer = begin(tmp_path)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    asked = []

    def lend(*_):
        with runtime.gathered(model.head):
            asked.append(model.head.weight.detach().clone())

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        asked.append(runtime.gradient(model.head.weight))
        return loss

    def loss_of(each):
        lend()
        return model(each).square().mean()

    with runtime:
        optimizer.step(closure)
        step(plain, other)
        hook = model.layers[0].register_full_backward_hook(lend)
        runtime.forward_backward([batch(), batch()], loss_of)  # one after the other through each part of the model
        hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        plain(batch()).square().mean().backward()
        step(plain, other)
        assert len(asked) == 5
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)


@pytest.mark.parametrize("update", ["forward", "step"])
@pytest.mark.timeout(200, method="thread")
def test_an_error_that_a_handler_raises_while_a_step_waits_for_a_commit_is_raised(update, tmp_path, monkeypatch):
    """It was taken for the commit's: the step went on, and the commit was of two steps. Or updates were lost."""
    model, plain, runtime, optimizer = begin(tmp_path, update)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    prepare, wait_for = Commits._prepare, Pager.wait_for
    may_go_on = threading.Event()

    def prepare_late(*arguments):
        may_go_on.wait()
        return prepare(*arguments)

    def interrupted(pager, future):
        if may_go_on.is_set() or future.done():
            return wait_for(pager, future)
        raise PreemptedError

    with runtime:
        step(model, optimizer), step(plain, other)
        runtime.settle()
        with monkeypatch.context() as patch:
            patch.setattr(Commits, "_prepare", prepare_late)
            committing = runtime.commit({"step": 1})
            model(batch()).square().mean().backward()
            patch.setattr(Pager, "wait_for", interrupted)
            try:
                with pytest.raises(PreemptedError):
                    optimizer.step(), runtime.settle()
            finally:
                may_go_on.set()
        committing.wait()
        committed = [values.detach().clone() for values in plain.parameters()]
        runtime.settle()
        optimizer.step()
        step(plain, other)
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)
    model, _, runtime, _ = begin(tmp_path, update, resume=True)
    with runtime:
        for parameter, values in zip(model.parameters(), committed, strict=True):
            assert torch.equal(runtime.parameter(parameter), values)


@pytest.mark.timeout(200, method="thread")
def test_a_handler_may_ask_for_the_statistics_while_they_are_counted():
    asked = []

    def clock() -> float:
        if len(asked) < 10 and counters is not None:
            asked.append(None)
            asked[-1] = counters.snapshot()
        return 1.0

    counters: Counters | None = None
    counters = Counters(clock)
    counters.move_started("swap->host")
    counters.move_finished("swap->host", 7)
    counters.step()
    assert counters.snapshot().total.bytes_read == 7
    assert len(asked) == 10
