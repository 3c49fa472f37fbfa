"""The options of the command line, each written once.

Owns the names, types, ranges and help texts that the commands share. Does not know what a command does with them.
Guarantees that an option means the same in every command that has it, and that a value which it never takes is wrong
usage, found before anything is done.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tiermem
from tiermem.cli.disk import require_picture
from tiermem.errors import ConfigError
from tiermem.memory.sizes import parse_bytes
from tiermem.settings_file import form_of
from tiermem.wear import parse_endurance

# The update computes in float32, and divides the rate by less than 1 in its first steps.
LARGEST_LR = 1e30
# Of steps, batches, tokens, ranks: more is a slip of the hand, and what follows from several of them is to be finite.
LARGEST_NUMBER = 10**9


def _path_of(name: str, check: Callable[[Path], object] = lambda _: None) -> Callable[[str], Path]:
    def parse(text: str) -> Path:
        if not text:  # which Path takes for the current directory
            expected = "expected a path, found an empty text; write . for the current directory"
            raise typer.BadParameter(expected, param_hint=name)
        path = Path(os.path.expanduser(text))  # as Config takes it: shells leave that of --swap-dir=~/run alone
        with wrong_usage(name):
            check(path)
        return path

    return parse


def path_option(
    name: str,
    *more: str,
    help: str,  # noqa: A002 - typer's word
    check: Callable[[Path], object] = lambda _: None,
    check_all: Callable[[Any], Any] | None = None,
) -> Any:
    """The option `name`, whose value is a path; wrong usage if it is an empty text, or one that `check` refuses.

    `check_all`: returns all values of a repeatable one, or raises BadParameter.
    """
    return typer.Option(name, *more, help=help, metavar="PATH", parser=_path_of(name, check), callback=check_all)


def name_option(*names: str, help: str) -> Any:  # noqa: A002 - as above
    """An option whose value is a name of ours or a path."""
    return typer.Option(*names, help=help, metavar="TEXT", parser=os.path.expanduser)


def _different(directories: list[Path] | None) -> list[Path] | None:
    named = directories or []
    if len(set(map(os.path.realpath, named))) < len(named):
        found = ", ".join(map(str, named))
        raise typer.BadParameter(
            f"expected different directories, found {found}; name each once", param_hint="--swap-dir"
        )
    return directories


@contextmanager
def wrong_usage(name: str | None = None, setting: str = "") -> Iterator[None]:
    """Make a ConfigError wrong usage (exit code 2), of the option `name` if it is one's.

    `setting`: what `Config` calls that option; removed from the front of its message.
    """
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error).removeprefix(f"{setting}: "), param_hint=name) from None


def checked_option(name: str, check: Callable[[str], object], *, help: str, setting: str = "") -> Any:  # noqa: A002
    """The option `name`, whose value stays the text that is given; wrong usage if `check` refuses it."""

    def parse(text: str) -> str:
        with wrong_usage(name, setting):
            check(text)
        return text

    return typer.Option(name, help=help, metavar="TEXT", parser=parse)


def setting_option(name: str, *, help: str) -> Any:  # noqa: A002 - as above
    """The option `name`, whose value is what `Config` takes by that name."""
    setting = name.removeprefix("--").replace("-", "_")

    def check(text: str) -> None:
        tiermem.Config(swap_dirs=["."], **{setting: text})  # type: ignore[arg-type]  # it says what it takes

    return checked_option(name, check, help=help, setting=setting)


def _positive_size(text: str) -> None:
    if parse_bytes(text) == 0:
        raise ConfigError(f"expected a positive size, found {text!r}")


def number_option(
    *names: str,
    expected: str,
    fits: Callable[[float], bool],
    metavar: str,
    help: str,  # noqa: A002 - as above
    kind: type[int | float] = float,
) -> Any:
    """An option whose value is a number that `fits`; wrong usage, with what was `expected` and what was found, if not.

    Typer's own words for that do not have the value. NaN fits nothing.
    """

    def parse(text: Any) -> float:  # text, or the default
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not fits(number):
            raise typer.BadParameter(f"expected {expected}, found {str(text)!r}", param_hint=names[0])
        return number

    return typer.Option(*names, help=help, metavar=metavar, parser=parse)


def whole_option(name: str, *, help: str, least: int = 1, most: int = LARGEST_NUMBER) -> Any:  # noqa: A002 - as above
    """The option `name`, whose value is a whole number from `least` to `most`."""
    limit = most if most < LARGEST_NUMBER else ""  # more digits take the room of the options' names in --help
    return number_option(
        name,
        expected=f"a whole number from {least} to {most}",
        fits=lambda number: least <= number <= most,
        metavar=f"INTEGER {least}..{limit}",
        help=help,
        kind=int,
    )


Model = Annotated[
    str,
    name_option("--model", "-m", help="A preset, or a Hugging Face config.json (or its folder)."),
]
Steps = Annotated[int, whole_option("--steps", help="Optimizer steps in all, resumed ones included.")]
Batch = Annotated[int, whole_option("--batch", help="Sequences in a batch.")]
Seq = Annotated[int, whole_option("--seq", least=2, help="Tokens in a sequence.")]
Accumulate = Annotated[int, whole_option("--accumulate", help="Batches whose gradients are added up for a step.")]
Vertical = Annotated[
    bool, typer.Option("--vertical", help="Take all batches of a step through a unit before the next unit.")
]
LearningRate = Annotated[
    float,
    number_option(
        "--lr",
        expected=f"a number from 0 to {LARGEST_LR:g}",
        fits=lambda rate: 0 <= rate <= LARGEST_LR,
        metavar=f"FLOAT 0..{LARGEST_LR:g}",
        help="Peak learning rate of AdamW.",
    ),
]
Seed = Annotated[int, whole_option("--seed", least=0, most=2**64 - 1, help="Seed of the weights and the batches.")]
Text = Annotated[
    list[Path] | None,
    path_option(
        "--text",
        help="Text file, or directory, in which hidden files and links to directories are left out; repeatable. "
        "Default: the Python standard library's sources.",
    ),
]
TokenizerFile = Annotated[Path | None, path_option("--tokenizer", help="A tokenizer.json. Default: bytes are tokens.")]
HostMemory = Annotated[
    str | None, setting_option("--host-memory", help="Budget of model state in host memory, such as 512MiB, or auto.")
]
DeviceMemory = Annotated[
    str | None,
    setting_option("--device-memory", help="Budget of model state on the accelerator, such as 20GiB, or auto."),
]
SwapDir = Annotated[
    list[Path] | None,
    path_option(
        "--swap-dir",
        check_all=_different,
        help="Directory for swap files; repeatable. Default: a new one here, removed afterwards.",
    ),
]
ExaminedSwapDir = Annotated[
    list[Path] | None,
    path_option(
        "--swap-dir",
        check_all=_different,
        help="Directory to examine for swapping; repeatable. Default: the current one.",
    ),
]
Update = Annotated[
    str | None, setting_option("--update", help="When states are updated: backward, forward, step, auto.")
]
ParamDtype = Annotated[
    str | None, setting_option("--param-dtype", help="What the model computes in: bfloat16, float32, float16.")
]
Moments = Annotated[
    str | None, setting_option("--moments", help="How AdamW's moments are kept: float32, or int8 in blocks.")
]
ConfigFile = Annotated[
    Path | None, path_option("--config", check=form_of, help="A tiermem configuration file; options go on top.")
]
GradientCheckpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Recompute activations in backward instead of keeping them.")
]
OffloadActivations = Annotated[
    bool, typer.Option("--offload-activations", help="Keep large activations in the budget and on disk until backward.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what the swap directories hold.")]
Keep = Annotated[bool, typer.Option("--keep", help="Commit, and leave the swap files; --resume goes on from there.")]
CommitEvery = Annotated[
    int | None,
    whole_option(
        "--commit-every",
        least=0,
        help="Commit each time this many steps are done, and at the end, and keep the swap files. With --keep or "
        "--resume 0 is at the end only; there, unless this is given: after the first step, every ten minutes, and at "
        "the end.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Begin anew where a committed run is, which is lost; not with --resume.")
]
SnapshotPaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATHS...",
        parser=_path_of("PATHS"),
        help="All swap directories of a run, in its order; or the folder of one snapshot.",
    ),
]
NewFolder = Annotated[Path, path_option("--to", help="Folder to write; a free name, or an empty folder.")]
MaxShardSize = Annotated[
    str, checked_option("--max-shard-size", _positive_size, help="Most bytes of a file of weights, such as 5GB.")
]
MOST_RANKS = 1 << 16  # `checkpoint.resharding.LARGEST_WORLD`, which would bring torch along
Ranks = Annotated[
    int, whole_option("--ranks", most=MOST_RANKS, help="How many ranks the snapshot is to have files for.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
WeightsPath = Annotated[
    Path | None,
    path_option("--weights", help="Start from a safetensors file or a Hugging Face folder. Default: at random."),
]
Timeline = Annotated[Path | None, path_option("--timeline", help="Write a Chrome/Perfetto trace to this file.")]
Endurance = Annotated[
    str | None,
    checked_option(
        "--endurance",
        lambda text: parse_endurance(text, capacity=1 << 60),  # with any drive's, little enough is nothing at all
        help="What the drives stand, to say how long they last: 600TB, or 1DWPD@2TB (drive writes per day, capacity).",
    ),
]
TensorBoard = Annotated[
    Path | None, path_option("--tensorboard", help="Write loss, speed and bandwidth as scalars to this directory.")
]
Report = Annotated[
    bool, typer.Option("--report", help="Say what the computation waited for, and what would have prevented it.")
]
PlanModel = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        parser=os.path.expanduser,
        help="A preset, a Hugging Face config.json (or its folder), or a number of parameters: 70B.",
    ),
]
PlanModelOption = Annotated[
    str | None, name_option("--model", "-m", "--config-json", help="The same as MODEL, by the name that train has.")
]
Parameters = Annotated[
    str | None, typer.Option("--parameters", help="A transformer with this many parameters instead, such as 70B.")
]
Machine = Annotated[
    str | None,
    name_option("--machine", help="A profile: a shipped name or a TOML file. Default: this machine, measured once."),
]
Measure = Annotated[bool, typer.Option("--measure", help="Measure this machine again instead of what is cached.")]
PlanRanks = Annotated[int, whole_option("--ranks", help="Processes, one for each GPU, over whole nodes.")]
PlanCopies = Annotated[
    int, whole_option("--copies", help="Copies of the model, each divided over ranks / copies (a mesh= of two).")
]
PlanCommits = Annotated[bool, typer.Option("--commits", help="Have room on disk for commits: two copies of state.")]
Actions = Annotated[
    bool, typer.Option("--actions", help="Also say what is fetched, written and evicted when, and why.")
]
ZeroTable = Annotated[bool, typer.Option("--zero-table", help="Also the bytes a GPU needs by ZeRO stage and offload.")]
Plot = Annotated[
    Path | None, path_option("--plot", check=require_picture, help="Draw it into this .png, .svg or .pdf (matplotlib).")
]
MeasuredSteps = Annotated[
    int, whole_option("--steps", least=0, help="Measured steps of each candidate; 0: decide by simulation alone.")
]
Best = Annotated[int, whole_option("--best", help="How many of the best simulated settings are measured.")]
Output = Annotated[
    Path | None, path_option("--output", "-o", check=form_of, help="Write the choice to this .toml or .json file.")
]


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tiermem {tiermem.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the versions and exit.")
]
