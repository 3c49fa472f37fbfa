"""What the system refuses is said in one line, whoever asked for it, and taken for nobody's mistake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiermem.cli import main, presets
from tiermem.cli.presets import find_model, is_models_own
from tiermem.cli.shortage import shortage_of


def too_much_for_torch(*_: Any, **__: Any) -> Any:
    return torch.empty(1 << 50)


def too_much_for_python(*_: Any, **__: Any) -> Any:
    return bytes(1 << 60)


def too_much_for_a_gpu(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def a_thread_too_many(*_: Any, **__: Any) -> Any:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (too_much_for_torch, "out of memory (can't allocate memory: you tried to allocate 4503599627370496 bytes"),
        (too_much_for_python, "out of memory (Python got none); raise the limit"),
        (too_much_for_a_gpu, "out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.); raise the limit"),
        (a_thread_too_many, "can't start new thread: the system allows no more; raise the limit (ulimit -u"),
    ],
)
def test_it_is_one_line(
    ask: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tiermem.cli.train.train_in", ask)
    assert main.run(["train"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tiermem: {said}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("ask", [too_much_for_torch, too_much_for_python])
def test_a_model_or_its_configuration_is_not_blamed(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    assert isinstance(caught.value, Exception)
    assert not is_models_own(caught.value)
    monkeypatch.setattr(presets.library().AutoConfig, "from_pretrained", ask)
    with pytest.raises(type(caught.value)):
        find_model(str(tmp_path))


def test_others_are_not_among_them() -> None:
    starting = threading.Thread()
    starting.start()
    with pytest.raises(RuntimeError) as caught:
        starting.start()
    assert shortage_of(caught.value) is None
    assert shortage_of(ValueError("can't allocate memory")) is None
