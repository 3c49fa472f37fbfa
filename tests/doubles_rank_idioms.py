"""More of what ranks do in the tests: ways of using a model, saving it, continuing it elsewhere, and what they keep."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from doubles_combinations import number_of
from doubles_rank_scenarios import (
    CLIP,
    WORDS,
    Experts,
    Odd,
    config_for,
    llama,
    loss_of,
    parameters_of,
    part,
    tokens,
    trained,
)
from torch import nn

import tiermem
from tiermem.memory.heap import trim_heap
from tiermem.zero3.asked import AskedAhead


def told(action: Callable[[], Any]) -> str:
    """The class and the text of the error that `action` raises."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - told apart by the test
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Saving


def saved(directory: Path, rank: int, size: int, **settings: Any) -> Any:
    """Two steps, a model saved; refused in the middle of a step, and where the disk of the first rank is full."""
    from swap import SwapFullError
    from tiermem.checkpoint.tensor_writer import TensorWriter

    torch.manual_seed(1)
    model = llama()
    folder = directory.parent
    with tiermem.offload(model, config_for(directory, **settings)) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            loss_of(model, part(tokens(step), rank, size)).backward()
            early = told(lambda: runtime.save_pretrained(folder / "early"))
            optimizer.step()
            optimizer.zero_grad()
        real, written = TensorWriter.write, [0]

        def full(writer: TensorWriter, name: str, data: memoryview) -> None:
            written[0] += 1
            if written[0] == 5:
                raise SwapFullError("the disk of the first rank is full")
            real(writer, name, data)

        TensorWriter.write = full
        failed = told(lambda: runtime.save_pretrained(folder / "full"))
        TensorWriter.write = real
        senseless = told(lambda: runtime.save_pretrained(folder / "senseless", max_shard_size=0 if rank == 1 else 9))
        runtime.save_pretrained(folder / "model", max_shard_size="20KB")
        taken = told(lambda: runtime.save_pretrained(folder / "model"))
        loss_of(model, part(tokens(2), rank, size)).backward()  # training goes on
        weights = parameters_of(runtime)
        optimizer.step()
        host = next(tier for tier in runtime.statistics().tiers if tier.name == "HOST")
    errors = {"early": early, "full": failed, "senseless": senseless, "taken": taken}
    left = sorted(path.name for path in folder.iterdir())
    return {
        "weights": weights,
        "errors": errors,
        "written": written[0],
        "left": left,
        "host": (host.high_water, host.budget),
    }


def saved_stage_2(directory: Path, rank: int, size: int) -> Any:
    return saved(directory, rank, size, stage=2, param_dtype="bfloat16")


# Other numbers of ranks


def begun(directory: Path, rank: int, size: int) -> Any:
    """Two steps, and a snapshot that another number of ranks continues."""
    return _continued(directory, rank, size, before=None, steps=(0, 1))


def continued(before: int, step: int) -> Callable[[Path, int, int], Any]:
    """One step more, from the snapshot that `before` ranks have left."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        return _continued(directory, rank, size, before=before, steps=(step,))

    scenario.__name__ = f"continued_from_{before}"
    return scenario


def _continued(directory: Path, rank: int, size: int, *, before: int | None, steps: tuple[int, ...]) -> Any:
    folder = directory.parent.parent
    torch.manual_seed(1 if before is None else 77)  # a snapshot's values win
    model = Odd()
    resume = False if before is None else folder / f"left by {before}"
    with tiermem.offload(model, config_for(directory), resume=resume) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=CLIP)
        if before is not None:
            runtime.snapshot(folder / f"found by {size}").wait()
        losses = []
        for step in steps:
            loss = loss_of(model, part(tokens(step), rank, size))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        runtime.snapshot(folder / f"left by {size}").wait()
        count = optimizer.steps_of(model.embedding.weight)
        return {"losses": losses, "weights": parameters_of(runtime), "steps": count}


def committed(stage: int, *, mesh: Callable[[], Any] = lambda: None) -> Callable[[Path, int, int], Any]:
    """Two steps that are committed, and beside them a snapshot of the same; each rank keeps something else besides."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        torch.manual_seed(1)
        model = Odd()
        dtype = "float32" if stage == 2 else "bfloat16"
        config = config_for(directory, stage=stage, param_dtype=dtype)
        with tiermem.offload(model, config, mesh=mesh()) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
            for step in range(2):
                loss_of(model, part(tokens(step), rank, size)).backward()
                optimizer.step()
                optimizer.zero_grad()
            runtime.commit({"rank": rank}).wait()
            runtime.snapshot(directory.parent / "copy").wait()

    scenario.__name__ = f"committed_{stage}"
    return scenario


# Ways of using a model


def activations(directory: Path, rank: int, size: int) -> Any:
    """What autograd keeps goes to pages, and to disk, and the numbers stay: of a plain and of a checkpointing model.

    Once more with a device for each rank, which has less room than the activations take.
    """

    def run(kind: str, *, paged: bool) -> tuple[list[Any], int]:
        torch.manual_seed(1)
        model = llama(layers=2).train()
        if kind == "checkpointed":
            model.gradient_checkpointing_enable()
        own = directory.parent / f"{kind} {paged}"
        place = {"device": "simulated", "device_memory": "1MiB"} if kind == "on a device" else {}
        with tiermem.offload(model, config_for(own, host_memory="768KiB", **place)) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
            noted: list[Any] = []
            for step in range(2):
                rows = part(tokens(step), rank, size).repeat(12, 1)
                with runtime.offload_activations(4096) if paged else contextlib.nullcontext():
                    loss = loss_of(model, rows)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                noted.append((float(loss.detach()), float(optimizer.grad_norm)))
            on_disk = runtime._house.storage.extents.scratch.high_water
            noted.append(parameters_of(runtime))
        return noted, on_disk

    found = {kind: run(kind, paged=True) for kind in ("plain", "checkpointed", "on a device")}
    return found | {"not paged": run("plain", paged=False)}


def one_cannot_page_activations(directory: Path, rank: int, size: int) -> Any:
    """The disk of rank 1 is full in forward: an error on all, none waits for ever."""
    from swap import SwapFullError
    from tiermem.zero3.activations import ActivationStore

    real = ActivationStore.keep

    def full(*_: Any) -> Any:
        raise SwapFullError("the disk of rank 1 is full")

    try:
        ActivationStore.keep = full if rank == 1 else real
        with tiermem.offload(llama(), config_for(directory, host_memory="768KiB")) as runtime:
            with runtime.offload_activations(4096):
                loss_of(runtime.model, part(tokens(0), rank, size).repeat(60, 1)).backward()
    finally:
        ActivationStore.keep = real


def scaled(directory: Path, rank: int, size: int) -> Any:
    """float16 with a scaler, where one rank alone overflows in the second step."""
    torch.manual_seed(1)
    model = Odd()
    with tiermem.offload(model, config_for(directory, param_dtype="float16")) as runtime, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for step in range(4):
            loss = loss_of(model, part(tokens(step), rank, size)).float()
            scaler.scale(loss * (1e38 if rank == 1 and step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return {"scales": scales, "skipped": optimizer.skipped, "weights": parameters_of(runtime)}


def begun_in_plain(directory: Path, rank: int, size: int) -> Any:
    """Weights and the state of torch's AdamW, which every rank has whole, in and out; all ranks see the same rows."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            loss_of(model, tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(1)
    model = Odd()
    begun = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train(model, begun, range(3))
    moved = copy.deepcopy(model)
    with tiermem.offload(moved, config_for(directory)) as runtime:
        optimizer = tiermem.AdamW(moved.parameters(), lr=1e-2)
        optimizer.load_state_dict(begun.state_dict())
        train(moved, optimizer, range(3, 5))
        found = parameters_of(runtime)
        left = optimizer.full_state_dict()["state"]
    train(model, begun, range(3, 5))
    same = {name: torch.equal(found[name], values) for name, values in model.named_parameters()}
    for number, entry in begun.state_dict()["state"].items():
        same |= {f"{number} {name}": torch.equal(left[number][name], values) for name, values in entry.items()}
    return same


def adversaries(directory: Path, rank: int, size: int) -> Any:
    """Two optimizers, three turns of one to one of the other, whose part is called without gradients between.

    The last unit that such a call has gathered ahead may be on its way when gradients are dropped right after it; that
    this is counted by all ranks alike, whenever it comes, is shown by `zero3/test_conductor.py`.
    """

    def train(model: nn.Module, adamw: Callable[..., torch.optim.Optimizer]) -> list[float]:
        maker, judge = model.children()
        makes, judges = adamw(maker.parameters(), lr=1e-2), adamw(judge.parameters(), lr=1e-2)
        noise, losses = torch.linspace(-1, 1, 128).view(2, 64), []
        for round_ in range(number_of(3, 5)):
            for _ in range(3):
                with torch.no_grad():
                    made = maker(noise)
                judges.zero_grad()
                loss = (judge(noise * (round_ + 1)).mean() - judge(made).mean()).square()
                loss.backward()
                judges.step()
                losses.append(loss.item())
            makes.zero_grad()
            loss = judge(maker(noise)).square().mean()
            loss.backward()
            makes.step()
            losses.append(loss.item())
        return losses

    def half() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)))

    torch.manual_seed(1)
    model = nn.ModuleList([half(), half()])
    expected = train(copy.deepcopy(model), partial(torch.optim.AdamW, fused=True))
    same = {}
    directory.mkdir(exist_ok=True)
    for update in ("forward", "backward"):
        found = copy.deepcopy(model)
        config = config_for(directory / update, stage=2, update=update, host_memory="1400KiB", tile_size="64KiB")
        with tiermem.offload(found, config, coalesce=0):
            same[update] = train(found, tiermem.AdamW) == expected
    return same


class Tasks(nn.Module):
    """A head for each of two tasks behind the same layers, and a table which is looked up in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 48)
        self.layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
        self.heads = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, task: int, *, looked_up: bool) -> torch.Tensor:
        found = self.table(torch.arange(4))
        made = self.layers[0](torch.linspace(-1, 1, 192).view(4, 48))
        return self.heads[task](self.layers[1:](torch.relu(made + found if looked_up else made))).square().mean()


def tasks_in_turns(directory: Path, rank: int, size: int) -> Any:
    """The first rank always uses what it looks up in the table, the others now and then, so that gradients come."""

    def uses(rank: int, step: int) -> bool:
        return rank == 0 or step % 5 < 2

    torch.manual_seed(1)
    model = Tasks()
    plain = copy.deepcopy(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(12):
        for each in range(size):
            plain(step % 2, looked_up=uses(each, step)).backward()
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(size)
        optimizer.step()
        optimizer.zero_grad()
    same = {}
    directory.mkdir(exist_ok=True)
    for stage in (2, 3):
        found = copy.deepcopy(model)
        with tiermem.offload(found, config_for(directory / f"{stage}", stage=stage), coalesce=0) as runtime:
            optimizer = tiermem.AdamW(found.parameters(), lr=1e-2)
            for step in range(12):
                found(step % 2, looked_up=uses(rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights = parameters_of(runtime)
        same[stage] = all(torch.equal(weights[name], values) for name, values in plain.named_parameters())
    return same


class Outermost(nn.Module):
    """Has a parameter of its own, so that the last unit of a backward is not the first one that is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, *, looked_up: bool) -> torch.Tensor:
        found = self.table(torch.arange(4))
        made = self.layers[0](torch.linspace(-1, 1, 192).view(4, 48))
        made = torch.relu(made + found if looked_up else made)
        return (self.layers[2](self.layers[1](made)) * self.scale).square().mean()


def more_than_expected(directory: Path, rank: int, size: int) -> Any:
    """A micro-batch more than in the step before: all ranks undo the same early updates, those that were just coming.

    The first rank has a gradient more behind them, and has begun them all by the end of the backward.
    """
    torch.manual_seed(1)
    model = Outermost()
    with tiermem.offload(model, config_for(directory, stage=2, update="backward"), coalesce=0) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e6)
        for batches in (1, 1, 2, 1, 2):
            for _ in range(batches):
                model(looked_up=rank == 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(runtime)


class Cast(Odd):
    """float32 parameters, computed with in bfloat16."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(rows).float()


def autocast(directory: Path, rank: int, size: int) -> Any:
    return trained(Cast, directory, rank, size)


def adapted() -> nn.Module:
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))


def lora(directory: Path, rank: int, size: int) -> Any:
    return trained(adapted, directory, rank, size)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=WORDS,
    )
    return MixtralForCausalLM(config)


def mixture(directory: Path, rank: int, size: int) -> Any:
    return trained(mixtral, directory, rank, size)


def streamed(directory: Path, rank: int, size: int) -> Any:
    """A mixture whose experts its folder keeps apart, straight into the shards of all ranks."""
    torch.manual_seed(3)
    plain = mixtral()
    folder = directory.parent / "theirs"
    plain.save_pretrained(folder)  # the first rank does
    torch.distributed.barrier()
    with tiermem.deferred_init():
        model = mixtral()
    with tiermem.offload(model, config_for(directory), weights=folder) as runtime:
        return parameters_of(runtime), dict(plain.named_parameters())


def experts_as_units(directory: Path, rank: int, size: int) -> Any:
    """Every expert a unit, and both ranks' tokens go to all experts."""
    torch.manual_seed(1)
    model = Experts()
    rows = torch.arange(WORDS).repeat(2)[: 12 * 7].view(12, 7)
    with tiermem.offload(model, config_for(directory), units=["Linear"]) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        for _ in range(2):
            loss_of(model, part(rows, rank, size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"weights": parameters_of(runtime), "rows": rows}


def an_expert_without_tokens(directory: Path, rank: int, size: int) -> Any:
    """Every expert a unit; rank 1 has no token for the first one."""
    torch.manual_seed(1)
    model = Experts()
    rows = torch.arange(12).view(2, 6) if rank == 0 else torch.tensor([[1, 2, 3, 4, 5, 1, 2]])
    with tiermem.offload(model, config_for(directory), units=["Linear"]):
        loss_of(model, rows).backward()


def two_dimensions(directory: Path, rank: int, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Odd()
    before = {name: values.clone() for name, values in model.named_parameters()}
    said = told(lambda: tiermem.offload(model, config_for(directory), mesh=mesh))
    same = all(torch.equal(values, before[name]) for name, values in model.named_parameters())
    return {"told": said, "untouched": same and not list(directory.iterdir())}


def asked_ahead(directory: Path, rank: int, size: int) -> Any:
    """In the last of three steps: the units that had a bucket, and whether it had been asked for before."""
    directory.mkdir(exist_ok=True)
    found = {}
    for stage in (3, 1):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4)))
        taken: list[tuple[int, bool]] = []
        real = AskedAhead.take

        def take(asked: AskedAhead, unit: int, taken: Any = taken, real: Any = real) -> Any:
            pending = real(asked, unit)
            taken.append((unit, pending is not None))
            return pending

        with tiermem.offload(model, config_for(directory / f"{stage}", stage=stage), units=["Linear"]) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
            AskedAhead.take = take
            try:
                for step in range(3):
                    taken.clear()
                    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(step + 10 * rank))
                    model(x).square().mean().backward()
                    in_backward = list(taken)
                    optimizer.step()
                    optimizer.zero_grad()
            finally:
                AskedAhead.take = real
            torch.autograd.grad(model(x.requires_grad_()).sum(), x)  # what is expected does not come
            left = runtime._house.scheduler.gradients._buckets._asked.is_open
            optimizer.zero_grad()
        found[stage] = in_backward, left
    return found


# What a rank keeps

WIDTH, DEPTH = 512, 12


def kept(directory: Path, rank: int, size: int) -> Any:
    # What is imported on first use, on every rank, is not counted.
    kept_of(directory / "small", rank, size, width=64, depth=2)
    return kept_of(directory / "large", rank, size, width=WIDTH)


def kept_of(directory: Path, rank: int, size: int, *, width: int, depth: int = DEPTH, mesh: Any = None) -> Any:
    """Bytes in memory and on disk of a rank with room for everything; the model is built without storage."""
    directory.mkdir(parents=True, exist_ok=True)
    with tiermem.deferred_init():
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    before, most = memory(), 0
    with tiermem.offload(model, config_for(directory, host_memory="256MiB"), coalesce=0, mesh=mesh) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            x = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            most = max(most, memory())
            optimizer.step()
            optimizer.zero_grad()
            most = max(most, memory())
        runtime.settle()
        most = max(most, memory())
        own = directory if size == 1 else directory / f"rank_{rank:05d}"
        disk = sum(path.stat().st_blocks * 512 for path in own.rglob("*") if path.is_file())
        high_water = {tier.name: tier.high_water for tier in runtime.statistics().tiers}
    return {"memory": most - before, "disk": disk, "reserved": high_water["HOST"]}


def memory() -> int:
    """Bytes in use by this process that are no file's. (Of files a forked process maps anew what its parent had.)

    What the heap has free goes back first: how much that is, up to 14 MB, depends on which threads were busy together.
    """
    trim_heap()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


SCENARIOS: dict[str, Callable[[Path, int, int], Any]] = {
    function.__name__: function
    for function in (
        saved,
        saved_stage_2,
        begun,
        continued(1, 2),
        continued(2, 3),
        continued(4, 2),
        *map(committed, (1, 2, 3)),
        activations,
        one_cannot_page_activations,
        scaled,
        begun_in_plain,
        adversaries,
        tasks_in_turns,
        more_than_expected,
        autocast,
        lora,
        mixture,
        streamed,
        experts_as_units,
        an_expert_without_tokens,
        two_dimensions,
        asked_ahead,
        kept,
    )
}
