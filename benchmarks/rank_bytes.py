"""Bytes per rank for each ZeRO stage and number of ranks, measured, beside ZeRO's own arithmetic.

Trains a small Llama for two steps on processes of this machine (gloo), with room for everything in host memory, and
counts the bytes of each rank's pages by kind; what was reserved in host memory at most, where what is in transit
between ranks comes on top; and what its swap files take on disk (one copy, as commits=False). Writes a table and the
raw numbers.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import arguments_of, on_ranks, report
from transformers import LlamaConfig, LlamaForCausalLM

import tiermem

WORD = 2  # bytes of a bfloat16 parameter or gradient
STATE = 10  # two float32 moments and the remainder that completes the master


def rank_bytes(rank: int, size: int, stage: int, width: int, directory: str) -> None:
    """One rank: train, and write down what it keeps."""
    torch.set_num_threads(1)
    if size > 1:
        store = f"file://{directory}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4, "vocab_size": 256}
    with tiermem.deferred_init():
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=4))
    swap = Path(directory, "swap")
    swap.mkdir(exist_ok=True)
    config = tiermem.Config(device="cpu", host_memory="96MiB", swap_dirs=[swap], stage=stage, commits=False)
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(2):
            tokens = torch.randint(0, 256, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        statistics = runtime.statistics()
        shards = runtime._house.blueprint.shards  # noqa: SLF001 - measured from inside
        kinds: dict[str, int] = {"param": 0, "grad": 0}
        for shard in shards:
            for key, nbytes in shard.pages():
                kinds[key.kind.value] += nbytes
            if stage == 1 and size > 1:
                kinds["grad"] += shard.bucket_nbytes - shard.trainable_numel * shard.layout.dtype.itemsize
        states = runtime._house.states._units.values()  # noqa: SLF001
        kinds["state"] = sum(state.state_nbytes(tile) for state in states for tile in range(state.tiles))
        own = swap if size == 1 else swap / f"rank_{rank:05d}"
        disk = sum(file.stat().st_blocks * 512 for file in own.rglob("*") if file.is_file())
    tiers = {tier.name: [tier.budget, tier.high_water] for tier in statistics.tiers}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found = {"kinds": kinds, "tiers": tiers, "disk": disk, "parameters": parameters}
    Path(directory, f"{rank}.json").write_text(json.dumps(found))


def measure(size: int, stage: int, width: int) -> list[dict[str, Any]]:
    """What each rank of a world keeps. Raises RuntimeError if one does not end in time."""
    return on_ranks(rank_bytes, size, size, stage, width, seconds=180)


def expected(parameters: int, size: int, stage: int) -> int:
    """ZeRO's arithmetic: states / N, and gradients / N from stage 2 on, and parameters / N in stage 3."""
    shares = (size if stage == 3 else 1, size if stage >= 2 else 1, size)
    return sum(parameters * width // share for width, share in zip((WORD, WORD, STATE), shares, strict=True))


def _taken(found: dict[str, Any]) -> tuple[int, int]:
    """Bytes reserved in host memory at most, and bytes on disk."""
    return found["tiers"]["HOST"][1], found["disk"]


def main() -> None:
    """Measure; print the table, write the result."""
    parser = arguments_of(__doc__, quick="one rank and two, a tiny model", swaps=False)
    given = parser.parse_args()
    sizes, width = ((1, 2), 32) if given.quick else ((1, 2, 4), 256)
    rows, worlds = [], {}
    for size in sizes:
        for stage in (1, 2, 3):
            found = measure(size, stage, width)
            worlds[f"{size} ranks, stage {stage}"] = found
            most = [max(each["kinds"][kind] for each in found) for kind in ("param", "grad", "state")]
            wanted = expected(found[0]["parameters"], size, stage)
            reserved, disk = (max(found) for found in zip(*(_taken(each) for each in found), strict=True))
            numbers = " | ".join(f"{nbytes:,}" for nbytes in (*most, sum(most), wanted, reserved, disk))
            rows.append(f"| {size} | {stage} | {numbers} | {sum(most) / wanted:.4f} |")
    head = (
        "| ranks | stage | parameters | gradients | states | together | ZeRO's arithmetic | reserved in memory at most "
        "| disk | together to arithmetic |\n" + "|---" * 10 + "|"
    )
    body = "\n".join(["Bytes on the rank that keeps most; gloo, bfloat16.", "", head, *rows])
    report("rank_bytes", ["torch"], body, {"worlds": worlds}, given)


if __name__ == "__main__":
    main()
