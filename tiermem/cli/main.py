"""The `tiermem` command.

Owns the commands' names and how they fail. Does not do their work, and imports transformers only once a command needs
it, so that `--help` is quick. Guarantees that errors are one line on stderr, that the exit code is 0 for success, 1 for
a failure and 2 for wrong usage, and that with `--json` stdout holds one object and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

import swap
from tiermem.cli import options, snapshot_commands
from tiermem.errors import TiermemError

INTERRUPTED = 130

app = typer.Typer(name="tiermem", add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def tiermem() -> None:
    """Train PyTorch models larger than memory."""


@app.command()
def train(
    model: options.Model = "llama-20m",
    steps: options.Steps = 100,
    batch: options.Batch = 4,
    seq: options.Seq = 256,
    accumulate: options.Accumulate = 1,
    lr: options.LearningRate = 3e-4,
    seed: options.Seed = 0,
    text: options.Text = None,
    tokenizer: options.TokenizerFile = None,
    host_memory: options.HostMemory = None,
    device_memory: options.DeviceMemory = None,
    swap_dir: options.SwapDir = None,
    update: options.Update = None,
    param_dtype: options.ParamDtype = None,
    config: options.ConfigFile = None,
    gradient_checkpointing: options.GradientCheckpointing = False,
    resume: options.Resume = False,
    keep: options.Keep = False,
    commit_every: options.CommitEvery = 0,
    json: options.Json = False,
    timeline: options.Timeline = None,
    weights: options.WeightsPath = None,
) -> None:
    """Train a causal language model on text under given memory budgets."""
    if resume and not (swap_dir or config):
        raise typer.BadParameter("--resume needs the --swap-dir (or --config) of the run to continue")
    quiet_libraries()
    from tiermem.cli.disk import swap_directories
    from tiermem.cli.launch import launched
    from tiermem.cli.train import TrainOptions, load_config, make_config
    from tiermem.cli.train import train as run

    what = TrainOptions(
        model=model,
        steps=steps,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        lr=lr,
        seed=seed,
        texts=tuple(text or ()),
        tokenizer=tokenizer,
        gradient_checkpointing=gradient_checkpointing,
        resume=resume,
        keep=keep,
        commit_every=commit_every,
        timeline=timeline,
        weights=weights,
    )
    base = load_config(config)
    asked = swap_dir or (base.swap_paths if base else ())
    overrides = {"host_memory": host_memory, "device_memory": device_memory}
    overrides |= {"update": update, "param_dtype": param_dtype}
    with swap_directories(asked, keep=what.commits) as directories, launched() as launch:
        report = run(what, make_config(base, directories, overrides), launch.progress(), launch)
    if json and launch.rank == 0:
        print_object(report.to_json())
    elif launch.rank == 0:
        Console().print(report.to_table(), report.to_sentence(), sep="\n", highlight=False)


@app.command()
def doctor(swap_dir: options.DoctorSwapDir = None, json: options.Json = False) -> None:
    """Say what this machine offers, and what is wrong with it. Exit code 1 if something is."""
    from tiermem.cli.doctor import examine

    examination = examine(swap_dir or [Path.cwd()])
    if json:
        print_object(examination.to_json())
    else:
        Console().print(examination.to_table())
    if examination.problems:
        raise typer.Exit(1)


app.add_typer(snapshot_commands.app, name="snapshot")


def quiet_libraries() -> None:
    """Keep transformers and tokenizers, not imported yet, from the network and from chatter about threads."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def print_object(text: str) -> None:
    """Write the one object of a `--json` command to stdout."""
    sys.stdout.write(text + "\n")


def run(arguments: Sequence[str]) -> int:
    """Run the command line `arguments` (without the program's name); return the exit code."""
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="tiermem", standalone_mode=False)
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except (TiermemError, swap.SwapError, OSError) as error:
        return fail(str(error), 1)
    except Exception as error:
        # Wrong usage. The class comes from click or from typer's own copy of it, depending on typer's version.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        return fail(f"{format_message()} (see tiermem --help)", 2)
    return code if isinstance(code, int) else 0


def fail(message: str, code: int) -> int:
    """Write `message` in one line to stderr; return `code`."""
    sys.stderr.write(f"tiermem: {' '.join(message.split())}\n")
    return code


def main() -> None:
    """Enter from the shell: run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))
