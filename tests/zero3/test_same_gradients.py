"""Gradients are those of the plain model, bit for bit, whatever the model does with its modules."""

from __future__ import annotations

import copy

import pytest
import torch
from doubles_models import CheckpointingBlock, Stack, loss_of, mlp, mlp_step
from doubles_sharded import compare
from torch import nn


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_layers_one_after_another(hold, early):
    sharded = compare(mlp(), mlp_step, steps=3, hold=hold, early=early)
    assert sharded.pager.most_units == 1
    assert sharded.completed == ([2, 1, 0] * 2 if early else [])
    assert sharded.deviations == 0


def test_bfloat16_equals_a_bfloat16_model():
    model = mlp()

    def step(model):
        loss = model(torch.randn(4, 6).bfloat16()).square().sum()
        loss.backward()
        return loss

    compare(model, step, reference=copy.deepcopy(model).bfloat16(), dtype=torch.bfloat16)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("mode", ["plain", "reentrant", "other", "inner"])
def test_tied_embedding_with_and_without_checkpointing(mode, early):
    torch.manual_seed(1)
    sharded = compare(Stack(mode=mode), loss_of, steps=3, early=early)
    assert sharded.gatherer.statistics().lingering == 0
    assert sharded.deviations == 0


def test_checkpoint_without_early_stop():
    torch.manual_seed(1)

    def step(model):
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return loss_of(model)

    compare(Stack(mode="other"), step)


def test_module_used_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.other = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(self.other(torch.tanh(self.layer(x))))

    compare(Twice(), mlp_step, early=True)


def test_frozen_and_unused_parameters():
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)
            self.unused = nn.Linear(6, 6)
            self.b.weight.requires_grad_(False)
            self.index = nn.Parameter(torch.arange(6), requires_grad=False)

        def forward(self, x):
            return self.b(torch.relu(self.a(x))[:, self.index])

    sharded = compare(Some(), mlp_step, early=True)
    unit, _ = sharded.slots["unused.weight"]
    assert sharded.scheduler.gradients.numbers(unit) == ()


def test_gradient_that_comes_in_some_steps_only():
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            chosen = torch.randperm(4)[:2]
            return sum(self.experts[int(number)](x) for number in chosen)

    sharded = compare(Routed(), mlp_step, steps=6, early=True)
    assert sharded.deviations > 0


@pytest.mark.parametrize("hold", [False, True])
def test_several_backwards_accumulate(hold):
    def step(model):
        return mlp_step(model) + mlp_step(model) + mlp_step(model)

    compare(mlp(), step, hold=hold, early=True, steps=3)


def test_forward_twice_before_backward():
    def step(model):
        first, second = model(torch.randn(3, 6)).sum(), model(torch.randn(3, 6)).square().sum()
        second.backward()
        first.backward()
        return first + second

    compare(mlp(), step, early=True, steps=3)


def test_retained_graph():
    def step(model):
        loss = model(torch.randn(3, 6)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    compare(mlp(), step, early=True, steps=3)


def test_gradient_of_a_gradient():
    def step(model):
        x = torch.randn(3, 6, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = slope.square().sum()
        loss.backward()
        return loss

    compare(mlp(), step)


def test_no_grad_evaluation_between_steps():
    def step(model):
        with torch.no_grad():
            before = model(torch.randn(2, 6)).sum()
        loss = mlp_step(model)
        with torch.inference_mode():
            model(torch.randn(2, 6))
        return loss + before

    compare(mlp(), step)


def test_frozen_weight_needed_after_the_last_gradient():
    """The update must not begin while the graph still wants the unit's old values."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below = nn.Linear(6, 6)
            self.layers = nn.ModuleList([nn.ModuleDict({"frozen": nn.Linear(6, 6), "low": nn.Linear(6, 6)})])
            self.layers[0]["frozen"].requires_grad_(False)

        def forward(self, x):
            layer = self.layers[0]
            return layer["low"](layer["frozen"](self.below(x)))

    sharded = compare(Adapter(), mlp_step, early=True, steps=3)
    assert sharded.completed


def test_memory_in_backward_is_one_unit_besides_those_of_the_calls():
    torch.manual_seed(1)
    model = nn.Sequential(*(CheckpointingBlock(12) for _ in range(5)))

    def step(model):
        loss = model(torch.randn(2, 12, requires_grad=True)).square().mean()
        loss.backward()
        return loss

    sharded = compare(model, step, units=["CheckpointingBlock"], early=True)
    assert sharded.pager.most_units == 1
    # Each unit once forward and once backward.
    assert len(sharded.scheduler.order.expected.accesses) == 5 * 3


@pytest.mark.parametrize("early", [False, True])
def test_room_for_a_units_gradients_is_asked_for_before_the_first_of_them(early):
    sharded = compare(mlp(), mlp_step, steps=3, early=early)
    assert [keys[0].unit for keys in sharded.pager.asked_ahead] == [2, 1, 0] * 2  # nobody knows in the first step
    assert all(len(keys) == sharded.layouts[keys[0].unit].tiles for keys in sharded.pager.asked_ahead)


def test_room_for_gradients_that_do_not_come_is_given_back():
    class Detached(nn.Linear):
        detached = False

        def forward(self, values):
            weight, bias = (part.detach() if self.detached else part for part in (self.weight, self.bias))
            return nn.functional.linear(values, weight, bias)

    model = nn.Sequential(*(Detached(6, 6) for _ in range(3)))
    steps = []

    def step(model):
        model[1].detached = len(steps) // 2 == 2  # each step is run twice: plain, and sharded
        steps.append(None)
        return mlp_step(model)

    sharded = compare(model, step, steps=4)
    # In the third step unit 1's do not come; in the fourth they come again, which the third does not let expect.
    assert [keys[0].unit for keys in sharded.pager.asked_ahead] == [2, 1, 0, 2, 1, 2]
