"""The `tiermem` command in processes of its own: one interpreter imports everything and forks one for each.

Run as a program it is that interpreter. A forked child has the standard streams and the exit status of a command that
was started by itself; what is shared are the seconds that importing torch and transformers takes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Commands:
    """Runs commands one after the other; close it."""

    def __init__(self) -> None:
        self._interpreter = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Carry out `tiermem` with `arguments` in the repository's root."""
        assert self._interpreter.stdin is not None
        assert self._interpreter.stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as errors:
            self._interpreter.stdin.write(json.dumps([arguments, out.name, errors.name]) + "\n")
            self._interpreter.stdin.flush()
            status = self._interpreter.stdout.readline()
            assert status, "the interpreter of the commands has ended"
            return subprocess.CompletedProcess(arguments, int(status), out.read(), errors.read())

    def close(self) -> None:
        """End the interpreter, and a command that it may be waiting for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._interpreter.pid, signal.SIGKILL)
        self._interpreter.communicate()


def _become(out: str, errors: str) -> None:
    """Take the standard streams of a command started with nothing to read."""
    for number, path in enumerate((os.devnull, out, errors)):
        file = os.open(path, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)


def _main() -> None:
    from tiermem.cli import main

    main.quiet_libraries()
    # With what the first model and the first optimizer import.
    for name in ("tiermem.cli.train", "torch._dynamo", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        arguments, out, errors = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(out, errors)
            status = main.run(arguments)
            sys.stdout.flush()
            threading._shutdown()  # as an interpreter does that ends: a thread left behind is waited for
            os._exit(status)  # without taking apart, object by object, what was imported
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _main()
