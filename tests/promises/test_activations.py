"""Activations in pages: the same numbers, nothing left over, and lengths that do not fit otherwise."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from doubles_combinations import half_of, some_of
from doubles_garbage import collect
from doubles_streams import StreamDevice
from doubles_training import Trainee, check, config_for, plain, within_budgets
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from swap import SwapFullError
from tiermem.memory.tiers import Tier
from tiermem.pager.lease import Lease
from tiermem.pager.page import Kind
from tiermem.runtime.beginning import Beginning
from tiermem.runtime.blueprint import draw
from tiermem.runtime.company import find_company
from tiermem.runtime.face import Runtime
from tiermem.runtime.house import build

MIB = 1 << 20
WIDTH, ROWS, DEPTH = 32, 400, 5
THRESHOLD = 4096
BUDGET = 384 << 10  # far less than the activations of a step
Chain = dict[str, object]


MEMORY, ABOVE = "memory alone", "a device above it"
# What is alike in both: half of the tests take the one, half the other.
IN_MEMORY = pytest.mark.parametrize("chain", some_of([MEMORY], [ABOVE]), indirect=True)
BESIDE_A_DEVICE = pytest.mark.parametrize("chain", some_of([ABOVE], [MEMORY]), indirect=True)


@pytest.fixture(params=[MEMORY, ABOVE])
def chain(request: pytest.FixtureRequest) -> Chain:
    """Settings of a run in memory, or with a device of as little memory whose copies take their time."""
    if request.param == MEMORY:
        return {}
    return {"device": "simulated:bandwidth=400MB/s,latency=100us", "device_memory": BUDGET, "update_on": "auto"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.joint = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.joint(self.norm(x)).chunk(3, dim=-1)
        return x + self.drop(self.out(torch.softmax(q * k, -1) * v))


class Tower(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.mode = mode

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.mode == "plain" else checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
        return x


def offload(mode: str, directory: Path, budget: int = BUDGET, **settings) -> tiermem.Runtime:
    return tiermem.offload(Tower(mode), config_for(directory, budget, "forward", **settings))


def pages(runtime: tiermem.Runtime) -> list[bool]:
    """Of each page of activations whether it has contents that are not about to be forgotten."""
    pager = runtime._house.storage.pager
    pager.check_invariants()
    return [pager.is_written(key) for key in pager.residency() if key.kind is Kind.ACTIVATION]


def nothing_is_kept(runtime: tiermem.Runtime) -> bool:
    assert runtime._activations is not None
    return runtime._activations.alive == 0 and not any(pages(runtime))


def training(activations: Callable[[], object]) -> Callable[[Trainee], None]:
    """A script with two micro-batches of changing length, a clipped norm and a gradient of the input."""

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for step in range(3):
            for length in (ROWS, ROWS - 40 * step):
                x = torch.randn(length, WIDTH, requires_grad=True)
                with activations():
                    loss = trainee.model(x).square().mean()
                loss.backward()
                trainee.note(loss)
                trainee.note(x.grad)
            trainee.note_gradients()
            optimizer.step()
            optimizer.zero_grad()

    return script


@pytest.mark.parametrize(("mode", "update"), half_of(["plain", "reentrant", "other"], ["forward", "step"]))
def test_the_same_numbers_as_without(mode: str, update: str, chain: Chain, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Tower(mode)

    expected = plain(make, training(torch.enable_grad))
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(2)
    with tiermem.offload(model, config_for(tmp_path, BUDGET, update, **chain)) as runtime:
        torch.manual_seed(2)
        trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
        training(lambda: runtime.offload_activations(THRESHOLD))(trainee)
        found = type(expected)(
            trainee.noted, {name: runtime.parameter(parameter) for name, parameter in model.named_parameters()}
        )
        assert nothing_is_kept(runtime)
        went_to_disk = runtime._house.storage.extents.scratch.high_water
        assert went_to_disk > (BUDGET if mode == "plain" else ROWS * WIDTH * 4)
        within_budgets(runtime.statistics())
    within_budgets(runtime.statistics())
    check(found, expected)
    assert list(tmp_path.iterdir()) == []


def test_from_the_second_step_on_backward_finds_what_was_read_ahead(chain: Chain, tmp_path: Path) -> None:
    with offload("reentrant", tmp_path, **chain, budget=MIB) as runtime:
        optimizer = tiermem.AdamW(runtime.model.parameters())
        misses = []
        for _ in range(4):
            x = torch.randn(12 * ROWS, WIDTH, requires_grad=True)
            with runtime.offload_activations(THRESHOLD):
                loss = runtime.model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            misses.append(runtime.statistics().last.cache_misses)
    keys = {access.key for access in runtime._house.storage.pager._core.residency.forecast._schedule.accesses}
    assert any(key.kind is Kind.ACTIVATION for key in keys), "the order of pages of activations is planned"
    assert min(misses[1:]) < misses[0], misses


@BESIDE_A_DEVICE
def test_views_of_one_storage_are_kept_once(chain: Chain, tmp_path: Path) -> None:
    with offload("plain", tmp_path, **chain, budget=4 * MIB) as runtime:
        x = torch.randn(ROWS, 4, WIDTH, requires_grad=True)
        with runtime.offload_activations(THRESHOLD):
            y = x * 2
            parts = [y[:, index].transpose(0, 1) for index in range(4)]
            saved = [part.exp() for part in parts]
            total = sum((part * other).sum() for part, other in zip(parts, saved, strict=True))
        # y once for all its views, one for each result of exp
        assert runtime._activations.alive == 5
        (mine,) = torch.autograd.grad(total, x)
        y = x * 2
        parts = [y[:, index].transpose(0, 1) for index in range(4)]
        (expected,) = torch.autograd.grad(sum((part * part.exp()).sum() for part in parts), x)
        assert torch.equal(mine, expected)


@IN_MEMORY
def test_pieces_of_one_storage_that_count_their_own_writes(chain: Chain, tmp_path: Path) -> None:
    """A GRU's gates: each is written once, and saved before the next one is."""

    def gradients(model: nn.Module, activations: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(4, ROWS, WIDTH, requires_grad=True)
        with activations:
            loss = model(x)[0].square().mean()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    model = nn.GRU(WIDTH, WIDTH)
    expected = gradients(model, contextlib.nullcontext())
    with tiermem.offload(model, config_for(tmp_path, 4 * MIB, "step", **chain)) as runtime:
        found = gradients(model, runtime.offload_activations(THRESHOLD))
        assert nothing_is_kept(runtime)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


@BESIDE_A_DEVICE
def test_a_small_view_of_something_large_and_small_tensors_stay_where_they_are(chain: Chain, tmp_path: Path) -> None:
    with offload("plain", tmp_path, **chain, budget=4 * MIB) as runtime:
        data = torch.randn(100 * ROWS, WIDTH)
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        with runtime.offload_activations(THRESHOLD):
            (data[:ROWS] * weight[0]).sum().backward()
            (torch.ones(8, requires_grad=True) ** 2).sum()
        assert runtime._activations.alive == 0


@IN_MEMORY
def test_a_backward_inside_the_block_keeps_nothing_that_it_recomputes(chain: Chain, tmp_path: Path) -> None:
    with offload("other", tmp_path, **chain) as runtime:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with runtime.offload_activations(THRESHOLD):
            loss = runtime.model(x).square().mean()
            written = runtime._house.storage.pager._core.residency.uses
            loss.backward()
        assert nothing_is_kept(runtime)
        assert x.grad is not None
        assert runtime._house.storage.pager._core.residency.uses > written


@pytest.mark.parametrize("mode", ["plain", "reentrant", "other"])
def test_a_graph_dropped_without_backward_frees_its_pages_at_once(mode: str, chain: Chain, tmp_path: Path) -> None:
    checkpoint(
        torch.sin, torch.ones(1, requires_grad=True), use_reentrant=True
    )  # imports of torch's, which leave circles behind
    collect()
    gc.disable()
    try:
        with offload(mode, tmp_path, **chain) as runtime:
            for _ in range(3):
                with runtime.offload_activations(THRESHOLD):
                    out = runtime.model(torch.randn(ROWS, WIDTH, requires_grad=True))
                assert runtime._activations.alive > 0
                del out
                assert nothing_is_kept(runtime)
            first = len(pages(runtime))
            with runtime.offload_activations(THRESHOLD):
                out = runtime.model(torch.randn(ROWS, WIDTH, requires_grad=True))
            del out
            assert len(pages(runtime)) == first, "numbers are used again"
    finally:
        gc.enable()


@BESIDE_A_DEVICE
@pytest.mark.parametrize("mode", ["plain", "other"])
def test_checkpointed_inputs_are_freed_without_the_cycle_collector(mode: str, chain: Chain, tmp_path: Path) -> None:
    gc.disable()
    try:
        with offload(mode, tmp_path, **chain) as runtime:
            with runtime.offload_activations(THRESHOLD):
                loss = runtime.model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean()
            loss.backward()
            assert nothing_is_kept(runtime)
    finally:
        gc.enable()


@IN_MEMORY
def test_a_retained_graph_may_be_used_twice(chain: Chain, tmp_path: Path) -> None:
    with offload("plain", tmp_path, **chain) as runtime:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with runtime.offload_activations(THRESHOLD):
            loss = runtime.model(x).square().mean()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert not nothing_is_kept(runtime)
        (second,) = torch.autograd.grad(loss, x)
        assert torch.equal(first, second)
        assert nothing_is_kept(runtime)


@BESIDE_A_DEVICE
def test_what_was_changed_in_place_is_refused_as_torch_does(chain: Chain, tmp_path: Path) -> None:
    with offload("plain", tmp_path, **chain, budget=4 * MIB) as runtime:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with runtime.offload_activations(THRESHOLD):
            y = x * 2
            z = y.exp()
        z[0].zero_()  # through a view, of what exp keeps
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        with runtime.offload_activations(THRESHOLD):
            y = x * 2
            before = y.square()
            y.add_(1)
            after = y.square()
        after.sum().backward()
        assert torch.equal(x.grad, 4 * (2 * x.detach() + 1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.sum().backward()


@IN_MEMORY
@pytest.mark.parametrize("mode", ["plain", "other"])
def test_an_exception_in_forward_and_no_grad_leave_nothing(mode: str, chain: Chain, tmp_path: Path) -> None:
    with offload(mode, tmp_path, **chain) as runtime:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)

        def fail(*_):
            raise ArithmeticError("on purpose")

        hook = runtime.model.layers[3].norm.register_forward_hook(fail)
        with pytest.raises(ArithmeticError), runtime.offload_activations(THRESHOLD):
            runtime.model(x)
        collect()  # the exception's traceback held the graph
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert nothing_is_kept(runtime)
        hook.remove()
        with torch.no_grad(), runtime.offload_activations(THRESHOLD):
            runtime.model(x)
        assert nothing_is_kept(runtime)


@BESIDE_A_DEVICE
@pytest.mark.parametrize("mode", ["plain", "other"])
def test_an_interrupt_in_forward_takes_the_hooks_off(mode: str, chain: Chain, tmp_path: Path) -> None:
    with offload(mode, tmp_path, **chain) as runtime:

        def fail(*_):
            raise KeyboardInterrupt

        hook = runtime.model.layers[1].norm.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt), runtime.offload_activations(THRESHOLD):
            runtime.model(torch.randn(ROWS, WIDTH, requires_grad=True))
        hook.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        with runtime.offload_activations(THRESHOLD):
            runtime.model(torch.randn(ROWS, WIDTH)).sum().backward()
        assert nothing_is_kept(runtime)


@IN_MEMORY
def test_other_hooks_inside_and_outside(chain: Chain, tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    def hooks() -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with offload("plain", tmp_path, **chain, budget=4 * MIB) as runtime:
        with hooks(), runtime.offload_activations(THRESHOLD):
            out = x.exp().sum() + torch.ones(3, requires_grad=True).exp().sum()
        assert seen == [(3,)], "outside: what is too small for pages"
        seen.clear()
        with runtime.offload_activations(THRESHOLD), hooks():
            out = out + x.exp().sum()
        assert seen == [(ROWS, WIDTH)], "inside: what is on top has it"
        out.backward()
        assert nothing_is_kept(runtime)
        left = hooks()
        with pytest.raises(tiermem.TiermemError, match="lie on top of it"), runtime.offload_activations(THRESHOLD):
            left.__enter__()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is pack, "theirs stay, for them to remove"
        left.__exit__(None, None, None)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "ours are off nevertheless"


def test_left_in_another_thread_it_is_off_and_the_hooks_there_stay(tmp_path: Path) -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def leave() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, pack):
            with pytest.raises(tiermem.TiermemError, match="in another thread"):
                paging.__exit__(None, None, None)
            left.append(torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is pack)

    left: list[bool] = []
    with offload("plain", tmp_path, budget=4 * MIB) as runtime:
        paging = runtime.offload_activations(THRESHOLD)
        paging.__enter__()
        try:
            thread = threading.Thread(target=leave)
            thread.start()
            thread.join()
            assert left == [True]
            out = torch.randn(ROWS, WIDTH, requires_grad=True).exp()
            assert nothing_is_kept(runtime), "ours are still there, and off"
            out.sum().backward()
        finally:
            torch.autograd.graph.saved_tensors_hooks(pack, pack).__exit__()


@BESIDE_A_DEVICE
def test_hooks_that_an_error_leaves_on_top_stay_and_the_error_is_seen(chain: Chain, tmp_path: Path) -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    left = torch.autograd.graph.saved_tensors_hooks(pack, pack)

    def fail() -> None:
        left.__enter__()
        raise ArithmeticError("on purpose")

    with offload("plain", tmp_path, **chain) as runtime:
        with pytest.raises(ArithmeticError), runtime.offload_activations(THRESHOLD):
            fail()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) == (pack, pack)
        left.__exit__(None, None, None)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_budget_without_room_names_what_is_enough(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(tiermem.BudgetError) as caught:
        offload("plain", tmp_path, **chain, budget=4096)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    with offload("plain", tmp_path, **chain, budget=least) as runtime:
        with pytest.raises(tiermem.BudgetError, match="set host_memory to") as caught, runtime.offload_activations():
            pass
        enough = int(str(caught.value).split("set host_memory to ")[1].split()[0])
    with offload("plain", tmp_path, **chain, budget=enough) as runtime:
        with runtime.offload_activations(THRESHOLD):
            loss = runtime.model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean()
        loss.backward()
        assert nothing_is_kept(runtime)


@pytest.mark.parametrize("update_on", some_of(["auto"], ["host"]))
def test_of_a_device_the_least_budget_does(update_on: str, tmp_path: Path) -> None:
    settings, rows = {"device": "simulated", "update_on": update_on}, ROWS // 4  # in pieces as small as the device
    with pytest.raises(tiermem.BudgetError, match="device_memory") as caught:
        offload("plain", tmp_path, **settings, device_memory=4096)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    with offload("plain", tmp_path, **settings, device_memory=least) as runtime:
        optimizer = tiermem.AdamW(runtime.model.parameters())
        for _ in range(2):
            with runtime.offload_activations(THRESHOLD):
                loss = runtime.model(torch.randn(rows, WIDTH, requires_grad=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert nothing_is_kept(runtime)


def test_a_device_that_its_largest_unit_fills_is_told_what_is_enough(tmp_path: Path) -> None:
    def model() -> nn.Module:
        frozen = nn.Linear(WIDTH, 16 * WIDTH).requires_grad_(False)
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), frozen, nn.GELU())

    def config(device_memory: int) -> tiermem.Config:
        return config_for(tmp_path, BUDGET, "step", device="simulated", device_memory=device_memory)

    nbytes = 4096
    for named in ("at least ", "set device_memory to "):
        with (
            pytest.raises(tiermem.BudgetError, match="device_memory") as caught,
            tiermem.offload(model(), config(nbytes), coalesce=0) as runtime,
            runtime.offload_activations(),
        ):
            pass
        nbytes = int(str(caught.value).split(named)[1].split()[0])
    with tiermem.offload(model(), config(nbytes), coalesce=0) as runtime:
        with runtime.offload_activations(THRESHOLD):
            loss = runtime.model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        assert nothing_is_kept(runtime)


def test_what_of_a_device_is_used_for_activations_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the copies down and up, which have streams of their own, and by whoever gets the frame next."""
    device = StreamDevice()
    config = config_for(tmp_path, MIB, "forward", poison=False, device="simulated", device_memory=BUDGET)
    model = Tower("plain")
    house = build(draw(model, config, None), config, Beginning(), find_company(config), device=device)
    with Runtime(house) as runtime:
        monkeypatch.setattr(Lease, "tensor", device.watch_leases(house.storage.arenas[Tier.DEVICE]))
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(3):
            with runtime.offload_activations(THRESHOLD):
                loss = model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert runtime.statistics().total.edge("device->host").nbytes > 3 * DEPTH * ROWS * WIDTH * 4
    assert device.streams.checks > 20
    assert device.streams.early == []


def test_a_full_disk_is_an_error_and_training_goes_on(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offload("plain", tmp_path, **chain) as runtime:
        scratch = runtime._house.storage.extents.scratch

        def full(nbytes: int) -> None:
            raise SwapFullError(f"no room for {nbytes} bytes")

        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with monkeypatch.context() as patched:
            patched.setattr(scratch, "_grow", full)
            with pytest.raises(SwapFullError), runtime.offload_activations(THRESHOLD):
                runtime.model(x).square().mean().backward()
        collect()  # the exception's traceback held the graph
        assert nothing_is_kept(runtime)
        for _ in range(2):
            with runtime.offload_activations(THRESHOLD):
                loss = runtime.model(x).square().mean()
            loss.backward()
        assert nothing_is_kept(runtime)


@IN_MEMORY
def test_a_graph_that_outlives_the_runtime_says_so(chain: Chain, tmp_path: Path) -> None:
    runtime = offload("plain", tmp_path, **chain)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with runtime.offload_activations(THRESHOLD):
        out = x.exp().sum()
    runtime.close()
    with pytest.raises(tiermem.TiermemError, match="closed"):
        out.backward()
    del out
    with pytest.raises(tiermem.TiermemError, match="closed"), runtime.offload_activations():
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_commit_does_not_hold_activations(chain: Chain, tmp_path: Path) -> None:
    with offload("plain", tmp_path, **chain) as runtime:
        optimizer = tiermem.AdamW(runtime.model.parameters())
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with runtime.offload_activations(THRESHOLD):
            runtime.model(x).square().mean().backward()
        optimizer.step()
        with runtime.offload_activations(THRESHOLD):
            kept = runtime.model(x).square().mean()
        runtime.commit().wait()
        rows = runtime._house.commits.record["plain"]
        assert not [name for name, *_ in rows if name.startswith("activation")]
        kept.backward()
    with tiermem.offload(Tower("plain"), config_for(tmp_path, BUDGET, "forward", **chain), resume=True) as runtime:
        with runtime.offload_activations(THRESHOLD):
            runtime.model(x).square().mean().backward()
        runtime.close(remove=True)
