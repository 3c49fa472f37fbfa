"""Snapshots: portable, made beside training, and the same bits wherever they are continued."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import part_of
from doubles_commit import Net, Training, check_equal, make_config, undisturbed
from safetensors.torch import load_file
from torch import nn

import swap
import tiermem
from tiermem.checkpoint.reading import open_snapshot

UPDATES = ("step", "forward", "backward")


def snapshot_of(training: Training, path: Path) -> Any:
    return training.runtime.snapshot(path, {"step": training.done, "scheduler": training.scheduler.state_dict()})


def new_config(directory: Path, **settings: Any) -> tiermem.Config:
    directory.mkdir(exist_ok=True)
    return make_config(directory, **settings)


@pytest.mark.parametrize(
    ("update", "dtype", "commits"), part_of(3, UPDATES, ["float32", "bfloat16", "float16"], [True, False])
)
def test_continuing_elsewhere_is_the_same_bit_for_bit(tmp_path: Path, update: str, dtype: str, commits: bool) -> None:
    settings: dict[str, Any] = {"update": update, "param_dtype": dtype}
    losses, state = undisturbed(tmp_path / "plain", 6, **settings)
    first = Training(new_config(tmp_path / "first", commits=commits, **settings))
    found = [first.step() for _ in range(3)]
    pending = snapshot_of(first, tmp_path / "copy")
    assert [first.step() for _ in range(3)] == losses[3:], "training goes on beside it"
    pending.wait()
    assert pending.done
    check_equal(first.state(), state)
    first.close()
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    other = "forward" if update == "step" else "step"
    # Another budget, other tiles, other directories, another division into units, another schedule.
    config = new_config(
        tmp_path / "a",
        swap_dirs=directories,
        **settings | {"host_memory": "1MiB", "tile_size": "256KiB", "update": other},
    )
    second = Training(config, resume=tmp_path / "copy")
    assert second.done == 3
    assert second.runtime.committed["step"] == 3
    found += [second.step() for _ in range(3)]
    check_equal(second.state(), state)
    assert found == losses
    second.close()
    assert all(list(directory.iterdir()) == [] for directory in directories), "nothing was committed here"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_after_materializing(tmp_path: Path, dtype: str) -> None:
    losses, state = undisturbed(tmp_path / "plain", 2, param_dtype=dtype)
    first = Training(new_config(tmp_path / "first", param_dtype=dtype))
    before = first.state()
    snapshot_of(first, tmp_path / "copy").wait()
    first.close()
    second = Training(new_config(tmp_path / "second", param_dtype=dtype, tile_size="128KiB"), resume=tmp_path / "copy")
    check_equal(second.state(), before)
    assert [second.step(), second.step()] == losses
    check_equal(second.state(), state)
    snapshot_of(second, tmp_path / "again").wait()
    second.close()
    assert open_snapshot(tmp_path / "again").record["step"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_continued_from_is_written_once_and_not_read_again(tmp_path: Path, dtype: str) -> None:
    """Masters and moments of a tile lie in one page, which would leave memory between the ones and the others."""
    deep = partial(Net, layers=6)
    first = Training(new_config(tmp_path / "first", param_dtype=dtype), model=deep)
    first.step()
    snapshot_of(first, tmp_path / "copy").wait()
    first.close()
    second = Training(new_config(tmp_path / "second", param_dtype=dtype), resume=tmp_path / "copy", model=deep)
    pages = sum(second.runtime._house.storage.pager._core.service.ahead.rooms().values())
    moved = second.runtime.statistics().total
    second.close()
    assert moved.bytes_read == 0
    assert 0 < moved.bytes_written <= pages


def test_a_division_into_other_units(tmp_path: Path) -> None:
    first = Training(new_config(tmp_path / "first", param_dtype="bfloat16", host_memory="1MiB"))
    first.step()
    snapshot_of(first, tmp_path / "copy").wait()
    state = first.state()
    first.close()
    torch.manual_seed(9)
    model = Net()
    config = new_config(tmp_path / "second", param_dtype="bfloat16", host_memory="1MiB")
    runtime = tiermem.offload(model, config, units=["Linear", "BatchNorm1d"], resume=str(tmp_path / "copy"))
    for name, parameter in model.named_parameters():
        assert torch.equal(runtime.parameter(parameter), state[name])
        assert torch.equal(runtime.master(parameter), state.get(f"{name} master", state[name].float()))
    runtime.commit({"step": 1}).wait()
    runtime.close()
    again = tiermem.offload(Net(), config, units=["Linear", "BatchNorm1d"], resume=True)
    assert again.committed == {"step": 1}
    again.close()


def test_what_a_snapshot_says_of_itself(tmp_path: Path) -> None:
    training = Training(new_config(tmp_path / "run", param_dtype="bfloat16"))
    training.step()
    snapshot_of(training, tmp_path / "copy").wait()
    state = training.state()
    training.close()
    manifest = json.loads((tmp_path / "copy" / "manifest.json").read_text())
    assert manifest["format"] == "tiermem-snapshot"
    by_name = {kept["names"][0]: kept for kept in manifest["body"]["kept"]}
    planes = by_name["inner.weight"]["planes"]
    assert set(planes) == {"master", "exp_avg", "exp_avg_sq"}
    (file, tensor, first, count, _checksum) = planes["master"][0]
    assert (first, count) == (0, 96 * 8)
    values = load_file(tmp_path / "copy" / manifest["body"]["files"][file][0])[tensor]
    assert torch.equal(values.view(96, 8), state["inner.weight master"])
    assert set(by_name["frozen.weight"]["planes"]) == {"value"}
    assert by_name["norm.running_mean"]["kind"] == "buffer"
    assert "swap" not in json.dumps({**manifest["body"], "record": None})
    for path in (tmp_path / "copy").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert list(open_snapshot(tmp_path / "copy").verify()) == []


def test_strides_may_differ(tmp_path: Path) -> None:
    def make(layout: torch.memory_format) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=layout), nn.Flatten(), nn.Linear(4, 2))

    states = []
    for number, layout in enumerate([torch.channels_last, torch.contiguous_format]):
        model = make(layout)
        config = new_config(tmp_path / str(number), param_dtype="bfloat16", host_memory="1MiB")
        runtime = tiermem.offload(model, config, resume=tmp_path / "copy" if number else False)
        optimizer = tiermem.AdamW(model.parameters())
        if not number:
            model(torch.randn(2, 3, 3, 3).bfloat16()).sum().backward()
            optimizer.step()
            runtime.snapshot(tmp_path / "copy").wait()
        unit, slot = runtime._house.gatherer.slots[id(model[0].weight)]
        first, _ = runtime._house.states.read_moments(unit, slot.parameter)
        states.append((runtime.master(model[0].weight), first.as_strided(slot.shape, slot.stride)))
        runtime.close()
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


# Beside training


class Held:
    """Keeps the snapshot's thread at its first file until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tiermem.runtime import snapshots

        self.reached, self.go = threading.Event(), threading.Event()
        real = snapshots.write_part

        def held(*arguments: Any, **rest: Any) -> Any:
            self.reached.set()
            assert self.go.wait(60)
            return real(*arguments, **rest)

        monkeypatch.setattr(snapshots, "write_part", held)


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, state = undisturbed(tmp_path / "plain", 6)
    held = Held(monkeypatch)
    training = Training(new_config(tmp_path / "run"))
    found = [training.step(), training.step()]
    training.commit().wait()
    pending = snapshot_of(training, tmp_path / "copy")
    assert held.reached.wait(60)
    found += [training.step(), training.step(), training.step()]  # beside it: the commit holds the same copies
    assert not pending.done
    held.go.set()
    found += [training.step()]
    pending.wait()
    check_equal(training.state(), state)
    training.close()
    again = Training(new_config(tmp_path / "again"), resume=tmp_path / "copy")
    assert [again.step() for _ in range(4)] == losses[2:] == found[2:]
    check_equal(again.state(), state)
    again.close()


@pytest.mark.parametrize("why", ["older commit", "newer commit", "no second copy"])
def test_updates_wait_where_a_third_copy_would_be_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    losses, _ = undisturbed(tmp_path / "plain", 5)
    held = Held(monkeypatch)
    training = Training(new_config(tmp_path / "run", commits=why != "no second copy"))
    found = [training.step()]
    if why != "no second copy":
        training.commit().wait()
    if why == "older commit":
        found.append(training.step())
    pending = snapshot_of(training, tmp_path / "copy")
    assert held.reached.wait(60)
    if why == "newer commit":
        found.append(training.step())
        training.commit().wait()
    waiting = threading.Event()
    real = training.runtime._house.storage.pager.wait_for

    def wait_for(future: Any) -> Any:
        if future in (pending.future, pending._ended):
            waiting.set()
            held.go.set()
        return real(future)

    monkeypatch.setattr(training.runtime._house.storage.pager, "wait_for", wait_for)
    found += [training.step() for _ in range(5 - len(found))]
    assert waiting.is_set(), "the update should have waited"
    assert found == losses
    training.close()
    assert list(open_snapshot(tmp_path / "copy").verify()) == []


def test_many_commits_and_snapshots(tmp_path: Path) -> None:
    losses, state = undisturbed(tmp_path / "plain", 8, update="forward")
    training = Training(new_config(tmp_path / "run", update="forward"))
    found = []
    for number in range(8):
        found.append(training.step())
        if number % 3 != 2:
            last = training.commit()
        if number % 2:
            snapshot_of(training, tmp_path / str(number))
    assert found == losses
    check_equal(training.state(), state)
    last.wait()  # until then there are two: its own, and that of the commit before
    training.runtime._house.snapshots.close()
    statistics = training.runtime._house.storage.extents.generations.statistics()
    assert statistics.marks == 1, "the commit's"
    training.close()
    for number in (1, 3, 5, 7):
        again = Training(new_config(tmp_path / f"again{number}", update="step"), resume=tmp_path / str(number))
        assert [again.step() for _ in range(7 - number)] == losses[number + 1 :]
        again.close()


def test_between_backward_and_step_and_in_a_write(tmp_path: Path) -> None:
    training = Training(new_config(tmp_path / "run"))
    training.model(torch.randn(3, 8)).sum().backward()
    with pytest.raises(tiermem.TiermemError, match="snapshot between backward and step"):
        training.runtime.snapshot(tmp_path / "copy")
    training.optimizer.zero_grad()
    with training.runtime.gathered(training.model.inner, write=True):
        with pytest.raises(tiermem.TiermemError, match="snapshot inside gathered"):
            training.runtime.snapshot(tmp_path / "copy")
    with pytest.raises(tiermem.ConfigError, match="extra"):
        training.runtime.snapshot(tmp_path / "copy", extra={"x": object()})
    with pytest.raises(tiermem.ConfigError, match="to be a folder"):
        training.runtime.snapshot(tmp_path / "none" / "copy")
    training.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# What is refused


def whole(directory: Path, **settings: Any) -> Path:
    training = Training(new_config(directory / "made", **settings))
    training.step()
    snapshot_of(training, directory / "copy").wait()
    training.close()
    return directory / "copy"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Net(width=64), r"inner.weight was trained and \[96, 8\], is trained and \[64, 8\]"),
        (lambda: Net(layers=3), "had 10 parameters, has 12|was where layers.2"),
        (lambda: nn.Linear(4, 4), "inner.weight was where weight is"),
        (lambda: frozen(Net()), "inner.weight was trained .* is frozen"),
        (lambda: with_buffer(Net()), "buffer late was not there"),
        (lambda: with_part(Net()), "it had 10 parameters, has 12"),
        (lambda: without_mean(Net()), "buffer norm.running_mean is not there any more"),
    ],
)
def test_another_model_is_named(tmp_path: Path, model: Any, message: str) -> None:
    path = whole(tmp_path)
    with pytest.raises(tiermem.ResumeError, match=message):
        Training(new_config(tmp_path / "run"), resume=path, model=model)
    assert list((tmp_path / "run").iterdir()) == []


def frozen(model: nn.Module) -> nn.Module:
    model.inner.requires_grad_(False)
    return model


def with_buffer(model: nn.Module) -> nn.Module:
    model.register_buffer("late", torch.zeros(2))
    return model


def with_part(model: nn.Module) -> nn.Module:
    model.behind = nn.Linear(4, 4)
    return model


def without_mean(model: nn.Module) -> nn.Module:
    model.norm = nn.BatchNorm1d(96, affine=False, track_running_stats=False)
    return model


def test_a_committed_run_is_replaced_only_by_a_whole_snapshot_and_only_if_asked(tmp_path: Path) -> None:
    path = whole(tmp_path)
    training = Training(new_config(tmp_path / "run"))
    training.step()
    training.commit().wait()
    training.close()
    with pytest.raises(tiermem.ResumeError, match=r"committed run \(step 1"):
        Training(new_config(tmp_path / "run"), resume=path)
    data = next(path.glob("rank-00000-00001*"))
    good = data.read_bytes()
    data.write_bytes(good[:-3] + b"???")
    with pytest.raises(swap.FormatError, match="is damaged"):
        Training(new_config(tmp_path / "run", overwrite=True), resume=path)
    Training(new_config(tmp_path / "run"), resume=True).close()
    data.write_bytes(good)
    training = Training(new_config(tmp_path / "run", overwrite=True), resume=path)
    assert training.done == 1
    training.close()


def test_what_another_number_of_ranks_has_committed_there_stands_in_the_way_of_continuing_it_alone(
    tmp_path: Path,
) -> None:
    """A snapshot is how one process goes on with a run of several: in directories as for a new one."""
    snapshot = whole(tmp_path)
    (tmp_path / "run" / "rank_00001").mkdir(parents=True)
    theirs = tmp_path / "run" / "rank_00001" / f"tiermem.{7:020d}.manifest"
    theirs.write_text("of rank 1")
    config = make_config(tmp_path / "run")
    for resume in ("auto", True):
        with pytest.raises(tiermem.ResumeError, match="ranks, which only as many can continue"):
            Training(config, resume=resume)
    for resume in (False, snapshot):
        Training(config, resume=resume).close()
    assert theirs.read_text() == "of rank 1"


def test_folders_that_are_no_snapshot(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(tiermem.ResumeError, match="expected a snapshot"):
        Training(new_config(tmp_path / "run"), resume=tmp_path / "empty")
    for error in (tiermem.ConfigError, tiermem.ResumeError):  # a wrong setting, and nothing to continue from
        for nothing in (tmp_path / "nothing", "~nobody-has-this-name/nothing"):
            with pytest.raises(error, match="or the folder of a snapshot"):
                Training(new_config(tmp_path / "run"), resume=nothing)


def test_a_swap_directory_is_no_snapshot_and_the_error_says_how_its_commit_is_continued(tmp_path: Path) -> None:
    training = Training(new_config(tmp_path / "first"))
    training.step()
    training.commit().wait()
    training.close()
    advice = r"first' is a swap directory, .* name it in Config\(swap_dirs=\.\.\.\), and give resume=True"
    with pytest.raises(tiermem.ResumeError, match=advice):
        Training(new_config(tmp_path / "second"), resume=str(tmp_path / "first"))


def test_a_snapshot_without_an_extra_has_that_of_the_commit_of_its_step(tmp_path: Path) -> None:
    first = Training(new_config(tmp_path / "first"))
    first.step()
    first.runtime.commit({"step": 1})
    first.runtime.snapshot(tmp_path / "same step").wait()
    first.runtime.snapshot(tmp_path / "its own", {"step": "one"}).wait()
    first.step()
    first.runtime.snapshot(tmp_path / "next step").wait()
    first.close()
    expected = {"same step": {"step": 1}, "its own": {"step": "one"}, "next step": {}}
    for name, extra in expected.items():
        with tiermem.offload(Net(), new_config(tmp_path / f"from {name}"), resume=tmp_path / name) as runtime:
            assert runtime.committed == extra
            runtime.snapshot(tmp_path / f"{name} again").wait()
            assert open_snapshot(tmp_path / f"{name} again").record["extra"] == extra


def test_a_snapshot_behind_another_optimizers_turn_has_not_the_extra_of_the_commit_before_it(tmp_path: Path) -> None:
    """Both turns are one step, and what was committed between them is of another state: its place in the data, say."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiermem.offload(model, new_config(tmp_path / "run", param_dtype="float32"), coalesce=0) as runtime:
        maker, judge = (tiermem.AdamW(part.parameters()) for part in model)
        model[1](torch.ones(2, 8)).mean().backward()
        judge.step()
        runtime.commit({"turn": "judge"}).wait()
        runtime.snapshot(tmp_path / "judge").wait()
        model(torch.ones(2, 8)).mean().backward()
        maker.step()
        judge.zero_grad()
        runtime.snapshot(tmp_path / "between").wait()
        runtime.commit({"turn": "maker"}).wait()
        runtime.snapshot(tmp_path / "maker").wait()
    found = [open_snapshot(tmp_path / name).record["extra"] for name in ("judge", "between", "maker")]
    assert found == [{"turn": "judge"}, {}, {"turn": "maker"}]
