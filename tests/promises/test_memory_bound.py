"""Memory is a hard budget, and nothing else grows: not resident memory, not threads, not open files, not the disk.

That reserved bytes stay within the budgets is also asserted after every run of tests/promises/test_same_numbers.py, at
every budget.
"""

from __future__ import annotations

import copy
import textwrap
import threading

import pytest
import torch
from doubles_combinations import some_of
from doubles_python import WarmPython
from doubles_scenarios import Wide, wide_batch
from doubles_training import MIB, config_for, least_budget, within_budgets

import tiermem
from tiermem.pager.page import Kind, Tier


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_reserved_memory_at_any_moment_is_within_the_least_budget(update, tmp_path):
    """Looked at from another thread all the while, not only through the high-water mark."""
    torch.manual_seed(0)
    model = Wide(depth=6)
    budget = least_budget(model, tmp_path)
    seen, done = [0], threading.Event()
    with tiermem.offload(model, config_for(tmp_path, budget, update)) as runtime:

        def watch() -> None:
            while not done.wait(0.002):
                seen.append(runtime.statistics().tiers[-1].reserved)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            optimizer = tiermem.AdamW(model.parameters())
            for _ in range(4):
                wide_batch(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            runtime.settle()
        finally:
            done.set()
            watcher.join()
        within_budgets(runtime.statistics())
        assert runtime.statistics().tiers[-1].high_water >= max(seen) > budget // 2
        # What must come and go, does: the whole state is several times the budget.
        assert sum(values.numel() for values in model.parameters()) * 12 > 3 * budget


def test_gradients_without_room_wait_in_swap_and_are_exact(tmp_path):
    torch.manual_seed(0)
    model = Wide(depth=6)
    expected = copy.deepcopy(model)
    state = torch.get_rng_state()
    wide_batch(expected).backward()
    wide_batch(expected).backward()
    torch.set_rng_state(state)
    budget = least_budget(model, tmp_path)
    with tiermem.offload(model, config_for(tmp_path, budget, "step")) as runtime:
        tiermem.AdamW(model.parameters())
        for _ in range(2):
            wide_batch(model).backward()
        runtime.settle()
        pages = {key: set(valid) for key, (valid, _) in runtime._house.storage.pager.residency().items()}
        gradients = [tiers for key, tiers in pages.items() if key.kind is Kind.GRAD]
        assert sum(values.numel() * 4 for values in model.parameters()) > 2 * budget, "they cannot all be in memory"
        assert all(gradients), "each is somewhere"
        assert sum(tiers == {Tier.SWAP} for tiers in gradients) > len(gradients) // 2
        for found, values in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(runtime.gradient(found), values.grad)


GROWTH = """
    import ctypes, gc, sys, time, psutil, torch, tiermem
    from collections import deque
    torch.set_num_threads(1)
    process = psutil.Process()
    width, budget = (256, "1MiB") if sys.argv[4] != "commits" else (64, "128KiB")
    depth = 2 if width == 256 else 3  # more than the budget holds
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
    config = tiermem.Config(
        host_memory=budget, swap_dirs=[sys.argv[1]], device="cpu", param_dtype="float32", update=sys.argv[2]
    )
    steps, commits = int(sys.argv[3]), sys.argv[4] == "commits"

    class Heap(ctypes.Structure):
        words = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(word, ctypes.c_size_t) for word in words.split()]

    def heap():
        ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if ask is None:
            return 0  # another C library, or an old one
        ask.restype = Heap
        found = ask()
        return found.uordblks + found.hblkhd

    def fewest(*counts):
        # The thread of a commit that has been waited for takes a moment to end, and to let go of its files.
        found = []
        for _ in range(25):
            found.append([count() for count in counts])
            time.sleep(0.02)
        return map(min, zip(*found))

    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        pager = runtime._house.storage.pager
        blocks = []  # after each part of the steps

        def train(steps, parts=1):
            for number in range(steps):
                model(torch.randn(4, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if commits:
                    runtime.commit({"numbers": list(range(10))}).wait()
                if (number + 1) % (steps // parts) == 0:
                    runtime.settle()
                    # Orders of eviction keep outdated entries up to a bound, 30 a step. Now they have none.
                    pager._loop.call(pager._core.residency.reclassify)
                    gc.collect()
                    blocks.append(sys.getallocatedblocks())
            threads, descriptors = fewest(process.num_threads, process.num_fds)
            gc.collect()  # now that this thread has let go of what it held, too
            return process.memory_info().rss, heap(), threads, descriptors

        # The record of the latest moves grows to its bound: here one that is soon reached.
        timeline = runtime._house.storage.timeline
        timeline._events, timeline._levels = deque(maxlen=500), deque(maxlen=500)
        train(40)
        before = train(10)
        after = train(steps, parts=5)
        assert runtime.statistics().last.bytes_read > 0, "everything was kept in memory"
        runtime.close(remove=True)
    print(*(late - early for early, late in zip(before, after)), blocks[-1] - blocks[-4])
    """


def run(python: WarmPython, code: str, *arguments: str) -> list[int]:
    done = python.run("-c", textwrap.dedent(code), *arguments)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.long
@pytest.mark.parametrize(("update", "what"), [("forward", ""), ("backward", "commits")])
def test_a_hundred_steps_grow_nothing(update, what, warm_python, tmp_path):
    """One tensor of 256 KiB (a weight, or the state of a tile) kept every 12 steps would show in resident memory.

    That is not zero: the interpreter and malloc take and return arenas of 256 KiB and 1 MiB on their own. What they
    have given out shows more: 1 KiB kept each step, or four objects. A commit holds more than that: its record, its
    manifest, its marks. Objects are counted over the last sixty steps: caches are still being filled in the first.
    """
    rss, heap, threads, descriptors, objects = run(warm_python, GROWTH, str(tmp_path), update, "100", what)
    assert rss < 2 * MIB, f"{rss / MIB:.2f} MiB more"
    assert heap < 100 << 10, f"{heap >> 10} KiB more"
    assert objects < 4 * 60, f"{objects} more"
    assert threads <= 0
    assert descriptors <= 0
    assert list(tmp_path.iterdir()) == []


CYCLES = """
    import gc, sys, time, psutil, torch, tiermem
    torch.set_num_threads(1)
    process = psutil.Process()

    def cycle(number):
        model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
        config = tiermem.Config(
            host_memory="1MiB",
            swap_dirs=[sys.argv[1]],
            device="cpu",
            update=("step", "forward", "backward")[number % 3],
        )
        runtime = tiermem.offload(model, config)
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(1, 128).bfloat16()).square().mean().backward()
            optimizer.step()
        if number % 4 == 3:
            try:
                with runtime:
                    raise ValueError
            except ValueError:
                pass
        runtime.close(restore_model=number % 4 == 1)

    def state():
        gc.collect()
        return process.memory_info().rss, process.num_threads(), process.num_fds()

    for number in range(12):
        cycle(number)
    before = state()
    for number in range(50):
        cycle(number)
    end = time.monotonic() + 60
    while process.num_threads() > before[1] and time.monotonic() < end:
        time.sleep(0.01)  # the system counts a thread for a moment after it was joined
    print(*(late - early for early, late in zip(before, state())))
    """


@pytest.mark.long
def test_fifty_runs_one_after_the_other_leave_nothing(warm_python, tmp_path):
    """Each run maps 1 MiB of host memory and some buffers; keeping 80 KiB of each would show."""
    rss, threads, descriptors = run(warm_python, CYCLES, str(tmp_path))
    assert threads <= 0
    assert descriptors <= 0
    assert rss < 4 * MIB, f"{rss / MIB:.2f} MiB more"
    assert list(tmp_path.iterdir()) == []


BESIDE = """
    import sys, threading, psutil, torch, tiermem
    from tiermem.memory.heap import trim_heap
    torch.set_num_threads(1)
    process, width = psutil.Process(), 2048
    # Trained layers with a PARAM page of 8 MiB each; frozen ones, each of another size, with pages of up to 10 MiB.
    wide = [torch.nn.Linear(width, width + 128 * number) for number in range(4)]
    narrow = [torch.nn.Linear(width + 128 * number, width) for number in range(4)]
    model = torch.nn.Sequential(*(layer for pair in zip(wide, narrow) for layer in pair))
    for layer in narrow:
        layer.requires_grad_(False)
    config = tiermem.Config(
        host_memory="256MiB", swap_dirs=[sys.argv[1]], device="cpu", tile_size="8MiB", moments=sys.argv[2]
    )

    def most_beside(act):
        # Bytes of resident memory at the highest, above those at the start.
        trim_heap()
        before, over, most = process.memory_info().rss, threading.Event(), [0]

        def watch():
            while not over.wait(0.0005):
                most.append(process.memory_info().rss - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        act()
        over.set()
        watcher.join()
        return max(most)

    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(torch.randn(1, width).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime.commit().wait()  # so that nothing is left to be written from the budget's memory
        masters = [most_beside(lambda: runtime.master(layer.weight)) for layer in wide]
        snapshots = [most_beside(lambda: runtime.snapshot(f"{sys.argv[1]}/{n}").wait()) for n in range(2)]
    print(max(masters), max(snapshots))
    """


@pytest.mark.parametrize("moments", some_of(["int8"], ["float32"]))
def test_what_a_snapshot_and_a_master_take_beside_the_budget(moments, warm_python, tmp_path):
    """Not a heap that grows with all that goes through it: that was 50 MiB more; nor a page that is not needed."""
    master, snapshot = run(warm_python, BESIDE, str(tmp_path), moments)
    assert master < (19 + 6) * MIB, f"{master / MIB:.1f} MiB, of which 19 are the master"
    assert snapshot < (10 + 8 + 10) * MIB, f"{snapshot / MIB:.1f} MiB, of which 18 are a PARAM page and a STATE tile"


def test_swap_files_are_as_large_as_said_and_gone_after_close(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model = Wide()
    config = tiermem.Config(
        host_memory="1MiB", swap_dirs=[tmp_path / "a", tmp_path / "b"], device="cpu", param_dtype="float32"
    )
    runtime = tiermem.offload(model, config)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*swapfile*")]
    assert len(sizes) == 2
    assert sum(sizes) >= runtime.statistics().tiers[0].budget
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*") if path.is_file())
    runtime.close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]
