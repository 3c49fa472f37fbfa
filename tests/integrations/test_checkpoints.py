"""Checkpoints of a Trainer with an offloaded model: commits, resumes bit for bit, weights out and in."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from doubles_combinations import some_of
from doubles_models import small_llama
from doubles_trainer import Trained, arguments, check, data, llama, paged, plain, runtime_for, trained
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM, TrainerCallback

import swap
import tiermem
from tiermem import ConfigError, ResumeError
from tiermem.integrations.checkpoints import (
    KEY,
    OPTIMIZER,
    TICKET,
    Ticket,
    _move_weights,
    export_weights,
    find_checkpoint,
    has_moments,
    is_of_peft,
    load_optimizer,
    load_weights,
    set_aside,
)
from tiermem.integrations.trainer import Trainer

# Dropout draws random numbers in every step; three of eight micro-batches an update, so that it ends in an epoch.
RUN: dict[str, Any] = {
    "max_steps": 6,
    "gradient_accumulation_steps": 3,
    "lr_scheduler_type": "cosine",
    "save_strategy": "steps",
    "save_steps": 2,
}


def dropping(seed: int = 1) -> nn.Module:
    return llama(seed, attention_dropout=0.2)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run without interruption, on plain PyTorch."""
    return plain(tmp_path_factory.mktemp("plain"), make=dropping, **RUN | {"save_strategy": "no"})


class KilledError(Exception):
    pass


class Killer(TrainerCallback):
    """Ends a run as the power does: nobody saves anything more."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KilledError


def begin(directory: Path, *, killed_in: int = 5, **settings: Any) -> None:
    named = {"callbacks": [Killer(killed_in)]}
    with pytest.raises(KilledError):
        paged(directory, make=dropping, named=named, **RUN | settings)


@pytest.fixture(scope="module")
def once_begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed, with its swap files."""
    directory = tmp_path_factory.mktemp("begun")
    begin(directory)
    return directory


@pytest.fixture
def begun(once_begun: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    shutil.copytree(once_begun, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="module")
def killed_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a killed run of transformers' own Trainer leaves."""
    directory = tmp_path_factory.mktemp("elsewhere")
    with pytest.raises(KilledError):
        plain(directory, make=dropping, named={"callbacks": [Killer(5)]}, **RUN)
    return directory


def empty() -> nn.Module:
    """As after a restart: no weights, and none can be guessed."""
    with tiermem.deferred_init():
        return dropping(seed=9)


def resumed(directory: Path, checkpoint: Any = True, **settings: Any) -> Trained:
    def script(trainer: transformers.Trainer) -> None:
        trainer.train(resume_from_checkpoint=checkpoint)

    return paged(directory, make=empty, script=script, resume=True, **RUN | settings)


def same_end(found: Trained, expected: Trained) -> None:
    """All but what the last line says of this call's own steps."""
    assert found.history[:-1] == expected.history[:-1]
    check(Trained([], found.weights), Trained([], expected.weights))


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_run_that_was_killed_goes_on_bit_for_bit(update: str, tmp_path: Path, expected: Trained) -> None:
    begin(tmp_path, update=update)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    same_end(resumed(tmp_path, update=update), expected)


def test_a_path_is_as_good_as_true(begun: Path, expected: Trained) -> None:
    same_end(resumed(begun, str(begun / "out" / "checkpoint-4")), expected)


def test_killed_while_a_checkpoint_is_made(tmp_path: Path, expected: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is there, the commit is not: the one before holds, and rotation has left its folder."""
    commit = tiermem.Runtime.commit

    def dies(runtime: tiermem.Runtime, extra: Any = None) -> Any:
        if extra[KEY]["global_step"] == 4:
            raise KilledError
        return commit(runtime, extra)

    with monkeypatch.context() as patch:
        patch.setattr(tiermem.Runtime, "commit", dies)
        begin(tmp_path, save_total_limit=1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    with pytest.raises(ResumeError, match=r"checkpoint-4' is to be resumed.*holds the state of checkpoint-2"):
        resumed(tmp_path, str(tmp_path / "out" / "checkpoint-4"))
    same_end(resumed(tmp_path, save_total_limit=1), expected)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-6"]


def test_killed_while_a_checkpoint_is_replaced(
    tmp_path: Path, expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name may be the one the last commit belongs to: it stays until the next commit is durable."""

    def dies(runtime: tiermem.Runtime, extra: Any = None) -> Any:
        raise KilledError

    begin(tmp_path, killed_in=3)
    with monkeypatch.context() as patch, runtime_for(tmp_path, make=empty, resume=True) as runtime:
        patch.setattr(tiermem.Runtime, "commit", dies)
        trainer = Trainer(args=arguments(tmp_path / "out", **RUN), runtime=runtime)
        trainer.create_optimizer_and_scheduler(6)
        trainer.state.global_step = 2
        with pytest.raises(KilledError):
            trainer._save_checkpoint(runtime.model, None)
    same_end(resumed(tmp_path), expected)
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == [
        f"checkpoint-{n}" for n in (2, 4, 6)
    ]


def test_the_folder_of_the_commit_outlives_a_second_replacement(tmp_path: Path) -> None:
    folder, committed = tmp_path / "checkpoint-2", Ticket("a", "checkpoint-2", 2)
    for ticket in (committed, Ticket("b", "checkpoint-2", 2), Ticket("c", "checkpoint-2", 2)):
        assert set_aside(folder, committed) == tmp_path / ".checkpoint-2.replaced"
        folder.mkdir(exist_ok=True)
        ticket.write(folder)
    assert find_checkpoint(tmp_path, committed) == tmp_path / ".checkpoint-2.replaced"


def test_what_a_run_that_was_killed_has_left_aside_makes_way(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    ticket = Ticket.new(folder, 1)
    ticket.write(folder)
    left = set_aside(folder, None)
    left.mkdir()
    (left / "older").write_text("older")
    assert set_aside(folder, ticket) == left
    assert not folder.exists()
    assert [path.name for path in left.iterdir()] == [TICKET]


def test_an_older_checkpoint_is_not_what_the_pages_hold(begun: Path) -> None:
    with pytest.raises(ResumeError, match=r"checkpoint-2' is to be resumed.*holds the state of checkpoint-4"):
        resumed(begun, str(begun / "out" / "checkpoint-2"))


def test_what_a_resume_refuses(begun: Path, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="was to begin anew with its weights"):
        resumed(tmp_path, checkpoint=None)
    with pytest.raises(ResumeError, match="expected its folder in"):
        resumed(tmp_path, out=tmp_path / "elsewhere")
    (tmp_path / "out" / "checkpoint-4" / TICKET).unlink()
    with pytest.raises(ResumeError, match=r"belongs to no commit of a runtime: there is no tiermem.json in it\."):
        resumed(tmp_path, str(tmp_path / "out" / "checkpoint-4"))
    (tmp_path / "out" / "checkpoint-4" / TICKET).write_text("[1]")
    with pytest.raises(
        ResumeError, match=r"its tiermem.json is damaged: expected JSON with id, .*found 3 bytes, b'\[1\]'"
    ):
        resumed(tmp_path, str(tmp_path / "out" / "checkpoint-4"))
    with pytest.raises(
        ResumeError, match=r"expected its folder in .*, found 'checkpoint-4', but its tiermem.json is dam"
    ):
        resumed(tmp_path)


def test_a_commit_with_another_ticket(tmp_path: Path) -> None:
    with runtime_for(tmp_path) as runtime:
        runtime.commit({KEY: {"step": 1}}).wait()
        with pytest.raises(ResumeError, match=r"expected the ticket of a Trainer's checkpoint, found {'step': 1}"):
            Trainer(args=arguments(tmp_path / "out"), runtime=runtime)


@pytest.mark.parametrize("torn", ["", '{"id": "', '{"id": "a"}'])
def test_killed_while_a_ticket_is_written(torn: str, tmp_path: Path) -> None:
    """It is not the last commit's, which is found nevertheless."""
    ticket = Ticket.new(tmp_path / "checkpoint-2", 2)
    for name in ("checkpoint-1", "checkpoint-2"):
        (tmp_path / name).mkdir()
    ticket.write(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-1" / TICKET).write_text(torn)
    assert find_checkpoint(tmp_path, ticket) == tmp_path / "checkpoint-2"


def test_a_full_disk_leaves_the_ticket_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint whose folder is written a second time, or whose step is."""
    before = Ticket.new(tmp_path, 2)
    before.write(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        with pytest.raises(OSError, match=r"File too large, writing \d+ bytes.*tiermem.json"):
            Ticket.new(tmp_path, 4).write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert Ticket.of_folder(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == [TICKET]


def test_a_runtime_without_a_commit_cannot_be_resumed(tmp_path: Path) -> None:
    def script(trainer: transformers.Trainer) -> None:
        trainer.train(resume_from_checkpoint=True)

    with pytest.raises(ResumeError, match="holds no commit of a Trainer"):
        paged(tmp_path, script=script)


def test_resumed_in_the_same_process(tmp_path: Path) -> None:
    """Right after its checkpoint a run goes on; after more steps the pages hold something else."""

    def script(trainer: Trainer) -> None:
        trainer.args.max_steps = 4
        trainer.train()
        trainer.args.max_steps, trainer.args.save_strategy = 6, "no"
        trainer.train(resume_from_checkpoint=True)
        with pytest.raises(ResumeError, match="checkpoint-4, and has been trained or changed since"):
            trainer.train(resume_from_checkpoint=True)

    settings = RUN | {"lr_scheduler_type": "constant"}
    found = paged(tmp_path, make=dropping, script=script, **settings)
    whole = plain(tmp_path / "plain", make=dropping, **settings | {"save_strategy": "no"})
    check(Trained([], found.weights), Trained([], whole.weights))


def test_a_snapshot_keeps_any_checkpoint(tmp_path: Path, expected: Trained) -> None:
    """A callback as in README.md: each checkpoint can be continued from, elsewhere and under another budget."""

    class Keep(TrainerCallback):
        runtime: tiermem.Runtime

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.runtime.snapshot(tmp_path / f"snapshot-{state.global_step}", self.runtime.committed).wait()

    class Keeping(Trainer):
        def __init__(self, *given: Any, runtime: tiermem.Runtime, **named: Any) -> None:
            super().__init__(*given, runtime=runtime, callbacks=[keep], **named)
            keep.runtime = runtime

    keep = Keep()
    paged(tmp_path, make=dropping, kind=Keeping, **RUN)
    with tiermem.offload(
        model := empty(),
        tiermem.Config(host_memory="64MiB", swap_dirs=[tmp_path], param_dtype="float32", device="cpu"),
        resume=tmp_path / "snapshot-2",
    ) as runtime:
        trainer = Trainer(args=arguments(tmp_path / "out", **RUN), train_dataset=data(), runtime=runtime)
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
        weights = {name: runtime.parameter(parameter) for name, parameter in model.named_parameters()}
        same_end(trained(trainer, weights), expected)


def test_a_checkpoint_is_a_model_of_transformers(tmp_path: Path, expected: Trained) -> None:
    paged(tmp_path, make=dropping, **RUN | {"save_only_model": True})
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-6")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected.weights[name]), name
    saved = torch.load(tmp_path / "out" / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert saved.max_steps == 6
    with runtime_for(tmp_path, make=dropping) as runtime:
        assert runtime.committed is None, "save_only_model commits nothing"


def test_arguments_are_saved_as_they_are(tmp_path: Path) -> None:
    paged(tmp_path, make=dropping, **RUN | {"max_steps": 2, "save_total_limit": 1})
    saved = torch.load(tmp_path / "out" / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == 1


def test_weights_take_the_place_of_older_ones_and_of_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.safetensors"):
        (folder / name).write_text("old")
    (folder / "notes.txt").write_text("mine")
    with runtime_for(tmp_path) as runtime:
        trainer = Trainer(args=arguments(folder), runtime=runtime)
        trainer.save_model()
        trainer.save_model()
        names = {path.name for path in folder.iterdir()}
        assert names >= {"notes.txt", "model.safetensors", "config.json", "training_args.bin"}
        assert "model-00001-of-00002.safetensors" not in names
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {"model.safetensors"}
        assert not [name for name in names if name.startswith(".")]
        loaded = LlamaForCausalLM.from_pretrained(folder)
        for parameter, values in zip(runtime.model.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)
        with pytest.raises(FileExistsError):  # not what the runtime says of a folder that is not there
            export_weights(runtime, folder / "notes.txt")
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_index_comes_behind_the_files_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, moved, replace = tmp_path / "new", list[str](), Path.replace
    names = [*(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)), "model.safetensors.index.json"]
    new.mkdir()
    for name in names:
        (new / name).write_text(name)

    def noted(path: Path, target: Path) -> Path:
        moved.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    _move_weights(new, tmp_path)
    assert sorted(moved) == names
    assert moved[-1] == names[-1]


def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("first", "second")})
    model["second"].weight = model["first"].weight
    save_file({"second.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    config = tiermem.Config(host_memory="64MiB", swap_dirs=[tmp_path], param_dtype="float32", device="cpu")
    with tiermem.offload(model, config) as runtime:
        load_weights(runtime, tmp_path)
        assert torch.equal(runtime.parameter(model["first"].weight), torch.ones(2, 2))


def test_weights_open_a_file_for_its_header_and_for_all_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time: it had been opened for each tensor."""
    values = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).state_dict()
    names = list(values)
    for number, part in enumerate((names[:4], names[4:])):
        save_file({name: values[name] for name in part}, tmp_path / f"model-0000{number + 1}-of-00002.safetensors")
    opened: list[str] = []
    open_file, model = swap.SystemCalls.open, nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def noting(self: swap.SystemCalls, path: str, flags: int, mode: int = 0o600) -> int:
        opened.append(Path(path).name)
        return open_file(self, path, flags, mode)

    config = tiermem.Config(host_memory="64MiB", swap_dirs=[tmp_path], param_dtype="float32", device="cpu")
    with tiermem.offload(model, config) as runtime:
        monkeypatch.setattr(swap.SystemCalls, "open", noting)
        load_weights(runtime, tmp_path)
        # Of these files, for the other descriptors of the process may be closed meanwhile, by whoever forgot them.
        left = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        assert not [path for path in left if path.endswith(".safetensors")]
        assert [opened.count(path.name) for path in tmp_path.glob("*.safetensors")] == [2, 2]
        for name, parameter in model.named_parameters():
            assert torch.equal(runtime.parameter(parameter), values[name])


def test_buffers_are_loaded_with_the_weights_or_neither_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.zeros(3).expand(4, 3))
    plain_values = {
        name: torch.rand_like(values.float()).to(values.dtype) for name, values in model.state_dict().items()
    }
    config = tiermem.Config(host_memory="64MiB", swap_dirs=[tmp_path], param_dtype="float32", device="cpu")
    with tiermem.offload(model, config) as runtime:
        before = runtime.parameter(model[0].weight)
        save_file(plain_values | {"1.running_var": torch.ones(3)}, tmp_path / "model.safetensors")
        with pytest.raises(ResumeError, match=r"expected 1.running_var of shape \(2,\) in .*, found \(3,\)"):
            load_weights(runtime, tmp_path)
        assert torch.equal(runtime.parameter(model[0].weight), before)
        save_file(plain_values, tmp_path / "model.safetensors")
        load_weights(runtime, tmp_path)
        assert torch.equal(runtime.parameter(model[0].weight), plain_values["0.weight"])
        assert torch.equal(model[1].running_mean, plain_values["1.running_mean"])
        assert torch.equal(model.mask, plain_values["mask"])


def test_a_drive_that_fails_while_weights_are_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a memory map of the file it would be a signal, which ends the process."""
    model, read = nn.Linear(2, 2), swap.SystemCalls.preadv

    def failing(self: swap.SystemCalls, fd: int, data: memoryview, offset: int) -> int:
        if offset and os.readlink(f"/proc/self/fd/{fd}").endswith("model.safetensors"):
            raise OSError(errno.EIO, "Input/output error")
        return read(self, fd, data, offset)

    save_file(model.state_dict(), tmp_path / "model.safetensors")
    config = tiermem.Config(host_memory="64MiB", swap_dirs=[tmp_path], param_dtype="float32", device="cpu")
    with tiermem.offload(model, config) as runtime:
        monkeypatch.setattr(swap.SystemCalls, "preadv", failing)
        with pytest.raises(swap.SwapIOError, match=r"model\.safetensors"):
            load_weights(runtime, tmp_path)


def test_an_optimizer_s_state_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    assert not has_moments(tmp_path)
    torch.save({"state": {}}, tmp_path / OPTIMIZER)
    assert not has_moments(tmp_path)
    torch.save({"state": {0: {"exp_avg": torch.ones(1)}}}, tmp_path / OPTIMIZER)
    assert has_moments(tmp_path)
    load_optimizer(tmp_path, None, None, mapped=False)  # nothing, for there is no scheduler's beside it
    (tmp_path / OPTIMIZER).write_bytes(b"cut short")
    with pytest.raises(ResumeError, match=r"optimizer\.pt': expected the state of an optimizer"):
        has_moments(tmp_path)


def test_adapters_are_of_peft_where_it_saves_the_model_itself() -> None:
    """transformers' own (`add_adapter`) leave the model what it is, and have a configuration of peft, too."""
    model = nn.Linear(2, 2)
    model.peft_config = {}
    assert not is_of_peft(model)


@pytest.mark.parametrize("limit", [None, 1])
def test_the_best_model_at_the_end(limit: int | None, tmp_path: Path) -> None:
    """A learning rate that makes it worse, so that the best is not the last, which cannot be continued then."""

    def script(trainer: Trainer) -> None:
        trainer.train()
        gone = "expected its folder" if limit else "checkpoint-6, and has been trained or changed since"
        with pytest.raises(ResumeError, match=gone):
            trainer.train(resume_from_checkpoint=True)

    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.3}
    settings = RUN | settings | {"gradient_accumulation_steps": 1, "save_total_limit": limit}
    found = paged(tmp_path / "paged", script=script, **settings)
    check(found, plain(tmp_path / "plain", **settings))
    losses = [line["eval_loss"] for line in found.history if "eval_loss" in line]
    assert min(losses) < losses[-1]


def test_a_folder_is_durable_before_the_commit_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[Path] = set()
    missing: list[set[str]] = []
    fsync, commit = os.fsync, tiermem.Runtime.commit

    def noting(fd: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def checking(runtime: tiermem.Runtime, extra: Any = None) -> Any:
        folder = tmp_path / "out" / extra[KEY]["checkpoint"]
        wanted = {*folder.rglob("*"), folder, folder.parent}
        assert len(wanted) > 8
        missing.append({path.name for path in wanted - synced})
        return commit(runtime, extra)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(tiermem.Runtime, "commit", checking)
    paged(tmp_path, **RUN | {"max_steps": 2})
    assert missing == [set()]


def test_weights_of_another_model_change_nothing(tmp_path: Path) -> None:
    def wider() -> nn.Module:
        return small_llama(words=64, width=16, mlp_width=32, layers=2)

    with runtime_for(tmp_path / "a") as runtime:
        export_weights(runtime, tmp_path / "weights")
    (tmp_path / "nothing").mkdir()
    with runtime_for(tmp_path / "b", make=wider) as runtime:
        before = [runtime.parameter(parameter) for parameter in runtime.model.parameters()]
        with pytest.raises(ResumeError, match=r"expected model.layers.0.mlp.gate_proj.weight of shape \(32, 16\)"):
            load_weights(runtime, tmp_path / "weights")
        with pytest.raises(ResumeError, match=r"expected the weights of model.embed_tokens.weight"):
            load_weights(runtime, tmp_path / "nothing")
        (tmp_path / "weights" / "model.safetensors").write_bytes(b"cut short")
        with pytest.raises(swap.FormatError, match=r"model\.safetensors' to be a whole safetensors file"):
            load_weights(runtime, tmp_path / "weights")
        assert all(map(torch.equal, before, map(runtime.parameter, runtime.model.parameters())))


def test_without_commits_a_checkpoint_is_refused_before_training(tmp_path: Path) -> None:
    with runtime_for(tmp_path, commits=False) as runtime:
        with pytest.raises(ConfigError, match="commits=False"):
            Trainer(args=arguments(tmp_path, save_strategy="steps"), runtime=runtime)
        Trainer(args=arguments(tmp_path, save_strategy="steps", save_only_model=True), runtime=runtime)
        Trainer(args=arguments(tmp_path, save_strategy="no"), runtime=runtime)


@pytest.mark.parametrize("update", some_of(["forward", "backward"], ["auto"]))
def test_a_run_of_transformers_own_trainer_goes_on_bit_for_bit(
    update: str, killed_elsewhere: Path, tmp_path: Path, expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(killed_elsewhere, tmp_path / "elsewhere")
    checkpoint = tmp_path / "elsewhere" / "checkpoint-4"

    def script(trainer: transformers.Trainer) -> None:
        trainer.train(resume_from_checkpoint=str(checkpoint))

    load, mapped = torch.load, []

    def noting(path: Any, **named: Any) -> Any:
        mapped.extend([named.get("mmap")] if str(path).endswith("optimizer.pt") else [])
        return load(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", noting)
        same_end(paged(tmp_path, make=empty, script=script, update=update, **RUN), expected)
    assert mapped == [True, True], "moments are not in memory all at once"
    # It ended with a checkpoint of its own, which is not to be given up for that folder by mistake.
    with pytest.raises(ResumeError, match=r"made by transformers' own Trainer.*offload the model with resume=False"):
        resumed(tmp_path, str(checkpoint), update=update)
    (checkpoint / "optimizer.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(ResumeError, match=r"optimizer.pt': expected the state of an optimizer, found"):
        resumed(tmp_path, str(checkpoint), update=update)
    (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(ResumeError, match="belongs to no commit of a runtime"):
        resumed(tmp_path, str(checkpoint), update=update)
