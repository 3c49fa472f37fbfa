"""Parts of models as people write them: functions of weights, checkpoints of them, loops, heads that take turns."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from doubles_combinations import half_of
from doubles_training import Script, Trainee, check, config_for, offloaded, plain
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tiermem

WORDS, WIDTH = 40, 16


def loop(loss_of: Callable[[nn.Module, int], torch.Tensor], steps: int = 4) -> Script:
    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for step in range(steps):
            loss = loss_of(trainee.model, step)
            loss.backward()
            trainee.note(loss)
            optimizer.step()
            optimizer.zero_grad()

    return script


def compare(make: Callable[[], nn.Module], script: Script, directory: Path, budget: str = "tight") -> None:
    expected = plain(make, script)
    for update in ("backward", "auto", "step"):
        check(offloaded(make, script, directory, update=update, budget=budget), expected)


class Body(nn.Module):
    """Hidden states, and a head that nobody calls: what becomes of its weight is said by the subclasses."""

    reentrant = False

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x.flatten(0, 1)


class FusedLoss(torch.autograd.Function):
    """The loss and its gradients at once, piece by piece, as Liger's kernels do."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        of_hidden, of_weight, total = torch.empty_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for begin in range(0, len(hidden), 4):
            piece = slice(begin, begin + 4)
            with torch.enable_grad():
                inputs = hidden[piece].detach().requires_grad_(), weight.detach().requires_grad_()
                loss = functional.cross_entropy(inputs[0] @ inputs[1].T, targets[piece], reduction="sum")
            of_hidden[piece], more = torch.autograd.grad(loss, inputs)
            of_weight += more
            total += loss.detach()
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx, slope):
        of_hidden, of_weight = ctx.saved_tensors
        return slope * of_hidden, slope * of_weight, None


class Product(torch.autograd.Function):
    """A product whose backward is its own, and saves the weight."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx, slope):
        hidden, weight = ctx.saved_tensors
        return slope @ weight, slope.T @ hidden


class Fused(Body):
    def forward(self, tokens):
        return FusedLoss.apply(self.hidden(tokens), self.head.weight, tokens.flatten())


class SavingTheWeight(Body):
    def forward(self, tokens):
        return functional.cross_entropy(Product.apply(self.hidden(tokens), self.head.weight), tokens.flatten())


class InPieces(Body):
    """Logits piece by piece, each computed again in backward; the weight is an argument, or just used."""

    as_argument = False

    def forward(self, tokens):
        hidden, targets, total = self.hidden(tokens), tokens.flatten(), 0

        def loss(piece, answers, weight=None):
            logits = functional.linear(piece, self.head.weight if weight is None else weight)
            return functional.cross_entropy(logits, answers, reduction="sum")

        for begin in range(0, len(hidden), 4):
            arguments = hidden[begin : begin + 4], targets[begin : begin + 4]
            more = (self.head.weight,) if self.as_argument else ()
            total = total + checkpoint(loss, *arguments, *more, use_reentrant=self.reentrant)
        return total


class InPiecesReentrant(InPieces):
    reentrant = True


class WeightAsArgument(InPieces):
    as_argument = True


class WeightAsArgumentReentrant(WeightAsArgument):
    reentrant = True


@pytest.mark.parametrize(
    ("kind", "tied"),
    half_of(
        [Fused, SavingTheWeight, InPieces, InPiecesReentrant, WeightAsArgument, WeightAsArgumentReentrant],
        [False, True],
    ),
)
def test_losses_made_of_the_weight_of_a_head_that_nobody_calls(kind, tied, tmp_path):
    def tokens_loss(model: nn.Module, _: int) -> torch.Tensor:
        return model(torch.randint(0, WORDS, (2, 7)))

    compare(lambda: kind(tied=tied), loop(tokens_loss), tmp_path)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_same_behind_the_call_of_the_model(by_name, tmp_path):
    class Model(Body):
        def forward(self, tokens):
            return self.hidden(tokens)

    def loss(model: nn.Module, _: int) -> torch.Tensor:
        tokens = torch.randint(0, WORDS, (2, 7))
        hidden = model(tokens)
        if by_name:
            logits = functional.linear(input=hidden, weight=model.head.weight)
        else:
            logits = functional.linear(hidden, model.head.weight)
        return functional.cross_entropy(logits, tokens.flatten())

    compare(Model, loop(loss), tmp_path)


@dataclass
class Result:
    hidden: torch.Tensor


class Recomputing(nn.Module):
    """Computes its own part again; what comes out is nothing that hooks would find tensors in, or is kept aside."""

    def __init__(self, *, reentrant: bool, aside: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.reentrant, self.aside, self.extra = reentrant, aside, None

    def forward(self, x):
        y = checkpoint(lambda x: torch.tanh(x @ self.weight) * self.scale, x, use_reentrant=self.reentrant)
        self.extra = y.square().mean() if self.aside else y.new_zeros(())
        return Result(x if self.aside else y)


class Chain(nn.Module):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recomputing(**how) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).hidden
        return x.square().mean() + sum(layer.extra for layer in self.layers)


@pytest.mark.parametrize(("aside", "reentrant"), half_of([False, True], [False, True]))
def test_layers_that_compute_again_and_return_objects_of_their_own(reentrant, aside, tmp_path):
    def loss(model: nn.Module, _: int) -> torch.Tensor:
        return model(torch.randn(3, WIDTH, requires_grad=True))

    compare(lambda: Chain(reentrant=reentrant, aside=aside), loop(loss), tmp_path)


class Selective(Body):
    """Of each layer some operations are kept, the others done again."""

    def __init__(self, how: dict[str, bool]) -> None:
        super().__init__()
        self.how = how

    def forward(self, tokens):
        def policy(_, operation, *__, **___):
            kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts, **self.how)
        return self.head(x).square().mean()


KEPT_BY_HOOKS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14),
    reason="torch gives what selective checkpoints keep to saved-tensor hooks from 2.14 on",
)


@pytest.mark.parametrize(
    "how", [{}, pytest.param({"respect_saved_tensors_hooks": True}, marks=KEPT_BY_HOOKS)], ids=["kept", "by hooks"]
)
def test_selective_checkpoints(tmp_path, how):
    compare(lambda: Selective(how), loop(lambda model, _: model(torch.randint(0, WORDS, (2, 7)))), tmp_path)


@dataclass
class Boxed:
    """Hides a tensor from those who look for the outputs of a layer."""

    x: torch.Tensor


class SelectiveInside(nn.Module):
    """What it is made of is there already when the checkpoint begins, and is gone when that computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inside(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, boxed):
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return Boxed(checkpoint(self.inside, boxed.x, use_reentrant=False, context_fn=contexts))


def test_selective_checkpoints_of_units_that_come_and_go_meanwhile(tmp_path):
    def make() -> nn.Module:
        return nn.Sequential(nn.ModuleList([SelectiveInside() for _ in range(3)]))

    def loss(model: nn.Module, _: int) -> torch.Tensor:
        boxed = Boxed(torch.randn(3, WIDTH))
        for layer in model[0]:
            boxed = layer(boxed)
        return boxed.x.square().mean()

    compare(make, loop(loss), tmp_path)


class Nested(nn.Module):
    """Rows of several lengths as one tensor, of which torch says neither shape nor strides."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.layout = layout

    def forward(self, x):
        x = torch.nested.nested_tensor([x[0, :3], x[1, :5]], layout=self.layout)
        return torch.nested.to_padded_tensor(self.layers[0](functional.gelu(self.first(x))), 0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout, tmp_path):
    def loss(model: nn.Module, _: int) -> torch.Tensor:
        return model(torch.randn(2, 6, WIDTH)).square().mean()

    compare(functools.partial(Nested, layout), loop(loss), tmp_path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_beside_activations_in_pages(layout, tmp_path):
    x, found = torch.randn(2, 6, WIDTH), []
    for paged in (False, True):
        torch.manual_seed(0)
        with tiermem.offload(Nested(layout), config_for(tmp_path, "1MiB", "step")) as runtime:
            with runtime.offload_activations(threshold=1) if paged else contextlib.nullcontext():
                loss = runtime.model(x).square().mean()
            loss.backward()
            found.append([runtime.gradient(parameter) for parameter in runtime.model.parameters()])
    assert all(map(torch.equal, *found))


class Turns(nn.Module):
    """Layers used again and again, or left out; heads of which one is used in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 3) for name in "abc"})

    def forward(self, x, name):
        for _ in range(int(torch.randint(1, 4, ()))):
            for layer in self.layers:
                if torch.rand(()) < 0.7:
                    x = x + layer(x)
        return self.heads[name](x)


def test_layers_in_loops_or_left_out_and_heads_that_take_turns(tmp_path):
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(3, WIDTH), "abc"[step % 3]).square().mean()

    compare(Turns, loop(loss, steps=9), tmp_path)


# Writing into weights.


class ThroughData(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class IntoASibling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.second.weight.data.clamp_(-0.1, 0.1)
        return self.second(torch.tanh(self.first(x)))


def chain_of_clipping_layers() -> nn.Module:
    return nn.Sequential(*(ThroughData(WIDTH, WIDTH) for _ in range(3)))


@pytest.mark.parametrize(("budget", "make"), half_of(["least", "generous"], [chain_of_clipping_layers, IntoASibling]))
def test_weights_clipped_through_data_in_forward_are_an_error(make, budget, tmp_path):
    """What is written into a frame that is lent for reading is lost, sooner or later: never in silence."""
    script = loop(lambda model, _: model(torch.randn(3, WIDTH)).square().mean())
    with pytest.raises(tiermem.TiermemError, match=r"weight was written through its \.data"):
        offloaded(make, script, tmp_path, update="auto", budget=budget)


class Plus(nn.Module):
    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight):
        return weight + self.delta


class Adapted(nn.Linear):
    """A parametrization for each call, which sets the weight to itself: peft's adapters of experts do so."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x):
        parametrize.register_parametrization(self, "weight", Plus(self.up @ self.down))
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)


def test_a_weight_that_is_set_to_itself_in_forward_is_not_written(tmp_path):
    def loss(model: nn.Module, _: int) -> torch.Tensor:
        with torch.no_grad():
            goal = model(torch.ones(3, WIDTH)) + 1
        return (model(torch.randn(3, WIDTH)) - goal).square().mean()

    compare(lambda: nn.Sequential(*(Adapted() for _ in range(3))), loop(loss), tmp_path)


class ClippedOnceLarge(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


def test_a_clipping_that_changes_nothing_until_later_is_an_error_then(tmp_path):
    model = nn.Sequential(ClippedOnceLarge(WIDTH, WIDTH), nn.Linear(WIDTH, 1))  # 16 inputs: within 0.25
    with tiermem.offload(model, config_for(tmp_path, "1MiB", "auto"), coalesce=0) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=0.05)
        for _ in range(2):
            model(torch.randn(3, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert runtime.parameter(model[0].weight).abs().max() > 0.3
        with pytest.raises(tiermem.TiermemError, match=r"0\.weight was written in place while it was gathered"):
            model(torch.randn(3, WIDTH))


def test_clipping_weights_between_steps_is_refused_with_the_way_to_do_it(tmp_path):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    with tiermem.offload(model, config_for(tmp_path, "1MiB", "auto")) as runtime:
        with torch.no_grad():
            for parameter in model.parameters():
                with pytest.raises(tiermem.TiermemError, match=r"written by clamp_ .* write=True"):
                    parameter.clamp_(-0.1, 0.1)
            with runtime.gathered(model, write=True):
                for parameter in model.parameters():
                    parameter.clamp_(-0.1, 0.1)
        assert all(runtime.parameter(parameter).abs().max() <= 0.1 for parameter in model.parameters())


def test_a_single_parameter_is_not_copied_or_pickled_without_its_values(tmp_path):

    model = nn.Linear(WIDTH, WIDTH)
    weight = model.weight
    expected = weight.detach().clone()
    with tiermem.offload(model, config_for(tmp_path, "1MiB", "auto")) as runtime:
        for take, word in (
            (copy.copy, r"copied.*copy\.copy"),
            (copy.deepcopy, r"copied.*deepcopy"),
            (pickle.dumps, "pickled"),
        ):
            with pytest.raises(tiermem.TiermemError, match=f"{word}.*paged out"):
                take(weight)
        with runtime.gathered(model):
            assert torch.equal(copy.deepcopy(weight), expected)
            assert torch.equal(pickle.loads(pickle.dumps(weight)), expected)
        assert isinstance(weight, nn.Parameter)
    assert type(weight) is nn.Parameter


class Listed(nn.Module):
    """Its parameters lie in lists and dictionaries, which are modules that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.named = nn.ParameterDict({"scale": torch.rand(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.rows[0]) * self.named["scale"] + self.rows[1]


def test_a_part_whose_parameters_lie_in_lists_called_by_itself(tmp_path: Path) -> None:
    """It belongs to a larger unit, so that nothing else says what its call reads."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Listed())

    script = loop(lambda model, step: (model[1] if step % 2 else model)(torch.randn(3, WIDTH)).square().mean())
    found = offloaded(make, script, tmp_path, update="auto", budget="generous", units=["Sequential"])
    check(found, plain(make, script))


class Gated(nn.Module):
    """A recurrent layer behind an embedding, narrow enough for torch to choose among kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.gates = nn.GRU(4, 4, 2, batch_first=True)
        self.head = nn.Linear(4, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.gates(self.embed(tokens))[0])


def test_weights_are_no_inference_tensors_in_inference_mode(tmp_path: Path) -> None:
    """Torch has other kernels for these, with other last bits."""

    def script(trainee: Trainee) -> None:
        with torch.inference_mode():
            for length in range(1, 9):
                trainee.note(trainee.model(torch.randint(0, WORDS, (1, length))))
            if trainee.adamw is tiermem.AdamW:
                handle = trainee.model.gates.register_forward_hook(
                    lambda module, *_: seen.extend(weight.data.is_inference() for weight in module.parameters())
                )
                trainee.model(torch.zeros(1, 2, dtype=torch.long))
                handle.remove()

    seen: list[bool] = []
    check(offloaded(Gated, script, tmp_path, update="step", budget="tight"), plain(Gated, script))
    assert seen
    assert not any(seen)


@pytest.mark.parametrize(("update", "deferred"), half_of(["backward", "step"], [False, True]))
def test_offloaded_and_given_back_in_inference_mode_a_model_can_be_trained(deferred, update, tmp_path):
    def make() -> nn.Module:
        with tiermem.deferred_init() if deferred else contextlib.nullcontext():
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    found = []
    for mode in (contextlib.nullcontext, torch.inference_mode):
        torch.manual_seed(0)
        model = make()
        with mode():
            runtime = tiermem.offload(model, config_for(tmp_path, "1MiB", update), coalesce=0)
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(torch.randn(3, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with mode():
            runtime.close(restore_model=True)
        model(torch.randn(3, WIDTH)).square().mean().backward()
        found.append([*model.parameters(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))
