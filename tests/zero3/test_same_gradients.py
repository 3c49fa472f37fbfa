"""Gradients are those of the plain model, bit for bit, whatever the model does with its modules."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from doubles_sharded import Sharded, check_gradients, compare, run, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiermem.errors import TiermemError


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


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 50), nn.ReLU(), nn.Linear(50, 3))


def mlp_step(model):
    loss = model(torch.randn(4, 6)).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_layers_one_after_another(hold, early):
    sharded = compare(mlp(), mlp_step, steps=3, hold=hold, early=early)
    assert sharded.pager.most_units == 1
    assert sharded.completed == ([2, 1, 0] * 2 if early else [])
    assert sharded.scheduler.order.deviations == 0


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
    assert sharded.scheduler.order.deviations == 0


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
    assert sharded.scheduler.order.deviations > 0


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


@pytest.mark.parametrize("mode", ["plain", "reentrant", "other", "inner"])
def test_exception_in_the_middle_of_forward(mode):
    torch.manual_seed(1)
    model = Stack(mode=mode)
    plain = copy.deepcopy(model)
    sharded = Sharded(model)

    def fail(*_):
        raise ArithmeticError("on purpose")

    hook = model.layers[1].norm.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model)
    assert sharded.leased() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    hook.remove()
    run(plain, loss_of, 3)
    run(model, loss_of, 3)
    check_gradients(sharded, plain)


def test_interrupt_that_no_hook_sees():
    model = mlp()
    plain = copy.deepcopy(model)
    sharded = Sharded(model)

    def fail(*_):
        raise KeyboardInterrupt

    hook = model[2].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        mlp_step(model)
    hook.remove()
    sharded.scheduler.settle()
    assert sharded.leased() == []
    run(plain, mlp_step, 3)
    run(model, mlp_step, 3)
    check_gradients(sharded, plain)


def test_exception_in_the_middle_of_backward():
    model = mlp()
    sharded = Sharded(model)

    def fail(_):
        raise ArithmeticError("on purpose")

    x = model[:3](torch.randn(2, 6))
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model[3:](x).sum().backward()
    sharded.scheduler.drop_gradients()
    plain_model = mlp()
    with sharded.lend(range(3)):
        plain_model.load_state_dict(model.state_dict())
    run(plain_model, mlp_step, 3)
    run(model, mlp_step, 3)
    check_gradients(sharded, plain_model)
    assert sharded.leased() == []


def test_hooks_of_others_see_every_tensor_but_the_parameters():
    seen = []

    def pack(tensor):
        seen.append(tuple(tensor.shape))
        return tensor

    model = nn.Linear(6, 3)
    Sharded(model)
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    assert seen == [(4, 6)]
    out.sum().backward()
    assert x.grad is not None


def test_checkpoint_around_a_layer_still_frees_its_activations():
    model = nn.Sequential(nn.Linear(6, 50), nn.LayerNorm(50), nn.Linear(50, 6))
    Sharded(model, units=[model])
    seen = []
    model[1].register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out)))
    out = checkpoint(model, torch.randn(3, 6, requires_grad=True), use_reentrant=False)
    assert seen[0]() is None
    out.sum().backward()


def test_checkpoint_inside_a_layer_still_frees_its_activations():
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 6))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Inside()
    Sharded(model, units=[model])
    seen = []
    model.inner[0].register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out.untyped_storage())))
    out = model(torch.randn(3, 6, requires_grad=True))
    assert seen[0]() is None
    out.sum().backward()


def test_saved_tensor_changed_in_place_is_still_refused():
    class Changing(nn.Linear):
        def forward(self, x):
            y = super().forward(x).exp()
            y.add_(1)
            return y

    model = Changing(6, 6)
    Sharded(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mlp_step(model)


def test_gradient_after_completion_says_what_to_do():
    model = mlp()
    sharded = Sharded(model, early=True)
    mlp_step(model)
    sharded.finish_step()
    mlp_step(model)
    sharded.changing.clear()
    with pytest.raises(TiermemError, match='update="forward"'):
        mlp_step(model)


def test_graph_kept_over_an_update_is_refused():
    model = mlp()
    sharded = Sharded(model)
    loss = model(torch.randn(3, 6)).square().sum()
    loss.backward(retain_graph=True)
    sharded.scheduler.finish_step()
    with pytest.raises(RuntimeError, match="optimizer has updated"):
        loss.backward()


def test_dropped_gradients_do_not_count():
    model = mlp()
    plain = copy.deepcopy(model)
    sharded = Sharded(model, early=True)
    mlp_step(model)
    sharded.scheduler.drop_gradients()
    assert sharded.scheduler.gradients.numbers(0) == ()
    run(plain, mlp_step, 3)
    run(model, mlp_step, 3)
    check_gradients(sharded, plain)


def test_view_of_a_weight_that_is_kept():
    class Showing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.codes = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return self.layer(x) @ self.codes, self.codes.view(36)

    model = Showing()
    plain = copy.deepcopy(model)
    sharded = Sharded(model)

    def step(model):
        out, codes = model(torch.randn(3, 6))
        loss = out.sum() + codes.square().sum()
        loss.backward()
        return loss, codes

    expected, _ = run_pair(plain, step)
    loss, codes = run_pair(model, step)
    assert same(loss, expected)
    check_gradients(sharded, plain)
    assert same(codes.detach(), plain.codes.detach().view(36))
    assert sharded.gatherer.statistics().leaks == 1
    unit, _ = sharded.slots["codes"]
    with pytest.raises(TiermemError, match="clone"):
        sharded.scheduler.require_free(unit)
    del codes
    sharded.scheduler.finish_step()
    sharded.scheduler.require_free(unit)
    assert sharded.leased() == []


def run_pair(model, step):
    torch.manual_seed(5)
    return step(model)


def test_graph_is_freed_without_the_garbage_collector():
    model = nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.Tanh(), nn.Linear(6, 2))
    Sharded(model)
    seen = []
    model[1].register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out)))
    gc.disable()
    try:
        out = model(torch.randn(3, 6))
        assert seen[0]() is not None or out.grad_fn is not None
        del out
        assert seen[0]() is None
    finally:
        gc.enable()


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
