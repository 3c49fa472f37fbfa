"""The `tiermem` command.

Owns the commands' names and how they fail. Does not do their work, and imports transformers only once a command needs
it, so that `--help` is quick. Guarantees that errors are one line on stderr, that the exit code is 0 for success, 1 for
a failure and 2 for wrong usage (see "Promises" in README.md), and that with `--json` stdout holds one object only.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import swap
from tiermem.cli import options, plan_commands, snapshot_commands
from tiermem.cli.bench import bench
from tiermem.cli.interrupts import INTERRUPTED, is_interrupt, leave_signals, take_signals
from tiermem.cli.shortage import shortage_of
from tiermem.cli.terminal import fail, name_stdout, print_object, print_table, terminal
from tiermem.errors import TiermemError

if TYPE_CHECKING:
    from tiermem.cli.report import TrainReport

app = typer.Typer(name="tiermem", add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def tiermem(version: options.Version = False) -> None:  # noqa: ARG001 - see its callback
    """Train PyTorch models larger than memory."""
    quiet_libraries()


def _refuse_contradiction(resume: bool, overwrite: bool, named: bool) -> None:
    if resume and not named:
        raise typer.BadParameter("--resume needs the --swap-dir (or --config) of the run to continue")
    if resume and overwrite:
        raise typer.BadParameter("expected --resume, which goes on, or --overwrite, which begins anew, not both")


@app.command()
def train(
    model: options.Model = "llama-20m",
    steps: options.Steps = 100,
    batch: options.Batch = 4,
    seq: options.Seq = 256,
    accumulate: options.Accumulate = 1,
    vertical: options.Vertical = False,
    lr: options.LearningRate = 3e-4,
    seed: options.Seed = 0,
    text: options.Text = None,
    tokenizer: options.TokenizerFile = None,
    host_memory: options.HostMemory = None,
    device_memory: options.DeviceMemory = None,
    swap_dir: options.SwapDir = None,
    update: options.Update = None,
    param_dtype: options.ParamDtype = None,
    moments: options.Moments = None,
    config: options.ConfigFile = None,
    gradient_checkpointing: options.GradientCheckpointing = False,
    offload_activations: options.OffloadActivations = False,
    resume: options.Resume = False,
    keep: options.Keep = False,
    commit_every: options.CommitEvery = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    timeline: options.Timeline = None,
    weights: options.WeightsPath = None,
    tensorboard: options.TensorBoard = None,
    report: options.Report = False,
    endurance: options.Endurance = None,
) -> None:
    """Train a causal language model on text under given memory budgets."""
    _refuse_contradiction(resume, overwrite, bool(swap_dir or config))
    from tiermem.cli import train as training
    from tiermem.cli.subject import TrainOptions

    what = TrainOptions(
        model=model,
        steps=steps,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        vertical=vertical,
        lr=lr,
        seed=seed,
        texts=tuple(text or ()),
        tokenizer=tokenizer,
        gradient_checkpointing=gradient_checkpointing,
        offload_activations=offload_activations,
        resume=resume,
        keep=keep,
        commit_every=commit_every,
        timeline=timeline,
        weights=weights,
        tensorboard=tensorboard,
        endurance=endurance,
    )
    overrides: dict[str, str | bool | None] = {"host_memory": host_memory, "device_memory": device_memory}
    overrides |= {"update": update, "param_dtype": param_dtype, "moments": moments, "overwrite": overwrite or None}
    show_training(training.train_in(swap_dir or (), what, config, overrides), json=json, with_overlap=report)


@app.command()
def doctor(swap_dir: options.ExaminedSwapDir = None, json: options.Json = False) -> None:
    """Say what this machine offers, and what is wrong with it. Exit code 1 if something is."""
    from tiermem.cli.doctor import examine

    examination = examine(swap_dir or [Path.cwd()])
    if json:
        print_object(examination.to_json())
    else:
        print_table(examination.to_table())
    if examination.problems:
        raise typer.Exit(fail("; ".join(examination.problems), 1))


app.command()(bench)
app.command()(plan_commands.plan)
app.command()(plan_commands.tune)
app.add_typer(snapshot_commands.app, name="snapshot")


def show_training(report: TrainReport | None, *, json: bool, with_overlap: bool) -> None:
    """Print the report on a run, if it is this rank's; `with_overlap`: also what the computation waited for.

    Raises TiermemError after that if something else that was asked for could not be written.
    """
    if report is None:
        return
    if json:
        print_object(report.to_json())
    else:
        lines = report.overlap.to_lines() if with_overlap and report.overlap is not None else []
        print_table(report.to_table())
        terminal().print(report.to_sentence(), *lines, sep="\n", highlight=False)
    if report.timeline_error is not None:
        raise TiermemError(report.timeline_error)


def quiet_libraries() -> None:
    """Keep transformers and tokenizers, not imported yet, from the network and from chatter about threads."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def run(arguments: Sequence[str]) -> int:
    """Run the command line `arguments` (without the program's name); return the exit code."""
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="tiermem", standalone_mode=False)
        sys.stdout.flush()  # the end of the interpreter would meet a full disk without a word of ours
    except (KeyboardInterrupt, typer.Abort):
        return fail("interrupted", INTERRUPTED)
    except (TiermemError, swap.SwapError, OSError) as error:
        return fail(str(error), 1)
    except Exception as error:
        if is_interrupt(error):
            return fail("interrupted", INTERRUPTED)
        if (shortage := shortage_of(error)) is not None:
            return fail(shortage, 1)
        # Wrong usage. The class comes from click or from typer's own copy of it, depending on typer's version.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "tiermem")
        # A group without a command (`tiermem snapshot`) has shown its help on stdout, and its error has no message.
        return fail(f"{format_message() or 'expected a command'} (see {command} --help)", 2)
    if code == INTERRUPTED:  # typer's own way of ending on Ctrl-C says nothing
        return fail("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def replace_closed_streams() -> None:
    """Give a standard stream that the caller has closed (`>&-`) to /dev/null.

    Else the next file to be opened, such as a swap file, would have its number, and libraries would write into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def escape_unencodable_output() -> None:
    """Have stdout escape what its encoding lacks (`\\xfc`), as a directory's name may hold it; stderr does already."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Enter from the shell: run the command line and exit with its code."""
    replace_closed_streams()
    escape_unencodable_output()
    name_stdout()
    take_signals()
    code = run(sys.argv[1:])
    leave_signals(code)
    sys.exit(code)
