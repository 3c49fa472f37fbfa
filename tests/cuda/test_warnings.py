"""Warnings here: torch's that are known by their words pass, all others fail the test they come in. Needs no GPU."""

from __future__ import annotations

import warnings

import pytest

from swap import DirectIOWarning


@pytest.mark.parametrize(
    "words",
    [
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context...",
        "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
        "Found GPU0 Quadro P2000 which is of compute capability (CC) 6.1.\nThe following list shows the CCs ...",
        "RNN module weights are not part of single contiguous chunk of memory. This means they need to be ...",
        "\n    Found GPU0 Quadro P2000 which is of cuda capability 6.1.\n    Minimum and Maximum ...",
        "only 0 B of 64.00 MiB of host memory could be page-locked (operation not supported): the rest works, but ...",
    ],
)
def test_what_is_known_passes(words: str) -> None:
    warnings.warn(words, UserWarning, stacklevel=1)


def test_what_is_said_of_the_drive_passes() -> None:
    warnings.warn("O_DIRECT is refused for /tmp: transfers go through ...", DirectIOWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("words", "category"),
    [
        ("called a synchronizing CUDA operation", UserWarning),
        ("host memory stays unlocked", RuntimeWarning),
        ("torch.cuda.something is deprecated", FutureWarning),
    ],
)
def test_anything_else_is_an_error(words: str, category: type[Warning]) -> None:
    with pytest.raises(category, match=words):
        warnings.warn(words, category, stacklevel=1)
