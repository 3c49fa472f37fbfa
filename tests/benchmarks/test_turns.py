"""Contenders in turns: one works at a time, the order turns round, who dies is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from turns import Player, PlayerError, take_turns

# Writes down when each of its steps began and ended, dies at a step if told to.
CONTENDER = """
import json, sys
name, log, dies = sys.argv[1], sys.argv[2], int(sys.argv[3])
count = 0
for count, line in enumerate(sys.stdin, 1):
    if count == dies:
        sys.exit("the drive is gone")
    with open(log, "a") as file:
        print("begin", name, file=file)
        print("end", name, file=file)
    print("done", flush=True)
print(json.dumps({"steps": count}))
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def player(name: str, log: Path, dies: int = 0) -> Player:
    return Player(name, [sys.executable, "-c", CONTENDER, name, str(log), str(dies)], dict(os.environ))


def test_one_works_at_a_time_and_the_order_turns_round(log: Path) -> None:
    with player("a", log) as first, player("b", log) as second:
        blocks = take_turns([first, second], warm_up=1, rounds=3, steps=2)
        outcomes = [one.finish() for one in (first, second)]
    assert [[len(block) for block in own] for own in blocks] == [[2, 2, 2]] * 2
    assert all(seconds > 0 for own in blocks for block in own for seconds in block)
    assert outcomes == [{"steps": 1 + 3 * 3}] * 2
    lines = log.read_text().splitlines()
    assert lines[::2] == [line.replace("end", "begin") for line in lines[1::2]]
    assert [line[-1] for line in lines[::2]] == list("ab" + "aaabbb" + "bbbaaa" + "aaabbb")


@pytest.mark.parametrize("dies", [1, 3])
def test_who_dies_is_named_with_its_last_words(log: Path, dies: int) -> None:
    with (
        player("a", log) as first,
        player("b", log, dies) as second,
        pytest.raises(PlayerError, match="exit code 1: the drive is gone") as caught,
    ):
        take_turns([first, second], warm_up=1, rounds=3, steps=2)
    assert caught.value.name == "b"
