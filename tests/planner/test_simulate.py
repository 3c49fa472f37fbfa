"""A simulated step keeps the budget, is never late, and reads no more than textbook paging would."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import pytest
from doubles_combinations import number_of
from doubles_planner import MACHINE, run_steps, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import CapacityError, ConfigError
from tiermem.memory.arena import rounded
from tiermem.memory.tiers import Tier
from tiermem.pager.page import Kind, Lane
from tiermem.pager.policy import choose_read_ahead
from tiermem.planner import predict as predicting
from tiermem.planner import world as world_module
from tiermem.planner.design import (
    Design,
    PlanSettings,
    least_device_memory,
    least_host_memory,
    make_design,
)
from tiermem.planner.machine import Device, Link, Machine, machine_to_dict
from tiermem.planner.retile import retiled
from tiermem.planner.simulate import Simulation, simulate
from tiermem.planner.workload import order_of, transformer
from tiermem.planner.world import Action, World
from tiermem.zero3.order import Phase

MIB = 1 << 20


@st.composite
def designs(draw: st.DrawFn, largest: int = 400_000) -> Design:
    numels = draw(st.lists(st.integers(largest // 40, largest), min_size=2, max_size=5))
    work = workload(
        numels, batches=draw(st.sampled_from([1, 1, 3])), dtype=draw(st.sampled_from(["bfloat16", "float32"]))
    )
    total = sum(numels) * (work.state_itemsize + 2 * work.itemsize)
    budget = least_host_memory(work, 1) + draw(st.integers(0, total + largest))
    design = make_design(
        work,
        MACHINE,
        PlanSettings(
            host_memory=budget // 4096 * 4096 + 4096,
            update=draw(st.sampled_from(["forward", "backward", "step"])),
            tile_nbytes=draw(st.sampled_from([None, 256 << 10])),
            look_ahead=draw(st.sampled_from([None, 0, 256 << 10])),
        ),
    )
    return replace(design, resting=tuple(range(draw(st.integers(0, len(numels))))))


@given(design=designs(60_000))
@settings(max_examples=number_of(10, 20))
def test_invariants_and_budget_hold_at_every_event(design: Design) -> None:
    world = World(design)
    settle = world.clock._settle

    def checked() -> None:
        settle()
        world.residency.check_invariants()
        assert world.residency.chain.arenas[Tier.HOST].reserved <= design.settings.host_memory

    world.clock._settle = checked
    run_steps(world, 2)


@given(design=designs(150_000))
@settings(max_examples=number_of(6, 10))
def test_a_step_takes_at_least_what_each_resource_needs(design: Design) -> None:
    result = simulate(design)
    assert simulate(design) == result, "the same design, the same course"
    rounding = 1 - 1e-6  # seconds are sums over hundreds of moments, each of them a sum
    assert result.seconds >= result.computing * rounding
    assert result.seconds * 2e9 * 1.001 >= result.bytes_read
    assert result.seconds >= sum(result.phases.values()) * rounding
    work = design.workload
    needed = sum((times.forward + times.backward) * work.batches for times in design.times)
    assert result.computing >= needed * rounding
    assert result.updating >= work.parameters * design.update_seconds * rounding
    assert result.seconds == pytest.approx(result.computing + result.stall_seconds, rel=1e-6)


@given(design=designs(150_000), tile_seconds=st.floats(1e-5, 1e-2))
@settings(max_examples=number_of(4, 10))
def test_each_tile_takes_its_seconds_besides(design: Design, tile_seconds: float) -> None:
    tiles = sum(design.tiles(unit) for unit in range(len(design.workload.units)))
    slower = replace(design, tile_seconds=tile_seconds, slower=(0.0, 0.0, 0.0, 0.0))
    needed = design.workload.parameters * design.update_seconds + tiles * tile_seconds
    # Where updates run on into the next step, one tile's may be under way when the steps that count begin and end: as
    # long as the steps before are not the same to the last microsecond, another part of it falls among them.
    longest = tile_seconds + max(unit.trainable for unit in design.workload.units) * design.update_seconds
    under_way = 0.0 if design.update == "step" else longest / 2  # the mean of two steps
    assert simulate(slower).updating == pytest.approx(needed, abs=under_way + 1e-9)
    alone = replace(slower, settings=replace(slower.settings, update="step"))
    assert simulate(alone).updating == pytest.approx(needed)
    # Larger tiles that stand for smaller ones take the seconds of those.
    assert retiled(slower, 2).tile_seconds == pytest.approx(
        tile_seconds * retiled(slower, 2).footprint.tile_numel / design.footprint.tile_numel
    )


def test_a_tile_that_holds_more_than_any_unit_stays_as_it_is() -> None:
    # A smaller one was taken, and what it takes less in hand off a budget: where that was the smaller, an error.
    budget = PlanSettings(host_memory=16 * MIB, tile_nbytes=64 * MIB, update="step")
    design = make_design(workload([3750, 9000]), MACHINE, budget)
    assert retiled(design, 2) == design


def lru_bytes(design: Design, steps: int) -> int:
    """Bytes that demand paging with LRU reads in the last of some steps, one access of the schedule at a time."""
    sizes = dict(design.pages())
    resident: OrderedDict[object, int] = OrderedDict()
    dead: set[object] = {key for key in sizes if key.kind is Kind.GRAD}
    read = 0
    for _ in range(steps):
        read = 0
        for access in design.schedule.accesses:
            key, room = access.key, rounded(sizes[access.key])
            fresh = key.kind is Kind.GRAD and access.lane is Lane.COMPUTE
            if key not in resident:
                read += 0 if fresh or key in dead else room
                while resident and sum(resident.values()) + room > design.settings.host_memory:
                    resident.popitem(last=False)
                resident[key] = room
            resident.move_to_end(key)
            dead.discard(key)
            if key.kind is Kind.GRAD and access.lane is Lane.UPDATE:
                resident.pop(key)
                dead.add(key)
    return read


@given(
    numels=st.lists(st.integers(50_000, 500_000), min_size=3, max_size=5),
    share=st.floats(0.2, 1.2),
    update=st.sampled_from(["forward", "backward", "step"]),
)
@settings(max_examples=number_of(10, 20))
def test_no_more_is_read_than_by_demand_paging_with_lru(numels: list[int], share: float, update: str) -> None:
    work = workload(numels)
    budget = int(sum(numels) * 14 * share) + least_host_memory(work, 1)
    design = make_design(work, MACHINE, PlanSettings(host_memory=rounded(budget), update=update, tile_nbytes=256 << 10))
    # LRU is given the update's accesses where they are recorded, for free; the plan has to make up for its lag.
    slack = rounded(max(numels) * 4) + 3 * (256 << 10)
    assert simulate(design).bytes_read <= lru_bytes(design, 3) + slack


def test_what_fits_is_neither_read_nor_written() -> None:
    work = workload([500_000] * 4)
    for update in ("forward", "backward", "step"):
        result = simulate(make_design(work, MACHINE, PlanSettings(host_memory=256 * MIB, update=update)))
        assert (result.bytes_read, result.bytes_written) == (0, 0)


def test_more_of_anything_never_makes_a_step_much_slower() -> None:
    work = workload([2_000_000] * 6)
    plan = PlanSettings(host_memory=24 * MIB)
    now = simulate(make_design(work, MACHINE, plan)).seconds
    drive = replace(MACHINE.drive, read=8e9, write=8e9, mixed=8e9)
    assert simulate(make_design(work, replace(MACHINE, drive=drive), plan)).seconds < now
    assert simulate(make_design(work, MACHINE, replace(plan, host_memory=96 * MIB))).seconds < now


def test_hidden_updates_are_faster_than_waiting_for_them() -> None:
    # A computation long enough to hide behind: else the drive alone decides, and gradients that wait cost room.
    work = transformer(20_000_000, batch=8, seq=512)
    seconds = {
        update: simulate(make_design(work, MACHINE, PlanSettings(host_memory=96 * MIB, update=update))).seconds
        for update in ("forward", "backward", "step")
    }
    assert seconds["forward"] < seconds["step"]
    assert seconds["backward"] < seconds["step"]


@pytest.mark.parametrize("update", ["forward", "backward", "step"])
def test_steps_are_alike_sooner_when_what_the_plan_keeps_is_there_at_first_and_come_to_the_same(update: str) -> None:
    work = workload([1_000_000] * 20)
    settings = PlanSettings(host_memory=work.parameters * work.state_itemsize // 3 // 4096 * 4096, update=update)
    design = make_design(work, MACHINE, settings)
    filled, empty = World(design), World(design)
    there = [page for page in empty.residency.pages.values() if Tier.HOST in page.frames]
    assert there
    for page in there:
        empty.residency.drop(page, Tier.HOST)
    soon, late = run_steps(filled, 6), run_steps(empty, 6)
    assert soon[0].bytes_read < late[0].bytes_read
    for number in (2, 5):
        assert soon[number].seconds == pytest.approx(soon[5].seconds, rel=0.01)
        assert soon[number].bytes_read == pytest.approx(soon[5].bytes_read, rel=0.01)
    assert late[5].seconds == pytest.approx(soon[5].seconds, rel=0.01)
    assert late[5].bytes_read == pytest.approx(soon[5].bytes_read, rel=0.05)


def test_what_may_be_undone_is_written_every_step_and_what_rests_is_not() -> None:
    work = workload([1_000_000] * 12)
    host = (work.parameters * work.state_itemsize * 9 // 10) // 4096 * 4096
    design = make_design(work, MACHINE, PlanSettings(host_memory=host, update="auto"))
    assert design.undone
    assert 0 < len(design.resting) < 12
    for_good = replace(design, settings=replace(design.settings, update="backward"), undone=False, resting=())
    all_undone = replace(design, resting=())
    kept, written = simulate(for_good), simulate(all_undone, with_plan=True)
    assert written.bytes_written >= design.nbytes(Kind.PARAM, Kind.STATE) > 1.5 * kept.bytes_written
    assert simulate(design).bytes_written < 0.7 * written.bytes_written
    assert written.plan is not None
    actions = written.plan.actions
    states = [each.page for each in actions if each.verb == "write" and each.page.kind is Kind.STATE]
    tiles = {key for key, _ in design.pages() if key.kind is Kind.STATE}
    assert len(states) == len(tiles), "each once, before it is updated or after"
    assert set(states) == tiles


@pytest.mark.parametrize("host", [4, 64])
def test_where_everything_fits_or_nothing_runs_beside_auto_is_forward(host: int) -> None:
    work = workload([200_000] * 4)
    assert make_design(work, MACHINE, PlanSettings(host_memory=host * MIB, update="auto")).update == (
        "forward" if host == 64 else "backward"
    )
    least = least_host_memory(work, 1)
    serial = make_design(work, MACHINE, PlanSettings(host_memory=least, update="auto"))
    assert serial.footprint.serial
    assert serial.update == "forward"


def test_what_a_prediction_and_its_relief_have_in_common_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Design] = []

    def counted(design: Design, *, with_plan: bool = False) -> Simulation:
        asked.append(design)
        return simulate(design, with_plan=with_plan)

    monkeypatch.setattr(predicting, "simulate", counted)
    work = workload([300_000] * 100)
    settings = PlanSettings(host_memory=work.parameters * 4 // 4096 * 4096)
    prediction = predicting.predict(work, MACHINE, settings)
    assert prediction.relief
    assert len(asked) == len(set(asked))


def test_ranks_of_a_node_write_to_the_same_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them takes and writes, all of them do."""
    monkeypatch.setattr(predicting, "_relief", lambda *_: ())
    work = workload([500_000] * 6, batches=2)
    device = Device(memory=64 * MIB, flops={"bfloat16": 1e13}, to_device=2e10, to_host=2e10, count=4)
    drive = replace(MACHINE.drive, count=2, capacity=1 << 40, endurance=10**15)
    machine = replace(MACHINE, device=device, drive=drive, link=Link(rate=1e10))
    plan = PlanSettings(host_memory=4 * MIB, device_memory=16 * MIB, ranks=4)
    found = predicting.predict(work, machine, plan)
    step = found.simulation
    assert step is not None
    assert found.tokens_per_second == pytest.approx(256 * 2 * 4 / step.seconds)
    assert found.drive_days == pytest.approx(2 * 10**15 / (4 * step.bytes_written / step.seconds) / 86_400)
    for lacks, missing in ((0, {}), (1, {"swap": 2})):
        small = replace(machine, drive=replace(drive, capacity=2 * found.swap_bytes - lacks))
        assert predicting.predict(work, small, plan).missing == missing, "half of four ranks' on each of two drives"


def numbers_of(table: Mapping[str, object], where: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value


def test_twice_as_much_of_a_thing_is_twice_each_of_its_rates_and_nothing_else() -> None:
    device = Device(memory=4 * MIB, flops={"bfloat16": 1.0}, to_device=2.0, to_host=3.0)
    machine = replace(MACHINE, device=device, link=Link(rate=4.0, node_rate=5.0))
    plan = PlanSettings(host_memory=8 * MIB, device_memory=MIB, ranks=2)

    def doubled(machine: Machine, settings: PlanSettings) -> dict[str, set[str]]:
        before = dict(numbers_of(machine_to_dict(machine) | asdict(settings)))
        found = {}
        for resource, (more, budgets) in predicting._doubled(machine, settings).items():
            after = dict(numbers_of(machine_to_dict(more) | asdict(budgets)))
            found[resource] = {name for name in before if after[name] != before[name]}
            assert all(after[name] == 2 * before[name] for name in found[resource])  # type: ignore[operator]
        return found

    common = {
        "drive": {"drive.read", "drive.write", "drive.mixed"},
        "host memory": {"host_memory"},
        "update": {"host.update_rate.bfloat16", "host.update_rate.float32"},
    }
    assert doubled(machine, plan) == common | {
        "compute": {"device.flops.bfloat16"},
        "device wires": {"device.to_device", "device.to_host"},
        "device memory": {"device_memory"},
        "link": {"link.rate", "link.node_rate"},
    }
    assert doubled(MACHINE, replace(plan, ranks=1)) == common | {
        "compute": {"host.flops.bfloat16", "host.flops.float32"}
    }
    assert "link" not in doubled(machine, replace(plan, ranks=1)), "nothing goes over it"


def test_with_a_device_everything_goes_through_the_host() -> None:
    device = Device(memory=48 * MIB, flops={"bfloat16": 1e13}, to_device=2e10, to_host=2e10)
    work = workload([2_000_000] * 6)
    design = make_design(work, replace(MACHINE, device=device), PlanSettings(host_memory=32 * MIB))
    result = simulate(design)
    assert {tier.name for tier in result.tiers} == {"HOST", "DEVICE"}
    assert result.edges["host->device"] >= work.parameters * 2 / 2
    assert all(tier.high_water <= tier.budget for tier in result.tiers)


@given(
    numels=st.lists(st.integers(10_000, 60_000), min_size=3, max_size=6),
    host=st.floats(0, 1.2),
    device=st.floats(0, 1.5),
    update=st.sampled_from(["forward", "backward", "step", "auto"]),
    simulated=st.booleans(),
)
@settings(max_examples=number_of(8, 12))
def test_what_is_settled_stays_on_the_device_and_nothing_of_it_moves(
    numels: list[int], host: float, device: float, update: str, simulated: bool
) -> None:
    work = workload(numels)
    there = Device(memory=1 << 30, flops={"bfloat16": 1e13}, to_device=2e10, to_host=2e10, simulated=simulated)
    machine, total = replace(MACHINE, device=there), sum(numels) * 14
    plan = PlanSettings(host_memory=0, update=update, tile_nbytes=256 << 10, update_on="auto")
    least = least_device_memory(work, machine, plan), least_host_memory(work, 1, device=True)
    plan = replace(plan, device_memory=int(least[0] + device * total), host_memory=int(least[1] + host * total))
    design = make_design(work, machine, plan)
    world = World(design)
    moved: list[Action] = []
    run_steps(world, 1)
    world.listen(moved.append)
    run_steps(world, 2)
    world.residency.check_invariants()
    assert {action.page.unit for action in moved if action.verb != "update"}.isdisjoint(design.settled)
    updated = {action.page.unit: action.edge for action in moved if action.verb == "update"}
    assert updated == {unit: "device" if unit in design.settled else "host" for unit in range(len(numels))}
    for tier, arena in world.residency.chain.arenas.items():
        assert arena.high_water <= arena.capacity, tier


def test_updates_on_a_real_device_take_what_asking_for_them_takes() -> None:
    work = workload([20_000_000] * 3)
    device = Device(memory=8 << 30, flops={"bfloat16": 1e13}, to_device=2e10, to_host=2e10)
    plan = PlanSettings(host_memory=2 << 30, device_memory=4 << 30, update="step", update_on="auto")
    design = make_design(work, replace(MACHINE, device=device), plan)
    assert len(design.settled) == 3
    more = simulate(design).seconds - simulate(replace(design, update_above_seconds=0.0)).seconds
    assert more == pytest.approx(design.update_above_seconds * 60_000_000, rel=0.01)
    assert 0 < design.update_above_seconds < design.update_seconds


def test_what_is_sent_down_may_drive_out_the_copy_below_a_victim() -> None:
    # Found by simulation: room made in HOST for one page's way down evicted, or moved, the lower copy of another that
    # was about to be dropped from the device as clean.
    device = Device(memory=5_638_477, flops={"bfloat16": 1e13}, to_device=2e10, to_host=2e10)
    settings = PlanSettings(host_memory=28_073_984, tile_nbytes=256 << 10)
    result = simulate(make_design(workload([300_000] * 16), replace(MACHINE, device=device), settings))
    assert result.bytes_read > 0


def test_what_never_gets_its_room_ends_the_simulated_run() -> None:
    design = make_design(workload([1_000_000] * 3), MACHINE, PlanSettings(host_memory=64 * MIB, tile_nbytes=256 << 10))
    assert simulate(design).seconds > 0
    tight = replace(design, settings=replace(design.settings, host_memory=3 * MIB))  # parameters, but no gradients
    with pytest.raises(CapacityError, match="the simulated run ends here: HOST has no room for"):
        simulate(tight)


def test_a_workload_uses_only_the_units_it_has() -> None:
    work = workload([1_000_000] * 2)
    with pytest.raises(ConfigError, match="the order of test uses a unit that is not among its 1"):
        replace(work, units=work.units[:1])


def test_the_plan_says_what_is_done_and_why() -> None:
    work = workload([1_000_000] * 5)
    design = make_design(work, MACHINE, PlanSettings(host_memory=20 * MIB))
    result = simulate(design, with_plan=True)
    assert result.plan is not None
    doing = {verb: [each for each in result.plan.actions if each.verb == verb] for verb in ("fetch", "evict", "update")}
    fetched = sum(action.nbytes for action in doing["fetch"])
    assert fetched == pytest.approx(result.bytes_read, rel=0.3), "one more step like those before"
    assert all(action.reason and action.edge == "swap->host" for action in doing["fetch"])
    assert all("used last" in action.reason for action in doing["evict"])
    times = [action.seconds for action in result.plan.actions]
    assert times == sorted(times)
    assert sum(result.plan.kept.values()) <= 20 * MIB
    updated = {action.page.unit for action in doing["update"]}
    assert updated == set(range(5))


def test_the_simulation_asks_the_pagers_own_policy() -> None:
    from tiermem.pager import ahead, policy, service
    from tiermem.pager.residency import Residency

    assert ahead.choose_read_ahead is choose_read_ahead is policy.choose_read_ahead
    assert world_module.Service is service.Service
    assert issubclass(world_module.RecordingResidency, Residency)


def test_an_order_brings_a_shared_units_gradient_last() -> None:
    tied = order_of([(0, False), (1, True), (0, True)])
    phases = [(access.unit, access.phase) for access in tied[3:]]
    assert phases == [
        (0, Phase.BACKWARD),
        (1, Phase.BACKWARD),
        (1, Phase.GRADIENT),
        (0, Phase.GRADIENT),
    ]


@given(parameters=st.integers(200_000, 2 * 10**12))
@settings(max_examples=number_of(25, 60))
def test_a_transformer_has_the_parameters_asked_for(parameters: int) -> None:
    work = transformer(parameters, batch=1, seq=128)
    assert work.parameters == parameters
    assert all(unit.numel > 0 for unit in work.units)


@pytest.mark.parametrize(("parameters", "name"), [(20_000_000, "20 M"), (175 * 10**9, "175 B"), (10**12, "1 T")])
def test_a_model_is_called_by_its_size(parameters: int, name: str) -> None:
    assert transformer(parameters, batch=1, seq=64).name == f"{name} parameters"
