"""What ranks do in the tests: training scripts that a single process can repeat on all of the data, and mishaps."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from doubles_combinations import number_of, some_of
from doubles_models import small_llama
from doubles_ranks import STALL
from torch import nn
from torch.nn import functional

import tiermem
from tiermem.zero3.ranks import Ranks

ROWS, WORDS, LENGTH = 12, 50, 7
COMMITS = number_of(3, 4)  # one with a mishap in it, the one before, and what follows
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
CLIP = 0.5


class Odd(nn.Module):
    """Tied, frozen, smaller than the number of ranks, uneven, used twice, with a gap between parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 20)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(20, 75), nn.GELU(), nn.Linear(75, 20), nn.LayerNorm(20)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(2))
        self.never = nn.Linear(3, 5)
        self.head = nn.Linear(20, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1][0].weight.requires_grad_(False)
        self.layers[2].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden + self.layers[0](hidden)) * self.scale.mean()


class Few(nn.Sequential):
    """Two units, for what does not depend on which there are."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(WORDS, 20), nn.Linear(20, WORDS))


class Routed(nn.Module):
    """A layer of experts: token t goes to expert t modulo their number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            chosen = tokens % len(self.experts) == number
            if bool(chosen.any()):
                out[chosen] = expert(hidden[chosen])
        return out


class Experts(nn.Module):
    """A model of routed layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden, tokens)
        return self.head(hidden)


def llama(layers: int = 3) -> nn.Module:
    return small_llama(words=WORDS, mlp_width=72, layers=layers, max_position_embeddings=32)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def routed_tokens(step: int) -> torch.Tensor:
    """The first rows use other experts than the last ones, and one expert nobody."""
    low = torch.randint(0, 2, (ROWS // 2, LENGTH), generator=torch.Generator().manual_seed(step))
    return torch.cat([low * 6, 6 + 2 + low]).clamp(max=WORDS - 1)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    out = model(rows)
    logits = getattr(out, "logits", out)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def part(rows: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return rows[rank * len(rows) // size : (rank + 1) * len(rows) // size]


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    rank: int = 0,
    size: int = 1,
    steps: int | None = None,
    accumulate: int = 1,
    clip: bool = True,
    batch: Callable[[int], torch.Tensor] = tokens,
    together: tiermem.Runtime | None = None,
) -> list[float]:
    """The loop of every scenario; one process with size=1 sees all rows. `together`: micro-batches by its verb.

    Without `steps` two: the first is the one whose order nobody knows. Without micro-batches three where all is asked
    for.
    """
    losses = []
    for step in range(steps or number_of(2, 3 if accumulate == 1 else 2)):
        total = 0.0
        own = [part(batch(step * accumulate + micro), rank, size) for micro in range(accumulate)]
        if together is not None:
            total = float(sum(together.forward_backward(own, lambda rows: loss_of(model, rows) / accumulate)))
            own = []
        for rows in own:
            loss = loss_of(model, rows) / accumulate
            loss.backward()
            total += float(loss.detach())
        if clip:
            optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def config_for(directory: Path, **settings: Any) -> tiermem.Config:
    directory.mkdir(exist_ok=True)
    defaults = {"param_dtype": "float32", "host_memory": "4MiB", "update": "forward", "stall_timeout": STALL}
    return tiermem.Config(poison=True, swap_dirs=[directory], **({"device": "cpu"} | defaults | settings))


def trained(
    make: Callable[[], nn.Module], directory: Path, rank: int, size: int, *, seed: int = 1, **how: Any
) -> dict[str, Any]:
    """Losses of this rank, and what all ranks must agree on: norm, weights, masters, sizes.

    `each_master`: of parameters in float32, also ask whether what is told to be their masters is what they are.
    """
    settings = {key: how.pop(key) for key in list(how) if key not in ("steps", "accumulate", "clip", "batch")}
    given = {name: settings.pop(name) for name in ("mesh", "keep", "keep_dtype", "coalesce") if name in settings}
    given.setdefault("coalesce", 0)  # these models are all small: all of one would be a unit
    together, each_master = settings.pop("together", False), settings.pop("each_master", False)
    torch.manual_seed(seed)
    model = make()
    with tiermem.offload(model, config_for(directory, **settings), **given) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        losses = train(model, optimizer, rank=rank, size=size, together=runtime if together else None, **how)
        cut = runtime._house.cutting.why_not is None
        weights = parameters_of(runtime)
        masters = masters_of(runtime, weights)
        if each_master:  # `masters_of` reads none of float32
            for name, parameter in model.named_parameters():
                assert torch.equal(runtime.master(parameter), weights[name].float()), name
        statistics = runtime.statistics()
        crossed = crossings(runtime)
        events = runtime._house.storage.timeline.events()
        updated = runtime._house.updater.statistics()
    return {
        "updated": (updated.device_tiles, updated.tiles),
        "crossed": crossed,
        "cut": cut,
        "gradients_crossed": sum(" grad tile " in event.name and "swap" in event.lane for event in events),
        "losses": losses,
        "norm": None if optimizer.grad_norm is None else float(optimizer.grad_norm),
        "weights": weights,
        "masters": masters,
        "waited": (statistics.total.rank_seconds, statistics.total.stall_seconds),
        "tiers": {tier.name: (tier.budget, tier.reserved, tier.high_water) for tier in statistics.tiers},
        "left": [path.name for path in directory.glob(f"rank_{rank:05d}*")],
    }


def parameters_of(runtime: tiermem.Runtime) -> dict[str, torch.Tensor]:
    """All parameters, after all updates: those of a unit together, which `runtime.parameter` would gather for each."""
    units: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in runtime.model.named_parameters():
        units.setdefault(runtime._house.gatherer.slots[id(parameter)][0], {})[name] = parameter
    found = {}
    for unit in units.values():
        with runtime.gathered(unit.values()):
            found |= {name: parameter.detach().clone() for name, parameter in unit.items()}
    return found


def masters_of(runtime: tiermem.Runtime, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All masters; those of frozen ones are the values in `weights`, which are all parameters, as are float32 ones'."""
    return {
        name: runtime.master(parameter)
        if parameter.requires_grad and parameter.dtype != torch.float32
        else weights[name].float()
        for name, parameter in runtime.model.named_parameters()
    }


def crossings(runtime: tiermem.Runtime) -> dict[bool, int]:
    """How many pages of parameters have crossed the edge to SWAP, of units kept in memory by choice and of others."""
    kept = {f"unit {layout.unit} param tile 0": layout.kept for layout in runtime._house.layouts}
    crossed = {True: 0, False: 0}
    for event in runtime._house.storage.timeline.events():
        if event.name in kept and "swap" in event.lane:
            crossed[kept[event.name]] += 1
    return crossed


def odd(directory: Path, rank: int, size: int) -> Any:
    return trained(Odd, directory, rank, size)


def odd_again(directory: Path, rank: int, size: int) -> Any:
    """The same; but the ranks other than 0 begin with other values, which must not matter."""
    return trained(Odd, directory, rank, size, seed=1 + rank)


def odd_tight(directory: Path, rank: int, size: int) -> Any:
    """The least budget there is, and accumulation, whose gradients cannot all be in memory."""
    torch.manual_seed(1)
    try:
        with tiermem.offload(Odd(), config_for(directory, host_memory=4096)):
            raise AssertionError("a budget of one page should never do")
    except tiermem.BudgetError as error:
        least = int(str(error).split("at least ")[1].split()[0])
    result = trained(Odd, directory, rank, size, host_memory=least, update="step", accumulate=2)
    return result | {"least": least}


def odd_bfloat16(directory: Path, rank: int, size: int) -> Any:
    return trained(Odd, directory, rank, size, param_dtype="bfloat16")


def odd_coalesced(directory: Path, rank: int, size: int) -> Any:
    """Small layers in units of 16 KiB, in which there are layers without a gradient."""
    return trained(Odd, directory, rank, size, coalesce="16KiB", accumulate=2, each_master=True)


def stage_1(directory: Path, rank: int, size: int) -> Any:
    return trained(Odd, directory, rank, size, stage=1, accumulate=2)


def stage_2(directory: Path, rank: int, size: int) -> Any:
    return trained(Odd, directory, rank, size, stage=2, accumulate=2)


def stage_1_tight(directory: Path, rank: int, size: int) -> Any:
    """Whole gradients wait in swap."""
    how = {"stage": 1, "host_memory": "128KiB", "update": "step"}
    return trained(Odd, directory, rank, size, accumulate=2, each_master=True, **how)


def plain_llama(directory: Path, rank: int, size: int) -> Any:
    return trained(llama, directory, rank, size, accumulate=2)


def llama_together(directory: Path, rank: int, size: int) -> Any:
    """Micro-batches unit by unit, their graphs cut from the second step on; two layers a unit, in several tiles."""
    how = {"coalesce": "96KiB", "tile_size": "64KiB"}
    return trained(llama, directory, rank, size, accumulate=2, together=True, **how)


def odd_together(directory: Path, rank: int, size: int) -> Any:
    """Micro-batches unit by unit, each on its own thread: what is tied has gradients of two units."""
    return trained(Odd, directory, rank, size, accumulate=2, together=True)


def routed(directory: Path, rank: int, size: int) -> Any:
    return trained(Experts, directory, rank, size, batch=routed_tokens)


def verbs(directory: Path, rank: int, size: int) -> Any:
    """Gradients, parameters written by hand, gradients dropped, an infinite one skipped on every rank."""
    torch.manual_seed(1)
    model = Odd()
    with tiermem.offload(model, config_for(directory)) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
        loss_of(model, part(tokens(0), rank, size)).backward()
        gradients = {name: runtime.gradient(parameter) for name, parameter in model.named_parameters()}
        optimizer.zero_grad()
        dropped = [runtime.gradient(parameter) for parameter in model.parameters()]
        with runtime.gathered(model.layers[0], write=True), torch.no_grad():
            model.layers[0][0].weight.mul_(2.0)
        written = runtime.parameter(model.layers[0][0].weight)
        master = runtime.master(model.layers[0][0].weight)
        with torch.no_grad():
            evaluated = model(tokens(1)).clone()
        before = runtime.parameter(model.embedding.weight)
        loss = loss_of(model, part(tokens(0), rank, size))
        (loss * (float("inf") if rank == 1 else 1.0)).backward()  # one rank's overflow is everybody's
        with contextlib.suppress(UserWarning):
            optimizer.step()
        same = torch.equal(before, runtime.parameter(model.embedding.weight))
    return {
        "gradients": gradients,
        "dropped": dropped,
        "written": written,
        "master": master,
        "evaluated": evaluated,
        "skipped": (optimizer.skipped, same),
    }


def sub_group(directory: Path, rank: int, size: int) -> Any:
    """Four ranks, two and two, each pair with its own rows: two runs that know nothing of each other."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pair, place = divmod(rank, 2)
    own = directory / f"pair {pair}"
    directory.mkdir(exist_ok=True)
    return trained(Odd, own, place, 2, mesh=mesh["shard"], batch=lambda step: tokens(step + 100 * pair))


def another_order(directory: Path, rank: int, size: int) -> Any:
    """Rank 1 runs the layers backwards."""
    model = Odd()
    with tiermem.offload(model, config_for(directory), coalesce=0):
        layers = list(model.layers) if rank != 1 else list(model.layers)[::-1]
        hidden = model.embedding(tokens(0))
        for layer in layers:
            hidden = layer(hidden)


def one_fails(directory: Path, rank: int, size: int) -> Any:
    """Rank 1 raises in its second step, between forward and backward."""
    model = Odd()
    with tiermem.offload(model, config_for(directory)) as _:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            loss = loss_of(model, part(tokens(step), rank, size))
            if rank == 1 and step == 1:
                raise ValueError("the data of rank 1 are spoilt")
            loss.backward()
            optimizer.step()


def calls_of_ranks(directory: Path, rank: int, size: int) -> Any:
    """The collectives of some steps and commits, then of verbs: by line, from which thread, which, and of how much."""
    lines: dict[str, list[tuple[str, str, int]]] = {}
    busy: set[str] = set()
    overlaps: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **more: Any) -> Any:
            line, thread = more["group"].group_name, threading.current_thread().name
            sizes = [each.numel() for each in args if isinstance(each, torch.Tensor)]
            lines.setdefault(line, []).append((thread, name, max(sizes, default=0)))
            if line in busy:
                overlaps.append(f"{name} from {thread}")
            busy.add(line)
            try:
                return call(*args, **more)
            finally:
                busy.discard(line)

        return note

    torch.manual_seed(1)
    model = Odd()
    with contextlib.ExitStack() as stack:
        settings = {"host_memory": "256KiB", "update": "backward"}
        runtime = stack.enter_context(tiermem.offload(model, config_for(directory, **settings), coalesce=0))
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for name in COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, noting(name, getattr(dist, name))))
        for step in range(3):
            train(model, optimizer, rank=rank, size=size, steps=1, accumulate=2)
            pending = runtime.commit({"step": step})
        pending.wait()
        steps = {line: list(calls) for line, calls in lines.items()}
        for parameter in (model.scale, model.layers[0][0].weight):
            runtime.parameter(parameter)
            runtime.master(parameter)
            runtime.gradient(parameter)
        snapshot = runtime.snapshot(directory / "snapshot")
        train(model, optimizer, rank=rank, size=size, steps=1)
        runtime.save_pretrained(directory / "saved")
        snapshot.wait()
        return {"steps": steps, "all": {line: list(calls) for line, calls in lines.items()}, "overlaps": overlaps}


def one_cannot_begin(directory: Path, rank: int, size: int) -> Any:
    """Rank 1 finds a foreign file where its swap file should be."""
    if rank == 1:
        own = directory / "rank_00001"
        own.mkdir(parents=True, exist_ok=True)
        (own / "tiermem.swapfile").write_bytes(b"somebody else's" * 1000)
    with tiermem.offload(Odd(), config_for(directory)):
        pass


def one_dies(directory: Path, rank: int, size: int, mesh: Any = None) -> Any:
    """The last rank is gone in the middle of a backward."""
    model = Odd()
    with tiermem.offload(model, config_for(directory), mesh=mesh):
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            loss = loss_of(model, part(tokens(step), rank, size))
            if rank == size - 1 and step == 1:
                os._exit(9)
            loss.backward()
            optimizer.step()


# Commits


def committing(
    directory: Path,
    rank: int,
    size: int,
    *,
    dies: Any = None,
    until: int = COMMITS,
    last: int = COMMITS,
    mesh: Any = None,
    resume: Any = "auto",
    make: Callable[[], nn.Module] = Odd,
    coalesce: int | str = "auto",
    **settings: Any,
) -> Any:
    """Train with a commit after every step up to the `last`, going on from what is there.

    `dies(step)` is told before each commit.
    """
    torch.manual_seed(1)
    model = make()
    config = config_for(directory, **settings)
    with tiermem.offload(model, config, resume=resume, mesh=mesh, coalesce=coalesce) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
        begun = done = runtime.committed["step"] if runtime.committed else 0
        losses = []
        for step in range(done, until):
            loss = loss_of(model, part(tokens(step), rank, size))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if dies is not None:
                dies(step + 1)
            if step < last:
                runtime.commit({"step": step + 1}).wait()
        weights = parameters_of(runtime)
    return {"begun": begun, "losses": losses, "weights": weights}


committing_few = partial(committing, make=Few, coalesce=0)


def committing_in_two(stage: int) -> Callable[[Path, int, int], Any]:
    """Two steps, closed, the others from the commit."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        first = committing(directory, rank, size, until=2, stage=stage)
        return {"first": first, "second": committing(directory, rank, size, stage=stage)}

    scenario.__name__ = f"committing_stage_{stage}"
    return scenario


def undisturbed(directory: Path, rank: int, size: int) -> Any:
    return committing_few(directory.parent.parent / "undisturbed", rank, size)


# When, and the step that is gone on from. The others where all are asked for.
KILLED = dict(
    some_of(
        [("first prepared", 0), ("first told", 0), ("prepared", 1), ("published", 2), ("agreed", 2)],
        [("first published", 1)],
    )
)


def cut_off() -> None:
    """This rank loses the others in what it next says about a commit; they hear it."""
    real = Ranks.tell_text

    def lose(ranks: Ranks, text: str) -> list[str]:
        told = real(ranks, text)
        if threading.current_thread().name == "tiermem-commit":
            raise ranks._lost(RuntimeError("cut off"))
        return told

    Ranks.tell_text = lose  # type: ignore[method-assign]


def killed(when: str) -> Callable[[Path, int, int], Any]:
    """Rank 1 dies inside its second commit: before or after it has published its part, or once all have.

    "first ...": in the first one. "told": having published, and the other is cut off before it hears that both are
    prepared, as one of three may be whom the dead one did not come to tell.
    """

    def scenario(directory: Path, rank: int, size: int) -> Any:
        from swap import CommitStore
        from tiermem.zero3 import words

        words._WORD_SECONDS = 0.5  # there is nobody whose word the only one left could get

        def dies(step: int) -> None:
            if when == "first told" and (rank, step) == (0, 1):
                cut_off()
            if rank != 1 or step != (1 if when.startswith("first") else 2):
                return
            name = "retire" if when == "agreed" else "publish"
            real = getattr(CommitStore, name)

            def fatal(store: CommitStore) -> None:
                if when.endswith(("told", "published")):
                    real(store)
                os._exit(9)

            setattr(CommitStore, name, fatal)

        return committing_few(directory.parent.parent / when, rank, size, dies=dies)

    scenario.__name__ = f"killed_{when}"
    return scenario


def resumed(when: str) -> Callable[[Path, int, int], Any]:
    def scenario(directory: Path, rank: int, size: int) -> Any:
        return committing_few(directory.parent.parent / when, rank, size)

    scenario.__name__ = f"resumed_{when}"
    return scenario


def one_cannot_commit(directory: Path, rank: int, size: int) -> Any:
    """Rank 1's disk is full at the second commit: nobody has it, training goes on, the third one succeeds."""
    from swap import CommitStore, SwapFullError

    torch.manual_seed(1)
    model = Few()
    told = ""
    with tiermem.offload(model, config_for(directory), coalesce=0) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            loss_of(model, part(tokens(step), rank, size)).backward()
            optimizer.step()
            real = CommitStore.prepare
            if rank == 1 and step == 1:

                def full(*_: Any, **__: Any) -> None:
                    raise SwapFullError("the disk of rank 1 is full")

                CommitStore.prepare = full
            try:
                runtime.commit({"step": step + 1}).wait()
            except Exception as error:  # noqa: BLE001 - told apart by the test
                told = f"{type(error).__name__}: {error}"
                held = runtime.committed
            CommitStore.prepare = real
        last = runtime.committed
    return {"told": told, "held": held, "last": last}


def other_sizes(directory: Path, rank: int, size: int) -> Any:
    """A commit of two ranks, found by three, and by one."""
    return committing_few(directory.parent.parent / "undisturbed", rank, size)


def other_sizes_insisting(directory: Path, rank: int, size: int) -> Any:
    """As `other_sizes`; three insist that there is one."""
    return committing_few(directory.parent.parent / "undisturbed", rank, size, resume=True)


def copied(directory: Path, rank: int, size: int) -> Any:
    """Two ranks train and make a snapshot; three, then one, continue it and make another at once."""
    folder = directory.parent.parent
    before = {2: None, 3: folder / "copy2", 1: folder / "copy3"}[size]
    torch.manual_seed(1)
    model = Odd()
    with tiermem.offload(model, config_for(directory, param_dtype="bfloat16"), resume=before or False) as runtime:
        resumed, extra = runtime.committed, {"size": size, "rank": rank}
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        if before is None:
            for step in range(2):
                loss_of(model, part(tokens(step), rank, size)).backward()
                optimizer.step()
                optimizer.zero_grad()
        runtime.commit(extra)
        runtime.snapshot(folder / f"copy{size}", extra).wait()
        masters = masters_of(runtime, parameters_of(runtime))
        loss_of(model, part(tokens(5), rank, size)).backward()
        optimizer.step()
        runtime.settle()
        taken = None
        try:
            runtime.snapshot(folder / f"copy{size}")
        except (tiermem.ConfigError, tiermem.TiermemError) as error:
            taken = f"{type(error).__name__}: {error}"
    return {"masters": masters, "resumed": resumed, "committed": runtime.committed, "taken": taken}


SCENARIOS: dict[str, Callable[[Path, int, int], Any]] = {
    function.__name__: function
    for function in (
        odd,
        odd_again,
        odd_tight,
        odd_bfloat16,
        odd_coalesced,
        stage_1,
        stage_2,
        stage_1_tight,
        committing_in_two(2),
        committing_in_two(3),
        plain_llama,
        llama_together,
        odd_together,
        routed,
        verbs,
        calls_of_ranks,
        sub_group,
        another_order,
        one_fails,
        one_cannot_begin,
        one_dies,
        undisturbed,
        one_cannot_commit,
        other_sizes,
        other_sizes_insisting,
        copied,
        *(make(when) for make in (killed, resumed) for when in KILLED),
    )
}
