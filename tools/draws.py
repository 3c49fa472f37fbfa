"""What `random_training.py` draws: models, configurations, and what a user does in a few steps.

Owns the models and the draw of a number, which is the same every time. Does not know how it is carried out. Guarantees
that what is drawn is something the documentation allows: nothing between backward and step where an update under
backward is for good, and no other number of backwards there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS = 40


class Layer(nn.Module):
    """Reads what it is given several times, and may have layers of its own inside."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, 0, dropout) for _ in range(inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in, rows out."""
        inside = self.norm(x * self.scale)
        for layer in self.layers:
            inside = layer(inside)
        return x + self.dropout(self.down(nn.functional.gelu(self.up(inside))))


class Net(nn.Module):
    """Words, layers, and words again by the same weight; `way`: how layers are called."""

    def __init__(
        self, way: str = "plain", *, inner: int = 0, dropout: float = 0.0, frozen: bool = False, normed: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(Layer(12, inner, dropout) for _ in range(4)).requires_grad_(not frozen)
        self.layers[-1].requires_grad_(True)
        self.norm = nn.BatchNorm1d(7) if normed else nn.Identity()  # over the words of a row
        if way == "shared":
            self.layers[2] = self.layers[0]
        for layer in self.layers if way == "compiled" else ():
            layer.compile(backend="aot_eager")
        self.way = way
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        self.seen += 1
        x = self.norm(self.embed(input_ids))
        for number, layer in enumerate([*self.layers, *self.layers] if self.way == "looped" else self.layers):
            if self.way == "routed" and (int(input_ids[0, 0]) + number) % 3 == 0:
                continue
            if self.way in ("reentrant", "checkpointed"):
                x = checkpoint(layer, x, use_reentrant=self.way == "reentrant")
            else:
                x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _of_transformers(kind: str, head: str = "ForCausalLM", **more: Any) -> Callable[[], nn.Module]:
    names = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}

    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**(names | more))
        return getattr(transformers, kind + head)(config).train()  # type: ignore[no-any-return]

    return make


FIRST_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{way: lambda way=way: Net(way) for way in ("plain", "reentrant", "checkpointed", "routed")},  # type: ignore[misc]
    "nested": lambda: Net(inner=2),
    "frozen": lambda: Net(frozen=True),
    "dropout": lambda: Net(dropout=0.3),
    "llama": _of_transformers("Llama", intermediate_size=24, num_key_value_heads=1),
    "tied llama": _of_transformers("Llama", intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=True),
    "mixtral": _of_transformers("Mixtral", intermediate_size=24, num_key_value_heads=1, num_local_experts=4),
}
WIDER_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{way: lambda way=way: Net(way) for way in ("shared", "looped", "compiled")},  # type: ignore[misc]
    "normed": lambda: Net(normed=True),
    "gpt2": _of_transformers("GPT2", "LMHeadModel", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt2 dropout": _of_transformers("GPT2", "LMHeadModel"),
}
MODELS = FIRST_MODELS | WIDER_MODELS
# What has other random numbers, other units or other statistics in each micro-batch.
_APART = ("dropout", "routed", "normed", "gpt2 dropout")
_BEFORE = ("gradients", "look", "evaluate", "drop", "change_rate", "fail", "overflow")
_BEHIND = ("look", "write", "change_rate", "evaluate", "reload_settings", "commit", "snapshot", "resume", "move")
_SELDOM = ("save", "anew", "another_optimizer")
_WIDER_BEFORE = ("fail_backward", "ask", "gradients", "look")
_WIDER_BEHIND = ("moments", "masters", "reload")
# Draws before this one are of the first kind and stay what they were: some have found something.
WIDER = 1000


@dataclass(frozen=True)
class Step:
    """One step: how many micro-batches, how they are brought, what is done before and behind `optimizer.step()`.

    order: "": each batch forward and backward; "sum": all forward, then backward from their sum; "row": from each.
    frozen: 0, or from which parameter on every third takes no part in the step.
    """

    batches: int
    together: bool
    paging: bool
    again: bool
    before: tuple[str, ...]
    behind: tuple[str, ...]
    order: str = ""
    frozen: int = 0


@dataclass(frozen=True)
class Draw:
    """What is done. `room`: how much of what lies between the least budget and all; `scaled`: by a GradScaler.

    adamw: its settings. apart: each group has an optimizer. from_file: deferred, with the values in a file.
    places: directories to swap to.
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
    return replace(
        drawn,
        model=model,
        steps=tuple(steps),
        config=drawn.config | {"queue_depth": pick.choice([1, 2, 8]), "direct": pick.choice(["auto", False])},
        adamw=pick.choice([{}, {"betas": (0.8, 0.9)}, {"eps": 1e-3, "weight_decay": 0.0}, {"betas": (0.0, 0.99)}]),
        apart=drawn.groups == 2 and not drawn.scaled and pick.random() < 0.5,
        from_file=pick.random() < 0.25,
        places=pick.choice([1, 1, 2, 3]),
    )


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
