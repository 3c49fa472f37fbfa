"""Commit and resume: the same bits as an undisturbed run, in every schedule."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import in_turn
from doubles_commit import Net, Training, check_equal, make_config, undisturbed
from doubles_training import PlainAdamW, config_for, least_budget, same
from torch import nn

import tiermem

UPDATES = ("step", "forward", "backward")


@pytest.mark.parametrize(
    ("update", "dtype", "memory"), in_turn(UPDATES, ["float32", "bfloat16", "float16"], ["72KiB", "2MiB"])
)
def test_resuming_continues_bit_for_bit(tmp_path: Path, update: str, dtype: str, memory: str) -> None:
    settings: dict[str, Any] = {"update": update, "param_dtype": dtype, "host_memory": memory}
    losses, state = undisturbed(tmp_path / "plain", 6, **settings)
    (tmp_path / "run").mkdir()
    config = make_config(tmp_path / "run", **settings)
    found: list[float] = []
    for life in range(3):
        training = Training(config, resume="auto" if life != 1 else True)
        assert training.done == 2 * life
        for _ in range(2):
            found.append(training.step())
            training.commit()
        if life < 2:
            training.step()  # not committed: forgotten
        else:
            check_equal(training.state(), state)
        training.close()
    assert found == losses


@pytest.mark.parametrize("update", UPDATES)
def test_committing_every_step_changes_no_bit(tmp_path: Path, update: str) -> None:
    losses, state = undisturbed(tmp_path / "plain", 5, update=update, clip=None)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run", update=update))
    assert training.runtime.committed is None
    found = []
    for number in range(5):
        found.append(training.step())
        pending = training.commit()
        if number % 2:
            pending.wait()
            assert pending.done
            assert training.runtime.committed["step"] == number + 1
    assert found == losses
    check_equal(training.state(), state)
    training.close()
    assert training.runtime.committed["step"] == 5


def test_a_run_in_a_relative_directory_outlives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a run, naïve ✓").mkdir()
    monkeypatch.chdir(tmp_path)
    config = make_config(Path("a run, naïve ✓"))
    training = Training(config)
    assert training.runtime.config.swap_dirs == ("a run, naïve ✓",)
    monkeypatch.chdir("/")
    training.step()
    training.commit().wait()
    state = training.state()
    training.close()
    monkeypatch.chdir(tmp_path)
    resumed = Training(config, resume=True)
    monkeypatch.chdir("/")
    check_equal(resumed.state(), state)
    resumed.close()
    assert list((tmp_path / "a run, naïve ✓").glob("*.manifest"))


@pytest.mark.parametrize("verb", ["commit", "snapshot"])
def test_a_run_that_is_kept_again_before_it_has_an_optimizer_is_kept_whole(tmp_path: Path, verb: str) -> None:
    losses, state = undisturbed(tmp_path / "plain", 4)
    for name in ("run", "copy"):
        (tmp_path / name).mkdir()
    config = make_config(tmp_path / "run")
    training = Training(config)
    assert [training.step(), training.step()] == losses[:2]
    training.commit().wait()
    training.close()
    with tiermem.offload(Net(), config, resume=True) as runtime:
        if verb == "commit":
            runtime.commit(runtime.committed).wait()
        else:
            runtime.snapshot(tmp_path / "snapshot", runtime.committed).wait()
    if verb == "commit":
        training = Training(config, resume=True)
    else:
        training = Training(make_config(tmp_path / "copy"), resume=tmp_path / "snapshot")
    assert [training.step(), training.step()] == losses[2:]
    check_equal(training.state(), state)
    training.close()


@pytest.mark.parametrize("verb", ["commit", "snapshot"])
def test_settings_that_are_tensors_come_back_as_tensors(tmp_path: Path, verb: str) -> None:
    """Scheduled in float32 as before: made a number, the learning rate would be rounded otherwise from then on."""
    (tmp_path / "swap").mkdir()
    (tmp_path / "other").mkdir()

    def begin(runtime: tiermem.Runtime) -> Any:
        optimizer = tiermem.AdamW(
            runtime.model.parameters(), lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.99))
        )
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(runtime: tiermem.Runtime, optimizer: Any, scheduler: Any) -> None:
        runtime.model(torch.ones(5, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()

    with tiermem.offload(Net(), make_config(tmp_path / "swap")) as runtime:
        optimizer, scheduler = begin(runtime)
        for _ in range(2):
            step(runtime, optimizer, scheduler)
        runtime.commit(scheduler.state_dict()).wait()
        if verb == "snapshot":
            runtime.snapshot(tmp_path / "snapshot", scheduler.state_dict()).wait()
        for _ in range(3):
            step(runtime, optimizer, scheduler)
        expected = optimizer.param_groups[0]
    resume = True if verb == "commit" else tmp_path / "snapshot"
    with tiermem.offload(
        Net(), make_config(tmp_path / ("swap" if verb == "commit" else "other")), resume=resume
    ) as runtime:
        optimizer, scheduler = begin(runtime)
        scheduler.load_state_dict(runtime.committed)
        optimizer.load_state_dict(runtime.committed_optimizer_state())
        for _ in range(3):
            step(runtime, optimizer, scheduler)
        found = optimizer.param_groups[0]
    for there, here in zip((expected["lr"], *expected["betas"]), (found["lr"], *found["betas"]), strict=True):
        assert isinstance(here, torch.Tensor)
        assert (here.dtype, here.item()) == (there.dtype, there.item())


def test_parameters_added_steps_after_resuming_go_on_with_their_counts(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    for _ in range(2):
        training.step()
    training.commit().wait()
    training.close()
    model = Net()
    with tiermem.offload(model, make_config(tmp_path), resume=True) as runtime:
        tiermem.AdamW(model.inner.parameters())
        runtime.commit().wait()
    model = Net()
    with tiermem.offload(model, make_config(tmp_path), resume=True) as runtime:
        inner, outer = list(model.inner.parameters()), list(model.outer.parameters())
        optimizer = tiermem.AdamW(inner)
        model(torch.ones(5, 8)).square().mean().backward()
        optimizer.step()
        optimizer.add_param_group({"params": outer})
        assert [optimizer.steps_of(parameter) for parameter in (*inner, *outer)] == [3, 3, 2, 2]
        runtime.commit().wait()
        assert len(runtime.committed_optimizer_state()["param_groups"]) == 2
        with pytest.raises(tiermem.ResumeError, match="holds 1 optimizers, asked for number 1"):
            runtime.committed_optimizer_state(1)  # what waits for an optimizer is none
        for none in ("first", 0.0):
            with pytest.raises(tiermem.ResumeError, match=f"asked for number {none!r}"):
                runtime.committed_optimizer_state(none)


class Taught(nn.Module):
    """A model and its teacher, which follows it and is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.teacher = nn.ModuleList(nn.Linear(48, 48) for _ in range(3)).requires_grad_(False)

    def forward(self, rows):
        expected = rows
        for layer, above in zip(self.layers, self.teacher, strict=True):
            rows, expected = torch.tanh(layer(rows)), torch.tanh(above(expected))
        return (rows - expected.detach()).square().mean()


def follow(model: Taught, gathered) -> None:
    for mine, teachers in zip(model.layers.parameters(), model.teacher.parameters(), strict=True):
        with gathered([mine]), gathered([teachers], write=True), torch.no_grad():
            teachers.lerp_(mine, 0.1)


@pytest.mark.parametrize("update", UPDATES)
def test_a_teacher_that_follows_in_every_step_is_committed_and_resumed(tmp_path: Path, update: str) -> None:
    torch.manual_seed(0)
    plain = Taught()
    theirs = PlainAdamW(plain.parameters(), lr=1e-2)
    rows = torch.randn(6, 48)
    for _ in range(5):
        plain(rows).backward()
        theirs.step()
        theirs.zero_grad()
        follow(plain, lambda *_, **__: nullcontext())
    for life in range(2):
        torch.manual_seed(0)
        model = Taught()
        config = config_for(tmp_path, least_budget(Taught(), tmp_path), update)
        with tiermem.offload(model, config, coalesce=0, resume="auto") as runtime:
            ours = tiermem.AdamW(model.parameters(), lr=1e-2)
            for step in range(3 - life):
                model(rows).backward()
                ours.step()
                ours.zero_grad()
                follow(model, runtime.gathered)
                if step != 1:  # and two steps between commits
                    runtime.commit().wait()
            if life:
                for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert same(runtime.parameter(mine), other.detach()), name


def test_inside_a_write_nothing_is_committed(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    with training.runtime.gathered(training.model.inner, write=True):
        with pytest.raises(tiermem.TiermemError, match="commit inside gathered"):
            training.commit()
    training.close()


def test_an_optimizer_that_is_made_anew_goes_on_with_the_counts_of_the_commit(tmp_path: Path) -> None:
    """Also where nobody calls load_state_dict: the moments are there, and beside counts of 0 would be scaled up."""

    def train(directory: Path, steps: int, counts: set[int], *, resume: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, rows = Net(), torch.linspace(-1, 1, 40).view(5, 8)
        directory.mkdir(exist_ok=True)
        with tiermem.offload(model, make_config(directory), resume=resume) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
            assert set(optimizer.step_counts().values()) == counts
            for _ in range(steps):
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            runtime.commit().wait()
            return [runtime.parameter(parameter) for parameter in model.parameters()]

    expected = train(tmp_path / "plain", 3, set())
    train(tmp_path / "run", 2, set())
    found = train(tmp_path / "run", 1, {2}, resume=True)
    assert all(torch.equal(values, other) for values, other in zip(found, expected, strict=True))
