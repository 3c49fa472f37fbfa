"""Drives that are silent because a test holds their calls, on a machine that may be slow for reasons of its own.

Owns how long this process waits for what it asks of a drive. Does not know why a test holds a call. Guarantees that
what is held is given up after the seconds that the code under test was told, be they few, and that nothing is given up
before that for being slow: a thread that gets no processor, a file system that other work keeps busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

import swap.backends.threads
import swap.patience
from swap.engine import Engine
from swap.requests import Request

_LOOK = 0.01  # seconds from one look to the next at whether something is held


def only_what_is_held_is_silent(monkeypatch: pytest.MonkeyPatch, is_held: Callable[[], bool]) -> None:
    """Wait without end for what is asked of a drive until `is_held()`, and from then on as long as was said."""
    join, seconds_until_stall = swap.patience.join, Engine.seconds_until_stall

    def join_patiently(threads: Sequence[threading.Thread], seconds: float) -> None:
        while not is_held() and (alive := [thread for thread in threads if thread.is_alive()]):
            alive[0].join(_LOOK)
        join(threads, seconds)

    def patiently(engine: Engine, request: Request) -> float:
        seconds = seconds_until_stall(engine, request)
        return seconds if is_held() else max(seconds, _LOOK)

    monkeypatch.setattr(swap.patience, "join", join_patiently)
    monkeypatch.setattr(swap.backends.threads, "join", join_patiently)
    monkeypatch.setattr(Engine, "seconds_until_stall", patiently)
