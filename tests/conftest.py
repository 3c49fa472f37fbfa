"""Tests are of the processor, also on machines that have a GPU: `device="auto"` must mean the same everywhere.

What needs a GPU is in tests/cuda and run by tools/gpu_suite.py, which sets TIERMEM_GPU_SUITE.
"""

import contextlib
import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest
from doubles_python import WarmInterpreter, WarmPython
from hypothesis import settings

# No test is judged by how long it takes: the first example may have to compile, and other workers want the processor.
# The same examples each time, so that what fails is what a change did; `--hypothesis-profile=search` draws others.
settings.register_profile("search", deadline=None)
settings.register_profile("tiermem", deadline=None, derandomize=True)
settings.load_profile("tiermem")

if "TIERMEM_GPU_SUITE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks; for child processes too
# Processes that tests start compute with one thread (doubles_python.py); sums over several have other last bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long ones, so that no worker is left with one while the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported now stays: looking through it for garbage, again and again, takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """As `_settled_heap`: pytest looks through what is left five times as it ends."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _settled_heap() -> None:
    """Look for garbage in what came since the file before, and no more in what has stayed.

    What torch and transformers bring is more than a million objects: each look through all of them takes most of a
    second, in every test that asks for one, and twice as a worker ends.
    """
    gc.collect()
    gc.freeze()


_SHARED = pytest.StashKey[WarmInterpreter]()


def pytest_configure(config: pytest.Config) -> None:
    """Start the interpreter that all workers will share, whose environment is this one; a GPU's tests need none."""
    # A shell has its background jobs ignore it, and so all that they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if workers and "TIERMEM_GPU_SUITE" not in os.environ:
        config.stash[_SHARED] = WarmInterpreter()
        os.environ["TIERMEM_WARM_PYTHON"] = config.stash[_SHARED].path


def pytest_unconfigure(config: pytest.Config) -> None:
    """The workers are gone."""
    if _SHARED in config.stash:
        config.stash[_SHARED].close()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """A Python to start in place of `sys.executable`, which has imported everything already."""
    if "TIERMEM_WARM_PYTHON" in os.environ:
        yield WarmPython(os.environ["TIERMEM_WARM_PYTHON"])
    else:
        with contextlib.closing(WarmInterpreter()) as found:
            yield found
