"""What `random_training.py` draws: configurations, and what a user does in a few steps with one of `subjects.py`.

Owns the draw of a number, which is the same every time. Does not know how it is carried out. Guarantees
that what is drawn is something the documentation allows: nothing between backward and step where an update under
backward is for good, and no other number of backwards there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tools.subjects import ADAPTED_LATE, FIRST_MODELS, LATER_MODELS, WIDER_MODELS

# What has other random numbers, other units or other statistics in each micro-batch.
_APART = ("dropout", "routed", "normed", "gpt2 dropout", "adapted dropout", "checkpointed dropout")
_BEFORE = ("gradients", "look", "evaluate", "drop", "change_rate", "fail", "overflow")
_BEHIND = ("look", "write", "change_rate", "evaluate", "reload_settings", "commit", "snapshot", "resume", "move")
_SELDOM = ("save", "anew", "another_optimizer")
_WIDER_BEFORE = ("fail_backward", "ask", "gradients", "look")
_WIDER_BEHIND = ("moments", "masters", "reload")
# Draws before this one are of the first kind and stay what they were: some have found something.
WIDER = 1000
LATER = 1_000_000
_LATER_AMID = ("evaluate", "infer", "look", "masters")
_LATER_BEFORE = (
    *("infer", "inputs", "refused", "overflow_in_one", "drop_as_zeros", "settle", "change_settings", "write", "reload"),
    *("masters", "reload_settings"),
)
# What would lose adapters that are ordinary parameters, or take them for ours.
_LOSES_ADAPTERS = ("rewind", "home", "anew", "save", "overflow_in_one", "closure")
_LATER_BEHIND = (
    *("infer", "inputs", "step_again", "settle", "change_settings", "clip_otherwise", "rewind", "rewind", "elsewhere"),
    *("elsewhere", "home", "home", "merge", "closure"),
)


@dataclass(frozen=True)
class Step:
    """One step: how many micro-batches, how they are brought, what is done before and behind `optimizer.step()`.

    order: "": each batch forward and backward; "sum": all forward, then backward from their sum; "row": from each.
    frozen: 0, or from which parameter on every third takes no part in the step. amid: what is done between each forward
    and its backward. mixed: of batches that are together, how many come before, alone. inside: a part is gathered.
    """

    batches: int
    together: bool
    paging: bool
    again: bool
    before: tuple[str, ...]
    behind: tuple[str, ...]
    order: str = ""
    frozen: int = 0
    amid: tuple[str, ...] = ()
    mixed: int = 0
    inside: bool = False


@dataclass(frozen=True)
class Draw:
    """What is done. `room`: how much of what lies between the least budget and all; `scaled`: by a GradScaler.

    adamw: its settings. apart: each group has an optimizer. from_file: deferred, with the values in a file.
    places: directories to swap to. hooked: 0, or from which parameter on every third has a hook that clamps gradients.
    """

    number: int
    model: str
    clip: str
    max_norm: float
    groups: int
    config: dict[str, Any]
    offload: dict[str, Any]
    room: tuple[float, float]
    steps: tuple[Step, ...] = ()
    scaled: bool = False
    adamw: dict[str, Any] = field(default_factory=dict)
    apart: bool = False
    from_file: bool = False
    places: int = 1
    hooked: int = 0


def draw(number: int) -> Draw:
    """The draw of this number."""
    pick = random.Random(number)  # noqa: S311 - one that can be had again
    update, clip = (
        pick.choice(["auto", "auto", "backward", "forward", "step"]),
        pick.choice(["", "", "in step", "by call"]),
    )
    device = pick.choice(["cpu", "simulated", "simulated:up=20MB/s,latency=100us", "simulated:down=20MB/s"])
    keep = pick.choice([None, None, None, "200", "4000"])
    config = {
        "param_dtype": "float32",
        "update": update,
        "device": device,
        "io_backend": pick.choice(["threads", "inline", "aiofiles"]),
        "update_on": pick.choice(["host", "auto"]),
        "block_size": pick.choice([4096, 65536, 8 << 20]),
        "tile_size": pick.choice(["auto", 65536]),
        "look_ahead": pick.choice(["auto", 0, 1 << 20]),
        "commits": pick.random() < 0.7,
        "verify": pick.choice(["resume", "always", "never"]),
        "stage": pick.choice([1, 2, 3, 3]) if device == "cpu" or keep is None else 3,
    }
    for_good = update == "backward" and not clip
    drawn = Draw(
        number,
        pick.choice(sorted(set(FIRST_MODELS) - ({"routed"} if for_good else set()))),
        clip,
        pick.choice([0.01, 0.5, 1e9]),
        pick.choice([1, 1, 2]),
        config,
        {"coalesce": pick.choice([0, 0, "auto", 4096]), "keep": keep},
        (pick.choice([0.0, 0.0, 0.2, 0.6, 1.2, 3.0]), pick.choice([0.0, 0.2, 1.2])),
    )
    count, together = pick.choice([1, 1, 2, 3]), pick.random() < 0.25
    steps = [
        _quiet_step(pick, drawn, count, together=together) if for_good else _step(pick, drawn)
        for _ in range(pick.randint(3, 7))
    ]
    return _with_more(replace(drawn, steps=tuple(steps)))


def _with_more(drawn: Draw) -> Draw:
    """The same, with what was not drawn at first; by other numbers, so that a draw that has found something stays."""
    pick = random.Random(f"{drawn.number} more")  # noqa: S311 - as above
    scaled = drawn.clip != "by call" and drawn.config["update"] != "backward" and pick.random() < 0.3
    steps = list(drawn.steps)
    for number in range(len(steps)) if pick.random() < 0.5 else ():
        if pick.random() < 0.3:
            steps[number] = replace(steps[number], behind=(*steps[number].behind, pick.choice(_SELDOM)))
    drawn = replace(drawn, steps=tuple(steps), scaled=scaled)
    return drawn if drawn.number < WIDER else _wider(drawn)


def _wider(drawn: Draw) -> Draw:
    """The same, with what came still later."""
    pick = random.Random(f"{drawn.number} wider")  # noqa: S311 - as above
    model = pick.choice([*sorted(WIDER_MODELS), *[drawn.model] * 6])
    for_good = drawn.config["update"] == "backward" and not drawn.clip
    order = pick.choice(["", "", "", "sum", "row"])
    steps = []
    for step in drawn.steps:
        together = step.together and model not in _APART
        if not for_good:
            order = pick.choice(["", "", "", "sum", "row"])
        before = [pick.choice(_WIDER_BEFORE)] if not for_good and pick.random() < 0.2 else []
        if model == "reentrant":  # torch refuses there what is asked for
            before = [verb for verb in before if verb != "ask"]
        behind = [pick.choice(_WIDER_BEHIND)] if pick.random() < 0.2 else []
        steps.append(
            replace(
                step,
                together=together,
                again=step.again and not order and model not in ("reentrant", "compiled"),  # torch refuses the latter
                before=(*step.before, *before),
                behind=(*step.behind, *behind),
                order="" if together else order,
                frozen=pick.choice([0, 0, 0, 0, 1, 2]) if model != "reentrant" else 0,
            )
        )
    drawn = replace(
        drawn,
        model=model,
        steps=tuple(steps),
        config=drawn.config | {"queue_depth": pick.choice([1, 2, 8]), "direct": pick.choice(["auto", False])},
        adamw=pick.choice([{}, {"betas": (0.8, 0.9)}, {"eps": 1e-3, "weight_decay": 0.0}, {"betas": (0.0, 0.99)}]),
        apart=drawn.groups == 2 and not drawn.scaled and pick.random() < 0.5,
        from_file=pick.random() < 0.25,
        places=pick.choice([1, 1, 2, 3]),
    )
    return drawn if drawn.number < LATER else _later(drawn)


def _later(drawn: Draw) -> Draw:
    """The same, with what came last."""
    pick = random.Random(f"{drawn.number} later")  # noqa: S311 - as above
    model = pick.choice([*sorted(LATER_MODELS), *[drawn.model] * 6])
    for_good = drawn.config["update"] == "backward" and not drawn.clip
    steps = []
    for step in drawn.steps:
        together = step.together and model not in _APART
        before = [pick.choice(_LATER_BEFORE)] if not for_good and pick.random() < 0.3 else []
        if drawn.apart:  # the other optimizer would not skip
            before = [verb for verb in before if verb != "overflow_in_one"]
        behind = [pick.choice(_LATER_BEHIND)] if pick.random() < 0.3 else []
        steps.append(
            replace(
                step,
                together=together,
                before=(*step.before, *before),
                behind=(*step.behind, *behind),
                amid=(pick.choice(_LATER_AMID),) if pick.random() < 0.15 and not together else (),
                mixed=pick.choice([0, 0, 1]) if together and not for_good else 0,
                inside=min(drawn.room) >= 1.2 and not for_good and pick.random() < 0.15,
            )
        )
    # torch refuses the former
    never = {"reentrant": ("ask", "inputs"), ADAPTED_LATE: _LOSES_ADAPTERS}.get(model, ())
    never = (*never, "closure") if for_good else never  # of one micro-batch
    steps = [
        replace(
            step,
            before=tuple(verb for verb in step.before if verb not in never),
            behind=tuple(verb for verb in step.behind if verb not in never),
        )
        for step in steps
    ]
    return replace(drawn, model=model, steps=tuple(steps), hooked=pick.choice([0, 0, 0, 1, 2]))


def _step(pick: random.Random, drawn: Draw) -> Step:
    together, paging = pick.random() < 0.25 and drawn.model not in _APART, pick.random() < 0.2
    return Step(
        pick.choice([1, 1, 2, 3]),
        together=together,
        paging=paging,
        again=not (paging or together) and drawn.model != "reentrant" and pick.random() < 0.2,
        before=tuple(pick.choice(_BEFORE) for _ in range(pick.choice([0, 0, 0, 1, 2]))),
        behind=_behind(pick, drawn),
    )


def _quiet_step(pick: random.Random, drawn: Draw, count: int, *, together: bool) -> Step:
    """One after which nothing could be taken back."""
    together = together and drawn.model not in _APART
    return Step(count, together, pick.random() < 0.2, again=False, before=(), behind=_behind(pick, drawn))


def _behind(pick: random.Random, drawn: Draw) -> tuple[str, ...]:
    verbs = [pick.choice(_BEHIND) for _ in range(pick.choice([0, 0, 1, 2]))]
    return tuple(verb for verb in verbs if drawn.config["commits"] or verb not in ("commit", "resume"))
