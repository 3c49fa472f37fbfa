"""What ranks do in the tests that others do not: calls of one rank alone, errors in the middle, other models."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from doubles_combinations import part_of
from doubles_rank_idioms import told
from doubles_rank_scenarios import Odd, config_for, llama, loss_of, parameters_of, part, tokens
from safetensors.torch import save_model
from torch import nn

import tiermem


def _steps(
    model: nn.Module,
    rank: int,
    size: int,
    count: int = 3,
    after: Callable[[int], Any] = lambda step: None,
) -> None:
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
    for step in range(count):
        loss_of(model, part(tokens(step), rank, size)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


def _alone(call: Callable[[tiermem.Runtime, Path], Any]) -> Callable[[Path, int, int], Any]:
    """Rank 0 alone calls a method of the runtime after its second step, as in `if rank == 0:`."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        torch.manual_seed(1)
        model = llama()
        with tiermem.offload(model, config_for(directory), coalesce=0) as runtime:

            def after(step: int) -> None:
                if rank == 0 and step == 1:
                    call(runtime, directory.parent / "made")

            _steps(model, rank, size, after=after)

    return scenario


def fails_in_backward(directory: Path, rank: int, size: int) -> Any:
    """A hook of rank 1 raises in its second step, while gradients of its unit are being collected."""
    torch.manual_seed(1)
    model = Odd()
    calls = [0]

    def spoilt(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if rank == 1 and calls[0] == 3:  # the layer is used twice
            raise ValueError("the gradient of rank 1 is spoilt")
        return gradient

    model.layers[0][0].weight.register_hook(spoilt)
    with tiermem.offload(model, config_for(directory), coalesce=0):
        _steps(model, rank, size)


def fails_behind_runs_of_some(directory: Path, rank: int, size: int) -> Any:
    """The last rank raises in a run of all, before which each two neighbours have had one, all at the same time."""
    pairs = [torch.distributed.new_group([first, first + 1]) for first in range(size - 1)]
    with contextlib.ExitStack() as runs:
        for first, pair in enumerate(pairs):
            if rank in (first, first + 1):
                config = config_for(directory.with_name(f"pair_{first}"))
                runs.enter_context(tiermem.offload(Odd(), config, mesh=pair))
    torch.manual_seed(1)
    model = Odd()

    def spoil(step: int) -> None:
        if rank == size - 1 and step == 1:
            raise ValueError("the data of the last rank are spoilt")

    with tiermem.offload(model, config_for(directory), coalesce=0):
        _steps(model, rank, size, after=spoil)


def refused_on_one(directory: Path, rank: int, size: int) -> Any:
    """Rank 1's model cannot be taken; nothing is left on disk."""
    model = Odd() if rank != 1 else nn.Sequential(nn.LazyLinear(3))
    said = told(lambda: tiermem.offload(model, config_for(directory)))
    torch.distributed.barrier()  # the other rank, too, has removed what it made
    return said, [each.name for each in directory.iterdir()]


def nothing_left(directory: Path, rank: int, size: int) -> Any:
    """Refused for a file in the way of a directory of rank 1, and for a budget; nobody leaves a directory behind."""
    directory.mkdir(exist_ok=True)
    (directory / "rank_00001").touch()
    found = [told(lambda: tiermem.offload(Odd(), config_for(directory)))]
    other = directory.with_name("other")
    found.append(told(lambda: tiermem.offload(Odd(), config_for(other, host_memory=4096))))
    return found, (directory / f"rank_{rank:05d}").is_dir(), (other / f"rank_{rank:05d}").is_dir()


def never_comes(directory: Path, rank: int, size: int) -> Any:
    """Rank 1 fails before it offloads anything."""
    if rank == 1:
        raise ValueError("rank 1 has no data")
    with tiermem.offload(Odd(), config_for(directory, stall_timeout=4.0)):
        pass


def interrupted(directory: Path, rank: int, size: int) -> Any:
    """Somebody presses Ctrl-C where rank 1 is, in the forward of its second step."""
    torch.manual_seed(1)
    model = Odd()
    calls = [0]

    def interrupt(*_: Any) -> None:
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            raise KeyboardInterrupt

    model.layers[1].register_forward_hook(interrupt)
    try:
        with tiermem.offload(model, config_for(directory), coalesce=0):
            _steps(model, rank, size)
    except KeyboardInterrupt:
        return "interrupted"


def ends_earlier(directory: Path, rank: int, size: int) -> Any:
    """Rank 1 has fewer batches."""
    torch.manual_seed(1)
    model = Odd()
    with tiermem.offload(model, config_for(directory), coalesce=0):
        _steps(model, rank, size, count=3 - rank)
    return "ended"


def other_models(directory: Path, rank: int, size: int) -> Any:
    """Rank 1 has another model, or other settings; what all are told, and whether the model is as it was."""

    weights = directory.parent / f"weights {rank}.safetensors"
    save_model(Odd(), str(weights))

    def tried(name: str, change: Callable[[nn.Module], Any] = lambda model: None, **settings: Any) -> tuple[str, bool]:
        torch.manual_seed(1)
        model = Odd()
        given = {"coalesce": 0}
        if rank == 1:
            change(model)
            given |= {key: settings.pop(key) for key in ("coalesce", "keep", "weights") if key in settings}
        config = config_for(directory.parent / name, **settings if rank == 1 else {})
        before = [values.clone() for values in model.parameters()]
        said = told(lambda: tiermem.offload(model, config, **given))
        same = all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        torch.distributed.barrier()  # the other rank, too, has removed what it made
        return said, same and not list((directory.parent / name).rglob("*.*"))

    return {
        "a layer": tried("a layer", lambda model: model.layers.append(nn.Linear(20, 20))),
        "a shape": tried("a shape", lambda model: setattr(model, "never", nn.Linear(5, 3))),
        "frozen": tried("frozen", lambda model: model.layers[0].requires_grad_(False)),
        "a buffer": tried("a buffer", lambda model: model.register_buffer("table", torch.ones(3))),
        "param_dtype": tried("param_dtype", param_dtype="bfloat16"),
        "stage": tried("stage", stage=2),
        "moments": tried("moments", moments="int8"),
        "coalesce": tried("coalesce", coalesce="16KiB"),
        "keep": tried("keep", keep="100"),
        "weights": tried("weights", weights=weights),
    }


def other_snapshots(directory: Path, rank: int, size: int) -> Any:
    """Rank 1 goes on from another snapshot of the same run, from none, and then from a copy of the same one."""
    torch.manual_seed(1)
    model = Odd()
    paths = [directory.with_name(f"copy {step}") for step in range(2)]
    with tiermem.offload(model, config_for(directory)) as runtime:
        _steps(model, rank, size, count=2, after=lambda step: runtime.snapshot(paths[step], {"step": step}).wait())
    sources: list[list[Any]] = [[paths[0], paths[1]], [paths[0], False]]
    other = config_for(directory.with_name("other"))
    said = [told(partial(tiermem.offload, Odd(), other, resume=own[rank])) for own in sources]
    path = paths[1]
    if rank == 1:
        path = Path(shutil.copytree(path, directory.with_name("copy of the same")))
    with tiermem.offload(Odd(), config_for(directory.with_name("same")), resume=path) as runtime:
        return *said, runtime.committed


def _other_verbs(stage: int, update: str, verbs: Callable[[tiermem.AdamW, bool], Any]) -> Callable[..., Any]:
    """In its second step rank 1 does otherwise with its gradients; returns whether any parameter has changed by it."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        torch.manual_seed(1)
        model = Odd()
        with tiermem.offload(model, config_for(directory, stage=stage, update=update), coalesce=0) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
            for step in range(3):
                loss_of(model, part(tokens(step), rank, size)).backward()
                verbs(optimizer, rank == 1 and step == 1)
                optimizer.zero_grad()
            return parameters_of(runtime)

    return scenario


def _skips_clipped(optimizer: tiermem.AdamW, other: bool) -> None:
    optimizer.clip_grad_norm_(1.0)
    if not other:
        optimizer.step()


def _clips_alone(optimizer: tiermem.AdamW, other: bool) -> None:
    if other:
        optimizer.clip_grad_norm_(1e-3)
    optimizer.step()


def _skips(optimizer: tiermem.AdamW, other: bool) -> None:
    if not other:
        optimizer.step()


def steps_differently(directory: Path, rank: int, size: int) -> Any:
    """What each rank is told where one of them has other parameters, clips otherwise, or learns faster."""
    found = {}

    def tried(name: str, change: Callable[[tiermem.AdamW], Any], parts: slice = slice(None)) -> None:
        path = directory.parent / name
        torch.manual_seed(1)
        model = Odd()
        parameters = list(model.parameters())
        with tiermem.offload(model, config_for(path), coalesce=0):
            optimizer = tiermem.AdamW(parameters[parts] if rank else parameters, lr=1e-3)
            try:
                for step in range(2):
                    loss_of(model, part(tokens(step), rank, size)).backward()
                    if step and rank:
                        change(optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
            except tiermem.TiermemError as error:
                found[name] = str(error)

    tried("rate", lambda optimizer: optimizer.param_groups[0].update(lr=2e-3))
    tried("clipping", lambda optimizer: setattr(optimizer, "max_grad_norm", 1.0))
    tried("parameters", lambda _: None, slice(1, None))
    tried("another order", lambda _: None, slice(None, None, -1))
    return found


VERBS = {"skips_clipped": _skips_clipped, "clips_alone": _clips_alone, "skips": _skips}
STAGES = ((1, "forward"), (2, "backward"), (3, "backward"), (3, "auto"))
DIFFERENT_VERBS = {
    f"{name}_{stage}_{update}": _other_verbs(stage, update, verbs)
    for (name, verbs), (stage, update) in part_of(3, VERBS.items(), STAGES)
}
SCENARIOS: dict[str, Callable[[Path, int, int], Any]] = {
    "commits_alone": _alone(lambda runtime, _: runtime.commit({}).wait()),
    "snapshots_alone": _alone(lambda runtime, path: runtime.snapshot(path)),
    "saves_alone": _alone(lambda runtime, path: runtime.save_pretrained(path)),
    "fails_in_backward": fails_in_backward,
    "fails_behind_runs_of_some": fails_behind_runs_of_some,
    "refused_on_one": refused_on_one,
    "nothing_left": nothing_left,
    "never_comes": never_comes,
    "interrupted": interrupted,
    "ends_earlier": ends_earlier,
    "other_models": other_models,
    "other_snapshots": other_snapshots,
    "steps_differently": steps_differently,
    **DIFFERENT_VERBS,
}
