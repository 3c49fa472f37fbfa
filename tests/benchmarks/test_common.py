"""What the benchmarks share: ranks that end badly are no result."""

from __future__ import annotations

from pathlib import Path

from doubles_python import WarmPython

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
from common import on_ranks

def leave(rank, folder):
    Path(folder, f"{{rank}}.json").write_text(f'{{{{"rank": {{rank}}}}}}')

def fail(rank, folder):
    leave(rank, folder)
    if rank == 1:
        sys.exit(3)

def hang(rank, folder):
    leave(rank, folder)
    if rank == 1:
        time.sleep(60)

print(on_ranks(leave, 2, seconds=30))
for target in (fail, hang):
    try:
        print(on_ranks(target, 2, seconds=1 if target is hang else 30))
    except RuntimeError as error:
        print(error)
"""


def test_ranks_that_fail_or_hang_after_their_result_are_an_error(warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run("-c", PROGRAM.format(benchmarks=str(BENCHMARKS)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[{'rank': 0}, {'rank': 1}]",
        "fail() of 2 ranks did not end well, exit codes [0, 3]",
        "hang() of 2 ranks did not end well, exit codes [0, -9]",
    ]
    assert list(tmp_path.iterdir()) == []
