"""Parameters used outside the call of the module they belong to: plain PyTorch's numbers, and nothing left behind."""

from __future__ import annotations

import _thread
import collections
import contextlib
import operator
import queue
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import half_of
from doubles_training import Trainee, budget_for, check, config_for, offloaded, plain
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiermem

WORDS, WIDTH = 40, 16


class Layer(nn.Module):
    """Adds a row of a table that belongs to somebody else."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.table = [table]  # not a child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) * self.table[0].weight[1]


class Borrower(nn.Module):
    """Its output layer is its embedding's weight, and its positions are rows of a table."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.table = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(Layer(self.table) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.way = way

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.table.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.way == "reentrant") if "reentrant" in self.way else layer(x)
        x, weight = self.norm(x), self.embed.weight
        assert weight.shape == (WORDS, WIDTH)
        assert weight.size(0) == weight.shape[0] == len(weight)
        if self.way == "view":
            rows = self.embed.weight.t()  # looks at the frame until it is used
            return x @ torch.cat([rows, self.table.weight.T], dim=1)
        if self.way == "keyword":
            return functional.linear(input=x, weight=self.embed.weight)
        if self.way == "out=None":  # which torch passes on by itself, in functions written in Python
            rows = functional.normalize(self.embed.weight) * torch.norm(self.embed.weight, dim=1, keepdim=True)
            return functional.linear(x, rows)
        if self.way == "two at once":
            return functional.linear(x, self.embed.weight + torch.mm(self.embed.weight, self.layers[0].inner.weight))
        if self.way == "module's own":
            return x @ self.embed.weight.clone().T + self.norm.weight.sum()
        return functional.linear(x, self.embed.weight)


def script(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for _ in range(4):
        loss = trainee.model(torch.randint(0, WORDS, (2, 6))).square().mean()
        loss.backward()
        trainee.note(loss)
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


WAYS = ["direct", "view", "keyword", "out=None", "two at once", "module's own", "reentrant", "not reentrant"]


@pytest.mark.parametrize(("way", "budget"), half_of(WAYS, ["generous", "tight"]))
def test_what_is_borrowed_has_its_values_in_forward_and_backward(way: str, budget: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Borrower(way)

    check(offloaded(make, script, tmp_path, update="auto", budget=budget), plain(make, script))


def test_generation_before_any_training_borrows_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Borrower("direct")
    tokens = torch.randint(0, WORDS, (2, 6))
    with torch.no_grad():
        expected = model(tokens)
        budget = budget_for(model, tmp_path, "tight")
        with tiermem.offload(model, config_for(tmp_path, budget, "auto")):
            assert all(torch.equal(model(tokens), expected) for _ in range(3))


class IntoAPlace(Borrower):
    """Has results written where it says."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = torch.mul(self.table.weight, 2, out=torch.empty(8, WIDTH))
        rows[0] = self.norm.weight
        return functional.linear(self.embed(tokens), rows)


class FirstOfAll(Borrower):
    """Has a parameter assigned to a part of what it computes, as a model does that puts a class token in front."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x[:, 0] = self.norm.bias
        bias = torch.zeros(WIDTH)
        bias[:] = self.layers[0].inner.bias
        return self.norm(self.layers[1](x)) + bias


@pytest.mark.parametrize("budget", ["generous", "tight"])
def test_what_is_assigned_to_a_part_of_something_has_its_values(budget: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return FirstOfAll("direct")

    check(offloaded(make, script, tmp_path, update="auto", budget=budget), plain(make, script))


def test_what_is_read_to_be_written_elsewhere_has_its_values(tmp_path: Path) -> None:
    model, tokens = IntoAPlace("direct"), torch.randint(0, WORDS, (1, 6))
    with torch.no_grad():
        expected = model(tokens)
        with tiermem.offload(model, config_for(tmp_path, budget_for(model, tmp_path, "tight"), "auto"), coalesce=0):
            assert torch.equal(model(tokens), expected)


def penalised(result: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([result, weight]).square().mean()


def penalised_by_name(result: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensors=(weight, result)).square().mean()


def penalised_flat(result: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(result.mean(0, keepdim=True).expand_as(weight), target=weight)


@pytest.mark.parametrize("penalty", [penalised, penalised_by_name, penalised_flat])
def test_a_loss_behind_the_model_may_borrow(penalty: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    """Whether the graph comes in an argument, or in a list of them."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def train(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for _ in range(3):
            loss = penalty(trainee.model(torch.randn(4, WIDTH)), trainee.model[0].weight)
            loss.backward()
            trainee.note(loss)
            optimizer.step()
            optimizer.zero_grad()

    check(offloaded(make, train, tmp_path, update="auto", budget="tight"), plain(make, train))


class Late(nn.Module):
    """Borrows where its `late` or its mode says so, not from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.late = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return functional.linear(x, self.embed.weight) if self.late or not self.training else self.head(x)


def test_what_is_first_borrowed_late_is_seen(tmp_path: Path) -> None:
    def train(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for step in range(5):
            trainee.model.late = step >= 3
            loss = trainee.model(torch.randint(0, WORDS, (2, 6))).square().mean()
            loss.backward()
            trainee.note(loss)
            optimizer.step()
            optimizer.zero_grad()
        trainee.note(trainee.model.eval()(torch.randint(0, WORDS, (2, 6))))

    check(offloaded(Late, train, tmp_path, update="auto", budget="tight"), plain(Late, train))


def test_steps_that_are_skipped_for_good_are_said_to_be(tmp_path: Path) -> None:
    """What a script makes of `.data` at rest is NaN, of which a conversion hides where it comes from."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    budget = budget_for(model, tmp_path, "tight")
    with tiermem.offload(model, config_for(tmp_path, budget, "auto"), units=list(model), coalesce=0) as runtime:
        optimizer = tiermem.AdamW(model.parameters())

        def step(steps: int, around: contextlib.AbstractContextManager[Any] | None = None) -> None:
            for _ in range(steps):
                with around or contextlib.nullcontext():
                    scale = model[0].weight.data.double().abs().mean().float()
                    (scale * model(torch.ones(2, 8)).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()

        with pytest.warns(UserWarning, match="a step was skipped"):
            step(1)
        step(3)
        with pytest.warns(UserWarning, match=r"5 steps in a row were skipped .* `with runtime.gathered"):
            step(1)
        step(2)
        step(1, runtime.gathered(model[0]))
        assert optimizer.skipped == 7


class Refusing(Borrower):
    """Fails in the middle of its forward, having borrowed."""

    error: BaseException | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = super().forward(tokens)
        if self.error is not None:
            raise self.error
        return out


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_borrowing_goes_on_behind_a_forward_that_failed(error: BaseException, tmp_path: Path) -> None:
    model = Refusing("direct")
    tokens = torch.randint(0, WORDS, (2, 6))
    with tiermem.offload(model, config_for(tmp_path, "1MiB", "auto")):
        optimizer = tiermem.AdamW(model.parameters())
        model(tokens).sum().backward()
        optimizer.step()
        model.error = error
        with pytest.raises(type(error)):
            model(tokens)
        model.error = None
        optimizer.zero_grad()  # the model is at rest: what an interrupt left is cleared away
        model(tokens).sum().backward()
        optimizer.step()


class Rescaling(Borrower):
    """Writes into a parameter in its forward, as RWKV does in evaluation."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layers[0].inner.weight.div_(2)
        return super().forward(tokens)


def test_writing_into_what_is_not_there_stays_an_error(tmp_path: Path) -> None:
    model = Rescaling("direct")
    with (
        tiermem.offload(model, config_for(tmp_path, "1MiB", "auto")),
        pytest.raises(tiermem.TiermemError, match="was to be written by div_ while its values are paged out"),
    ):
        model(torch.randint(0, WORDS, (2, 6)))


class Overwriting(Borrower):
    """Has a result written into a parameter."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.mul(torch.ones(WIDTH, WIDTH), 2, out=self.layers[0].inner.weight)
        return super().forward(tokens)


def test_writing_a_result_into_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    model = Overwriting("direct")
    with (
        tiermem.offload(model, config_for(tmp_path, "1MiB", "auto"), coalesce=0),
        pytest.raises(tiermem.TiermemError, match="was to be written by mul while its values are paged out"),
    ):
        model(torch.randint(0, WORDS, (2, 6)))


class WritingLate(Borrower):
    """Writes into a part of a parameter that it borrows, but not in its first calls, `after` of them."""

    def __init__(self, write: Callable[[torch.Tensor], object], after: int) -> None:
        super().__init__("direct")
        self.write, self.after, self.calls = write, after, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.after:
            with torch.no_grad():
                self.write(self.layers[1].inner.weight)
        return super().forward(tokens)


def written_and_kept(weight: torch.Tensor) -> None:
    row = weight[0]
    row.mul_(2)
    row.add_(weight[1])  # the unit is gathered again while it lingers


def written_before_a_first_look(weight: torch.Tensor) -> None:
    with torch.enable_grad():
        row = weight.detach()[0]
    row.mul_(2)
    weight[1].sum()  # gathered without gradients for the first time, after it was written


@pytest.mark.parametrize(
    ("write", "after"),
    [
        (lambda weight: weight[0].mul_(0.9), 2),
        (lambda weight: weight.detach().mul_(0.9), 2),
        (lambda weight: weight.view(-1)[3:5].zero_(), 2),
        (written_and_kept, 2),
        (written_before_a_first_look, 0),
    ],
)
def test_writing_into_a_part_of_what_is_borrowed_is_an_error_in_every_step(
    write: Callable[[torch.Tensor], object], after: int, tmp_path: Path
) -> None:
    """The operation that is gathered for gives a view; the write comes behind it. It was lost in silence, or not."""

    def make() -> nn.Module:
        return WritingLate(write, after)

    with pytest.raises(tiermem.TiermemError, match=r"layers\.1\.inner\.weight was written in place while it was gath"):
        offloaded(make, script, tmp_path, update="auto", budget="generous")


class BehindTheGraph(torch.autograd.Function):
    """Reads a parameter in backward that it has kept by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        ctx.kept = kept
        return x @ kept["weight"]

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        return slope @ ctx.kept["weight"].T, None


class ReadingLate(nn.Module):
    """Reads a parameter in backward where no graph says so, after its gradients have come."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = self.first(x), self.head.weight
        if self.way == "hook":
            x.register_hook(lambda gradient: gradient @ weight.detach())
        elif self.way == "function":
            x = BehindTheGraph.apply(x, {"weight": weight})  # type: ignore[no-untyped-call]
        else:
            x = checkpoint(lambda y: torch.tanh(y @ weight.detach()), x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("way", ["hook", "function", "checkpoint"])
def test_what_is_read_in_backward_after_its_update_is_an_error(way: str, tmp_path: Path) -> None:
    """It gave the values of the next step. Where updates can be undone, or come later, the values are those of now."""

    def make() -> nn.Module:
        return ReadingLate(way)

    def train(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for _ in range(4):
            loss = trainee.model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            trainee.note(loss)
            optimizer.step()
            optimizer.zero_grad()

    for update in ("auto", "forward", "step"):
        check(offloaded(make, train, tmp_path, update=update, budget="tight"), plain(make, train))
    with pytest.raises(tiermem.TiermemError, match=r"head\.\w+ is read in backward after its update has begun"):
        offloaded(make, train, tmp_path, update="backward", budget="tight")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_batch_more_than_in_the_step_before_is_named_where_layers_are_computed_again(
    reentrant: bool, tmp_path: Path
) -> None:
    """It reads what is updated before it brings a gradient for it, and was told of hooks that nobody had."""

    def train(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for batches in (1, 2):
            for _ in range(batches):
                x = torch.randn(4, WIDTH, requires_grad=True)
                for layer in trainee.model.children():
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                x.square().mean().backward()
            optimizer.step()

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    # A reentrant one goes forward without gradients, as an evaluation does.
    seen = pytest.warns(RuntimeWarning, match="evaluated between") if reentrant else contextlib.nullcontext()
    with seen, pytest.raises(tiermem.TiermemError, match="this step brought more"):
        offloaded(make, train, tmp_path, update="backward", budget="tight")


class FrozenBesideTrained(nn.Module):
    """Each layer is one unit, of which the part that is computed again last has nothing to be updated."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 2 * WIDTH)])
            for _ in range(3)
        )
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for frozen, trained in self.layers:
            if self.way == "module":
                x = checkpoint(frozen, x, use_reentrant=True)
            else:
                weight = frozen.weight
                x = checkpoint(lambda y, weight=weight: torch.tanh(y @ weight.detach()), x, use_reentrant=False)
            x = torch.tanh(x) + checkpoint(trained, x, use_reentrant=True)[:, :WIDTH]
        return x


@pytest.mark.parametrize("way", ["module", "function"])
def test_what_is_frozen_may_be_read_in_backward_after_the_rest_of_its_unit_is_updated(way: str, tmp_path: Path) -> None:
    """It was an error: of parts of a layer that are checkpointed each by itself, one is frozen."""

    def make() -> nn.Module:
        return FrozenBesideTrained(way)

    def train(trainee: Trainee) -> None:
        trained = [parameter for parameter in trainee.model.parameters() if parameter.requires_grad]
        optimizer = trainee.adamw(trained, lr=1e-2)
        for _ in range(4):
            loss = trainee.model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            trainee.note(loss)
            optimizer.step()
            optimizer.zero_grad()

    check(offloaded(make, train, tmp_path, update="backward", budget="tight"), plain(make, train))


class Backwards(nn.Module):
    """Uses weights in backward that nothing else needs then: in a hook, and in a function that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        x.register_hook(lambda gradient: gradient + self.first.weight.detach().mean())
        x = checkpoint(lambda y: torch.tanh(functional.linear(y, self.second.weight)), x, use_reentrant=False)
        return self.head(x).square().mean()


@pytest.mark.parametrize("attribute", ["device", "grad"])
def test_what_is_not_there_can_be_asked_where_nothing_is_python(
    attribute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a hook that is written in C, on a thread of autograd's: with a GPU backward has one of its own."""
    model, found = nn.Linear(WIDTH, WIDTH), queue.SimpleQueue[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lambda failed: found.put(failed.exc_value))
    with tiermem.offload(model, config_for(tmp_path, "1MiB", "step")):
        asked = map(found.put, map(operator.attrgetter(attribute), [model.weight]))
        _thread.start_new_thread(collections.deque, (asked, 0))
        assert found.get(timeout=60) == getattr(model.weight, attribute)


@pytest.mark.parametrize("way", ["grad", "zeros", "backward", "method"])
def test_backward_for_chosen_parameters(way: str, tmp_path: Path) -> None:
    """They are named while they are absent, and what goes backward uses others that are."""

    def train(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        chosen = [*trainee.model.first.parameters(), trainee.model.head.weight]
        for _ in range(3):
            loss = trainee.model(torch.randn(4, WIDTH))
            if way in ("grad", "zeros"):
                unused, zeros = trainee.model.unused.weight, way == "zeros"
                wanted = [*chosen, unused]
                for gradient in torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=zeros):
                    trainee.note(gradient)
                trainee.model(torch.randn(4, WIDTH)).backward()
            elif way == "backward":
                torch.autograd.backward([loss], inputs=chosen)
            else:
                loss.backward(inputs=chosen)
            trainee.note_gradients()
            optimizer.step()
            optimizer.zero_grad()

    found = offloaded(Backwards, train, tmp_path, update="forward", budget="tight")
    check(found, plain(Backwards, train))


@pytest.mark.parametrize("name", ["prophetnet", "mobilebert"])
def test_models_of_transformers_that_borrow(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        if name == "prophetnet":
            sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
            heads = {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
            config = transformers.ProphetNetConfig(vocab_size=64, hidden_size=16, **sizes, **heads)
            return transformers.ProphetNetForConditionalGeneration(config)
        sizes = {"hidden_size": 32, "embedding_size": 16, "intra_bottleneck_size": 16, "intermediate_size": 24}
        config = transformers.MobileBertConfig(vocab_size=64, num_hidden_layers=2, num_attention_heads=2, **sizes)
        return transformers.MobileBertForMaskedLM(config)

    def train(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-3)
        for _ in range(4):
            tokens = torch.randint(3, 64, (2, 7))
            loss = trainee.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            trainee.note(loss)
            optimizer.step()
            optimizer.zero_grad()

    check(offloaded(make, train, tmp_path, update="auto", budget="tight"), plain(make, train))
