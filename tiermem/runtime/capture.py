"""Commits and snapshots of a running house: what is captured now, before the pages follow beside training.

Owns the capture of everything that is not in pages, and the check that there is a whole step to be kept. Does not
write anything. Guarantees that what is captured is of one instant, and that nothing has begun when it raises.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tiermem.checkpoint.pretrained import export_record
from tiermem.checkpoint.tensor_file import fits_files, require_fit
from tiermem.errors import ConfigError
from tiermem.runtime import randomness
from tiermem.runtime.commits import PendingCommit
from tiermem.runtime.record import FORMAT, optimizer_records, parameters_record
from tiermem.runtime.snapshots import PendingSnapshot
from tiermem.zero3.conductor import Act

if TYPE_CHECKING:
    from tiermem.runtime.house import House


def start_commit(house: House, extra: Any) -> PendingCommit:
    """Start a commit of the updates queued so far. See `Runtime.commit`."""
    if not house.config.commits:
        raise ConfigError("commits=False: there is no room on disk for a commit; leave the setting out")
    house.require_between_steps(Act.COMMIT)
    record = {
        "format": FORMAT,
        "run": house.company.run,
        "rank": house.company.rank,
        "part": [house.company.grid.copies.rank, house.company.grid.shards.rank],  # which copy, and which part of it
        "layout": house.layout_record,
        "parameters": parameters_record(house.layouts, house.blueprint.states.values()),
        "buffers": house.buffers.capture(),
        "random": randomness.capture(),
        **_record(house, extra),
    }
    if house.blueprint.footprint.serial:
        house.coordinator.wait_updates()  # nobody else would carry them out
    house.snapshots.wait_line()
    return house.commits.start(record, calls=house.steps.open_calls)


def start_snapshot(house: House, path: str | os.PathLike[str], extra: Any) -> PendingSnapshot:
    """Start a snapshot of the updates queued so far. See `Runtime.snapshot`."""
    house.require_between_steps(Act.SNAPSHOT)
    for name, parameter in house.model.named_parameters():
        require_fit(f"parameter {name}", parameter)
    record = {**_record(house, extra), "random": [randomness.capture()], "buffers": house.buffers.capture_odd()}
    buffers = {
        name: buffer.detach().cpu().clone().resolve_conj().resolve_neg()
        for name, buffer in house.model.named_buffers()
        if fits_files(buffer)
    }
    if house.blueprint.footprint.serial:
        house.coordinator.wait_updates()
    draft = house.snapshots.begin(path, stall_seconds=house.config.stall_timeout)
    return house.snapshots.start(draft, record, buffers)


def _record(house: House, extra: Any) -> dict[str, Any]:
    return {
        "step": house.steps.number,
        "param_dtype": str(house.config.param_dtype),
        "optimizers": [*optimizer_records(house.coordinator.optimizers()), *house.steps.waiting()],
        "pretrained": export_record(house.model, house.other_names, house.config.dtype),
        "extra": extra,
    }
