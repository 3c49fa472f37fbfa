"""An interrupt (Ctrl-C) at a bad moment: what it left half done is made good by the next call, and nothing hangs."""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import sys
import threading
import time

import pytest
import torch
from doubles_combinations import each_of, half_of, in_turn, number_of, some_of
from doubles_garbage import collect
from doubles_models import Stack
from doubles_python import ROOT, WarmPython
from doubles_signals import interrupted
from doubles_together import leased_pages
from doubles_training import UPDATES, budget_for, config_for
from torch import nn

import tiermem
from tiermem.optim.coordinator import UpdateCoordinator
from tiermem.optim.speculation import Speculation
from tiermem.optim.updater import Updater
from tiermem.pager.lease import Lease, PendingLease
from tiermem.pager.loop import LoopThread
from tiermem.pager.page import Kind
from tiermem.runtime import commits
from tiermem.runtime.ledger import GradientLedger
from tiermem.zero3 import gather, handles
from tiermem.zero3.gather import Gatherer
from tiermem.zero3.handles import SavedTensorHooks
from tiermem.zero3.materialize import Materializer
from tiermem.zero3.order import OrderRecorder
from tiermem.zero3.placeholder import Placeholders
from tiermem.zero3.reduce import GradientStore
from tiermem.zero3.sources import Leased

sys.path.insert(0, str(ROOT / "tools"))
import interrupt_training


class Once:
    """Calls the function; the call of this number is interrupted before it does anything."""

    def __init__(self, function, number: int) -> None:
        self.function, self.left = function, number

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)


class OnceBehind(Once):
    """The same, and it is interrupted when it has done everything."""

    def __call__(self, *args, **kwargs):
        done = self.function(*args, **kwargs)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return done


def begin(tmp_path, update="forward", budget="tight"):
    tmp_path.mkdir(exist_ok=True)
    torch.manual_seed(1)
    model = Stack()
    plain = copy.deepcopy(model)
    config = config_for(tmp_path, budget_for(model, tmp_path, budget), update)
    return model, plain, tiermem.offload(model, config, coalesce=0)


def batch() -> torch.Tensor:
    return torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("number", "where"), half_of([1, 2, 3, 5], ["gathering", "letting go"]))
def test_parameters_half_gathered_or_half_let_go(where, number, tmp_path, monkeypatch):
    model, plain, runtime = begin(tmp_path)
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        with monkeypatch.context() as patch:
            if where == "gathering":
                patch.setattr(gather, "slot_of", Once(gather.slot_of, number))
            else:
                once = Once(Placeholders.of, number)
                patch.setattr(Placeholders, "of", lambda self, *arguments: once(self, *arguments))
            with pytest.raises(KeyboardInterrupt):
                model(batch())
        for _ in range(2):
            loss, expected = model(batch()).square().mean(), plain(batch()).square().mean()
            assert torch.equal(loss, expected)
            loss.backward(), expected.backward()
            optimizer.step(), other.step()
            other.zero_grad()
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("where", ["calling", "called", "lending"])
def test_values_are_written_behind_an_interrupt(where, number, tmp_path, monkeypatch):
    """What it left is held for reading, by calls that have ended."""
    model, plain, runtime = begin(tmp_path, budget="generous")
    with runtime:
        owner, name = (nn.functional, "linear") if where == "called" else (gather, "slot_of")
        lent = runtime.gathered(model) if where == "lending" else contextlib.nullcontext()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Once(getattr(owner, name), number))
            with pytest.raises(KeyboardInterrupt), lent:
                model(batch())
        with runtime.gathered(model, write=True), torch.no_grad():
            for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
                parameter.copy_(values.mul_(0.5))
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.master(parameter), values)
        assert torch.equal(model(batch()), plain(batch()))
        assert leased_pages(runtime) == []


@pytest.mark.parametrize("write", [False, True])
def test_a_call_that_goes_on_is_none_that_was_interrupted(write, tmp_path):
    model, plain, runtime = begin(tmp_path, budget="generous")
    with runtime:
        seen = []

        def lend(*_):
            with runtime.gathered(model.head, write=write):
                seen.append(model.head.weight.detach().clone())

        model.layers[0].register_forward_hook(lend)
        assert torch.equal(model(batch()), plain(batch()))
        assert torch.equal(seen[0], plain.head.weight)
        assert leased_pages(runtime) == []


def test_interrupted_forwards_do_not_use_up_the_budget(tmp_path):
    model, plain, runtime = begin(tmp_path, "backward")

    def interrupt(module: nn.Module, _: object) -> None:
        raise KeyboardInterrupt

    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for layer in (*model.layers, model.head, *model.layers):
            handle = layer.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(batch())
            handle.remove()
            optimizer.zero_grad()
        loss = model(batch()).square().mean()
        assert torch.equal(loss, plain(batch()).square().mean())
        loss.backward()
        optimizer.step()
        runtime.settle()
        assert runtime.statistics().tiers[-1].reserved <= runtime.statistics().tiers[-1].budget


@pytest.mark.parametrize("update", ["forward", "step"])
def test_updates_that_were_queued_and_not_begun_are_carried_out(update, tmp_path, monkeypatch):
    model, plain, runtime = begin(tmp_path, update, "generous")
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        model(batch()).square().mean().backward()
        pager = runtime._house.storage.pager

        def interrupted(coroutine) -> None:
            coroutine.close()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pager, "start_task", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        plain(batch()).square().mean().backward()
        other.step()
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)


@pytest.mark.parametrize("kept", ["commit", "snapshot"])
@pytest.mark.timeout(200)
def test_what_is_kept_next_has_updates_that_were_queued_and_not_begun(kept, tmp_path, monkeypatch):
    """It waited for ever: nobody carried out what it waited for."""
    model, plain, runtime = begin(tmp_path, "forward", "generous")
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        model(batch()).square().mean().backward()

        def interrupted(coroutine) -> None:
            coroutine.close()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(runtime._house.storage.pager, "start_task", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        optimizer.zero_grad()  # of the units behind it
        pending = runtime.commit() if kept == "commit" else runtime.snapshot(tmp_path / "copy")
        try:
            pending.future.result()
        finally:
            runtime.settle()  # carries it out in any case, for closing to end
        plain(batch()).square().mean().backward()
        other.step()
        first = next(iter(zip(model.parameters(), plain.parameters(), strict=True)))
        assert torch.equal(runtime.parameter(first[0]), first[1])


def test_closing_that_is_interrupted_behind_a_commit_leaves_it_whole(tmp_path, monkeypatch):
    """It removed the files of a first commit, whose manifest came afterwards; or let others in before that."""
    model, _, runtime = begin(tmp_path)
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
    model(batch()).square().mean().backward()
    optimizer.step()
    expected = [runtime.parameter(parameter) for parameter in model.parameters()]
    store, publishing, may = runtime._house.storage.store, threading.Event(), threading.Event()
    publish = store.publish

    def publish_later():
        publishing.set()
        assert may.wait(30)
        publish()

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "publish", publish_later)
    pending = runtime.commit(extra=1)
    assert publishing.wait(30)
    monkeypatch.setattr(runtime._house.commits, "close", interrupted)
    threading.Timer(0.2, may.set).start()
    with pytest.raises(KeyboardInterrupt):
        runtime.close()
    pending.future.result()
    model = Stack()
    config = config_for(tmp_path, budget_for(model, tmp_path, "tight"), "forward")
    with tiermem.offload(model, config, coalesce=0, resume=True) as runtime:
        assert runtime.committed == 1
        assert all(map(torch.equal, map(runtime.parameter, model.parameters()), expected))


@pytest.mark.parametrize(
    ("update", "budget", "number"), half_of(["forward", "step", "auto"], ["tight", "generous"], [1, 2])
)
def test_an_update_that_was_queued_when_the_interrupt_came_is_done_once(budget, update, number, tmp_path, monkeypatch):
    """It was kept, to be queued again by whoever needs it next, and computed twice."""
    model, plain, runtime = begin(tmp_path, update, budget)
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        model(batch()).square().mean().backward()
        plain(batch()).square().mean().backward()
        pager = runtime._house.storage.pager
        left = number
        real = pager.start_task

        def interrupted(coroutine):
            nonlocal left
            task = real(coroutine)
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return task

        with monkeypatch.context() as patch:
            patch.setattr(pager, "start_task", interrupted)
            with contextlib.suppress(KeyboardInterrupt):  # with a budget for everything one task does all of them
                optimizer.step()
                model(batch())
        if left <= 0:
            optimizer.step()
        optimizer.zero_grad()
        other.step()
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)
        other.zero_grad()
        for each, its in ((model, optimizer), (plain, other)):
            each(batch()).square().mean().backward()
            its.step()
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)


COUNTING = {
    "asking": (UpdateCoordinator, "_updates"),
    "counting": (tiermem.AdamW, "count"),
    "claiming": (GradientLedger, "claimed"),
    "queueing": (Updater, "start"),
    "keeping": (Speculation, "keep"),
    "ending the step": (OrderRecorder, "finish"),
}


@pytest.mark.parametrize(("where", "update"), in_turn(COUNTING, UPDATES))
@pytest.mark.filterwarnings("ignore:zero_grad\\(\\) between backward and step:RuntimeWarning")
def test_a_step_is_counted_where_moments_are_of_it(where, update, tmp_path, monkeypatch):
    """An update was counted, and lost: from then on its moments were taken for those of another step."""
    model, plain, runtime = begin(tmp_path, update, "tight" if update in ("backward", "auto") else "generous")
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)

        def expect():
            entries = [copy.deepcopy(other.state[values]) for values in plain.parameters()]
            return [(values.detach().clone(), entry) for values, entry in zip(plain.parameters(), entries, strict=True)]

        def step(net, its):
            net(batch()).square().mean().backward()
            its.step()
            its.zero_grad()

        for _ in range(2):
            step(model, optimizer), step(plain, other)
        for number, again in ((1, False), (3, True)):
            states = {int(other.state[values]["step"]): expect() for values in plain.parameters()}
            step(plain, other)
            states |= {int(other.state[values]["step"]): expect() for values in plain.parameters()}
            owner, name = COUNTING[where]
            kind, number = (OnceBehind, 1) if where == "ending the step" else (Once, number)
            once = kind(getattr(owner, name), number)
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(owner, name, lambda *given, once=once: once(*given))
                step(model, optimizer)
            if again and once.left <= 0:
                optimizer.step()
            optimizer.zero_grad()
            found = optimizer.full_state_dict()["state"]
            for place, parameter in enumerate(model.parameters()):
                values, entry = states[int(found[place]["step"])][place]
                assert torch.equal(runtime.parameter(parameter), values)
                assert all(torch.equal(found[place][key], entry[key]) for key in ("exp_avg", "exp_avg_sq"))
            plain.load_state_dict(
                {key: runtime.parameter(value) for key, value in model.named_parameters()}, strict=False
            )
            other.load_state_dict(optimizer.full_state_dict())
        step(model, optimizer), step(plain, other)
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values), "a step that changed nothing"


class Interrupting:
    """Raises KeyboardInterrupt where the function of this number begins, of those of the packages on this thread."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith(("tiermem", "swap")):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


# How many functions lie between one interrupt and the next: each call of a step is hit in one of so many runs.
STRIDE = number_of(293, 199)


@pytest.mark.parametrize("update", ["step", "forward", "auto", "backward"])
@pytest.mark.filterwarnings("ignore:zero_grad\\(\\) between backward and step:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it came while something was finalized
def test_interrupts_anywhere_in_a_step_leave_a_model_that_trains(update, tmp_path):
    model, plain, runtime = begin(tmp_path, update)
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)

        def step():
            loss = model(batch()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step(), step()
        for number in itertools.count(1, STRIDE):
            interrupting = Interrupting(number)
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    sys.settrace(interrupting)
                    step()
                finally:
                    sys.settrace(None)
            optimizer.zero_grad()
            if interrupting.left > 0:  # the step was over before
                break
        assert number > 20 * STRIDE
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            values.data.copy_(runtime.parameter(parameter))
        other = plain(batch()).square().mean()
        assert torch.equal(step(), other)
        assert not leased_pages(runtime)


def compute(runtime, model, together: bool) -> torch.Tensor:
    """Forward and backward, of one batch or of three together; the sum of the losses."""
    if together:
        return sum(runtime.forward_backward([batch()] * 3, lambda each: model(each).square().mean()))
    loss = model(batch()).square().mean()
    loss.backward()
    return loss.detach()


PLACES = {
    "taking the frame": (Leased, "__init__"),
    "before the wait": (PendingLease, "wait"),
    "giving back": (Lease, "release"),
    "on the way back": (Lease, "_close"),
    "saying so": (LoopThread, "leave"),
    "asking": (LoopThread, "wake"),
    "showing parameters": (gather, "slot_of"),
    "hiding them": (Gatherer, "put_placeholders"),
    "saving": (SavedTensorHooks, "recognise"),
    "restoring": (SavedTensorHooks, "restore"),
    "putting a gradient away": (GradientStore, "_store"),
}


@pytest.mark.parametrize(("where", "budget", "together"), each_of(PLACES, ["tight", "generous"], [False, True]))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_an_interrupt_held_is_free_though_its_error_is_kept(where, budget, together, tmp_path, monkeypatch):
    """As the interactive interpreter keeps the last one: with its frames, and leases that these had."""
    model, plain, runtime = begin(tmp_path, "forward" if budget == "tight" else "step", budget)
    owner, name = PLACES[where]
    real = getattr(owner, name)
    main = threading.current_thread()
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        compute(runtime, model, together)
        optimizer.step()
        for number in some_of([1, 5], [2, 11]):
            left = number

            def interrupted(*arguments, **named):
                nonlocal left
                if threading.current_thread() is main:
                    left -= 1
                    if left == 0:
                        raise KeyboardInterrupt
                return real(*arguments, **named)

            kept = None
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                try:
                    compute(runtime, model, together)
                except KeyboardInterrupt as error:
                    kept = error
            optimizer.zero_grad()
            for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
                values.data.copy_(runtime.parameter(parameter))
            expected = plain(batch()).square().mean()
            assert torch.equal(compute(runtime, model, together), sum([expected] * 3) if together else expected)
            optimizer.step()
            optimizer.zero_grad()
            runtime.settle()
            assert not leased_pages(runtime), (number, kept)


@pytest.mark.parametrize(
    ("kept", "budget"),
    half_of(["by the interpreter", "being handled", "behind another being handled"], ["tight", "generous"]),
)
def test_what_an_interrupt_kept_from_a_function_of_ours_is_free_though_its_error_is_kept(
    budget, kept, tmp_path, monkeypatch
):
    """Nothing of the function has run, and in its frame is what it was given: a view of parameters to be saved."""
    model, plain, runtime = begin(tmp_path, "forward" if budget == "tight" else "step", budget)
    left = 0

    def interrupt(frame, event, argument):
        nonlocal left
        if event == "call" and frame.f_code is handles._Scope.__call__.__code__:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt

    def be_interrupted():
        sys.settrace(interrupt)
        compute(runtime, model, together=False)

    def go_on():
        assert left == 0
        optimizer.zero_grad()
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            values.data.copy_(runtime.parameter(parameter))
        assert torch.equal(compute(runtime, model, together=False), plain(batch()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        runtime.settle()
        assert not leased_pages(runtime)

    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        compute(runtime, model, together=False)
        optimizer.step()
        for number in range(1, 12, number_of(2, 1)):
            left = number
            try:
                be_interrupted()
            except KeyboardInterrupt as error:
                if kept == "being handled":
                    go_on()
                elif kept == "behind another being handled":
                    try:
                        raise ValueError("while it is handled")
                    except ValueError:
                        go_on()
                else:
                    monkeypatch.setattr(sys, "last_value", error, raising=False)
            if kept == "by the interpreter":
                go_on()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("verb", ["commit", "snapshot"])
@pytest.mark.timeout(200, method="thread")
def test_a_commit_or_snapshot_interrupted_as_it_starts_holds_nobody_up(verb, begun, tmp_path, monkeypatch):
    """Whoever was to change pages next waited for ever for a thread that there was not."""
    model, _, runtime = begin(tmp_path / "swap", "forward", "generous")
    real = commits.start_thread

    def interrupted(name, work, *arguments):
        if begun:
            real(name, work, *arguments)
            while not work.__self__._begins.locked():  # else it may be given up before its thread comes to it
                time.sleep(0.001)
        raise KeyboardInterrupt

    def keep(step: int):
        return runtime.commit({"step": step}) if verb == "commit" else runtime.snapshot(tmp_path / str(step))

    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        with monkeypatch.context() as patch:
            patch.setattr(commits, "start_thread", interrupted)
            with pytest.raises(KeyboardInterrupt):
                keep(1)
        model(batch()).square().mean().backward()
        optimizer.step()
        keep(2).wait()
        assert verb == "snapshot" or runtime.committed == {"step": 2}
    found = {path.name for path in tmp_path.iterdir()} - {"swap"}
    assert found == (set() if verb == "commit" else {"1", "2"} if begun else {"2"})


def test_an_interrupt_while_a_gradient_is_put_away_is_no_error_of_the_pager(tmp_path, monkeypatch):
    """It ended the pager's thread where the page was wanted again, and with it every wait."""
    model, plain, runtime = begin(tmp_path, "step", "generous")
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        with monkeypatch.context() as patch:
            real = Lease.tensor

            def interrupted(lease, key):
                if key.kind is Kind.GRAD:
                    raise KeyboardInterrupt
                return real(lease, key)

            patch.setattr(Lease, "tensor", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(batch()).square().mean().backward()
        with pytest.raises(tiermem.TiermemError, match=r"KeyboardInterrupt came while .* was being written.*zero_grad"):
            model(batch()).square().mean().backward()
        optimizer.zero_grad()
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        for each, its in ((model, optimizer), (plain, other)):
            each(batch()).square().mean().backward()
            its.step()
        for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_model_whose_offload_ends_half_way_is_no_model_of_nan(error, tmp_path, monkeypatch):
    real, left = Materializer._write, 3

    def write(*arguments):
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return real(*arguments)

    monkeypatch.setattr(Materializer, "_write", write)
    model = Stack()
    with pytest.raises(error):
        tiermem.offload(model, config_for(tmp_path, "4MiB", "forward"), coalesce=0)
    assert list(tmp_path.iterdir()) == []
    for use in (lambda: model(batch()), model.state_dict):
        with pytest.raises(tiermem.TiermemError, match=r"offload itself has failed, build the model again"):
            use()
    with pytest.raises(tiermem.ConfigError, match=r"has no values.*build the model again"):
        tiermem.offload(model, config_for(tmp_path, "4MiB", "forward"))


def threads_of_ours():
    return [each for each in threading.enumerate() if each.name.startswith(("tiermem-", "swap-"))]


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.filterwarnings("ignore:a tiermem runtime over .* was never closed:ResourceWarning")
@pytest.mark.timeout(200, method="thread")
def test_a_close_that_is_interrupted_is_ended_by_the_next_one_or_by_python(again, tmp_path):
    """Between two of its lines it left files, locks and threads behind, and the next one did nothing."""
    others = threads_of_ours()  # of tests before this one, that are still about to end, or that nobody can collect
    for number in itertools.count(2 + again, 14):
        model, _, runtime = begin(tmp_path / "swap", "forward", "generous")
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        model(batch()).square().mean().backward()
        optimizer.step()
        reached = interrupted(runtime.close, number, ("tiermem.runtime",))
        if again:
            runtime.close()
        del model, runtime, optimizer
        collect()
        deadline = time.monotonic() + 20  # a thread that has been told to end may get its turn late on a busy machine
        while (left := [each for each in threads_of_ours() if each not in others]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left
        assert not list((tmp_path / "swap").iterdir())
        if not reached:
            break
    assert number > 3 * 14


@pytest.mark.long
@pytest.mark.parametrize("together", ["False", "True"])
def test_the_tool_that_interrupts_everywhere(together, warm_python: WarmPython, tmp_path):
    program = str(ROOT / "tools" / "interrupt_training.py")
    done = warm_python.run(program, str(tmp_path), "--stride", "1500", "--case", "forward", "44KiB", together)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("at ") >= 3


@pytest.mark.parametrize(
    ("end", "said", "patience"), [("exec sleep 600", "waits for ever", 2.0), ("exit 3", "exit code 3", 60.0)]
)
def test_the_tool_says_where_a_training_ended(end, said, patience, tmp_path, monkeypatch, capsys):
    """Of one that waits for ever it does not wait for the end."""
    monkeypatch.setattr(interrupt_training, "PATIENCE", patience)
    training = tmp_path / "training"
    training.write_text(f"#!/bin/sh\necho at forward:1\n{end}\n")
    training.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(training))
    options = argparse.Namespace(directory=tmp_path, stride=1, first=1)
    assert interrupt_training.watch(interrupt_training.Case("step", "4MiB", False), options) == (1, False)
    text = capsys.readouterr().out
    assert said in text
    assert "at forward:1" in text


def test_gradients_dropped_inside_a_forward_end_no_call(tmp_path):
    """What is in progress there is no interrupted call: its parameters stay until it is over."""
    model, plain, runtime = begin(tmp_path)
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        children = list(model.children())
        children[0].register_forward_hook(lambda *_: optimizer.zero_grad())
        children[-1].register_forward_pre_hook(lambda *_: optimizer.zero_grad())
        for _ in range(2):
            assert torch.equal(model(batch()), plain(batch()))
