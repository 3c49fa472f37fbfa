"""Loops in shares: everything done once, at whole blocks, by several threads, with the bits of one."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.optim import compiled
from tiermem.optim.kernels import Run, Workspace, adamw_tile
from tiermem.optim.planes import tile_planes
from tiermem.optim.shares import MOST_BESIDE_A_DEVICE, MOST_THREADS, Job, Loop, Shares, cut, update_threads
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.updates import Settings


@given(st.integers(0, 10**7), st.sampled_from([1, 64, 256]), st.integers(-1, 12))
def test_a_cut_covers_everything_once_at_whole_blocks(numel: int, block: int, count: int) -> None:
    pieces = cut(numel, block, count)
    assert [piece.start for piece in pieces] == [0] + [piece.stop for piece in pieces[:-1]]
    assert pieces[-1].stop == numel
    assert len(pieces) <= max(1, count)
    assert all(piece.start % block == 0 for piece in pieces)
    lengths = [piece.stop - piece.start for piece in pieces]
    assert max(lengths) == lengths[0]
    assert all(length == lengths[0] for length in lengths[:-1])


def test_shares_run_at_the_same_time() -> None:
    """Each waits for the other: one thread alone would never get past the barrier."""
    shares, barrier = Shares(3, least_numel=1), threading.Barrier(3, timeout=60)
    done: list[slice] = []
    seen: set[str] = set()

    def loop(piece: slice) -> None:
        barrier.wait()
        seen.add(threading.current_thread().name)
        done.append(piece)

    for _ in range(2):
        done.clear()
        shares.run([Job(192, 64, loop)])
        assert sorted((piece.start, piece.stop) for piece in done) == [(0, 64), (64, 128), (128, 192)]
    assert threading.current_thread().name in seen
    shares.close()
    shares.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiermem-update-share")]


def test_what_is_short_is_done_by_the_caller() -> None:
    shares, seen = Shares(4, least_numel=1000), []
    shares.run([Job(1999, 1, lambda piece: seen.append((threading.current_thread(), piece)))])
    shares.run([Job(0, 64, lambda piece: seen.append((threading.current_thread(), piece)))])
    assert seen == [(threading.current_thread(), slice(0, 1999)), (threading.current_thread(), slice(0, 0))]


@pytest.mark.parametrize("failing", [0, 64])
def test_an_error_in_a_share_is_raised_after_all_have_ended(failing: int) -> None:
    shares, ended = Shares(2, least_numel=1), threading.Event()

    def loop(piece: slice) -> None:
        if piece.start == failing:
            raise ArithmeticError("this share is broken")
        ended.set()

    with pytest.raises(ArithmeticError, match="this share"):
        shares.run([Job(128, 64, loop)])
    assert ended.is_set()
    shares.close()


@pytest.mark.parametrize("allowed", [0, 1])
def test_threads_that_cannot_be_started_leave_their_shares_to_others(allowed: int, monkeypatch) -> None:
    """As under a limit on processes and threads. Nothing is done twice or later, when the bytes are somebody else's."""
    start, counts, begun = threading.Thread.start, [0] * 512, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        name, _, number = thread.name.rpartition("_")
        if name == "tiermem-update-share" and int(number) >= allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    def loop(piece: slice) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.set()
        else:
            assert begun.wait(60)  # not idle again before the next one is to be started
        counts[piece] = [each + 1 for each in counts[piece]]

    monkeypatch.setattr(threading.Thread, "start", refuse)
    shares = Shares(4, least_numel=1)
    for number in range(1, 4):
        shares.run([Job(512, 64, loop)])
        assert counts == [number] * 512
    shares.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiermem-update-share")]


@pytest.mark.parametrize(("torch_has", "expected"), [(1, 1), (3, 3), (64, MOST_THREADS)])
def test_the_update_takes_the_threads_torch_has(torch_has: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_has)
    assert update_threads() == expected


@pytest.mark.parametrize(("torch_has", "expected"), [(1, 1), (2, 2), (3, 2), (16, 14), (96, MOST_BESIDE_A_DEVICE)])
def test_beside_a_device_it_leaves_two_to_others(
    torch_has: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_has)
    assert update_threads(beside_device=True) == expected


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 5), st.integers(1, 2000))
def test_several_loops_are_each_done_once(numels: list[int], threads: int, least_numel: int) -> None:
    counts = [[0] * numel for numel in numels]

    def loop(own: list[int]) -> Loop:
        def count(piece: slice) -> None:
            assert piece.start % 64 == 0
            own[piece] = [each + 1 for each in own[piece]]

        return count

    shares = Shares(threads, least_numel=least_numel)
    shares.run([Job(len(own), 64, loop(own)) for own in counts])
    shares.close()
    assert all(each == 1 for own in counts for each in own)


@pytest.mark.timeout(200)  # the first call compiles
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("numel", [64, 4096, 5000])
def test_the_update_in_shares_has_the_bits_of_one_loop(numel: int, quantized: bool) -> None:
    if compiled.compiled_loops() is None:
        pytest.skip(f"no compiled loops here: {compiled.why_not()}")
    state = UnitState(0, torch.bfloat16, (Segment(0, 0, numel, quantized),), numel, 8192)
    results = []
    for shares in (Shares(1), Shares(3, least_numel=64)):
        generator = torch.Generator().manual_seed(5)
        parameter = torch.randn(numel, generator=generator).to(torch.bfloat16)
        buffer = torch.zeros(state.state_nbytes(0), dtype=torch.uint8)
        for step in range(1, 4):
            gradient = torch.randn(numel, generator=generator).to(torch.bfloat16)
            run = Run(0, numel, Settings(0.1, 0.9, 0.95, 1e-8, 0.1, step))
            adamw_tile(parameter, gradient, tile_planes(buffer, state, 0), [run], Workspace(shares=shares), 0.3)
        shares.close()
        results.append((parameter.view(torch.uint8), buffer))
    assert all(map(torch.equal, *results))
