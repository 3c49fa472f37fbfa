"""`forward_backward`: the numbers of accumulation, parameters brought once per pass, and no harm from errors."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles_combinations import half_of, in_turn, some_of
from doubles_garbage import collect
from doubles_models import Block, Stack, mlp
from doubles_scenarios import Branches, Convolutions, Regularised, Twice, Wide
from doubles_together import leased_pages
from doubles_training import MIB, PlainAdamW, budget_for, config_for, largest_unit, least_budget, same, within_budgets
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.pager.extents import Extents
from tiermem.pager.page import Intent, Kind, PageKey
from tiermem.pager.pager import Pager
from tiermem.planner.footprint import PASSING
from tiermem.runtime import exchanges
from tiermem.runtime.company import alone
from tiermem.zero3.norms import team_loops
from tiermem.zero3.reduce import GradientStore
from tiermem.zero3.waiting import Waiting

UPDATES = ("step", "forward", "backward")
COUNTS = (2, 3, 3, 1)
FEWER = (3, 3, 3, 1)  # where units are updated early, more than in the step before are refused


def seeds_of(count: int) -> list[int]:
    return torch.randint(2**63 - 1, (count,)).tolist()


def one_after_the_other(model: nn.Module, batches: list, loss: Callable) -> list[torch.Tensor]:
    """What forward_backward is to equal: plain accumulation with the same random numbers."""
    seeds = seeds_of(len(batches))
    state = torch.get_rng_state()
    found = []
    for seed, batch in zip(seeds, batches, strict=True):
        torch.manual_seed(seed)
        value = loss(model, batch)
        value.backward()
        found.append(value.detach())
    torch.set_rng_state(state)
    return found


def tokens(count: int) -> list[torch.Tensor]:
    return [torch.randint(0, 40, (2, 5)) for _ in range(count)]


def rows(width: int) -> Callable[[int], list[torch.Tensor]]:
    return lambda count: [torch.randn(8, width) for _ in range(count)]


def images(count: int) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 8, 8) for _ in range(count)]


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def mode(name: str) -> Callable[[], nn.Module]:
    return lambda: Stack(mode=name)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list]]] = {
    "tied, and a root with a parameter": (Stack, tokens),
    "checkpoint": (mode("outer"), tokens),
    "reentrant checkpoint": (mode("reentrant"), tokens),
    "checkpoint inside": (mode("inner"), tokens),
    "dropout and running means": (Regularised, rows(12)),
    "a layer used twice": (Twice, rows(16)),
    "several tiles": (Wide, rows(48)),
    "convolutions": (Convolutions, images),
}


def compare(
    make: Callable[[], nn.Module],
    batches: Callable[[int], list],
    directory,
    *,
    update: str,
    budget: str = "tight",
    loss: Callable = squares,
    clip: float | None = None,
    **settings,
) -> str | None:
    """Returns why the graphs were not cut, if they were not."""
    torch.manual_seed(1)
    plain = make()
    torch.manual_seed(1)
    model = make()
    nbytes = budget_for(model, directory, budget)
    theirs = PlainAdamW(plain.parameters(), lr=1e-2, max_grad_norm=clip)
    with tiermem.offload(model, config_for(directory, nbytes, update, **settings)) as runtime:
        ours = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=clip)
        for number, count in enumerate(FEWER if update == "backward" else COUNTS):
            torch.manual_seed(number)
            given = batches(count)
            state = torch.get_rng_state()
            expected = one_after_the_other(plain, given, loss)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            found = runtime.forward_backward(given, lambda batch: loss(model, batch))
            assert torch.equal(torch.get_rng_state(), after)
            assert all(map(same, found, expected)), number
            assert not any(value.requires_grad for value in found)
            if update != "backward":
                for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                    assert same(runtime.gradient(mine), other.grad)
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
        for (name, mine), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert same(runtime.parameter(mine), other[1].detach()), name
        for (name, mine), other in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            assert torch.equal(mine, other[1]), name
        within_budgets(runtime.statistics())
        assert runtime.statistics().total.held_frames == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "tiermem-micro-batch"]
    return runtime._house.cutting.why_not


@pytest.mark.parametrize(("name", "update"), in_turn(MODELS, UPDATES))
def test_the_numbers_are_those_of_accumulation(name, update, tmp_path):
    compare(*MODELS[name], tmp_path, update=update)


@pytest.mark.parametrize("update", UPDATES)
def test_also_in_the_least_budget(update, tmp_path):
    compare(*MODELS["tied, and a root with a parameter"], tmp_path, update=update, budget="least")


def test_also_with_clipping(tmp_path):
    compare(*MODELS["dropout and running means"], tmp_path, update="forward", clip=0.1)


@pytest.mark.parametrize(("place", "capacity"), [("cpu", 25), ("cuda", 0)])
def test_gradients_wait_for_the_next_ones_in_host_memory_only(place, capacity):
    """Nor are the loops compiled by which the two would be added: for gradients on a device there are none."""
    blueprint: Any = SimpleNamespace(shards=(), layouts=(), hold_tiles=True, apart=frozenset(), host_nbytes=100)
    storage: Any = SimpleNamespace(pager=None, torch_device=torch.device(place))
    nobody: Any = None
    _, gradients = exchanges.open_exchanges(blueprint, [], storage, alone(), nobody, nobody)
    assert isinstance(gradients, GradientStore)
    assert gradients._waiting.capacity == capacity


@pytest.mark.parametrize(("pairing", "update"), in_turn([4, 1 << 40], ["auto", "forward"]))
def test_bfloat16_gradients_taken_two_at_a_time_have_the_bits_of_accumulation(pairing, update, tmp_path, monkeypatch):
    """With and without room for them; also where fewer come than were expected, so that one waits in vain."""
    if team_loops() is None:
        pytest.skip("torch has no GNU OpenMP of its own here, or numba cannot compile the loops")
    monkeypatch.setattr(exchanges, "_PAIRING", pairing)
    waited, pop = [], Waiting.pop

    def note(waiting, parameter):
        gradient = pop(waiting, parameter)
        waited.append(gradient is not None)
        return gradient

    monkeypatch.setattr(Waiting, "pop", note)
    sides = []
    for name in ("together", "one by one"):
        torch.manual_seed(1)
        model = Wide()
        (tmp_path / name).mkdir()
        config = config_for(tmp_path / name, "1MiB", update, param_dtype="bfloat16")
        sides.append((model, tiermem.offload(model, config)))
    optimizers = [tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5) for model, _ in sides]
    for number, count in enumerate((3, 4, 4, 3, 5, 1)):
        torch.manual_seed(number)
        given = [torch.randn(8, 48).to(torch.bfloat16) for _ in range(count)]
        (ours, runtime), (theirs, plain) = sides
        found = runtime.forward_backward(given, lambda batch, ours=ours: squares(ours, batch))
        assert all(map(same, found, one_after_the_other(theirs, given, squares)))
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert same(runtime.gradient(mine), plain.gradient(other)), count
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same(runtime.parameter(mine), plain.parameter(other))
    assert any(waited) == (pairing == 4)
    for _, each in sides:
        within_budgets(each.statistics())
        each.close()


def hugging_face() -> dict[str, Callable[[], nn.Module]]:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 64, "use_cache": False}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    models = {
        "Llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**common, **small, num_key_value_heads=2, attention_dropout=0.1)
        ),
        "GPT-2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**common, n_embd=32, n_layer=3, n_head=4, n_positions=32)
        ),
        "Qwen3": lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**common, **small, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
        ),
    }

    def checkpointed() -> nn.Module:
        model = models["Llama"]()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return {name: lambda make=make: make().train() for name, make in models.items()} | {
        "Llama with checkpointing": lambda: checkpointed().train()
    }


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss / 3


@pytest.mark.parametrize(
    ("name", "update"),
    some_of(
        [("GPT-2", "forward"), ("Llama with checkpointing", "backward")],
        [
            ("GPT-2", "backward"),
            ("Llama with checkpointing", "forward"),
            *((name, update) for name in ("Llama", "Qwen3") for update in ("forward", "backward")),
        ],
    ),
)
def test_unmodified_hugging_face_decoders(name, update, tmp_path):
    why_not = compare(
        hugging_face()[name],
        lambda count: [torch.randint(0, 64, (2, 9)) for _ in range(count)],
        tmp_path,
        update=update,
        loss=language_loss,
    )
    assert why_not is None, "their graphs can be cut"


def test_without_a_loss_micro_batches_are_keyword_arguments(tmp_path):
    make = hugging_face()["Llama"]
    torch.manual_seed(0)
    model = make()
    with tiermem.offload(model, config_for(tmp_path, "4MiB", "forward")) as runtime:
        batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (4, 2, 9))]
        torch.manual_seed(5)
        found = runtime.forward_backward(batches)
        gradient = runtime.gradient(model.lm_head.weight)
        tiermem.AdamW(model.parameters()).zero_grad()
        torch.manual_seed(5)
        expected = one_after_the_other(model, batches, lambda trained, batch: trained(**batch).loss / 4)
        assert all(map(same, found, expected))
        assert same(gradient, runtime.gradient(model.lm_head.weight))
        with pytest.raises(tiermem.ConfigError, match="needs `loss=`"):
            runtime.forward_backward([torch.zeros(2)])
        with pytest.raises(tiermem.TiermemError, match="give it labels"):
            runtime.forward_backward([{"input_ids": batches[0]["input_ids"]}])


class Counted:
    """A model in pages that are too large to stay, and which parameters cross the wire in a forward and backward.

    States may cross it as well: what is at hand as backward ends decides how much of the update is read ahead of it.
    """

    def __init__(self, directory, monkeypatch, *, units: int = 4) -> None:
        read = Extents.for_read
        self.read: list[PageKey] = []

        def note(extents, key):
            self.read.append(key)
            return read(extents, key)

        monkeypatch.setattr(Extents, "for_read", note)
        self.model = Wide(width=64, depth=8)
        nbytes = units * largest_unit(self.model, directory) + PASSING
        self.runtime = tiermem.offload(self.model, config_for(directory, nbytes, "step", look_ahead=0))
        self.optimizer = tiermem.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, bring: Callable[[], object]) -> tuple[int, int]:
        """How often parameters were read, and units gathered, before the optimizer's step."""
        self.read.clear()
        before = self.runtime._house.gatherer.statistics().gathers
        bring()
        read = sum(key.kind is Kind.PARAM for key in list(self.read))
        gathers = self.runtime._house.gatherer.statistics().gathers - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        return read, gathers

    def vertical(self, count: int) -> tuple[int, int]:
        batches = [torch.randn(3, 64) for _ in range(count)]
        return self.step(lambda: self.runtime.forward_backward(batches, lambda batch: squares(self.model, batch)))

    def accumulated(self, count: int) -> tuple[int, int]:
        batches = [torch.randn(3, 64) for _ in range(count)]
        return self.step(lambda: [squares(self.model, batch).backward() for batch in batches])


def test_parameters_cross_the_wire_once_per_pass(tmp_path, monkeypatch):
    counted = Counted(tmp_path, monkeypatch)
    with counted.runtime:
        for _ in range(2):
            counted.vertical(1)
        one, four = counted.vertical(1), counted.vertical(4)
        assert one[1] == four[1]
        assert one[0] > 4  # some units' parameters do not stay
        assert four[0] <= 1.2 * one[0]
        for _ in range(2):
            many = counted.accumulated(4)
        assert many[1] >= 3.5 * one[1]
        assert many[0] >= 2.5 * one[0]


def test_gradient_tiles_that_are_not_held_stay_until_the_next_micro_batch(tmp_path):
    """The plan knew of the first micro-batch's leases only: with four twice as much was written as with one."""
    model = Wide(width=128, depth=8)
    nbytes = largest_unit(model, tmp_path) * 13 // 5  # too little for tiles that are held, enough for them to stay
    settings = {"io_backend": "inline", "tile_size": "64KiB", "commits": False}
    with tiermem.offload(model, config_for(tmp_path, nbytes, "step", **settings), coalesce=0) as runtime:
        assert not runtime._house.blueprint.hold_tiles
        optimizer, written = tiermem.AdamW(model.parameters(), lr=1e-2), []
        for count in (4, 4, 4, 1, 1, 1):
            batches = rows(128)(count)
            runtime.forward_backward(batches, lambda batch: squares(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            runtime.settle()
            written.append(runtime.statistics().last.bytes_written)
    assert 0 < written[2] < 1.2 * written[5]


def test_the_next_parameters_come_before_the_tiles_of_an_update_that_is_far_off(tmp_path, monkeypatch):
    followed: list[int | None] = []
    follow = Pager.set_schedule

    def note(pager, schedule, **settings):
        followed.append(schedule.hasty)
        follow(pager, schedule, **settings)

    monkeypatch.setattr(Pager, "set_schedule", note)
    counted = Counted(tmp_path, monkeypatch)
    with counted.runtime:
        for step, hasty in ((counted.vertical, 5), (counted.accumulated, None), (counted.vertical, 5)):
            for _ in range(2):
                step(3)
            assert followed[-1] == hasty


def test_gradient_tiles_are_held_until_all_micro_batches_are_through_their_unit(tmp_path, monkeypatch):
    leased: Counter[PageKey] = Counter()
    start = Pager.start_lease

    def note(pager, keys, intent, **settings):
        leased.update(key for key in keys if key.kind is Kind.GRAD and intent is not Intent.READ)
        return start(pager, keys, intent, **settings)

    monkeypatch.setattr(Pager, "start_lease", note)
    counted = Counted(tmp_path, monkeypatch, units=10)
    with counted.runtime:
        for step, times in ((counted.vertical, 1), (counted.accumulated, 4), (counted.vertical, 1)):
            for _ in range(3):
                leased.clear()
                step(4)
            assert {*leased.values()} == {times}


def test_updates_begin_while_backward_goes_on(tmp_path):
    model = Wide()
    with tiermem.offload(model, config_for(tmp_path, "1MiB", "backward")) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            runtime.forward_backward([torch.randn(3, 48) for _ in range(4)], lambda batch: squares(model, batch))
            runtime.settle()
            done = runtime._house.updater.statistics().units
            # In the first step nobody knows how many gradients there will be; later they are updated by now.
            assert done == (3 * (number + 1) if number else 0)
            optimizer.step()
            runtime.settle()


class Fragile(Block):
    def forward(self, x):
        result = super().forward(x)
        if x.isnan().any():
            raise ValueError("in the middle of a unit")
        return result


def fragile() -> nn.Module:
    return nn.Sequential(Block(16), Fragile(16), Block(16))


def beside_plain(directory, update: str, bring: Callable) -> None:
    """Four steps; what `bring(runtime, model, optimizer, number)` returns, plain PyTorch accumulates."""
    torch.manual_seed(0)
    model, plain = fragile(), fragile()
    plain.load_state_dict(model.state_dict())
    nbytes = budget_for(model, directory, "tight", ["Block", "Fragile"])
    theirs = PlainAdamW(plain.parameters(), lr=1e-2)
    with tiermem.offload(model, config_for(directory, nbytes, update), units=["Block", "Fragile"]) as runtime:
        ours = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number in range(4):
            for batch in bring(runtime, model, ours, number):
                squares(plain, batch).backward()
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert same(runtime.parameter(mine), other.detach())


@pytest.mark.parametrize(("update", "failing"), half_of(UPDATES, [0, 1, 3]))
def test_an_error_ends_all_micro_batches_and_training_goes_on(failing, update, tmp_path):
    def fails(_):
        raise ValueError("in backward")

    def bring(runtime, model, optimizer, number):
        batches = [torch.randn(4, 16) for _ in range(4)]

        def loss(item):
            index, batch = item
            if index != failing:
                return squares(model, batch)
            value = squares(model, batch * float("nan") if number == 1 else batch)
            value.register_hook(fails)
            return value

        if number % 2:
            with pytest.raises(ValueError, match="in the middle of a unit" if number == 1 else "in backward"):
                runtime.forward_backward(list(enumerate(batches)), loss)
            assert not [t for t in threading.enumerate() if t.name == "tiermem-micro-batch"]
            assert not leased_pages(runtime)
            optimizer.zero_grad()
        runtime.forward_backward(batches, lambda batch: squares(model, batch))
        return batches

    beside_plain(tmp_path, update, bring)


@pytest.mark.parametrize("update", UPDATES)
def test_a_graph_that_dies_during_the_pass_has_no_unit_updated_while_another_is_held(update, tmp_path):
    def bring(runtime, model, optimizer, number):
        batches = [torch.randn(4, 16) for _ in range(3)]
        graphs = [squares(model, batches[0])]  # whoever holds it may still ask for the values of every unit

        def loss(item):
            index, batch = item
            batch = batch.clone().requires_grad_()
            if index == 0:
                batch.register_hook(lambda _: graphs.clear())  # the last thing in the first backward that ends
            return squares(model, batch)

        runtime.forward_backward(list(enumerate(batches)), loss)
        assert not graphs
        return batches

    beside_plain(tmp_path, update, bring)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(16), Fragile(16)])

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_an_error_in_a_checkpoint_leaves_the_hooks_of_the_caller_alone(tmp_path):
    """A checkpoint's hooks belong to the micro-batch's thread, and so does their removal, however late it comes."""
    model = Checkpointed()
    with tiermem.offload(model, config_for(tmp_path, MIB, "step"), units=["Block", "Fragile"]) as runtime:
        batches = [torch.randn(4, 16) for _ in range(3)]
        broken = [batches[0], batches[1] * float("nan"), batches[2]]

        def keep(tensor):
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            with pytest.raises(ValueError, match="in the middle of a unit") as caught:
                runtime.forward_backward(broken, lambda batch: squares(model, batch))
            del caught
            collect()
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) == (keep, keep)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert runtime.forward_backward(batches, lambda batch: squares(model, batch))


@pytest.mark.parametrize("update", ["step", "forward"])
def test_micro_batches_that_need_different_units_are_served(update, tmp_path):
    """Branches are units of their own; gradients may be added up in another order, so that the last bit may differ."""
    torch.manual_seed(0)
    model, plain = Branches(), Branches()
    plain.load_state_dict(model.state_dict())
    nbytes = budget_for(model, tmp_path, "tight")
    with tiermem.offload(model, config_for(tmp_path, nbytes, update)) as runtime:
        ours, theirs = tiermem.AdamW(model.parameters(), lr=1e-3), PlainAdamW(plain.parameters(), lr=1e-3)
        for branches in ((0, 1, 2, 1), (2, 2, 0, 1), (1, 1, 1, 1)):
            batches = [(torch.randn(4, 6), branch) for branch in branches]
            before = runtime._house.gatherer.statistics().gathers
            runtime.forward_backward(batches, lambda item: model(*item).square().mean())
            assert runtime._house.gatherer.statistics().gathers - before <= 1 + 2 * len(set(branches)) + 1
            for item in batches:
                plain(*item).square().mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(runtime.parameter(mine), other.detach(), rtol=1e-5, atol=1e-6)


def test_micro_batches_are_computed_by_as_many_threads_as_the_caller_has(tmp_path):
    """OpenMP has a number for each thread, which MKL goes by: with another one products have other last bits."""
    if team_loops() is None:
        pytest.skip("torch has no GNU OpenMP of its own here, or numba cannot compile the loops")
    from tiermem.zero3.team import _library

    model, before, found = mlp(), torch.get_num_threads(), []

    def loss(batch: torch.Tensor) -> torch.Tensor:
        found.append(_library.omp_get_max_threads())
        return squares(model, batch)

    torch.set_num_threads(3)
    try:
        with tiermem.offload(model, config_for(tmp_path, MIB, "step")) as runtime:
            for _ in range(2):
                runtime.forward_backward(rows(6)(3), loss)
        assert found == [3] * 6
    finally:
        torch.set_num_threads(before)


class TiedAround(nn.Module):
    """Words whose gradient is complete at the end of backward, while the layer above them is kept for others."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(131, 24), nn.LSTM(24, 24), nn.Linear(24, 131, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(batch))[0])


@pytest.mark.parametrize("count", [1, 2])
def test_an_update_that_is_waited_for_has_the_least_budget_for_itself(count, tmp_path):
    settings = {"param_dtype": "bfloat16", "moments": "int8", "block_size": 4096}
    model = TiedAround()
    nbytes = least_budget(TiedAround(), tmp_path, **settings)
    with tiermem.offload(model, config_for(tmp_path, nbytes, "backward", **settings), coalesce=0) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        assert runtime._house.blueprint.footprint.serial
        for _ in range(4):
            batches = [torch.randint(131, (4, 1)) for _ in range(count)]
            runtime.forward_backward(batches, lambda batch: squares(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        within_budgets(runtime.statistics())


def test_autocast_and_saved_tensor_hooks_of_the_caller_count(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    packed, seen = [], []

    def loss(batch):
        out = model(batch)
        seen.append(out.dtype)
        return out.float().square().mean()

    def pack(tensor):
        packed.append(threading.current_thread().name)
        return tensor

    with tiermem.offload(model, config_for(tmp_path, "1MiB", "step")) as runtime:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                runtime.forward_backward([torch.randn(2, 8), torch.randn(2, 8)], loss)
        assert seen == [torch.bfloat16] * 2
        assert "tiermem-micro-batch" in packed
        runtime.forward_backward([torch.randn(2, 8)], loss)
        assert seen[-1] == torch.float32
        assert runtime.forward_backward([], loss) == []


def test_micro_batches_have_the_default_device_of_the_caller(tmp_path):
    """Torch keeps it for each thread, and programs set it once."""
    model, found = mlp(), []

    def loss(batch: torch.Tensor) -> torch.Tensor:
        found.append(torch.empty(0).device.type)
        return squares(model, batch)

    with tiermem.offload(model, config_for(tmp_path, MIB, "step")) as runtime:
        for _ in range(3):  # in threads first, then on stacks of their own
            given = rows(6)(3)
            with torch.device("meta"):
                runtime.forward_backward(given, loss)
            assert torch.empty(0).device.type == "cpu"
        assert found == ["meta"] * 9
        runtime.forward_backward(rows(6)(3), loss)
        assert found[9:] == ["cpu"] * 3


def test_micro_batches_are_computed_on_the_stream_of_the_caller(tmp_path, monkeypatch):
    """A new thread of torch's begins with the first device and that one's default stream."""
    chosen = threading.local()
    entered = []

    @contextlib.contextmanager
    def stream(wanted):
        before, chosen.stream = getattr(chosen, "stream", "default"), wanted
        entered.append(threading.current_thread().name)
        yield
        chosen.stream = before

    def loss(batch):
        seen.append(getattr(chosen, "stream", "default"))
        return model(batch).square().mean()

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: getattr(chosen, "stream", "default"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    with tiermem.offload(model, config_for(tmp_path, "1MiB", "step")) as runtime:
        for in_use, wanted in ((False, "default"), (True, "side")):
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
            chosen.stream, seen = "side", []
            runtime.forward_backward([torch.randn(2, 8), torch.randn(2, 8)], loss)
            assert seen == [wanted] * 2
            assert chosen.stream == "side"
    assert entered == ["tiermem-micro-batch"] * 2


def test_what_cannot_be_done_is_said(tmp_path):
    model = Block(8)
    with tiermem.offload(model, config_for(tmp_path, MIB, "step")) as runtime:
        batches = [torch.randn(2, 8)]
        with torch.no_grad(), pytest.raises(tiermem.TiermemError, match="no_grad"):
            runtime.forward_backward(batches, lambda batch: squares(model, batch))
        with pytest.raises(tiermem.TiermemError, match="one element"):
            runtime.forward_backward(batches, model)
        with pytest.raises(tiermem.TiermemError, match="inside forward_backward"):
            runtime.forward_backward(batches, lambda batch: runtime.forward_backward([batch], model))
        optimizer = tiermem.AdamW(model.parameters())
        with contextlib.suppress(tiermem.TiermemError):
            optimizer.zero_grad()
        runtime.forward_backward(batches, lambda batch: squares(model, batch))
        optimizer.step()
    with pytest.raises(tiermem.TiermemError, match="closed"):
        runtime.forward_backward(batches, lambda batch: squares(model, batch))
