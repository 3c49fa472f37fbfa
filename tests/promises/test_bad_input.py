"""What cannot work is said clearly, by the documented class of error, before anything is lost; and nothing hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import subprocess
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from doubles_combinations import half_of, in_turn, part_of
from doubles_models import Stack, mlp
from doubles_scenarios import Wide, tokens_batch, wide_batch
from doubles_training import MIB, PlainAdamW, Trainee, budget_for, check, config_for, least_budget, offloaded, plain
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import swap
import tiermem
from swap.syscalls import SystemCalls
from tiermem.optim.coordinator import UpdateCoordinator
from tiermem.runtime import closing, company

ROOT = Path(__file__).resolve().parents[2]


def offload(model, directory, update="step", budget: int | str = 32 * MIB, **settings):
    return tiermem.offload(model, config_for(directory, budget, update, **settings))


def untouched(model, weights):
    """Whether a refused model still is what it was."""
    return all(torch.equal(values, weights[name]) for name, values in model.state_dict().items())


@contextlib.contextmanager
def refused(error, match, model=None, directory=None):
    """An error of this class, and neither the model nor the directory changed, no thread left."""
    weights = {} if model is None else {name: values.clone() for name, values in model.state_dict().items()}
    before = sorted(directory.iterdir()) if directory is not None and directory.is_dir() else []
    threads = threading.active_count()
    with pytest.raises(error, match=match):
        yield
    if model is not None:
        assert untouched(model, weights)
    if directory is not None and directory.is_dir():
        assert sorted(directory.iterdir()) == before
    assert threading.active_count() <= threads


# Budgets.


@pytest.mark.parametrize(
    ("available", "ranks", "share"),
    [(MIB, 1, "1.00 MiB"), (16 * MIB, 1, None), (16 * MIB, 4, "4.00 MiB, the share of one of 4 ranks,")],
)
def test_a_budget_that_lets_more_into_host_memory_than_there_is_is_warned_of(
    tmp_path, monkeypatch, available, ranks, share
):
    """It was taken without a word, and the process killed when memory was used up."""
    here = dataclasses.replace(company.alone(), neighbours=ranks)
    monkeypatch.setattr("tiermem.runtime.offloading.find_company", lambda *_: here)
    monkeypatch.setattr("tiermem.runtime.offloading.available_host_memory", lambda: available)
    with tiermem.deferred_init():
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    if share:
        found = rf"lets 4\.\d+ MiB of this model into host memory, of which {share} are available"
        with pytest.warns(RuntimeWarning, match=found):
            runtime = offload(model, tmp_path, "step", 1 << 40)
    else:
        runtime = offload(model, tmp_path, "step", 1 << 40)
    runtime.close()


@pytest.mark.parametrize(
    ("update", "param_dtype", "make"),
    in_turn(["step", "forward", "backward"], ["float32", "bfloat16", "float16"], [Stack, Wide]),
)
def test_an_impossible_budget_names_the_largest_unit_and_the_least_that_works(tmp_path, make, update, param_dtype):
    model = make()
    least = least_budget(model, tmp_path, param_dtype=param_dtype)
    for base in (tiermem.CapacityError, tiermem.ConfigError, tiermem.BudgetError):
        with refused(base, rf"largest unit \(\S+, \d+ bytes.*{least} bytes", model, tmp_path):
            offload(model, tmp_path, update, least - 4096, param_dtype=param_dtype)
    batch = tokens_batch if make is Stack else wide_batch
    with offload(model, tmp_path, update, least, param_dtype=param_dtype) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        if make is Stack:
            batch(model).backward()
        else:
            model(torch.randn(3, 48).to(getattr(torch, param_dtype))).square().mean().backward()
        optimizer.step()
        runtime.settle()
        assert runtime.statistics().tiers[-1].high_water <= least


def test_the_named_unit_is_the_largest(tmp_path):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8), nn.Linear(90, 80), nn.Linear(8, 9)])})
    with refused(tiermem.BudgetError, r"largest unit \(layers\.1,", model, tmp_path):
        offload(model, tmp_path, "step", 8192)


# Swap directories.


def test_no_swap_directory(tmp_path):
    model = Stack()
    with refused(tiermem.ConfigError, "swap_dirs", model):
        tiermem.offload(model, tiermem.Config(host_memory="32MiB", device="cpu"))


def test_a_missing_swap_directory(tmp_path):
    model = Stack()
    with refused(swap.SwapIOError, "nowhere.*ENOENT.*create the directory", model, tmp_path) as caught:
        offload(model, tmp_path / "nowhere")
    assert caught is None


def test_a_file_where_the_directory_should_be(tmp_path):
    model = Stack()
    (tmp_path / "file").write_text("precious")
    with refused(swap.SwapIOError, "ENOTDIR", model, tmp_path):
        offload(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def swap_file_name(directory) -> str:
    with offload(Stack(), directory):
        return next(path.name for path in directory.iterdir() if path.stat().st_size > 4096)


def test_a_directory_where_the_swap_file_should_be(tmp_path):
    name = swap_file_name(tmp_path)
    (tmp_path / name).mkdir()
    model = Stack()
    with refused(swap.SwapError, name, model):
        offload(model, tmp_path)
    assert (tmp_path / name).is_dir()


def test_a_foreign_file_with_our_name_is_left_alone(tmp_path):
    name = swap_file_name(tmp_path)
    (tmp_path / name).write_bytes(b"somebody's thesis" * 1000)
    model = Stack()
    with refused(swap.FormatError, name, model):
        offload(model, tmp_path)
    assert (tmp_path / name).read_bytes() == b"somebody's thesis" * 1000


def test_a_symbolic_link_is_not_followed(tmp_path):
    name = swap_file_name(tmp_path)
    (tmp_path / "target").write_bytes(b"x" * 5000)
    (tmp_path / name).symlink_to(tmp_path / "target")
    model = Stack()
    with refused(swap.SwapError, name, model):
        offload(model, tmp_path)
    assert (tmp_path / "target").read_bytes() == b"x" * 5000


def test_two_runs_in_one_directory(tmp_path):
    first, second = Stack(), Stack()
    with offload(first, tmp_path):
        with refused(swap.SwapInUseError, str(tmp_path), second, tmp_path):
            offload(second, tmp_path)
        tokens_batch(first).backward()
    with offload(second, tmp_path):
        tokens_batch(second).backward()


TRY_TO_OFFLOAD = """
import sys, torch, swap, tiermem
from pathlib import Path
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
before = {name: values.clone() for name, values in model.state_dict().items()}
if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    tiermem.offload(model, tiermem.Config(host_memory="8MiB", swap_dirs=[sys.argv[1]], device="cpu"))
except swap.SwapError as error:
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    print(type(error).__name__, getattr(error, "errno", None), error)
    print(*getattr(error, "__notes__", ()))
"""


def test_a_full_swap_directory(warm_python, tmp_path):
    """A file size limit: the room is preallocated, so that it is missed at the start."""
    found = warm_python.run("-c", TRY_TO_OFFLOAD, str(tmp_path), str(1 << 20))
    assert found.stdout.startswith(("SwapIOError", "SwapFullError")), found.stdout + found.stderr
    assert "cannot reserve" in found.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["1", "2"])
def test_a_swap_directory_that_another_process_uses(size, monkeypatch, warm_python, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", size)  # as torchrun says it; then the other process may well be one of its ranks
    with offload(mlp(), tmp_path):
        found = warm_python.run("-c", TRY_TO_OFFLOAD, str(tmp_path))
        expected = f"SwapInUseError None another run (process {os.getpid()}) is using {tmp_path}"
        assert found.stdout.startswith(expected), found.stdout + found.stderr
        assert ("call torch.distributed.init_process_group() before" in found.stdout) == (size == "2")


@contextlib.contextmanager
def mounted(target, *options):
    done = subprocess.run(["mount", *options, str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


@needs_root
def test_a_directory_that_is_mounted_a_second_time_is_the_same(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    tiermem.Config(swap_dirs=[first, second])
    with (
        mounted(second, "--bind", str(first)),
        pytest.raises(tiermem.ConfigError, match="expected different directories"),
    ):
        tiermem.Config(swap_dirs=[first, second])


@needs_root
def test_a_full_disk(warm_python, tmp_path):
    (tmp_path / "small").mkdir()
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as directory:
        found = warm_python.run("-c", TRY_TO_OFFLOAD, str(directory))
        assert found.stdout.startswith("SwapFullError"), found.stdout + found.stderr
        assert list(directory.iterdir()) == []


@needs_root
def test_a_file_system_that_counts_no_blocks(warm_python, tmp_path):
    """ramfs says that it has none, and so do some in user space. There is room all the same."""
    (tmp_path / "uncounted").mkdir()
    with mounted(tmp_path / "uncounted", "-t", "ramfs", "ramfs") as directory:
        found = warm_python.run("-c", TRY_TO_OFFLOAD, str(directory))
        assert (found.stdout, found.returncode) == ("", 0), found.stderr


@needs_root
def test_a_read_only_file_system(warm_python, tmp_path):
    (tmp_path / "fixed").mkdir()
    with mounted(tmp_path / "fixed", "-t", "tmpfs", "-o", "ro,size=64m", "tmpfs") as directory:
        found = warm_python.run("-c", TRY_TO_OFFLOAD, str(directory))
        assert found.stdout.startswith(f"SwapIOError {errno.EROFS}"), found.stdout + found.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write whatever the modes say")
def test_a_directory_without_write_permission(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    model = Stack()
    with refused(swap.SwapIOError, "EACCES", model):
        offload(model, tmp_path / "closed")


# Settings and models.


def test_misspelt_setting():
    with pytest.raises(tiermem.ConfigError, match="did you mean 'host_memory'"):
        tiermem.Config.from_dict({"host_memroy": "1GiB"})
    with pytest.raises(
        tiermem.ConfigError, match="unknown setting 'host_memroy': did you mean 'host_memory'"
    ) as caught:
        tiermem.Config(host_memroy="1GiB")
    assert isinstance(caught.value, TypeError)  # what Python raises for any other function


@pytest.mark.parametrize(
    "setting", [{"param_dtype": "float8"}, {"update": "sideways"}, {"device": "tpu"}, {"host_memory": "much"}]
)
def test_unknown_values_of_settings(setting, tmp_path):
    with pytest.raises(tiermem.ConfigError, match=next(iter(setting))):
        tiermem.Config(**({"swap_dirs": [tmp_path]} | setting))


def test_a_model_without_parameters(tmp_path):
    with refused(tiermem.ConfigError, "parameter", None, tmp_path):
        offload(nn.Sequential(nn.ReLU(), nn.Dropout()), tmp_path)


def test_a_model_of_frozen_parameters_only_runs_and_its_optimizer_does_nothing(tmp_path):
    model = Stack().requires_grad_(False)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = tokens_batch(model)
        with offload(model, tmp_path):
            torch.manual_seed(0)
            assert torch.equal(tokens_batch(model), expected)
            optimizer = tiermem.AdamW(model.parameters())
            optimizer.step()
            optimizer.zero_grad()


def test_parameters_offloaded_twice(tmp_path):
    model = Stack()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with offload(model, tmp_path / "a"):
        with refused(tiermem.ConfigError, "is offloaded already", None, tmp_path / "b"):
            offload(model, tmp_path / "b")
        tokens_batch(model).backward()


def test_a_config_of_another_kind():
    with pytest.raises(tiermem.ConfigError, match=r"tiermem\.Config, found dict"):
        tiermem.offload(Stack(), {"host_memory": "1GiB"})


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"model": "llama"}, r"torch\.nn\.Module, found str"),
        ({"weights": 5}, "weights: .*int"),
        ({"init": 5}, "init: .*int"),
        ({"mesh": 3}, "mesh= names ranks, but torch.distributed is not initialised"),
    ],
)
def test_arguments_of_another_kind(wrong, match, tmp_path):
    config = config_for(tmp_path, 32 * MIB, "step")
    arguments = {"model": Stack()} | wrong
    with refused(tiermem.ConfigError, match, None, tmp_path):
        tiermem.offload(arguments.pop("model"), config, **arguments)


def test_a_name_where_a_parameter_is_expected(tmp_path):
    model = Stack()
    with offload(model, tmp_path) as runtime, pytest.raises(tiermem.ConfigError, match=r"expected a parameter.*str"):
        runtime.parameter("shift")


def test_an_optimizer_on_foreign_parameters(tmp_path):
    model = Stack()
    with pytest.raises(tiermem.ConfigError, match="does not belong to an offloaded model"):
        tiermem.AdamW(Stack().parameters())
    with offload(model, tmp_path) as runtime:
        with pytest.raises(tiermem.ConfigError, match="does not belong to an offloaded model"):
            tiermem.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
        with pytest.raises(tiermem.ConfigError, match="does not belong to this runtime"):
            runtime.parameter(nn.Parameter(torch.zeros(3)))


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_torchs_optimizer_by_mistake_is_refused_and_changes_nothing(update, tmp_path):
    """It would find no gradient anywhere and train nothing in silence; ours goes on afterwards."""
    model, weights = Stack(), {}
    with offload(model, tmp_path, update) as runtime:
        for name, parameter in model.named_parameters():
            weights[name] = runtime.parameter(parameter)
        wrong = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            tokens_batch(model).backward()
            with pytest.raises(tiermem.ConfigError, match=r"make a tiermem\.AdamW"):
                wrong.step()
            wrong.zero_grad()
        assert not wrong.state
        for name, parameter in model.named_parameters():
            assert torch.equal(runtime.parameter(parameter), weights[name])
        right = tiermem.AdamW(model.parameters())
        right.zero_grad()
        tokens_batch(model).backward()
        right.step()
        assert not torch.equal(runtime.parameter(model.shift), weights["shift"])


class NotOfTorch(torch.optim.SGD):
    """As those of other libraries are."""


def test_torchs_optimizers_elsewhere_are_left_alone(tmp_path):
    """Other models, frozen parameters, parameters that ours has, and everything once the runtime is closed."""
    model, other = Stack(), nn.Linear(2, 2)
    model.shift.requires_grad_(False)
    with offload(model, tmp_path):
        frozen = torch.optim.SGD([*other.parameters(), model.shift], lr=0.1)
        other(torch.ones(2)).sum().backward()
        before = other.weight.detach().clone()
        frozen.step()
        assert not torch.equal(other.weight, before)
        both = NotOfTorch([*other.parameters(), *model.parameters()], lr=0.1)
        with pytest.raises(
            tiermem.ConfigError, match=rf"^{NotOfTorch.__module__}.NotOfTorch has an offloaded parameter"
        ):
            both.step()
        ours = tiermem.AdamW(model.parameters())
        both.step()
        tokens_batch(model).backward()
        ours.step()
    both.step()


def test_a_clip_call_that_comes_as_a_surprise_is_refused_and_the_next_is_not(tmp_path):
    model = Stack()
    with offload(model, tmp_path, "backward"):
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(2):
            tokens_batch(model).backward()
            optimizer.step()
        tokens_batch(model).backward()
        with pytest.raises(tiermem.ConfigError, match="update='auto'"):
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        tokens_batch(model).backward()
        assert optimizer.clip_grad_norm_(1.0).isfinite()
        optimizer.step()
        assert tokens_batch(model).isfinite()


@pytest.mark.parametrize("update", ["step", "forward", "auto"])
def test_gradients_that_grow_behind_their_clipping_are_an_error_until_they_are_dropped(update, tmp_path):
    """The coefficient would be applied to all of them, where plain PyTorch clips what was there."""

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        ours = trainee.adamw is not PlainAdamW
        for number in range(4):
            tokens_batch(trainee.model).backward()
            trainee.note(optimizer.clip_grad_norm_(1e-3 if number in (1, 3) else 1e9))
            if number in (0, 1):
                tokens_batch(trainee.model).backward()
            if number == 1 and ours:
                for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1e-3), optimizer.step):
                    with pytest.raises(tiermem.ConfigError, match=r"another backward .* Clip once in a step"):
                        call()
            elif number != 1:
                optimizer.step()  # in the first one clipping has changed nothing
            optimizer.zero_grad()

    check(offloaded(Stack, script, tmp_path, update=update, budget="beside"), plain(Stack, script))


@pytest.mark.parametrize("update", ["step", "forward", "auto"])
def test_a_gradient_that_a_parameter_holds_itself_is_refused_until_it_is_dropped(update, tmp_path):
    """A step would leave it out. Dropped with the step's others, it leaves nothing behind."""

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for number in range(4):
            tokens_batch(trainee.model).backward()
            if number == 2:
                trainee.model.shift.grad = torch.ones_like(trainee.model.shift)
                if trainee.adamw is not PlainAdamW:
                    for _ in range(2):
                        with pytest.raises(tiermem.ConfigError, match=r"has a \.grad, which would be ignored"):
                            optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
            assert trainee.model.shift.grad is None

    check(offloaded(Stack, script, tmp_path, update=update, budget="beside"), plain(Stack, script))


@pytest.mark.parametrize("setting", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"max_grad_norm": 0.0}, {"amsgrad": True}])
def test_impossible_hyperparameters(setting, tmp_path):
    model = Stack()
    with offload(model, tmp_path), pytest.raises(tiermem.ConfigError):
        tiermem.AdamW(model.parameters(), **setting)


# Gradients that are not finite.


def weights_of(runtime):
    runtime.settle()
    return {name: runtime.parameter(parameter) for name, parameter in runtime.model.named_parameters()}


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("update", "bad", "max_grad_norm"),
    part_of(3, ["step", "forward", "backward"], [float("nan"), float("inf")], [None, 1.0]),
)
def test_gradients_that_are_not_finite_skip_the_step(update, bad, max_grad_norm, tmp_path):
    model = Stack()
    with offload(model, tmp_path, update, budget_for(model, tmp_path, "least")) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), max_grad_norm=max_grad_norm)
        for number in range(5):
            loss = tokens_batch(model)
            if number in (0, 2, 3):
                (loss * bad).backward()
                before = weights_of(runtime)
                count = optimizer.steps_of(model.shift)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    optimizer.step()
                assert [bool(caught), optimizer.skipped] == [number == 0, (1, 1, 2, 3, 3)[number]]
                assert equal(weights_of(runtime), before)
                assert optimizer.steps_of(model.shift) == count
                assert runtime.gradient(model.shift) is None
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        assert optimizer.steps_of(model.shift) == 2
        assert all(values.isfinite().all() for values in weights_of(runtime).values())


# After the end, and in the wrong place.


def test_use_after_close(tmp_path):
    model = Stack()
    runtime = offload(model, tmp_path)
    optimizer = tiermem.AdamW(model.parameters())
    tokens_batch(model).backward()
    runtime.close()
    for use in (
        lambda: runtime.parameter(model.shift),
        lambda: runtime.master(model.shift),
        lambda: runtime.gradient(model.shift),
        lambda: runtime.settle(),
        lambda: runtime.gathered(model).__enter__(),
        lambda: optimizer.step(),
        lambda: optimizer.zero_grad(),
        lambda: tiermem.AdamW(model.parameters()),
    ):
        with pytest.raises(tiermem.TiermemError):
            use()
    runtime.statistics()
    runtime.close()


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("restore_model", [False, True])
def test_closing_inside_gathered_is_refused_and_closes_nothing(write, restore_model, tmp_path):
    model, x = mlp(), torch.randn(4, 6)
    expected = model(x).detach()
    runtime = offload(model, tmp_path)
    with runtime.gathered(model, write=write):
        with pytest.raises(tiermem.TiermemError, match=r"close inside .*gathered.*after the block"):
            runtime.close(restore_model=restore_model)
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    runtime.close(restore_model=restore_model)
    assert list(tmp_path.iterdir()) == []
    if restore_model:
        assert torch.equal(model(x), expected)
    else:
        with pytest.raises(tiermem.TiermemError, match="after its runtime was closed"):
            model(x)


@pytest.mark.parametrize("restore_model", [False, True])
def test_closing_inside_a_call_of_the_model_leaves_no_nan(restore_model, tmp_path):
    model, x = mlp(), torch.randn(4, 6)
    expected = model(x).detach()
    runtime = offload(model, tmp_path)
    hook = model[0].register_forward_hook(lambda *_: runtime.close(restore_model=restore_model))
    if restore_model:
        assert torch.equal(model(x), expected)
        hook.remove()
        assert torch.equal(model(x), expected)
    else:
        for _ in range(2):
            with pytest.raises(tiermem.TiermemError, match="after its runtime was closed"):
                model(x)
    assert list(tmp_path.iterdir()) == []


class _Amid:
    """A thread that calls the model, and stays inside a hook until it may go on."""

    def __init__(self, work):
        self._inside, self._may_go_on, self._work = threading.Event(), threading.Event(), work
        self.found: torch.Tensor | BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="trainer")

    def stay(self, *_):
        self._inside.set()
        assert self._may_go_on.wait(60)

    def _live(self):
        try:
            self.found = self._work(self)
        except BaseException as error:  # noqa: BLE001 - looked at
            self.found = error
        self._inside.set()

    def __enter__(self):
        self._thread.start()
        assert self._inside.wait(60)
        return self

    def __exit__(self, *_):
        self._may_go_on.set()
        self._thread.join()


def _gradient_with(model, x, hook, where):
    """Forward, backward, and a gradient; `hook` is called in the middle of the first or the second."""
    with contextlib.ExitStack() as registered:
        if where == "forward":
            registered.enter_context(model[0].register_forward_hook(hook))
        elif where == "first parameter":
            registered.enter_context(model[0].weight.register_hook(hook))
        y = model(x)
        if where == "backward begins":
            y.register_hook(hook)
        y.sum().backward()


@pytest.mark.parametrize("restore_model", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward begins", "first parameter"])
def test_closing_while_another_thread_is_inside_is_refused_and_closes_nothing(where, restore_model, tmp_path):
    model, x = mlp(), torch.randn(4, 6)
    expected = model(x).detach()
    model(x).sum().backward()
    gradient, model[0].weight.grad = model[0].weight.grad, None
    runtime = offload(model, tmp_path)

    def work(amid):
        _gradient_with(model, x, amid.stay, where)
        return runtime.gradient(model[0].weight)

    with _Amid(work) as trainer:
        for close in (lambda: runtime.close(restore_model=restore_model), runtime.__exit__):
            with pytest.raises(
                tiermem.TiermemError, match=r"thread 'trainer' is inside .*closed\. Wait for that thread"
            ):
                close()
    assert isinstance(trainer.found, torch.Tensor), trainer.found
    assert torch.equal(trainer.found, gradient)
    runtime.close(restore_model=restore_model)
    assert list(tmp_path.iterdir()) == []
    if restore_model:
        assert torch.equal(model(x), expected)


def test_a_call_that_begins_in_another_thread_amid_closing_is_refused(tmp_path, monkeypatch):
    """It had computed NaN once its hooks were taken off."""
    model, x, found = mlp(), torch.randn(4, 6), []
    runtime = offload(model, tmp_path)
    wait_updates = UpdateCoordinator.wait_updates

    def call() -> None:
        with pytest.raises(tiermem.TiermemError, match=r"while thread 'MainThread' was inside .* of close"):
            model(x)
        found.append("refused")

    def call_meanwhile(coordinator) -> None:
        if not found:
            with ThreadPoolExecutor(1) as other:
                other.submit(call).result(60)
        wait_updates(coordinator)

    monkeypatch.setattr(UpdateCoordinator, "wait_updates", call_meanwhile)
    runtime.close()
    assert found == ["refused"]


def test_what_keeps_no_thread_from_closing(tmp_path):
    """A call that an interrupt has ended, a backward of another model, a close that was refused or failed."""
    model, x = mlp(), torch.randn(4, 6)
    expected = model(x).detach()
    runtime = offload(model, tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    def call_interrupted() -> None:
        with model[0].register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
            model(x)

    def another_model(amid):
        other = torch.ones(2, requires_grad=True)
        other.register_hook(amid.stay)
        (2 * other).sum().backward()

    def close_elsewhere() -> None:
        with runtime.gathered(model), pytest.raises(tiermem.TiermemError, match="close inside"):
            runtime.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(closing, "copies", lambda *_, **__: interrupt())
            with pytest.raises(KeyboardInterrupt):
                runtime.close(restore_model=True)

    # The interrupted call in a thread that goes on: its saved-tensor hooks stay there, and end with it.
    with ThreadPoolExecutor(1) as interrupted, _Amid(another_model), ThreadPoolExecutor(1) as elsewhere:
        interrupted.submit(call_interrupted).result(60)
        elsewhere.submit(close_elsewhere).result(60)
        assert torch.equal(model(x), expected)
        elsewhere.submit(runtime.close).result(60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [False, True])  # the first call marks where graphs can be cut
@pytest.mark.parametrize("restore_model", [False, True])
def test_closing_inside_forward_backward_is_refused_and_closes_nothing(restore_model, cut, tmp_path):
    model, batches = mlp(), [torch.randn(4, 6), torch.randn(4, 6)]
    expected = [model(x).sum().item() for x in batches]
    runtime = offload(model, tmp_path)
    optimizer = tiermem.AdamW(model.parameters())
    if cut:
        runtime.forward_backward(batches, lambda x: model(x).sum())
        optimizer.zero_grad()

    def closing(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        runtime.close(restore_model=restore_model)
        return loss

    with pytest.raises(tiermem.TiermemError, match=r"close inside runtime\.forward_backward\(\): .*nothing is closed"):
        runtime.forward_backward(batches, closing)
    optimizer.zero_grad()
    losses = runtime.forward_backward(batches, lambda x: model(x).sum())
    assert [loss.item() for loss in losses] == expected
    runtime.close(restore_model=restore_model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "found", [None, 5, b"folder", "", *list(os.scandir(b"/"))[:1]], ids=["None", "number", "bytes", "empty", "entry"]
)
def test_no_path_where_a_path_is_expected(found, tmp_path):
    swap_files = tmp_path / "swap"
    swap_files.mkdir()
    with offload(Stack(), swap_files) as runtime:
        said = "an empty one" if found == "" else type(found).__name__
        for verb in ("snapshot", "save_pretrained", "timeline"):
            if verb == "timeline" and found is None:
                continue  # only the report is wanted then
            with pytest.raises(tiermem.ConfigError, match=rf"{verb}: expected a path, .* `path`, found {said}"):
                getattr(runtime, verb)(found)
            with pytest.raises(tiermem.ConfigError, match=rf"{verb}: expected a path without null characters"):
                getattr(runtime, verb)("a\0b")
        runtime.save_pretrained(str(tmp_path / "model"))
        runtime.timeline(str(tmp_path / "trace"))


def test_empty_paths_are_not_the_folder_the_program_runs_in(tmp_path, monkeypatch):
    model, swap_files = Stack(), tmp_path / "swap"
    swap_files.mkdir()
    config = config_for(swap_files, 32 * MIB, "step")
    with offload(Stack(), swap_files) as runtime:
        runtime.save_pretrained(tmp_path / "weights")
        runtime.snapshot(tmp_path / "snapshot").wait()
    monkeypatch.chdir(tmp_path / "weights")
    with pytest.raises(tiermem.ConfigError, match=r"weights: expected the path .* found an empty one"):
        tiermem.offload(model, config, weights="")
    monkeypatch.chdir(tmp_path / "snapshot")
    with pytest.raises(tiermem.ResumeError, match=r"resume='': expected False, True, 'auto' or the folder of a snapsh"):
        tiermem.offload(model, config, resume="")
    assert list(swap_files.iterdir()) == []


def test_micro_batches_and_losses_of_another_kind(tmp_path):
    with offload(Stack(), tmp_path) as runtime:
        with pytest.raises(tiermem.ConfigError, match=r"micro_batches: expected several, .* found int"):
            runtime.forward_backward(5)
        with pytest.raises(tiermem.ConfigError, match="loss: expected a function of a micro-batch, found str"):
            runtime.forward_backward([torch.ones(2)], "mean")


def test_writing_into_a_sharded_parameter(tmp_path):
    model = Stack()
    with offload(model, tmp_path) as runtime:
        before = runtime.parameter(model.shift)
        for write in (lambda: model.shift.add_(1.0), lambda: nn.init.normal_(model.layers[0].up.weight)):
            with pytest.raises(tiermem.TiermemError, match="write=True"), torch.no_grad():
                write()
        assert torch.equal(runtime.parameter(model.shift), before)
        tokens_batch(model).backward()


class Leaking(Stack):
    """Keeps a view of a weight, as a hook or a metric might."""

    keep = False
    kept = None

    def forward(self, tokens):
        if self.keep:
            self.kept = self.layers[1].up.weight.detach()[:2]
        x = self.embed(tokens) + self.shift
        for number, layer in enumerate(self.layers):
            if self.keep and number == 1:
                handle = layer.up.register_forward_hook(self._hold)
                x = layer(x)
                handle.remove()
            else:
                x = layer(x)
        return self.head(x)

    def _hold(self, module, _, __):
        self.kept = module.weight.detach()[:2]


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_a_kept_view_of_a_parameter_is_named_and_training_goes_on_without_it(update, tmp_path):
    torch.manual_seed(0)
    model = Leaking()
    with offload(model, tmp_path, update) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        for number in range(4):
            model.keep = number == 1
            values = runtime.parameter(model.layers[1].up.weight)
            tokens_batch(model).backward()
            if number == 1:
                assert torch.equal(model.kept, values[:2])
                with pytest.raises(tiermem.TiermemError, match=r"layers\.1.*clone\(\)"):
                    optimizer.step()
                assert torch.equal(model.kept, values[:2])
                model.kept = None
            optimizer.step()
            optimizer.zero_grad()
            assert not torch.equal(runtime.parameter(model.layers[1].up.weight), values)


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_an_exception_in_the_closure_of_a_step(update, tmp_path):
    model = Stack()
    with offload(model, tmp_path, update) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        before = weights_of(runtime)

        def bad():
            tokens_batch(model)
            raise ValueError("in the closure")

        def good():
            optimizer.zero_grad()
            loss = tokens_batch(model)
            loss.backward()
            return loss

        with pytest.raises(ValueError, match="in the closure"):
            optimizer.step(bad)
        assert equal(weights_of(runtime), before)
        for _ in range(3):
            assert optimizer.step(good).isfinite()
        assert not equal(weights_of(runtime), before)


# Faults of the drive.


class Drive:
    """The kernel's answer to transfers, from a moment on."""

    def __init__(self, monkeypatch) -> None:
        self.bad: str | None = None
        for call in ("preadv", "pwritev"):
            monkeypatch.setattr(SystemCalls, call, self.wrapped(call, getattr(SystemCalls, call)))

    def wrapped(self, call, real):
        def transfer(system, fd, view, offset):
            if self.bad == call:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(system, fd, view, offset)

        return transfer


@pytest.mark.parametrize(("update", "call"), half_of(["step", "forward", "backward"], ["preadv", "pwritev"]))
@pytest.mark.timeout(200)
def test_a_drive_that_fails_in_training(update, call, tmp_path, monkeypatch):
    drive = Drive(monkeypatch)
    model = Wide(depth=6)
    runtime = offload(model, tmp_path, update, budget_for(model, tmp_path, "least"))
    optimizer = tiermem.AdamW(model.parameters())

    def train(steps):
        for _ in range(steps):
            wide_batch(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime.settle()

    train(2)
    try:
        _fail(drive, call, train, tmp_path)
    finally:
        with contextlib.suppress(swap.SwapIOError):
            runtime.close()
    with pytest.raises(tiermem.TiermemError, match="closed"):
        runtime.settle()
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if "tiermem" in thread.name or "swap" in thread.name]


def _fail(drive, call, train, tmp_path):
    drive.bad = call
    with pytest.raises(swap.SwapIOError, match="EIO") as caught:
        train(3)
    assert caught.value.errno == errno.EIO
    assert Path(caught.value.path).parent == tmp_path
    with pytest.raises(swap.SwapIOError):  # it stays failed: nothing is computed with what may be lost
        train(3)


def test_a_refused_run_leaves_plain_training_as_it_was(tmp_path):
    """What was refused can still be trained without tiermem, with the same numbers."""

    def script(trainee):
        with contextlib.suppress(tiermem.BudgetError):
            offload(trainee.model, tmp_path, "step", 4096)
        optimizer = trainee.adamw(trainee.model.parameters())
        torch.manual_seed(3)
        loss = tokens_batch(trainee.model)
        loss.backward()
        optimizer.step()
        trainee.note(loss)

    assert torch.equal(plain(Stack, script).noted[0], plain(Stack, script).noted[0])


# Models that cannot be served, and values that would be lost.


def test_complex_parameters_that_are_to_be_trained_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    model.turns = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with refused(
        tiermem.ConfigError, "turns is torch.complex64 .* store its parts as real parameters", model, tmp_path
    ):
        offload(model, tmp_path)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("make", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 8))])
def test_a_scripted_part_is_refused(tmp_path, make):
    model = nn.Sequential(nn.Linear(8, 8), make(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))))
    with refused(tiermem.ConfigError, r"1 is a TorchScript module .*offload the module that", model, tmp_path):
        offload(model, tmp_path)


def test_a_lazy_module_is_refused(tmp_path):
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    with refused(tiermem.ConfigError, "0.weight has no shape yet: run the lazy module once", None, tmp_path):
        offload(model, tmp_path)


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_parameter_is_refused(tmp_path, layout):
    model = nn.Linear(8, 8)
    model.table = nn.Parameter(torch.eye(8).to_sparse(layout=layout))
    with refused(tiermem.ConfigError, r"parameter table has the layout torch.sparse_.*make it dense", None, tmp_path):
        offload(model, tmp_path)


def tied_by_data(frozen: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    return model.requires_grad_(not frozen)


def test_parameters_tied_by_their_data_are_refused(tmp_path):
    model = tied_by_data(frozen=False)
    with refused(tiermem.ConfigError, r"0\.weight and 1\.weight are two parameters in one memory", model, tmp_path):
        offload(model, tmp_path)
    for number in range(2):  # one of them would be trained, and the other keep its values
        model[number].weight.requires_grad_(False)
        with refused(tiermem.ConfigError, "two parameters in one memory", model, tmp_path):
            offload(model, tmp_path)
        model[number].weight.requires_grad_()
    frozen = tied_by_data(frozen=True)
    expected = frozen(torch.ones(2, 8))
    with offload(frozen, tmp_path, param_dtype="float32"):
        assert torch.equal(frozen(torch.ones(2, 8)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_that_share_a_part_of_their_memory_are_refused(dtype, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)).to(getattr(torch, dtype))
    model[1].weight = nn.Parameter(model[0].weight.detach()[4:], requires_grad=False)  # begins within it
    message = r"0\.weight and 1\.weight are two parameters in one memory"
    with refused(tiermem.ConfigError, message, model, tmp_path):
        offload(model, tmp_path)
    model[1].weight = nn.Parameter(model[0].weight.detach()[4:].clone())
    model[2].weight = nn.Parameter(model[0].weight.detach()[:, 4:])  # and so is what has a gap in each row
    with refused(tiermem.ConfigError, r"0\.weight and 2\.weight are two parameters in one", model, tmp_path):
        offload(model, tmp_path)


class Tied(nn.Module):
    """Two layers of which one has the other's weight, or a part of it, by its memory alone."""

    def __init__(self, tie) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        tie(self.one, self.two)


def tied_transposed(one, two):
    two.weight.data = one.weight.data.t()


def tied_frozen(one, two):
    two.weight = nn.Parameter(one.weight.data, requires_grad=False)
    one.requires_grad_(False)


def tied_in_part(one, two):
    two.weight = nn.Parameter(one.weight[:4])


def tied_by_an_attribute(one, two):
    two.rows = one.weight[2:]


@pytest.mark.parametrize("build", [tiermem.deferred_init, lambda: torch.device("meta")])
@pytest.mark.parametrize("tie", [tied_transposed, tied_frozen, tied_in_part, tied_by_an_attribute])
def test_what_shares_memory_in_a_model_that_has_none_yet_is_refused(tie, build, tmp_path):
    """Each got values of its own, and was trained by itself."""
    with build():
        model = Tied(tie)
    message = (
        r"one\.weight and two\.weight are two parameters in one memory|two\.rows is a view of parameter one\.weight"
    )
    with pytest.raises(tiermem.ConfigError, match=message):
        offload(model, tmp_path)


def test_columns_of_one_matrix_share_nothing(tmp_path):
    whole = torch.randn(8, 20)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(whole[:, :8])
    model[1].weight = nn.Parameter(whole[:, 8:16])
    model.register_buffer("rest", whole[:, 16:])
    offload(model, tmp_path).close()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(whole[:, 8:16])
    model.register_buffer("rest", whole[:1, 15:].expand(2, 5))
    with refused(tiermem.ConfigError, r"buffer rest is a view of parameter 1\.weight", model, tmp_path):
        offload(model, tmp_path)


def test_a_buffer_that_is_a_view_of_a_parameter(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].register_buffer("row", model[0].weight.detach()[3])
    with refused(tiermem.ConfigError, r"buffer 1\.row is a view of parameter 0\.weight", model, tmp_path):
        offload(model, tmp_path)
    model[1].row = model[0].weight.detach().flatten()[-1:]  # its last element
    with refused(tiermem.ConfigError, r"buffer 1\.row is a view of parameter 0\.weight", model, tmp_path):
        offload(model, tmp_path)
    model[0].weight.requires_grad_(False)  # never changes, so the copy stays right
    offload(model, tmp_path).close()


def test_an_attribute_that_is_a_view_of_a_parameter(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model[1].row = model[0].weight[3]
    with refused(tiermem.ConfigError, r"attribute 1\.row is a view of parameter 0\.weight", model, tmp_path):
        offload(model, tmp_path)
    model[1].row = model[0].weight[3].clone()
    offload(model, tmp_path).close()
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)))  # which computes the one that it leaves there
    offload(model, tmp_path).close()


@pytest.mark.parametrize(
    ("keep", "place"),
    [
        (lambda row: [row], r"kept\[0\]"),
        (lambda row: {"a": (7, row)}, r"kept\['a'\]\[1\]"),
    ],
)
def test_what_is_kept_in_a_list_or_a_dict_and_is_a_view_of_a_parameter(tmp_path, keep, place):
    """It gave the numbers of the first step in all of them, in silence."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model[1].kept = keep(model[0].weight.detach()[3])
    with refused(tiermem.ConfigError, rf"attribute 1\.{place} is a view of parameter 0\.weight", model, tmp_path):
        offload(model, tmp_path)
    model[1].kept = keep(model[0].weight)  # the parameter itself comes and goes as it should
    offload(model, tmp_path).close()


class Wordless:
    def __repr__(self):
        raise RuntimeError("it takes seconds to write this out")


def test_what_is_kept_beside_tensors_is_not_written_out(tmp_path):
    """A vocabulary, or what is known of each module by the module: their words are for errors alone."""
    model = nn.Linear(8, 8)
    model.known = {Wordless(): 7, "others": [Wordless(), {Wordless(): "seven"}]}
    offload(model, tmp_path).close()


class Backwards(nn.Module):
    def forward(self, weight):
        return weight.mT.mT  # a view


def backwards(module, name):
    return nn.utils.parametrize.register_parametrization(module, name, Backwards())


@pytest.mark.parametrize("computed", [nn.utils.spectral_norm, nn.utils.weight_norm, backwards])
def test_an_lstm_has_what_is_computed_of_a_parameter_in_a_list(tmp_path, computed):
    """The list is made anew before it is used."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model = computed(nn.LSTM(8, 8), "weight_hh_l0")
    x = torch.randn(3, 1, 8)
    with torch.no_grad():
        model(x)
        model.eval()
        expected = model(x)[0]
        with offload(model, tmp_path):
            assert torch.equal(model(x)[0], expected)


def test_a_buffer_beside_a_parameter_in_one_storage(tmp_path):
    model, whole = nn.Linear(8, 8, bias=False), torch.randn(3, 64)
    model.weight.data = whole[1].view(8, 8)
    model.register_buffer("before", whole[0])
    model.register_buffer("behind", whole[2])
    offload(model, tmp_path).close()


def test_a_model_left_by_its_runtime_is_not_taken_for_tied(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 8), nn.PReLU())
    model.register_parameter("a", nn.Parameter(torch.tensor(1.0)))
    model.register_parameter("b", nn.Parameter(torch.tensor(2.0)))
    with offload(model, tmp_path) as runtime:
        runtime.commit().wait()
    with tiermem.offload(model, config_for(tmp_path, 32 * MIB, "step"), resume=True) as runtime:
        assert runtime.parameter(model.b) == 2.0


def test_a_model_made_in_inference_mode_is_refused(tmp_path):
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    with refused(tiermem.ConfigError, "weight was made in torch.inference_mode", model, tmp_path):
        offload(model, tmp_path)


def test_values_assigned_while_paged_out_are_not_lost_in_silence(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiermem.offload(model, config_for(tmp_path, 32 * MIB, "step"), coalesce=0) as runtime:
        expected = model(torch.ones(2, 8)).detach()
        model[1].bias.data = torch.ones(8)
        with pytest.raises(tiermem.TiermemError, match=r"1\.bias was given other values .*gathered"):
            model(torch.ones(2, 8))
        assert torch.equal(model(torch.ones(2, 8)), expected)
        message = r"1\.weight was written in place while it was gathered for reading"
        with pytest.raises(tiermem.TiermemError, match=message), runtime.gathered(model):
            model[1].weight.data = torch.ones(8, 8)
        assert torch.equal(model(torch.ones(2, 8)), expected)
        model.half().float()  # what changes nothing in the end stays allowed
        tiermem.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()


class Masked(nn.Linear):
    def __init__(self, mask) -> None:
        super().__init__(8, 8)
        self.mask = nn.Parameter(mask, requires_grad=False)

    def forward(self, x):
        return super().forward(x) * self.mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_an_empty_mask_that_is_assigned_while_paged_out_is_not_lost_in_silence(dtype, tmp_path):
    """It looks like what stands in for a mask; so it was taken for that, and the mask stayed what it was."""
    model = Masked(torch.ones(8, dtype=dtype))
    with offload(model, tmp_path, param_dtype="float32") as runtime:
        model.float().cpu()
        expected = model(torch.ones(2, 8)).detach()
        model.mask.data = torch.zeros(8, dtype=dtype)
        with pytest.raises(tiermem.TiermemError, match=r"mask was given other values .*gathered"):
            model(torch.ones(2, 8))
        assert torch.equal(model(torch.ones(2, 8)), expected)
        with runtime.gathered(model, write=True):
            model.mask.data = torch.zeros(8, dtype=dtype)
        assert not model(torch.ones(2, 8)).any()


class Asking(nn.Parameter):
    """Has operations of its own, so that it cannot be told of them while it is paged out."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def test_what_is_written_unseen_while_paged_out_is_told_of_once(tmp_path):
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 8))
    model[0].bias = Asking(torch.ones(1))
    with tiermem.offload(model, config_for(tmp_path, 32 * MIB, "step"), coalesce=0):
        expected = model(torch.ones(2, 8)).detach()
        with torch.no_grad():
            model[0].bias.fill_(3.0)
        with pytest.raises(tiermem.TiermemError, match="was written while its values were paged out"):
            model(torch.ones(2, 8))
        assert torch.equal(model(torch.ones(2, 8)), expected)


def test_values_assigned_while_lent_for_writing_count(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiermem.offload(model, config_for(tmp_path, 32 * MIB, "step"), coalesce=0) as runtime:
        with runtime.gathered(model[0], write=True):
            model[0].weight.data = torch.arange(64.0).view(8, 8).t()
        assert torch.equal(runtime.parameter(model[0].weight), torch.arange(64.0).view(8, 8).t())
        assert torch.equal(runtime.master(model[0].weight), torch.arange(64.0).view(8, 8).t())
        message = r"0\.bias was given values of shape \(3,\), expected \(8,\)"
        with pytest.raises(tiermem.TiermemError, match=message), runtime.gathered(model[0], write=True):
            model[0].bias.data = torch.ones(3)
        message = r"0\.bias was given values of .*torch.float64 .*expected .*torch.float32"
        with pytest.raises(tiermem.TiermemError, match=message), runtime.gathered(model[0], write=True):
            model[0].bias.data = torch.ones(8, dtype=torch.float64)
        assert runtime.parameter(model[0].bias).shape == (8,)


@pytest.mark.parametrize("words", [4, 9])
def test_another_shape_is_refused_with_a_way_that_works(words, tmp_path):
    """As resize_token_embeddings makes one; fewer rows of a placeholder are all NaN, as a placeholder is."""
    model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 8))
    ids, rows = torch.tensor([0, 3]), min(6, words)

    def resize() -> None:
        values = torch.zeros(words, 8)
        values[:rows] = model[0].weight.data[:rows]
        model[0].weight.data = values

    with tiermem.offload(model, config_for(tmp_path, 32 * MIB, "step"), coalesce=0) as runtime:
        expected = model(ids).detach()
        message = rf"0\.weight was given values of shape \({words}, 8\), expected \(6, 8\).*restore_model=True"
        with pytest.warns(RuntimeWarning, match="paged out"):
            resize()
        with pytest.raises(tiermem.TiermemError, match=message):
            model(ids)
        with pytest.raises(tiermem.TiermemError, match=message), runtime.gathered(model, write=True):
            resize()
        assert torch.equal(model(ids), expected)
        runtime.close(restore_model=True)
    resize()
    with tiermem.offload(model, config_for(tmp_path, 32 * MIB, "step"), coalesce=0) as runtime:
        assert torch.equal(model(ids), expected)
        assert runtime.parameter(model[0].weight).shape == (words, 8)


def test_a_part_of_a_parameters_own_values_is_not_taken_for_them(tmp_path):
    """It begins where they do. What else was written meanwhile stays, and its master follows."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6))
    weight, bias = model[0].parameters()

    def assign(cut, *, also: bool) -> None:
        weight.data = cut(weight.data)
        bias.data = bias.data + 1 if also else bias.data.add_(1)

    with tiermem.offload(model, config_for(tmp_path, 32 * MIB, "step"), coalesce=0) as runtime:
        expected = runtime.parameter(bias)
        cuts = (lambda values: values[:5], r"\(5, 8\)"), (torch.Tensor.t, r"\(8, 6\)")
        for (cut, found), also in itertools.product(cuts, (False, True)):
            message = rf"0\.weight was given values of shape {found}.*expected \(6, 8\)"
            with pytest.raises(tiermem.TiermemError, match=message), runtime.gathered(model, write=True):
                assign(cut, also=also)
            expected = expected + 1
            assert torch.equal(runtime.parameter(bias), expected)
            assert torch.equal(runtime.master(bias), expected)
        with pytest.raises(tiermem.TiermemError, match=r"1\.weight was written in place"), runtime.gathered(model):
            model[1].weight.data = model[1].weight.data.t()
        assert model(torch.ones(2, 8)).shape == (2, 6)


def test_a_step_inside_gathered(tmp_path):
    model = Stack()
    with offload(model, tmp_path) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        tokens_batch(model).backward()
        with runtime.gathered(model), pytest.raises(tiermem.TiermemError, match=r"cannot be updated: .*gathered"):
            optimizer.step()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 1


def test_gathered_of_something_else(tmp_path):
    model = Stack()
    with offload(model, tmp_path) as runtime:
        with pytest.raises(tiermem.ConfigError, match="module, a parameter or several, found int"):
            runtime.gathered(3).__enter__()
        beside, other = nn.Linear(2, 2), Stack()
        with runtime.gathered(nn.ModuleList([model, beside])):  # what is nobody's page is left alone
            assert not any(parameter.isnan().any() for parameter in model.parameters())
        (tmp_path / "other").mkdir()
        with offload(other, tmp_path / "other"):
            for what in (beside, nn.ModuleList([model, other])):
                with pytest.raises(tiermem.ConfigError, match="does not belong to this runtime"):
                    runtime.gathered(what).__enter__()


def test_resume_given_as_a_number(tmp_path):
    with refused(tiermem.ConfigError, "resume=1: expected False, True", None, tmp_path):
        tiermem.offload(Stack(), config_for(tmp_path, 32 * MIB, "step"), resume=1)


def test_calls_from_several_threads_at_a_time_are_refused(tmp_path):
    """And leave the thread that was first, and the model, alone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    errors: list[Exception] = []

    def call() -> None:
        try:
            model(torch.ones(2, 8))
        except tiermem.TiermemError as error:
            errors.append(error)

    def meanwhile(*_: object) -> None:
        thread = threading.Thread(target=call, name="second")
        thread.start()
        thread.join()

    with offload(model, tmp_path):
        expected = model(torch.ones(2, 8)).detach()
        call()
        meanwhile()
        assert errors == []
        with model[1].register_forward_hook(meanwhile):
            assert torch.equal(model(torch.ones(2, 8)), expected)
        (error,) = errors
        assert "called in thread 'second' while thread 'MainThread' was inside" in str(error)
        model(torch.ones(2, 8)).sum().backward()


def test_what_may_be_asked_from_another_thread_beside_a_step(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    steps: list[int] = []

    def ask() -> None:
        commit.wait()
        steps.append(runtime.statistics().steps)
        assert runtime.timeline() is not None
        assert runtime.committed == {"n": 0}

    def ask_beside(*_: object) -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(ask).result(30)

    with offload(model, tmp_path) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        commit = runtime.commit({"n": 0})
        with model[1].register_forward_hook(ask_beside), model[0].weight.register_hook(ask_beside):
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert steps == [1, 1]
        runtime.close(remove=True)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("divide", [nn.parallel.DistributedDataParallel, fully_shard])
def test_a_model_is_divided_over_ranks_once(tmp_path, divide):
    """By us: torch's wrapper around ours, and ours around torch's, are told so."""
    model = mlp()
    with offload(model, tmp_path):
        with pytest.raises(tiermem.TiermemError, match="use the model as it is"):
            divide(model)
        model(torch.ones(2, 6)).sum().backward()
    divided = divide(mlp())
    with pytest.raises(
        tiermem.ConfigError, match=r"(found DistributedDataParallel|is a DTensor).*offload the model itself"
    ):
        offload(divided, tmp_path)
    divided(torch.ones(2, 6)).sum().backward()


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Linear(4, 4), (2, 4)),
        (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
        (lambda: nn.LayerNorm(4), (2, 4)),
        (lambda: nn.LSTM(4, 4), (2, 4)),
    ],
)
def test_inputs_of_another_dtype_than_the_parameters(tmp_path, make, inputs):
    """float32 where nobody asked for bfloat16: it is the default, and torch does not know why it is so."""
    model = nn.Sequential(make())
    with offload(model, tmp_path, param_dtype="bfloat16"):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            model(torch.randn(inputs))
        (note,) = raised.value.__notes__
        assert "Config(param_dtype='bfloat16')" in note
        assert "inputs of that dtype" in note
        model(torch.randn(inputs).bfloat16())
        with pytest.raises((RuntimeError, ValueError, IndexError)) as raised:
            model(torch.randn(3).bfloat16())
        assert not hasattr(raised.value, "__notes__"), "it is not the dtype"
        model.register_forward_pre_hook(lambda *_: tiermem.Config(swap_dirs=["."], param_dtype="int3"))
        with pytest.raises(tiermem.ConfigError, match="param_dtype") as raised:
            model(torch.randn(inputs).bfloat16())
        assert not hasattr(raised.value, "__notes__"), "it is not that of inputs"


def test_threads_that_take_turns(tmp_path):
    model, lock = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), threading.Lock()
    errors: list[Exception] = []

    def train() -> None:
        try:
            for _ in range(10):
                with lock:
                    model(torch.ones(2, 8)).sum().backward()
        except Exception as error:  # noqa: BLE001 - whatever it is
            errors.append(error)

    with tiermem.offload(model, config_for(tmp_path, "64KiB", "step"), coalesce=0) as runtime:
        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert torch.equal(runtime.gradient(model[1].bias), torch.full((8,), 60.0))
