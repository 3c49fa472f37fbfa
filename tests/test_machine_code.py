"""What is compiled where nothing can be kept of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
import pytest

from tiermem import machine_code

SOURCE = "def double(x):\n    return x + x\n"


@pytest.fixture(autouse=True)
def _kept_beside_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever NUMBA_CACHE_DIR says of this environment."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")


def from_nowhere() -> Callable[[Any], Any]:
    """A function beside whose file numba finds no place: as of a read-only installation, for a user without a home."""
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, "<nowhere>", "exec"), namespace)
    return namespace["double"]


def test_what_cannot_be_kept_is_compiled_all_the_same() -> None:
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(from_nowhere())
    compiled = machine_code.loop()(from_nowhere())
    assert compiled(21) == 42
    assert compiled.signatures
    signature = numba.types.int64(numba.types.int64)
    called = machine_code.callback(signature)(from_nowhere())
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(called.address)(21) == 42


def test_what_can_be_kept_is(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kept_by_numba.py").write_text(
        f"from tiermem.machine_code import loop\n\n\n@loop()\n{SOURCE}\n\nassert double(21) == 42\n"
    )
    import kept_by_numba  # type: ignore[import-not-found]

    assert sum(kept_by_numba.double.stats.cache_misses.values()) == 1
    assert list(tmp_path.rglob("*.nbc"))


def test_other_errors_of_the_compiler_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **options: Any) -> Any:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(numba, "njit", fail)
    with pytest.raises(RuntimeError, match="out of registers"):
        machine_code.loop()(from_nowhere())
