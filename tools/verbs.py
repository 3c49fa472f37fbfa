"""The verbs of a training loop that `draws.py` draws, each for both trainees.

Owns what a verb does and what of it is noted. Does not know which trainee it is given: where plain PyTorch and an
offloaded model are handled differently, the trainee has a method for it. Guarantees that both see the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tools.subjects import Adapted

if TYPE_CHECKING:
    from tools.trainees import Plain


def bring(trainee: Plain, count: int) -> None:
    """Bring so many micro-batches forward and backward."""
    batches = [trainee.batch() for _ in range(count)]
    if trainee.step.together:
        alone = batches[: trainee.step.mixed]
        losses = one_by_one(trainee, alone) + (trainee.together(batches[len(alone) :]) if batches[len(alone) :] else [])
    else:
        losses = in_a_row(trainee, batches) if trainee.step.order else one_by_one(trainee, batches)
    for loss in losses:
        trainee.note("loss", loss)


def one_by_one(trainee: Plain, batches: list[Any]) -> list[torch.Tensor]:
    """Each forward and backward, perhaps backward twice."""
    losses = []
    for batch in batches:
        with trainee.paging() if trainee.step.paging else nullcontext():
            loss = trainee.loss(batch)
        for verb in trainee.step.amid:
            trainee.carry_out(verb)
        loss.backward(retain_graph=trainee.step.again)  # type: ignore[no-untyped-call]
        if trainee.step.again:
            (loss * 0.5).backward()  # type: ignore[no-untyped-call]
        losses.append(loss)
    return losses


def in_a_row(trainee: Plain, batches: list[Any]) -> list[torch.Tensor]:
    """All of them forward, then backward from their sum, or from one after the other."""
    with trainee.paging() if trainee.step.paging else nullcontext():
        losses = [trainee.loss(batch) for batch in batches]
    for loss in [torch.stack(losses).sum()] if trainee.step.order == "sum" else losses:
        loss.backward()  # type: ignore[no-untyped-call]
    return losses


def update(trainee: Plain) -> None:
    """Step with every optimizer; gradients that are not finite skip it."""
    for optimizer in trainee.optimizers:
        trainee.update_by(optimizer)
    if trainee.adapters is not None and (trainee.draw.scaled or not trainee.skips):
        trainee.scaler.step(trainee.adapters.optimizer)
    if trainee.draw.scaled:
        trainee.scaler.update()
    zero_grad(trainee)


def zero_grad(trainee: Plain) -> None:
    """Forget all gradients."""
    for optimizer in trainee.optimizers:
        optimizer.zero_grad()
    if trainee.adapters is not None:
        trainee.adapters.optimizer.zero_grad()


def gradients(trainee: Plain) -> None:
    """Look at all gradients."""
    for name, parameter in trainee.model.named_parameters():
        trainee.note(f"gradient of {name}", trainee.gradient_of(parameter))


def look(trainee: Plain) -> None:
    """Look at all values."""
    for name, parameter in trainee.model.named_parameters():
        trainee.note(name, trainee.value_of(parameter))


def evaluate(trainee: Plain) -> None:
    """Bring a batch forward without gradients."""
    trainee.model.eval()
    with torch.no_grad():
        trainee.note("evaluation", trainee.loss(trainee.batch()))
    trainee.model.train()


def drop(trainee: Plain) -> None:
    """Forget the gradients, and bring others."""
    zero_grad(trainee)
    trainee.skips = False
    bring(trainee, 1 + trainee.draw.number % 2)


def change_rate(trainee: Plain) -> None:
    """Set another learning rate."""
    for optimizer in trainee.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.7


def fail(trainee: Plain) -> None:
    """Bring a batch to an error in a module."""
    hook = some_module(trainee).register_forward_pre_hook(_refuse)
    try:
        trainee.loss(trainee.batch())
    except KeyError:
        trainee.note("failed", None)
    finally:
        hook.remove()


def fail_backward(trainee: Plain) -> None:
    """Bring a batch to an error in backward, and begin the step anew."""

    def with_refusal(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(_refuse)

    hook = some_module(trainee).register_forward_hook(with_refusal)
    try:
        trainee.loss(trainee.batch()).backward()  # type: ignore[no-untyped-call]
    except KeyError:
        trainee.note("failed", None)
    finally:
        hook.remove()
    drop(trainee)


def ask(trainee: Plain) -> None:
    """Have some gradients for oneself."""
    asked = [each for each in trainee.model.parameters() if each.requires_grad][trainee.draw.number % 3 :: 3]
    for gradient in torch.autograd.grad(trainee.loss(trainee.batch()), asked, allow_unused=True):
        trainee.note("asked", gradient)


def overflow(trainee: Plain) -> None:
    """Go backward once more, with gradients that are not finite."""
    (trainee.loss(trainee.batch()) * float("inf")).backward()  # type: ignore[no-untyped-call]
    trainee.skips = True


def write(trainee: Plain) -> None:
    """Change a parameter by hand."""
    parameters = list(trainee.model.parameters())
    parameter = parameters[trainee.draw.number % len(parameters)]
    late = trainee.adapters is not None and trainee.adapters.have(parameter)
    with nullcontext() if late else trainee.lent(parameter), torch.no_grad():
        parameter.mul_(0.9)


def reload_settings(trainee: Plain) -> None:
    """Take the optimizer's state out, and put it in again."""
    for optimizer in trainee.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def moments(trainee: Plain) -> None:
    """Look at all moments and step counts, and put them in again."""
    for optimizer in trainee.optimizers:
        full = trainee.moments_of(optimizer)
        done = {
            number: state for number, state in full["state"].items() if float(state["step"])
        }  # scaled, torch begins at 0
        for number, state in sorted(done.items()):
            for what in ("step", "exp_avg", "exp_avg_sq"):
                trainee.note(f"{what} {number}", state[what])
        optimizer.load_state_dict(full)


def masters(trainee: Plain) -> None:
    """Look at all values as they are updated."""
    for name, parameter in trainee.model.named_parameters():
        trainee.note(f"master of {name}", trainee.master_of(parameter))


def reload(trainee: Plain) -> None:
    """Take a part's state out, and put another in."""
    part = some_module(trainee)
    with trainee.lent(part):
        state = part.state_dict()
        part.load_state_dict({name: value * 0.9 for name, value in state.items()})
        for name, value in part.state_dict().items():
            trainee.note(f"reloaded {name}", value)


def save(trainee: Plain) -> None:
    """Save the model, and look at what is in the files."""
    found = trainee.saved()
    for name, _ in (*trainee.model.named_parameters(), *trainee.model.named_buffers()):
        trainee.note(f"saved {name}", found.get(name))


def some_module(trainee: Plain) -> nn.Module:
    """One that has parameters."""
    modules = [module for module in trainee.model.modules() if list(module.parameters(recurse=False))]
    modules = [module for module in modules if trainee.adapters is None or not isinstance(module, Adapted)]
    return modules[trainee.draw.number % len(modules)]


def _refuse(*_: Any) -> None:
    raise KeyError("on purpose")


VERBS: dict[str, Callable[[Plain], None]] = {
    **{each.__name__: each for each in (gradients, look, evaluate, drop, change_rate, fail, overflow, write)},
    **{each.__name__: each for each in (fail_backward, ask, reload_settings, moments, masters, reload, save)},
    "anew": lambda trainee: trainee.anew(),
    "another_optimizer": lambda trainee: trainee.another_optimizer(),
    **{how: lambda trainee, how=how: trainee.keep(how) for how in ("commit", "snapshot", "resume", "move")},
}
