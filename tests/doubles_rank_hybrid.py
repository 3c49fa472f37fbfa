"""What four ranks do in the tests of hybrid sharding: two copies of the model, each divided over two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from doubles_rank_idioms import committed, kept_of, told
from doubles_rank_scenarios import (
    CLIP,
    Experts,
    Few,
    Odd,
    committing_few,
    config_for,
    loss_of,
    masters_of,
    one_dies,
    parameters_of,
    part,
    routed_tokens,
    tokens,
    trained,
)
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tiermem
from tiermem.zero3.exchange import RankGradients

Scenario = Callable[[Path, int, int], Any]
STEPS = 2
KEPT, DEPTH = 128, 6  # width and depth of the model whose bytes are counted


def pairs() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def crossed() -> DeviceMesh:
    """As `pairs`, where the first two ranks hold the same part."""
    return DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))


def hybrid_committed(name: str, mesh: Callable[[], DeviceMesh], stage: int) -> Scenario:
    """What two copies commit, and beside it the snapshot that they make."""
    scenario = committed(stage, mesh=mesh)
    scenario.__name__ = f"hybrid_committed_{name}"
    return scenario


def run(name: str, make: Callable[[], torch.nn.Module], **how: Any) -> Scenario:
    def scenario(directory: Path, rank: int, size: int) -> Any:
        seed = 1 + rank * (name in ("device", "settled"))  # what ranks other than 0 begin with must not matter
        mesh = None if name == "undivided" else pairs()
        return trained(make, directory, rank, size, mesh=mesh, seed=seed, steps=STEPS, **how)

    scenario.__name__ = f"hybrid_{name}"
    return scenario


def hybrid_committing(directory: Path, rank: int, size: int) -> Any:
    """Three steps, of which two are kept, and the third again from the commit. Updated under backward, clipped."""
    how: dict[str, Any] = {"mesh": pairs(), "update": "backward", "until": 3}
    whole, again = (committing_few(directory, rank, size, last=last, **how) for last in (2, 3))
    wrong = told(lambda: committing_few(directory, rank, size, until=5))
    return {"whole": whole, "again": again, "wrong": wrong}


def hybrid_copied(directory: Path, rank: int, size: int) -> Any:
    """A snapshot, continued by the same ranks and by all four as one copy; and the model for others to load."""
    directory.mkdir(exist_ok=True)
    folder = directory.parent
    found: dict[str, Any] = {}
    for name, mesh, before in (
        ("made", pairs(), False),
        ("two copies", pairs(), folder / "copy"),
        ("one copy", None, folder / "copy"),
    ):
        torch.manual_seed(1 if not before else 77)  # a snapshot's values win
        model = Few()
        with tiermem.offload(model, config_for(directory / name), resume=before, mesh=mesh, coalesce=0) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
            if not before:
                loss_of(model, part(tokens(0), rank, size)).backward()
                optimizer.step()
                optimizer.zero_grad()
                runtime.snapshot(folder / "copy").wait()
                runtime.save_pretrained(folder / "model")
                at_first = parameters_of(runtime)
            loss_of(model, part(tokens(1), rank, size)).backward()
            optimizer.step()
            found[name] = list(masters_of(runtime, parameters_of(runtime)).values())
    files = sorted(path.name for path in (folder / "copy").iterdir())
    saved = {key: value for file in (folder / "model").glob("*.safetensors") for key, value in load_file(file).items()}
    return {"masters": found, "files": files, "saved": saved, "weights": at_first}


def hybrid_kept(directory: Path, rank: int, size: int) -> Any:
    """Bytes in memory and on disk of a rank with room for everything."""
    return kept_of(directory, rank, size, width=KEPT, depth=DEPTH, mesh=pairs())


def hybrid_differs(directory: Path, rank: int, size: int) -> Any:
    """A bit of one rank's gradient turns over where it is stored."""
    model = Odd()
    with tiermem.offload(model, config_for(directory), mesh=pairs()):
        real = RankGradients._store

        def spoilt(gradients: Any, shard: Any, tile: int, mean: torch.Tensor, *rest: Any) -> None:
            mean.view(torch.int32)[0] ^= 1 << 20
            real(gradients, shard, tile, mean, *rest)

        if rank == 3:
            RankGradients._store = spoilt
        try:
            loss_of(model, part(tokens(0), rank, size)).backward()
        finally:
            RankGradients._store = real


def hybrid_dies(directory: Path, rank: int, size: int) -> Any:
    return one_dies(directory, rank, size, mesh=pairs())


def wrong_meshes(directory: Path, rank: int, size: int) -> Any:
    names = ("replicate", "shard")
    meshes = {
        "three": init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipeline", *names)),
        "unnamed": init_device_mesh("cpu", (2, 2)),
        "not divided": init_device_mesh("cpu", (4, 1), mesh_dim_names=names),
        "descending": DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=names),
        "something else": [[0, 1], [2, 3]],
    }
    model = Odd()
    before = {name: values.clone() for name, values in model.named_parameters()}
    config = config_for(directory)
    said = {name: told(lambda mesh=mesh: tiermem.offload(model, config, mesh=mesh)) for name, mesh in meshes.items()}
    same = all(torch.equal(values, before[name]) for name, values in model.named_parameters())
    inner = meshes["three"][names]  # and the way out that the error names
    with tiermem.offload(model, config, mesh=inner) as runtime:
        model(tokens(0))
        shared = runtime._house.company.grid.rows
    return {"said": said, "untouched": same, "rows": shared}


SCENARIOS: dict[str, Scenario] = {
    made.__name__: made
    for made in (
        run("undivided", Odd),
        run("odd", Odd),
        run("bfloat16", Odd, param_dtype="bfloat16"),
        run("routed", Experts, batch=routed_tokens),
        run("stage_1", Odd, stage=1, accumulate=2),
        run("device", Odd, device="simulated", device_memory="8MiB"),
        run("settled", Odd, device="simulated", device_memory="8MiB", update_on="auto"),
        hybrid_committing,
        hybrid_committed("pairs", pairs, 3),
        hybrid_committed("crossed", crossed, 2),
        hybrid_copied,
        hybrid_kept,
        hybrid_differs,
        hybrid_dies,
        wrong_meshes,
    )
}
