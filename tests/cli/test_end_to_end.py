"""`tiermem train` with the real core under it, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from doubles_combinations import some_of
from doubles_python import WarmPython

import tiermem
from tiermem.cli import main
from tiermem.cli.interrupts import INTERRUPTED
from tiermem.cli.subject import TrainOptions, find_subject
from tiermem.cli.train import Training, learning_rate_factor

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
SMALL = {  # 1.25 million parameters, 19 MB of state
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(warm_python: WarmPython) -> Command:
    return partial(warm_python.run, "-m", "tiermem")


@pytest.mark.parametrize("update", some_of(["backward"], ["forward", "step"]))
def test_a_model_beyond_its_budget_learns(command: Command, tmp_path: Path, update: str) -> None:
    model, swap = tmp_path / "config.json", tmp_path / "swap"
    model.write_text(json.dumps(SMALL))
    swap.mkdir()
    dtype = {"backward": ["--param-dtype", "float32"]}.get(update, [])  # what many processors compute faster in
    done = command(
        *("train", "--model", str(model), "--steps", "6", "--batch", "2", "--seq", "32", "--lr", "4e-3", *dtype),
        *("--json", "--host-memory", "1536KiB", "--swap-dir", str(swap), "--update", update),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["host_memory"] == 1536 << 10
    assert report["state_bytes"] > 8 * report["host_memory"]
    steps = report["steps"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert all(step["bytes_read"] > 0 and step["bytes_written"] > 0 for step in steps[2:])
    assert all(0 <= step["stall_seconds"] <= step["seconds"] for step in steps)
    assert list(swap.iterdir()) == [], "swap files were left behind"


def test_vertical_accumulation_has_the_same_losses_and_reads_less(command: Command, tmp_path: Path) -> None:
    """And 8-bit moments on top of it."""
    model, swap = tmp_path / "config.json", tmp_path / "swap"
    model.write_text(json.dumps(SMALL))
    swap.mkdir()
    found = []
    for vertical in ([], ["--vertical"]):
        done = command(
            *("train", "--model", str(model), "--steps", "2", "--batch", "1", "--seq", "16", "--accumulate", "4"),
            *("--param-dtype", "float32", "--json"),
            *("--host-memory", "2MiB", "--swap-dir", str(swap), "--update", "forward", "--moments", "int8"),
            *vertical,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["steps"])
    assert [step["loss"] for step in found[0]] == [step["loss"] for step in found[1]]
    # Of all steps: what the updates of one read is counted in it or, as it comes, in the next. 0.24 was seen.
    plainly, vertically = (sum(step["bytes_read"] for step in steps) for steps in found)
    assert vertically < 0.4 * plainly


def test_offloaded_activations_give_the_same_losses(command: Command, tmp_path: Path) -> None:
    losses = []
    for more in ([], ["--offload-activations", "--gradient-checkpointing"]):
        done = command(
            *("train", "--model", "llama-tiny", "--steps", "2", "--batch", "1", "--seq", "64", "--json"),
            *("--param-dtype", "float32", "--host-memory", "1MiB", "--swap-dir", str(tmp_path), *more),
        )
        assert done.returncode == 0, done.stderr
        losses.append([step["loss"] for step in json.loads(done.stdout)["steps"]])
    assert losses[0] == losses[1]


def test_an_impossible_budget_is_one_line(command: Command, tmp_path: Path) -> None:
    done = command(
        "train", "--model", "llama-tiny", "--steps", "1", "--host-memory", "4KiB", "--swap-dir", str(tmp_path)
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("tiermem: ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--update", "--param-dtype", "--host-memory"])
def test_an_unknown_word_is_one_line(command: Command, tmp_path: Path, option: str) -> None:
    done = command("train", "--model", "llama-tiny", "--swap-dir", str(tmp_path), option, "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_config_json_of_another_architecture(command: Command, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = command("train", "--model", str(tmp_path), "--steps", "2", "--seq", "32", "--host-memory", "4MiB", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["steps"]) == 2


def test_resuming_where_nothing_was_committed_begins_anew_and_says_so(command: Command, tmp_path: Path) -> None:
    model, swap = tmp_path / "config.json", tmp_path / "swap"
    model.write_text(json.dumps(SMALL))
    swap.mkdir()
    common = ["train", "--model", str(model), "--steps", "1", "--batch", "1", "--seq", "16", "--json"]
    common += ["--param-dtype", "float32"]
    done = command(*common, "--host-memory", "8MiB", "--swap-dir", str(swap), "--resume")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["steps"]) == 1
    assert f"nothing was committed in {swap}: training begins anew" in "".join(done.stderr.splitlines())
    again = command(*common, "--host-memory", "8MiB", "--swap-dir", str(swap), "--resume")
    assert again.returncode == 0, again.stderr
    assert "nothing was committed" not in again.stderr


# The command, whose last step waits for the signal: that may come at any moment, and never too late.
ENDLESS = """
import sys, time
from tiermem.cli import main
from tiermem.cli.train import Training

step, last = Training.step, int(sys.argv[sys.argv.index("--steps") + 1]) - 1

def waiting(training, number):
    while number == last:
        time.sleep(0.01)
    return step(training, number)

Training.step = waiting
main.main()
"""


OFTEN = ("--model", "llama-tiny", "--batch", "1", "--seq", "8", "--host-memory", "4MiB", "--json")
OFTEN += ("--param-dtype", "float32", "--steps", "8")


@pytest.fixture(scope="module")
def losses(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a training that nothing interrupts."""
    words = ("train", *OFTEN, "--swap-dir", str(tmp_path_factory.mktemp("plain")))
    return [step["loss"] for step in json.loads(warm_python.run("-m", "tiermem", *words).stdout)["steps"]]


@pytest.mark.parametrize("when", [("--commit-every", "2"), ("--resume",)])
def test_a_training_is_resumed_where_it_was_committed(
    command: Command,
    warm_python: WarmPython,
    when: tuple[str, ...],
    losses: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, steps = str(tmp_path), len(losses)
    words = [warm_python.path, "-c", ENDLESS, "train", *OFTEN, "--swap-dir", run]
    with subprocess.Popen([*words, *when], stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        while process.poll() is None and not list(tmp_path.glob("*.manifest")):
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == INTERRUPTED
    resumed = command("train", *OFTEN, "--swap-dir", run, "--resume")
    found = [step["loss"] for step in json.loads(resumed.stdout)["steps"]]
    assert 1 <= len(found) <= steps - (2 if "2" in when else 1)
    assert found == losses[-len(found) :]
    assert main.run(["train", *OFTEN, "--swap-dir", run]) == 1
    assert "committed run" in capsys.readouterr().err
    assert main.run(["snapshot", "list", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == steps
    assert main.run(["snapshot", "verify", run, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["verified"], report["damaged"]) == (steps, True, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("given", [True, False])
def test_an_interrupted_training_leaves_nothing(
    warm_python: WarmPython, tmp_path: Path, number: signal.Signals, given: bool
) -> None:
    """In its first step where a directory is given, while its pages are being made where none is."""
    words = [warm_python.path, "-m", "tiermem", "train", "--model", "llama-tiny", "--steps", "100000", "--seq", "32"]
    words += ["--param-dtype", "float32"]
    where = ("--swap-dir", str(tmp_path)) if given else ()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*words, *where, "--host-memory", "4MiB"], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as process:
        assert process.stderr is not None
        while process.poll() is None and not list(tmp_path.rglob("*.swapfile")):
            time.sleep(0.01)
        if given:
            assert process.stderr.readline().startswith("step 1/")
        process.send_signal(number)
        errors = process.stderr.read()
        assert process.wait(60) == INTERRUPTED, errors
    assert errors.splitlines()[-1] == "tiermem: interrupted"
    assert list(tmp_path.iterdir()) == []


IN_A_FINALIZER = f"""
import os, signal, time
from tiermem.cli import main

class Object:
    def __del__(self):
        os.kill(os.getpid(), signal.{{}})
        time.sleep(60)

def run(arguments):
    Object()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return {INTERRUPTED}
    return 0

main.run = run
main.main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_that_comes_where_exceptions_are_dropped_comes_again(warm_python: WarmPython, name: str) -> None:
    done = warm_python.run("-c", IN_A_FINALIZER.format(name))
    assert (done.returncode, done.stderr) == (INTERRUPTED, "")


def test_a_resumed_training_goes_on_at_the_rate_of_its_own_schedule(tmp_path: Path) -> None:
    """With more --steps than at first the committed rate is not the one of the step that comes next."""
    (tmp_path / "run").mkdir()
    (tmp_path / "text.txt").write_text("All work and no play. " * 50)
    config = tiermem.Config(swap_dirs=[tmp_path / "run"], host_memory="4MiB", param_dtype="float32")
    rates = []
    for steps, resume in ((2, False), (20, True), (20, True)):
        options = TrainOptions("llama-tiny", steps, 1, 16, texts=(tmp_path / "text.txt",), keep=True, resume=resume)
        training = Training(options, config, find_subject(options))
        for number in range(0 if resume else 2):
            training.step(number)
        rates.append(training.optimizer.param_groups[0]["lr"])
        training.commit()
        training.close()
    peak = options.lr
    assert rates == [peak * learning_rate_factor(2, steps) for steps in (2, 20, 20)]
    assert rates[0] < rates[1]
