"""The code budgets hold in this repository, and each of them fires when it is exceeded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_budgets

ROOT = Path(__file__).resolve().parents[2]
DOC = '"""A module."""\n'


def findings(root: Path, text: str, name: str = "tiermem/thing.py") -> list[str]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [str(violation) for violation in check_budgets.check(root)]


def assignments(count: int) -> str:
    return "".join(f"        self.a{i} = {i}\n" for i in range(count))


def fields(count: int) -> str:
    return "".join(f"    f{i}: int = 0\n" for i in range(count))


def methods(count: int) -> str:
    return "".join(f"    def _m{i}(self): ...\n" for i in range(count))


def parameters(count: int) -> str:
    return ", ".join(f"p{i}=0" for i in range(count))


def test_this_repository_keeps_the_budgets() -> None:
    assert [str(violation) for violation in check_budgets.check(ROOT)] == []


CLASS = DOC + 'class Thing:\n    """A thing."""\n'
MUTABLE = DOC + '@dataclass\nclass Thing:\n    """A thing."""\n'
FROZEN = DOC + '@dataclasses.dataclass(frozen=True, slots=True)\nclass Thing:\n    """A thing."""\n'


@pytest.mark.parametrize(
    "text",
    [
        DOC + "#\n" * 349,
        DOC + "def _f():\n" + "    pass\n" * 59,
        CLASS + "    def _f(self):\n" + assignments(12),
        CLASS + methods(20),
        CLASS + "    @property\n    def _m0(self): ...\n    @_m0.setter\n    def _m0(self, x): ...\n" + methods(20),
        CLASS + f"    def __init__(self, {parameters(5)}, *, key, **rest): ...\n",
        FROZEN + fields(20),
        FROZEN.replace("Thing", "Config") + fields(20),
        MUTABLE + "    kept: ClassVar[int] = 0\n" + fields(7) + "    late: int = field(init=False)\n",
        DOC + 'class Thing(Protocol):\n    """A thing."""\n' + fields(13),
        DOC + "def _private(): ...\n",
        CLASS + "    @overload\n    def m(self): ...\n",
    ],
)
def test_what_just_fits_is_accepted(tmp_path: Path, text: str) -> None:
    assert findings(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DOC + "#\n" * 350, "file has 351 lines, limit 350"),
        (DOC + "def _f():\n" + "    pass\n" * 60, "function _f has 61 lines, limit 60"),
        (DOC + "async def _f():\n" + "    pass\n" * 60, "function _f has 61 lines, limit 60"),
        (CLASS + "    def _f(self):\n" + assignments(13), "class Thing has 13 attributes, limit 12"),
        (CLASS + "    x: int\n    def _f(self):\n" + assignments(12), "class Thing has 13 attributes, limit 12"),
        (
            CLASS
            + "    def _f(me):\n        me.b, (me.c, me.d) = 1, (2, 3)\n        me.e += 1\n    def _g(self):\n"
            + assignments(9),
            "class Thing has 13 attributes, limit 12",
        ),
        (CLASS + methods(21), "class Thing has 21 methods, limit 20"),
        (
            CLASS + f"    def __init__(self, {parameters(6)}, *, key, **rest): ...\n",
            "has 8 parameters besides self, limit 7",
        ),
        (MUTABLE + fields(8), "constructor of Thing has 8 parameters"),
        (MUTABLE + "".join(f"    f{i}: int = field(init=False)\n" for i in range(13)), "class Thing has 13 attributes"),
        (FROZEN + fields(21), "frozen record Thing has 21 fields, limit 20"),
        (FROZEN.replace("Thing", "Config") + fields(21), "frozen record Config has 21 fields, limit 20"),
        ("x = 1\n", "module has no docstring"),
        (DOC + "def public(): ...\n", "public is public and has no docstring"),
        (DOC + "class Public: ...\n", "Public is public and has no docstring"),
        (CLASS + "    def method(self): ...\n", "method is public and has no docstring"),
        (DOC + "def _f():\n    assert True\n", "assert in product code"),
    ],
)
def test_what_exceeds_is_found(tmp_path: Path, text: str, message: str) -> None:
    found = findings(tmp_path, text)
    assert len(found) == 1, found
    assert message in found[0]


def test_tests_may_be_long_and_assert(tmp_path: Path) -> None:
    assert findings(tmp_path, "assert True\n" * 400, name="tests/test_thing.py") == []


def test_scripts_are_sized(tmp_path: Path) -> None:
    assert len(findings(tmp_path, DOC + "#\n" * 350, name="benchmarks/thing.py")) == 1


def test_a_tree_that_is_not_there_is_not_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_budgets.main([str(tmp_path / "none")]) == 2
    assert "expected the folder of a tree to check, found" in capsys.readouterr().err


def test_the_script_prints_violations_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_budgets.main([str(tmp_path)]) == 0
    findings(tmp_path, "x = 1\n")
    assert check_budgets.main([str(tmp_path)]) == 1
    assert "tiermem/thing.py:1: module has no docstring" in capsys.readouterr().out
