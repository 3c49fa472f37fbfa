"""How it is installed: what `make` finds and mends, and that the package is found from anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Stands for an environment's Python: it has pip once somebody has made the environment again.
WITHOUT_PIP = """#!/bin/sh
[ -e made ] || { echo "No module named pip" >&2; exit 1; }
echo "$@" >> asked
"""


NEEDS_MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.mark.parametrize("package", ["tiermem", "swap"])
def test_a_folder_of_its_name_is_not_taken_for_the_package(tmp_path: Path, package: str) -> None:
    """Such as the checkout, seen from the folder that it lies in."""
    (tmp_path / package).mkdir()
    code = f"import importlib.util; print(importlib.util.find_spec({package!r}).origin)"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == str(ROOT / package / "__init__.py")


@NEEDS_MAKE
def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    """Debian's Python leaves one where python3-venv is not installed yet."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for path, text in ((python, WITHOUT_PIP), (tmp_path / "python", "#!/bin/sh\necho $@ > made\n")):
        path.write_text(text)
        path.chmod(0o755)
    command = ["make", "PYTHON=./python", "PIP_ARGS=", ".venv/.ready-hf"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "made").read_text().split() == ["-m", "venv", ".venv"]
    assert "--editable .[hf]" in (tmp_path / "asked").read_text()


@NEEDS_MAKE
@pytest.mark.parametrize(("of", "code"), [(sys.executable, 0), ("/bin/echo", 2)])
def test_an_environment_of_another_python_is_not_taken_for_the_one_asked_for(
    tmp_path: Path, of: str, code: int
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(of)
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    command = ["make", f"PYTHON={sys.executable}", "interpreter"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == code
    assert ("make clean first" in done.stderr) is (code != 0)
