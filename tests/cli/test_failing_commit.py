"""A run of `tiermem train` whose commits fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import swap
from tiermem.cli import main
from tiermem.cli.report import StepReport
from tiermem.cli.train import Training


def test_a_first_commit_that_fails_ends_the_run_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not ten minutes later, nor at the end: what is trained until then would be lost."""
    begun: list[int] = []
    step = Training.step

    def note(training: Training, number: int) -> StepReport:
        begun.append(number)
        return step(training, number)

    def fail(*_: object) -> None:
        raise swap.SwapFullError("no room for a manifest")

    monkeypatch.setattr(Training, "step", note)
    monkeypatch.setattr("tiermem.runtime.commits.take_checksums", fail)
    short = ["train", "--model", "llama-tiny", "--steps", "5", "--batch", "1", "--seq", "8", "--host-memory", "4MiB"]
    assert main.run([*short, "--swap-dir", str(tmp_path), "--keep"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "tiermem: no room for a manifest"
    assert begun == [0, 1]
