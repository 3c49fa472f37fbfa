"""What a user does, drawn at random, has the bits of plain PyTorch; `tools/random_training.py` draws many more."""

from __future__ import annotations

import pytest
import torch
from doubles_combinations import some_of

from tools.draws import LATER, WIDER, draw
from tools.later_verbs import LATER_VERBS
from tools.random_training import alone, difference
from tools.subjects import FIRST_MODELS, MODELS, WIDER_MODELS
from tools.verbs import VERBS

# Some have found something: 4, 113 (gradients of micro-batches together, with parts that are kept in memory), 278 (a
# new optimizer, whose first clipping came too late), 500407 (an update without room, where a view had been kept),
# 1006081 (a buffer that had come with the model, lost by a resume).
NUMBERS = some_of([4, 5, 113, 278], [0, 1, 2, 3, 6, 7, 500407, 1006081])


@pytest.mark.filterwarnings("ignore:.*not finite:UserWarning")  # a step is skipped, as was drawn
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # a checkpoint, evaluated
@pytest.mark.parametrize("number", NUMBERS)
def test_a_training_drawn_at_random_has_the_bits_of_plain_pytorch(number, tmp_path):
    assert alone(number, tmp_path) == ""


def test_a_draw_is_the_same_every_time_and_all_is_drawn():
    assert draw(3) == draw(3)
    drawn = [draw(number) for number in range(300)]
    assert {each.model for each in drawn} == set(FIRST_MODELS)
    verbs = {verb for each in drawn for step in each.steps for verb in (*step.before, *step.behind)}
    assert verbs >= {"write", "drop", "overflow", "fail", "resume", "move", "commit", "snapshot"}
    assert verbs >= {"save", "anew", "another_optimizer"}
    assert {each.scaled for each in drawn} == {True, False}
    for_good = [each for each in drawn if each.config["update"] == "backward" and not each.clip]
    assert for_good
    assert all(not step.before for each in for_good for step in each.steps)


def test_later_draws_are_wider():
    drawn = [draw(number) for number in range(WIDER, WIDER + 300)]
    assert {each.model for each in drawn} == set(FIRST_MODELS | WIDER_MODELS)
    steps = [step for each in drawn for step in each.steps]
    assert {verb for step in steps for verb in (*step.before, *step.behind)} == set(VERBS)
    assert {step.order for step in steps} == {"", "sum", "row"}
    assert {step.frozen for step in steps} == {0, 1, 2}
    assert {(each.apart, each.from_file) for each in drawn} == {(one, other) for one in (0, 1) for other in (0, 1)}
    assert {each.places for each in drawn} == {1, 2, 3}
    for_good = [each for each in drawn if each.config["update"] == "backward" and not each.clip]
    assert all(not step.before and step.order == each.steps[0].order for each in for_good for step in each.steps)


def test_the_latest_draws_have_all():
    drawn = [draw(number) for number in range(LATER, LATER + 600)]
    assert {each.model for each in drawn} == set(MODELS)
    steps = [step for each in drawn for step in each.steps]
    assert {verb for step in steps for verb in (*step.before, *step.behind)} == {*VERBS, *LATER_VERBS}
    assert {step.inside for step in steps} == {step.mixed > 0 for step in steps} == {True, False}
    assert {bool(step.amid) for step in steps} == {each.hooked > 0 for each in drawn} == {True, False}
    for_good = [each for each in drawn if each.config["update"] == "backward" and not each.clip]
    assert all(not step.before and "closure" not in step.behind for each in for_good for step in each.steps)


def test_a_difference_is_found():
    one, other = torch.tensor([1.0, float("nan")]), torch.tensor([1.0000001, float("nan")])
    assert difference([("a", one), ("b", None)], [("a", one.clone()), ("b", None)]) == ""
    assert "0, a: " in difference([("a", one)], [("a", other)])
    assert difference([("a", one)], [("a", other)], near=0.01) == ""
    assert "nothing is there" in difference([("a", None)], [("a", one)])
    assert "1 things were seen where 2" in difference([("a", one)], [("a", one), ("b", one)])
