"""Norms on a device are read when they have arrived, and never waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import torch

from tiermem.zero3 import norm_reader
from tiermem.zero3.norm_reader import NormReader


class Slow:
    """Values that arrive when the test says so."""

    made: ClassVar[list[Slow]] = []

    def __init__(self, norms: Sequence[torch.Tensor]) -> None:
        self.values = torch.arange(1.0, len(norms) + 1.0) * 10 ** len(self.made)
        self.there = False
        self.made.append(self)

    def arrived(self) -> bool:
        return self.there


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(norm_reader, "_CudaCopy", Slow)
    yield
    Slow.made.clear()


def on_a_device() -> torch.Tensor:
    return torch.empty((), device="meta")


def test_norms_are_sent_once_and_read_when_all_are_there() -> None:
    reader, norms = NormReader(), {3: on_a_device(), 5: on_a_device()}
    assert not reader.are_known(norms)
    assert not reader.are_known(norms)
    (sent,) = Slow.made
    assert reader.read(norms) == list(norms.values()), "as they were given"
    sent.there = True
    assert reader.are_known(norms)
    assert [float(norm) for norm in reader.read(norms)] == [1.0, 2.0]
    more = norms | {6: on_a_device()}
    assert not reader.are_known(more)
    assert reader.read(more) == list(more.values()), "all of them or none: they are to be of one device"
    assert len(Slow.made) == 2


def test_a_norm_that_has_changed_is_another_one() -> None:
    reader, norms = NormReader(), {3: on_a_device()}
    reader.are_known(norms)
    Slow.made[0].there = True
    norms[3] = on_a_device()
    assert reader.read(norms) == [norms[3]]
    assert not reader.are_known(norms)
    Slow.made[1].there = True
    assert reader.read(norms)[0] == 10.0
    reader.clear()
    assert reader.read(norms) == [norms[3]]


def test_what_is_in_host_memory_is_known() -> None:
    reader, norms = NormReader(), {0: torch.tensor(2.0), 1: torch.tensor(float("inf"))}
    assert reader.are_known(norms)
    assert reader.read(norms) == list(norms.values())
    assert reader.are_known({})
    assert Slow.made == []
