"""Where the shell enters the `tiermem` command, before anything of it is imported.

Owns the seconds in which the package and torch are imported. Knows the command by name only, and imports none of it
before signals are taken: that is why it is no module of the package. Guarantees that Ctrl-C, SIGTERM and the end of the
terminal end a command that is only starting as they end a running one: with one line, and exit code 130.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 130


def main() -> None:
    """Import the command and run it, which ends the process; it takes the signals itself from there on."""
    taken: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        taken.append(number)
        if len(taken) == 1:
            raise KeyboardInterrupt

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background, or under `nohup`
            signal.signal(number, interrupt)
    try:
        from tiermem.cli.main import main as run

        if not taken:  # one that was swallowed may have left half of something
            run()
    except BaseException:  # what a library makes of an interrupt may be an ImportError
        if not taken:
            raise
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.stderr is not None:
        sys.stderr.write("tiermem: interrupted\n")
    sys.exit(_INTERRUPTED)
