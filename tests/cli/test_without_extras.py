"""The commands where only what tiermem itself needs is installed: all work, or say in one line what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# What the extras of pyproject.toml bring.
_ABSENT = ("transformers", "tokenizers", "accelerate", "matplotlib", "tensorboard", "peft")
_SCRIPT = """
import contextlib, io, json, sys
from tiermem.cli.main import run

def carry_out(line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(line)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))

absent = json.loads(sys.argv[1])
carry_out(["train", "--help"])
print(json.dumps([name for name in absent if name in sys.modules]))
sys.modules.update(dict.fromkeys(absent))
for line in json.loads(sys.argv[2]):
    carry_out(line)
"""
_PLAN = ["plan", "125M", "--host-memory", "1GiB", "--machine", "laptop"]
_NAMED = ["--host-memory", "64MiB", "--swap-dir", "."]
COMMANDS = {
    "plan of a count": (_PLAN, 0, ""),
    "plan of a count, as JSON": ([*_PLAN, "--json"], 0, ""),
    "plan of a preset": (["plan", "llama-5m", *_PLAN[2:]], 1, "models come from transformers: pip install"),
    "train": (["train", "--model", "llama-5m", "--steps", "1", *_NAMED], 1, "models come from transformers"),
    "train with a tokenizer": (
        ["train", "--model", "llama-5m", "--steps", "1", "--tokenizer", "words.json", *_NAMED],
        1,
        "--tokenizer needs tokenizers: pip install 'tiermem[hf]'",
    ),
    "tune": (["tune", "--model", "llama-5m", *_NAMED], 1, "models come from transformers"),
    "doctor": (["doctor", "--json"], None, ""),
    "bench": (["bench", "--dir", ".", "--size", "16MiB", "--seconds", "0.05", "--json"], 0, ""),
    "a picture of bench": (["bench", "--dir", ".", "--size", "16MiB", "--plot", "a.png"], 1, "matplotlib: pip install"),
    "a picture of a plan": ([*_PLAN, "--plot", "a.png"], 1, "matplotlib: pip install"),
    "scalars": (["train", "--model", "llama-5m", "--tensorboard", "runs", *_NAMED], 1, "pip install 'tiermem["),
    "snapshots": (["snapshot", "list", "."], 1, "nothing is committed in ."),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one process tells: of --help, and what of the extras that took; then, without them, of each command."""
    directory = tmp_path_factory.mktemp("bare")
    (directory / "words.json").write_text("{}")
    lines = json.dumps([command for command, _, _ in COMMANDS.values()])
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(_ABSENT), lines],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture
def answers(told: list[Any]) -> dict[str, tuple[int, str, str]]:
    """Code, stdout and stderr of each command, all of one process that cannot import what is absent."""
    return dict(zip(COMMANDS, map(tuple, told[2:]), strict=True))


def test_help_needs_no_extra_where_all_are_there(told: list[Any]) -> None:
    (code, out, _), imported = told[:2]
    assert (code, imported) == (0, [])
    assert "--host-memory" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_works_or_says_what_to_install(name: str, answers: dict[str, tuple[int, str, str]]) -> None:
    _, expected, said = COMMANDS[name]
    code, out, err = answers[name]
    if expected == 1:
        assert (code, out) == (1, "")
        assert err.startswith("tiermem: ")
        assert err.count("\n") == 1
        assert said in err
    else:
        assert code in ((expected,) if expected is not None else (0, 1)), err
        if "--json" in COMMANDS[name][0]:
            assert isinstance(json.loads(out), dict)
        else:
            assert out
