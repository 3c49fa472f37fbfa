"""A `swap` of the user's beside his script: the name of a place for swap files, and of our package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def imported_in(directory: Path) -> subprocess.CompletedProcess[str]:
    line = "import tiermem, swap; print(swap.SwapSpace.__name__)"
    return subprocess.run([sys.executable, "-c", line], cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("line", ["x = 1\n", ""])
def test_a_script_of_that_name_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "swap.py").write_text(line)
    ran = imported_in(tmp_path)
    assert ran.returncode == 1
    expected = f"ImportError: tiermem needs its own package swap, which is hidden by {tmp_path / 'swap.py'}: give that"
    assert expected in ran.stderr


def test_a_directory_of_that_name_hides_nothing_or_is_named(tmp_path: Path) -> None:
    """What is installed as a link to a checkout is found behind all directories, and is hidden by one."""
    (tmp_path / "swap").mkdir()
    ran = imported_in(tmp_path)
    hidden = f"which is hidden by {tmp_path / 'swap'}: give that another name"
    assert ran.stdout == "SwapSpace\n" or hidden in ran.stderr
