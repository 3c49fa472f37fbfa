"""`tiermem plan`: will it fit, what goes where, how long does a step take, and what would help.

Owns the questions of the command and the form of its answers. Does not simulate (the planner does) and trains nothing.
Guarantees that every number says whether the machine was measured or described, and that the JSON's names are those of
the public contract.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiermem.cli.machines import load_profile, machine_for
from tiermem.cli.modelwork import is_count, model_workload, parse_count
from tiermem.config import Config, resolve_host_memory
from tiermem.errors import ConfigError
from tiermem.figures import counted, format_number, format_seconds
from tiermem.memory.sizes import format_bytes
from tiermem.optim.compiled import are_wanted
from tiermem.planner.design import least_host_memory
from tiermem.planner.machine import Machine
from tiermem.planner.overhead import split_budget
from tiermem.planner.predict import Prediction, Relief, predict
from tiermem.planner.settings import PlanSettings
from tiermem.planner.simulate import StepPlan
from tiermem.planner.workload import Workload, transformer
from tiermem.planner.zero_table import ZeroRow, zero_table

_SHOWN_ACTIONS = 40
_HELP = {
    "host_memory": "raise --host-memory",
    "device_memory": "raise --device-memory",
    "swap": "free some disk, add a --swap-dir on another one, or keep smaller --moments",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan: a model (or a number of parameters), its batch, and the machine."""

    model: str | None
    parameters: str | None
    machine: str | None
    measure: bool
    batch: int
    seq: int
    accumulate: int
    ranks: int
    commits: bool
    copies: int = 1


def plan(options: PlanOptions, config: Config, *, with_actions: bool = False) -> Prediction:
    """Answer the options under the budgets of `config`. Raises ConfigError for what cannot be planned."""
    workload = find_workload(options, config)
    machine = find_machine(options.machine, config, workload, seq=options.seq, again=options.measure)
    return predict(
        workload,
        machine,
        plan_settings(config, machine, options.ranks, workload, commits=options.commits, copies=options.copies),
        commits=options.commits,
        with_plan=with_actions,
    )


def find_workload(options: PlanOptions, config: Config) -> Workload:
    """The step that the options describe."""
    dtype = str(config.param_dtype)
    count = options.model if options.model is not None and is_count(options.model) else options.parameters
    if count is not None:
        return transformer(
            parse_count(count),
            batch=options.batch,
            seq=options.seq,
            batches=options.accumulate,
            dtype=dtype,
            moments=config.moments,
        )
    from tiermem.cli.presets import find_model, require_length

    name = options.model or ""
    model = find_model(name, vocabulary=0, otherwise=", or a number of parameters such as 70B")
    require_length(model, name, options.seq)
    return model_workload(
        model,
        name,
        batch=options.batch,
        seq=options.seq,
        batches=options.accumulate,
        settings=config,
    )


def find_machine(name: str | None, config: Config, workload: Workload, *, seq: int, again: bool) -> Machine:
    """The machine of a profile's name, or this one with what it gives to this workload; `again`: measured anew."""
    if name is not None:
        return load_profile(name)
    return machine_for(workload, config, seq=seq, again=again)


def plan_settings(
    config: Config, machine: Machine, ranks: int, workload: Workload, *, commits: bool, copies: int = 1
) -> PlanSettings:
    """The settings of one rank: the configuration's, or what "auto" makes of the machine.

    `commits`: whether the run commits; `config.commits` is not asked, which the commands set by their options.

    Raises ConfigError for ranks that cannot keep so many copies, and for a budget beyond what a described machine has.
    """
    per_node = min(ranks, machine.ranks_per_node)
    if config.host_nbytes is None and not machine.host.memory:
        raise ConfigError(f"{machine.name} does not say how much memory it has; give --host-memory")
    available = machine.host.memory // per_node
    # What was measured has left the share of others out already, and is what was free then.
    measured = machine.source.startswith("measured")
    if not measured:
        _require_room("host_memory", config.host_nbytes, available or None, f"{machine.name} has for each rank")
        above = None if machine.device is None else machine.device.memory
        _require_room("device_memory", config.device_nbytes, above, f"{machine.name} has on each device")
    host = config.host_nbytes or (available if measured else resolve_host_memory(config, available))
    device = machine.device is not None
    least = least_host_memory(workload, ranks, copies=copies, stage=config.stage, device=device)
    pages, beside = split_budget(host, least, compiled=are_wanted(config.dtype, config.moments))
    return PlanSettings(
        host_memory=pages,
        beside_pages=beside,
        device_memory=config.device_nbytes,
        # Without room on disk for the copies that commits need there is none to take an update back either.
        update="forward" if config.update == "auto" and not commits else config.update,
        tile_nbytes=config.tile_nbytes,
        look_ahead=config.look_ahead_nbytes,
        block_size=config.block_nbytes,
        queue_depth=config.queue_depth,
        ranks=ranks,
        copies=copies,
        stage=config.stage,
        update_on=config.update_on,
        clips=True,
    )


def _require_room(name: str, nbytes: int | None, most: int | None, where: str) -> None:
    if nbytes is not None and most is not None and nbytes > most:
        found = format_bytes(nbytes)
        raise ConfigError(f"{name}: expected at most {format_bytes(most)}, which {where}, found {found}")


def to_object(prediction: Prediction, zero: list[ZeroRow] | None = None) -> dict[str, Any]:
    """The answer as JSON holds it; the first eight names are the public contract."""
    settings, simulation, design = prediction.settings, prediction.simulation, prediction.design
    read = simulation.bytes_read if simulation else None
    written = simulation.bytes_written if simulation else None
    device = design.device_budget if design else settings.device_memory
    found: dict[str, Any] = {
        "fits": prediction.fits,
        "device_bytes": (device or 0) if prediction.machine.device is not None else 0,
        "host_bytes": settings.host_memory + settings.beside_pages,
        "swap_bytes": prediction.swap_bytes,
        "bytes_read_per_step": None if read is None else round(read),
        "bytes_written_per_step": None if written is None else round(written),
        "seconds_per_step": simulation.seconds if simulation else None,
        "bottleneck": prediction.bottleneck,
        "missing_bytes": dict(prediction.missing),
        "host_bytes_least": prediction.host_least,
        "model": prediction.workload.name,
        "parameters": prediction.workload.model_parameters,
        "ranks": settings.ranks,
        "copies": settings.copies,
        "machine": {"name": prediction.machine.name, "source": prediction.machine.source},
        "coarse": prediction.coarse,
        "drive_life_days": prediction.drive_days,
    }
    if simulation is not None and design is not None:
        budgets = {"HOST": settings.host_memory, "DEVICE": design.device_budget or 0}
        found |= {
            "tokens_per_second": prediction.tokens_per_second,
            "phases_seconds": dict(simulation.phases),
            "stall_seconds": dict(simulation.stalls),
            "compute_seconds": simulation.computing,
            "update_seconds": simulation.updating,
            "edges_bytes": dict(simulation.edges),
            "high_water_bytes": {tier.name: min(tier.high_water, budgets[tier.name]) for tier in simulation.tiers},
            "relief_seconds": {relief.resource: relief.seconds for relief in prediction.relief},
            "update": settings.update,
            "tile_numel": design.footprint.tile_numel,
            "look_ahead_bytes": design.footprint.look_ahead,
            "units_updated_on_device": len(design.settled),
        }
    if simulation is not None and simulation.plan is not None:
        found |= _plan_object(simulation.plan)
    if zero is not None:
        found["zero_table"] = [_zero_object(row) for row in zero]
    return found


def _plan_object(steps: StepPlan) -> dict[str, Any]:
    actions = [
        {
            "seconds": action.seconds,
            "verb": action.verb,
            "page": str(action.page),
            "bytes": action.nbytes,
            "edge": action.edge,
            "reason": action.reason,
        }
        for action in steps.actions
    ]
    return {"kept_bytes": dict(steps.kept), "actions": actions}


def _zero_object(row: ZeroRow) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "offload": row.offload,
        "device_bytes": round(row.device),
        "host_bytes": round(row.host),
        "nvme_bytes": round(row.nvme),
    }


def to_json(prediction: Prediction, zero: list[ZeroRow] | None = None) -> str:
    """The answer as one JSON object."""
    return json.dumps(to_object(prediction, zero))


def to_table(prediction: Prediction, zero: list[ZeroRow] | None = None) -> RenderableType:
    """The answer for a terminal."""
    parts: list[RenderableType] = [_summary(prediction)]
    simulation = prediction.simulation
    if simulation is not None:
        parts.append(_relief(prediction.relief, simulation.seconds))
        if simulation.plan is not None:
            parts.append(_actions(simulation.plan))
    if zero is not None:
        parts.append(_zero(zero, prediction))
    return Group(*parts)


def missing_sentence(prediction: Prediction) -> str:
    """What lacks and what would help, in one line."""
    lacks = ", ".join(
        f"{format_bytes(nbytes)} ({nbytes} bytes) more of {tier}; {_HELP[tier]}"
        for tier, nbytes in prediction.missing.items()
    )
    return f"{prediction.workload.name} does not fit: it needs {lacks}"


def zero_rows(prediction: Prediction) -> list[ZeroRow]:
    """The classical table for the plan's model and ranks."""
    return zero_table(
        prediction.workload.model_parameters,
        prediction.settings.ranks,
        gpus_per_node=prediction.machine.ranks_per_node,
    )


def _summary(prediction: Prediction) -> Table:
    workload, settings, machine = prediction.workload, prediction.settings, prediction.machine
    table = Table(title=f"{workload.name} on {machine.name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("machine", machine.source)
    units = counted(len(workload.units), "unit")
    table.add_row("parameters", f"{workload.model_parameters:,} in {units}, {workload.dtype}")
    copies = f" with {settings.copies} copies of the model" if settings.copies > 1 else ""
    ranks = f", {settings.ranks} ranks{copies}; bytes below are one rank's" if settings.ranks > 1 else ""
    table.add_row("batch", f"{workload.tokens:,} tokens, {workload.batches} a step{ranks}")
    least = format_bytes(prediction.host_least)
    table.add_row("host memory", f"{format_bytes(settings.host_memory + settings.beside_pages)} (at least {least})")
    table.add_row("disk", format_bytes(prediction.swap_bytes))
    table.add_row("fits", "yes" if prediction.fits else "no")
    simulation = prediction.simulation
    if simulation is None:
        for name, nbytes in prediction.missing.items():
            table.add_row(Text(f"missing {name}", style="red"), f"{format_bytes(nbytes)} ({nbytes} bytes)")
        return table
    for tier in simulation.tiers:
        budget = settings.host_memory if tier.name == "HOST" else tier.budget
        most = format_bytes(min(tier.high_water, budget))
        table.add_row(f"most of {tier.name}", f"{most} of {format_bytes(budget)}")
    table.add_row("seconds a step (simulated)", _span(simulation.seconds) + _parts(dict(simulation.phases)))
    table.add_row("of it waiting", _span(simulation.stall_seconds) + _parts(dict(simulation.stalls)))
    table.add_row("tokens a second", format_number(prediction.tokens_per_second))
    for edge, moved in simulation.edges.items():
        table.add_row(edge, f"{format_bytes(round(moved))} a step")
    if prediction.design is not None and prediction.design.settled:
        table.add_row("updated on the device", f"{len(prediction.design.settled)} of the units")
    table.add_row("bottleneck", prediction.bottleneck or "")
    if prediction.drive_days is not None:
        table.add_row(
            "drive life at this rate", f"{format_number(prediction.drive_days)} days of the maker's endurance"
        )
    if prediction.coarse:
        table.add_row("simulated as", "fewer units or batches, or larger tiles, than there are")
    return table


def _span(seconds: float) -> str:
    """Seconds, and what they are in minutes or hours where there are many."""
    number, words = format_number(seconds), format_seconds(seconds)
    return number if words == f"{number} s" else f"{number} = {words}"


def _parts(seconds: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {format_number(value)}" for name, value in seconds.items() if value > 0)
    return f" ({parts})" if parts else ""


def _relief(found: Sequence[Relief], now: float) -> Table:
    table = Table(title="Twice as much of", title_justify="left")
    table.add_column("resource")
    table.add_column("seconds a step", justify="right")
    table.add_column("faster by", justify="right")
    for relief in found:
        table.add_row(relief.resource, format_number(relief.seconds), f"{round(100 * (1 - relief.seconds / now))} %")
    return table


def _actions(plan: StepPlan) -> Table:
    actions = plan.actions
    title = f"The plan of a step: {min(len(actions), _SHOWN_ACTIONS)} of {len(actions)} actions (--json has all)"
    table = Table("ms", "does", "page", "bytes", "where", "why", title=title, title_justify="left")
    began = actions[0].seconds if actions else 0.0
    for action in actions[:_SHOWN_ACTIONS]:
        milliseconds = f"{1000 * (action.seconds - began):.1f}"
        table.add_row(
            milliseconds, action.verb, str(action.page), format_bytes(action.nbytes), action.edge, action.reason
        )
    return table


def _zero(rows: list[ZeroRow], prediction: Prediction) -> RenderableType:
    title = f"Model state by ZeRO stage, {counted(prediction.settings.ranks, 'GPU')}, decimal GB"
    table = Table(
        "stage", "offloaded", "a GPU", "a node's memory", "a node's drives", title=title, title_justify="left"
    )
    for row in rows:
        cells = [f"{nbytes / 1e9:,.2f}" for nbytes in (row.device, row.host, row.nvme)]
        table.add_row(str(row.stage), row.offload, *cells)
    note = Text("2 bytes a parameter for weights, 2 for gradients, 12 for fp32 master and moments; no activations.")
    return Group(table, note)
