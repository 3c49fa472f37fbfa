"""What a caller keeps with a commit comes back equal: states of loaders, samplers, schedulers and optimizers."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiermem
from tiermem.runtime.extra import LARGEST, MARK, from_record, to_record

SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers(-5, 5) | st.just(MARK)
VALUES = st.recursive(
    SCALARS | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=number_of(40, 100))
@given(VALUES)
def test_what_goes_in_comes_out_through_json(value: Any) -> None:
    assert from_record(json.loads(json.dumps(to_record(value)))) == value


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.randn(shape) * 3).to(dtype)
    back = from_record(json.loads(json.dumps(to_record([value]))))[0]
    assert (back.dtype, back.shape) == (dtype, value.shape)
    assert torch.equal(back, value)
    back.zero_()  # its own memory, and writable


def test_a_transposed_tensor_and_one_with_a_graph() -> None:
    value = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    back = from_record(to_record(value))
    assert torch.equal(back, value)
    assert not back.requires_grad


def test_a_conjugate_that_is_only_marked_as_one() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert value.is_conj()
    assert torch.equal(from_record(to_record(value)), value)
    assert torch.equal(from_record(to_record(value.imag)), value.imag), "marked as negative"


def test_one_element_of_a_column() -> None:
    """Contiguous by torch's word, with a stride of its own."""
    value = torch.arange(6.0).reshape(2, 3)[:1, 1]
    assert torch.equal(from_record(to_record(value)), value)


def test_arrays_and_numbers_of_numpy() -> None:
    values = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "n": np.int64(7),
        "f": np.float32(0.1),
        "d": np.float64(2),
    }
    back = from_record(json.loads(json.dumps(to_record(values))))
    assert np.array_equal(back["a"], values["a"])
    assert back["a"].dtype == np.int16
    assert (back["n"], back["f"], back["d"]) == (7, np.float32(0.1), 2.0)
    assert isinstance(back["f"], np.float32)


def test_an_array_of_no_dimensions_is_one_again() -> None:
    """One that was kept before its kind was, is a number."""
    record = to_record(np.array(3, dtype=np.int16))
    back = from_record(json.loads(json.dumps(record)))
    assert isinstance(back, np.ndarray)
    assert (back.shape, back.dtype, back) == ((), np.int16, 3)
    del record["kind"]
    assert isinstance(from_record(record), np.int16)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [object()]}, r"extra\['a'\]\[0\]"),
        ({(1, 2): 3}, "keys"),
        ({"m": torch.empty(2, device="meta")}, "dense tensor with values, found one of torch.float32 on meta"),
        ({"s": torch.eye(2).to_sparse()}, "dense tensor"),
        ({"o": np.array([object()])}, "numbers, found ndarray of dtype object"),
        ({"o": np.ma.masked_array([1, 2], [0, 1])}, "numbers, found MaskedArray"),
        ({"b": bytes(LARGEST + 1)}, "file of its own"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(value: Any, says: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=says):
        to_record(value)


DIGITS = 10**4299


@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: [1, n, 2], lambda n: {"a": [0.5, n]}, lambda n: {n: "a"}])
def test_an_integer_of_more_digits_than_python_reads_is_refused_when_it_is_given(wrap: Any) -> None:
    for fits in (9 * DIGITS, -9 * DIGITS):
        assert from_record(json.loads(json.dumps(to_record(wrap(fits))))) == wrap(fits)
    for long in (10 * DIGITS, -10 * DIGITS, Long(10 * DIGITS)):
        with pytest.raises(tiermem.ConfigError, match="an integer of more than 4300 digits"):
            to_record(wrap(long))


class Long(int):
    """As enumerations are."""


def test_a_nested_tensor_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, as torch says once
        value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(tiermem.ConfigError, match="dense tensor with values"):
        to_record([value])


def test_what_holds_itself_is_refused() -> None:
    itself: dict[str, Any] = {}
    itself["again"] = [itself]
    with pytest.raises(tiermem.ConfigError, match=r"^extra: expected .* may hold itself"):
        to_record(itself)


def test_the_state_of_a_program_s_own_random_numbers_survives_a_resume(tmp_path: Path) -> None:
    """Python's is a tuple of tuples, and no list is taken for it."""
    config = tiermem.Config(device="cpu", host_memory="4MiB", swap_dirs=[tmp_path], param_dtype="float32")
    own = random.Random(3)
    with tiermem.offload(nn.Linear(8, 8), config) as runtime:
        runtime.commit(extra=own.getstate()).wait()
        assert runtime.committed == own.getstate()
    expected = own.random()
    with tiermem.offload(nn.Linear(8, 8), config, resume=True) as runtime:
        own.setstate(runtime.committed)
        assert own.random() == expected


def test_states_of_everything_in_a_loop_survive_a_resume(tmp_path: Path) -> None:
    """As a loop would keep them: a sampler's generator, a scheduler with two groups, and the optimizer."""
    config = tiermem.Config(device="cpu", host_memory="4MiB", swap_dirs=[tmp_path], param_dtype="float32")
    generator = torch.Generator().manual_seed(3)

    def start(*, resume: bool) -> tuple[tiermem.Runtime, Any, Any, Any]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        runtime = tiermem.offload(model, config, resume=resume)
        optimizer = tiermem.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}])
        return runtime, model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    runtime, model, optimizer, scheduler = start(resume=False)
    with runtime:
        for _ in range(3):
            model(torch.randn(4, 8, generator=generator)).sum().backward()
            optimizer.step()
            scheduler.step()
        states = {"loader": {"generator": generator.get_state(), 0: b"worker"}, "scheduler": scheduler.state_dict()}
        extra = {"step": 3, "optimizer": optimizer.state_dict(), **states}
        runtime.commit(extra=extra).wait()
        expected = torch.randn(4, 8, generator=generator)
    runtime, model, optimizer, scheduler = start(resume=True)
    with runtime:
        kept = runtime.committed
        assert kept["loader"][0] == b"worker"
        assert kept["step"] == 3
        optimizer.load_state_dict(kept["optimizer"])
        scheduler.load_state_dict(kept["scheduler"])
        assert optimizer.state_dict() == kept["optimizer"] == extra["optimizer"]
        assert scheduler.get_last_lr() == extra["scheduler"]["_last_lr"]
        restored = torch.Generator()
        restored.set_state(kept["loader"]["generator"])
        assert torch.equal(torch.randn(4, 8, generator=restored), expected)
        with pytest.raises(tiermem.ConfigError, match="offloaded parameter"):
            runtime.commit(extra={"weight": model[0].weight})
