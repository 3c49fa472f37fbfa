"""The commands below `tiermem snapshot`.

Owns their names and options. Does not do their work (`snapshot.py`), and imports it only when a command runs.
Guarantees one JSON object on stdout with `--json`, and exit code 1 for damage.
"""

from __future__ import annotations

import json as json_module
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from tiermem.cli import options
from tiermem.cli.terminal import fail, print_object, print_table
from tiermem.memory.sizes import parse_bytes

if TYPE_CHECKING:
    from tiermem.cli.snapshot_report import SnapshotReport, WrittenReport

app = typer.Typer(
    help="List, verify, export and reshard what is in swap directories or in a snapshot.", no_args_is_help=True
)


@app.command("list")
def list_command(paths: options.SnapshotPaths, json: options.Json = False) -> None:
    """Say what is committed in the swap directories of a run, or what a snapshot holds.

    Exit code 1 if nothing is, or where what several ranks have is not one whole commit.
    """
    from tiermem.cli.snapshot import look

    show_found(look(paths), json=json)


@app.command("verify")
def verify_command(paths: options.SnapshotPaths, json: options.Json = False) -> None:
    """Read every byte of a commit or a snapshot and compare its checksums. Exit code 1 if something is damaged."""
    from tiermem.cli.snapshot import verify

    show_found(verify(paths), json=json)


@app.command("export")
def export_command(
    paths: options.SnapshotPaths,
    to: options.NewFolder,
    max_shard_size: options.MaxShardSize = "5GB",
    json: options.Json = False,
) -> None:
    """Write the weights of a commit or a snapshot as safetensors that transformers' from_pretrained reads."""
    from tiermem.cli.snapshot import export

    show(export(paths, to, max_shard_nbytes=parse_bytes(max_shard_size)), json=json)


@app.command("reshard")
def reshard_command(
    paths: options.SnapshotPaths, to: options.NewFolder, ranks: options.Ranks, json: options.Json = False
) -> None:
    """Write a commit or a snapshot as a snapshot with the files of so many ranks, and verify it."""
    from tiermem.cli.snapshot import rewrite

    show(rewrite(paths, to, ranks=ranks), json=json)


def show_found(report: SnapshotReport, *, json: bool) -> None:
    """Print what was found; exit code 1, and a line on stderr, where something is wrong with it."""
    show(report, json=json)
    if problems := report.problems():
        raise typer.Exit(fail(problems, 1))


def show(report: SnapshotReport | WrittenReport, *, json: bool) -> None:
    """Print a report; in JSON tuples of a caller's `extra` are lists, as everywhere else there."""
    if json:
        print_object(json_module.dumps(_finite(asdict(report)), allow_nan=False))
    else:
        print_table(report.to_table())


def _finite(value: Any) -> Any:
    """The same with null for numbers that are not finite, as a caller's `extra` may have them: JSON holds none."""
    from tiermem.runtime.extra import MARK

    if isinstance(value, dict):
        if value.get(MARK) == "tuple":
            return _finite(value["items"])
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
