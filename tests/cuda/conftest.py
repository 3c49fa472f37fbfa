"""Where these tests run: on a CUDA device, or, when tools/gpu_suite.py --simulated asks for it, on a simulated one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Read by cuBLAS when it starts; without it torch refuses deterministic matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_HERE = Path(__file__).parent
_SECONDS = os.environ.get("TIERMEM_GPU_SUITE_SECONDS")
_ENDS = None if _SECONDS is None else time.monotonic() + float(_SECONDS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU warnings are shown and fail nothing.

    torch warns there of what is neither ours nor wrong, once a process and so in whichever test comes first: that a
    thread of autograd had no context yet, that its mode for finding waits is a prototype, how old the GPU is.
    """
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(_HERE):
                item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End in time for a report of what was run: the suite would otherwise end the process, and nothing be known."""
    if _ENDS is not None and time.monotonic() > _ENDS:
        item.session.shouldstop = "the time for the tests is up"


@pytest.fixture
def place() -> Iterator[str]:
    """What `Config.device` says. Computation is deterministic meanwhile."""
    if torch.cuda.is_available():
        name = "cuda"
    elif os.environ.get("TIERMEM_GPU_SUITE") == "simulated":
        name = "simulated"
    else:
        pytest.skip("needs a CUDA device: tools/gpu_suite.py runs it")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield name
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def cuda() -> torch.device:
    """The device, for what only a real one can show."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: tools/gpu_suite.py runs it")
    return torch.device("cuda", torch.cuda.current_device())
