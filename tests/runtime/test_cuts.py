"""Graphs of micro-batches that are cut at units: which are, the numbers, and what happens to the others."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from doubles_combinations import half_of, in_turn, part_of
from doubles_models import Block, small_llama
from doubles_together import MIB, Beside, Chain, Tied, leased_pages, rows, squares
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import tiermem
from tiermem.zero3.fibers import OwnStack

AROUND = "what is made before a unit, and was not given to it, is used after it"
AGAIN = "a checkpoint computes units again that backward has not come to"
# Until transformers 5.20 a layer's checkpoint is around its call, since then within it.
CALLED_INSIDE = "__call__" in vars(GradientCheckpointingLayer)


class Around(Chain):
    """What goes into a layer is added behind it, outside of it."""

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(torch.sin(x))
        return x


class AroundAsGiven(Chain):
    """What is added behind a layer is what the layer was given: its gradient is a sum of three, in their order."""

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class AroundTwo(Chain):
    """Around one layer in the middle: the one before it and it would have to be brought for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(self.layer() for _ in range(2))

    def forward(self, x):
        first, second, third, *others = self.layers
        x = second(first(x))
        x = x + third(torch.sin(x))
        for layer in others:
            x = layer(x)
        return x


class Inside(Chain):
    """The same, but the model's own code stands in front of each layer only."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(torch.sin(x) * x)
        return x


class TransposedBlock(Block):
    """Gives gradients back whose memory is not in the order of their elements."""

    def forward(self, x):
        return super().forward(x.t().contiguous().t() * 2.0)


class Transposed(Chain):
    def layer(self) -> nn.Module:
        return TransposedBlock(16)


class InPlaceBlock(Block):
    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


class InPlace(Chain):
    def layer(self) -> nn.Module:
        return InPlaceBlock(16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * 1.0)
        return x


class Reader(nn.Module):
    """Takes what it reads, in a tuple, as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, *, read):
        first, second = read
        return torch.tanh(self.own(x) + self.other(first) * second)


class TwoStacks(nn.Module):
    """What the first stack makes is read by every layer of the second, as in an encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(16) for _ in range(2))
        self.decoder = nn.ModuleList(Reader() for _ in range(3))

    def forward(self, x):
        read = x
        for layer in self.encoder:
            read = layer(read)
        read, gate = torch.tanh(read), torch.sigmoid(read)
        for layer in self.decoder:
            x = layer(x, read=(read, gate))
        return x * read.detach()


class Ones(torch.autograd.Function):
    """Has no gradient for what it was given, though that is in the graph."""

    @staticmethod
    def forward(ctx, x):
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


class Deaf(Block):
    def forward(self, x):
        return super().forward(Ones.apply(x))


class Stopped(Tied):
    """No gradient comes to the first use of the weight."""

    def layer(self) -> nn.Module:
        return Deaf(16)


class Positions(Tied):
    """What two units make is added up between units, as words and positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(4, 16)

    def forward(self, x):
        x = self.first(x) + self.positions(torch.arange(4))
        return self.last(Chain.forward(self, x))


class TiedBetween(Chain):
    """Two layers have one weight, which is in the unit of the first; so the second is of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


class Noting(Block):
    """Notes what it was given."""

    def forward(self, x, notes):
        notes.append(x)
        return super().forward(x)


class Noted(Chain):
    """The result is multiplied by what the last layer was given, which is not known before anything is cut."""

    def layer(self) -> nn.Module:
        return Noting(16)

    def forward(self, x):
        notes: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x, notes)
        return x * notes[1]


GATE = torch.ones(16, requires_grad=True)


class Gated(Chain):
    """A leaf that is not the model's is used between layers."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * GATE)
        GATE.grad = None
        return x


class Skipping(Chain):
    """The second layer is left out for rows that begin with a negative number."""

    def forward(self, x):
        out = self.layers[0](x)
        if float(x.flatten()[0].detach()) >= 0:
            out = self.layers[1](out)
        return self.layers[2](out)


def with_penalty(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The gradient at the inputs is part of the loss."""
    rows = rows.clone().requires_grad_()
    out = squares(model, rows)
    (slope,) = torch.autograd.grad(out, rows, create_graph=True)
    return out + slope.square().sum()


def with_a_look(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The gradient at the inputs is only looked at."""
    rows = rows.clone().requires_grad_()
    out = squares(model, rows)
    (slope,) = torch.autograd.grad(out, rows, retain_graph=True)
    return out * (1.0 + slope.abs().max().detach())


GRAPHS = [
    (Chain, squares, None),
    (Inside, squares, None),
    (Transposed, squares, None),
    (TwoStacks, squares, None),
    (Around, squares, AROUND),
    (AroundAsGiven, squares, AROUND),
    (AroundTwo, squares, AROUND),
    (Tied, squares, None),
    (Stopped, squares, None),
    (Positions, squares, None),
    (TiedBetween, squares, None),
    (Noted, squares, AROUND),
    (Gated, squares, AROUND),
    (InPlace, squares, "a unit writes into what it was given"),
    (Chain, with_penalty, "the loss goes backward through several units itself"),
    (Chain, with_a_look, "the loss goes backward through several units itself"),
]


@pytest.mark.parametrize(
    ("graph", "update"),
    part_of(4, GRAPHS, ["step", "forward", "backward", "auto"]),
    ids=lambda value: value[0].__name__ if isinstance(value, tuple) else value,
)
def test_the_numbers_of_accumulation_and_which_graphs_are_cut(graph, update, tmp_path):
    make, loss, reason = graph
    beside = Beside(make, tmp_path, loss, update=update)
    with beside.runtime:
        for _ in range(3):
            beside.step(rows())
        assert beside.why_not == reason
        assert all(parameter.grad is None for parameter in beside.model.parameters())
        beside.compare()


class CheckpointedLlama(nn.Module):
    """Each layer adds what it was given to what its norms, which are kept, make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = small_llama(words=40).train()
        self.llama.gradient_checkpointing_enable({"use_reentrant": True})

    def forward(self, x):
        tokens = (x[:, :6] * 10).long().clamp(0, 39)
        return self.llama(input_ids=tokens).logits


@pytest.mark.parametrize(("update", "make"), in_turn(["forward", "backward", "auto"], [Chain, CheckpointedLlama]))
def test_nobody_waits_for_what_is_kept_in_memory(make, update, tmp_path):
    """Norms are units of their own inside of layers; their calls are no cuts, and no layer is computed out of turn."""
    beside = Beside(make, tmp_path, update=update, keep="500")
    with beside.runtime:
        assert any(layout.kept for layout in beside.runtime._house.layouts)
        for _ in range(3):
            beside.step(rows())
        assert beside.why_not == (None if make is Chain or not CALLED_INSIDE else AGAIN)
        beside.compare()


@pytest.mark.parametrize("keep", [None, "500"])
def test_beside_a_device_what_is_kept_below_it_is_brought(keep, tmp_path):
    beside = Beside(CheckpointedLlama, tmp_path, device="simulated", device_memory=MIB, keep=keep)
    with beside.runtime:
        for _ in range(3):
            beside.step(rows())
        beside.compare()


def seen_by(model: nn.Module, threads: list[str]) -> None:
    """Note on which thread backward comes to the outputs of each layer."""

    def watch(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: threads.append(threading.current_thread().name))

    for layer in model.layers:
        layer.register_forward_hook(watch)


def test_from_the_second_time_on_everything_is_on_the_callers_thread(tmp_path):
    beside = Beside(Chain, tmp_path)
    threads: list[str] = []
    seen_by(beside.model, threads)
    own, other = threading.current_thread().name, "tiermem-micro-batch"
    with beside.runtime:
        beside.step(rows())
        assert threads == [other] * 9, "the first micro-batches are only looked at"
        threads.clear()
        beside.step(rows())
        assert threads == [own] * 9
        threads.clear()
        beside.step(rows(1))
        assert threads == [other] * 3, "one by itself is not cut"


def test_or_forward_is_on_threads_where_greenlet_cannot_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr(OwnStack, "possible", False)
    beside = Beside(Chain, tmp_path)
    threads: list[str] = []
    seen_by(beside.model, threads)
    with beside.runtime:
        for _ in range(2):
            beside.step(rows())
        assert threads[9:] == ["tiermem-micro-batch"] * 3 + [threading.current_thread().name] * 6
        beside.compare()


def test_micro_batches_that_leave_layers_out(tmp_path):
    """Gradients of a unit may be added up in another order then."""
    beside = Beside(Skipping, tmp_path)
    signs = torch.tensor([[1, -1, 1], [-1, -1, 1], [-1, 1, -1], [1, 1, 1]])
    with beside.runtime:
        for row in signs:
            batches = [part * sign for part, sign in zip(rows(), row, strict=True)]
            beside.bring(batches)
            for part in batches:
                squares(beside.plain, part).backward()
            beside.update()
        assert beside.why_not is None
        for mine, other in zip(beside.model.parameters(), beside.plain.parameters(), strict=True):
            torch.testing.assert_close(beside.runtime.parameter(mine), other.detach(), rtol=1e-4, atol=1e-5)


class Changing(Chain):
    """Goes around its layers from some step on."""

    around = False

    def forward(self, x):
        return Around.forward(self, x) if self.around else super().forward(x)


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_model_that_begins_to_go_around_its_units_is_noticed_before_backward(update, tmp_path):
    beside = Beside(Changing, tmp_path, update=update)
    with beside.runtime:
        for _ in range(2):
            beside.step(rows())
        beside.model.around = beside.plain.around = True
        batches = rows()
        with pytest.raises(tiermem.TiermemError, match=r"another way .*zero_grad.* do it again"):
            beside.bring(batches)
        assert not leased_pages(beside.runtime)
        beside.ours.zero_grad()
        for _ in range(2):
            beside.step(batches)
        assert beside.why_not == AROUND
        beside.compare()


class Broken(Chain):
    """Its gradients cannot be had behind a layer, once."""

    failing: int | None = None

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.failing and x.requires_grad:
                x.register_hook(self.fail)
        return x

    def fail(self, _: torch.Tensor) -> None:
        raise ValueError("no gradient here")


@pytest.mark.parametrize(("failing", "update"), in_turn([0, 1, 2], ["forward", "auto"]))
def test_an_error_in_a_segment_leaves_nothing_behind(failing, update, tmp_path):
    beside = Beside(Broken, tmp_path, update=update)
    with beside.runtime:
        beside.step(rows())
        beside.model.failing = failing
        with pytest.raises(ValueError, match="no gradient here"):
            beside.bring(rows())
        beside.model.failing = None
        assert not leased_pages(beside.runtime)
        beside.ours.zero_grad()
        for _ in range(2):
            beside.step(rows())
        assert beside.why_not is None
        beside.compare()


class Dropping(Chain):
    """Random numbers in forward, and drawn anew where backward computes forward again."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            x = functional.dropout(x, 0.3)
        return x


def test_random_numbers_of_each_micro_batch_go_on_in_its_segments(tmp_path):
    beside = Beside(Dropping, tmp_path)
    with beside.runtime:
        for _ in range(3):
            state = torch.get_rng_state()
            batches = rows()
            beside.bring(batches)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            rows()
            seeds = torch.randint(2**63 - 1, (len(batches),)).tolist()
            for part, seed in zip(batches, seeds, strict=True):
                torch.manual_seed(seed)
                squares(beside.plain, part).backward()
            torch.set_rng_state(after)
            beside.update()
        assert beside.why_not is None
        beside.compare()


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_device_that_has_room_for_one_unit_and_what_reentrant_checkpoints_compute_again(update, tmp_path):
    """That begins in the part before it: its unit is wanted while that of the part is kept for other micro-batches."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, n), nn.Tanh(), nn.Linear(n, 16)) for n in (700, 90))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return self.last(x)

    settings = {"device": "simulated", "update": update}
    with pytest.raises(tiermem.BudgetError) as caught:
        Beside(Checkpointed, tmp_path, **settings, device_memory=4096)
    least = int(re.search(r"at least (\d+) bytes", str(caught.value)).group(1))
    beside = Beside(Checkpointed, tmp_path, **settings, device_memory=least)
    with beside.runtime:
        for _ in range(3):
            beside.step(rows())
        assert beside.why_not == AGAIN
        beside.compare()


class Checkpoints(Chain):
    """`around`: what each checkpoint is around, a layer or all of them; `last`: nothing is behind them."""

    def __init__(self, around: str, *, reentrant: bool, last: bool = False) -> None:
        super().__init__()
        self.around, self.reentrant = around, reentrant
        self.first = nn.Linear(16, 16)
        self.head = nn.Identity() if last else nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        for step in self.layers if self.around == "each" else [super().forward]:
            x = checkpoint(step, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize(
    ("checkpoints", "update"),
    half_of(
        [
            ("each", False, False, None),
            ("each", False, True, None),
            ("each", True, False, AGAIN),
            ("each", True, True, AROUND),
            ("all", False, False, AGAIN),
            ("all", False, True, AGAIN),
            ("all", True, False, AGAIN),
            ("all", True, True, AROUND),
        ],
        ["forward", "backward"],
    ),
)
def test_what_checkpoints_compute_again_is_brought_once_for_all_micro_batches(checkpoints, update, tmp_path):
    """Where backward would come to it in the segment of another unit graphs are not cut, once that has been seen."""
    around, reentrant, last, reason = checkpoints
    beside = Beside(lambda: Checkpoints(around, reentrant=reentrant, last=last), tmp_path, update=update)
    brought = []
    with beside.runtime:
        for count in (4, 4, 4, 2):
            before = beside.runtime._house.gatherer.statistics().gathers
            beside.step(rows(count))
            brought.append(beside.runtime._house.gatherer.statistics().gathers - before)
        assert beside.why_not == reason
        beside.compare()
    assert brought[0] == brought[2] == brought[3]
    assert (brought[1] > brought[0]) == (reason == AGAIN)


@pytest.mark.parametrize("settings", [{}, {"device": "simulated", "device_memory": "1MiB"}])
def test_with_activations_in_pages(settings, tmp_path):
    beside = Beside(Chain, tmp_path, **settings)
    with beside.runtime:
        for _ in range(3):
            batches = [torch.randn(4096, 16) for _ in range(3)]
            with beside.runtime.offload_activations(threshold="4KiB"):
                beside.bring(batches)
            for part in batches:
                squares(beside.plain, part).backward()
            beside.update()
        assert beside.why_not is None
        beside.compare()
