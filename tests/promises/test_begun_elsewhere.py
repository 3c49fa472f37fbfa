"""A run that was begun in plain PyTorch goes on offloaded, with the weights and moments it had; and the way back."""

from __future__ import annotations

import copy
import errno
from collections.abc import Mapping

import pytest
import torch
from doubles_combinations import in_turn
from doubles_models import Stack, small_llama
from doubles_pager import save_all
from doubles_training import BUDGETS, MIB, UPDATES, PlainAdamW, budget_for, config_for
from torch import nn

import tiermem
from tiermem.optim.masters import StateStore
from tiermem.optim.service import Moments

HYPER = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}


class Images(nn.Module):
    """Weights in another order of memory than that of their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 9, 3), nn.Conv2d(9, 5, 3)])
        self.head = nn.Linear(5, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            images = layer(images).relu()
        return self.head(images.mean((2, 3)))


class Divided(torch.Tensor):
    """Looks like one of torch.distributed.tensor, of which a rank has a part."""

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("this takes all ranks")


def tokens() -> torch.Tensor:
    return torch.randint(40, (2, 5))


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def groups(model: nn.Module) -> list[dict]:
    parameters = list(model.parameters())
    return [{"params": parameters[1::2], "lr": 3e-2}, {"params": parameters[::2]}]


def train(model, optimizer, make_batch, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(make_batch()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def begun(make=Stack, make_batch=tokens):
    """A model after three steps, and the state of its optimizer."""
    torch.manual_seed(1)
    model = make()
    optimizer = PlainAdamW(groups(model), **HYPER)
    train(model, optimizer, make_batch, 3)
    return model, optimizer


@pytest.mark.parametrize(("update", "budget", "kind"), in_turn(UPDATES, BUDGETS, [(Stack, tokens), (Images, images)]))
def test_the_bits_of_plain_pytorch(tmp_path, kind, budget, update):
    make, make_batch = kind
    model, optimizer = begun(make, make_batch)
    moved = copy.deepcopy(model)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.manual_seed(3)
    expected = train(model, optimizer, make_batch, 3)
    (tmp_path / "run").mkdir()
    nbytes = budget_for(moved, tmp_path / "run", budget)
    with tiermem.offload(moved, config_for(tmp_path / "run", nbytes, update), coalesce=0) as runtime:
        ours = tiermem.AdamW(groups(moved))
        ours.load_state_dict(torch.load(tmp_path / "optimizer.pt", mmap=True))
        torch.manual_seed(3)
        assert train(moved, ours, make_batch, 3) == expected
        for (name, values), parameter in zip(model.named_parameters(), moved.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values), name


def test_in_the_middle_of_an_offloaded_run(tmp_path):
    """Updates that are queued are not to come behind what is loaded."""
    model, optimizer = begun()
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    expected = train(model, optimizer, tokens, 2)
    _, fresh = begun()  # the same as the first one was
    for update in ("forward", "backward"):
        directory = tmp_path / update
        directory.mkdir()
        moved = copy.deepcopy(other)
        weights = {name: values.clone() for name, values in moved.state_dict().items()}
        with tiermem.offload(moved, config_for(directory, "64KiB", update), coalesce=0) as runtime:
            ours = tiermem.AdamW(groups(moved), **HYPER)
            train(moved, ours, tokens, 2)
            with runtime.gathered(moved, write=True):
                moved.load_state_dict(weights)
            ours.load_state_dict(fresh.state_dict())
            torch.manual_seed(3)
            assert train(moved, ours, tokens, 2) == expected


@pytest.mark.parametrize("moments", ["float32", "int8"])
@pytest.mark.parametrize("param_dtype", ["bfloat16", "float16"])
def test_masters_stay_and_moments_are_those_given(tmp_path, param_dtype, moments):
    model, optimizer = begun(lambda: Stack(width=80))
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = optimizer.state_dict()
    with tiermem.offload(
        model, config_for(tmp_path, 64 * MIB, "step", param_dtype=param_dtype, moments=moments), coalesce=0
    ) as runtime:
        ours = tiermem.AdamW(groups(model))
        first = state["param_groups"][0]["params"][:1]  # one of its unit alone, the others without any
        ours.load_state_dict(state | {"state": {number: state["state"][number] for number in first}})
        ours.load_state_dict(state)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for number, parameter in enumerate([each for group in groups(model) for each in group["params"]]):
            name = names[id(parameter)]
            assert torch.equal(runtime.master(parameter), expected[name]), name
            unit, slot = runtime._house.gatherer.slots[id(parameter)]
            found = runtime._house.states.read_moments(unit, slot.parameter)
            entry = state["state"][number]
            for values, key in zip(found, ("exp_avg", "exp_avg_sq"), strict=True):
                given = entry[key].flatten()
                if moments == "float32" or given.numel() < 4096:
                    assert torch.equal(values, given), name
                else:
                    assert (values - given).abs().max() <= given.abs().max() / 16, name
                    assert not torch.equal(values, given)


def test_what_is_loaded_is_committed(tmp_path):
    model, optimizer = begun()
    moved = copy.deepcopy(model)
    torch.manual_seed(3)
    expected = train(model, optimizer, tokens, 2)
    _, fresh = begun()
    with tiermem.offload(moved, config_for(tmp_path, "64KiB", "auto"), coalesce=0) as runtime:
        ours = tiermem.AdamW(groups(moved))
        runtime.commit().wait()
        pending = runtime.commit()  # pages are not to change under it
        ours.load_state_dict(fresh.state_dict())
        pending.wait()
        runtime.commit(extra="loaded").wait()
    with tiermem.deferred_init():
        again = Stack()
    with tiermem.offload(again, config_for(tmp_path, "64KiB", "auto"), coalesce=0, resume=True) as runtime:
        assert runtime.committed == "loaded"
        ours = tiermem.AdamW(groups(again))
        ours.load_state_dict(runtime.committed_optimizer_state())
        torch.manual_seed(3)
        assert train(again, ours, tokens, 2) == expected


def test_moments_of_a_unit_are_not_gathered_in_memory_before_they_are_stored(tmp_path, monkeypatch):
    """Those of float32 are taken from where they are, which may be a file that is mapped."""
    model, optimizer = begun()
    moved, given = copy.deepcopy(model), optimizer.state_dict()
    own = {entry[name].data_ptr() for entry in given["state"].values() for name in ("exp_avg", "exp_avg_sq")}
    stored, original = set(), StateStore.store_moments

    def store(states: StateStore, unit: int, given: Mapping[int, Moments], masters: None) -> None:
        stored.update(each.data_ptr() for moments in given.values() for each in moments)
        original(states, unit, given, masters)

    monkeypatch.setattr(StateStore, "store_moments", store)
    with tiermem.offload(moved, config_for(tmp_path, 64 * MIB, "step")):
        tiermem.AdamW(groups(moved), **HYPER).load_state_dict(given)
    assert stored == own


@pytest.mark.parametrize(
    ("param_dtype", "moments"),
    [("bfloat16", "float32"), ("bfloat16", "int8"), ("float16", "float32"), ("float32", "float32")],
)
def test_what_is_loaded_or_gathered_for_writing_is_written_once(tmp_path, param_dtype, moments):
    """A tile was written for each of the parameters that lie in it: nine here."""
    model = small_llama(words=64, width=128, mlp_width=256, layers=3)
    settings = {"param_dtype": param_dtype, "moments": moments, "commits": False}
    config = config_for(tmp_path, 2 * MIB, "step", **settings)
    with tiermem.offload(model, config, coalesce=0) as runtime:
        ours = tiermem.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            inputs = torch.randint(0, 64, (2, 8))
            model(input_ids=inputs, labels=inputs).loss.backward()
            ours.step()
            ours.zero_grad()
        states, layouts = runtime._house.blueprint.states.values(), runtime._house.layouts
        nbytes = sum(state.state_nbytes(tile) for state in states for tile in range(state.tiles))
        everything = nbytes + sum(layout.nbytes for layout in layouts)

        def written() -> int:
            runtime.settle()
            save_all(runtime._house.storage.pager)  # or what was changed before would be written later
            return runtime.statistics().total.bytes_written

        given, before = [torch.rand(parameter.shape) for parameter in model.parameters()], written()
        entries = {n: {"step": torch.tensor(3.0), "exp_avg": each, "exp_avg_sq": each} for n, each in enumerate(given)}
        ours.load_state_dict({"state": entries, "param_groups": ours.state_dict()["param_groups"]})
        loaded = written()
        assert 0 < loaded - before <= 1.1 * nbytes
        for layer in model.model.layers:
            with runtime.gathered(layer, write=True), torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(1.01)
        layers = written()
        assert layers - loaded <= 1.1 * everything
        for parameter in model.parameters():  # each by itself: its unit had been written each time
            with runtime.gathered(parameter, write=True), torch.no_grad():
                parameter.mul_(1.01)
        assert written() - layers <= 1.1 * everything


def test_what_does_not_fit_changes_nothing(tmp_path):
    model, optimizer = begun()
    state = optimizer.state_dict()
    with tiermem.offload(model, config_for(tmp_path, "64KiB", "step"), coalesce=0) as runtime:
        ours = tiermem.AdamW(groups(model), lr=0.5)
        entries = dict(state["state"])  # of another order of parameters
        entries[0], entries[1] = entries[1], entries[0]
        with pytest.raises(tiermem.ConfigError, match=r"expected moments of shape .* for .*found"):
            ours.load_state_dict(state | {"state": entries})
        with pytest.raises(ValueError, match="parameter group"):
            ours.load_state_dict(state | {"param_groups": state["param_groups"][:1]})
        model(tokens()).square().mean().backward()
        with pytest.raises(tiermem.TiermemError, match="between backward and step"):
            ours.load_state_dict(state)
        ours.zero_grad()
        assert ours.param_groups[1]["lr"] == 0.5
        assert not ours.step_counts()
        unit, slot = runtime._house.gatherer.slots[id(next(model.parameters()))]
        assert not any(each.any() for each in runtime._house.states.read_moments(unit, slot.parameter))
        ours.load_state_dict(state)
    with pytest.raises(tiermem.TiermemError, match="closed"):
        ours.load_state_dict(state)


@pytest.mark.parametrize(
    "empty",
    [lambda values: values.to("meta"), torch.Tensor.to_sparse, lambda values: values.as_subclass(Divided)],
    ids=["meta", "sparse", "divided"],
)
def test_moments_whose_values_are_not_there_change_nothing(tmp_path, empty):
    model, optimizer = begun()
    state = optimizer.state_dict()
    state["state"][1] = {**state["state"][1], "exp_avg": empty(state["state"][1]["exp_avg"])}
    with tiermem.offload(model, config_for(tmp_path, "64KiB", "step"), coalesce=0):
        ours = tiermem.AdamW(groups(model), lr=0.5)
        with pytest.raises(tiermem.ConfigError, match="with all their values"):
            ours.load_state_dict(state)
        assert (ours.param_groups[1]["lr"], ours.full_state_dict()["state"]) == (0.5, {})
        train(model, ours, tokens, 1)


def test_a_drive_that_fails_while_moments_are_loaded_is_the_only_error(tmp_path, monkeypatch):
    """Not one, at the next step, of an optimizer whose state somebody has replaced."""
    model, optimizer = begun()
    with tiermem.offload(model, config_for(tmp_path, "64KiB", "step"), coalesce=0) as runtime:
        ours = tiermem.AdamW(groups(model))

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "the drive")

        with monkeypatch.context() as patched:
            patched.setattr(runtime._house.states, "store_moments", fail)
            with pytest.raises(OSError, match="the drive"):
                ours.load_state_dict(optimizer.state_dict())
        assert not ours.step_counts()
        train(model, ours, tokens, 1)


def test_counts_without_moments_are_remarked_where_they_are_not_those_of_the_moments(tmp_path):
    model, _ = begun()
    other = copy.deepcopy(model)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with tiermem.offload(model, config_for(tmp_path / "one", "64KiB", "step"), coalesce=0):
        ours = tiermem.AdamW(groups(model))
        train(model, ours, tokens, 2)
        saved, whole = ours.state_dict(), ours.full_state_dict()
        ours.load_state_dict(saved)  # of these very moments
    with tiermem.offload(other, config_for(tmp_path / "other", "64KiB", "step"), coalesce=0):
        ours = tiermem.AdamW(groups(other))
        ours.load_state_dict(whole)
        ours.load_state_dict(saved)
        saved["state"][0]["step"] = 7
        with pytest.warns(RuntimeWarning, match=r"of 1 parameters .*full_state_dict"):
            ours.load_state_dict(saved)


@pytest.mark.parametrize(("update", "budget", "kind"), in_turn(UPDATES, BUDGETS, [(Stack, tokens), (Images, images)]))
def test_a_run_goes_on_in_plain_pytorch(tmp_path, kind, budget, update):
    make, make_batch = kind
    torch.manual_seed(1)
    model = make()
    alone = copy.deepcopy(model)
    optimizer = PlainAdamW(groups(alone), **HYPER)
    torch.manual_seed(3)
    expected = train(alone, optimizer, make_batch, 6)
    nbytes = budget_for(model, tmp_path, budget)
    runtime = tiermem.offload(model, config_for(tmp_path, nbytes, update), coalesce=0)
    ours = tiermem.AdamW(groups(model), **HYPER)
    assert ours.full_state_dict()["state"] == {}
    torch.manual_seed(3)
    found = train(model, ours, make_batch, 3)
    torch.save(ours.full_state_dict(), tmp_path / "optimizer.pt")
    torch.manual_seed(3)
    for _ in range(3):
        make_batch()
    runtime.close(restore_model=True)
    back = torch.optim.AdamW(groups(model))  # neither fused nor with these settings: both are in the state
    back.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    found += train(model, back, make_batch, 3)
    assert found == expected
    for (name, values), parameter in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, values), name


def test_moments_are_read_between_steps(tmp_path):
    with tiermem.offload(model := Stack(), config_for(tmp_path, "64KiB", "step"), coalesce=0):
        ours = tiermem.AdamW(groups(model))
        train(model, ours, tokens, 1)
        model(tokens()).square().mean().backward()
        with pytest.raises(tiermem.TiermemError, match="asked for between backward and step"):
            ours.full_state_dict()
        ours.step()
        before = ours.full_state_dict()["state"]
        kept = copy.deepcopy(before)
        train(model, ours, tokens, 2)
        for number, entry in before.items():  # copies, that stay
            assert all(torch.equal(entry[name], kept[number][name]) for name in ("exp_avg", "exp_avg_sq"))
            assert (entry["step"], ours.state_dict()["state"][number]["step"]) == (2, 4)
