"""A real process, really killed. The long version is tools/kill_swap.py."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TOOL = Path(__file__).parent.parent.parent / "tools" / "kill_swap.py"


def test_sigkill_at_random_instants_loses_nothing(tmp_path: Path) -> None:
    arguments = [sys.executable, str(TOOL), str(tmp_path), "--kills", "15"]
    found = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert "15 kills" in found.stdout
    assert "nothing lost" in found.stdout


def lives(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter that knows `tools/lives.py`."""
    head = "import os, sys, threading, time; from lives import live, tell\n"
    arguments = [sys.executable, "-c", head + textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": str(TOOL.parent)}
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=120, env=environment)


def test_a_life_ends_by_sigkill_and_what_was_told_is_whole() -> None:
    found = lives("""
        def work():
            tell("begun")
            try:
                time.sleep(300)
            finally:
                tell("no process that is killed gets here")
        life = live(work, seconds=0.05, working=True)
        print(life.lines, life.killed)
        life = live(lambda: tell("done"), seconds=None, working=False)
        print(life.lines, life.killed)
    """)
    assert found.stdout == "['begun'] True\n['done'] False\n", found.stderr


def test_a_child_that_fails_by_itself_ends_the_program_with_what_it_said() -> None:
    for fault, said in (("raise ValueError('lost a byte')", "lost a byte"), ("os.abort()", "status 6")):
        found = lives(f"""
            def work():
                tell("begun")
                {fault}
            live(work, seconds=60, working=True)
        """)
        assert found.returncode == 1
        assert said in found.stderr
        assert "['begun']" in found.stderr


def test_no_child_is_forked_beside_another_thread() -> None:
    found = lives("""
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        live(lambda: tell("never"), seconds=None, working=False)
    """)
    assert found.returncode == 1
    assert "expected one thread before a fork, found 2" in found.stderr
