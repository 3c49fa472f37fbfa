"""Small models and training steps shared by tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.norm(self.up(x * self.scale))))


class CheckpointingBlock(Block):
    """As Hugging Face does: the layer's own forward is what is checkpointed."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Stack(nn.Module):
    """Layers in a ModuleList between an embedding and a head that shares its weight."""

    def __init__(self, width: int = 12, depth: int = 3, mode: str = "plain") -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.shift = nn.Parameter(torch.randn(width))
        kind = CheckpointingBlock if mode == "inner" else Block
        self.layers = nn.ModuleList(kind(width) for _ in range(depth))
        self.head = nn.Linear(width, 40)
        self.head.weight = self.embed.weight
        self.mode = mode

    def forward(self, tokens):
        x = self.embed(tokens) + self.shift
        for layer in self.layers:
            if self.mode in ("plain", "inner"):
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
        return self.head(x)


def loss_of(model):
    tokens = torch.randint(0, 40, (2, 5))
    loss = model(tokens).square().mean()
    loss.backward()
    return loss


def small_llama(
    *,
    words: int,
    width: int = 32,
    mlp_width: int = 64,
    layers: int = 3,
    heads: int = 4,
    key_value_heads: int = 2,
    **more: Any,
) -> nn.Module:
    """A Llama of transformers, unmodified; `more` goes to its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": width, "intermediate_size": mlp_width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "vocab_size": words}
    return LlamaForCausalLM(LlamaConfig(**shape, **more))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 50), nn.ReLU(), nn.Linear(50, 3))


def mlp_step(model):
    loss = model(torch.randn(4, 6)).square().sum()
    loss.backward()
    return loss
