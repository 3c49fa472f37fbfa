"""Garbage that is collected when a test says so, whatever other threads do."""

from __future__ import annotations

import gc
import threading
import time


def collect() -> None:
    """Look for all garbage.

    `gc.collect` does nothing while another thread is looking; and that one may wait there for its turn, wherever code
    is to run beside (`gc.callbacks`), as hypothesis has for the whole process. Not within a finalizer.
    """
    here, done = threading.get_ident(), list[int]()

    def note(phase: str, found: dict[str, int]) -> None:
        if phase == "stop" and found["generation"] == 2 and threading.get_ident() == here:
            done.append(found["collected"])

    gc.callbacks.append(note)
    try:
        while True:
            gc.collect()
            if done:
                return
            time.sleep(0.001)
    finally:
        gc.callbacks.remove(note)
