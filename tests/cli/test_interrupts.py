"""Ctrl-C, SIGTERM and SIGHUP: the first ends a command, and what closes it is not cut short by those that follow."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
from doubles_python import WarmPython

from tiermem.cli import main
from tiermem.cli.interrupts import INTERRUPTED

PROGRAM = """
import os, signal, sys, time
from tiermem.cli import main

def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0)

def run(arguments):
    {body}

main.run = run
main.main()
"""
CLOSING = """
    try:
        send(signal.{first})
        time.sleep(60)
    except KeyboardInterrupt:
        for _ in range(3):
            send(signal.{second})
        try:
            raise OSError("an error while closing")
        except OSError:
            send(signal.{second})
        print("closed")
        return 130
"""
SWALLOWED = """
    for number in (signal.{first}, signal.{second}):
        try:
            send(number)
            time.sleep(60)
        except KeyboardInterrupt:
            print("swallowed")
    return 0
"""
ENDING = """
    import atexit
    atexit.register(lambda: (send(signal.{first}), send(signal.{second}), print("ended")))
    return 130
"""


@pytest.mark.parametrize(("first", "second"), [*itertools.product(["SIGINT", "SIGTERM"], repeat=2), ("SIGHUP",) * 2])
@pytest.mark.parametrize(
    ("body", "said", "code"),
    [(CLOSING, "closed\n", INTERRUPTED), (SWALLOWED, "swallowed\n" * 2, 0), (ENDING, "ended\n", INTERRUPTED)],
)
def test_signals_while_one_is_handled_change_nothing(
    warm_python: WarmPython, body: str, said: str, code: int, first: str, second: str
) -> None:
    done = warm_python.run("-c", PROGRAM.format(body=body.format(first=first, second=second)))
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_what_the_caller_ignores_stays_ignored(warm_python: WarmPython, name: str) -> None:
    """A Ctrl-C in a job in the background, and the end of the terminal under nohup."""
    ignoring = f"import signal\nsignal.signal(signal.{name}, signal.SIG_IGN)"
    body = f"\n    send(signal.{name})\n    print('went on')\n    return 0\n"
    done = warm_python.run("-c", ignoring + PROGRAM.format(body=body))
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_what_is_ended_by_a_signal_after_the_last_word_is_ended(warm_python: WarmPython, name: str) -> None:
    body = ENDING.format(first=name, second=name).replace("130", "0")
    done = warm_python.run("-c", PROGRAM.format(body=body))
    assert (done.returncode, done.stderr) == (-getattr(signal, name), "")


def test_a_run_to_be_kept_that_has_committed_nothing_leaves_no_directory(
    plain_core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plain_core.error = KeyboardInterrupt()
    assert main.run(["train", "--model", "llama-tiny", "--seq", "32", "--keep"]) == INTERRUPTED
    assert capsys.readouterr().err == "tiermem: interrupted\n"
    assert list(tmp_path.iterdir()) == []
