"""Laws that no import shows: who changes residency, who asks for collectives, what becomes of other people's things."""

from __future__ import annotations

import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_models import Stack, loss_of
from doubles_python import WarmPython
from doubles_ranks import run_jobs, values
from torch import nn

import tiermem
from tiermem.pager.residency import Residency

CODE = (
    type,
    property,
    classmethod,
    staticmethod,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
)
TRANSITIONS = (
    "add",
    "allocate",
    "hold",
    "grant",
    "unhold",
    "start_move",
    "finish_move",
    "drop",
    "discard",
    "revert",
    "fail",
    "remove",
    "reclassify",
)


def config(tmp_path: Path, **settings: Any) -> tiermem.Config:
    there = {"device": "cpu", "host_memory": "64KiB", "param_dtype": "float32", "tile_size": "64KiB"} | settings
    return tiermem.Config(swap_dirs=[tmp_path], block_size="4KiB", **there)


def train_and_keep(runtime: tiermem.Runtime, model: nn.Module, folder: Path) -> None:
    """Steps, one that is dropped, commits, a snapshot, what is looked at and written between them, an evaluation."""
    optimizer = tiermem.AdamW(model.parameters(), max_grad_norm=0.1)
    for step in range(4):
        loss_of(model)
        optimizer.step()
        optimizer.zero_grad()
        runtime.commit({"step": step})
    loss_of(model)
    optimizer.zero_grad()
    runtime.snapshot(folder).wait()
    with runtime.gathered(model.shift, write=True), torch.no_grad():
        model.shift.add_(1.0)
    runtime.parameter(model.shift)
    runtime.master(model.shift)
    with torch.no_grad():
        model(torch.randint(0, 40, (2, 5)))
    optimizer.full_state_dict()


def noting(method: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        note(threading.current_thread().name)
        return method(*args, **kwargs)

    return call


@pytest.mark.parametrize("chain", [{}, {"device": "simulated", "device_memory": "64KiB"}])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_residency_changes_on_one_thread(tmp_path, monkeypatch, chain, update):
    """Whoever else moves bytes, runs kernels or computes only tells the loop, the one owner of pages' facts."""
    seen: dict[str, set[str]] = defaultdict(set)
    for name in TRANSITIONS:
        monkeypatch.setattr(Residency, name, noting(getattr(Residency, name), seen[name].add))
    model = Stack()
    with tiermem.offload(model, config(tmp_path, update=update, **chain)) as runtime:
        train_and_keep(runtime, model, tmp_path / "snapshot")
        assert runtime.statistics().total.bytes_written
    assert seen.pop("fail") == set()
    assert {name: threads for name, threads in seen.items() if threads - {"tiermem-pager"}} == {}
    assert {name for name, threads in seen.items() if not threads} <= {"revert", "remove"}


def theirs() -> Iterator[tuple[str, Any]]:
    """The code that torch's modules, and the classes used here, are made of."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch" and module]
    kinds = [nn.Module, nn.Parameter, nn.Linear, nn.Embedding, torch.Tensor, torch.optim.Optimizer, torch.optim.AdamW]
    for holder in (*modules, *kinds, Stack):
        for name, value in list(vars(holder).items()):
            if issubclass(type(value), CODE):
                yield f"{holder.__name__}.{name}", value


def test_nothing_of_torchs_or_the_models_is_replaced_and_nothing_hung_on_it(tmp_path):
    model = Stack()
    for _ in range(2):  # first plain, so that torch has loaded what it loads late
        loss_of(model)
        torch.optim.AdamW(model.parameters()).step()
    model.zero_grad()
    code = dict(theirs())
    holders = {name.rpartition(".")[0] for name in code}
    held = {name: set(vars(module)) for name, module in model.named_modules()}
    kinds = {name: type(parameter) for name, parameter in model.named_parameters()}
    runtime = tiermem.offload(model, config(tmp_path))
    train_and_keep(runtime, model, tmp_path / "snapshot")
    for open_ in (True, False):
        assert [name for name, value in theirs() if code.get(name, value) is not value] == []
        assert [name for name, _ in theirs() if name not in code and name.rpartition(".")[0] in holders] == []
        assert {name: set(vars(module)) for name, module in model.named_modules()} == held
        assert [name for name, parameter in model.named_parameters() if vars(parameter)] == []
        assert all(isinstance(parameter, kinds[name]) for name, parameter in model.named_parameters())
        if open_:
            runtime.close(restore_model=True)
    assert {name: type(parameter) for name, parameter in model.named_parameters()} == kinds
    left = {name: value for name, value in vars(model.layers[0]).items() if name.endswith("_hooks")}
    assert {name: len(hooks) for name, hooks in left.items() if hooks} == {}


@pytest.fixture(scope="module")
def calls(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    reports = run_jobs(warm_python, tmp_path_factory.mktemp("ranks"), [(2, ["calls_of_ranks"])])
    return values(reports[2, "calls_of_ranks"])


def test_each_line_among_ranks_has_one_order(calls):
    """The same calls of the same sizes, one after the other, on every rank, whatever completes when."""
    first, second = calls
    assert first["all"] == second["all"]
    assert first["overlaps"] == second["overlaps"] == []


def test_collectives_have_one_issuer(calls):
    """That of steps; commits are beside them on a line of their own, and what verbs agree on is told between steps."""
    steps, everything = (
        [{thread for thread, _, _ in line} for line in calls[0][key].values()] for key in ("steps", "all")
    )
    assert steps == [{"tiermem-ranks"}, {"tiermem-commit"}]
    assert everything == [{"tiermem-ranks", "MainThread"}, {"tiermem-commit", "tiermem-snapshot"}]
