"""The oldest libraries that are allowed, as pip is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.oldest import main, oldest

ROOT = Path(__file__).parents[1]
PROJECT = """
[project]
dependencies = ["torch>=2.11,<2.16", "numpy>=1.26"]
[project.optional-dependencies]
hf = ["transformers>=5.4"]
plots = ["matplotlib>=3.10.7"]
test = ["pytest>=8", "transformers>=5.4"]
"""


def test_lower_bounds_become_versions_and_torch_is_left_to_the_caller() -> None:
    assert oldest(PROJECT) == ["matplotlib==3.10.7", "numpy==1.26", "pytest==8", "transformers==5.4"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("numpy>=1.26", "numpy", "expected a requirement like name>=1.2, found 'numpy'"),
        ("numpy>=1.26", "numpy<2", "found 'numpy<2'"),
        ('hf = ["transformers>=5.4"]', 'hf = ["transformers>=5.2"]', "transformers has two lower bounds, 5.2 and 5.4"),
    ],
)
def test_what_has_no_bound_or_two_is_refused(
    before: str, after: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PROJECT.replace(before, after)
    assert text != PROJECT
    with pytest.raises(ValueError, match=re.escape(message)):
        oldest(text)
    (tmp_path / "pyproject.toml").write_text(text)
    assert main([str(tmp_path / "pyproject.toml")]) == 1
    assert message in capsys.readouterr().err


def test_all_that_this_project_needs_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    named = {line.partition("==")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"numpy", "numba", "transformers", "accelerate", "pytest"} <= named
    assert "torch" not in named
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {name.replace("_", "-") for name in named} <= {name.replace("_", "-") for name in pinned}


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.toml")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
