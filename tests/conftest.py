"""Tests are of the processor, also on machines that have a GPU: `device="auto"` must mean the same everywhere.

What needs a GPU is in tests/cuda and run by tools/gpu_suite.py, which sets TIERMEM_GPU_SUITE.
"""

import os

import pytest

if "TIERMEM_GPU_SUITE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks; for child processes too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long ones, so that no worker is left with one while the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
