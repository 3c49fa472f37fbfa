"""`tiermem snapshot list` and `verify` of what several ranks have committed, as a whole.

The commits are of single processes, whose manifests are made to say that they are those of ranks: what list and verify
look at does not depend on how a model was divided. Real ranks are in tests/runtime/test_rewriting.py.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles_commit import Training, make_config

import swap
from swap import manifest as format_of
from tiermem.cli import committed
from tiermem.cli.main import run

NAME = "tiermem"
RANKS = 4


def call(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> tuple[Any, str]:
    """Run a command with --json; its object, if there is one, and its line on stderr."""
    capsys.readouterr()
    assert run(["snapshot", *map(str, arguments), "--json"]) == code
    said = capsys.readouterr()
    assert said.err.count("\n") == (code != 0)
    return json.loads(said.out) if said.out else None, said.err


def manifest_of(folder: Path) -> swap.Manifest:
    found = swap.CommitStore([folder], name=NAME).read_latest()
    assert found is not None
    return found


def path_of(folder: Path, generation: int) -> Path:
    return folder / f"{NAME}.{generation:020d}.manifest"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], *, generation: int | None = None) -> None:
    """Change what a commit says of itself; with a `generation` beside it, as another one."""
    manifest = manifest_of(folder)
    user = json.loads(json.dumps(dict(manifest.user)))
    change(user)
    number = manifest.generation if generation is None else generation
    packed = format_of.pack(dataclasses.replace(manifest, user=user, generation=number))
    path_of(folder, number).write_bytes(packed)


def as_rank(rank: int, *, copies: int | None = None, world: int = RANKS) -> Callable[[dict[str, Any]], None]:
    def change(user: dict[str, Any]) -> None:
        user |= {"run": 7, "rank": rank, "extra": {"rank": rank}}
        user["layout"] |= {"world_size": world // (copies or 1), "stage": 3, "copies": copies}

    return change


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a process that has committed its second step."""
    folder = tmp_path_factory.mktemp("committed")
    training = Training(make_config(folder))
    for _ in range(2):
        training.step()
    training.commit().wait()
    training.close()
    return folder


@pytest.fixture
def folders(of_one: Path, tmp_path: Path) -> list[Path]:
    """The folders of four ranks below `tmp_path`, which have committed their second step."""
    found = [tmp_path / f"rank_{number:05d}" for number in range(RANKS)]
    for number, folder in enumerate(found):
        shutil.copytree(of_one, folder)
        rewrite(folder, as_rank(number))
    return found


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damage(folder: Path, entry: int) -> None:
    """Turn a bit of a page over."""
    piece = manifest_of(folder).entries[entry].extent.pieces[0]
    flip(folder / f"{NAME}.swapfile", piece.offset)


def test_all_ranks_are_one_commit(capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]) -> None:
    manifest = manifest_of(folders[0])
    for command in ("list", "verify"):
        found, _ = call(capsys, command, tmp_path)
        assert (found["kind"], found["step"], found["generation"]) == ("commit", 2, manifest.generation)
        assert (found["world_size"], found["directories"]) == (RANKS, [str(tmp_path)])
        assert (found["verified"], found["damaged"], found["files"]) == (command == "verify", [], RANKS)
        assert (found["nbytes"], found["pages"]) == (RANKS * manifest.nbytes, RANKS * len(manifest.entries))
        ranks = found["ranks"]
        assert (ranks["stage"], ranks["copies"], ranks["disagreement"]) == (3, 1, None)
        assert [each["rank"] for each in ranks["each"]] == [*range(RANKS)]
        assert [each["extra"] for each in ranks["each"]] == [{"rank": rank} for rank in range(RANKS)]
        assert [each["directories"] for each in ranks["each"]] == [[str(folder)] for folder in folders]
        assert {(each["step"], each["nbytes"]) for each in ranks["each"]} == {(2, manifest.nbytes)}
    for command, word in (("list", "1 file"), ("verify", "whole")):
        assert run(["snapshot", command, str(tmp_path)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "of 4 ranks, stage 3" in said
        assert f"rank 3 commit {manifest.generation}, step 2" in said
        assert word in said
        assert "ranks agree" in said
    found, _ = call(capsys, "list", folders[1])
    assert (found["world_size"], found["ranks"]["each"], found["nbytes"]) == (RANKS, [], manifest.nbytes)


def test_links_to_the_folders_of_ranks_are_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    """Of ranks that have a drive each, nothing but one whole commit can be exported."""
    for number, folder in enumerate(folders):
        drive = tmp_path / f"drive {number}"
        drive.mkdir()
        folder.rename(drive / folder.name)
    assert "there is no folder" in call(capsys, "list", tmp_path / "drive 0", code=1)[1]
    (tmp_path / "all").mkdir()
    for number, folder in enumerate(folders):
        (tmp_path / "all" / folder.name).symlink_to(tmp_path / f"drive {number}" / folder.name)
    found, _ = call(capsys, "verify", tmp_path / "all")
    assert (found["world_size"], found["files"], found["ranks"]["disagreement"]) == (RANKS, RANKS, None)


def test_copies_of_the_model_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]) -> None:
    for number, folder in enumerate(folders):
        rewrite(folder, as_rank(number, copies=2))
    found, _ = call(capsys, "verify", tmp_path)
    assert (found["world_size"], found["ranks"]["copies"]) == (RANKS, 2)
    assert run(["snapshot", "list", str(tmp_path)]) == 0
    assert "4 ranks, stage 3, 2 copies of the model, each over 2" in " ".join(capsys.readouterr().out.split())


def test_all_damage_is_said_of_every_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    for entry in (0, 3):
        damage(folders[1], entry)
    (folders[2] / f"{NAME}.swapfile").unlink()
    flip(path_of(folders[3], manifest_of(folders[3]).generation), 200)
    found, error = call(capsys, "verify", tmp_path, code=1)
    of_ranks = [len(each["damaged"]) for each in found["ranks"]["each"]]
    assert of_ranks == [0, 2, 1, 1]
    assert len(found["damaged"]) == sum(of_ranks)
    for line, rank in zip(found["damaged"], (1, 1, 2, 3), strict=True):
        assert line.startswith(f"rank {rank}: ")
        assert str(folders[rank]) in line
        assert line in error
    assert error.startswith("tiermem: damaged: rank 1: ")
    assert found["step"] is None, "not all ranks have one"
    found, error = call(capsys, "list", tmp_path, code=1)
    assert [len(each["damaged"]) for each in found["ranks"]["each"]] == [0, 0, 0, 1]
    assert error.startswith("tiermem: damaged: rank 3: expected ")
    assert run(["snapshot", "verify", str(tmp_path)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "DAMAGED" in said
    assert "rank 3 nothing that can be read" in said
    for folder in folders[:3]:
        flip(path_of(folder, manifest_of(folder).generation), 200)
    _, error = call(capsys, "list", tmp_path, code=1)
    assert [f"rank {rank}: expected {str(folder)!r}"[:-1] in error for rank, folder in enumerate(folders)] == [True] * 4


def test_ranks_without_anything_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    for path in (*folders[1].iterdir(), *folders[3].iterdir()):
        path.unlink()
    folders[3].rmdir()
    for command in ("list", "verify"):
        found, error = call(capsys, command, tmp_path, code=1)
        assert found["ranks"]["disagreement"] is None
        assert f"rank 1: nothing is committed in {folders[1]}; rank 3: there is no folder {folders[3]}" in error
    for path in folders[0].iterdir():
        path.unlink()
    assert f"rank 0: nothing is committed in {folders[0]}" in call(capsys, "list", tmp_path, code=1)[1]


def test_commits_that_do_not_belong_together_are_told_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    def said(of_export: str) -> str:
        found, error = call(capsys, "list", tmp_path, code=1)
        assert error.startswith("tiermem: the ranks' commits do not belong together: ")
        reason = found["ranks"]["disagreement"]
        assert reason in error
        assert (found["step"], found["generation"], found["damaged"]) == (None, None, [])
        assert call(capsys, "verify", tmp_path, code=1)[0]["ranks"]["disagreement"] == reason
        _, refused = call(capsys, "export", tmp_path, "--to", tmp_path / of_export, code=1)
        assert f"expected one commit of all ranks of a run, found {reason}; resume the run" in " ".join(refused.split())
        assert not (tmp_path / of_export).exists()
        return str(reason)

    rewrite(folders[2], lambda user: user.update(run=8))
    assert said("a") == "expected the same run everywhere, found 7 (rank 0, 1, 3), 8 (rank 2)"
    rewrite(folders[2], as_rank(2, world=3))
    assert said("b") == "expected the same number of ranks everywhere, found 4 (rank 0, 1, 3), 3 (rank 2)"
    for number, folder in enumerate(folders):
        rewrite(folder, as_rank(number, world=3))
    assert said("c") == "expected 3 ranks, as the run had, found 4"
    for number, folder in enumerate(folders):
        rewrite(folder, as_rank(number if number < 2 else 5 - number))
    assert said("d") == "the folders of rank 2 hold what rank 3 has committed"
    assert run(["snapshot", "list", str(tmp_path)]) == 1
    assert "none that all ranks have" in " ".join(capsys.readouterr().out.split())


def test_a_rank_that_says_no_part_of_the_model_is_listed_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    for number, part in enumerate(([0, 0], 5, [1], "copy")):
        rewrite(folders[number], as_rank(number, copies=2))
        rewrite(folders[number], lambda user, part=part: user.update(part=part))  # type: ignore[misc]
    assert run(["snapshot", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("copy 0, part 0: commit") == 1
    assert [each["part"] for each in call(capsys, "list", tmp_path)[0]["ranks"]["each"]] == [[0, 0], None, None, None]


def test_folders_that_a_run_of_more_ranks_has_left_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    """A run of fewer that began anew there has not touched them."""
    for number, folder in enumerate(folders[:2]):
        rewrite(folder, as_rank(number, world=2))
        rewrite(folder, lambda user: user.update(run=8))
    for command in (["list"], ["reshard", "--to", tmp_path / "out", "--ranks", 2]):
        _, error = call(capsys, command[0], tmp_path, *command[1:], code=1)
        assert "expected the same run everywhere, found 8 (rank 0, 1), 7 (rank 2, 3); the run of rank 0 had 2" in error
        assert "move what an earlier run has left to rank 2, 3 away" in error
    for folder in folders[2:]:
        shutil.rmtree(folder)
    assert call(capsys, "verify", tmp_path)[0]["world_size"] == 2


def test_the_newest_commit_that_all_ranks_have_is_meant(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    """A run that was killed while it published one has left it on some of them."""
    generation = manifest_of(folders[0]).generation
    for folder in folders[:2]:
        rewrite(folder, lambda user: user.update(step=3), generation=generation + 1)
    found, _ = call(capsys, "verify", tmp_path)
    assert (found["step"], found["generation"]) == (2, generation)
    assert {each["generation"] for each in found["ranks"]["each"]} == {generation}
    path_of(folders[1], generation).unlink()
    found, error = call(capsys, "list", tmp_path, code=1)
    newer, older = f"{generation} (rank 0, 2, 3)", f"{generation + 1} (rank 1)"
    assert f"expected the same commit everywhere, found {newer}, {older}" in error
    assert found["step"] is None


def test_what_a_run_is_using_is_listed_and_not_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    with swap.SwapSpace.open([folders[2]], name=NAME, nbytes=sum(manifest_of(folders[2]).file_sizes), keep=True):
        found, _ = call(capsys, "list", tmp_path)
        assert [each["in_use"] for each in found["ranks"]["each"]] == [False, False, True, False]
        assert found["in_use"]
        assert str(folders[2]) in call(capsys, "verify", tmp_path, code=1)[1]


def test_ranks_that_commit_while_they_are_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last has gone on to the next commit, given up the one before, and the others are looked at again."""
    old = manifest_of(folders[0]).generation
    looked = committed._of_one_generation

    def commit(folder: Path) -> None:
        rewrite(folder, lambda user: user.update(step=3), generation=old + 1)
        path_of(folder, old).unlink()

    def look(found: list[committed.Committed]) -> list[committed.Committed]:
        result = looked(found)
        for folder in folders[:-1]:
            if path_of(folder, old).exists():
                commit(folder)
        return result

    commit(folders[-1])
    monkeypatch.setattr(committed, "_of_one_generation", look)
    with swap.SwapSpace.open([folders[2]], name=NAME, nbytes=sum(manifest_of(folders[2]).file_sizes), keep=True):
        found, _ = call(capsys, "list", tmp_path)
    assert (found["step"], found["generation"], found["ranks"]["disagreement"]) == (3, old + 1, None)


def test_a_file_of_somebody_that_is_named_like_that_of_a_snapshot_makes_none_of_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    for folder in (tmp_path, folders[0]):
        (folder / "manifest.json").write_text("{}")
        assert call(capsys, "verify", folder)[0]["kind"] == "commit"
    other = tmp_path / "other"
    for folder in folders:
        (other / folder.name).mkdir(parents=True)
        (other / folder.name / f"{NAME}.swapfile").touch()
    (other / "manifest.json").write_text("{}")
    assert call(capsys, "list", tmp_path, other)[0]["directories"] == [str(tmp_path), str(other)]


def test_nothing_is_not_said_of_folders_that_this_user_may_not_look_into(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made for their user alone, and a search there finds nothing without a word."""
    (tmp_path / "rank_00000").mkdir()
    assert f"nothing is committed in {tmp_path}" in call(capsys, "list", tmp_path, code=1)[1]
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "rank_00000")  # root may look into all
    _, error = call(capsys, "list", tmp_path, code=1)
    assert f"this user may not look into folders of ranks, such as {tmp_path / 'rank_00000'}: ask" in error


def test_directories_that_cannot_be_meant(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders: list[Path]
) -> None:
    (tmp_path / "file").write_text("")
    none, file = tmp_path / "none", tmp_path / "file"
    assert f"the folder of a snapshot, found no {none}" in call(capsys, "list", none, code=1)[1]
    assert f"the folder of a snapshot, found the file {file}" in call(capsys, "verify", file, code=1)[1]
    assert "give the run's directories" in call(capsys, "list", *folders, code=1)[1]
    other = tmp_path / "other"
    other.mkdir()
    assert f"the commit is in {tmp_path}, expected in the first" in call(capsys, "list", other, tmp_path, code=1)[1]
    for path in folders[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for command in (["list"], ["verify"], ["export", "--to", other], ["reshard", "--to", other, "--ranks", 2]):
        _, error = call(capsys, command[0], tmp_path, *command[1:], code=1)
        assert f"{tmp_path} holds the commit of one process and, in rank_00000 and so on" in error
