"""Ranks with a device each have the bits of the same ranks on processors, in device memory of a given size.

What these have is held against one process here, too; tolerances as in `test_ranks.py`.

The device is played by the processor: what computes sees the device's frames only, and released ones are NaN.
"""

from __future__ import annotations

from typing import Any

import doubles_rank_checks as checks
import doubles_rank_scenarios as scenarios
import pytest
import torch
from doubles_combinations import half_of, part_of, some_of
from doubles_python import WarmPython
from doubles_rank_devices import RUNS
from doubles_ranks import PATIENCE, Reports, run_jobs, values

pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]

MET = part_of(3, RUNS, ["roomy", "settled", "partly_settled", "tight"])
TWO = [f"processors_{run}" for run in RUNS] + [f"{device}_{run}" for run, device in MET]
LEAST = some_of([(3, "experts")], [(2, "odd"), (3, "odd")])
CONTINUED = half_of(["device", "settled"], ["committing_stage_3", "committing_stage_2"])
THREE = [f"{device}_{run}" for size, run in LEAST for device in ("processors", "tightest") if size == 3]
OTHERS = [*["tightest_odd"] * ((2, "odd") in LEAST), "device_another_order", "device_one_fails"]
COMMITTING = [*dict.fromkeys(run for _, run in CONTINUED), *(f"{device}_{run}" for device, run in CONTINUED)]
VERBS = ["verbs", "device_verbs", "settled_verbs"]
STREAMS = ["streams", "streams_not_handed_over"]


@pytest.fixture(scope="module")
def reports(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    directory = tmp_path_factory.mktemp("ranks")
    two = [*TWO, *VERBS, *COMMITTING, *OTHERS, *STREAMS]
    return run_jobs(warm_python, directory, [(2, two), (3, [*THREE, "device_one_dies"])])


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["losses"] == other["losses"]
        assert one["norm"] == other["norm"]
        for kind in ("weights", "masters"):
            for name, found_values in one[kind].items():
                assert torch.equal(found_values, other[kind][name]), name


def check(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert set(each["tiers"]) == {"SWAP", "HOST", "DEVICE"}
        for budget, reserved, high_water in each["tiers"].values():
            assert reserved <= high_water <= budget
        assert each["tiers"]["DEVICE"][2] > 0
        assert each["left"] == [], "nothing was committed, so nothing is kept"


@pytest.mark.parametrize("run", RUNS)
def test_on_processors_the_numbers_of_one_process_on_all_rows(reports, run):
    make, how = RUNS[run]
    how = {key: value for key, value in how.items() if key in ("accumulate", "batch")}
    near = {"atol": 6e-3, "rtol": 2e-2} if run == "bfloat16" else None
    checks.check(values(reports[2, f"processors_{run}"]), checks.plain(make, **how), near=near)


@pytest.mark.parametrize(("run", "device"), [each for each in MET if "settled" not in each[1]])
def test_the_same_bits_as_on_processors(reports, run, device):
    """In float32 and in bfloat16, at every stage, with room for everything and with the least that works."""
    found = values(reports[2, f"{device}_{run}"])
    same(found, values(reports[2, f"processors_{run}"]))
    check(found)


@pytest.mark.parametrize(("run", "device"), [each for each in MET if "settled" in each[1]])
def test_the_same_bits_where_units_are_updated_on_the_device(reports, run, device):
    """With room for all of them there, and with room for some."""
    found = values(reports[2, f"{device}_{run}"])
    same(found, values(reports[2, f"processors_{run}"]))
    check(found)
    for each in found:
        above, tiles = each["updated"]
        assert 0 < above < tiles if device == "partly_settled" else above == tiles > 0


@pytest.mark.parametrize(("size", "run"), LEAST)
def test_the_least_memory_everywhere_and_slow_copies(reports, size, run):
    found = values(reports[size, f"tightest_{run}"])
    same(found, values(reports[size, f"processors_{run}"]))
    check(found)
    assert all(each["tiers"]["SWAP"][2] > 0 for each in found), "host memory does not hold everything"


def test_verbs_are_of_all_ranks(reports):
    torch.manual_seed(1)
    model = scenarios.Odd()
    scenarios.loss_of(model, scenarios.tokens(0)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model.layers[0][0].weight.mul_(2.0)
        expected = model(scenarios.tokens(1))
    for found in values(reports[2, "verbs"]):
        for name, gradient in gradients.items():
            if gradient is None:
                assert found["gradients"][name] is None, name
            else:
                torch.testing.assert_close(found["gradients"][name], gradient, **checks.NEAR)
        assert found["dropped"] == [None] * len(found["dropped"])
        assert torch.equal(found["written"], model.layers[0][0].weight)
        assert torch.equal(found["master"], model.layers[0][0].weight)
        torch.testing.assert_close(found["evaluated"], expected)
        assert found["skipped"] == (1, True)


@pytest.mark.parametrize("device", ["device", "settled"])
def test_verbs_are_those_of_processors(reports, device):
    for one, other in zip(values(reports[2, f"{device}_verbs"]), values(reports[2, "verbs"]), strict=True):
        assert one["skipped"] == other["skipped"] == (1, True)
        for name, gradient in one["gradients"].items():
            expected = other["gradients"][name]
            assert (gradient is None) == (expected is None)
            assert gradient is None or torch.equal(gradient, expected), name
        for verb in ("written", "master", "evaluated"):
            assert torch.equal(one[verb], other[verb]), verb


def test_a_stage_with_whole_parameters_resumes(reports):
    """What other ranks have updated is not in a rank's commit, and is fetched after the resume."""
    found = values(reports[2, "committing_stage_2"])
    assert [each["second"]["begun"] for each in found] == [2, 2]
    assert all(len(each["second"]["losses"]) == scenarios.COMMITS - 2 > 0 for each in found)
    mean = torch.tensor([each["first"]["losses"] + each["second"]["losses"] for each in found]).mean(dim=0)
    expected = torch.tensor(checks.plain(scenarios.Odd, steps=scenarios.COMMITS, decay=0.01)[0])
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "run"), CONTINUED)
def test_what_was_committed_is_continued(reports, run, device):
    found, expected = values(reports[2, f"{device}_{run}"]), values(reports[2, run])
    assert [each["second"]["begun"] for each in found] == [2, 2]
    for one, other in zip(found, expected, strict=True):
        for part in ("first", "second"):
            assert one[part]["losses"] == other[part]["losses"]
            for name, weights in one[part]["weights"].items():
                assert torch.equal(weights, other[part]["weights"][name]), name


def test_whoever_uses_a_frame_waits_for_the_work_of_others_on_it(reports):
    """With a stream for each thread: the exchange waits for computation and copies, both of them for the exchange."""
    for found in values(reports[2, "streams"]):
        assert found["checks"] > 300  # 523 to 601, as threads come together
        assert found["early"] == []
    for found in values(reports[2, "streams_not_handed_over"]):
        assert any("computation did not wait for all_gather" in each for each in found["early"]), "it would be noticed"
        assert any("exchange (1) did not wait for a bucket" in each for each in found["early"])


# What goes wrong


def errors(reports: list[Any]) -> list[tuple[str, str]]:
    assert all(report is not None and report.error is not None for report in reports), reports
    return [report.error for report in reports]


def test_another_order_is_an_error_on_every_rank(reports):
    for kind, text in errors(reports[2, "device_another_order"]):
        assert kind == "TiermemError"
        assert "rank 0 gathers unit 2 (layers.0)" in text


def test_the_others_learn_which_rank_failed_and_why(reports):
    (kind, text), (other, _) = errors(reports[2, "device_one_fails"])
    assert (kind, other) == ("TiermemError", "ValueError")
    assert "rank 1: closed its runtime because of ValueError: the data of rank 1 are spoilt" in text


def test_a_rank_that_dies_is_named(reports):
    *living, dead = reports[3, "device_one_dies"]
    assert dead is None
    for kind, text in errors(living):
        assert kind == "TiermemError"
        assert "no word from rank 2" in text
