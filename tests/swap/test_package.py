"""What the package promises as a whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import swap


def test_importing_swap_imports_no_torch_and_no_numpy() -> None:
    code = "import sys, swap; sys.exit(bool({'torch', 'numpy', 'typing_extensions'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=os.getcwd(), check=False).returncode == 0


def test_every_public_name_is_there_and_documented() -> None:
    for name in swap.__all__:
        assert getattr(swap, name).__doc__, name


def test_the_table_of_faults_names_tests_that_exist() -> None:
    table = Path(swap.__file__).with_name("README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", table))
    written = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert named
    assert named - set(re.findall(r"def (test_\w+)\(", written)) == set()
