"""DEVICE, HOST, SWAP, with the processor playing the device: the same numbers, down to the least budgets.

Computation sees the device's frames only: released host memory is NaN, and so is a frame that a copy has not reached.
"""

from __future__ import annotations

import contextlib
import gc
import re
from pathlib import Path

import pytest
import torch
from doubles_combinations import each_of, half_of
from doubles_models import Stack
from doubles_scenarios import SCENARIOS, loop, tokens_batch
from doubles_training import MIB, UPDATES, Outcome, Trainee, check, config_for, offloaded, plain
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

import tiermem
from tiermem.memory.arena import Frame
from tiermem.memory.copies import Copy, Done
from tiermem.memory.devices import SimulatedDevice
from tiermem.memory.links import Link
from tiermem.memory.slab import SlabArena, TensorSlab
from tiermem.memory.tiers import Tier
from tiermem.pager.page import Kind, PageKey
from tiermem.planner.footprint import UnitSize
from tiermem.runtime.beginning import Beginning
from tiermem.runtime.blueprint import draw
from tiermem.runtime.company import find_company
from tiermem.runtime.face import Runtime
from tiermem.runtime.house import build
from tiermem.runtime.shares import share_out
from tiermem.zero3 import norms

SOME = (
    "stack, tied embedding",
    "several tiles",
    "module used twice",
    "frozen",
    "parts of a unit without gradient",
    "evaluation between steps",
    "exception inside a unit",
    "checkpoint inside the layer",
    "checkpointed layers",
    "two backwards a step",
    "lstm",
)
SLOW = {"up": "simulated:up=2MB/s,latency=300us", "down": "simulated:down=2MB/s,latency=300us"}


def least_device(name: str, directory: Path) -> int:
    """What BudgetError names when the device has a single page."""
    scenario = SCENARIOS[name]
    config = config_for(directory, 64 * MIB, "step", device="simulated", device_memory=4096)
    with pytest.raises(tiermem.BudgetError, match="device_memory") as caught:
        draw(scenario.make(), config, scenario.units)
    return int(re.search(r"at least (\d+) bytes", str(caught.value)).group(1))


def train(name: str, directory: Path, update: str, *, host: str, device: str, link: str = "simulated") -> Outcome:
    scenario = SCENARIOS[name]
    nbytes = 64 * MIB if device == "generous" else least_device(name, directory)
    settings = {"device": link, "device_memory": nbytes}
    return offloaded(
        scenario.make, scenario.script, directory, update=update, budget=host, units=scenario.units, **settings
    )


@pytest.mark.parametrize(
    ("name", "update", "budgets"),
    each_of(SOME, ["step", "forward", "backward"], [("generous", "least"), ("least", "generous"), ("least", "least")]),
)
def test_same_numbers(name, update, budgets, tmp_path):
    host, device = budgets
    scenario = SCENARIOS[name]
    found = train(name, tmp_path, update, host=host, device=device)
    check(found, plain(scenario.make, scenario.script))
    assert [tier.name for tier in found.statistics.tiers] == ["SWAP", "HOST", "DEVICE"]
    assert found.statistics.tiers[2].high_water > 0
    for edge in ("host->device", "device->host"):
        assert found.statistics.total.edge(edge).nbytes > 0


@pytest.mark.parametrize(("direction", "update"), half_of(SLOW, ["forward", "backward"]))
def test_slow_copies_change_no_numbers(update, direction, tmp_path):
    name = "stack, tied embedding"
    found = train(name, tmp_path, update, host="least", device="least", link=SLOW[direction])
    check(found, plain(SCENARIOS[name].make, SCENARIOS[name].script))


def test_with_room_each_parameter_goes_up_once_a_step_and_each_gradient_comes_down_once(tmp_path):
    """Nothing else crosses that edge: an updated parameter is written in host memory and fetched from there."""
    steps = 3
    settings = {"device": "simulated", "device_memory": 64 * MIB}
    layouts = draw(Stack(), config_for(tmp_path, 64 * MIB, "step", **settings), None).layouts

    def script(trainee: Trainee) -> None:
        loop(tokens_batch, steps=steps)(trainee)

    found = offloaded(Stack, script, tmp_path, update="step", budget="generous", **settings)
    total = found.statistics.total
    assert total.edge("device->host").moves == steps * sum(layout.tiles for layout in layouts)
    assert total.edge("device->host").nbytes == steps * sum(layout.trainable_numel * 4 for layout in layouts)
    # Once more to look at the weights at the end.
    assert total.edge("host->device").nbytes == (steps + 1) * sum(layout.nbytes for layout in layouts)
    assert total.bytes_read == total.bytes_written == 0


class Faulty(SimulatedDevice):
    """Loses one copy of a direction."""

    def __init__(self, *, up: bool, after: int) -> None:
        super().__init__(Link())
        self.direction, self.left = up, after

    def start_copy(self, source: Frame, target: Frame, nbytes: int, *, up: bool, urgent: bool, done: Done) -> Copy:
        def ended(error: BaseException | None) -> None:
            self.left -= up is self.direction
            done(OSError(5, "the copy was lost") if self.left == 0 and up is self.direction else error)

        return super().start_copy(source, target, nbytes, up=up, urgent=urgent, done=ended)


def house_on(device: SimulatedDevice, model: torch.nn.Module, config: tiermem.Config) -> Runtime:
    return Runtime(build(draw(model, config, None), config, Beginning(), find_company(config), device=device))


@pytest.mark.parametrize(("up", "update"), half_of([True, False], ["step", "backward"]))
def test_a_lost_copy_is_an_error_in_the_caller_and_closing_works(update, up, tmp_path):
    model = Stack()
    config = config_for(tmp_path, 64 * MIB, update, device="simulated", device_memory=64 * MIB)
    runtime = house_on(Faulty(up=up, after=3), model, config)
    trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
    with pytest.raises(OSError, match="the copy was lost"):
        loop(tokens_batch, steps=3)(trainee)
    with contextlib.suppress(OSError):  # the error of an update that could not be made
        runtime.close()
    runtime.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("update_on", ["host", "auto"])
def test_all_memory_is_given_back_at_the_end_though_the_optimizer_lives_on(update_on, tmp_path):
    model = Stack()
    settings = {"device": "simulated", "device_memory": 8 * MIB, "update_on": update_on}
    gc.disable()  # at the end, and not when a collection of garbage happens to come
    try:
        with tiermem.offload(model, config_for(tmp_path, 64 * MIB, "step", **settings)) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                tokens_batch(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            host, device = (arena._slab for arena in runtime._house.storage.arenas.values())
            stream = runtime._house.updater._stream
            assert (stream._device_workspace is None) == (update_on == "host")
            bytes_above = StorageWeakRef(device._tensor.untyped_storage())
        assert optimizer.param_groups
        assert bytes_above.expired()
        assert host._mapping._map.closed
        assert stream._device_workspace is None
    finally:
        gc.enable()


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("update_on", ["host", "auto"])
def test_what_numpy_looks_at_is_in_host_memory(update_on, param_dtype, tmp_path, monkeypatch):
    """It refuses a tensor on a GPU, which the processor's memory cannot show by itself."""
    settings = {"device": "simulated", "device_memory": 8 * MIB, "update_on": update_on, "param_dtype": param_dtype}
    (tmp_path / "run").mkdir()
    model, numpy, cpu = Stack(), torch.Tensor.numpy, torch.Tensor.cpu
    with tiermem.offload(model, config_for(tmp_path / "run", 64 * MIB, "step", commits=True, **settings)) as runtime:
        above = runtime._house.storage.arenas[Tier.DEVICE]._slab._tensor
        there = range(above.data_ptr(), above.data_ptr() + above.numel())

        def guarded(values: torch.Tensor) -> object:
            if values.data_ptr() in there:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            return numpy(values)

        monkeypatch.setattr(torch.Tensor, "numpy", guarded)
        monkeypatch.setattr(
            torch.Tensor, "cpu", lambda values: values.clone() if values.data_ptr() in there else cpu(values)
        )
        monkeypatch.setattr(norms, "_is_narrow", lambda flat: False)  # as it says of what is on a device
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for _ in range(2):
            tokens_batch(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert runtime.master(model.shift).shape == model.shift.shape
        runtime.commit().wait()
        runtime.snapshot(tmp_path / "snapshot").wait()
        with runtime.gathered(model, write=True), torch.no_grad():
            model.shift.fill_(0.5)
        runtime.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved["shift"].eq(0.5).all()


def test_parameters_and_gradients_are_the_devices_frames(tmp_path):
    model = Stack()
    config = config_for(tmp_path, 64 * MIB, "step", device="simulated", device_memory=8 * MIB)
    seen = []
    with house_on(SimulatedDevice(Link()), model, config) as runtime:
        pager = runtime._house.storage.pager
        arena = pager.chain.arenas[Tier.DEVICE]
        begin = arena._slab._tensor.data_ptr()
        model.layers[0].register_forward_pre_hook(
            lambda module, _: seen.extend(parameter.data_ptr() for parameter in module.parameters())
        )
        model(torch.randint(0, 13, (2, 5))).sum().backward()
        assert seen
        assert all(begin <= address < begin + arena.capacity for address in seen)
        model.layers[0].register_forward_pre_hook(lambda *_: pager.check_invariants())
        model(torch.randint(0, 13, (2, 5)))
        tiers = {key.kind: set(valid) for key, (valid, _) in pager.residency().items()}
        assert Tier.HOST in tiers[Kind.GRAD], "gradients have left the device by themselves"
        assert runtime.gradient(next(model.parameters())) is not None
        assert PageKey(0, Kind.PARAM) in pager.residency()


def test_a_simulated_device_needs_a_size(tmp_path):
    with pytest.raises(tiermem.ConfigError, match="device_memory: expected a size"):
        tiermem.offload(Stack(), tiermem.Config(device="simulated", swap_dirs=[tmp_path], host_memory="64MiB"))
    assert list(tmp_path.iterdir()) == []


def test_ranks_agree_on_the_smallest_device_and_on_whether_there_is_one(tmp_path):
    config = config_for(tmp_path, 64 * MIB, "step", device="simulated", device_memory=64 * MIB)
    sizes = [UnitSize("unit", 4096, 1024, 4, 8, ranks=2, gathered_nbytes=8192)]
    _, device = share_out(config, sizes, 64 * MIB, least=lambda nbytes: nbytes // 2)
    assert device is not None
    assert device.nbytes == 32 * MIB
    with pytest.raises(tiermem.ConfigError, match="another one does not"):
        share_out(config, sizes, 64 * MIB, least=lambda _: 0)


@pytest.mark.parametrize("update", UPDATES)
def test_commit_and_resume_with_a_device(update, tmp_path):
    settings = {"device": "simulated", "device_memory": 64 * MIB}
    whole, half = tmp_path / "whole", tmp_path / "half"
    whole.mkdir()
    half.mkdir()

    def begin() -> Stack:
        torch.manual_seed(3)
        return Stack()

    def steps(model: Stack, numbers: range) -> None:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number in numbers:
            torch.manual_seed(number)
            tokens_batch(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = begin()
    with tiermem.offload(model, config_for(whole, 64 * MIB, update, **settings)) as runtime:
        steps(model, range(4))
        expected = [runtime.parameter(parameter) for parameter in model.parameters()]
    model = begin()
    with tiermem.offload(model, config_for(half, 64 * MIB, update, **settings)) as runtime:
        steps(model, range(2))
        runtime.commit().wait()
    model = Stack()
    with tiermem.offload(model, config_for(half, 64 * MIB, update, **settings), resume=True) as runtime:
        steps(model, range(2, 4))
        for parameter, values in zip(model.parameters(), expected, strict=True):
            assert torch.equal(runtime.parameter(parameter), values)


@pytest.mark.parametrize(("dtype", "update"), half_of(["bfloat16", "float16"], ["step", "backward"]))
def test_half_precision_has_the_bits_of_two_tiers(update, dtype, tmp_path):
    masters = []
    for settings in ({}, {"device": "simulated", "device_memory": 64 * MIB}):
        torch.manual_seed(1)
        model = Stack()
        with tiermem.offload(model, config_for(tmp_path, 64 * MIB, update, param_dtype=dtype, **settings)) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
            torch.manual_seed(2)
            for _ in range(4):
                tokens_batch(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            masters.append([runtime.master(parameter) for parameter in model.parameters()])
    assert all(map(torch.equal, *masters))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_device_needs_no_room_for_state_that_is_updated_in_host_memory(dtype, tmp_path):
    """With 16-bit parameters a tile of state can be larger than a unit and its gradients with their gaps together."""
    nbytes = 256 << 10
    masters = []
    for settings in ({}, {"device": "simulated", "device_memory": nbytes}):
        torch.manual_seed(1)
        model = torch.nn.Linear(170, 170)
        config = config_for(tmp_path, 64 * MIB, "step", param_dtype=dtype, **settings)
        assert draw(model, config, None).states[0].state_nbytes(0) > nbytes
        with tiermem.offload(model, config) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                model(torch.ones(2, 170, dtype=getattr(torch, dtype))).square().mean().backward()
                optimizer.step()
            masters.append([runtime.master(parameter) for parameter in model.parameters()])
    assert all(map(torch.equal, *masters))


def test_a_snapshot_of_three_tiers_continues_on_two(tmp_path):
    folders = [tmp_path / name for name in ("device", "processor")]
    for folder in folders:
        folder.mkdir()
    model = Stack()
    settings = {"device": "simulated", "device_memory": 64 * MIB}
    with tiermem.offload(model, config_for(folders[0], 64 * MIB, "forward", **settings)) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        tokens_batch(model).backward()
        optimizer.step()
        runtime.snapshot(tmp_path / "kept").wait()
        expected = {name: runtime.master(parameter) for name, parameter in model.named_parameters()}
    model = Stack()
    config = config_for(folders[1], 64 * MIB, "forward")
    with tiermem.offload(model, config, resume=tmp_path / "kept") as runtime:
        for name, parameter in model.named_parameters():
            assert torch.equal(runtime.master(parameter), expected[name])


def test_writing_into_parameters_and_giving_the_model_back(tmp_path):
    model = Stack()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    runtime = tiermem.offload(model, config_for(tmp_path, 64 * MIB, "step", device="simulated", device_memory=64 * MIB))
    parameter = next(model.parameters())
    with runtime.gathered([parameter], write=True), torch.no_grad():
        parameter.mul_(2)
    assert torch.equal(runtime.master(parameter), runtime.parameter(parameter))
    runtime.close(restore_model=True)
    name = next(iter(dict(model.named_parameters())))
    for key, values in model.state_dict().items():
        assert torch.equal(values, before[key] * 2 if key == name else before[key]) or "head" in key


class LateFence:
    """As an event of a busy device: passes only when it has been asked a few times."""

    def __init__(self) -> None:
        self.asked = 0

    def passed(self) -> bool:
        self.asked += 1
        return self.asked > 3

    def hold(self) -> None:
        self.asked += 3


class LateSlab(TensorSlab):
    """Memory on which work goes on after the call that asked for it: what is released is really free only later."""

    def fence(self) -> LateFence:
        return LateFence()


class LateDevice(SimulatedDevice):
    """Every release leaves a fence; a copy that does not wait for those of its frames is an error."""

    met = 0

    def make_arena(self, nbytes: int, *, poison: bool) -> SlabArena:
        return SlabArena(LateSlab(torch.empty(nbytes, dtype=torch.uint8)), Tier.DEVICE, poison=poison)

    def start_copy(self, source: Frame, target: Frame, nbytes: int, *, up: bool, urgent: bool, done: Done) -> Copy:
        fences = {*source.fences, *target.fences}
        self.met += len(fences)

        def ended(error: BaseException | None) -> None:
            early = [fence for fence in fences if fence.asked <= 3]
            done(error or (RuntimeError(f"a copy did not wait for {len(early)} fences") if early else None))

        return super().start_copy(source, target, nbytes, up=up, urgent=urgent, done=ended)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_copies_wait_for_what_was_asked_of_the_device_before(update, tmp_path):
    scenario = SCENARIOS["stack, tied embedding"]
    least = least_device("stack, tied embedding", tmp_path)
    config = config_for(tmp_path, 64 * MIB, update, device="simulated", device_memory=least)
    torch.manual_seed(1)
    model = scenario.make()
    device = LateDevice(Link())
    with house_on(device, model, config) as runtime:
        torch.manual_seed(2)
        trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
        scenario.script(trainee)
        weights = {name: runtime.parameter(parameter) for name, parameter in model.named_parameters()}
    expected = plain(scenario.make, scenario.script)
    check(Outcome(trainee.noted, weights | {"head.weight": weights["embed.weight"]}), expected)
    assert device.met > 20, "copies met what the computation had left on their frames"


def test_early_updates_that_do_not_count_leave_nothing_on_the_device(tmp_path):
    """Clipped, or skipped for an infinite gradient: "backward" has the bits of "step", whatever it took back."""
    masters = []
    for update in ("step", "backward"):
        torch.manual_seed(1)
        model = Stack()
        config = config_for(tmp_path, 64 * MIB, update, device="simulated", device_memory=64 * MIB)
        with tiermem.offload(model, config) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
            for number in range(6):
                torch.manual_seed(number)
                (tokens_batch(model) * (float("inf") if number == 3 else 0.01 if number % 2 else 50.0)).backward()
                with contextlib.suppress(UserWarning):
                    optimizer.step()
                optimizer.zero_grad()
            masters.append([runtime.master(parameter) for parameter in model.parameters()])
            assert optimizer.skipped == 1
            if update == "backward":
                assert runtime.statistics().total.redone > 0
    assert all(map(torch.equal, *masters))
