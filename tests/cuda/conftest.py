"""Where these tests run: on a CUDA device, or, when tools/gpu_suite.py --simulated asks for it, on a simulated one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Read by cuBLAS when it starts; without it torch refuses deterministic matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


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
