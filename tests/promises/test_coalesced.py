"""Small units that have become one train as each by itself would: the same numbers, fewer trips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doubles_combinations import in_turn
from doubles_garbage import collect
from doubles_models import Stack
from doubles_training import MIB, PlainAdamW, check, config_for, offloaded, plain, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.zero3.placeholder import is_placeholder

UPDATES = pytest.mark.parametrize("update", ["step", "forward", "backward", "auto"])


class Net(nn.Module):
    """Convolutions and norms in a row, and branches: no ModuleList, so that each module is a unit of its own."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.scale = nn.Parameter(torch.rand(3, 1, 1) + 0.5)  # the model itself reads this one
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stem_norm = nn.GroupNorm(2, 8)
        self.left = nn.Conv2d(8, 8, 1)
        self.right = nn.Conv2d(8, 8, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3))
        self.head = nn.Linear(16, 10)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        x = self.stem_norm(self.stem(x * self.scale))
        x = torch.relu(self.left(x)) + self.right(x)
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return self.head(torch.relu(x).mean((2, 3)))


def train(trainee, steps: int = 4, batches: int = 2) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2, max_grad_norm=0.5)
    for _ in range(steps):
        for _ in range(batches):
            loss = trainee.model(torch.randn(2, 3, 6, 6)).square().mean()
            loss.backward()
            trainee.note(loss)
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trainee.note(trainee.model.eval()(torch.ones(1, 3, 6, 6)))
        trainee.model.train()


@pytest.mark.parametrize(("update", "coalesce"), in_turn(["step", "forward", "backward", "auto"], ["auto", "3KiB", 0]))
def test_same_numbers(update, coalesce, tmp_path):
    expected = plain(Net, train)
    check(offloaded(Net, train, tmp_path, update=update, budget="generous", coalesce=coalesce), expected)


@pytest.mark.parametrize("coalesce", ["1MiB", "3KiB"])
def test_same_numbers_where_layers_are_recomputed(coalesce, tmp_path):
    make = lambda: Net(checkpoints=True)
    expected = plain(make, train)
    check(offloaded(make, train, tmp_path, update="backward", budget="generous", coalesce=coalesce), expected)


@UPDATES
def test_same_numbers_when_paged(update, tmp_path):
    """Units of 3 KiB at the most, in a budget that holds a few of them."""
    expected = plain(Net, train)
    found = offloaded(Net, train, tmp_path, update=update, budget="tight", coalesce="3KiB", tile_size="64KiB")
    check(found, expected)
    assert found.statistics.total.bytes_read > 0


def leases_of_a_step(directory, coalesce) -> int:
    torch.manual_seed(0)
    model = Net()
    with tiermem.offload(model, config_for(directory, 64 * MIB, "forward"), coalesce=coalesce) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(1, 3, 6, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        last = runtime.statistics().last
    return last.cache_hits + last.cache_misses


def test_a_step_takes_fewer_leases(tmp_path):
    apart, together = (leases_of_a_step(tmp_path, coalesce) for coalesce in (0, "auto"))
    assert together * 4 < apart


class Several:
    """A model of three coalesced units, offloaded."""

    def __init__(self, directory, make=Net, **settings: Any) -> None:
        torch.manual_seed(3)
        self.model = make()
        self.runtime = tiermem.offload(
            self.model, config_for(directory, 64 * MIB, "forward"), coalesce="3KiB", **settings
        )
        self.batch = torch.ones(1, 3, 6, 6)

    def gathered(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if not is_placeholder(parameter)]


def test_behind_the_models_call_nothing_is_gathered(tmp_path):
    several = Several(tmp_path)
    with several.runtime:
        with torch.no_grad():
            several.model(several.batch)
        assert several.gathered() == []
        loss = several.model(several.batch).sum()
        assert several.gathered() == []
        loss.backward()
        assert several.gathered() == []


def test_a_part_called_alone_stays_until_something_else_is_needed(tmp_path):
    several = Several(tmp_path)
    with several.runtime as runtime:
        before = runtime.parameter(several.model.left.weight)
        with torch.no_grad():
            several.model.left(torch.ones(1, 8, 3, 3))
            assert "left.weight" in several.gathered()
            several.model.head(torch.ones(1, 16))
            assert "left.weight" not in several.gathered()
            assert "head.weight" in several.gathered()
        with runtime.gathered(several.model.head, write=True):
            several.model.head.weight.data.fill_(2)
        assert several.gathered() == []
        assert (runtime.parameter(several.model.head.weight) == 2).all()
        assert same(runtime.parameter(several.model.left.weight), before)


class Adversaries(nn.Module):
    """Two small models in one, each with an optimizer of its own: one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.judge = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def alternate(trainee) -> None:
    generator, judge = trainee.model.generator, trainee.model.judge
    generators, judges = (trainee.adamw(each.parameters(), lr=1e-2) for each in (generator, judge))
    for _ in range(4):
        made = generator(torch.randn(3, 8))
        judges.zero_grad()
        (judge(made.detach()) - judge(torch.randn(3, 8))).mean().backward()
        judges.step()
        generators.zero_grad()
        loss = -judge(made).mean()  # through what was made before the other optimizer's step
        loss.backward()
        trainee.note(loss)
        generators.step()


@UPDATES
@pytest.mark.parametrize("coalesce", ["auto", 0])
def test_a_graph_of_one_part_outlives_the_update_of_another(update, coalesce, tmp_path):
    found = offloaded(Adversaries, alternate, tmp_path, budget="generous", update=update, coalesce=coalesce)
    check(found, plain(Adversaries, alternate))


@UPDATES
def test_a_graph_kept_over_the_update_of_a_part_that_it_needs_is_refused(update, tmp_path):
    model = Adversaries()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, update)):
        optimizers = [tiermem.AdamW(each.parameters()) for each in (model.generator, model.judge)]
        loss = model.judge(model.generator(torch.randn(3, 8))).mean()
        loss.backward(retain_graph=True)
        optimizers[1].step()  # the other gradients of the unit wait for their optimizer
        with pytest.raises(RuntimeError, match="optimizer has updated"):
            loss.backward()


@pytest.mark.parametrize("budget", [8 * MIB, MIB // 8])
def test_a_graph_that_kept_what_is_written_by_hand_is_refused_and_one_made_behind_it_is_not(budget, tmp_path):
    model = Adversaries()
    with tiermem.offload(model, config_for(tmp_path, budget, "auto")) as runtime:
        ends, other = model.generator(torch.randn(3, 8)).sum(), model.judge(torch.randn(3, 8)).sum()
        with runtime.gathered(model.judge[0].weight, write=True), torch.no_grad():
            model.judge[0].bias.add_(1.0)  # nobody keeps a bias
        with runtime.gathered(model.generator, write=True), torch.no_grad():
            model.generator[2].weight.mul_(2.0)
        other.backward()
        with pytest.raises(RuntimeError, match="written"):
            ends.backward()
        with runtime.gathered(model.generator, write=True):
            with torch.no_grad():
                model.generator[2].weight.mul_(0.5)
            again = model.generator(torch.randn(3, 8)).sum()
        again.backward()


def test_an_exception_in_forward_leaves_a_model_that_goes_on(tmp_path):
    several = Several(tmp_path)
    torch.manual_seed(3)
    plain_model = Net()

    def fail(*_):
        raise ValueError("mine")

    with several.runtime as runtime:
        hook = several.model.right.register_forward_hook(fail)
        with pytest.raises(ValueError, match="mine"):
            several.model(several.batch)
        hook.remove()
        collect()
        pairs = [
            (several.model, tiermem.AdamW(several.model.parameters())),
            (plain_model, PlainAdamW(plain_model.parameters())),
        ]
        for model, optimizer in pairs:
            for _ in range(2):
                model(several.batch).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for (name, here), there in zip(several.model.named_parameters(), plain_model.parameters(), strict=True):
            assert same(runtime.parameter(here), there.detach()), name


class Initialised(Net):
    """Weights that depend on the order in which modules are initialised, and on a pass over the whole model at last."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.weight.data.normal_()
            module.bias.data.uniform_()
        elif isinstance(module, (nn.GroupNorm, nn.BatchNorm2d)):
            module.reset_parameters()
        if module is self:
            self.scale.data.normal_()
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.data.add_(1)


def initial(directory, make, coalesce) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    with tiermem.deferred_init():
        model = make()
    with tiermem.offload(model, config_for(directory, 64 * MIB, "step"), coalesce=coalesce) as runtime:
        return {name: runtime.parameter(parameter) for name, parameter in model.named_parameters()}


def test_deferred_models_begin_with_the_same_values(tmp_path):
    apart, together = (initial(tmp_path, Initialised, coalesce) for coalesce in (0, "1MiB"))
    for name, values in apart.items():
        assert same(together[name], values), name


def test_a_resume_divides_as_the_commit_did_whatever_the_budget(tmp_path):
    def build(budget, **more):
        torch.manual_seed(6)
        model = Stack()
        return model, tiermem.offload(model, config_for(tmp_path, budget, "forward"), **more)

    model, runtime = build(64 * MIB)
    with runtime:
        optimizer = tiermem.AdamW(model.parameters())
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        runtime.commit().wait()
        weights = [runtime.parameter(parameter) for parameter in model.parameters()]
    with pytest.raises(tiermem.ResumeError, match="coalesce was"):
        build(64 * MIB, resume=True, coalesce=0)
    model, runtime = build(MIB, resume=True)
    with runtime:
        for parameter, values in zip(model.parameters(), weights, strict=True):
            assert same(runtime.parameter(parameter), values)


def test_micro_batches_in_lockstep(tmp_path):
    batches = [torch.randn(2, 3, 6, 6) for _ in range(3)]
    losses = []
    for coalesce in (0, "3KiB"):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(1))
        with tiermem.offload(model, config_for(tmp_path, 64 * MIB, "forward"), coalesce=coalesce) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                found = runtime.forward_backward(batches, lambda batch, model=model: model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            losses.append([float(loss) for loss in found])
    assert losses[0] == losses[1]
