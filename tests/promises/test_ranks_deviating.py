"""A rank that does what the others do not, or ends in the middle: each gets an error that says who and what."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from doubles_combinations import some_of
from doubles_python import WarmPython
from doubles_rank_deviations import DIFFERENT_VERBS, SCENARIOS
from doubles_ranks import PATIENCE, ROOT, STALL, Reports, run_jobs, values

pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]


FAILING = some_of([3], [2])
THREE = ("fails_in_backward", "fails_behind_runs_of_some")


@pytest.fixture(scope="module")
def reports(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    # Whoever leaves a run has left its connections, too: the next one has others. Behind the one that never comes to a
    # run the ranks would no longer be in step: it is the last.
    two = sorted((name for name in SCENARIOS if name not in THREE), key=lambda name: name == "never_comes")
    jobs = [(2, [*["fails_in_backward"] * (2 in FAILING), *two]), (3, [*THREE])]
    return run_jobs(warm_python, tmp_path_factory.mktemp("deviating"), jobs)


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("commits_alone", "commits"),
        ("snapshots_alone", "makes a snapshot"),
        ("saves_alone", "saves the model (save_pretrained)"),
    ],
)
def test_what_one_rank_alone_calls_is_an_error_on_all(reports, name, does):
    for report in reports[2, name]:
        assert report is not None, "a rank died"
        assert report.error is not None
        assert report.error[0] == "TiermemError"
        assert f"the ranks do different things: rank 0 {does}, rank 1 gathers unit 0" in report.error[1]
        assert report.seconds < STALL, "nobody has waited in vain"


@pytest.mark.parametrize("size", FAILING)
def test_an_error_in_the_middle_of_backward_is_seen_and_told(reports, size):
    for rank, report in enumerate(reports[size, "fails_in_backward"]):
        assert report is not None
        assert report.error is not None
        if rank == 1:
            assert report.error[0] == "ValueError"
        else:
            assert report.error[0] == "TiermemError"
            assert "rank 1: closed its runtime because of ValueError: the gradient of rank 1" in report.error[1]


def test_ranks_have_runs_with_some_of_the_others_and_then_an_error_with_all_of_them(reports):
    *others, last = reports[3, "fails_behind_runs_of_some"]
    assert last.error[0] == "ValueError"
    for report in others:
        assert report.error[0] == "TiermemError"
        assert "rank 2: closed its runtime because of ValueError: the data of the last rank" in report.error[1]


def test_a_model_that_one_rank_cannot_take_is_refused_on_all_at_once(reports):
    (first, left), (second, none) = values(reports[2, "refused_on_one"])
    assert second.startswith("ConfigError: parameter 0.weight has no shape yet")
    assert first.startswith(
        "TiermemError: another rank could not take the model: rank 1: ConfigError: parameter 0.weight"
    )
    assert (left, none) == ([], [])
    assert all(report.seconds < STALL for report in reports[2, "refused_on_one"]), "nobody has waited in vain"


def test_where_a_rank_cannot_make_its_directory_nobody_leaves_one(reports):
    first, second = values(reports[2, "nothing_left"])
    told = "SwapIOError: mkdir in "
    assert first[0][0].startswith(f"TiermemError: another rank could not look at its swap directories: rank 1: {told}")
    assert second[0][0].startswith(told)
    for (_, budget), *left in (first, second):
        assert budget.startswith("BudgetError")
        assert left == [False, False]


def test_a_rank_that_never_comes_is_missed_by_name(reports):
    first, _ = reports[2, "never_comes"]
    assert first.error[0] == "TiermemError"
    assert "rank 0 was not joined by all of ranks 0, 1" in first.error[1]
    assert "all of them call offload, in the same order" in first.error[1]


def test_an_interrupt_of_one_rank_is_seen_there_and_told_to_the_others(reports):
    """It runs no hook behind the calls that it ends; what closes the runtime is not taken for a part of them."""
    first, second = reports[2, "interrupted"]
    assert second.error is None, second.error
    assert second.value == "interrupted"
    assert first.error[0] == "TiermemError"
    assert "rank 1: closed its runtime because of KeyboardInterrupt" in first.error[1]


def test_a_rank_with_fewer_batches_ends_and_the_others_are_told(reports):
    first, second = reports[2, "ends_earlier"]
    assert second.value == "ended"
    assert first.error[0] == "TiermemError"
    assert "rank 0 gathers unit 0" in first.error[1]
    assert "rank 1 closes its runtime. All ranks must do the same number of steps" in first.error[1]


WORDS = {
    "skips_clipped": ("steps (optimizer.step)", "forgets gradients (optimizer.zero_grad)"),
    "clips_alone": ("steps (optimizer.step)", "clips gradients (optimizer.clip_grad_norm_)"),
    "skips": ("steps (optimizer.step)", "forgets gradients (optimizer.zero_grad)"),
}


@pytest.mark.parametrize("name", DIFFERENT_VERBS)
def test_all_step_clip_or_skip(reports, name):
    """Half a model would be updated otherwise, and nobody would hear of it."""
    first, second = WORDS[name.rsplit("_", 2)[0]]
    for report in reports[2, name]:
        assert report is not None, "a rank died"
        assert report.error is not None
        assert report.error[0] == "TiermemError"
        assert f"the ranks do different things: rank 0 {first}, rank 1 {second}" in report.error[1]


def test_optimizers_that_differ_are_refused_before_anything_is_updated(reports):
    """Parts of a model would learn at other rates, and nobody would hear of it."""
    first, second = values(reports[2, "steps_differently"])
    assert first == second, "both are told the same"
    assert set(first) == {"rate", "clipping", "parameters"}, "their order does not matter"
    for said in first.values():
        assert said.startswith(
            "each rank steps (optimizer.step) in another way: rank 0 with max_grad_norm=None, lr=0.0"
        )
        assert "All ranks make the same optimizers" in said
    assert "; rank 1 with max_grad_norm=None, lr=0.002, " in first["rate"]
    assert "; rank 1 with max_grad_norm=1.0, lr=0.001, " in first["clipping"]


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import tiermem

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
config = tiermem.Config(device="cpu", host_memory="4MiB", swap_dirs=[folder], param_dtype="float32", stall_timeout=90.0)
runtime = tiermem.offload(model, config)
optimizer = tiermem.AdamW(model.parameters())
for step in range(3):
    loss = model(torch.ones(2, 8)).sum()
    if rank == 1 and step == 1:
        raise ValueError("the data of rank 1 are spoilt")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
runtime.close()
"""


def test_an_error_that_nobody_catches_is_told_where_nobody_closes(warm_python: WarmPython, tmp_path: Path) -> None:
    """As in a script without `with`: what the others are told is told as the interpreter ends."""
    programs = [
        subprocess.Popen(
            [warm_python.path, "-c", SCRIPT, str(tmp_path), str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        first, second = (program.communicate(timeout=250)[1] for program in programs)
    finally:
        for program in programs:
            program.kill()
    assert "ValueError: the data of rank 1 are spoilt" in second.splitlines()[-1]
    assert "rank 1: closed its runtime because of ValueError: the data of rank 1 are spoilt" in first


STOPPED = """
import os, signal, sys, time
import torch, torch.distributed as dist
import tiermem

folder, rank = sys.argv[1], int(sys.argv[2])
told = os.path.join(folder, "port")
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # any port that is free
    with open(told + ".new", "w") as file:
        file.write(str(store.port))
    os.rename(told + ".new", told)
else:
    while not os.path.exists(told):
        time.sleep(0.01)
    with open(told) as file:
        store = dist.TCPStore("127.0.0.1", int(file.read()), 2, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
config = tiermem.Config(device="cpu", host_memory="4MiB", swap_dirs=[folder], param_dtype="float32", stall_timeout=25.0)
with tiermem.offload(model, config) as runtime:
    loss = model(torch.ones(2, 8)).sum()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    loss.backward()
    runtime.gradient(model[0].weight)
"""


def test_a_rank_that_hangs_and_keeps_the_store_holds_nobody_up(warm_python: WarmPython, tmp_path: Path) -> None:
    """Rank 0 does; a call that the store's keeper does not answer would wait for ever."""
    programs = [
        subprocess.Popen(
            [warm_python.path, "-c", STOPPED, str(tmp_path), str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        _, said = programs[1].communicate(timeout=250)
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    assert "tiermem.errors.TiermemError: rank 1 cannot go on without the others" in said
    assert (
        "no word from rank 0: it has died, hangs, is busy or waits elsewhere for longer than stall_timeout=25 s" in said
    )
    assert "synced_gpus=True" in said


def test_models_and_settings_that_differ_are_refused_before_anything_is_touched(reports):
    first, second = values(reports[2, "other_models"])
    assert first == second, "both are told the same"
    for name, (said, untouched) in first.items():
        assert said.startswith("ConfigError: the ranks have different models or settings: rank 0: "), name
        assert "; rank 1: " in said
        assert untouched, name
    assert "param_dtype=float32" in first["param_dtype"][0]
    assert "param_dtype=bfloat16" in first["param_dtype"][0]
    assert "stage=2" in first["stage"][0]
    assert "weights=given" in first["weights"][0]


def test_another_snapshot_on_one_rank_is_refused_and_a_copy_of_the_same_is_not(reports):
    """Weights would be the first rank's, moments and step counts of another time on the others."""
    first, second = values(reports[2, "other_snapshots"])
    assert first == second
    assert first[0].startswith("ConfigError: the ranks have different models or settings: rank 0: ")
    for step in (1, 2):
        assert f"resume=a snapshot of step {step} made at " in first[0]
    assert first[1].startswith("ConfigError: the ranks have different models or settings: rank 0: ")
    assert "resume=a snapshot of step 1 made at " in first[1]
    assert "weights=not given" in first[1]
    assert first[2] == {"step": 1}
