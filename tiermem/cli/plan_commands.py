"""The commands `tiermem plan` and `tiermem tune`.

Owns their names and options. Does not do their work (`plan.py`, `tune.py`), and imports it only when a command runs.
Guarantees one JSON object on stdout with `--json`, and exit code 1 for a plan that does not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tiermem.cli import options
from tiermem.cli.terminal import fail, print_object, print_table, terminal
from tiermem.errors import TiermemError

if TYPE_CHECKING:
    from tiermem.config import Config
    from tiermem.planner.predict import Prediction


def plan(
    model: options.PlanModel = None,
    model_option: options.PlanModelOption = None,
    parameters: options.Parameters = None,
    machine: options.Machine = None,
    measure: options.Measure = False,
    batch: options.Batch = 4,
    seq: options.Seq = 256,
    accumulate: options.Accumulate = 1,
    ranks: options.PlanRanks = 1,
    copies: options.PlanCopies = 1,
    host_memory: options.HostMemory = None,
    device_memory: options.DeviceMemory = None,
    swap_dir: options.ExaminedSwapDir = None,
    update: options.Update = None,
    param_dtype: options.ParamDtype = None,
    moments: options.Moments = None,
    config: options.ConfigFile = None,
    commits: options.PlanCommits = False,
    actions: options.Actions = False,
    zero_table: options.ZeroTable = False,
    plot: options.Plot = None,
    json: options.Json = False,
) -> None:
    """Say whether a model fits, where its bytes go, and how long a step takes. Exit code 1 if it does not fit."""
    from tiermem.cli import disk, plan_plot
    from tiermem.cli import plan as planning
    from tiermem.cli.train import make_config, named_directories
    from tiermem.planner.parts import division_of

    named = _named(model, model_option, parameters)
    _refuse_two_machines(machine, measure)
    with options.wrong_usage():
        division_of(ranks, copies)
    if plot is not None:
        disk.require_drawable(plot)
    what = planning.PlanOptions(
        model=named,
        parameters=parameters,
        machine=machine,
        measure=measure,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        ranks=ranks,
        copies=copies,
        commits=commits,
    )
    directories = named_directories(config, swap_dir or ()) or [Path.cwd()]
    overrides = {"host_memory": host_memory, "device_memory": device_memory, "moments": moments}
    overrides |= {"update": update, "param_dtype": param_dtype}
    settings = make_config(config, directories, overrides)
    found = planning.plan(what, settings, with_actions=actions)
    _show_plan(found, with_zero_table=zero_table, json=json)
    if not found.fits:
        raise typer.Exit(fail(planning.missing_sentence(found), 1))
    if plot is not None:
        plan_plot.plot_plan(found, plot)
    _remark(found, settings, measured=machine is None)


def _remark(found: Prediction, settings: Config, *, measured: bool) -> None:
    from tiermem.cli import beginning

    console, has_device = terminal(stderr=True), found.machine.device is not None
    beginning.say_unused(settings, console, has_device=has_device)
    if measured and not has_device:
        beginning.say_slow(settings.dtype, console)


def _refuse_two_machines(machine: str | None, measure: bool) -> None:
    if machine is not None and measure:
        raise typer.BadParameter("expected --measure, which measures this machine, or --machine, not both")


def _named(model: str | None, model_option: str | None, parameters: str | None) -> str | None:
    """The model that is named, or None for a number of parameters. Wrong usage unless there is one of the two."""
    from tiermem.cli.modelwork import is_count, parse_count
    from tiermem.planner.workload import require_plannable

    if (model, model_option, parameters).count(None) != 2:
        raise typer.BadParameter(
            "expected one of MODEL, --model and --parameters; such as llama-8b, or --parameters 70B"
        )
    named = model_option if model is None else model
    if named == "":
        raise typer.BadParameter("expected the name of a model, or a config.json, found nothing")
    count = parameters if named is None or not is_count(named) else named
    with options.wrong_usage():
        if count is not None:
            require_plannable(parse_count(count))
    return named


def _show_plan(found: Prediction, *, with_zero_table: bool, json: bool) -> None:
    from tiermem.cli import plan as planning

    zero = planning.zero_rows(found) if with_zero_table else None
    if json:
        print_object(planning.to_json(found, zero))
    else:
        print_table(planning.to_table(found, zero))


def tune(
    model: options.Model = "llama-20m",
    batch: options.Batch = 4,
    seq: options.Seq = 256,
    accumulate: options.Accumulate = 1,
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
    machine: options.Machine = None,
    measure: options.Measure = False,
    steps: options.MeasuredSteps = 5,
    best: options.Best = 3,
    output: options.Output = None,
    json: options.Json = False,
) -> None:
    """Find the settings with which a model trains fastest here: by simulation, then by a few measured steps."""
    _refuse_two_machines(machine, measure)
    from tiermem.cli import tune_steps
    from tiermem.cli.disk import require_writable, swap_directories
    from tiermem.cli.subject import TrainOptions
    from tiermem.cli.train import make_config, named_directories

    what = TrainOptions(
        model=model,
        steps=max(1, steps),
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        seed=seed,
        texts=tuple(text or ()),
        tokenizer=tokenizer,
        gradient_checkpointing=gradient_checkpointing,
    )
    # Its trials make directories of their own in these; and these last, so that the file can name them.
    # From anywhere: with the names made absolute.
    asked = [directory.absolute() for directory in named_directories(config, swap_dir or ()) or [Path.cwd()]]
    if output is not None:
        require_writable("--output", output)
    overrides = {"host_memory": host_memory, "device_memory": device_memory, "moments": moments}
    overrides |= {"update": update, "param_dtype": param_dtype}
    with swap_directories(asked, keep=False) as directories:
        settings = make_config(config, directories, overrides)
        choice = tune_steps.Choice(machine=machine, again=measure, steps=steps, best=best, output=output)
        report = tune_steps.tune_training(what, settings, choice, terminal(stderr=True))
    if json:
        print_object(report.to_json())
    else:
        print_table(report.to_table(), in_one_line=True)
    if report.output_error is not None:
        raise TiermemError(report.output_error)
