"""Several ranks have the numbers of one process on all of the data, and tell each other when something goes wrong.

Those of other stages and dtypes, and of experts, are in `test_ranks_device.py`, where devices are held to them.

Tolerance: in float32 the mean over ranks is rounded once more than the sum over rows, about 1e-7 of a gradient, and
AdamW divides by its magnitude; after three steps at lr=1e-3 weights may differ by 1e-6. Runs repeat bit by bit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import doubles_rank_idioms as idioms
import doubles_rank_scenarios as scenarios
import pytest
import torch
from doubles_combinations import some_of
from doubles_python import WarmPython
from doubles_rank_checks import NEAR, check, plain
from doubles_ranks import PATIENCE, Reports, run_jobs, values
from doubles_training import PlainAdamW

pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]

# Of what is done with several sizes, and of models, the others where all are asked for.
SIZES = some_of([2, 3], [4])
REPEATED = some_of([2], [3, 4])
MODELS = dict(some_of([("mixture", (idioms.mixtral, 1))], [("plain_llama", (scenarios.llama, 2))]))
TOGETHER = ["llama_together", "odd_together"]
MORE = ["stage_1_tight", "odd_tight", "odd_coalesced", *TOGETHER]
WAYS = ["asked_ahead", "lora", *MODELS, "autocast", "experts_as_units"]
WRONG = ["an_expert_without_tokens", "two_dimensions", "another_order", "one_fails", "one_cannot_begin"]


@pytest.fixture(scope="module")
def reports(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    directory = tmp_path_factory.mktemp("ranks")
    failing = ["one_fails", "one_dies"]
    more = {2: [*MORE, *WAYS, *WRONG], 3: failing, 4: []}
    odd = {size: [*["odd"] * (size in SIZES), *["odd_again"] * (size in REPEATED)] for size in more}
    jobs = [(size, [*odd[size], *names]) for size, names in more.items() if [*odd[size], *names]]
    return run_jobs(warm_python, directory, jobs)


@pytest.mark.parametrize("size", SIZES)
def test_the_numbers_of_one_process_on_all_rows(reports, size):
    check(values(reports[size, "odd"]), plain(scenarios.Odd))


@pytest.mark.parametrize("size", REPEATED)
def test_a_run_repeats_bit_by_bit_and_begins_with_the_values_of_rank_0(reports, size):
    first, second = values(reports[size, "odd"]), values(reports[size, "odd_again"])
    for one, other in zip(first, second, strict=True):
        assert one["losses"] == other["losses"]
        assert one["norm"] == other["norm"]
        for name, weights in one["weights"].items():
            assert torch.equal(weights, other["weights"][name]), name


def test_gradients_without_room_go_to_swap(reports):
    """The least budget, with two batches a step: a step's gradients are far more than it."""
    found = values(reports[2, "odd_tight"])
    check(found, plain(scenarios.Odd, accumulate=2))
    assert all(each["gradients_crossed"] > 0 for each in found)
    assert all(each["tiers"]["HOST"][0] == each["least"] for each in found)


def test_whole_gradients_go_to_swap(reports):
    check(values(reports[2, "stage_1_tight"]), plain(scenarios.Odd, accumulate=2))


def test_small_units_that_have_become_one(reports):
    check(values(reports[2, "odd_coalesced"]), plain(scenarios.Odd, accumulate=2))


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(reports, name):
    """A mixture of experts; also a Llama, which others train in adapters and by micro-batches together."""
    make, accumulate = MODELS[name]
    check(values(reports[2, name]), plain(make, accumulate=accumulate))


@pytest.mark.parametrize(("name", "make", "cut"), [("llama", scenarios.llama, True), ("odd", scenarios.Odd, False)])
def test_micro_batches_together(reports, name, make, cut):
    found = values(reports[2, f"{name}_together"])
    assert [each["cut"] for each in found] == [cut, cut]
    check(found, plain(make, accumulate=2))


def test_adapters_of_peft_on_a_frozen_base(reports):
    check(values(reports[2, "lora"]), plain(idioms.adapted))


def test_autocast(reports):
    """The gradient of a weight is rounded to bfloat16 on each rank before they are added up."""
    near = {"atol": 6e-3, "rtol": 2e-2}
    check(values(reports[2, "autocast"]), plain(idioms.Cast), near=near)


def test_experts_that_are_units_of_their_own_where_all_ranks_use_all(reports):
    first, second = values(reports[2, "experts_as_units"])
    torch.manual_seed(1)
    model = scenarios.Experts()
    optimizer = PlainAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(2):
        scenarios.loss_of(model, first["rows"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(first["weights"][name], parameter.detach(), **NEAR)
        assert torch.equal(first["weights"][name], second["weights"][name])


def test_each_rank_keeps_its_part(reports):
    """Disk per rank: the unsharded run's divided by the ranks, and a page for each tile and unit besides."""
    sizes = {size: values(reports[size, "odd"])[0]["tiers"]["SWAP"][0] for size in SIZES}
    pages = 7 * 4 * 2 * 4096  # units x pages of each x copies
    for fewer, more in pairwise(SIZES):
        assert sizes[more] < sizes[fewer]
        assert more * (sizes[more] - pages) <= 2 * sizes[2] <= more * sizes[more]


def test_waiting_for_the_others_is_counted(reports):
    for found in values(reports[2, "odd"]):
        for_ranks, stalled = found["waited"]
        assert 0 < for_ranks <= stalled


@pytest.mark.parametrize("stage", [3, 1])
def test_room_for_a_bucket_is_asked_for_before_its_first_gradient(reports, stage):
    for found in values(reports[2, "asked_ahead"]):
        taken, left = found[stage]
        assert taken == [(unit, True) for unit in (3, 2, 1, 0)]
        assert not left, "what did not come was given up"


# What goes wrong


def errors(reports: list[Any]) -> list[tuple[str, str]]:
    assert all(report is not None and report.error is not None for report in reports), reports
    return [report.error for report in reports]


def test_another_order_is_an_error_on_every_rank_naming_ranks_and_units(reports):
    for kind, text in errors(reports[2, "another_order"]):
        assert kind == "TiermemError"
        assert "rank 0 gathers unit 2 (layers.0)" in text
        assert "rank 1 gathers unit 4 (layers.2)" in text


def test_an_expert_of_its_own_without_tokens_on_one_rank_is_named_on_all(reports):
    for kind, text in errors(reports[2, "an_expert_without_tokens"]):
        assert kind == "TiermemError"
        assert "rank 0 gathers unit 1 (layers.0.experts.0)" in text
        assert "rank 1 gathers unit 2 (layers.0.experts.1)" in text
        assert "make what surrounds them one unit (units=)" in text


def test_copies_that_nobody_shares_are_refused_before_anything_is_touched(reports):
    for found in values(reports[2, "two_dimensions"]):
        assert found["told"].startswith("ConfigError: mesh= of two dimensions expects at least two ranks in the last")
        assert found["untouched"]


@pytest.mark.parametrize("size", [2, 3])
def test_the_others_learn_which_rank_failed_and_why(reports, size):
    found = errors(reports[size, "one_fails"])
    assert found[1][0] == "ValueError"
    for rank, (kind, text) in enumerate(found):
        if rank != 1:
            assert kind == "TiermemError"
            assert "rank 1: closed its runtime because of ValueError: the data of rank 1 are spoilt" in text
            assert "Timed out" not in text, "noticed because the connection ended, not for want of an answer"


def test_a_rank_that_cannot_begin_is_told_to_all(reports):
    found = errors(reports[2, "one_cannot_begin"])
    assert found[0][0] == "TiermemError"
    assert "rank 1: FormatError" in found[0][1]
    assert found[1][0] == "FormatError"


def test_a_rank_that_dies_is_named(reports):
    *living, dead = reports[3, "one_dies"]
    assert dead is None
    for kind, text in errors(living):
        assert kind == "TiermemError"
        assert "no word from rank 2" in text
