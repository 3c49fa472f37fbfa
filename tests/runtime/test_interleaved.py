"""Micro-batches that stop inside a context and go on in it, all on the thread of the caller: each has its own."""

from __future__ import annotations

import contextlib
import contextvars
import os
import subprocess
from typing import Any

import pytest
import torch
from doubles_combinations import half_of, some_of
from doubles_models import Block
from doubles_together import Beside, Chain, leased_pages, rows
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Scaling(TorchFunctionMode):
    """What tanh gives is multiplied by a factor of this pass through the model."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, function, _, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * self.factor if function is torch.tanh else result


class ScalingBelow(TorchDispatchMode):
    """The same below autograd, which does not see it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * self.factor if function is torch.ops.aten.tanh.default else result


class Between(Chain):
    """The model's own context is around the first two layers; what differs in it is the first number of the rows."""

    def forward(self, x):
        first, second, third = self.layers
        with self.around(float(x[0, 0])):
            x = second(torch.tanh(first(x)))
        return third(torch.tanh(x))

    def around(self, number: float) -> Any:
        raise NotImplementedError


class Modes(Between):
    def around(self, number):
        return Scaling(1.0 + number)


class Dispatched(Between):
    def around(self, number):
        return ScalingBelow(1.0 + number)


class Cast(Between):
    """Every second micro-batch computes in bfloat16."""

    def around(self, number):
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=number > 0.7)


class Packed(Between):
    """What is saved of the rows for backward is not what was computed with."""

    def around(self, number):
        def pack(tensor):
            return tensor * (1.0 + number) if tensor.shape[0] == 4 else tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class Frozen(Chain):
    """Two layers are used without a graph by micro-batches whose first number is small."""

    def forward(self, x):
        first, second, third = self.layers
        with torch.no_grad() if float(x[0, 0]) < 0.7 else contextlib.nullcontext():
            y = second(first(x))
        return third(x + y.detach())


class Inferred(Chain):
    """How large the rows are to be is found in inference mode."""

    def forward(self, x):
        with torch.inference_mode():
            size = float(super().forward(x).square().mean())
        return super().forward(x / size)


FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)


class Variables(Chain):
    """A context variable set before a layer is read behind it."""

    def forward(self, x):
        token = FACTOR.set(float(x[0, 0]))
        for layer in self.layers:
            x = layer(x) * FACTOR.get()
        FACTOR.reset(token)
        return x


class Checkpointed(Chain):
    """Two units in one checkpoint."""

    reentrant = False

    def forward(self, x):
        first, second, third = self.layers
        x = x.requires_grad_()
        return third(checkpoint(lambda x: second(first(x)), x, use_reentrant=self.reentrant))


class CheckpointedByNesting(Checkpointed):
    reentrant = True


class Caught(Chain):
    """An error in the second layer is dealt with in the model."""

    def forward(self, x):
        first, second, third = self.layers
        x = first(x)
        try:
            return third(second(x[:, : 16 if float(x[0, 0].detach()) > 0 else 8]))
        except RuntimeError:
            return third(x)


@pytest.mark.parametrize(
    ("make", "update"),
    half_of(
        [Modes, Dispatched, Cast, Packed, Frozen, Inferred, Variables, Checkpointed, CheckpointedByNesting, Caught],
        ["step", "backward"],
    ),
)
def test_each_micro_batch_has_its_own_surroundings(make, update, tmp_path):
    beside = Beside(make, tmp_path, update=update)
    with beside.runtime:
        for _ in range(3):
            beside.step(rows(4))
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
            assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            assert FACTOR.get() == 1.0
        beside.compare()


def test_the_callers_own_surroundings_stay_and_are_not_inherited_but_for_autocast_and_hooks(tmp_path):
    beside = Beside(Chain, tmp_path)
    with beside.runtime, torch.autograd.set_multithreading_enabled(False):
        beside.step(rows())
        with Scaling(3.0):
            beside.bring(rows())
            assert float(torch.tanh(torch.zeros(1)) + torch.tanh(torch.tensor([20.0]))) == 3.0
        assert not torch.autograd.is_multithreading_enabled()


class Scaled(Chain):
    """Reads a context variable that is none of its own."""

    def forward(self, x):
        return super().forward(x) * FACTOR.get()


def test_the_callers_context_variables_are_those_of_the_micro_batches(tmp_path):
    beside = Beside(Scaled, tmp_path)
    token = FACTOR.set(3.0)
    with beside.runtime:
        for _ in range(3):  # in threads first, then on stacks of their own
            beside.step(rows(4))
        beside.compare()
    FACTOR.reset(token)


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_inside_a_context_leaves_nothing_of_it(failing, tmp_path):
    class Failing(Modes):
        def around(self, number):
            if number < 0:
                self.layers[1].register_forward_pre_hook(fails)
            return super().around(number)

    def fails(*_: Any) -> None:
        raise ValueError("mine")

    beside = Beside(Failing, tmp_path)
    with beside.runtime:
        for _ in range(2):
            beside.step(rows())
        broken = rows()
        broken[failing][0, 0] = -1.0
        with pytest.raises(ValueError, match="mine"):
            beside.bring(broken)
        assert torch._C._len_torch_function_stack() == 0
        assert not leased_pages(beside.runtime)
        beside.model.layers[1]._forward_pre_hooks.popitem()
        beside.ours.zero_grad()
        beside.step(rows())
        beside.compare()


def joined_last(directory, update: str = "step") -> Beside:
    class JoinedLast(Chain):
        """The last two layers cannot be parted, and backward through both needs both: which goes by itself then."""

        def forward(self, x):
            first, second, third = self.layers
            x = first(x)
            return third(torch.sin(x)) + second(x)

    return Beside(JoinedLast, directory, update=update)


@pytest.mark.parametrize("update", ["step", "forward", "backward", "auto"])
def test_a_backward_that_needs_another_unit_gets_it_without_waiting(update, tmp_path):
    beside = joined_last(tmp_path, update)
    with beside.runtime:
        for _ in range(2):
            beside.step(rows())
        # As if it could be cut: what its backward needs is then more than the unit that forward came to last.
        cutting = beside.runtime._house.cutting
        cutting.why_not = None
        gathers = beside.runtime._house.gatherer.statistics().gathers
        beside.bring(rows())
        assert cutting.why_not is None
        assert beside.runtime._house.gatherer.statistics().gathers > gathers + 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by dynamo, as it looks
def test_compiled_layers(tmp_path):
    class Compiled(Chain):
        def layer(self) -> nn.Module:
            return torch.compile(Block(16), backend="eager")

    beside = Beside(Compiled, tmp_path)
    with beside.runtime:
        for _ in range(4):
            beside.step(rows())
        beside.compare()


HEAP = """
import ctypes, os, sys, torch, tiermem
from tiermem.memory import heap
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
config = tiermem.Config(host_memory="1MiB", swap_dirs=[sys.argv[1]], device="cpu", param_dtype="float32")
if sys.argv[2] == "returned":
    heap.return_large_blocks()
with tiermem.offload(model, config, coalesce=0) as runtime:
    for number in range(3):
        print(sorted(heap._asked))
        runtime.forward_backward([torch.randn(2, 8)] * 2, lambda rows: model(rows).sum())
"""


@pytest.mark.parametrize(
    ("decided", "environment", "expected"),
    some_of(
        [("", {}, [[], [], ["keep"]])],
        [
            ("returned", {}, [["return"]] * 3),
            ("", {"MALLOC_ARENA_MAX": "2"}, [[]] * 3),
            ("", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, [[]] * 3),
        ],
    ),
)
def test_freed_memory_is_kept_unless_that_was_decided_otherwise(decided, environment, expected, warm_python, tmp_path):
    # Of these variables those of the case only, whatever the machine has.
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [warm_python.path, "-c", HEAP, str(tmp_path), decided],
        env={**plain, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(each) for each in expected]
