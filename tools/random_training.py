"""Trains what is drawn at random, offloaded and in plain PyTorch: model, configuration, and what a user does.

Owns the budgets that a draw is given, the processes, and the comparison. Knows the public face only. Guarantees an exit
status of 1 if anything is raised, or a loss, a norm, a gradient, a weight or a buffer has another bit than in plain
PyTorch; and prints the number and the draw, by which it can be had again.

    python tools/random_training.py DIRECTORY [--first 0] [--count 200]
    python tools/random_training.py DIRECTORY --param-dtype bfloat16
    python tools/random_training.py DIRECTORY --ranks 2

In 16 bits the other side is offloaded, too, simply and with room for everything. So it is over ranks, where numbers may
differ by a hundredth: sums over micro-batches and ranks are associated in other ways. Needs transformers.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tiermem
from tools.draws import Draw, draw
from tools.subjects import ADAPTED_LATE, MODELS
from tools.trainees import Notes, Offloaded, Plain

PATIENCE = 120.0  # seconds for one draw over ranks
NEAR = 0.01  # of a value and 1
_TRIES = 4
_NEEDED = re.compile(r"set (host_memory|device_memory) to (\d+) bytes")


def train(drawn: Draw, directory: Path, rank: int = 0) -> Notes:
    """What is seen offloaded, with the budgets that were drawn, or what turns out to be needed for activations."""
    budgets = _budgets(drawn, directory)
    for number in range(_TRIES):
        life = directory / f"try {number}"
        life.mkdir(exist_ok=True)
        try:
            return Offloaded(drawn, life, budgets, rank).run()
        except tiermem.BudgetError as error:
            if number == _TRIES - 1 or not (needed := _NEEDED.search(str(error))):
                raise
            budgets[needed[1]] = int(needed[2])
    raise AssertionError("not reached")


def _budgets(drawn: Draw, directory: Path) -> dict[str, int]:
    """The least, and of what lies between that and everything as much as was drawn."""
    everything = 24 * sum(parameter.numel() for parameter in MODELS[drawn.model]().parameters()) + (1 << 20)
    names = ("device_memory", "host_memory") if drawn.config["device"] != "cpu" else ("host_memory",)
    found = dict.fromkeys(names, everything + (1 << 25))
    for name, room in zip(names, reversed(drawn.room[: len(names)]), strict=True):
        least = 4096
        try:
            directory.joinpath("least").mkdir(exist_ok=True)
            Offloaded(drawn, directory / "least", found | {name: least}).runtime.close()
        except tiermem.BudgetError as error:
            needed = _NEEDED.search(str(error))
            if needed is None:
                raise
            least = int(needed[2])
        found[name] = least + round(max(0, everything - least) * room)
    return found


def difference(found: Notes, expected: Notes, near: float = 0.0) -> str:
    """What is not the same, "" if all is; the sign of zero and the kind of NaN do not count."""
    if len(found) != len(expected):
        return f"{len(found)} things were seen where {len(expected)} were expected"
    for number, ((what, here), (other_thing, there)) in enumerate(zip(found, expected, strict=True)):
        if what != other_thing:
            return f"{number}: {what} was seen where {other_thing} was expected"
        if here is None or there is None:
            if here is not there:
                return f"{number}, {what}: {'nothing' if here is None else 'something'} is there"
            continue
        one, other = torch.nan_to_num(here.float(), 7e9), torch.nan_to_num(there.float(), 7e9)
        apart = (one - other).abs() > near * (1 + other.abs())
        if one.shape != other.shape or bool(apart.any()):
            return f"{number}, {what}: {one.flatten()[:3].tolist()} where {other.flatten()[:3].tolist()} was expected"
    return ""


def alone(number: int, directory: Path, param_dtype: str = "float32") -> str:
    """What is wrong with a draw in one process."""
    drawn = draw(number)
    try:
        if param_dtype == "float32":
            return difference(train(drawn, directory), Plain(drawn).run())
        model = "nested" if drawn.model == "normed" else drawn.model  # whose statistics stay in float32
        return _beside_simple(
            replace(drawn, model=model, config=drawn.config | {"param_dtype": param_dtype}), directory
        )
    except Exception:  # noqa: BLE001 - it is what this looks for
        return traceback.format_exc()


def _beside_simple(drawn: Draw, directory: Path, rank: int = 0, near: float = 0.0) -> str:
    simple = drawn.config | {"update": "step", "device": "cpu", "io_backend": "threads", "update_on": "host"}
    roomy = replace(drawn, config=simple, offload=drawn.offload | {"coalesce": 0, "keep": None}, room=(1.2, 1.2))
    sides = []
    for side, what in (("roomy", roomy), ("drawn", drawn)):
        directory.joinpath(side).mkdir(exist_ok=True)
        sides.append(train(what, directory / side, rank))
    return difference(sides[1], sides[0], near)


def _rank(number: int, rank: int, ranks: int, directory: Path) -> str:
    wait = dt.timedelta(seconds=PATIENCE / 3)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks, timeout=wait)
    drawn = draw(number)
    if drawn.model in ("routed", ADAPTED_LATE):  # ranks that use other units are told so; adapters are of one process
        drawn = replace(drawn, model="nested")
    if ranks % 2 == 0 and ranks > 2 and number % 2:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        drawn = replace(drawn, offload=drawn.offload | {"mesh": mesh})
    try:
        return _beside_simple(drawn, directory, rank, NEAR)
    except Exception:  # noqa: BLE001 - as above
        return traceback.format_exc()


def together(number: int, ranks: int, directory: Path) -> str:
    """What is wrong with a draw over ranks, each a fork of this process, which has computed nothing."""
    left = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                directory.joinpath(f"found {rank}").write_bytes(pickle.dumps(_rank(number, rank, ranks, directory)))
            finally:
                os._exit(0)
        left[pid] = rank
    end = time.monotonic() + PATIENCE
    while left and time.monotonic() < end:
        for pid in [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]]:
            del left[pid]
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    files = [directory / f"found {rank}" for rank in range(ranks)]
    found = [pickle.loads(file.read_bytes()) if file.exists() else "no word\n" for file in files]  # noqa: S301 - our own
    return "".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--param-dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    asked = parser.parse_args()
    if asked.ranks > 1 and asked.param_dtype != "float32":
        parser.error("--param-dtype is for one process")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong = 0
    for number in range(asked.first, asked.first + asked.count):
        torch._dynamo.reset()  # noqa: SLF001 - or it refuses, after a few draws, to compile their models
        with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
            place = Path(directory)
            lone = asked.ranks == 1
            text = alone(number, place, asked.param_dtype) if lone else together(number, asked.ranks, place)
        if text:
            wrong += 1
            print(f"{number}: {asdict(draw(number))}\n{text}", flush=True)
    print(f"{asked.count - wrong} of {asked.count} draws have what was expected")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
