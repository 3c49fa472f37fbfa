"""Tests are of the processor, also on machines that have a GPU: `device="auto"` must mean the same everywhere.

What needs a GPU is in tests/cuda and run by tools/gpu_suite.py, which sets TIERMEM_GPU_SUITE.
"""

import os

if "TIERMEM_GPU_SUITE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks; for child processes too
