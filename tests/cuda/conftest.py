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
_FAILURES = os.environ.get("TIERMEM_GPU_SUITE_FAILURES")


# What torch warns of there that is neither ours nor wrong, by the beginnings of its words; once a process, and so in
# whichever test comes first. Every other warning is an error here as elsewhere: it fails the test that it comes in,
# and the suite's result names that test with what was said, so that one to be added here is found by a single run.
_KNOWN = (
    "Attempting to run cuBLAS, but there was no current CUDA context",  # a thread of autograd's is new
    "Synchronization debug mode is a prototype feature",  # test_device.py turns it on
    r"\s*Found GPU\d+ ",  # how old the GPU is for this build of torch
    "RNN module weights are not part of single contiguous chunk",  # a unit's lie in the order of its parameters
)
# What we say of the machine, which is no fault of what is tested here: the numbers are to be the same on it. Whether
# memory is locked is a test of its own; drives are not what this is about.
_OF_THE_MACHINE = (
    "only .* of host memory could be page-locked:UserWarning",
    "host memory cannot be page-locked:UserWarning",
    "O_DIRECT is refused for :RuntimeWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pass what is known, and what is said of the machine, in these tests only."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            for known in (*(f"{words}:UserWarning" for words in _KNOWN), *_OF_THE_MACHINE):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{known}"))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End in time for a report of what was run: the suite would otherwise end the process, and nothing be known."""
    if _ENDS is not None and time.monotonic() > _ENDS:
        item.session.shouldstop = "the time for the tests is up"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a failure down as it comes: if a later test hangs in the device, the process is ended without a report."""
    if _FAILURES is not None and report.failed:
        with Path(_FAILURES).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n{report.longreprtext}\n\n")


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
