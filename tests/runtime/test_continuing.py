"""What a run takes over of a commit, and what of it is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swap import align_up
from tiermem.errors import ResumeError
from tiermem.pager.page import Kind, PageKey
from tiermem.runtime import continuing
from tiermem.runtime.continuing import add_committed, fill_pages, take_over

FIRST, SECOND, STATE = PageKey(0, Kind.PARAM), PageKey(1, Kind.PARAM), PageKey(1, Kind.STATE)
PAGES = {FIRST: 5000, SECOND: 4096, STATE: 100}
LAYOUTS: Any = [SimpleNamespace(key=FIRST), SimpleNamespace(key=SECOND)]


def added(committed: dict[Any, int] | None) -> dict[PageKey, tuple[int, bool]]:
    """The pages made known where a commit holds so many bytes of each key: their bytes, and if they are on the disk."""
    found: dict[PageKey, tuple[int, bool]] = {}

    def add_page(key: PageKey, nbytes: int, *, saved: bool) -> None:
        found[key] = (nbytes, saved)

    copies = {key: SimpleNamespace(extent=SimpleNamespace(nbytes=nbytes)) for key, nbytes in (committed or {}).items()}
    recovered = None if committed is None else SimpleNamespace(mark=SimpleNamespace(copies=copies))
    storage: Any = SimpleNamespace(recovered=recovered, pager=SimpleNamespace(add_page=add_page))
    try:
        add_committed(storage, PAGES.items(), LAYOUTS)
    except ResumeError:
        assert not found, "refused before anything is made known"
        raise
    return found


def test_pages_of_a_commit_are_on_the_disk_and_others_have_no_contents_yet() -> None:
    found = added({FIRST: align_up(5000), SECOND: 4096})
    assert found == {FIRST: (5000, True), SECOND: (4096, True), STATE: (100, False)}


@pytest.mark.parametrize(
    ("committed", "reason"),
    [
        ({FIRST: align_up(5000)}, f"holds no copy of {SECOND}"),
        ({FIRST: 4096, SECOND: 4096}, f"holds 4096 bytes of {FIRST}, expected 8192"),
        ({FIRST: align_up(5000), SECOND: 4096, PageKey(7, Kind.PARAM): 4096}, "expected None"),
        ({}, f"holds no copy of {FIRST}"),
    ],
)
def test_a_commit_of_other_pages_is_refused(committed: dict[PageKey, int], reason: str) -> None:
    with pytest.raises(ResumeError, match=reason):
        added(committed)


@pytest.mark.parametrize("resumed", [False, True])
def test_pages_are_new_or_those_of_a_commit_and_buffers_go_to_the_computation(resumed: bool) -> None:
    model = nn.BatchNorm1d(4, affine=False)
    made: list[Any] = []
    copies = {key: SimpleNamespace(extent=SimpleNamespace(nbytes=align_up(nbytes))) for key, nbytes in PAGES.items()}
    storage: Any = SimpleNamespace(
        recovered=SimpleNamespace(mark=SimpleNamespace(copies=copies)) if resumed else None,
        pager=SimpleNamespace(add_page=lambda key, _, saved=False: made.append((key, saved))),
        torch_device=torch.device("meta"),
    )
    blueprint: Any = SimpleNamespace(
        divided=SimpleNamespace(model=model),
        layouts=LAYOUTS,
        shards=(),
        pages=tuple(PAGES.items()),
        state_pages=((STATE, 100),),
    )
    materializer: Any = SimpleNamespace(
        run=lambda *_: ["made"], adopt=lambda *_: ["as committed"], weights=SimpleNamespace()
    )
    parameters: list[Any] = [*fill_pages(blueprint, storage, materializer)]
    assert parameters == (["as committed"] if resumed else ["made"])
    assert made == ([(key, True) for key in PAGES] if resumed else [(STATE, False)])  # the others are made with values
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


class Taker:
    """Whatever takes something over, and what it was given."""

    def __init__(self) -> None:
        self.taken: dict[str, Any] = {}

    def restore(self, given: Any) -> None:
        self.taken["restored"] = given


@pytest.fixture
def record() -> dict[str, Any]:
    return {"step": 4, "optimizers": [{"steps": [[3, 7]]}], "buffers": {"b": 1}, "random": None}


@pytest.mark.parametrize("states", [None, {"python": 1}])
def test_counts_buffers_random_states_and_settings_go_on(
    monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], states: Any
) -> None:
    buffers, drawn, settings = Taker(), Taker(), Taker()
    monkeypatch.setattr(continuing, "randomness", drawn)
    monkeypatch.setattr(continuing, "generation_in", lambda model, record: (model, record["step"]))
    monkeypatch.setattr(continuing, "take_generation", lambda _, given: settings.restore(given))
    model: Any = object()
    assert take_over({**record, "random": states}, buffers, model) == {3: 7}  # type: ignore[arg-type]
    assert buffers.taken == {"restored": {"b": 1}}
    assert drawn.taken == ({} if states is None else {"restored": states})
    assert settings.taken == {"restored": (model, 4)}


@pytest.mark.parametrize(
    "damage", [{"optimizers": None}, {"optimizers": [{}]}, {"optimizers": [{"steps": [["x", 1]]}]}]
)
def test_counts_that_make_no_sense_change_nothing(
    monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], damage: dict[str, Any]
) -> None:
    buffers = Taker()
    monkeypatch.setattr(continuing, "generation_in", lambda *_: None)
    with pytest.raises(ResumeError, match="step counts cannot be restored"):
        take_over({**record, **damage}, buffers, object())  # type: ignore[arg-type]
    assert buffers.taken == {}
