"""A signal handler that raises an error of its own, anywhere: it is raised, and nothing hangs or is lost."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from doubles_models import Stack
from doubles_training import budget_for, config_for

import tiermem
from tiermem.pager.pager import Pager
from tiermem.runtime.commits import Commits


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


@pytest.mark.parametrize("update", ["forward", "step"])
@pytest.mark.timeout(30, method="thread")
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
