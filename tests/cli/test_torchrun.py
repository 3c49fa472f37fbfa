"""`torchrun -m tiermem train`: one rank is killed, torchrun starts all anew, and they go on from the last commit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from doubles_python import WarmPython
from rich.console import Console

import tiermem
from tiermem.cli import disk
from tiermem.cli import launch as launching
from tiermem.cli.launch import Launch
from tiermem.cli.subject import Subject, TrainOptions
from tiermem.cli.text import ByteTokens, Corpus
from tiermem.cli.train import train

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path(__file__)  # without one, every rank looks for those of the standard library
STEPS = 6
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}
# The command, whose last step before the restart waits for the end of rank 1: it comes at any moment, never too late.
KILLED = f"""
import os, time
from tiermem.cli import main
from tiermem.cli.train import Training

step = Training.step

def waiting(training, number):
    while number == {STEPS - 1} and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.01)
    return step(training, number)

Training.step = waiting
main.main()
"""


def start(python: WarmPython, directory: Path, model: Path) -> subprocess.Popen[str]:
    ranks = [python.path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    ranks += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.1"]
    (model.parent / "killed.py").write_text(KILLED)
    what = ["train", "--model", str(model), "--steps", str(STEPS), "--batch", "4", "--seq", "16", "--json"]
    what += ["--text", str(TEXT)]
    where = ["--swap-dir", str(directory), "--host-memory", "2MiB", "--param-dtype", "float32"]
    return subprocess.Popen(
        [*ranks, str(model.parent / "killed.py"), *what, *where, "--resume", "--commit-every", "1"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill_rank_1(program: subprocess.Popen[str], directory: Path) -> None:
    """As soon as both ranks have committed something."""
    until = time.monotonic() + 200
    while not all(list(directory.glob(f"rank_0000{rank}/*.manifest")) for rank in range(2)):
        assert time.monotonic() < until, "nothing was committed"
        assert program.poll() is None, program.stderr.read() if program.stderr else ""
        time.sleep(0.02)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(directory) in process.cmdline() and process.environ().get("RANK") == "1":
                process.kill()
                return
    raise AssertionError("rank 1 was not found")


@pytest.mark.long
@pytest.mark.timeout(500)
def test_torchrun_restarts_and_the_ranks_go_on_from_the_last_commit(warm_python: WarmPython, tmp_path: Path) -> None:
    model, swap = tmp_path / "config.json", tmp_path / "swap"
    model.write_text(json.dumps(MODEL))
    swap.mkdir()
    program = start(warm_python, swap, model)
    try:
        kill_rank_1(program, swap)
        out, errors = program.communicate(timeout=250)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 0, errors
    found = json.loads(out)  # rank 0 alone has printed
    assert 1 <= len(found["steps"]) < STEPS, "the second attempt did not begin anew"
    assert sorted(path.name for path in swap.iterdir()) == ["rank_00000", "rank_00001"]

    alone = tmp_path / "alone"
    alone.mkdir()
    options = TrainOptions(model=str(model), steps=STEPS, batch=4, seq=16, texts=(TEXT,))
    config = tiermem.Config(device="cpu", host_memory="4MiB", param_dtype="float32", swap_dirs=[alone])
    expected = json.loads(train(options, config, Console(file=io.StringIO())).to_json())["steps"][
        -len(found["steps"]) :
    ]
    assert [step["loss"] for step in found["steps"]] == pytest.approx([step["loss"] for step in expected], rel=1e-5)
    assert [step["tokens"] for step in found["steps"]] == [step["tokens"] for step in expected]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_a_swap_directory_all_ranks_keep_their_commits_in_one(warm_python: WarmPython, tmp_path: Path) -> None:
    """Else none could be continued: each rank of the next run would look into one of them."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    ranks = [warm_python.path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    ranks += ["--rdzv-endpoint", "localhost:0", "-m", "tiermem", "train", "--model", "config.json", "--steps", "1"]
    ranks += ["--batch", "2", "--seq", "16", "--host-memory", "2MiB", "--param-dtype", "float32", "--text", str(TEXT)]
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    for keep in ([], ["--keep"]):
        done = subprocess.run(
            [*ranks, *keep], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
        made = list(tmp_path.glob("tiermem-swap-*"))
        assert len(made) == len(keep)
        assert done.stderr.count("the run is kept in ") == len(keep)
        assert all(f"kept in {directory}: --resume --swap-dir {directory.name}" in done.stderr for directory in made)
    assert sorted(path.name for path in made[0].glob("*/*.manifest")) == ["tiermem.00000000000000000001.manifest"] * 2


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(tiermem.ConfigError, match=r"--batch 5 cannot be divided over 2 ranks"):
        Launch(1, 2).require_divisible(5)


def test_ranks_of_several_machines_need_room_for_their_own_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, two of them here: half of what 1,000 parameters take, 7,000 bytes."""
    subject = Subject(None, 1000, source=ByteTokens(Corpus([Path(__file__)])))
    config = tiermem.Config(swap_dirs=[tmp_path])
    monkeypatch.setattr(disk, "free_together", lambda directories: 7000)
    subject.require_room(config, "step", commits=False, launch=Launch(0, 4, neighbours=2))
    for launch in (None, Launch(0, 2, neighbours=2), Launch(0, 4, neighbours=3)):
        with pytest.raises(tiermem.ConfigError, match=r"swapping needs .*7000 bytes\) free"):
            subject.require_room(config, "step", commits=False, launch=launch)


def test_a_rank_that_ends_while_the_others_join_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **named: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launching, "rendezvous", lambda where: iter([(launching.dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(launching.dist, "init_process_group", refused)
    with pytest.raises(tiermem.TiermemError, match="rank 0 cannot join the others"), launching.launched():
        pass


def test_ranks_started_without_torchrun_that_cannot_meet_are_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(tiermem.TiermemError, match=r"rank 0 cannot join .*in use"), launching.launched():
            pass
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(tiermem.TiermemError, match=r"rank 0 cannot join .*MASTER_PORT expected"), launching.launched():
        pass
