"""Several micro-batches through the model together: every unit is brought once per pass, however many there are.

Owns what a micro-batch does (forward, loss, backward) and the surroundings it does it in: autocast, saved-tensor hooks,
number of threads, devices and stream, random numbers. Does not know units or threads (`zero3/lockstep.py` does).
Guarantees the numbers of ordinary accumulation of the same micro-batches in the same order, bit for bit, given the same
random numbers; and that after an error nothing runs on.

Random numbers. In ordinary accumulation micro-batch 1 goes on where micro-batch 0 has stopped. Here they alternate, so
each gets a generator of its own: micro-batch i is seeded with number i of `torch.randint(2**63 - 1, (count,))`, drawn
from torch's global generator, which goes on after that. Python's and numpy's generators are shared.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError, InvariantError, TiermemError
from tiermem.interrupts import call_out
from tiermem.memory.heap import keep_freed_blocks
from tiermem.runtime.house import House
from tiermem.zero3.cuts import Cuts
from tiermem.zero3.engine import pop_hooks, push_hooks, top_hooks
from tiermem.zero3.fibers import OwnStack, OwnThread
from tiermem.zero3.lockstep import Lockstep, RunIn
from tiermem.zero3.thread_state import KINDS, put_thread_aside

Loss = Callable[[Any], torch.Tensor]


def forward_backward(house: House, micro_batches: Iterable[Any], loss: Loss | None) -> list[torch.Tensor]:
    """See `Runtime.forward_backward`."""
    if not torch.is_grad_enabled():
        raise TiermemError("forward_backward under torch.no_grad(): there would be nothing to go backward through")
    if not isinstance(micro_batches, Iterable):
        raise ConfigError(f"micro_batches: expected several, as in a list, found {type(micro_batches).__name__}")
    if not (loss is None or callable(loss)):
        raise ConfigError(f"loss: expected a function of a micro-batch, found {type(loss).__name__}")
    scheduler = house.scheduler
    if scheduler.lockstep is not None:
        raise TiermemError("forward_backward inside forward_backward: a micro-batch cannot bring micro-batches")
    scheduler.settle()
    batches = list(micro_batches)
    count = len(batches)
    if count > 1:
        scheduler.gradients.prepare_together()
    seeds = torch.randint(2**63 - 1, (count,), device="cpu").tolist() if count else []
    kept = _generators()
    surroundings = Surroundings()
    measure = loss if loss is not None else _model_loss(house.model, count)
    cutting = house.cutting
    passages = [
        Passage(measure, batch, seed, surroundings, cutting.cuts(count))
        for batch, seed in zip(batches, seeds, strict=True)
    ]
    scheduler.lockstep = Lockstep(
        house.gatherer, scheduler.announce, _run_in(house, count), _resident(house), house.storage.follow
    )
    try:
        scheduler.lockstep.run(passages)
        cutting.succeeded(count)
    finally:
        scheduler.lockstep = None
        _restore(kept)
        scheduler.settle()
    return [passage.result() for passage in passages]


def _resident(house: House) -> frozenset[int]:
    """Units that need not be brought: kept in the memory where the model computes, as a whole."""
    alone = house.blueprint.device is None and house.company.size == 1
    return frozenset(layout.unit for layout in house.layouts if layout.kept) if alone else frozenset()


def _run_in(house: House, count: int) -> RunIn:
    if not (OwnStack.possible and house.cutting.severs(count)):
        return OwnThread
    if house.storage.torch_device.type == "cpu":
        keep_freed_blocks()
    scheduler = house.scheduler
    return partial(OwnStack, aside=(scheduler.stack.put_aside, scheduler.saved.put_aside, put_thread_aside))


class Surroundings:
    """What torch keeps for each thread and a micro-batch has to share with the caller."""

    def __init__(self) -> None:
        self._hooks = top_hooks()
        self._threads = torch.get_num_threads()
        self._device = torch.get_default_device()  # programs set one for good, at their beginning
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in KINDS]
        # A new thread has the first device and that one's default stream, whatever the caller has chosen.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if in_use else None

    def enter(self, stack: ExitStack) -> None:
        """Make them this thread's, until the stack is closed."""
        # A new thread has as many of OpenMP's as the process began with, until torch is asked; MKL and oneDNN do not
        # ask, and with another number the last bit of their products may be another.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if self._stream is not None:
            stack.enter_context(torch.cuda.stream(self._stream))
        if torch.get_default_device() != self._device:
            stack.enter_context(self._device)
        for kind, dtype, enabled in self._autocast:
            if enabled:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cache))
        if self._hooks is not None:
            push_hooks(*self._hooks)
            stack.callback(pop_hooks)
        # Also with an accelerator backward has to run on this thread, where it can wait.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))


class Passage:
    """One micro-batch: forward, loss, backward. `cuts`: what divides its backward."""

    def __init__(self, loss: Loss, micro_batch: Any, seed: int, surroundings: Surroundings, cuts: Cuts) -> None:
        self.cuts = cuts
        self._loss = loss
        self._micro_batch = micro_batch
        self._seed = seed
        self._surroundings = surroundings
        self._states: list[torch.Tensor] | None = None
        self._result: torch.Tensor | None = None

    def run(self) -> None:
        """Go forward and backward through the model."""
        try:
            self._run()
        except BaseException as error:
            if top_hooks() is not None:
                # Hooks that an error leaves behind (`remove_hooks` in zero3/engine.py) are this thread's, and their
                # owner is to remove them here: a variable of the error's frames, which ends when they are cleared.
                traceback.clear_frames(error.__traceback__)
            raise

    def _run(self) -> None:
        with ExitStack() as stack:
            self._surroundings.enter(stack)
            self.cuts.begin()
            loss = call_out(self._loss, self._micro_batch)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise TiermemError(f"a loss is a tensor of one element, found {found}; return one from `loss`")
            self._result = loss.detach().clone()
            self.cuts.close(loss)
            call_out(loss.backward)

    def resume(self) -> None:
        """Continue this micro-batch's random numbers."""
        if self._states is None:
            torch.manual_seed(self._seed)
        else:
            _restore(self._states)

    def pause(self) -> None:
        """Note where its random numbers are."""
        self._states = _generators()

    def result(self) -> torch.Tensor:
        """The loss, detached."""
        if self._result is None:
            raise InvariantError("a micro-batch has no loss yet")
        return self._result


def _model_loss(model: nn.Module, count: int) -> Loss:
    """What Hugging Face models return as `.loss`, divided by the number of micro-batches: the mean over all."""

    def loss(micro_batch: Any) -> torch.Tensor:
        if not isinstance(micro_batch, Mapping):
            raise ConfigError(
                f"a micro-batch of type {type(micro_batch).__name__} needs `loss=`; without it micro-batches are the "
                "model's keyword arguments, and its output has a .loss"
            )
        value: torch.Tensor | None = model(**micro_batch).loss
        if value is None:
            raise TiermemError("expected a loss in the model's output, found none: give it labels, or pass `loss=`")
        return value / count

    return loss


def _generators() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return states


def _restore(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, index)
