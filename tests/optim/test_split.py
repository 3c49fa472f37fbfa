"""The split of masters is lossless for every class of bit patterns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.optim.split import (
    BitMarks,
    BitMasks,
    Marks,
    SignMarks,
    SignMasks,
    complete,
    join,
    join_masked,
    split,
    split_masked,
)

HIGH = st.one_of(
    st.integers(0, 0xFFFF),
    st.sampled_from([0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0x7FC0, 0xFF80, 0xFFFF, 0x3F80, 0x3F81]),
)
LOW = st.one_of(st.integers(0, 0xFFFF), st.sampled_from([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]))


def from_bits(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32).copy()).view(torch.float32)


def completed(parameter: torch.Tensor, remainder: torch.Tensor, marks: Marks) -> torch.Tensor:
    master = parameter.to(torch.float32)
    complete(master, remainder, marks, torch.empty(master.numel(), dtype=torch.int32))
    return master


def check_round_trip(master: torch.Tensor, moment: torch.Tensor) -> None:
    numel = master.numel()
    parameter = torch.empty(numel, dtype=torch.bfloat16)
    remainder = torch.empty(numel, dtype=torch.int16)
    scratch = torch.empty(numel, dtype=torch.int32)
    exp_avg_sq, back = moment.clone(), torch.empty(numel)
    marks = SignMarks(exp_avg_sq)
    split(master, parameter, remainder, marks, scratch)
    assert torch.equal(parameter.view(torch.int16), master.to(torch.bfloat16).view(torch.int16))
    assert torch.equal(exp_avg_sq.abs().view(torch.int32), moment.abs().view(torch.int32))
    copy = completed(parameter, remainder, marks)
    join(parameter, remainder, marks, back, scratch)
    assert torch.equal(copy.view(torch.int32), back.view(torch.int32))
    nan = master.isnan()
    assert torch.equal(back.isnan(), nan)
    assert torch.equal(back.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert torch.equal(exp_avg_sq.view(torch.int32), moment.view(torch.int32))
    plane, other = torch.zeros(-(-numel // 8), dtype=torch.uint8), torch.empty(numel)
    split(master, parameter, remainder, BitMarks(plane), scratch)
    assert torch.equal(completed(parameter, remainder, BitMarks(plane)).view(torch.int32), copy.view(torch.int32))
    join(parameter, remainder, BitMarks(plane), other, scratch)
    assert torch.equal(other.view(torch.int32), back.view(torch.int32))
    assert not plane.any()


def check_masked(master: torch.Tensor, moment: torch.Tensor) -> None:
    """Masks over all elements do what the search for ties does, bit for bit, in every tensor."""
    found = []
    for there, back in ((split, join), (split_masked, join_masked)):
        parameter = torch.empty(master.numel(), dtype=torch.bfloat16)
        remainder = torch.empty(master.numel(), dtype=torch.int16)
        scratch, exp_avg_sq = torch.empty(master.numel(), dtype=torch.int32), moment.clone()
        plane = torch.zeros(-(-master.numel() // 8), dtype=torch.uint8)
        signs, bits = (SignMarks(exp_avg_sq), BitMarks(plane)) if there is split else (None, None)
        for marks in (signs or SignMasks(exp_avg_sq), bits or BitMasks(plane, master.numel())):
            there(master, parameter, remainder, marks, *([scratch] if there is split else []))
            kept, again = (exp_avg_sq.clone(), plane.clone()), torch.empty(master.numel())
            back(parameter, remainder, marks, again, *([scratch] if back is join else []))
            found.append((there, parameter.view(torch.int16).clone(), remainder.clone(), *kept, exp_avg_sq, again))
        assert not plane.any()
    searched = [each[1:] for each in found if each[0] is split]
    masked = [each[1:] for each in found if each[0] is split_masked]
    for one, other in zip(searched, masked, strict=True):
        for first, second in zip(one, other, strict=True):
            assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@given(st.lists(st.tuples(HIGH, LOW), min_size=1, max_size=70))
@settings(max_examples=50)
def test_any_bits_come_back(pairs: list[tuple[int, int]]) -> None:
    bits = np.array([(high << 16) | low for high, low in pairs], dtype=np.uint32)
    check_round_trip(from_bits(bits), torch.rand(len(pairs)))
    check_masked(from_bits(bits), torch.rand(len(pairs)))


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_comes_back(low: int) -> None:
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(low)
    check_round_trip(from_bits(bits), torch.zeros(1 << 16))
    check_masked(from_bits(bits), torch.zeros(1 << 16))


@given(st.integers(0, 0xFFFF))
@settings(max_examples=6)
def test_every_lower_half_comes_back(high: int) -> None:
    check_round_trip(from_bits(np.arange(1 << 16, dtype=np.uint32) | np.uint32(high << 16)), torch.zeros(1 << 16))


def test_a_nan_moment_is_not_taken_for_a_mark() -> None:
    negative_nan = from_bits(np.array([0xFFC00000, 0xFFC00000, 0xFFC00000]))
    master = from_bits(np.array([0x3F800000, 0x7FC08000, 0x3F818001]))
    parameter, remainder = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    scratch, back = torch.empty(3, dtype=torch.int32), torch.empty(3)
    split(master, parameter, remainder, SignMarks(negative_nan), scratch)
    join(parameter, remainder, SignMarks(negative_nan), back, scratch)
    assert back[0] == master[0]
    assert back[1].isnan()
    assert back[2] == master[2]
