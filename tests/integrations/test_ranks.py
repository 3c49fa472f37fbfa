"""The Trainer in several processes: as transformers' own with DistributedDataParallel, bit for bit.

Where bits are those of a run that differs from transformers' own in one thing, `doubles_rank_trainer.py` says in which.
"""

from __future__ import annotations

import pytest
import torch
from doubles_combinations import some_of
from doubles_python import WarmPython
from doubles_rank_trainer import THREE
from doubles_ranks import PATIENCE, Reports, run_jobs, values
from doubles_trainer import Trained, check

pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]

# Stage 2 adds up as stage 3 does; it is run where all are asked for.
STAGES = [f"trainer_stage_{stage}" for stage in some_of([1, 3], [2])]
OTHERS = ["trainer_best", "trainer_killed", "trainer_alone", "trainer_generates", "trainer_adapters", "trainer_prompts"]


@pytest.fixture(scope="module")
def reports(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    jobs = [(2, [*STAGES, *OTHERS]), (3, ["trainer_stage_3", "trainer_killed"])]
    return run_jobs(warm_python, tmp_path_factory.mktemp("trainers"), jobs)


def same_end(found: Trained, expected: Trained) -> None:
    """All but what the last line says of this call's own steps."""
    assert found.history[:-1] == expected.history[:-1]
    check(Trained([], found.weights), Trained([], expected.weights))


@pytest.mark.parametrize("name", STAGES)
def test_every_stage(name: str, reports: Reports) -> None:
    """Stage 1 averages what micro-batches have added up, as DDP does; 2 and 3 add up what they have averaged."""
    for each in values(reports[2, name]):
        check(each["found"], each["expected"])
        lines = each["found"].history
        assert any(line.get("grad_norm", 0) > 0.1 for line in lines), "something was clipped"
        assert [line["eval_rows"] for line in lines if "eval_loss" in line] == [11, 11], "none twice"


def test_stages_differ_in_the_last_bits_only(reports: Reports) -> None:
    first, *others = (values(reports[2, name])[0]["found"] for name in STAGES)
    for other in others:
        for name, weights in first.weights.items():
            torch.testing.assert_close(other.weights[name], weights, rtol=1e-5, atol=1e-5)


def test_a_run_of_transformers_own_trainer_goes_on(reports: Reports) -> None:
    for each in values(reports[2, "trainer_stage_1"]):
        same_end(each["continued"], each["expected"])


def test_the_best_model_at_the_end_and_a_model_that_is_saved(reports: Reports) -> None:
    """Of stage 3, without accumulation, when its bits are DDP's."""
    for each in values(reports[2, "trainer_best"]):
        check(each["found"], each["expected"])
        check(each["saved"], Trained([], each["expected"].weights))
        losses = [line["eval_loss"] for line in each["found"].history if "eval_loss" in line]
        assert min(losses) < losses[-1]


def test_a_run_that_is_broken_off_again_and_again(reports: Reports) -> None:
    for each, whole in zip(values(reports[2, "trainer_killed"]), values(reports[2, "trainer_stage_3"]), strict=True):
        same_end(each["run"], whole["found"])
        assert each["left"] == ["checkpoint-5"]


def test_three_ranks(reports: Reports) -> None:
    """Sums of three are rounded in the order they are taken in, which is not DDP's; a resume keeps to its own."""
    wholes, broken = values(reports[3, "trainer_stage_3"]), values(reports[3, "trainer_killed"])
    for each, resumed in zip(wholes, broken, strict=True):
        found, expected = each["found"], each["expected"]
        for line, other in zip(found.history, expected.history, strict=True):
            assert line == pytest.approx(other, rel=1e-5)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-5)
        assert [line["eval_rows"] for line in found.history if "eval_loss" in line] == [11, 11], "none twice"
        same_end(resumed["run"], found)
        assert resumed["left"] == [f"checkpoint-{THREE['max_steps']}"]


def test_what_the_others_are_told(reports: Reports) -> None:
    first, second = (each["deaths"] for each in values(reports[2, "trainer_killed"]))
    for when, error in {
        "saved": "TiermemError: another rank could not finish a checkpoint: rank 0: KilledError: saved",
        "committed": "TiermemError: another rank could not remove earlier checkpoints: rank 0: KilledError: committed",
        "sealed": "KilledError: sealed",
        "in a step": "KilledError: in a step",
    }.items():
        assert first[when]["error"] == f"KilledError: {when}"
        assert second[when]["error"] == error
    one = "one has not saved"
    assert first[one]["error"] == f"TiermemError: another rank could not save a checkpoint: rank 1: KilledError: {one}"
    assert first[one]["left"] == ["checkpoint-2", "checkpoint-3"], "what is committed stays until the next one is"


def test_saving_is_for_all_of_them(reports: Reports) -> None:
    (refused, alone), (others_refused, others_alone) = values(reports[2, "trainer_alone"])
    assert refused.startswith("NotADirectoryError")
    assert others_refused.startswith("TiermemError: another rank could not begin to save the model: rank 0: ")
    for told in (alone, others_alone):
        assert told.startswith("TiermemError: the ranks do different things: rank 0 ")


def test_ranks_that_generate_different_numbers_of_tokens(reports: Reports) -> None:
    for found, expected in values(reports[2, "trainer_generates"]):
        assert found == expected
        lengths = {sum(token != 0 for token in row) for row in found[0]}
        assert len(lengths) > 1


def test_adapters_are_those_of_the_first_and_averaged(reports: Reports) -> None:
    for each in values(reports[2, "trainer_adapters"]):
        assert each["killed"].startswith("KilledError")
        same_end(each["found"], each["expected"])


def test_prompts_are_saved_by_the_first(reports: Reports) -> None:
    for each in values(reports[2, "trainer_prompts"]):
        check(each["saved"], Trained([], each["found"].weights))
