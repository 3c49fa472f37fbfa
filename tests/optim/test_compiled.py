"""The compiled loops: the bits of torch's operations, or not used at all."""

from __future__ import annotations

import errno
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles_combinations import some_of
from doubles_python import WarmPython
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.optim import compiled
from tiermem.optim.kernels import Run, Workspace, adamw_tile
from tiermem.optim.planes import tile_planes
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.updates import Settings

pytestmark = pytest.mark.timeout(200)  # the first call compiles


@pytest.fixture
def afresh() -> Iterator[None]:
    """The decision is made once per process: forget it before and after."""
    for cached in (compiled.compiled_loops, compiled._find):
        cached.cache_clear()
    yield
    for cached in (compiled.compiled_loops, compiled._find):
        cached.cache_clear()


def needs_loops() -> None:
    if compiled.compiled_loops() is None:
        pytest.skip(f"no compiled loops here: {compiled.why_not()}")


def test_numba_is_used_where_it_is_installed() -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert compiled.why_not() is None
        assert Workspace().loops is not None
    assert Workspace(compiled=False).loops is None


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    numel=st.integers(1, 5000),
    slice_numel=st.sampled_from([64, 1024, 8192]),
    lr=st.floats(0.0, 0.1),
    beta1=st.sampled_from([0.9, 0.4, 0.0]),
    scale=st.sampled_from([1.0, 0.3]),
    spread=st.integers(0, 30),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=15)
def test_both_forms_have_the_same_bits(
    dtype: torch.dtype,
    numel: int,
    slice_numel: int,
    lr: float,
    beta1: float,
    scale: float,
    spread: int,
    seed: int,
    quantized: bool,
) -> None:
    needs_loops()
    generator = torch.Generator().manual_seed(seed)
    state = UnitState(0, dtype, (Segment(0, 0, numel, quantized),), numel, 8192)
    master = torch.randn(numel, generator=generator).to(dtype)
    gradients = [torch.randn(numel, generator=generator) for _ in range(4)]
    gradients = [g.mul_(torch.rand(numel, generator=generator).pow_(spread)).to(dtype) for g in gradients]
    gradients[2][::3] = 0.0
    results = []
    for form in (True, False):
        buffer, parameter = torch.zeros(state.state_nbytes(0), dtype=torch.uint8), master.clone()
        if dtype == torch.float16:
            buffer[: numel * 4].view(torch.float32).copy_(master)
        workspace = Workspace(slice_numel, compiled=form)
        for step, gradient in enumerate(gradients, 1):
            run = Run(0, numel, Settings(lr, beta1, 0.95, 1e-8, 0.1, step))
            adamw_tile(parameter, gradient, tile_planes(buffer, state, 0), [run], workspace, scale)
        results.append((parameter.view(torch.uint8), buffer))
    assert all(map(torch.equal, *results))


def test_ties_keep_their_marks() -> None:
    """Masters that are exact ties, half of them above their parameter, updated by nothing: lr 0, no decay."""
    needs_loops()
    numel = 4096
    for quantized in (False, True):
        state = UnitState(0, torch.bfloat16, (Segment(0, 0, numel, quantized),), numel, 8192)
        planes = tile_planes(torch.zeros(state.state_nbytes(0), dtype=torch.uint8), state, 0)
        master = torch.randn(numel, generator=torch.Generator().manual_seed(1))
        bits = master.view(torch.int32)
        bits[::2] = (bits[::2] & -0x10000) | 0x8000
        from tiermem.optim.split import complete, split

        part, parameter = planes.part(0, numel), torch.empty(numel, dtype=torch.bfloat16)
        split(master, parameter, part.remainder, part.marks, torch.empty(numel, dtype=torch.int32))
        run = Run(0, numel, Settings(0.0, 0.9, 0.95, 1e-8, 0.0, 1))
        for _ in range(3):
            adamw_tile(parameter, torch.randn(numel).to(torch.bfloat16), planes, [run], Workspace())
        found = parameter.to(torch.float32)
        complete(found, part.remainder, part.marks, torch.empty(numel, dtype=torch.int32))
        assert torch.equal(found, master)


def test_a_gradient_that_is_not_a_number_makes_parameters_so() -> None:
    needs_loops()
    for quantized in (False, True):
        state = UnitState(0, torch.bfloat16, (Segment(0, 0, 512, quantized),), 512, 8192)
        planes = tile_planes(torch.zeros(state.state_nbytes(0), dtype=torch.uint8), state, 0)
        parameter, gradient = torch.ones(512, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16)
        gradient[3] = float("nan")
        for _ in range(2):
            run = Run(0, 512, Settings(0.1, 0.9, 0.95, 1e-8, 0.1, 1))
            adamw_tile(parameter, gradient, planes, [run], Workspace())
        assert parameter[3].isnan()
        assert parameter[300].isfinite()


def test_without_numba_torch_does_it(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert Workspace().loops is None
    assert "cannot be imported" in str(compiled.why_not())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("out of registers"), "cannot compile the update here (RuntimeError: out of registers)"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot keep what it compiles ([Errno 28] No space left"),
    ],
)
def test_a_compiler_that_fails_is_said_and_survived(
    afresh: None, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(importlib, "import_module", broken)
    assert Workspace().loops is None
    assert said in str(compiled.why_not())


def test_loops_with_other_bits_are_refused(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor, or a torch, that rounds at another place: one last bit in one moment is enough."""
    needs_loops()
    real = importlib.import_module("tiermem.optim.loops")

    def other(parameter: Any, remainder: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, c: Any) -> None:
        real.update_split(parameter, remainder, grad, exp_avg, exp_avg_sq, c)
        exp_avg.view("int32")[17] ^= 1

    fake = SimpleNamespace(
        update_split=other,
        update_coded=real.update_coded,
        update_coded_split=real.update_coded_split,
        books=real.books,
    )
    compiled.compiled_loops.cache_clear()
    compiled._find.cache_clear()
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    assert Workspace().loops is None
    assert "update_split" in str(compiled.why_not())


_THREADS = """
import os, threading, time
import torch
from tiermem.optim.compiled import _find, why_not

_find.cache_clear()  # it is tried on this thread

def of_others():  # threads that Python did not start: OpenMP's
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def tried():
    before, reason = of_others(), why_not()
    deadline = time.monotonic() + 20
    while of_others() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    after = of_others()
    torch.ones(1 << 20).add_(1)
    print(after - before, of_others() - before, reason)

torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)
thread = threading.Thread(target=tried)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc/self/task")
def test_the_trial_leaves_the_updater_without_threads_of_openmp(warm_python: WarmPython) -> None:
    """Else the computation's own would sleep after every operation (see `_find`)."""
    run = warm_python.run("-c", _THREADS)
    assert run.returncode == 0, run.stderr
    left, control, reason = run.stdout.split(maxsplit=2)
    assert left == "0", run.stdout
    if reason.strip() != "None":
        pytest.skip(f"nothing was tried: {reason}")
    assert control == "1", "an operation on the thread itself leaves one, or this test could not fail"


def test_without_a_thread_for_the_trial_torch_does_it(afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Workspace().loops is None
    assert "can't start new thread" in str(compiled.why_not())


# In a process that has numba already, as the warm Python has: it is forgotten, and who asks for it anew gets none.
_PREPARED = """
import importlib.abc, sys, tempfile
import torch
import tiermem
from tiermem.optim import compiled
from tiermem.zero3 import norms

asked = set()

class Asked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("numba", "tiermem.optim.loops"):
            asked.add(name)
        if name == "numba":
            raise ImportError("No module named numba")

def prepare(dtype, moments, directory):
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
    config = tiermem.Config(swap_dirs=[directory], param_dtype=dtype, moments=moments)
    with tiermem.offload(model, config):
        before = sorted(asked)
        tiermem.AdamW(model.parameters())
        print(before, sorted(asked))

OF_NUMBA = ("tiermem.machine_code", "tiermem.optim.loops", "tiermem.zero3.squares", "tiermem.zero3.team")
for name in [name for name in sys.modules if name.startswith(("numba", "llvmlite", *OF_NUMBA))]:
    del sys.modules[name]
for cached in (compiled.compiled_loops, compiled._find, norms.squares_loops, norms.team_loops):
    cached.cache_clear()
sys.meta_path.insert(0, Asked())
with tempfile.TemporaryDirectory() as directory:
    prepare("float32", "float32", directory)
    prepare(*sys.argv[1:], directory)
"""


@pytest.mark.parametrize(("dtype", "moments"), some_of([("bfloat16", "float32")], [("float32", "int8")]))
def test_the_loops_are_made_with_the_optimizer_and_only_for_who_has_use_for_them(
    warm_python: WarmPython, dtype: str, moments: str
) -> None:
    """In the first step their memory would come on top of the activations."""
    run = warm_python.run("-W", "ignore", "-c", _PREPARED, dtype, moments)
    assert run.returncode == 0, run.stderr
    loops = ["numba", "tiermem.optim.loops"]
    assert run.stdout.splitlines() == ["[] []", f"[] {loops}"], "of who has no use, then of who has"
