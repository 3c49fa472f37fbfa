"""Shards: every element belongs to one rank, cuts lie where the update kernel bears them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.zero3.layout import ParameterInfo, contiguous_stride, plan_layout
from tiermem.zero3.shards import Shard, bucket_ranges

DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bool])
SHAPES = st.lists(st.lists(st.integers(0, 90), max_size=2).map(tuple), min_size=1, max_size=6)


@st.composite
def layouts(draw):
    infos = []
    for number, shape in enumerate(draw(SHAPES)):
        dtype = draw(DTYPES)
        trainable = dtype.is_floating_point and draw(st.booleans())
        infos.append(ParameterInfo(number, (f"p{number}",), shape, contiguous_stride(shape), dtype, trainable))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return plan_layout(0, "u", infos, dtype=dtype, tile_numel=2048, ranks=draw(st.integers(1, 5)))


@given(layout=layouts())
def test_the_pieces_of_all_ranks_cover_every_parameter_once(layout):
    seen = {slot.parameter: [] for slot in layout.slots}
    slots = {slot.parameter: slot for slot in layout.slots}
    for rank in range(layout.ranks):
        for piece in Shard(layout, rank).owned():
            number, first, count = piece.slot.parameter, piece.begin, piece.length
            assert count > 0
            assert first % (64 if slots[number].trainable else 1) == 0
            seen[number].append((first, count))
    for slot in layout.slots:
        at = 0
        for first, count in seen[slot.parameter]:
            assert first == at, "in rank order the pieces follow each other"
            at += count
        assert at == slot.numel


@given(layout=layouts(), whole=st.booleans())
def test_shards_laid_side_by_side_are_the_unit(layout, whole):
    """What an all-gather of both sections gives is the unit's buffer: every piece where its slot says."""
    buffer = torch.arange(layout.nbytes, dtype=torch.int64)
    item = layout.dtype.itemsize
    for rank in range(layout.ranks):
        shard = Shard(layout, rank, whole)
        for piece in shard.owned():
            there = piece.slot.offset + piece.begin * piece.slot.dtype.itemsize
            if whole or layout.ranks == 1:
                assert piece.offset == there
            elif piece.slot.trainable:
                assert piece.offset + rank * layout.part_numel * item == there
            else:
                assert piece.offset - shard.frozen_offset + rank * layout.frozen_part + layout.frozen_begin == there
            assert piece.offset + piece.nbytes <= shard.nbytes
            assert there + piece.nbytes <= buffer.numel()
            assert piece.begin * piece.slot.dtype.itemsize % 64 == 0
    assert sum(Shard(layout, rank).trainable_numel for rank in range(layout.ranks)) == layout.trainable_numel


@given(layout=layouts())
def test_what_a_bucket_sends_is_what_the_rank_owns(layout):
    """Filled with element numbers, the bucket's slice for a rank and tile holds that rank's elements in order."""
    shards = [Shard(layout, rank) for rank in range(layout.ranks)]
    bucket = torch.full((layout.part_numel * layout.ranks,), -1, dtype=torch.int64)
    for slot in layout.trainable:
        for cut in bucket_ranges(shards[0], slot):
            numbers = slot.start + cut.begin + torch.arange(cut.length)
            assert bool((bucket[cut.start : cut.start + cut.length] == -1).all())
            bucket[cut.start : cut.start + cut.length] = numbers
    at = 0
    for tile in range(shards[0].exchanges):
        length = shards[0].exchange_length(tile)
        for shard in shards:
            sent = bucket[at : at + length]
            at += length
            expected = shard.begin + tile * layout.tile_numel + torch.arange(length)
            assert bool(((sent == -1) | (sent == expected)).all())
    assert at == bucket.numel() == shards[0].bucket_nbytes // layout.dtype.itemsize
    assert int((bucket >= 0).sum()) == sum(slot.numel for slot in layout.trainable)


@given(layout=layouts(), whole=st.booleans())
def test_pages_hold_what_they_have_to_and_exchanges_are_the_same_everywhere(layout, whole):
    shards = [Shard(layout, rank, whole) for rank in range(layout.ranks)]
    assert len({(each.nbytes, each.exchanges, each.bucket_nbytes, each.received_nbytes) for each in shards}) == 1
    for shard in shards:
        assert shard.nbytes > 0, "a page of nothing is none"
        assert all(piece.length for piece in shard.held())
        lengths = [shard.tile_length(tile) for tile in range(shard.tiles)]
        assert sum(lengths) == shard.trainable_numel
        assert all(0 < length <= layout.tile_numel for length in lengths)
        gathered = [key for key, _ in shard.transit_pages() if key == shard.gathered_key]
        assert len(gathered) == (layout.ranks > 1 and not whole), "the page is the unit where it holds all of it"
        assert all(nbytes > 0 for _, nbytes in shard.transit_pages())
    assert layout.ranks > 1 or not shards[0].transit_pages()


def single(numel, ranks=1):
    infos = [ParameterInfo(0, ("p",), (numel,), (1,), torch.float32, True)]
    return plan_layout(0, "u", infos, dtype=torch.float32, tile_numel=2048, ranks=ranks)


def test_a_unit_without_elements_has_a_page_all_the_same():
    assert [Shard(single(0, 2), rank).nbytes for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("numel", [0, 1, 3, 63, 64, 65, 2048, 5000])
def test_one_rank_owns_the_whole_without_padding(numel):
    layout = single(numel)
    assert layout.nbytes == max(1, numel * 4)
    assert Shard(layout).nbytes == layout.nbytes
    assert [(piece.begin, piece.length) for piece in Shard(layout).owned()] == ([(0, numel)] if numel else [])
