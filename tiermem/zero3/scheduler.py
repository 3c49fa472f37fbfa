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

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.errors import TiermemError
from tiermem.process import HomeProcess
from tiermem.zero3.between import Held
from tiermem.zero3.borrow import Borrowing
from tiermem.zero3.calls import Call, CallStack, Turn
from tiermem.zero3.cuts import Arguments
from tiermem.zero3.engine import backward_number, call_at_backward_end, is_transformed
from tiermem.zero3.gather import Gatherer, Presence
from tiermem.zero3.guards import all_gathered
from tiermem.zero3.handles import SavedTensorHooks
from tiermem.zero3.hooks import AfterCall, BeforeCall, LastHook, OutputHook, may_checkpoint_itself, watch_gradient
from tiermem.zero3.late import late_gradient, look_at_updated
from tiermem.zero3.lockstep import Lockstep
from tiermem.zero3.neighbours import Gradients, Listener
from tiermem.zero3.order import OrderRecorder, Phase
from tiermem.zero3.registered import RegisteredParameters
from tiermem.zero3.units import HookPoint, ModelUnits


class GatherScheduler:
    """Hooks a divided model.

    Attributes:
        gradients: which parameters have gradients in this step.
        order: which units were used, in which order.
        saved: what keeps handles in the graph.
        lockstep: set while several computations go through the model together.
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
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        """`parameters`: by number. `follow()`: see `Device`. `early`: announce complete units during backward; later
        gradients are errors then, unless the listener undoes what it did."""
        self._gatherer = gatherer
        self.gradients = gradients
        self._listener = listener
        self._early = early
        self.order = OrderRecorder(gradients.apart, alone=gradients.alone, holds=gradients.holds)
        self.saved = SavedTensorHooks(len(divided.units), gatherer.frames, gatherer.slots, self._demand)
        self.stack = CallStack(HomeProcess(), Turn(follow))
        borrowing = Borrowing(gatherer.slots, self.stack, self._before_call, self._after_call)
        gatherer.absence.answer = borrowing.answer
        self.lockstep: Lockstep | None = None
        self._held = Held(divided, gatherer)
        # Units with a gradient in this step; True once an update has taken them.
        self._touched: dict[int, bool] = {}
        # Backwards that have come to a unit, and one that failed since the model was last at rest.
        self.backwards: set[int] = set()
        self._hooks: list[RemovableHandle | LastHook] = []
        self._install(divided, parameters)

    def let_go_between(self) -> None:
        """Let go of a unit that no call uses and the next one might: somebody else wants it."""
        self.stack.follow()
        self._held.between.end()

    def settle(self) -> None:
        """Let go of everything outside the calls in progress: before an update, and whenever the model is at rest.

        Also removes what an interrupt or a failed backward left behind, hence not to be called from inside a forward.
        """
        while self.stack.calls:
            self._finish(self.stack.end())
        self.saved.leave_rest()
        self.backwards.clear()
        self.let_go_between()
        self._release_backward()
        self._gatherer.forget_calls()
        self.gradients.release()
        self._gatherer.source.give_up()
        self._gatherer.recheck()

    def finish_step(self, *, updated: bool = True) -> None:
        """Begin a new step: the gradients have been taken over. `updated`: parameters with gradients change value."""
        self.settle()
        for unit in self._touched if updated else ():
            self.saved.values_changed(self.gradients.numbers(unit))
        self._touched.clear()
        self.gradients.reset()
        self.order.finish()

    def drop_gradients(self) -> None:
        """Forget the gradients of this step. Raises TiermemError if an update has already begun to use them."""
        if any(self._touched.values()):
            raise TiermemError(
                "gradients were dropped (zero_grad) before optimizer.step(), but some units are already being updated; "
                'use update="forward" to drop gradients'
            )
        self.stack.follow()  # a backward that has failed has left its stream behind
        self._touched.clear()
        self.gradients.drop()
        self.order.begin_again()

    def forget(self, parameters: Sequence[int], *, updated: bool = False) -> None:
        """Forget these parameters' gradients while the step goes on for others. `updated`: their values change."""
        self.settle()
        if updated:
            self.saved.values_changed(parameters)
        self.gradients.forget(parameters, taken=updated)
        for unit in [unit for unit in self._touched if not self.gradients.numbers(unit)]:
            del self._touched[unit]

    def take_back(self, units: Iterable[int]) -> None:
        """The updates of these units were undone: more gradients may come, and graphs on the new values are stale."""
        for unit in units:
            self.saved.values_changed(self.gradients.trainable(unit))
            self._touched[unit] = False

    def close(self) -> None:
        """Remove all hooks and leases. The parameters stay placeholders (see `lend.copies`)."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            self.settle()
        except BaseException:
            self.settle()  # what the error has kept it from
            raise
        finally:
            self._gatherer.absence.close()

    def _install(self, divided: ModelUnits, parameters: Sequence[nn.Parameter]) -> None:
        there = all_gathered(divided, self._gatherer)
        registered = RegisteredParameters(divided, parameters)

        def before_call(module: nn.Module, units: tuple[int, ...], *arguments: Any) -> Arguments | None:
            registered.check(module)
            self._before_call(module, units)
            return None if self.lockstep is None else self.lockstep.enter(self.stack.calls[-1], *arguments)

        def kept_back(parameter: torch.Tensor) -> bool:
            return self.lockstep is not None and self.lockstep.keeps_back(parameter)

        points = divided.points
        if not any(point.module is divided.model for point in points):  # its call, too, has a beginning and an end
            points = (HookPoint(divided.model, ()), *points)
        for point in points:
            module = point.module
            # First in and last out: the hooks of others see gathered parameters.
            last = LastHook(module, AfterCall(self._after_call, there))
            before = BeforeCall(before_call, point.units, last, there)
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(last)
            if may_checkpoint_itself(module):
                self._hooks.append(module.register_forward_hook(OutputHook(self._demand, point.units, there)))
        for unit, member in divided.members():
            parameter = parameters[member.number]
            if parameter.requires_grad:
                self._hooks.append(watch_gradient(parameter, self._gradient_arrived, unit, member.number, kept_back))

    def _before_call(self, module: nn.Module | None, units: tuple[int, ...], read: Iterable[nn.Parameter] = ()) -> None:
        """A module, or an operation (None) that reads these of others, is about to run."""
        self.stack.home.check()
        if is_transformed():
            raise TiermemError(
                "an offloaded model was called inside torch.func.grad, vjp, jvp or another of its kind; they know "
                "no saved-tensor hooks; use loss.backward() or torch.autograd.grad instead"
            )
        outermost = not self.stack.calls
        backward = backward_number() >= 0
        shared = self.lockstep is not None or backward
        call = self.stack.begin(module, shared=shared)  # first: the after-hook runs even if what follows raises
        if outermost and self._held and not backward:
            self._release_backward()  # left by a backward that failed
        for unit in units:
            if backward and unit not in self._held:
                self._release_backward(keep=unit)  # before it is brought: there may be no room for both
                if self.lockstep is not None:
                    self.lockstep.make_way(unit)
            self._bring(unit, Phase.FORWARD)
            self._gatherer.hold(unit)
            call.units.append(unit)
            # Of micro-batches that go through together checkpoints compute again what nobody reads then.
            if self._touched.get(unit) and self.lockstep is None and (backward or not torch.is_grad_enabled()):
                parameters = module.parameters() if module is not None else read
                look_at_updated(parameters, self.gradients.numbers(unit), self._gatherer.slots, backward=backward)
        if torch.is_grad_enabled():
            call.pushed = self.saved.enter(beside_others=module is None)

    def _after_call(self, module: nn.Module | None) -> None:
        if not any(call.module is module for call in self.stack.calls):
            return  # a hook of somebody else raised before the entry was made
        while True:
            call = self.stack.end()
            self._finish(call)
            if call.module is module:
                break
        self._held.between.after(module)

    def _finish(self, call: Call) -> None:
        if self.lockstep is not None:
            self.lockstep.leave(call)
        with ExitStack() as last:  # every unit is let go of, whatever happens to the others
            for unit in call.units:
                last.callback(self._let_go, unit)
            if call.pushed:
                last.callback(self.saved.leave)

    def _let_go(self, unit: int) -> None:
        if self._gatherer.unhold(unit) or unit in self._held:
            return
        if backward_number() >= 0:
            # Recomputed for backward, which is about to use it: fetching it again would be a waste.
            self._watch_backward()
            self._release_backward(keep=unit)
            self._held[unit] = None
        elif not self._held.between.take(unit) and not self._gatherer.reshard(unit):
            self._gatherer.count_leaks()

    def _bring(self, unit: int, phase: Phase) -> torch.Tensor:
        """Gather a unit for a call or for backward; waits."""
        if self.lockstep is not None:
            self.lockstep.turn(unit)
        self._held.between.end(keep=unit)
        if self._gatherer.presence(unit) is Presence.SHARDED:
            self._gatherer.recheck()
            self.gradients.catch_up(unit)
            self._listener.unit_needed(unit)
            self.order.access(unit, phase, gradless=phase is Phase.FORWARD and self.stack.gradless)
            base = self._gatherer.gather(unit)
            self.gradients.expect(self.order.upcoming_gradients())
            following = self.order.upcoming()
            if following is not None:
                self.gradients.catch_up(following)
                if self._touched.get(following):
                    self._listener.unit_needed(following)  # fetched with the values it has before the step
                self._gatherer.start(following)
        else:
            base = self._gatherer.gather(unit)
        if self.lockstep is not None:
            self.lockstep.arrived(unit)
        return base

    def _demand(self, unit: int) -> torch.Tensor:
        """Gather a unit because the graph needs its values now."""
        self._watch_backward()
        if unit not in self._held:
            self._release_backward(keep=unit)
        if self._gatherer.holds(unit) == 0:
            self._held[unit] = None
        return self._bring(unit, Phase.BACKWARD)

    def _release_backward(self, keep: int | None = None) -> None:
        """Reshard what backward holds. A unit that a node of the graph is just using lingers, and is rechecked."""
        self.stack.follow()
        for unit in self._held.without(keep):
            del self._held[unit]
            if self._gatherer.holds(unit) == 0:
                self._gatherer.reshard(unit)

    def _watch_backward(self) -> None:
        """Have the end of the running backward noticed. A nested backward has its own end, which harms nobody."""
        self.stack.follow()
        number = backward_number()
        if number >= 0 and number not in self.backwards:
            self.backwards.add(number)
            call_at_backward_end(lambda: self._backward_ended(number))

    def _backward_ended(self, number: int) -> None:
        self._release_backward()
        self.gradients.backward_ended(together=self.lockstep is not None)
        self._gatherer.recheck()
        self._gatherer.count_leaks()
        # In lockstep a unit is still held for others here, beside which an update that is waited for may find no room.
        for unit in tuple(self._touched) if self._early and self.lockstep is None else ():
            self.announce(unit)
        self.backwards.discard(number)

    def _gradient_arrived(self, unit: int, parameter: int) -> int:
        self._watch_backward()
        self.gradients.catch_up(unit)
        if self._touched.get(unit):
            self._listener.unit_needed(unit)  # may have the update undone
        if self._touched.get(unit):
            raise late_gradient(parameter, self._gatherer.slots)
        if unit not in self._touched:
            self._listener.unit_needed(unit)
            self._touched[unit] = False
        self.order.gradient(unit, parameter)
        self.gradients.accumulate(parameter, more=self.order.more_after(parameter), together=self.lockstep is not None)
        count = self.order.contribution(parameter)
        if self.order.all_arrived(self.gradients.trainable(unit)):
            self.announce(unit)
            for late in self._listener.known_since() if self._early else ():
                self.announce(late)
            self.gradients.release(unit)
            self.gradients.expect(self.order.upcoming_gradients())
        elif self.lockstep is None and self.order.batch_arrived(unit, self.gradients.trainable(unit)):
            self.gradients.batch_complete(unit)
            self.gradients.expect(self.order.upcoming_gradients())
        return count

    def announce(self, unit: int) -> None:
        """Tell the listener that the unit is complete, if it is and nothing can need its present values any more.

        As long as a graph holds handles on the unit, a node may still ask for its values, or bring another gradient:
        a second forward, a retained graph, an expert that has not had its turn.
        """
        if not self._early or self._touched.get(unit, True):
            return
        if not self.order.all_arrived(self.gradients.trainable(unit)) or self.gradients.are_thawed(unit):
            return
        if self.saved.outstanding(unit) or self._gatherer.holds(unit):
            return
        if self.lockstep is not None and self.lockstep.keeps_one:
            return  # an update that is waited for may find no room beside it; lockstep comes again

        def take(unit: int) -> None:
            """All ranks have all gradients of the unit: an update may take them, unless its values are wanted again."""
            wanted = self._gatherer.source.ahead == unit or self._gatherer.presence(unit) is not Presence.SHARDED
            if not wanted and not self._touched.get(unit, True):
                self._touched[unit] = self._listener.gradients_complete(unit)

        if unit in self.gradients.apart:
            self._held.pop(unit, None)  # its update is small, and the unit around it is about to be used again
        else:
            self._release_backward()  # what has no gradients, too: no room is planned for it beside this one's update
        if self._gatherer.reshard(unit) and self._listener.may_update(unit):
            self.gradients.complete(unit, take)
