"""Signals, forks and exits: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]

_MODEL = """
import os, sys, threading, time, warnings, torch, tiermem
from torch import nn
directory = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
config = tiermem.Config(host_memory="2MiB", swap_dirs=[directory], param_dtype="float32", device="cpu")
x = torch.randn(8, 256)
def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

_INTERRUPTED = (
    _MODEL
    + """
runtime = tiermem.offload(model, config)
optimizer = tiermem.AdamW(model.parameters())
try:
    while True:
        step()
        print("step", flush=True)
except KeyboardInterrupt:
    runtime.close()
    print()
    print("closed", [thread.name for thread in threading.enumerate() if thread.name.startswith("tiermem")], flush=True)
"""
)

_CONTINUED = _INTERRUPTED.replace(
    "    runtime.close()\n",
    """
    optimizer.zero_grad()
    before = runtime.parameter(model[0].weight)
    step()
    print()
    print(torch.equal(before, runtime.parameter(model[0].weight)), before.isfinite().all().item(), flush=True)
    runtime.close()
""",
)

_FORKED = (
    _MODEL
    + """
runtime = tiermem.offload(model, config)
optimizer = tiermem.AdamW(model.parameters())
step()
warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: a fork beside threads, as here
child = os.fork()
if child == 0:
    said = []
    for use in (lambda: runtime.parameter(model[0].weight), lambda: runtime.commit(), lambda: model(x), step):
        try:
            use()
        except tiermem.TiermemError as error:
            said.append("forked child" in str(error))
    runtime.close()
    print(said, flush=True)
    sys.exit(0)
_, status = os.waitpid(child, 0)
step()
print("parent", os.waitstatus_to_exitcode(status), model(x).isfinite().all().item(), flush=True)
runtime.close()
"""
)

_NEVER_CLOSED = (
    _MODEL
    + """
runtime = tiermem.offload(model, config)
optimizer = tiermem.AdamW(model.parameters())
step()
print("done", flush=True)
"""
)


@pytest.mark.parametrize("code", [_INTERRUPTED, _CONTINUED], ids=["close", "go on"])
def test_an_interrupt_in_the_middle_of_a_step(code: str, warm_python: WarmPython, tmp_path: Path) -> None:
    command = [warm_python.path, "-c", code, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines, steps = [], 0
    for line in child.stdout:
        if line == "step\n":
            steps += 1
            if steps % 100 == 3:  # once, but for one that comes where exceptions are dropped, as in a finalizer
                child.send_signal(signal.SIGINT)
        elif line.strip() not in ("step", ""):  # not one that was interrupted
            lines.append(line.strip())
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert lines[-1] == "closed []"
    assert lines[:-1] == ([] if code == _INTERRUPTED else ["False True"])
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_is_told_and_its_parent_goes_on(warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run("-c", _FORKED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[True, True, True, True]", "parent 0 True"]
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_never_closes_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", _NEVER_CLOSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "never closed" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert os.path.isdir(tmp_path)
