"""Exporting without the model: what the record of a commit has to be."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import swap
import tiermem
from tiermem.checkpoint.exporting import CommitSource, recorded

RECORD: dict[str, Any] = {
    "layout": {
        "world_size": 1,
        "units": [
            ["unit", [["a", [2, 3], [3, 1], "torch.bfloat16", True, 0], ["b", [4], [1], "torch.int64", False, 64]]]
        ],
    },
    "buffers": {"mean": ["float32", [2], "AACAPwAAAEA="], "scratch": ["float32", [1], "AACAPw=="]},
    "pretrained": {"files": {"config.json": "{}"}, "names": {"a": "x", "b": None}, "buffers": ["mean"]},
}


class NoPages:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError("nothing should be read")


def source(record: Any) -> CommitSource:
    return CommitSource(record, NoPages())  # type: ignore[arg-type]


def test_names_and_forms_are_those_of_the_record() -> None:
    specs = source(RECORD).specs()
    assert [(spec.name, spec.shape) for spec in specs] == [("x", (2, 3)), ("mean", (2,))]
    assert dict(recorded(RECORD).files) == {"config.json": "{}"}


def test_a_buffer_made_in_training_is_exported_and_a_sparse_one_is_lacking() -> None:
    record = copy.deepcopy(RECORD)
    for name, also in (("made", {"made": True}), ("sparse", {"saved": True})):
        record["buffers"][name] = ["float32", [1], "AACAPw==", also]
    record["pretrained"]["buffers"] = ["mean", "made", "sparse", "unchanged"]
    found = source(record)
    assert [spec.name for spec in found.specs()] == ["x", "mean", "made"]
    assert found.lacking == ("sparse", "unchanged")


def test_a_buffer_of_a_dtype_that_no_file_of_weights_has_is_lacking() -> None:
    record = copy.deepcopy(RECORD)
    record["buffers"]["turns"] = ["complex128", [1], "AACAPwAAgD8AAIA/AACAPw=="]
    record["pretrained"]["buffers"] = ["mean", "turns"]
    found = source(record)
    assert [spec.name for spec in found.specs()] == ["x", "mean"]
    assert found.lacking == ("turns",)


def test_a_commit_from_before_models_were_recorded_has_first_names() -> None:
    record = {key: value for key, value in RECORD.items() if key != "pretrained"}
    assert [spec.name for spec in source(record).specs()] == ["a", "b"]
    assert recorded(record).files == {}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["layout"], None),
        (["layout", "units"], 3),
        (["layout", "units", 0], ["unit"]),
        (["layout", "units", 0, 1, 0, 3], "torch.nothing"),
        (["layout", "units", 0, 1, 0, 2], [0, 0]),
        (["layout", "units", 0, 1, 0, 2], [1 << 40, 1]),
        (["layout", "units", 0, 1, 0, 1], None),
        (["buffers"], []),
        (["buffers", "mean"], ["float32", [3], "AACAPwAAAEA="]),
        (["buffers", "mean"], ["float32", [2], "not base64"]),
        (["pretrained"], []),
        (["pretrained", "files"], {"../config.json": ""}),
        (["pretrained", "names"], ["a"]),
    ],
)
def test_a_record_that_is_none(path: list[Any], value: Any) -> None:
    record = copy.deepcopy(RECORD)
    node: Any = record
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(swap.FormatError, match="expected"):
        source(record)


def test_a_commit_of_several_ranks_is_refused() -> None:
    record = copy.deepcopy(RECORD)
    record["layout"]["world_size"] = 2
    with pytest.raises(tiermem.ConfigError, match="give the directories of the run"):
        source(record)
