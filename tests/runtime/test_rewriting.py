"""A snapshot of a commit, made without the model, beside the one that the run itself makes."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import some_of
from doubles_commit import Net, Training, make_config
from doubles_python import WarmPython
from doubles_ranks import PATIENCE, Reports, run_jobs, values
from torch import nn

import swap
import tiermem
from tiermem.checkpoint.reading import open_snapshot
from tiermem.checkpoint.shard import MarkedPages
from tiermem.cli.main import run
from tiermem.runtime import rewriting
from tiermem.runtime.rewriting import CommittedRank, snapshot_of


def reshard(capsys: pytest.CaptureFixture[str], directories: list[Path], to: Path, ranks: int) -> dict[str, Any]:
    capsys.readouterr()
    arguments = ["snapshot", "reshard", *map(str, directories), "--to", str(to), "--ranks", str(ranks), "--json"]
    assert run(arguments) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def same(one: Path, other: Path) -> None:
    """Both snapshots hold the same bits of every parameter, and tell the same of the run."""
    found, expected = open_snapshot(one), open_snapshot(other)
    assert not list(found.verify())
    for name in ("step", "optimizers", "random", "extra", "param_dtype", "pretrained"):
        assert found.record[name] == expected.record[name], name
    assert found.record.get("extras") == expected.record.get("extras")
    pairs = list(zip(found.manifest.parameters, expected.manifest.parameters, strict=True))
    assert pairs
    for mine, theirs in pairs:
        form = (mine.kind, mine.names, mine.shape, mine.stride, mine.dtype, mine.planes.keys())
        assert form == (theirs.kind, theirs.names, theirs.shape, theirs.stride, theirs.dtype, theirs.planes.keys())
        for plane in mine.planes:
            there = expected.whole(theirs, plane)
            assert torch.equal(found.whole(mine, plane).view(torch.uint8), there.view(torch.uint8)), mine.names


class Tied(Net):
    """As `Net`, with a weight under two names, one without elements, and a table that nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(96, 96)
        self.again.weight = self.layers[0][0].weight
        self.none = nn.Parameter(torch.empty(0), requires_grad=False)
        self.embedding = nn.Embedding(70, 96)
        self.register_buffer("table", torch.arange(30_000.0), persistent=False)
        self.register_buffer("large", torch.arange(30_000.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = self.inner(x) + self.embedding.weight.mean() + self.table[1].to(x.dtype)
        return super().forward(x) + self.again(place).mean()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "settings",
    some_of(
        [{"param_dtype": "float16"}, {"param_dtype": "float32", "moments": "int8"}],
        [{"param_dtype": "bfloat16", "moments": "int8"}, {"param_dtype": "float32"}, {"param_dtype": "bfloat16"}],
    ),
    ids=lambda each: "-".join(each.values()),
)
def test_it_is_the_snapshot_that_the_run_would_have_made(
    settings: dict[str, Any], ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swaps = [tmp_path / "a", tmp_path / "b"]
    for directory in (*swaps, tmp_path / "on"):
        directory.mkdir()
    config = make_config(tmp_path, swap_dirs=swaps, host_memory="1MiB", **settings)
    training = Training(config, model=Tied)
    with training.runtime as runtime:
        for _ in range(2):
            training.step()
        training.commit().wait()
        runtime.snapshot(tmp_path / "copy").wait()
        expected, state = training.step(), training.state()
    report = reshard(capsys, swaps, tmp_path / "made", ranks)
    assert report["what"] == ("snapshot for 1 rank" if ranks == 1 else "snapshot for 3 ranks")
    assert open_snapshot(tmp_path / "made").manifest.world_size == ranks
    same(tmp_path / "made", tmp_path / "copy")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b", "copy", "made", "on"]
    there = make_config(tmp_path / "on", host_memory="2MiB", **settings)
    again = Training(there, model=Tied, resume=tmp_path / "made")
    with again.runtime:
        assert again.done == 2
        assert again.step() == expected
        found = again.state()
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found[name], value), name


def test_before_the_first_step_there_are_no_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with tiermem.offload(Net(), make_config(tmp_path / "run")) as runtime:
        runtime.commit().wait()
        runtime.snapshot(tmp_path / "copy").wait()
    reshard(capsys, [tmp_path / "run"], tmp_path / "made", 1)
    same(tmp_path / "made", tmp_path / "copy")


@pytest.fixture(scope="module")
def of_ranks(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By stage: the folder of a run of two ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    names = {stage: f"committed_{stage}" for stage in (1, 2, 3)}
    reports: Reports = run_jobs(warm_python, directory, [(2, [*names.values()])])
    for name in names.values():
        assert values(reports[2, name]) == [None, None]
    return {stage: next(directory.glob(f"*.{name}")) for stage, name in names.items()}


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
def test_what_two_copies_of_the_model_have_committed_becomes_one_snapshot(
    warm_python: WarmPython, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first copy, whichever ranks hold it, with the random states and the extra of all."""
    names = ["hybrid_committed_pairs", "hybrid_committed_crossed"]
    (tmp_path / "run").mkdir()
    reports = run_jobs(warm_python, tmp_path / "run", [(4, names)])
    for name in names:
        assert values(reports[4, name]) == [None] * 4
        folder = next((tmp_path / "run").glob(f"*.{name}"))
        capsys.readouterr()
        assert run(["snapshot", "verify", str(folder / "swap"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["world_size"], found["ranks"]["copies"], found["ranks"]["disagreement"]) == (4, 2, None)
        assert [each["part"] for each in found["ranks"]["each"]] == (
            [[0, 0], [0, 1], [1, 0], [1, 1]] if name.endswith("pairs") else [[0, 0], [1, 0], [0, 1], [1, 1]]
        )
        for ranks in (2, 4):
            made = tmp_path / f"{name} for {ranks}"
            reshard(capsys, [folder / "swap"], made, ranks)
            assert open_snapshot(made).manifest.world_size == ranks
            same(made, folder / "copy")
        assert open_snapshot(made).record["extras"] == [{"rank": rank} for rank in range(4)]
        for paths, to in ((folder / "copy", "one"), (folder / "swap", "other")):
            assert run(["snapshot", "export", str(paths), "--to", str(folder / to)]) == 0
        weights = (folder / "one" / "model.safetensors").read_bytes()
        assert (folder / "other" / "model.safetensors").read_bytes() == weights


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_all_ranks_have_committed_becomes_one_snapshot(
    stage: int, of_ranks: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks in (2, 1):
        reshard(capsys, [of_ranks[stage] / "swap"], tmp_path / str(ranks), ranks)
        same(tmp_path / str(ranks), of_ranks[stage] / "copy")
    for paths, to in ((of_ranks[stage] / "copy", "one"), (of_ranks[stage] / "swap", "other")):
        assert run(["snapshot", "export", str(paths), "--to", str(tmp_path / to)]) == 0
    weights = (tmp_path / "one" / "model.safetensors").read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == weights
    assert sorted(each.name for each in tmp_path.iterdir()) == ["1", "2", "one", "other"]
    assert open_snapshot(tmp_path / "1").record["extras"] == [{"rank": 0}, {"rank": 1}]
    for command in ("list", "verify"):
        capsys.readouterr()
        assert run(["snapshot", command, str(of_ranks[stage] / "swap"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["step"], found["world_size"], found["ranks"]["stage"], found["damaged"]) == (2, 2, stage, [])
        assert [each["extra"] for each in found["ranks"]["each"]] == [{"rank": 0}, {"rank": 1}]


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
def test_a_rank_that_is_not_there_is_an_error(
    of_ranks: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_00000").symlink_to(of_ranks[3] / "swap" / "rank_00000")
    assert run(["snapshot", "reshard", str(tmp_path), "--to", str(tmp_path / "made"), "--ranks", "1"]) == 1
    reason = f"rank 1: there is no folder {tmp_path / 'rank_00001'}"
    assert f"expected one commit of all ranks of a run, found {reason}; resume the run" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("verb", ["reshard", "export"])
@pytest.mark.parametrize("places", [(1, 0), (0, 0)], ids=["changed", "copied"])
def test_ranks_in_the_places_of_others_are_an_error(
    places: tuple[int, int], verb: str, of_ranks: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their parts are of the same sizes, and were put together in the wrong order without a word."""
    for rank, place in enumerate(places):
        shutil.copytree(of_ranks[3] / "swap" / f"rank_{place:05d}", tmp_path / "run" / f"rank_{rank:05d}")
    more = ["--ranks", "1"] if verb == "reshard" else []
    assert run(["snapshot", verb, str(tmp_path / "run"), "--to", str(tmp_path / "made"), *more]) == 1
    wrong = next(rank for rank, place in enumerate(places) if rank != place)
    assert f"the folders of rank {wrong} hold what rank {places[wrong]} has committed" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_folder_of_one_rank_is_not_enough(
    ranks: int, of_ranks: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, made = of_ranks[1] / "swap" / "rank_00000", tmp_path / "made"
    assert run(["snapshot", "reshard", str(folder), "--to", str(made), "--ranks", str(ranks)]) == 1
    assert "holds what one of 2 ranks has committed" in capsys.readouterr().err
    assert not made.exists()


def committed(tmp_path: Path) -> dict[str, Any]:
    """The record of a commit."""
    (tmp_path / "run").mkdir()
    with tiermem.offload(Net(), make_config(tmp_path / "run")) as runtime:
        runtime.commit().wait()
    manifest = swap.CommitStore([tmp_path / "run"], name="tiermem").read_latest()
    assert manifest is not None
    return copy.deepcopy(dict(manifest.user))


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
def test_the_folders_of_one_rank_are_not_the_commit(
    of_ranks: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, to = str(of_ranks[3] / "swap" / "rank_00001"), ["--to", str(tmp_path / "made")]
    for command, *more in (["reshard", "--ranks", "1"], ["reshard", "--ranks", "2"], ["export"]):
        assert run(["snapshot", command, one, *more, *to]) == 1
        assert "holds what one of 2 ranks has committed" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("part", ["parameters", "copies"])
def test_a_commit_that_says_too_little_is_refused_with_advice(part: str, tmp_path: Path) -> None:
    record = committed(tmp_path)
    if part == "parameters":
        del record[part]
    else:
        record["layout"][part] = 2
        del record["part"]
    with pytest.raises(tiermem.ConfigError, match=r"resume the run, and call runtime\.snapshot"):
        rewriting._layouts(record)


def shifted(record: dict[str, Any]) -> None:
    record["layout"]["units"][0][1][0][5] += 64


def nameless(record: dict[str, Any]) -> None:
    record["parameters"]["names"].pop()


def of_no_dtype(record: dict[str, Any]) -> None:
    record["layout"]["units"][0][1][0][3] = "torch.nn"


@pytest.mark.parametrize("damage", [shifted, nameless, of_no_dtype])
def test_a_record_that_gives_other_places_is_refused_before_a_page_is_read(damage: Any, tmp_path: Path) -> None:
    record = committed(tmp_path)
    damage(record)
    pages: Any = MarkedPages
    with pytest.raises(swap.FormatError, match="expected the layout of a commit"):
        snapshot_of([CommittedRank(record, pages)], tmp_path / "made", seconds=0.0)
    assert not (tmp_path / "made").exists()
