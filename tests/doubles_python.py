"""A Python that has imported everything already: a program to be started in place of `sys.executable`.

Run as a program this is an interpreter that imports torch, transformers and what the first step of a training needs,
and then forks a process for each one that is asked for. Whoever starts `WarmPython.path`, with the arguments of Python,
gets a process with the arguments, folder, environment, standard streams and end of one started by itself; what is
shared are the seconds of processor time that importing takes. Not for what is about the start of an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Takes milliseconds to start. It is the process that others see: signals to it are passed on, and with it the other one
# dies, for the connection ends.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
wire = socket.socket(socket.AF_UNIX)
wire.connect({address!r})
socket.send_fds(wire, [b"-"], [0, 1, 2])
wire.sendall(json.dumps([sys.argv[0], sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
answers = wire.makefile()
process = int(answers.readline() or sys.exit("the warm interpreter has ended"))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(process, number))
status = int(answers.readline() or sys.exit("the warm interpreter has ended"))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class WarmPython:
    """An interpreter that another process has; `path` is the program to start."""

    def __init__(self, path: str) -> None:
        self.path = path

    def run(self, *arguments: str, cwd: Path = ROOT, timeout: float = 250) -> subprocess.CompletedProcess[str]:
        """Carry out Python with `arguments`."""
        command = [self.path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, check=False)


class WarmInterpreter(WarmPython):
    """The interpreter, as long as it is not closed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tiermem-python-")
        address, client = Path(self._folder.name, "socket"), Path(self._folder.name, "python")
        client.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        client.chmod(0o700)
        super().__init__(str(client))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(16)  # who connects waits until everything is imported
            self._interpreter = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the interpreter; what it has forked ends with who asked for it."""
        assert self._interpreter.stdin is not None
        self._interpreter.stdin.close()
        self._interpreter.wait(250)  # a session that ends at once: it still imports
        self._folder.cleanup()


def prepare() -> None:
    """Import, and compile, what the first step of a training needs, and a first command."""
    from tiermem.cli import main
    from tiermem.optim.compiled import compiled_loops
    from tiermem.zero3 import norms

    main.quiet_libraries()
    for name in ("tiermem.cli.train", "torch._dynamo", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    compiled_loops(), norms.squares_loops(), norms.team_loops()
    with contextlib.redirect_stderr(io.StringIO()):
        main.run(["snapshot", "list", os.devnull])  # typer imports what it needs with the first command


def _main(listener: socket.socket) -> None:
    gc.disable()  # nothing that is imported goes away: looking for it takes a quarter of the time
    prepare()
    # An end would take torch's operators apart one by one, half of the processor time of a process that does nothing.
    for finalizer, known in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if getattr(known.func, "__module__", "") == "torch.library":
            finalizer.atexit = False
    gc.freeze()
    gc.enable()
    deadline = time.monotonic() + 20
    while (threads := len(os.listdir("/proc/self/task"))) != 1:  # one that was joined is still ending
        if time.monotonic() > deadline:
            sys.exit(f"expected one thread before a fork, found {threads}")
        time.sleep(0.001)
    sys.path[:] = sys.path[2:]  # the folder of this file, and the root
    while listener in select.select([listener, sys.stdin], [], [])[0]:  # until nobody could ask any more
        wire, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            try:
                _serve(wire)
            finally:
                os._exit(1)
        wire.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(wire: socket.socket) -> None:
    """Fork the process, wait for its end or for that of who asked for it, and tell how it ended."""
    _, streams, _, _ = socket.recv_fds(wire, 1, 3)
    told = wire.makefile()
    program, arguments, folder, environment = json.loads(told.readline())
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)
        told.close()
        wire.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.executable = program
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be run by nohup, or in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _end(_carry_out(arguments))
    for stream in streams:
        os.close(stream)
    wire.sendall(f"{process}\n".encode())
    ended = os.pidfd_open(process)
    if ended not in select.select([ended, wire], [], [])[0]:
        os.killpg(process, signal.SIGKILL)  # with what it has forked itself
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):  # who asked may be gone
        wire.sendall(f"{status}\n".encode())
    os._exit(0)


def _carry_out(arguments: list[str]) -> int:
    """What Python does with its arguments; the exit status."""
    try:
        while arguments[0] in ("-W", "-u"):
            if arguments.pop(0) == "-W":
                warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        how, *sys.argv = arguments
        if how == "-c":
            code, sys.argv[0] = sys.argv[0], "-c"
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        elif how == "-m":
            sys.path.insert(0, os.getcwd())
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv.insert(0, how)
            sys.path.insert(0, os.path.dirname(how))
            runpy.run_path(how, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - told and left behind, as Python does
        sys.last_value = error
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """As an interpreter ends, but without taking apart, object by object, what was imported."""
    threading._shutdown()  # a thread left behind is waited for
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
