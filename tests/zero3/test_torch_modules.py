"""Torch's own modules, those that read their children's parameters included."""

from __future__ import annotations

import pytest
import torch
from doubles_sharded import Sharded, compare, same
from torch import nn


def step_with(*shape, reduce=lambda out: out):
    def step(model):
        out = reduce(model(torch.randn(shape)))
        loss = out.square().mean()
        loss.backward()
        return loss

    return step


def test_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 2, 3))
    compare(model, step_with(2, 3, 8, 8))


def test_channels_last_keeps_its_strides():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    strides = model[2].weight.stride()

    def step(model):
        loss = model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().mean()
        loss.backward()
        return loss

    sharded = compare(model, step)
    with sharded.lend([1]):
        assert model[2].weight.stride() == strides


def test_lstm():
    compare(nn.LSTM(5, 7, num_layers=2, bidirectional=True), step_with(4, 2, 5, reduce=lambda out: out[0]))


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(training):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(8, 8)

        def forward(self, x):
            return self.out(self.attention(x, x, x)[0])

    sharded = compare(Attention().train(training), step_with(2, 5, 8))
    assert sharded.slots["attention.in_proj_weight"][0] == sharded.slots["attention.out_proj.weight"][0]
    with torch.no_grad():
        assert torch.isfinite(sharded.model(torch.randn(2, 5, 8))).all()


def test_transformer_layers_are_units():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), 3)
    sharded = compare(model, step_with(2, 5, 8), early=True)
    assert len(sharded.divided.units) == 3
    model.eval()
    with torch.no_grad():
        assert torch.isfinite(model(torch.randn(2, 5, 8))).all()


def test_parametrized_weight():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 2))
    reference = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 2))
    reference.load_state_dict(model.state_dict())
    compare(model, step_with(3, 6), reference=reference)


def test_sparse_gradient_becomes_dense():
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
    reference = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 2))
    reference.load_state_dict(model.state_dict())

    def step(model):
        loss = model(torch.randint(0, 20, (3, 4))).square().mean()
        loss.backward()
        return loss

    compare(model, step, reference=reference)


def test_scalar_and_empty_parameters():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x):
            return x * self.scalar + self.empty.sum()

    compare(Odd(), step_with(3, 3))


def test_frozen_parameters_without_elements():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.5))
            # Their place, if they had one, would be behind the end of a unit of four bytes.
            self.empty = nn.Parameter(torch.empty(2, 0), requires_grad=False)
            self.numbers = nn.Parameter(torch.empty(0, dtype=torch.int64), requires_grad=False)

        def forward(self, x):
            return x * self.scalar + self.empty.sum() + self.numbers.sum()

    compare(Odd(), step_with(3, 3))


def test_inner_module_called_directly():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    sharded = Sharded(model)
    out = model.linear1(torch.zeros(1, 8))
    assert same(out.detach()[0], sharded.value("linear1.bias"))
    assert sharded.leased() == []
