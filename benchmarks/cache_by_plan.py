"""What a step reads when eviction follows the plan: beside LRU, and beside the least that any eviction could read.

Owns the two yardsticks and the table. Does not simulate or train by itself. Guarantees that all three see the same
budget and the same accesses, and counts bytes only, so that the load of the machine does not matter. The least is
Belady's algorithm with the recorded order, where a page may be kept in part: no plan reads less in that order.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import arguments_of, report
from workloads import Workload

import tiermem
from tiermem.cli.modelwork import workload_of
from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.planner.design import Design, PlanSettings, make_design
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.planner.simulate import simulate

THEME = "cache_by_plan"
PACKAGES = ("torch", "transformers")
MODEL = Workload(layers=8, width=256, mlp_width=688, heads=4, vocabulary=1024, rows=1, length=32)
TINY = Workload(layers=3, width=64, mlp_width=172, heads=4, vocabulary=512, rows=1, length=8)
SHARES = (0.10, 0.25, 0.50, 0.75)
UPDATES = ("step", "forward", "backward")
TILE, TINY_TILE = 256 << 10, 64 << 10
WARM_UP = 3
# Rates of a machine on which nothing is waited for long; bytes hardly depend on them.
MACHINE = Machine(
    name="any",
    source="described: only bytes are taken from the simulation",
    host=Host(flops={"bfloat16": 5e11}, update_rate={"bfloat16": 8e8}),
    drive=Drive(read=2.8e9, write=2.5e9, mixed=2.5e9),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count; print the table, write the result."""
    parser = arguments_of(__doc__, quick="a tiny model, one schedule, two budgets")
    options = parser.parse_args(arguments)
    model, updates, shares = (TINY, UPDATES[:1], SHARES[::2]) if options.quick else (MODEL, UPDATES, SHARES)
    rows = [
        count(model, update, share, options.directory, steps=1 if options.quick else 7)
        for update in updates
        for share in shares
    ]
    body = table(rows, model)
    report(THEME, PACKAGES, body, {"rows": rows}, options)
    return 0


def count(model: Workload, update: str, share: float, directory: Path, *, steps: int) -> dict[str, Any]:
    """One line: bytes read in a step by training, by the simulation, by LRU, and the least."""
    torch.manual_seed(0)
    with tiermem.deferred_init():
        trained = model.model()
    work = workload_of(trained, "model", batch=model.rows, seq=model.length, batches=1, dtype="bfloat16")
    tile = TINY_TILE if model == TINY else TILE
    state = work.parameters * (work.itemsize + work.state_itemsize)
    budget = round(state * share) // 4096 * 4096
    design = make_design(work, MACHINE, PlanSettings(host_memory=budget, update=update, tile_nbytes=tile))
    with tempfile.TemporaryDirectory(prefix="tiermem-cache-", dir=directory) as folder:
        config = tiermem.Config(
            device="cpu",
            host_memory=budget,
            swap_dirs=[folder],
            update=update,  # type: ignore[arg-type]
            tile_size=tile,
            commits=False,
        )
        read = []
        with tiermem.offload(trained, config) as runtime:
            optimizer = tiermem.AdamW(trained.parameters())
            for number in range(WARM_UP + steps):
                tokens = model.tokens(seed=0, step=number)
                trained(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                last = runtime.statistics().last
                read.append(last.bytes_read if last else 0)
    return {
        "update": update,
        "share": share,
        "budget": budget,
        "state": state,
        "measured": statistics.median(read[WARM_UP:]),
        "all": read[WARM_UP:],
        "simulated": simulate(design).bytes_read,
        "lru": lru_bytes(design),
        "least": least_bytes(design),
    }


def lru_bytes(design: Design, steps: int = 4) -> int:
    """Bytes that demand paging with LRU reads in the last of some steps, one access of the schedule at a time."""
    resident: OrderedDict[PageKey, int] = OrderedDict()
    absent = {key for key, _ in design.pages() if key.kind is Kind.GRAD}
    sizes, read = dict(design.pages()), 0
    for _ in range(steps):
        read = 0
        for access in design.schedule.accesses:
            key = access.key
            if key not in resident:
                read += 0 if key in absent else sizes[key]
                while resident and sum(resident.values()) + sizes[key] > design.settings.host_memory:
                    resident.popitem(last=False)
                resident[key] = sizes[key]
            resident.move_to_end(key)
            absent.discard(key)
            if key.kind is Kind.GRAD and access.lane is Lane.UPDATE:
                del resident[key]
                absent.add(key)
    return read


def least_bytes(design: Design, steps: int = 4) -> int:
    """Bytes that farthest-next-use eviction of parts of pages reads in a step: the least for that order."""
    accesses = list(design.schedule.accesses) * steps
    sizes, budget = dict(design.pages()), design.settings.host_memory
    following = [len(accesses)] * len(accesses)
    seen: dict[PageKey, int] = {}
    for position in range(len(accesses) - 1, -1, -1):
        key = accesses[position].key
        following[position] = seen.get(key, len(accesses))
        seen[key] = position
    kept: dict[PageKey, int] = {}
    use: dict[PageKey, int] = {}
    empty = {key for key in sizes if key.kind is Kind.GRAD}
    period, read = len(design.schedule.accesses), 0
    # The last step would profit from the end of the world: the one before it is counted.
    for position in range(period * (steps - 1)):
        key, lane = accesses[position].key, accesses[position].lane
        lacking = sizes[key] - kept.get(key, 0)
        if position >= period * (steps - 2) and key not in empty:
            read += lacking
        kept[key], use[key] = sizes[key], following[position]
        empty.discard(key)
        if key.kind is Kind.GRAD and lane is Lane.UPDATE:
            del kept[key]
            empty.add(key)
        excess = sum(kept.values()) - budget
        for other in sorted(kept, key=lambda page: -use[page]):
            if excess <= 0:
                break
            if other != key:
                given = min(excess, kept[other])
                kept[other] -= given
                excess -= given
    return read


def table(rows: Sequence[dict[str, Any]], model: Workload) -> str:
    """The result as Markdown."""
    size = rows[0]["state"] / 1e6
    intro = f"A Llama of {model.layers} layers, width {model.width}: {size:.1f} MB of parameters and optimizer state."
    intro += " MB read from the drive in a step: the median (smallest to largest). LRU and the least possible hold no"
    intro += " leases, read nothing ahead and have the whole budget for pages, which training does not."
    lines = [
        intro,
        "",
        "| update | budget, share of the state | read | simulated | LRU | least possible | read / LRU | read / least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured = row["measured"]
        spread = f"{min(row['all']) / 1e6:.1f} to {max(row['all']) / 1e6:.1f}"
        lines.append(
            f"| {row['update']} | {row['share']:.0%} | {measured / 1e6:.1f} ({spread}) | {row['simulated'] / 1e6:.1f} "
            f"| {row['lru'] / 1e6:.1f} | {row['least'] / 1e6:.1f} | {measured / row['lru']:.2f} "
            f"| {measured / row['least'] if row['least'] else float('inf'):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
