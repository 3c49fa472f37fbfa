"""Tiles with 8-bit moments: their layout, their update, and what is written to and read from them outside of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from doubles_optim import FakePager, add_unit, read_parameter, write_gradient, write_parameter
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import InvariantError
from tiermem.optim.blocks import BLOCK_NUMEL, BlockScratch
from tiermem.optim.kernels import Run, Workspace, adamw_tile
from tiermem.optim.masters import StateStore
from tiermem.optim.planes import BlockPlanes, StatePlanes, tile_planes
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.updater import Updater
from tiermem.optim.updates import SegmentUpdate, Settings, UnitUpdate
from tiermem.pager.page import Kind, PageKey

pytestmark = pytest.mark.timeout(200)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def units(draw: st.DrawFn) -> UnitState:
    dtype = draw(st.sampled_from(DTYPES))
    segments, start = [], 0
    sizes = draw(st.lists(st.tuples(st.integers(1, 9000), st.booleans()), min_size=1, max_size=5))
    for number, (numel, quantized) in enumerate(sizes):
        segments.append(Segment(number, start, numel, quantized))
        start += -(-numel // 64) * 64
    return UnitState(0, dtype, tuple(segments), segments[-1].stop, draw(st.sampled_from([2048, 4096, 16384])))


def pieces(state: UnitState, tile: int) -> Iterator[tuple[Segment, StatePlanes | BlockPlanes]]:
    planes = tile_planes(torch.zeros(state.state_nbytes(tile), dtype=torch.uint8), state, tile)
    for segment in state.segments:
        for cut in state.cuts(segment):
            if cut.tile == tile:
                yield segment, planes.part(cut.begin_in_tile, cut.length)


def tensors(planes: StatePlanes | BlockPlanes) -> list[torch.Tensor]:
    found = [planes.remainder, planes.master]
    if isinstance(planes, StatePlanes):
        found += [planes.exp_avg, planes.exp_avg_sq]
    else:
        for blocks in (planes.exp_avg, planes.exp_avg_sq):
            found += [blocks.codes, blocks.scales]
        found.append(planes.mark_bits)
    return [view for view in found if view is not None]


@given(units())
@settings(max_examples=60)
def test_no_two_views_share_a_byte_and_all_lie_in_the_tile(state: UnitState) -> None:
    for tile in range(state.tiles):
        nbytes = state.state_nbytes(tile)
        taken: list[tuple[int, int]] = []
        origin = None
        for segment, planes in pieces(state, tile):
            assert isinstance(planes, BlockPlanes) == segment.quantized
            origin = origin or planes  # every piece views the same buffer; keep it alive
            taken += [(view.data_ptr(), view.data_ptr() + view.nbytes) for view in tensors(planes)]
        taken.sort()
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(taken))
        if taken:
            assert taken[-1][1] - taken[0][0] <= nbytes


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2.04), (torch.bfloat16, 4.17), (torch.float16, 6.04)])
def test_bytes_per_element(dtype: torch.dtype, most: float) -> None:
    state = UnitState(0, dtype, (Segment(0, 0, 1 << 20, quantized=True),), 1 << 20, 1 << 20)
    assert state.state_nbytes(0) <= most * (1 << 20)


def test_pieces_that_are_not_blocks_are_refused() -> None:
    state = UnitState(0, torch.bfloat16, (Segment(0, 0, 1000, quantized=True), Segment(1, 1024, 64)), 1088, 2048)
    planes = tile_planes(torch.zeros(state.state_nbytes(0), dtype=torch.uint8), state, 0)
    for begin, length in ((0, 1088), (64, 256), (0, 100), (1000, 24), (1024, 65)):
        with pytest.raises(InvariantError):
            planes.part(begin, length)
    assert planes.part(256, 744).numel == 744


def in_words(
    master: torch.Tensor, gradients: list[torch.Tensor], dtype: torch.dtype, decay: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The update as the paper tells it: make moments float32, update, quantize; one block after the other."""
    numel = master.numel()
    state = UnitState(0, dtype, (Segment(0, 0, numel, quantized=True),), numel, -(-numel // 2048) * 2048)
    kept = tile_planes(torch.zeros(state.state_nbytes(0), dtype=torch.uint8), state, 0).part(0, numel)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    for gradient in gradients:
        parameter.grad = gradient.to(torch.float32)
        optimizer.step()
        entry = optimizer.state[parameter]
        kept.store_moments(entry["exp_avg"], entry["exp_avg_sq"])
        first, second = torch.empty(numel), torch.empty(numel)
        kept.read_moments(first, second, BlockScratch(numel))
        entry["exp_avg"].copy_(first)
        entry["exp_avg_sq"].copy_(second)
    return parameter.detach(), first, second


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    numel=st.integers(1, 5000),
    slice_numel=st.sampled_from([64, 256, 1024, 8192]),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=15)
def test_the_update_is_adamw_between_reading_and_rounding_moments(
    dtype: torch.dtype, numel: int, slice_numel: int, decay: float, seed: int
) -> None:
    """The same bits for any slices, masters kept without loss all the while."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(numel, generator=generator)
    if dtype != torch.float16:
        master = master.to(dtype).to(torch.float32)
    gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(4)]
    gradients[2][::3] = 0.0
    state = UnitState(0, dtype, (Segment(0, 0, numel, quantized=True),), numel, 8192)
    planes = tile_planes(torch.zeros(state.state_nbytes(0), dtype=torch.uint8), state, 0)
    parameter = master.to(dtype, copy=True)
    if planes.master is not None:
        planes.master.copy_(master)
    workspace = Workspace(slice_numel)
    for step, gradient in enumerate(gradients, 1):
        run = Run(0, numel, Settings(0.01, 0.9, 0.95, 1e-8, decay, step))
        adamw_tile(parameter, gradient, planes, [run], workspace)
    expected = in_words(master, gradients, dtype, decay)
    assert torch.equal(parameter, expected[0].to(dtype))
    part = planes.part(0, numel)
    found = torch.empty(numel), torch.empty(numel)
    part.read_moments(*found, BlockScratch(numel))
    assert torch.equal(found[0], expected[1])
    assert torch.equal(found[1], expected[2])


def test_no_update_is_out_of_proportion() -> None:
    """Elements whose second moment is far below their block's largest: without a floor they would leap."""
    numel = BLOCK_NUMEL
    state = UnitState(0, torch.float32, (Segment(0, 0, numel, quantized=True),), numel, 2048)
    planes = tile_planes(torch.zeros(state.state_nbytes(0), dtype=torch.uint8), state, 0)
    parameter, workspace = torch.zeros(numel), Workspace(256)
    for step in range(1, 30):
        gradient = torch.full((numel,), 3e-4)
        gradient[0] = 1.0
        if step > 20:
            gradient[1:] = 0.0
        before = parameter.clone()
        run = Run(0, numel, Settings(0.01, 0.9, 0.999, 1e-8, 0.0, step))
        adamw_tile(parameter, gradient, planes, [run], workspace)
        assert float((parameter - before).abs().max()) <= 0.011


@pytest.fixture
def pager() -> Iterator[FakePager]:
    fake = FakePager()
    yield fake
    fake.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_and_moments_come_back(pager: FakePager, dtype: torch.dtype) -> None:
    """Also the marks of exact ties, which half of these masters are."""
    segments = (Segment(0, 0, 9000, quantized=True), Segment(1, 9024, 100), Segment(2, 9152, 5000, quantized=True))
    state = UnitState(0, dtype, segments, 14152, 4096)
    add_unit(pager, state)
    store = StateStore(pager, {0: state})
    values = {p: torch.randn(state.segment_of(p).numel) for p in range(3)}
    for value in values.values():
        bits = value.view(torch.int32)
        bits[::2] = (bits[::2] & -0x10000) | 0x8000
    for parameter, value in values.items():
        write_parameter(pager, state, parameter, value)
        store.store_master(0, parameter, value)
    for _ in range(2):
        for parameter, value in values.items():
            assert torch.equal(store.read_master(0, parameter), value)
    first, second = torch.randn(9000), torch.rand(9000)
    store.store_moments(0, {0: (first, second)})
    kept = store.read_moments(0, 0)
    assert (kept[0] - first).abs().max() <= 0.0075 * first.abs().max()
    assert (kept[1] - second).abs().max() <= 0.004
    store.store_moments(0, {0: kept})
    assert all(map(torch.equal, store.read_moments(0, 0), kept))
    assert torch.equal(store.read_master(0, 0), values[0])
    assert not store.read_moments(0, 2)[0].any()
    assert pager.held == 0


def test_the_updater_leaves_parameters_without_gradient_alone(pager: FakePager) -> None:
    segments = (Segment(0, 0, 5000, quantized=True), Segment(1, 5056, 100), Segment(2, 5184, 5000, quantized=True))
    state = UnitState(0, torch.bfloat16, segments, 10184, 4096)
    add_unit(pager, state)
    for segment in segments:
        write_parameter(pager, state, segment.parameter, torch.ones(segment.numel))
        write_gradient(pager, state, segment.parameter, torch.randn(segment.numel))
    updater = Updater(pager, {0: state})
    given = Settings(0.1, 0.9, 0.95, 1e-8, 0.1, 1)
    updater.start(UnitUpdate(0, tuple(SegmentUpdate(segments[k], given) for k in (0, 1)), discard_gradients=False))
    updater.wait_all()
    store = StateStore(pager, {0: state})
    assert (read_parameter(pager, state, 0) != 1).all()
    assert (read_parameter(pager, state, 1) != 1).all()
    assert (read_parameter(pager, state, 2) == 1).all()
    assert not store.read_moments(0, 2)[1].any()
    assert store.read_moments(0, 0)[1].all()
    assert all(pager.is_written(PageKey(0, Kind.STATE, tile)) == (tile < 2) for tile in range(3))
