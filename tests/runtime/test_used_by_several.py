"""Graphs cut at units: what several segments use gets its gradients added up in the order of the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from doubles_together import Beside, Chain, Tied, rows
from doubles_training import same
from torch import nn

import tiermem
from tiermem.zero3.cuts import Cuts

AROUND = "what is made before a unit, and was not given to it, is used after it"


class Again(nn.Module):
    """Uses its parameters twice in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


class Unrolled(nn.GRUCell):
    """Uses its parameters at each of a few steps, as a recurrent layer does."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x):
        state = torch.zeros_like(x)
        for row in x:
            state = super().forward(row.expand_as(x), state)
        return state


class Repeated(Chain):
    """One layer is called in front of every other one, and at the end."""

    kind: type[nn.Module] = Again

    def __init__(self) -> None:
        super().__init__()
        self.repeated = self.kind()

    def forward(self, x):
        for layer in self.layers:
            x = layer(self.repeated(x))
        return self.repeated(x)


class Recurrent(Repeated):
    kind = Unrolled


class Deaf(Repeated):
    """No gradient comes to what is in front of the second layer, though it is in the graph."""

    def forward(self, x):
        first, second, third = self.layers
        x = self.repeated(first(self.repeated(x))) * torch.zeros(16)
        return self.repeated(third(self.repeated(second(x))))


class Reader(nn.Module):
    """Uses what it reads several times, as attention does for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, read):
        return x + torch.tanh(self.keys(read)) * self.values(read) + read


class Read(Chain):
    """What the layers make is read by several units."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleList(Reader() for _ in range(3))

    def forward(self, x):
        read = torch.tanh(super().forward(x))
        for reader in self.readers:
            x = reader(x, read)
        return x


class Shift(nn.Module):
    """Backward through it needs no values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.rand(16))

    def forward(self, x):
        return torch.sin(x + self.by) + x


class ReadByJoined(Read):
    """One of the units that read is joined to the one before it, since something goes around its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def forward(self, x):
        read = torch.tanh(Chain.forward(self, x))
        first, second, third = self.readers
        x = first(x, read)
        x = x + self.shift(read)
        return third(second(x, read), read)


def step_and_compare_gradients(beside: Beside, batches: list[torch.Tensor]) -> None:
    beside.bring(batches)
    for part in batches:
        beside.loss(beside.plain, part).backward()
    for (name, mine), other in zip(beside.model.named_parameters(), beside.plain.parameters(), strict=True):
        assert same(beside.runtime.gradient(mine), other.grad), name
    beside.update()


@pytest.mark.parametrize("make", [Repeated, Recurrent, Deaf, Read, ReadByJoined])
def test_gradients_are_those_of_accumulation_and_the_graph_is_cut(make, tmp_path):
    beside = Beside(make, tmp_path, update="step")
    with beside.runtime:
        for _ in range(4):
            step_and_compare_gradients(beside, rows())
        assert beside.why_not is None
        assert bool(beside.runtime._house.cutting.joined) == (make is ReadByJoined)


@pytest.mark.parametrize("make", [Repeated, Read])
def test_also_where_units_are_updated_in_backward(make, tmp_path):
    beside = Beside(make, tmp_path, update="backward")
    with beside.runtime:
        for _ in range(4):
            beside.step(rows())
        assert beside.why_not is None
        beside.compare()


def test_what_is_kept_back_while_it_is_absent_is_added_to_what_came_before(tmp_path):
    """Of a parameter whose gradient needs no values, in the second call of a step."""

    class Numbered(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(2, 16)

        def forward(self, x):
            numbers, (first, second, third) = (x > 0).long()[:, 0], self.layers
            return third(second(first(self.words(numbers)) + self.words(1 - numbers)))

    beside = Beside(Numbered, tmp_path, update="step")
    with beside.runtime:
        for _ in range(3):
            batches = rows()
            beside.bring(batches)
            for part in batches:
                beside.loss(beside.plain, part).backward()
            step_and_compare_gradients(beside, rows())
        assert beside.why_not is None


def encoders_and_decoders() -> dict[str, Callable[[], nn.Module]]:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 64, "d_model": 32, "use_cache": False}
    t5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    bart = {f"{side}_layers": 2 for side in ("encoder", "decoder")}
    bart |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    bart |= {f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")}
    return {
        "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**common, **t5)),
        "BART": lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(**common, **bart, max_position_embeddings=32, dropout=0.0)
        ),
    }


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_unmodified_encoders_and_decoders(name, tmp_path):
    def loss(model, batch):
        return model(input_ids=batch, labels=batch).loss

    beside = Beside(encoders_and_decoders()[name], tmp_path, loss, update="step")
    with beside.runtime:
        for _ in range(3):
            step_and_compare_gradients(beside, list(torch.randint(1, 64, (3, 2, 9))))
        assert beside.why_not is None


def test_what_is_kept_back_is_added_to_in_place(tmp_path, monkeypatch):
    """As the engine does it: there is room for two gradients of the words beside each other, not for three."""
    beside = Beside(Tied, tmp_path, update="step")
    places: list[tuple[bool, int]] = []
    keeps_back = Cuts.keeps_back

    def note(cuts: Cuts, parameter: torch.Tensor) -> bool:
        place = parameter.grad.data_ptr()
        kept = keeps_back(cuts, parameter)
        if parameter is beside.model.first.weight:
            places.append((kept, place))
        return kept

    monkeypatch.setattr(Cuts, "keeps_back", note)
    with beside.runtime:
        step_and_compare_gradients(beside, rows(2))
        places.clear()
        step_and_compare_gradients(beside, rows(2))
    assert [kept for kept, _ in places] == [True, True, False, False]
    assert all(before == behind for (_, before), (_, behind) in zip(places[:2], places[2:], strict=True))


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3)


@pytest.mark.filterwarnings("ignore:a hook registered by register_post_accumulate_grad_hook:RuntimeWarning")
@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_tied_weight_sees_the_sum_of_its_gradients_once_for_each_micro_batch(way, tmp_path):
    seen: list[torch.Tensor] = []

    def note(what: torch.Tensor) -> None:
        seen.append((what if way == "register_hook" else what.grad).clone())

    def make() -> nn.Module:
        model = Tied()
        getattr(model.first.weight, way)(note)
        return model

    beside = Beside(make, tmp_path, update="step")
    with beside.runtime:
        for _ in range(3):
            batches = rows()
            seen.clear()
            beside.bring(batches)
            found = list(seen)
            for part in batches:
                beside.loss(beside.plain, part).backward()
                beside.plain.zero_grad()
            assert all(map(same, found, seen[len(found) :]))
            assert len(found) == len(batches)
        assert beside.why_not == AROUND


def test_what_such_a_hook_makes_of_it_counts(tmp_path):
    def make() -> nn.Module:
        model = Tied()
        model.first.weight.register_hook(clamp)
        return model

    beside = Beside(make, tmp_path, update="step")
    with beside.runtime:
        for _ in range(3):
            step_and_compare_gradients(beside, rows())


def test_a_hook_that_comes_later_is_noticed_before_backward(tmp_path):
    beside = Beside(Tied, tmp_path, update="step")
    with beside.runtime:
        for _ in range(2):
            step_and_compare_gradients(beside, rows())
        for model in (beside.model, beside.plain):
            model.first.weight.register_hook(clamp)
        batches = rows()
        with pytest.raises(tiermem.TiermemError, match=r"another way .*zero_grad.* do it again"):
            beside.bring(batches)
        beside.ours.zero_grad()
        for _ in range(2):
            step_and_compare_gradients(beside, batches)


def test_a_hook_of_a_weight_that_one_segment_uses_is_in_nobodys_way(tmp_path):
    def make() -> nn.Module:
        model = Chain()
        model.layers[1].up.weight.register_hook(clamp)
        return model

    beside = Beside(make, tmp_path, update="step")
    with beside.runtime:
        for _ in range(3):
            step_and_compare_gradients(beside, rows())
        assert beside.why_not is None
