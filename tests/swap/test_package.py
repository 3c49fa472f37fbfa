"""What the package promises as a whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import swap


def test_importing_swap_imports_no_torch_and_no_numpy() -> None:
    code = "import sys, swap; sys.exit(bool({'torch', 'numpy', 'typing_extensions'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=os.getcwd(), check=False).returncode == 0


def test_without_the_modules_of_linux_the_error_says_what_would_do() -> None:
    code = "import sys; sys.modules['fcntl'] = None; import swap"
    found = subprocess.run([sys.executable, "-c", code], cwd=os.getcwd(), check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert "ImportError: swap files need Linux" in found.stderr
    assert "WSL 2" in found.stderr


def test_without_the_calls_of_linux_no_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    with pytest.raises(swap.SwapError, match=r"swap files need Linux, and this is .*: there is no O_DIRECT"):
        swap.SwapSpace.open([tmp_path], name="r0", nbytes=4096)
    assert list(tmp_path.iterdir()) == []


def test_every_public_name_is_there_and_documented() -> None:
    for name in swap.__all__:
        assert getattr(swap, name).__doc__, name


def test_the_table_of_faults_names_tests_that_exist() -> None:
    table = Path(swap.__file__).with_name("FAULTS.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", table))
    written = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert named
    assert named - set(re.findall(r"def (test_\w+)\(", written)) == set()
