"""What a measurement that was killed while it made its files has left.

Owns the search for such files, by the names `ground.py` gives them, and their removal. Does not know what is measured.
Guarantees that nothing is removed that a living process holds or that is not a swap file of ours.

A killed process leaves a file only where it was killed between making it and taking its name away, which on a drive
that is slow to reserve space may be a second. The file has its full size, and no later run has its name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from swap.blocks import ALIGNMENT
from swap.errors import SwapError
from swap.files import SwapFile
from swap.patience import PatientSystemCalls
from swap.settings import STALL_SECONDS
from swap.syscalls import SystemCalls

_MADE = re.compile(r"(tiermem-bench-\d+-[0-9a-f]{8})\.(swapfile|lock)")


def remove_leftovers(
    directories: Sequence[Path], system: SystemCalls | None = None, *, stall_seconds: float = STALL_SECONDS
) -> list[str]:
    """Remove them; return their paths without the suffix. What cannot be removed stays, and is not named."""
    patient, removed = PatientSystemCalls(system, stall_seconds), []
    for directory in directories:
        names: list[str] = []
        with contextlib.suppress(OSError):  # whoever measures there is told
            names = patient.ask(partial(os.listdir, directory))
        for name in sorted({found[1] for found in map(_MADE.fullmatch, names) if found}):
            with contextlib.suppress(SwapError):  # held by a measurement under way, or not ours
                SwapFile.open(directory, name=name, nbytes=ALIGNMENT, system=patient).close(remove=True)
                removed.append(os.path.join(directory, name))
    return removed
