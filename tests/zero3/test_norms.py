"""Norms of gradients, with compiled loops and without."""

from __future__ import annotations

import copy
import itertools
import math
import signal
import subprocess
import threading

import pytest
import torch
from doubles_combinations import number_of, some_of
from doubles_sharded import Sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tiermem.errors import InvariantError
from tiermem.zero3 import norms
from tiermem.zero3.norms import add_pair, gradient_norm, measuring_copy, team_loops
from tiermem.zero3.waiting import Waiting


@pytest.fixture(params=["compiled", "by torch"])
def form(request, monkeypatch):
    """Both ways of adding up."""
    if request.param == "by torch":
        monkeypatch.setattr(norms, "squares_loops", lambda: None)
    elif norms.squares_loops() is None:
        pytest.skip("numba cannot compile the loops here")
    return request.param


@pytest.mark.parametrize("numel", [0, 1, 1000, 3 << 16, (3 << 16) + 1, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_s_norm_is_as_exact_as_its_dtype(numel, dtype, form):
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    norm = gradient_norm(gradient)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm.shape == ()
    if dtype == torch.float32:
        assert torch.equal(norm, torch.linalg.vector_norm(gradient))  # the bits of torch, which are less exact
    else:
        torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(gradient.double()), rtol=3e-6, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_s_norm_tells_what_is_not_finite(value, form):
    gradient = torch.zeros(1_000_000, dtype=torch.bfloat16)
    gradient[999_999] = value
    assert not torch.isfinite(gradient_norm(gradient))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [1e30, -3e38])
def test_a_norm_is_finite_where_all_elements_are(value, dtype, form):
    """Too large for float32 it is the largest there is: such a step is none to be skipped."""
    gradient = torch.full((10_000,), value, dtype=dtype)
    exact = abs(float(gradient[0])) * 100.0
    norm = float(gradient_norm(gradient))
    assert math.isclose(norm, min(exact, torch.finfo(torch.float32).max), rel_tol=1e-6)
    gradient[0] = float("inf")
    assert math.isinf(gradient_norm(gradient))


def _narrow(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@given(numel=st.integers(0, 30_000), cuts=st.lists(st.integers(0, 30_000), max_size=6))
def test_where_a_copy_is_cut_changes_no_bit_of_its_squares(numel, cuts):
    gradient = _narrow(numel)
    copying, target = measuring_copy(gradient), torch.zeros(numel, dtype=torch.bfloat16)
    if copying is None:
        pytest.skip("numba cannot compile the loops here")
    ends = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for begin, end in itertools.pairwise(ends):
        copying.copy(begin, target[begin:end])
    assert torch.equal(target, gradient)
    assert torch.equal(gradient_norm(gradient, copying.squares), gradient_norm(gradient))


def _assert_same_bits(sums, expected):
    """Except those of a NaN: torch's depend on the processor, and on whether the element was one of a vector."""
    numbers = ~expected.isnan()
    assert torch.equal(sums.isnan(), ~numbers)
    assert torch.equal(sums[numbers].view(torch.int16), expected[numbers].view(torch.int16))


@given(numel=st.integers(0, 30_000), cuts=st.lists(st.integers(0, 30_000), max_size=6), scale=st.integers(-140, 127))
def test_sums_have_the_bits_of_torch_and_their_squares_those_of_the_sums(numel, cuts, scale):
    gradient, other = _narrow(numel).mul_(2.0**scale), _narrow(numel, seed=1).mul_(2.0**scale)
    adding, target = measuring_copy(gradient), other.clone()
    if adding is None:
        pytest.skip("numba cannot compile the loops here")
    ends = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for begin, end in itertools.pairwise(ends):
        adding.add(begin, target[begin:end])
    expected = other + gradient
    _assert_same_bits(target, expected)
    if math.isfinite(adding.squares):
        assert torch.equal(gradient_norm(expected, adding.squares), gradient_norm(expected))


@given(
    numel=st.integers(0, 30_000),
    cuts=st.lists(st.integers(0, 30_000), max_size=6),
    scale=st.integers(-140, 127),
    adds=st.booleans(),
)
@settings(max_examples=number_of(50, 100))
def test_two_gradients_at_once_have_the_bits_of_one_after_the_other(numel, cuts, scale, adds):
    if team_loops() is None:
        pytest.skip("torch has no GNU OpenMP of its own here, or numba cannot compile the loops")
    earlier, later, place = (_narrow(numel, seed=seed).mul_(2.0**scale) for seed in range(3))
    adding, target, unmeasured = measuring_copy(later), place.clone(), place.clone()
    ends = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for begin, end in itertools.pairwise(ends):
        adding.add_pair(earlier, begin, target[begin:end], adds=adds)
        add_pair(earlier[begin:end], later[begin:end], unmeasured[begin:end], adds=adds)
    expected = place + earlier + later if adds else earlier + later
    _assert_same_bits(target, expected)
    _assert_same_bits(unmeasured, expected)
    if math.isfinite(adding.squares):
        assert adding.squares == norms.squares_loops().sum_of_squares(expected.view(torch.int16).numpy())


PAIR = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from tiermem.zero3.norms import measuring_copy, team_loops
one, other, place = torch.randn(3, 100_003, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
if team_loops() is not None:
    adding = measuring_copy(one)
    for cut in (slice(0, 5), slice(5, 100_003)):
        adding.add_pair(other, cut.start, place[cut], adds=True)
    print(torch.get_num_threads(), adding.squares.hex(), place.view(torch.int16).long().cumsum(0).sum().item())
"""


def test_any_number_of_threads_gives_the_same_bits(warm_python):
    """Each in a process of its own: threads that OpenMP has once made stay."""
    said = []
    for threads in some_of([1, 3], [2]):
        command = [warm_python.path, "-c", PAIR, str(threads)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        if not run.stdout:
            pytest.skip("torch has no GNU OpenMP of its own here, or numba cannot compile the loops")
        said.append(run.stdout.split())
    assert said[0][0] == "1"
    assert len({tuple(each[1:]) for each in said}) == 1


def test_pairs_that_are_added_wrongly_are_not_used():
    loops, team = norms.squares_loops(), norms.team_loops()
    if team is None:
        pytest.skip("torch has no GNU OpenMP of its own here, or numba cannot compile the loops")

    class OneLeftOut:
        @staticmethod
        def add_both(earlier, later, target, *, adds, total):
            return team.add_both(earlier, earlier, target, adds=adds, total=total)

    class WrongTotal:
        @staticmethod
        def add_both(*arrays, adds, total):
            return team.add_both(*arrays, adds=adds, total=total) + 1.0

    class NeverAdds:
        @staticmethod
        def add_both(*arrays, adds, total):
            return team.add_both(*arrays, adds=False, total=total)

    assert norms._are_right_in_pairs(team, loops)
    assert not norms._are_right_in_pairs(NeverAdds, loops)
    assert not norms._are_right_in_pairs(OneLeftOut, loops)
    assert not norms._are_right_in_pairs(WrongTotal, loops)


def test_what_waits_is_no_more_than_may_and_can_be_paired():
    if team_loops() is None:
        pytest.skip("torch has no GNU OpenMP of its own here, or numba cannot compile the loops")
    gradient = _narrow(10)
    waiting = Waiting(2 * gradient.nbytes)
    assert not waiting.accepts(0, _narrow(20)[::2])
    assert [waiting.accepts(parameter, gradient) for parameter in range(3)] == [True, True, False]
    assert waiting.pop(0) is gradient
    assert waiting.pop(0) is None
    assert list(waiting.pop_all()) == [(1, gradient)]


def test_a_pair_is_never_left_out_for_want_of_loops(monkeypatch):
    gradient = _narrow(10)
    assert norms.may_pair(gradient) is (norms.team_loops() is not None)
    assert not norms.may_pair(gradient[::2])
    monkeypatch.setattr(norms, "team_loops", lambda: None)
    assert not norms.may_pair(gradient)
    with pytest.raises(InvariantError, match="cannot be had"):
        add_pair(gradient, gradient, gradient.clone(), adds=True)


def test_every_pair_of_kinds_of_numbers_is_added_as_torch_adds_it():
    kinds = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.0078125, 256.0, -3.39e38, 3.39e38, 1e-40, -1e-40, 2e-38])
    kinds = torch.cat([kinds, torch.tensor([float("inf"), float("-inf"), float("nan")])]).to(torch.bfloat16)
    one, other = kinds.repeat_interleave(len(kinds)), kinds.repeat(len(kinds))
    adding, target = measuring_copy(one), other.clone()
    if adding is None:
        pytest.skip("numba cannot compile the loops here")
    adding.add(0, target)
    expected = other + one
    _assert_same_bits(target, expected)
    assert math.isnan(adding.squares)


class ActsAsIf(torch.Tensor):
    """Of a class of its own, whose bytes may be elsewhere."""


@pytest.mark.parametrize(
    "gradient",
    [
        torch.zeros(5, dtype=torch.float16),
        torch.zeros(5),
        torch.zeros(5, dtype=torch.bfloat16, device="meta"),
        torch.zeros(5, dtype=torch.bfloat16).as_subclass(ActsAsIf),
    ],
)
def test_what_is_not_bfloat16_in_host_memory_is_left_to_torch(gradient):
    assert measuring_copy(gradient) is None


def test_a_norm_on_a_device_is_not_looked_at():
    norm = gradient_norm(torch.zeros(5, dtype=torch.bfloat16, device="meta"))  # who looks at it gets an error
    assert (norm.device.type, norm.dtype, norm.shape) == ("meta", torch.float32, ())


@pytest.mark.parametrize(("check", "find"), [("_are_right", "squares_loops"), ("_are_right_in_pairs", "team_loops")])
def test_loops_that_do_not_pass_are_not_there(monkeypatch, check, find):
    assert (getattr(norms, find).__wrapped__() is None) is (getattr(norms, find)() is None)
    monkeypatch.setattr(norms, check, lambda *_: False)
    assert getattr(norms, find).__wrapped__() is None


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs a signal that comes to the first thread")
@pytest.mark.parametrize(("check", "find"), [("_are_right", "squares_loops"), ("_are_right_in_pairs", "team_loops")])
def test_an_alarm_amid_the_trial_is_raised_and_the_loops_are_used_afterwards(monkeypatch, check, find):
    found, real = getattr(norms, find)(), getattr(norms, check)
    if found is None:
        pytest.skip("there are no such loops here")

    def ring(*_):
        raise TimeoutError("an alarm, on purpose")

    def amid(*given):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return real(*given)

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        monkeypatch.setattr(norms, check, amid)
        with pytest.raises(TimeoutError):
            getattr(norms, find).__wrapped__()
    finally:
        signal.signal(signal.SIGUSR1, before)
    monkeypatch.setattr(norms, check, real)
    assert getattr(norms, find).__wrapped__() is found


def test_loops_that_add_up_wrongly_are_not_used(monkeypatch):
    loops = norms.squares_loops()
    if loops is None:
        pytest.skip("numba cannot compile the loops here")

    class WrongSquares:
        BLOCK = loops.BLOCK
        copy_and_add = staticmethod(loops.copy_and_add)
        sum_and_add = staticmethod(loops.sum_and_add)

        @staticmethod
        def sum_of_squares(bits):
            return loops.sum_of_squares(bits) * (1 + 1e-9)

    class WrongSums(WrongSquares):
        sum_of_squares = staticmethod(loops.sum_of_squares)

        @staticmethod
        def sum_and_add(bits, begin, target, total, block):
            total = loops.sum_and_add(bits, begin, target, total, block)
            target[-1] ^= 1
            return total

    class WrongCopy(WrongSums):
        sum_and_add = staticmethod(loops.sum_and_add)

        @staticmethod
        def copy_and_add(bits, begin, target, total):
            total = loops.copy_and_add(bits, begin, target, total)
            target[-1] ^= 1
            return total

    class Finite(WrongCopy):
        copy_and_add = staticmethod(loops.copy_and_add)

        @staticmethod
        def sum_of_squares(bits):
            return min(loops.sum_of_squares(bits), 3e38)

    assert norms._are_right(loops)
    assert not norms._are_right(WrongCopy)
    assert not norms._are_right(Finite)
    assert not norms._are_right(WrongSquares)
    assert not norms._are_right(WrongSums)


@pytest.mark.parametrize("size", [1.0, 1e25])
@pytest.mark.parametrize("hold", [True, False])
def test_the_norm_of_gradients_that_were_added_up_is_that_of_their_sum(size, hold, form):
    """Also where squares are too large for float32: then the sum is in the pages alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90)).to(torch.bfloat16)
    plain = copy.deepcopy(model)
    sharded = Sharded(model, dtype=torch.bfloat16, tile=2048, hold=hold)
    inputs = [torch.randn(5, 70).to(torch.bfloat16) for _ in range(3)]
    for _ in range(2):  # in the first step nobody knows how many come
        plain.zero_grad()
        for values in inputs:
            for each in (plain, model):
                (each(values).float() * size).sum().backward()
        for name, parameter in plain.named_parameters():
            assert torch.equal(sharded.gradient(name), parameter.grad), name
            exact = torch.linalg.vector_norm(parameter.grad.double())
            norm = sharded.scheduler.gradients.norm(sharded.slots[name][1].parameter)
            torch.testing.assert_close(norm.double(), exact, rtol=3e-6, atol=0)
        sharded.finish_step()
    assert sharded.leased() == []


@pytest.mark.parametrize("hold", [True, False])
def test_the_last_of_gradients_that_torch_adds_up_is_neither_copied_first_nor_changed(hold):
    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation.overloadpacket is torch.ops.aten.clone and args[0].dtype == torch.float32:
                copied.append(args[0].numel())
            return operation(*args, **(kwargs or {}))

    torch.manual_seed(0)
    sharded = Sharded(nn.Sequential(nn.Linear(70, 90)), tile=2048, hold=hold)  # the weight lies in several tiles
    (slot,) = (slot for _, slot in sharded.slots.values() if len(slot.shape) == 2)
    parameter, gradients = sharded.parameters[slot.parameter], sharded.scheduler.gradients
    upstream = torch.randn(2, 90, 70)
    given = list(upstream)
    kept = [gradient.clone() for gradient in given]
    copied: list[int] = []
    with Operations():
        for gradient in given:
            parameter.grad = gradient
            gradients.accumulate(slot.parameter)
    assert copied == []
    assert all(map(torch.equal, given, kept))
    assert torch.equal(gradients.read(slot.parameter), kept[0] + kept[1])
    assert torch.equal(gradients.norm(slot.parameter), gradient_norm((kept[0] + kept[1]).flatten()))
    gradients.release()
    assert sharded.leased() == []


class Shifted(nn.Module):
    """Adds parameters of other shapes than their gradients come in: these are views of what goes on to `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(70, 6)
        self.flat, self.square = nn.Parameter(torch.randn(24)), nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        y = torch.tanh(self.first(x)) + self.flat.view(4, 6)
        return torch.tanh(y) + self.square.view(4, 6)


def test_what_goes_on_upstream_is_not_added_to():
    torch.manual_seed(0)
    model = Shifted()
    plain = copy.deepcopy(model)
    sharded = Sharded(model)
    for batch in torch.randn(3, 4, 70):
        sharded.model(batch).square().sum().backward()
        plain(batch).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(sharded.gradient(name), parameter.grad), name


@pytest.mark.parametrize("hold", [True, False])
def test_gradients_are_added_up_without_memory_for_another_one(hold):
    """Of a large embedding it would be the most that a step takes beside its activations; the last batch alone did."""

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            result = operation(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() == 90 * 70 * 4:
                made.add(result.untyped_storage().data_ptr())
            return result

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90))
    plain = copy.deepcopy(model)
    sharded = Sharded(model, tile=2048, hold=hold)
    batches, made = torch.randn(3, 4, 70), set[int]()
    for _ in range(2):
        for batch in batches:
            made.clear()
            loss = sharded.model(batch).square().sum()
            with Large():
                loss.backward()
            assert len(made) <= 1, "the gradient itself"
            plain(batch).square().sum().backward()
        for name, parameter in plain.named_parameters():
            found = sharded.scheduler.gradients.read(sharded.slots[name][1].parameter)
            assert torch.equal(found, parameter.grad)
            norm = sharded.scheduler.gradients.norm(sharded.slots[name][1].parameter)
            assert torch.equal(norm, gradient_norm(parameter.grad.flatten()))
            parameter.grad = None
        sharded.finish_step()
