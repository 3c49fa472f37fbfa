"""When units are gathered and resharded: the hooks of stage 3.

Owns the module, saved-tensor and gradient hooks, the stack of module calls in progress, and the units backward holds.
Does not know frames, tiles or the update: it tells its listener what has to be waited for and what is complete.
Guarantees that a unit is gathered whenever one of its modules runs or the graph needs its values, that forward holds
the units of the calls in progress and no others, and that backward holds one unit besides, plus those a node is using.

Ends of things. A call's entry leaves the stack by the module's own hook, also when the call raises. An interrupt that
no module sees (KeyboardInterrupt) leaves entries behind: the next outermost call or step boundary removes them. The end
of a backward is a callback of the engine; a backward that fails has none, and the same places clean up after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.errors import TiermemError
from tiermem.zero3.engine import backward_number, call_at_backward_end
from tiermem.zero3.gather import Gatherer, Presence
from tiermem.zero3.handles import SavedTensorHooks
from tiermem.zero3.neighbours import Gradients, Listener
from tiermem.zero3.order import OrderRecorder, Phase
from tiermem.zero3.units import ModelUnits


class _Call:
    """A module call in progress."""

    __slots__ = ("module", "pushed", "units")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.units: list[int] = []
        self.pushed = False


class GatherScheduler:
    """Hooks a divided model. `parameters` by global number.

    `early`: announce units as complete during backward; then a gradient that comes after that is an error.
    """

    def __init__(
        self,
        divided: ModelUnits,
        parameters: Sequence[nn.Parameter],
        gatherer: Gatherer,
        gradients: Gradients,
        listener: Listener,
        *,
        early: bool = False,
    ) -> None:
        self._gatherer = gatherer
        self._gradients = gradients
        self._listener = listener
        self._early = early
        self._order = OrderRecorder()
        self._saved = SavedTensorHooks(len(divided.units), gatherer.frames, self._demand)
        self._calls: list[_Call] = []
        # Units gathered for backward, in order of arrival.
        self._backward: dict[int, None] = {}
        # Units with a gradient in this step; True once an update has taken them.
        self._touched: dict[int, bool] = {}
        self._watched: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._install(divided, parameters)

    @property
    def order(self) -> OrderRecorder:
        """What units were used in which order."""
        return self._order

    @property
    def gradients(self) -> Gradients:
        """Which parameters have gradients in this step, and their norms."""
        return self._gradients

    def settle(self) -> None:
        """Let go of everything outside the calls in progress: before an update, and whenever the model is at rest.

        Also removes what an interrupt or a failed backward left behind, hence not to be called from inside a forward.
        """
        while self._calls:
            self._finish(self._calls.pop())
        self._watched.clear()
        self._release_backward()
        self._gradients.release()
        self._gatherer.give_up_ahead()
        self._gatherer.recheck()

    def finish_step(self, *, updated: bool = True) -> None:
        """Begin a new step: the gradients have been taken over. `updated`: parameters with gradients change value."""
        self.settle()
        for unit in self._touched:
            if updated:
                self._saved.values_changed(unit)
        self._touched.clear()
        self._gradients.reset()
        self._order.finish()

    def drop_gradients(self) -> None:
        """Forget the gradients of this step. Raises TiermemError if an update has already begun to use them."""
        if any(self._touched.values()):
            raise TiermemError(
                "gradients were dropped (zero_grad) before optimizer.step(), but some units are already being updated; "
                'use update="forward" to drop gradients'
            )
        self._touched.clear()
        self._gradients.drop()
        self._order.forget_contributions()

    def forget(self, parameters: Sequence[int], *, updated: bool = False) -> None:
        """Forget these parameters' gradients while the step goes on for others. `updated`: their values change."""
        self.settle()
        self._gradients.forget(parameters)
        for unit in [unit for unit in self._touched if not self._gradients.numbers(unit)]:
            del self._touched[unit]
            if updated:
                self._saved.values_changed(unit)

    def close(self) -> None:
        """Remove all hooks and leases. The parameters stay placeholders (see `lend.restore`)."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.settle()

    def _install(self, divided: ModelUnits, parameters: Sequence[nn.Parameter]) -> None:
        for point in divided.points:
            module = point.module
            # First in and last out: the hooks of others see gathered parameters.
            before = _before_hook(self._before_call, point.units)
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(_after_hook(self._after_call), always_call=True))
            if _may_checkpoint_itself(module):
                self._hooks.append(module.register_forward_hook(_output_hook(self._demand, point.units)))
        for unit, member in divided.members():
            if parameters[member.number].requires_grad:
                hook = _gradient_hook(self._gradient_arrived, unit, member.number)
                register = parameters[member.number].register_post_accumulate_grad_hook
                self._hooks.append(register(hook))  # type: ignore[no-untyped-call]

    def _before_call(self, module: nn.Module, units: tuple[int, ...]) -> None:
        call = _Call(module)
        outermost = not self._calls
        self._calls.append(call)  # first of all: the after-hook runs even if what follows raises
        if outermost and self._backward and backward_number() < 0:
            self._release_backward()  # left by a backward that failed
        for unit in units:
            self._bring(unit, Phase.FORWARD)
            self._gatherer.hold(unit)
            call.units.append(unit)
        if torch.is_grad_enabled():
            call.pushed = self._saved.enter()

    def _after_call(self, module: nn.Module) -> None:
        if not any(call.module is module for call in self._calls):
            return  # a hook of somebody else raised before the entry was made
        while True:
            call = self._calls.pop()
            self._finish(call)
            if call.module is module:
                return

    def _finish(self, call: _Call) -> None:
        with ExitStack() as last:  # every unit is let go of, whatever happens to the others
            for unit in call.units:
                last.callback(self._let_go, unit)
            if call.pushed:
                last.callback(self._saved.leave)

    def _let_go(self, unit: int) -> None:
        if self._gatherer.unhold(unit) or unit in self._backward:
            return
        if backward_number() >= 0:
            # Recomputed for backward, which is about to use it: fetching it again would be a waste.
            self._watch_backward()
            self._release_backward(keep=unit)
            self._backward[unit] = None
        elif not self._gatherer.reshard(unit):
            self._gatherer.count_leaks()

    def _bring(self, unit: int, phase: Phase) -> torch.Tensor:
        """Gather a unit for a call or for backward; waits."""
        if self._gatherer.presence(unit) is Presence.SHARDED:
            self._gatherer.recheck()
            self._listener.unit_needed(unit)
            self._order.access(unit, phase)
            base = self._gatherer.gather(unit)
            following = self._order.upcoming()
            if following is not None:
                self._gatherer.start(following)
            return base
        return self._gatherer.gather(unit)

    def _demand(self, unit: int) -> torch.Tensor:
        """Gather a unit because the graph needs its values now."""
        self._watch_backward()
        if unit not in self._backward:
            self._release_backward(keep=unit)
        if self._gatherer.holds(unit) == 0:
            self._backward[unit] = None
        return self._bring(unit, Phase.BACKWARD)

    def _release_backward(self, keep: int | None = None) -> None:
        """Reshard what backward holds. A unit that a node of the graph is just using lingers, and is rechecked."""
        for unit in tuple(self._backward):
            if unit == keep:
                continue
            del self._backward[unit]
            if self._gatherer.holds(unit) == 0:
                self._gatherer.reshard(unit)

    def _watch_backward(self) -> None:
        """Have the end of the running backward noticed. A nested backward has its own end, which harms nobody."""
        number = backward_number()
        if number >= 0 and number not in self._watched:
            self._watched.add(number)
            call_at_backward_end(lambda: self._backward_ended(number))

    def _backward_ended(self, number: int) -> None:
        self._watched.discard(number)
        self._release_backward()
        self._gradients.release()
        self._gatherer.recheck()
        self._gatherer.count_leaks()
        for unit in tuple(self._touched):
            self._announce(unit)

    def _gradient_arrived(self, unit: int, parameter: int) -> None:
        self._watch_backward()
        if self._touched.get(unit):
            raise TiermemError(
                f"a gradient arrived for unit {unit} after its update had begun: this step brought more gradients than "
                'the one before (more micro-batches, or a second backward). Use update="forward" for such training'
            )
        if unit not in self._touched:
            self._listener.unit_needed(unit)
            self._order.access(unit, Phase.GRADIENT)
            self._touched[unit] = False
        self._gradients.accumulate(parameter)
        self._order.contribution(parameter)
        if self._order.all_arrived(self._gradients.trainable(unit)):
            self._gradients.release()
            self._announce(unit)

    def _announce(self, unit: int) -> None:
        """Tell the listener that the unit is complete, if it is and nothing can need its present values any more.

        As long as a graph holds handles on the unit, a node may still ask for its values, or bring another gradient:
        a second forward, a retained graph, an expert that has not had its turn.
        """
        if not self._early or self._touched[unit] or not self._order.all_arrived(self._gradients.trainable(unit)):
            return
        if self._saved.outstanding(unit) or self._gatherer.holds(unit):
            return
        self._gradients.release()
        self._backward.pop(unit, None)
        if self._gatherer.reshard(unit):
            self._touched[unit] = self._listener.gradients_complete(unit)


def _before_hook(call: Callable[[nn.Module, tuple[int, ...]], None], units: tuple[int, ...]) -> Callable[..., None]:
    def before(module: nn.Module, _: Any, __: Any) -> None:
        call(module, units)

    return before


def _after_hook(call: Callable[[nn.Module], None]) -> Callable[..., None]:
    def after(module: nn.Module, _: Any, __: Any) -> None:
        call(module)

    return after


def _output_hook(demand: Callable[[int], torch.Tensor], units: tuple[int, ...]) -> Callable[..., None]:
    """Bring units when backward reaches the outputs of a module.

    Only early, in general. It matters for a module that checkpoints a part of its own forward which reads its own
    parameters (most Hugging Face layers do so): nothing else is called before that part runs again.
    """

    def arrived(_: torch.Tensor) -> None:
        for unit in units:
            demand(unit)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    return after


def _gradient_hook(call: Callable[[int, int], None], unit: int, number: int) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        call(unit, number)

    return arrived


def _may_checkpoint_itself(module: nn.Module) -> bool:
    """Whether the module owns parameters and is not torch's own (those never checkpoint)."""
    own = next(module.parameters(recurse=False), None) is not None
    return own and not type(module).__module__.startswith("torch.nn.modules.")


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
