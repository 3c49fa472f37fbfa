"""Tiles, layouts, order, placeholders: arithmetic and records."""

from __future__ import annotations

import pytest
import torch
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import ConfigError, TiermemError
from tiermem.pager.page import Kind, PageKey
from tiermem.pager.tiling import tile_count, tile_ranges, tiles_in_turn
from tiermem.zero3.layout import (
    ParameterInfo,
    contiguous_stride,
    dense_stride,
    is_dense,
    memory_order,
    plan_layout,
    slot_view,
)
from tiermem.zero3.order import Access, OrderRecorder, Phase
from tiermem.zero3.placeholder import Placeholders

NUMBERS = st.integers(0, 10_000)


@given(start=NUMBERS, length=NUMBERS, tile=st.integers(1, 3000))
def test_ranges_cover_exactly_without_overlap(start, length, tile):
    at = 0
    for piece in tile_ranges(start, length, tile):
        assert piece.begin == at
        assert piece.length > 0
        assert piece.tile * tile + piece.begin_in_tile == start + at
        assert piece.begin_in_tile + piece.length <= tile
        at += piece.length
    assert at == length


@given(length=NUMBERS, tile=st.integers(1, 3000))
def test_count_is_the_number_of_ranges(length, tile):
    assert tile_count(length, tile) == len(tile_ranges(0, length, tile))


@given(runs=st.lists(st.tuples(NUMBERS, st.integers(1, 5000)), max_size=6), tile=st.integers(1, 3000))
def test_the_tiles_of_runs_are_those_of_their_elements_run_by_run(runs, tile):
    elements = [[place // tile for place in range(start, start + length)] for start, length in runs]
    assert tiles_in_turn(runs, tile) == tuple(number for each in elements for number in dict.fromkeys(each))


@pytest.mark.parametrize("wrong", [(-1, 1, 1), (0, -1, 1), (0, 1, 0)])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="found"):
        tile_ranges(*wrong)


DTYPES = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8])
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@settings(max_examples=number_of(100, 300))
@given(shapes=SHAPES, data=st.data())
def test_slots_do_not_overlap_and_trainable_ones_come_first(shapes, data):
    infos = []
    for number, shape in enumerate(shapes):
        dtype = data.draw(DTYPES)
        trainable = dtype.is_floating_point and data.draw(st.booleans())
        infos.append(ParameterInfo(number, (f"p{number}",), shape, contiguous_stride(shape), dtype, trainable))
    layout = plan_layout(0, "u", infos, dtype=torch.bfloat16, tile_numel=2048)
    end = 0
    for slot in layout.slots:
        assert slot.offset >= end or not slot.nbytes
        assert slot.offset + slot.nbytes <= layout.nbytes
        assert slot.offset % (64 * slot.dtype.itemsize if slot.trainable else 64) == 0
        assert slot.dtype == (torch.bfloat16 if infos[slot.parameter].dtype.is_floating_point else slot.dtype)
        end = max(end, slot.offset + slot.nbytes)
    assert [slot.trainable for slot in layout.slots] == sorted((slot.trainable for slot in layout.slots), reverse=True)
    assert sorted(slot.parameter for slot in layout.slots) == list(range(len(infos)))


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_dense_strides_are_kept_and_memory_order_matches(shape, data):
    permutation = data.draw(st.permutations(range(len(shape))))
    tensor = torch.randn([shape[axis] for axis in permutation]).permute(
        *[permutation.index(axis) for axis in range(len(shape))]
    )
    info = ParameterInfo(0, ("p",), tuple(tensor.shape), tensor.stride(), tensor.dtype, True)
    layout = plan_layout(0, "u", [info], dtype=torch.float32, tile_numel=2048)
    slot = layout.slots[0]
    base = torch.zeros(layout.nbytes, dtype=torch.uint8)
    slot_view(base, slot).copy_(tensor)
    assert torch.equal(base.view(torch.float32)[: slot.numel], memory_order(tensor, slot))
    assert torch.equal(slot_view(base, slot), tensor)


def test_strides_with_holes_become_contiguous():
    assert dense_stride((3, 4), (8, 1)) == (4, 1)
    assert dense_stride((3, 4), (0, 0)) == (4, 1)
    assert dense_stride((3, 4), (1, 3)) == (1, 3)


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((), (), True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3, 4), (1, 8, 2), True),
        ((1, 3, 1), (77, 1, 0), True),
        ((3, 3), (1, 1), False),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((3,), (2,), False),
    ],
)
def test_which_strides_are_dense(shape: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, stride) == dense


def test_impossible_layouts_are_refused():
    info = ParameterInfo(0, ("p",), (2,), (1,), torch.complex64, True)
    with pytest.raises(ConfigError, match="complex64"):
        plan_layout(0, "u", [info], dtype=torch.float32, tile_numel=2048)
    with pytest.raises(ConfigError, match="2048"):
        plan_layout(0, "u", [], dtype=torch.float32, tile_numel=1000)


def record(order, accesses, contributions=()):
    for unit, phase in accesses:
        order.access(unit, phase)
    for parameter in contributions:
        order.contribution(parameter)


def test_order_is_frozen_and_deviation_recorded_again():
    order = OrderRecorder()
    first = [(0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD)]
    record(order, first, [7, 7])
    assert not order.all_arrived((7,))
    step = order.finish()
    assert step.accesses == tuple(Access(*access) for access in first)
    record(order, first[:2], [7])
    assert order.upcoming() == 1
    assert not order.all_arrived((7,))
    assert order.contribution(7) == 2
    assert order.all_arrived((7,))
    record(order, [(0, Phase.BACKWARD)])
    assert order.upcoming() is None
    second = order.finish()
    assert order.expected is second
    assert len(step.accesses) == 3


FORWARD, BACKWARD, GRADIENT = ((lambda unit, phase=phase: Access(unit, phase)) for phase in Phase)


def test_each_batch_comes_to_a_unit_s_gradients_once():
    order = OrderRecorder()
    for step in range(2):
        for batch in range(3):
            record(order, [(0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD)])
            for unit, parameter in ((1, 5), (1, 6), (0, 7), (0, 8)):
                if (parameter, batch) != (6, 1):  # without a gradient in the second batch
                    order.gradient(unit, parameter)
                    order.contribution(parameter)
                arrived = order.batch_arrived(unit, (5, 6) if unit else (7, 8))
                assert arrived == (step == 1 and parameter in (6, 8) and (parameter, batch) != (6, 1))
        found = order.finish()
    assert found.accesses == (FORWARD(0), FORWARD(1), BACKWARD(1), GRADIENT(1), GRADIENT(0)) * 3
    assert not found.together
    assert found.contributions == {5: 3, 6: 2, 7: 3, 8: 3}
    for batch in range(4):
        for parameter in (7, 8):
            order.gradient(0, parameter)
            order.contribution(parameter)
            assert order.batch_arrived(0, (7, 8)) == (parameter == 8 and batch < 3), "one batch more: nobody knows"


def test_a_gradient_is_known_to_grow_by_the_step_before():
    order = OrderRecorder()
    for expected in ([False] * 3, [True, True, False, False]):  # nobody knows; three came, here comes a fourth
        for more in expected:
            assert order.more_after(7) == more
            order.gradient(0, 7)
            order.contribution(7)
        assert not order.more_after(8), "it never had one"
        order.finish()


def test_batches_that_come_to_gradients_one_after_the_other_find_them_held():
    order = OrderRecorder(apart={2})
    for unit, parameter in ((1, 5), (2, 6), (1, 5), (2, 6), (1, 5), (0, 7), (0, 7)):
        order.gradient(unit, parameter)
        order.contribution(parameter)
    # Unit 2 is a part of unit 1 and apart: its tiles are leased again and again, beside those that are held.
    step = order.finish()
    assert step.accesses == (GRADIENT(1), GRADIENT(2), GRADIENT(2), GRADIENT(0))
    assert step.together


def test_where_they_are_not_held_each_batch_comes_to_gradients_again():
    order = OrderRecorder(holds=False)
    for unit, parameter in ((1, 5), (1, 6), (1, 5), (1, 6), (0, 7), (1, 5)):
        order.gradient(unit, parameter)
        order.contribution(parameter)
    step = order.finish()
    assert step.accesses == (GRADIENT(1), GRADIENT(1), GRADIENT(0), GRADIENT(1))
    assert step.together


def test_gradients_that_were_dropped_come_anew():
    order = OrderRecorder()
    for _ in range(2):
        order.gradient(1, 5)
        order.contribution(5)
        order.access(0, Phase.FORWARD)
        order.forget_contributions()
    assert order.finish().accesses == (GRADIENT(1), FORWARD(0)) * 2


def test_an_evaluation_is_no_part_of_a_step_however_long_it_is():
    order = OrderRecorder()
    step = [(0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD)]
    for passes in (0, 2, 50):
        for unit in (0, 1) * passes:
            order.access(unit, Phase.FORWARD, gradless=True)
            assert order.position <= 2
        record(order, step[:2])
        assert order.upcoming() == (1 if passes else None), "the step goes on as expected"
        for unit in (0, 1) * passes:
            order.access(unit, Phase.FORWARD, gradless=True)
        record(order, step[2:])
        assert order.finish().accesses == tuple(Access(*access) for access in step)


def test_units_used_once_without_gradients_belong_to_the_step():
    order = OrderRecorder()
    for unit in (0, 1):
        order.access(unit, Phase.FORWARD, gradless=True)
    record(order, [(2, Phase.FORWARD)])
    order.access(0, Phase.FORWARD, gradless=True)
    assert order.finish().accesses == (FORWARD(0), FORWARD(1), FORWARD(2), FORWARD(0))
    order.access(0, Phase.FORWARD, gradless=True)
    assert order.upcoming() == 1


def test_a_step_whose_gradients_were_all_dropped_begins_again():
    order = OrderRecorder()
    first, second = PageKey(0, Kind.ACTIVATION), PageKey(1, Kind.ACTIVATION)
    for _ in range(3):
        order.touch(first)
        order.access(1, Phase.BACKWARD)
        order.gradient(1, 5)
        order.contribution(5)
        order.access(0, Phase.FORWARD)
        order.touch(second)
        order.begin_again()
    step = order.finish()
    assert step.accesses == (FORWARD(0),), "what was used forward since may be what goes backward next"
    assert step.touches == ((1, second),)
    assert step.contributions == {}


def test_placeholders_are_truthful_and_free():
    placeholders = Placeholders()
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        standing = placeholders.of(7, (1000, 1000), dtype, cpu)
        assert standing.shape == (1000, 1000)
        assert standing.dtype == dtype
        assert standing.untyped_storage().nbytes() == dtype.itemsize
    placeholders.check("nothing")
    of_many = [placeholders.of(number, (3,), torch.bfloat16, cpu) for number in range(600)]
    assert len({standing.untyped_storage().data_ptr() for standing in of_many}) == 600
    for number in (7, 300, 599):
        of_many[number].fill_(1)
        with pytest.raises(TiermemError, match="bfloat16"):
            placeholders.check("unit u")
        placeholders.check("it is mended")
        assert all(standing.isnan().all() for standing in of_many)
