"""The models that `draws.py` draws, small ones with the traits of large ones.

Owns them, and adapters that are put on behind `offload`. Does not know what is done with them. Guarantees that a model
is the same each time it is made behind the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        dtype = base.weight.dtype
        self.first = nn.Parameter(torch.rand(2, base.in_features, dtype=dtype) - 0.5)
        self.second = nn.Parameter(torch.rand(base.out_features, 2, dtype=dtype) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base's result and the adapter's."""
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.first), self.second)  # type: ignore[no-any-return]

    @torch.no_grad()
    def merge(self, factor: float) -> None:
        """Add the adapter, so many times, to the base."""
        self.base.weight += factor * (self.second @ self.first)


def adapt(net: Net, *, whole: bool = True) -> Net:
    """Put adapters on its layers, of which the last is trained if not the whole net is frozen."""
    if whole:
        net.requires_grad_(False)
    for layer in net.layers if whole else net.layers[:-1]:
        layer.up = Adapted(layer.up)
    return net


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
# Of this the adapters are put on behind `offload`, and have an optimizer of torch's.
ADAPTED_LATE = "adapted late"
LATER_MODELS: dict[str, Callable[[], nn.Module]] = {
    ADAPTED_LATE: lambda: Net("checkpointed", frozen=True),
    "adapted": lambda: adapt(Net(frozen=True)),
    "adapted dropout": lambda: adapt(Net(frozen=True, dropout=0.3)),
    "adapted checkpointed": lambda: adapt(Net("checkpointed", frozen=True)),
    "checkpointed dropout": lambda: Net("checkpointed", dropout=0.3),
}
MODELS = FIRST_MODELS | WIDER_MODELS | LATER_MODELS


class Adapters:
    """Put on a model behind `offload`: ordinary parameters, which stay the same when the model is made anew."""

    def __init__(self, model: Net) -> None:
        torch.manual_seed(0)  # deferred models have drawn other numbers
        self._parts = [part for part in adapt(model, whole=False).modules() if isinstance(part, Adapted)]
        self.parameters = [each for part in self._parts for each in (part.first, part.second)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2, fused=True)

    def put_on(self, model: Net) -> None:
        """The same ones."""
        if any(isinstance(part, Adapted) for part in model.modules()):
            return
        adapt(model, whole=False)
        for part, other in zip(
            [each for each in model.modules() if isinstance(each, Adapted)], self._parts, strict=True
        ):
            part.first, part.second = other.first, other.second

    def have(self, parameter: torch.Tensor) -> bool:
        """Whether it is of theirs."""
        return any(parameter is each for each in self.parameters)
