"""Generation with an offloaded Llama, and adapters on a frozen base."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from doubles_models import Stack, small_llama
from doubles_pager import save_all
from doubles_training import Trainee, check, config_for, least_budget, offloaded, plain
from torch import nn

import tiermem
from tiermem.pager.page import Kind

MIB = 1 << 20


def llama() -> nn.Module:
    torch.manual_seed(0)
    return small_llama(words=64, width=64, mlp_width=96, layers=6, key_value_heads=4).eval()


@pytest.mark.parametrize("sample", [False, True])
def test_generation_gives_the_same_tokens_and_writes_nothing(sample: bool, tmp_path: Path) -> None:
    model = llama()
    prompt = torch.randint(0, 64, (2, 5))
    how = {"max_new_tokens": 12, "do_sample": sample, "pad_token_id": 0}
    torch.manual_seed(3)
    expected = copy.deepcopy(model).generate(prompt, **how)
    budget = least_budget(model, tmp_path)
    with tiermem.offload(model, config_for(tmp_path, budget, "forward")) as runtime:
        written = runtime.statistics().total.bytes_written
        torch.manual_seed(3)
        assert torch.equal(model.generate(prompt, **how), expected)
        moved = runtime.statistics().total
        assert moved.bytes_read > 0
        assert moved.bytes_written <= written + budget, "only what had never been written down"


class Adapted(nn.Module):
    """Low-rank adaptation of a linear layer (Hu et al., "LoRA", 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapted() -> Stack:
    model = Stack(width=32)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    return model


def train_adapters(trainee: Trainee) -> None:
    trained = [parameter for parameter in trainee.model.parameters() if parameter.requires_grad]
    optimizer = trainee.adamw(trained, lr=1e-2)
    for _ in range(4):
        loss = trainee.model(torch.randint(0, 40, (2, 5))).square().mean()
        loss.backward()
        trainee.note(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("update", ["forward", "step"])
def test_adapters_on_a_frozen_base(update: str, tmp_path: Path) -> None:
    check(offloaded(adapted, train_adapters, tmp_path, update=update, budget="tight"), plain(adapted, train_adapters))


def test_only_adapters_have_state_and_frozen_units_are_not_written_again(tmp_path: Path) -> None:
    model = adapted()
    wanted = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding, Adapted))]
    with tiermem.offload(model, config_for(tmp_path, 96 << 10, "step"), units=wanted) as runtime:
        house = runtime._house
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        in_states = sum(state.numel for state in house.states._units.values())
        assert trained <= in_states < 2 * trained
        frozen = {layout.key for layout in house.layouts if not layout.trainable}
        assert frozen
        save_all(house.storage.pager)
        generations = {key: house.storage.extents.generations.current(key) for key in frozen}
        train_adapters(Trainee(model, tiermem.AdamW, runtime.gradient))
        save_all(house.storage.pager)
        assert {key: house.storage.extents.generations.current(key) for key in frozen} == generations
        assert not any(key.kind is not Kind.PARAM for key in frozen)


@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it meets in torch itself
def test_layers_compiled_ahead_of_time_have_the_bits_of_plain_ones_that_break_at_the_same_places(
    tmp_path: Path,
) -> None:
    """The gradients of what is used three times are added up in the order that a graph has, and here there are more."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = small_llama(words=40, width=16, mlp_width=24, layers=1)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        return model

    def broken() -> nn.Module:
        model = make()
        nothing = torch.compiler.disable(lambda *_: None)
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(nothing)
                module.register_forward_hook(nothing)
        return model

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        rows = torch.randint(0, 40, (2, 6))
        trainee.model(rows, labels=rows).loss.backward()
        trainee.note_gradients()
        optimizer.step()

    try:
        found = offloaded(make, script, tmp_path, update="forward", budget="tight")
        torch._dynamo.reset()
        check(found, plain(broken, script))
    finally:
        torch._dynamo.reset()
