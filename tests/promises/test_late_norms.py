"""Where a device says late whether gradients are finite, updates begin later, and nothing else changes."""

from __future__ import annotations

import itertools

import pytest
from doubles_combinations import each_of, some_of
from doubles_scenarios import LATE_ONLY, SCENARIOS
from doubles_training import check, offloaded, plain

from tiermem.optim.late import LateNorms
from tiermem.zero3.norm_reader import NormReader

SOME = (
    "stack, tied embedding",
    "module used twice",
    "branches",
    "parts of a unit without gradient",
    "exception inside a unit",
    "checkpoint, reentrant",
    "two backwards a step",
    "optimizer of some parameters",
    "max_grad_norm",
)


ANSWERS = [(False,), (False, True), (False, False, False, True), (True, True, False)]
CASES = each_of(SOME, ["backward", "auto"], ANSWERS) + each_of(LATE_ONLY, ["auto"], ANSWERS)


@pytest.mark.parametrize(
    ("name", "update", "answers", "budget"),
    # Each of the two answers that a case is left with meets one budget, in the next case the other one.
    some_of(
        *(
            [(*case, budgets[(number // 2 + number) % 2]) for number, case in enumerate(CASES)]
            for budgets in (("generous", "least"), ("least", "generous"))
        )
    ),
)
def test_same_numbers(name, update, answers, budget, tmp_path, monkeypatch):
    scenario, answer, told = (SCENARIOS | LATE_ONLY)[name], itertools.cycle(answers), []
    known_since = LateNorms.known_since
    monkeypatch.setattr(NormReader, "are_known", lambda reader, norms: next(answer))
    monkeypatch.setattr(LateNorms, "known_since", lambda late: told.append(known_since(late)) or told[-1])
    found = offloaded(scenario.make, scenario.script, tmp_path, update=update, budget=budget, units=scenario.units)
    monkeypatch.undo()
    check(found, plain(scenario.make, scenario.script))
    if (name, update) == ("stack, tied embedding", "backward"):
        assert any(told) == (True in answers), "some are told of behind others"
