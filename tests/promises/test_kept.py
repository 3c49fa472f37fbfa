"""Parameters kept in memory by choice: never evicted, never read from SWAP, and in the dtype that was asked for."""

from __future__ import annotations

import pytest
import torch
from doubles_combinations import half_of, in_turn, part_of
from doubles_models import Stack
from doubles_pager import save_all
from doubles_scenarios import Wide, frozen, loop, tokens_batch, wide_batch
from doubles_training import UPDATES, budget_for, check, config_for, least_budget, offloaded, plain, within_budgets
from safetensors.torch import save_file
from torch import nn

import tiermem
from tiermem.memory.tiers import Tier
from tiermem.pager.page import Kind
from tiermem.zero3.keep import Keeping


def is_norm(name, parameter):
    return "norm" in name


class Layer(nn.Module):
    """A norm in its own dtype, products in theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        inner = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(inner)))


class Normed(nn.Module):
    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x.to(self.norm.weight.dtype))


class PlainMixed:
    """Masters beside a model whose parameters have the dtypes of `dtype_of(name)`."""

    def __init__(self, model, dtype_of, **settings) -> None:
        self.model = model
        self.masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype_of(name))
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **settings)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            parameter.data.copy_(master)


def made(seed: int = 1) -> Normed:
    torch.manual_seed(seed)
    return Normed()


def train(model, step, steps, dtype=torch.bfloat16) -> list[float]:
    losses = []
    for number in range(steps):
        torch.manual_seed(100 + number)
        loss = model(torch.randn(5, 48).to(dtype)).square().mean()
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def norms_wide(name: str) -> torch.dtype:
    return torch.float32 if "norm" in name else torch.bfloat16


class Sandwich(nn.Module):
    """Its norm's gradients come between those of its products, and in the middle of a backward of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(48, 96), nn.LayerNorm(96), nn.Linear(96, 48)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)))


@pytest.mark.parametrize("update", UPDATES)
def test_gradients_of_what_is_kept_come_between_without_letting_go_of_the_rest(update, tmp_path, monkeypatch):
    """The tiles of the rest are asked for once, ahead of time, and held until the last of its gradients."""

    def models():
        torch.manual_seed(1)
        return nn.Sequential(*(Sandwich() for _ in range(3)))

    expected = models()
    other = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    train(expected, lambda: (other.step(), other.zero_grad()), 4, torch.float32)
    model = models()
    asked: list[tuple[str, int]] = []
    with tiermem.offload(model, config_for(tmp_path, 8 << 20, update), keep=is_norm, units=["Sandwich"]) as runtime:
        kept, pager = kept_units(runtime), runtime._house.storage.pager

        def note(name):
            real = getattr(pager, name)

            def call(keys, *rest, **options):
                if "lane" not in options:  # what the update leases is not asked for by the computation
                    asked.extend((name, unit) for unit in {key.unit for key in keys if key.kind is Kind.GRAD} - kept)
                return real(keys, *rest, **options)

            monkeypatch.setattr(pager, name, call)

        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer.step, 3, torch.float32)
        note("start_lease")
        note("lease")
        torch.manual_seed(103)
        model(torch.randn(5, 48)).square().mean().backward()
        found = list(asked)
        optimizer.step()
        rest = sorted({layout.unit for layout in runtime._house.layouts} - kept, reverse=True)
        assert len(kept) == len(rest) == 3
        assert found == [("start_lease", unit) for unit in rest]
        for (name, values), plain_values in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(runtime.parameter(values), plain_values.detach()), name


def kept_units(runtime) -> set[int]:
    return {layout.unit for layout in runtime._house.layouts if layout.kept}


def crossings(runtime, units) -> list[str]:
    """The moves of these units' parameters over an edge to SWAP."""
    names = {f"unit {unit} {Kind.PARAM.value} tile 0" for unit in units}
    return [
        event.name for event in runtime._house.storage.timeline.events() if event.name in names and "swap" in event.lane
    ]


@pytest.mark.parametrize(("update", "budget"), in_turn(UPDATES, ["least", "tight", "generous"]))
def test_the_numbers_of_plain_training_with_norms_in_float32(update, budget, tmp_path):
    expected = PlainMixed(made(), norms_wide, lr=1e-2)
    losses = train(expected.model, expected.step, 5)
    model = made()
    nbytes = budget_for(model, tmp_path, budget, None, Keeping(is_norm, torch.float32), param_dtype="bfloat16")
    config = config_for(tmp_path, nbytes, update, param_dtype="bfloat16")
    with tiermem.offload(model, config, keep=is_norm, keep_dtype="float32") as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        assert {name: parameter.dtype for name, parameter in model.named_parameters()} == {
            name: norms_wide(name) for name, _ in model.named_parameters()
        }
        assert train(model, optimizer.step, 5) == losses
        for parameter, master, rounded in zip(
            model.parameters(), expected.masters, expected.model.parameters(), strict=True
        ):
            assert torch.equal(runtime.master(parameter), master.detach())
            assert torch.equal(runtime.parameter(parameter), rounded.detach())
        within_budgets(runtime.statistics())


def test_the_comparison_is_of_something():
    """In bfloat16 the norms have other numbers."""
    wide, narrow = PlainMixed(made(), norms_wide, lr=1e-2), PlainMixed(made(), lambda _: torch.bfloat16, lr=1e-2)
    assert train(wide.model, wide.step, 5) != train(narrow.model, narrow.step, 5)


@pytest.mark.parametrize(("update", "clip"), half_of(UPDATES, [None, 0.05]))
def test_nothing_kept_crosses_to_swap(update, clip, tmp_path):
    """Neither read nor written from the first step on, with the least budget, early updates taken back or not."""
    model = made()
    nbytes = least_budget(model, tmp_path, None, Keeping("1KiB"))
    with tiermem.offload(model, config_for(tmp_path, nbytes, update, commits=False), keep="1KiB") as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=clip)
        kept = kept_units(runtime)
        assert [runtime._house.layouts[unit].name for unit in sorted(kept)] == [
            "layers.0 (kept)",
            "layers.1 (kept)",
            "layers.2 (kept)",
            "norm (kept)",
        ]
        train(model, optimizer.step, 5, torch.float32)
        there = runtime._house.storage.pager.residency()
        assert crossings(runtime, kept) == []
        others = set(range(len(runtime._house.layouts))) - kept
        assert len(crossings(runtime, others)) > 5, "all others are paged"
        for key, (tiers, _) in there.items():
            if key.kind is Kind.PARAM and key.unit in kept:
                assert tiers == {Tier.HOST}
        runtime._house.storage.pager.check_invariants()


CASES = {
    "norms": (Normed, loop(wide_batch), is_norm),
    "all": (Normed, loop(wide_batch), lambda name, parameter: True),
    "half of a layer": (Wide, loop(wide_batch), lambda name, parameter: name.endswith("up.weight")),
    "biases": (Wide, loop(wide_batch, max_grad_norm=0.1), "1KiB"),
    "clipped": (Normed, loop(wide_batch, max_grad_norm=0.05), ["LayerNorm"]),
    "tied": (Stack, loop(tokens_batch), ["Embedding"]),
    "tied, by the other name": (Stack, loop(tokens_batch), lambda name, parameter: name == "head.weight"),
    "frozen": (frozen, loop(tokens_batch), lambda name, parameter: "layers" in name),
    "small frozen": (frozen, loop(tokens_batch), 100),
}


@pytest.mark.parametrize(
    ("name", "update", "budget"),
    [
        (name, *how)
        for name, how in part_of(3, CASES, [("backward", "least"), ("forward", "tight"), ("auto", "beside")])
    ],
)
def test_the_bits_of_plain_training(name, update, budget, tmp_path):
    make, script, keep = CASES[name]
    check(offloaded(make, script, tmp_path, update=update, budget=budget, keep=keep), plain(make, script))


def test_too_much_is_an_error_that_names_both_figures(tmp_path):
    model = made()
    everything = Keeping(lambda name, parameter: True)
    least = least_budget(model, tmp_path, None, everything)
    kept = sum(-(-nbytes // 4096) * 4096 for nbytes in _param_nbytes(model))
    assert least > kept
    with pytest.raises(tiermem.BudgetError) as caught:
        tiermem.offload(model, config_for(tmp_path, least - 1, "step"), keep=everything.keep)
    said = str(caught.value)
    assert f"host_memory is {(least - 1) // 4096 * 4096} bytes" in said
    assert f"beside the {kept} bytes of parameters that keep= has stay" in said
    assert f"set host_memory to {least} bytes or more, keep fewer parameters" in said
    assert torch.equal(model.norm.weight, torch.ones(48)), "nothing was touched"
    with tiermem.offload(model, config_for(tmp_path, least, "step"), keep=everything.keep) as runtime:
        train(model, tiermem.AdamW(model.parameters()).step, 2, torch.float32)
        within_budgets(runtime.statistics())


def _param_nbytes(model: nn.Module) -> list[int]:
    """Bytes of each unit: a layer, or what is left; each parameter begins at a multiple of 64 elements."""
    roots = [*model.layers, model.norm]
    sizes = []
    for root in roots:
        counts = [parameter.numel() for parameter in root.parameters()]
        sizes.append((sum(-(-count // 64) * 64 for count in counts[:-1]) + counts[-1]) * 4)
    return sizes


@pytest.mark.parametrize("keep_dtype", ["float8", "int64", torch.float64, 4])
def test_a_dtype_that_is_not_computed_in_is_refused(keep_dtype, tmp_path):
    with pytest.raises(tiermem.ConfigError, match="keep_dtype"):
        tiermem.offload(made(), config_for(tmp_path, "64MiB", "step"), keep=is_norm, keep_dtype=keep_dtype)


DEVICES = {
    "roomy": {"device_memory": "64MiB"},
    "tight": {"device_memory": "128KiB"},
    "settled": {"device_memory": "64MiB", "update_on": "auto"},
}


@pytest.mark.parametrize(("device", "update", "clip"), in_turn(DEVICES, ["step", "forward", "backward"], [None, 0.05]))
def test_beside_a_device(device, update, clip, tmp_path):
    """The same bits with the least host memory; what is kept passes between host memory and the device only."""
    expected = made()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)

    def plain_step():
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(expected.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    losses = train(expected, plain_step, 4, torch.float32)
    model, settings = made(), {"device": "simulated", "commits": False} | DEVICES[device]
    nbytes = budget_for(model, tmp_path, "beside", None, Keeping(is_norm), **settings)
    with tiermem.offload(model, config_for(tmp_path, nbytes, update, **settings), keep=is_norm) as runtime:
        own = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=clip)
        assert train(model, own.step, 4, torch.float32) == losses
        for parameter, values in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values.detach())
        kept = kept_units(runtime)
        assert crossings(runtime, kept) == []
        there = runtime._house.storage.pager.residency()
        for key, (tiers, _) in there.items():
            if key.kind is Kind.PARAM and key.unit in kept:
                assert Tier.HOST in tiers
        if device == "settled":
            assert runtime._house.blueprint.footprint is not None
            assert kept.isdisjoint(runtime._house.storage.pager.chain.settled)
            assert runtime._house.storage.pager.chain.settled
        within_budgets(runtime.statistics())
        runtime._house.storage.pager.check_invariants()


def mixed(directory, update="forward", **more):
    config = config_for(directory, "512KiB", update, param_dtype="bfloat16", **more.pop("settings", {}))
    model = more.pop("model", None) or made()
    return model, tiermem.offload(model, config, **({"keep": is_norm, "keep_dtype": "float32"} | more))


def outcome(directory, steps, **more):
    """Masters and moments after so many steps without a break."""
    model, runtime = mixed(directory, **more)
    with runtime:
        train(model, tiermem.AdamW(model.parameters(), lr=1e-2).step, steps)
        return [runtime.master(parameter) for parameter in model.parameters()]


def test_a_run_that_commits_and_goes_on_has_the_same_bits(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = outcome(tmp_path / "a", 4)
    model, runtime = mixed(tmp_path / "b")
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer.step, 2)
        runtime.commit().wait()
        assert len(crossings(runtime, kept_units(runtime))) == len(kept_units(runtime)), "written once, for the commit"
    with pytest.raises(tiermem.ResumeError, match=r"kept was \[\'layers.0 \(kept\)\'.*, is None"):
        mixed(tmp_path / "b", resume=True, keep=None, keep_dtype=None)
    with pytest.raises(tiermem.ResumeError, match="dtype of parameter"):
        mixed(tmp_path / "b", resume=True, keep_dtype=None)
    model, runtime = mixed(tmp_path / "b", resume=True)
    with runtime:
        kept = kept_units(runtime)
        assert len(crossings(runtime, kept)) == len(kept), "read once, to begin with"
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number in (2, 3):
            torch.manual_seed(100 + number)
            model(torch.randn(5, 48).bfloat16()).square().mean().backward()
            optimizer.step()
        for parameter, master in zip(model.parameters(), expected, strict=True):
            assert torch.equal(runtime.master(parameter), master)
        assert len(crossings(runtime, kept)) == len(kept)


@pytest.mark.parametrize("keep", [None, is_norm, lambda name, parameter: True])
def test_a_snapshot_does_not_depend_on_what_is_kept(keep, tmp_path):
    """The masters of a run that kept norms in float32 are those that any other begins with."""
    for name in "ab":
        (tmp_path / name).mkdir()
    model, runtime = mixed(tmp_path / "a")
    with runtime:
        train(model, tiermem.AdamW(model.parameters(), lr=1e-2).step, 2)
        runtime.snapshot(tmp_path / "copy").wait()
        masters = [runtime.master(parameter) for parameter in model.parameters()]
        moments = [_moments(runtime, parameter) for parameter in model.parameters()]
    model, runtime = mixed(tmp_path / "b", resume=tmp_path / "copy", keep=keep, keep_dtype=None)
    with runtime:
        for parameter, master, (first, second) in zip(model.parameters(), masters, moments, strict=True):
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(runtime.master(parameter), master)
            here = _moments(runtime, parameter)
            assert torch.equal(here[0], first)
            assert torch.equal(here[1].abs(), second.abs())


def _moments(runtime, parameter):
    unit, slot = runtime._house.gatherer.slots[id(parameter)]
    return runtime._house.states.read_moments(unit, slot.parameter)


def test_what_is_saved_and_looked_at_has_the_dtypes(tmp_path):
    for name in ("swap", "loaded"):
        (tmp_path / name).mkdir()
    model, runtime = mixed(tmp_path / "swap")
    with runtime:
        train(model, tiermem.AdamW(model.parameters(), lr=1e-2).step, 1)
        model(torch.randn(5, 48).bfloat16()).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert runtime.parameter(parameter).dtype == norms_wide(name)
            assert runtime.gradient(parameter).dtype == norms_wide(name)
            with runtime.gathered(parameter):
                assert parameter.dtype == norms_wide(name)
                assert not parameter.isnan().any()
        tiermem.AdamW(model.parameters()).zero_grad()
        with runtime.gathered(model.norm, write=True):
            torch.nn.init.constant_(model.norm.weight, 1.2345678)
        assert torch.equal(runtime.master(model.norm.weight), torch.full((48,), 1.2345678))
        values = {name: runtime.parameter(parameter) for name, parameter in model.named_parameters()}
        runtime.save_pretrained(tmp_path / "saved")
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == values.keys()
    assert all(torch.equal(saved[name], values[name]) and saved[name].dtype == norms_wide(name) for name in saved)
    # And back: a model without memory, its weights streamed, gives the same again.
    with tiermem.deferred_init():
        empty = Normed()
    model, runtime = mixed(tmp_path / "loaded", model=empty, weights=tmp_path / "saved")
    with runtime:
        for name, parameter in model.named_parameters():
            assert torch.equal(runtime.parameter(parameter), values[name])
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == {
        name: norms_wide(name) for name in values
    }, "closed, each has storage of its own in its dtype"


def test_a_model_built_without_memory_is_initialised(tmp_path):
    with tiermem.deferred_init():
        model = Normed()
    with tiermem.offload(
        model, config_for(tmp_path, "512KiB", "step"), keep=lambda n, p: n.endswith("weight")
    ) as runtime:
        for name, parameter in model.named_parameters():
            values = runtime.parameter(parameter)
            assert values.isfinite().all()
            if "norm" in name:
                assert torch.equal(values, torch.full((48,), float(name.endswith("weight"))))
            else:
                assert 0 < values.abs().max() <= 48**-0.5


def test_weights_of_a_file_do_not_pass_through_16_bits_where_the_model_is_built_in_them(tmp_path):
    """As what `_keep_in_fp32_modules` names does not in `from_pretrained`."""
    plain_model = made()
    for parameter in plain_model.parameters():
        nn.init.normal_(parameter)
    save_file(plain_model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "swap").mkdir()
    config = config_for(tmp_path / "swap", 4 << 20, "step", param_dtype="bfloat16")
    with tiermem.deferred_init():
        model = made().to(torch.bfloat16)
    weights = tmp_path / "model.safetensors"
    with tiermem.offload(model, config, keep=is_norm, keep_dtype="float32", weights=weights) as runtime:
        for name, parameter in model.named_parameters():
            expected = dict(plain_model.named_parameters())[name]
            found = runtime.parameter(parameter)
            assert found.dtype == (torch.float32 if is_norm(name, parameter) else torch.bfloat16), name
            assert torch.equal(found, expected.to(found.dtype)), name


def test_eight_bit_moments_and_units_of_ones_own(tmp_path):
    """The same as without keep=: what is kept changes no number, whatever is a unit and however moments are kept."""
    for name in "ab":
        (tmp_path / name).mkdir()
    found = []
    for directory, keep in ((tmp_path / "a", None), (tmp_path / "b", "64KiB")):
        model = made()
        # One tile for each unit, whatever is in it: a block of moments begins where a tile does.
        config = config_for(directory, "4MiB", "backward", moments="int8", tile_size="1MiB")
        with tiermem.offload(model, config, units=["Layer", "Normed"], keep=keep) as runtime:
            assert bool(kept_units(runtime)) == (keep is not None)
            losses = train(model, tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1).step, 4, torch.float32)
            found.append((losses, [runtime.master(parameter) for parameter in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_everything_is_written_down_when_that_is_asked(tmp_path):
    """Saving reaches what is kept, and leaves it where it is."""
    model, runtime = mixed(tmp_path)
    with runtime:
        train(model, tiermem.AdamW(model.parameters(), lr=1e-2).step, 1)
        runtime._house.coordinator.wait_updates()
        pager = runtime._house.storage.pager
        save_all(pager)
        for key, (tiers, _) in pager.residency().items():
            if key.kind is Kind.PARAM and key.unit in kept_units(runtime):
                assert tiers == {Tier.HOST, Tier.SWAP}
        pager.check_invariants()
        train(model, tiermem.AdamW(model.parameters(), lr=1e-2).step, 1)
