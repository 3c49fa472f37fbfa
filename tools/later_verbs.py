"""Verbs of a training loop that were drawn last: what is done amid a step, and ways of going on elsewhere.

Owns what they do and what of it is noted, in plain PyTorch (`runtime` is None) and offloaded. Does not know which of
them are drawn where. Guarantees that both trainees see the same batches, and that what is to be refused was.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import tiermem
from tools.subjects import Adapted
from tools.verbs import bring, drop, update, zero_grad

if TYPE_CHECKING:
    from tools.trainees import Plain


def infer(trainee: Plain) -> None:
    """Bring a batch forward in inference mode."""
    with torch.inference_mode():
        trainee.note("inference", trainee.loss(trainee.batch()))


def inputs(trainee: Plain) -> None:
    """Have the gradient of what a layer was given, and of nothing else."""
    seen: list[torch.Tensor] = []
    layer = next(module for name, module in trainee.model.named_modules() if name.endswith(("layers.1", "h.1")))
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]) if given else None)
    try:
        loss = trainee.loss(trainee.batch())
    finally:
        handle.remove()
    asked = [each for each in seen if each.requires_grad][:1]
    for gradient in torch.autograd.grad(loss, asked, allow_unused=True) if asked else ():
        trainee.note("gradient of a layer's input", gradient)


def refused(trainee: Plain) -> None:
    """Ask for what can only be had between steps."""
    runtime = trainee.runtime
    if runtime is None:
        return
    folder = Path("never made")
    asked: list[Callable[[], Any]] = [
        runtime.commit,
        *(each.full_state_dict for each in trainee.optimizers if each.state_dict()["state"]),
    ]
    for ask in (*asked, lambda: runtime.snapshot(folder), lambda: runtime.save_pretrained(folder)):
        try:
            ask()
        except tiermem.TiermemError:
            continue
        raise RuntimeError("something was not refused between backward and step")


def overflow_in_one(trainee: Plain) -> None:
    """Go backward once more, with a gradient of one parameter that is not finite."""
    asked = [each for each in trainee.model.parameters() if each.requires_grad]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        trainee.skips = True
        return torch.full_like(gradient, float("nan"))

    handle = asked[trainee.draw.number % len(asked)].register_hook(spoil)
    try:
        trainee.loss(trainee.batch()).backward()  # type: ignore[no-untyped-call]
    finally:
        handle.remove()


def drop_as_zeros(trainee: Plain) -> None:
    """Forget the gradients and leave zeros, as ours then does not; and bring others."""
    for optimizer in trainee.optimizers if trainee.runtime is not None else ():
        optimizer.zero_grad(set_to_none=False)
    drop(trainee)


def step_again(trainee: Plain) -> None:
    """Step without gradients."""
    for optimizer in trainee.optimizers:
        optimizer.step()


def settle(trainee: Plain) -> None:
    """Wait for what is pending, and ask what has happened."""
    if trainee.runtime is not None:
        trainee.runtime.settle()
        trainee.runtime.statistics()
        trainee.runtime.timeline()


def change_settings(trainee: Plain) -> None:
    """Set other betas, another eps and another decay."""
    for optimizer in trainee.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            group.update(betas=(0.7, 0.95), eps=1e-5 * (number + 1), weight_decay=0.5 * group["weight_decay"])


def clip_otherwise(trainee: Plain) -> None:
    """Clip by another norm, or, where that does not make updates final, no more; and back."""
    norms: list[float | None] = [trainee.draw.max_norm, 0.02, 1e8]
    norms += [None] if trainee.draw.config["update"] != "backward" else []
    trainee.max_norm = norms[(norms.index(trainee.max_norm) + 1) % len(norms)] if trainee.draw.clip else None
    for optimizer in trainee.optimizers if trainee.draw.clip == "in step" else ():
        optimizer.max_grad_norm = trainee.max_norm


def closure(trainee: Plain) -> None:
    """One more step, whose forward and backward are in a closure."""

    def compute() -> torch.Tensor:
        zero_grad(trainee)
        loss = trainee.loss(trainee.batch())
        loss.backward()  # type: ignore[no-untyped-call]
        trainee.note("loss in a closure", loss)
        return loss

    trainee.skips = False
    if trainee.draw.clip or trainee.draw.scaled or len(trainee.optimizers) > 1:
        compute()
        update(trainee)
    else:
        trainee.note("what step returns", trainee.optimizers[0].step(compute))
        zero_grad(trainee)


def rewind(trainee: Plain) -> None:
    """Keep the step, train on, and go back to what was kept."""
    extra: Any = {
        "generator": trainee.generator.get_state(),
        "scaler": trainee.scaler.state_dict(),
        "some": [1, None, "b"],
    }
    go_back = _keep(trainee) if trainee.runtime is None else _keep_offloaded(trainee, extra)
    for _ in range(1 + trainee.draw.number % 2):
        trainee.skips = False
        bring(trainee, trainee.step.batches)
        update(trainee)
    extra = go_back() or extra
    trainee.generator.set_state(extra["generator"])
    trainee.scaler.load_state_dict(extra["scaler"])


def _keep(trainee: Plain) -> Callable[[], Any]:
    settings = [each.state_dict() for each in trainee.optimizers]
    values, settings = copy.deepcopy((trainee.model.state_dict(), settings))
    random_state = torch.get_rng_state()

    def go_back() -> None:
        trainee.model.load_state_dict(values)
        for optimizer, its in zip(trainee.optimizers, settings, strict=True):
            optimizer.load_state_dict(its)
        torch.set_rng_state(random_state)

    return go_back


def _keep_offloaded(trainee: Any, extra: Any) -> Callable[[], Any]:
    number, path = trainee.draw.number, trainee.free("rewind")
    commits = trainee.draw.config["commits"] and number % 3
    pending = trainee.runtime.commit(extra) if commits else trainee.runtime.snapshot(path, extra)
    dies = bool(commits) and number % 4 == 1 and not dist.is_initialized()
    if number % 2:
        pending.wait()

    def go_back() -> Any:
        pending.wait()
        trainee.go_on(None if commits else path, died=dies)
        for index, optimizer in enumerate(trainee.optimizers):
            optimizer.load_state_dict(trainee.runtime.committed_optimizer_state(index))
        if trainee.runtime.committed["some"] != [1, None, "b"]:
            raise RuntimeError(f"committed beside the step: {trainee.runtime.committed}")
        return trainee.runtime.committed

    return go_back


def elsewhere(trainee: Any) -> None:
    """Keep the step, and go on from there with other settings."""
    if trainee.runtime is None:
        return
    drawn, path = trainee.draw, trainee.free("elsewhere")
    pick = random.Random(f"{drawn.number} {path.name}")  # noqa: S311 - one that can be had again
    late = drawn.config["update"] != "backward"  # so much else may be done between backward and step
    config = drawn.config | {
        "update": pick.choice(["auto", "forward", "step", *([] if late else ["backward"])]),
        "block_size": pick.choice([4096, 65536, 8 << 20]),
        "io_backend": pick.choice(["threads", "inline", "aiofiles"]),
        "look_ahead": pick.choice(["auto", 0, 1 << 20]),
        "verify": pick.choice(["resume", "always", "never"]),
        "update_on": pick.choice(["host", "auto"]),
        "tile_size": pick.choice(["auto", 65536, 100000]),
    }
    offload, places = drawn.offload, drawn.places
    resumes = config["commits"] and pick.random() < 0.5
    if not resumes:
        offload = offload | {"coalesce": pick.choice([0, "auto", 4096])}
        places = pick.choice([1, 2, 3])
    (trainee.runtime.commit() if resumes else trainee.runtime.snapshot(path)).wait()
    more = pick.choice([1, 3])
    trainee.budgets = {name: more * nbytes for name, nbytes in trainee.budgets.items()}
    trainee.draw = replace(drawn, config=config, offload=offload, places=places)
    trainee.go_on(None if resumes else path)


def home(trainee: Plain) -> None:
    """Go on in plain PyTorch for a step, and come back."""
    if trainee.draw.scaled and trainee.draw.config["param_dtype"] == "float16":  # torch refuses to unscale these
        return
    trainee.skips = False
    trainee.home()


def merge(trainee: Plain) -> None:
    """Merge the adapters into the base, evaluate, and take them out again."""
    parts = [part for part in trainee.model.modules() if isinstance(part, Adapted)]
    for factor in (1.0, -1.0):
        for part in parts:
            with trainee.lent(part):
                part.merge(factor)
        infer(trainee)


LATER_VERBS: dict[str, Callable[[Plain], None]] = {
    each.__name__: each
    for each in (
        *(infer, inputs, refused, overflow_in_one, drop_as_zeros, step_again, settle, change_settings),
        *(clip_otherwise, closure, rewind, elsewhere, home, merge),
    )
}
