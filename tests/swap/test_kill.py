"""A real process, really killed. The long version is tools/kill_swap.py."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parent.parent.parent / "tools" / "kill_swap.py"


def test_sigkill_at_random_instants_loses_nothing(tmp_path: Path) -> None:
    arguments = [sys.executable, str(TOOL), str(tmp_path), "--kills", "15"]
    found = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert "15 kills" in found.stdout
    assert "nothing lost" in found.stdout
