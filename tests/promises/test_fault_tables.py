"""The tables of faults beside the code name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = "| fault | what happens | test |"


def rows(table: str) -> list[list[str]]:
    lines = (ROOT / table).read_text(encoding="utf-8").splitlines()
    begin = lines.index(HEADER) + 2
    end = next((index for index in range(begin, len(lines)) if not lines[index].startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin:end]]


@pytest.mark.parametrize("table", ["swap/FAULTS.md", "tiermem/checkpoint/FAULTS.md"])
def test_every_row_names_a_test_that_exists(table: str) -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    found = rows(table)
    assert len(found) > 15
    for fault, what_happens, named in found:
        assert fault
        assert what_happens
        names = re.findall(r"`(test_\w+)`", named)
        assert names, f"{fault}: no test is named"
        assert tests.issuperset(names), f"{fault}: {sorted(set(names) - tests)} are not tests"
