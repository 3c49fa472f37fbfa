"""A run of `tiermem train` whose commits fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import swap
from tiermem.cli import main
from tiermem.cli.report import StepReport
from tiermem.cli.train import Training


@pytest.mark.parametrize(("options", "first"), [(["--keep"], 1), (["--commit-every", "2"], 2)])
def test_a_first_commit_that_fails_ends_the_run_with_the_next_step(
    options: list[str],
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Not ten minutes later, with the next commit, nor at the end: what is trained until then would be lost."""
    begun: list[int] = []
    step = Training.step

    def note(training: Training, number: int) -> StepReport:
        begun.append(number)
        if training._committing is not None:
            training._committing.wait_ended()
        return step(training, number)

    def fail(*_: object) -> None:
        raise swap.SwapFullError("no room for a manifest")

    monkeypatch.setattr(Training, "step", note)
    monkeypatch.setattr("tiermem.runtime.commits.take_checksums", fail)
    short = ["train", "--model", "llama-tiny", "--steps", "5", "--batch", "1", "--seq", "8", "--host-memory", "4MiB"]
    assert main.run([*short, "--swap-dir", str(tmp_path), *options]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "tiermem: no room for a manifest"
    assert begun == [*range(first + 1)]
