"""Disk space, doctor, learning rate: the small parts of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles_python import WarmPython

import swap
from tiermem.cli import disk, main, process_memory
from tiermem.cli.process_memory import peak_resident_bytes, resident_bytes
from tiermem.cli.subject import Subject
from tiermem.cli.text import ByteTokens, Corpus
from tiermem.config import Config
from tiermem.errors import ConfigError


def test_directories_on_one_file_system_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(swap.SystemCalls, "free_bytes", lambda *_: 1000)
    disk.require_room([tmp_path / "a", tmp_path / "b"], 1000)
    with pytest.raises(ConfigError, match=r"1001 bytes.*1000 bytes.*free"):
        disk.require_room([tmp_path / "a", tmp_path / "b"], 1001)


def test_where_no_directory_can_be_made_the_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**where: object) -> str:
        raise PermissionError(13, "Permission denied", str(where["dir"]))

    monkeypatch.setattr(disk.tempfile, "mkdtemp", denied)
    with (
        pytest.raises(ConfigError, match=r"Permission denied.*name one with --swap-dir"),
        disk.swap_directories([], keep=False),
    ):
        pass


def test_peak_memory_is_at_least_present_memory() -> None:
    now = resident_bytes()
    assert peak_resident_bytes() >= now * 0.9 > 2**20


def test_a_process_may_have_a_name_in_any_letters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of a script that was started by its name, say."""
    (tmp_path / "status").write_bytes("Name:\tentraîne\nVmHWM:\t    2048 kB\n".encode())
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "status")
    assert peak_resident_bytes() == 2 << 20


def test_doctor_says_what_a_directory_is_worth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plain_core: Any
) -> None:
    code = main.run(["doctor", "--json", "--swap-dir", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["problems"] else 0)
    assert report["memory_bytes"] > report["memory_available_bytes"] > 0
    (drive,) = report["swap_dirs"]
    assert drive["exists"]
    assert drive["writable"]
    assert drive["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_for_a_missing_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plain_core: Any
) -> None:
    assert main.run(["doctor", "--swap-dir", str(tmp_path / "none")]) == 1
    assert "problem" in capsys.readouterr().out


def test_the_learning_rate_warms_up_and_comes_down(plain_core: Any) -> None:
    from tiermem.cli.train import learning_rate_factor

    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=0.01)
    assert learning_rate_factor(0, 1) == 1.0


STANDARD_STREAMS = """
import os, sys
from tiermem.cli.main import print_object, replace_closed_streams
replace_closed_streams()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    print_object("{}")
    sys.stderr.write("something")
    os.write(1, b"more")
    os.write(2, b"more")
    file.write("mine")
"""


def test_python_starts_with_nothing_in_place_of_streams_that_are_closed() -> None:
    """As the next test has it, in a process that has imported already what the command imports."""
    code = """
import os, sys
for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
    try:
        os.fstat(number)
    except OSError:
        if stream is None:
            continue
    sys.exit(9)
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, check=False, timeout=280).returncode == 0


@pytest.mark.parametrize("closed", [(2,), (1,), (1, 2), (0, 1, 2)], ids=str)
def test_what_is_written_to_one_that_is_closed_goes_nowhere(
    warm_python: WarmPython, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    """As Python starts with it: without a file of that number, and with None in place of the stream."""
    names = ("stdin", "stdout", "stderr")
    close = "".join(f"os.close({number}); sys.{names[number]} = None\n" for number in closed)
    result = warm_python.run("-c", f"import os, sys\n{close}{STANDARD_STREAMS}os._exit(0)", str(tmp_path / "file"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "file").read_text() == "mine"
    # What is not closed has what was written to it.
    assert result.stdout == ("" if 1 in closed else "{}\nmore")
    assert result.stderr == ("" if 2 in closed else "somethingmore")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--json"], ["doctor"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_named_in_one_line(
    warm_python: WarmPython, tmp_path: Path, arguments: list[str]
) -> None:
    program = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nfrom tiermem.cli.main import main; main()"
    result = warm_python.run("-c", program, *arguments)
    assert result.returncode == 1
    assert result.stderr == "tiermem: [Errno 28] No space left on device: 'stdout'\n"


@pytest.mark.parametrize(
    "command", ["train", "tune", "plan", "bench", "doctor", *(f"snapshot {name}" for name in ("list", "reshard"))]
)
def test_help_has_the_whole_names_of_options_on_a_terminal_of_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left of --gradient-checkpoint… cannot be typed: long ranges take the room of names."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_stdout_has_no_letters_for_are_written_all_the_same(
    warm_python: WarmPython, tmp_path: Path, encoding: str
) -> None:
    names = [os.fsencode(tmp_path) + b"/" + name for name in (b"\xc3\xbc", b"\xff")]
    for name in names:
        os.mkdir(name)
    # As a start with PYTHONIOENCODING makes it.
    code = f"import sys; sys.stdout = open(1, 'w', encoding='{encoding}', closefd=False)\n"
    code += "from tiermem.cli.main import main; main()"
    command = [warm_python.path, "-c", code, "doctor", "--swap-dir", names[0], "--swap-dir", names[1]]
    environment = os.environ | {"COLUMNS": "300"}
    done = subprocess.run(command, check=False, capture_output=True, timeout=280, env=environment)
    assert done.stderr == b""
    assert (b"/\\xfc" if encoding == "ascii" else b"/\xc3\xbc") in done.stdout
    assert b"/\\udcff" in done.stdout


@pytest.mark.parametrize(
    ("settings", "copied", "once"),
    [
        ({}, 12, 2),
        ({"moments": "int8"}, 6, 2),
        ({"param_dtype": "float32"}, 12, 4),
        ({"param_dtype": "float16"}, 14, 2),
    ],
)
def test_the_disk_needs_room_for_parameters_state_and_gradients_as_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], copied: int, once: int
) -> None:
    subject = Subject(None, 1000, source=ByteTokens(Corpus([Path(__file__)])))
    config = Config(swap_dirs=[tmp_path], **settings)
    for update, commits, copies in (("step", False, 1), ("backward", True, 3)):
        needed = 1000 * (copies * copied + once)
        monkeypatch.setattr(disk, "free_together", lambda directories, free=needed: free)
        subject.require_room(config, update, commits=commits)
        monkeypatch.setattr(disk, "free_together", lambda directories, free=needed - 1: free)
        with pytest.raises(ConfigError, match=f"swapping needs .*{needed} bytes"):
            subject.require_room(config, update, commits=commits)
