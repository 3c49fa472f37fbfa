"""`tiermem snapshot` on commits and on snapshots."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_commit import Net, Training, make_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import swap
import tiermem
from tiermem.checkpoint.resharding import LARGEST_WORLD
from tiermem.cli.main import run
from tiermem.cli.options import MOST_RANKS

SHAPE = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
EXTRA = {"note": "two", "losses": [None]}  # which were NaN: JSON has no word for it
TOKENS = torch.arange(24).reshape(2, 12) % 64


def call(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> Any:
    """Run a command with --json; its object, or its line on stderr if it fails."""
    capsys.readouterr()
    assert run(["snapshot", *map(str, arguments), "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out, parse_constant=pytest.fail) if said.out else said.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trained GPT-2 with tied weights: the folder with its swap directories and a snapshot, and its logits."""
    folder = tmp_path_factory.mktemp("trained")
    directories = [folder / "a", folder / "b"]
    for directory in directories:
        directory.mkdir()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE))
    config = tiermem.Config(device="cpu", host_memory="4MiB", swap_dirs=directories, param_dtype="bfloat16")
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
        runtime.commit({"note": "two", "losses": (float("nan"),)}).wait()
        runtime.snapshot(folder / "copy", {"note": "two", "losses": (float("nan"),)}).wait()
        with torch.no_grad():
            logits = model.eval()(input_ids=TOKENS).logits
    return folder, directories, logits


def test_listing_and_verifying(capsys: pytest.CaptureFixture[str], trained: Any) -> None:
    folder, directories, _ = trained
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in GPT2LMHeadModel(GPT2Config(**SHAPE)).parameters())
    for command in ("list", "verify"):
        commit = call(capsys, command, *directories)
        snapshot = call(capsys, command, folder / "copy")
        assert (commit["kind"], snapshot["kind"]) == ("commit", "snapshot")
        for report in (commit, snapshot):
            assert (report["step"], report["extra"], report["param_dtype"]) == (2, EXTRA, "bfloat16")
            assert (report["parameters"], report["tensors"]) == (numel, 28)
            assert (report["verified"], report["damaged"]) == (command == "verify", [])
    assert (snapshot["world_size"], snapshot["files"]) == (1, 1)
    assert run(["snapshot", "list", str(folder / "copy")]) == 0
    assert f"{numel:,} parameters in 28 tensors" in " ".join(capsys.readouterr().out.split())


def test_a_snapshot_among_other_paths_is_said(capsys: pytest.CaptureFixture[str], trained: Any, tmp_path: Path) -> None:
    folder, directories, _ = trained
    copy, out = folder / "copy", ["--to", tmp_path / "out"]
    for command, *options in (["list"], ["verify"], ["export", *out], ["reshard", "--ranks", 2, *out]):
        for paths in ([copy, copy], [*directories, copy]):
            error = call(capsys, command, *paths, *options, code=1)
            assert f"{copy} is a snapshot: expected it alone" in error


def test_directories_in_another_order_or_fewer_are_said(
    capsys: pytest.CaptureFixture[str], trained: Any, tmp_path: Path
) -> None:
    _, (first, second), _ = trained
    for command in (["list"], ["verify"], ["export", "--to", tmp_path / "out"]):
        error = call(capsys, command[0], second, first, *command[1:], code=1)
        assert f"the commit is in {first}, expected in the first directory, found {second}" in error
    assert call(capsys, "list", first)["files"] == 2
    assert run(["snapshot", "list", str(first)]) == 0
    assert "(1 of its 2 directories)" in " ".join(capsys.readouterr().out.split())
    said = f"expected 2 directories, as the run had, in its order, found {first}\n"
    assert call(capsys, "verify", first, code=1).endswith(said)


@pytest.mark.parametrize("source", ["commit", "snapshot"])
def test_exported_weights_are_the_model(
    capsys: pytest.CaptureFixture[str], trained: Any, tmp_path: Path, source: str
) -> None:
    folder, directories, logits = trained
    paths = directories if source == "commit" else [folder / "copy"]
    report = call(capsys, "export", *paths, "--to", tmp_path / "out", "--max-shard-size", "20KB")
    assert report["what"] == "weights"
    assert report["files"] > 4
    assert report["nbytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=TOKENS).logits, logits)
    call(capsys, "export", *paths, "--to", tmp_path / "out", code=1)


def test_resharding(capsys: pytest.CaptureFixture[str], trained: Any, tmp_path: Path) -> None:
    folder, directories, _ = trained
    report = call(capsys, "reshard", folder / "copy", "--ranks", 3, "--to", tmp_path / "three")
    assert (report["what"], report["files"]) == ("snapshot for 3 ranks", 4)
    assert call(capsys, "verify", tmp_path / "three")["world_size"] == 3
    one, other = tmp_path / "one", tmp_path / "other"
    call(capsys, "export", folder / "copy", "--to", one)
    call(capsys, "export", tmp_path / "three", "--to", other)
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()
    call(capsys, "reshard", *directories, "--ranks", 2, "--to", tmp_path / "two")
    call(capsys, "export", tmp_path / "two", "--to", tmp_path / "another")
    for path in one.iterdir():
        assert path.read_bytes() == (tmp_path / "another" / path.name).read_bytes()
    (tmp_path / "empty").mkdir()
    said = call(capsys, "reshard", tmp_path / "empty", "--ranks", 2, "--to", tmp_path / "no", code=1)
    assert f"nothing is committed in {tmp_path / 'empty'}" in said
    said = call(capsys, "reshard", *directories, "--ranks", 2, "--to", tmp_path / "missing" / "no", code=1)
    assert f"expected {str(tmp_path / 'missing')!r} to be a folder" in said
    for ranks in (0, LARGEST_WORLD + 1):
        assert (
            run(["snapshot", "reshard", str(folder / "copy"), "--ranks", str(ranks), "--to", str(tmp_path / "no")]) == 2
        )
    assert LARGEST_WORLD == MOST_RANKS


def test_damage_is_an_exit_code_and_one_line(capsys: pytest.CaptureFixture[str], trained: Any, tmp_path: Path) -> None:
    folder, _, _ = trained
    copy = tmp_path / "copy"
    call(capsys, "reshard", folder / "copy", "--ranks", 1, "--to", copy)
    path = copy / "rank-00000-00001.safetensors"
    whole = path.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")  # a byte of a master
    path.write_bytes(whole[:first] + bytes([whole[first] ^ 1]) + whole[first + 1 :])
    report = call(capsys, "verify", copy, code=1)
    assert "checksum" in report["damaged"][0]
    assert run(["snapshot", "verify", str(copy)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tiermem: damaged: ")
    assert error.count("\n") == 1
    assert call(capsys, "list", copy)["damaged"] == []
    error = call(capsys, "export", copy, "--to", tmp_path / "out", code=1)
    assert error.startswith("tiermem: ")
    assert error.count("\n") == 1
    path.write_bytes(whole[:-1])
    for command in (["list"], ["verify"], ["export", "--to", tmp_path / "out"]):
        error = call(capsys, command[0], copy, *command[1:], code=1)
        assert error.startswith("tiermem: expected")
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    (copy / "manifest.json").write_bytes(b"x" + (copy / "manifest.json").read_bytes()[1:])
    for command in ("list", "verify"):
        assert "to be the manifest of a snapshot" in call(capsys, command, copy, code=1)
    assert "nothing is committed" in call(capsys, "list", tmp_path, code=1)
    for command in (["list"], ["verify"], ["export", "--to", tmp_path / "out"]):
        error = call(capsys, command[0], tmp_path, tmp_path, *command[1:], code=1)
        assert "expected each swap directory once" in error
    (tmp_path / "loop").symlink_to("loop")
    for command in (["list"], ["verify"], ["export", "--to", tmp_path / "out"]):
        error = call(capsys, command[0], tmp_path / "loop", *command[1:], code=1)
        assert "symbolic links" in error
        assert error.count("\n") == 1


def test_all_damage_of_a_snapshot_is_named(capsys: pytest.CaptureFixture[str], trained: Any, tmp_path: Path) -> None:
    folder, _, _ = trained
    copy = tmp_path / "copy"
    call(capsys, "reshard", folder / "copy", "--ranks", 3, "--to", copy)
    files = sorted(copy.glob("rank-*.safetensors"))
    whole = {file: file.read_bytes() for file in files}
    for file in files[::2]:  # in the first element of each: pieces of the same parameter
        first = 8 + int.from_bytes(whole[file][:8], "little")
        file.write_bytes(whole[file][:first] + bytes([whole[file][first] ^ 1]) + whole[file][first + 1 :])
    report = call(capsys, "verify", copy, code=1)
    assert [[file.name for file in files if file.name in line] for line in report["damaged"]] == [
        [files[0].name],
        [files[2].name],
    ]
    files[0].unlink()
    files[2].write_bytes(whole[files[2]][:-1])
    for command in ("list", "verify"):
        error = call(capsys, command, copy, code=1)
        assert f"{files[0].name} is missing; expected {str(files[2])!r} to be a whole" in error


def test_a_running_run_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run", param_dtype="bfloat16"))
    training.step()
    training.commit().wait()
    assert call(capsys, "list", tmp_path / "run")["in_use"]
    call(capsys, "export", tmp_path / "run", "--to", tmp_path / "out", code=1)
    expected = training.state()
    training.close()
    call(capsys, "export", tmp_path / "run", "--to", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(dict(Net().named_parameters())) | {f"norm.{name}" for name in changed_buffers()}
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


def test_a_commit_on_a_drive_that_is_mounted_read_only_is_verified_and_exported(
    capsys: pytest.CaptureFixture[str], trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux mounts one that has failed: what can be saved is to be."""
    folder, directories, _ = trained
    real = os.open

    def fixed(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if str(path).startswith(str(folder)) and flags & (os.O_ACCMODE | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, mode, **more)

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(os, "open", fixed)
    with pytest.raises(swap.SwapIOError, match="EROFS"):  # training could not go on there
        swap.SwapSpace.open(directories, name="tiermem", nbytes=4096, keep=True)
    report = call(capsys, "verify", *directories)
    assert (report["verified"], report["damaged"]) == (True, [])
    call(capsys, "export", *directories, "--to", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    call(capsys, "export", folder / "copy", "--to", tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in written.items())
    assert before == {path: path.read_bytes() for path in before}


def test_of_a_run_whose_swap_file_is_gone_nothing_else_is_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    training = Training(make_config(tmp_path))
    training.step()
    training.commit().wait()
    training.close()
    (tmp_path / "tiermem.swapfile").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2  # manifest and lock
    assert "found none" in call(capsys, "verify", tmp_path, code=1)
    assert before.keys() == {path.name for path in tmp_path.iterdir()}


def changed_buffers() -> set[str]:
    return {"running_mean", "running_var", "num_batches_tracked"}


def test_what_an_exported_commit_does_not_hold_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Net()
    model.register_buffer("table", torch.arange(20_000.0))
    model.register_buffer("scratch", torch.zeros(4), persistent=False)
    (tmp_path / "run").mkdir()
    with tiermem.offload(model, make_config(tmp_path / "run")) as runtime:
        model.norm(torch.randn(8, 96))
        runtime.commit().wait()
        runtime.snapshot(tmp_path / "copy").wait()
    assert call(capsys, "export", tmp_path / "run", "--to", tmp_path / "one")["lacking"] == ["table"]
    assert call(capsys, "export", tmp_path / "copy", "--to", tmp_path / "other")["lacking"] == []
    held = [set(load_file(tmp_path / name / "model.safetensors")) for name in ("one", "other")]
    assert held[1] - held[0] == {"table"}
    assert run(["snapshot", "export", str(tmp_path / "run"), "--to", str(tmp_path / "third")]) == 0
    assert "without table" in " ".join(capsys.readouterr().out.split())


def test_training_goes_on_from_weights_that_were_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    short = ["train", "--batch", "2", "--seq", "32", "--param-dtype", "float32", "--json"]
    first = ["--model", "llama-tiny", "--steps", "8", "--lr", "0.01", "--swap-dir", "run", "--keep"]
    assert run([*short, *first]) == 0
    before = json.loads(capsys.readouterr().out)["steps"]
    call(capsys, "export", "run", "--to", "out")
    assert run([*short, "--model", "out", "--steps", "1", "--weights", "out", "--host-memory", "8MiB"]) == 0
    after = json.loads(capsys.readouterr().out)["steps"]
    assert after[0]["loss"] < before[0]["loss"] - 0.3, "the same first batch, after eight steps"
    (tmp_path / "out" / "model.safetensors").write_bytes(b"damaged")
    assert run([*short, "--model", "out", "--weights", "out"]) == 1
    assert "expected 'out/model.safetensors' to be a safetensors file" in capsys.readouterr().err


def test_sparse_buffers_are_not_exported_and_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No file of weights can hold them."""
    model = Net()
    model.register_buffer("links", torch.eye(4).to_sparse())
    (tmp_path / "run").mkdir()
    with tiermem.offload(model, make_config(tmp_path / "run")) as runtime:
        model.norm(torch.randn(8, 96))
        model.links = (2 * model.links).coalesce()
        runtime.commit().wait()
        runtime.snapshot(tmp_path / "copy").wait()
        with pytest.raises(tiermem.ConfigError, match=r"buffer links has the layout torch.sparse_coo.*make it dense"):
            runtime.save_pretrained(tmp_path / "saved")
    for source in ("run", "copy"):
        assert call(capsys, "export", tmp_path / source, "--to", tmp_path / f"of {source}")["lacking"] == ["links"]


@pytest.mark.parametrize("command", [["list"], ["verify"], ["export", "--to", "out"]])
def test_a_snapshot_without_its_manifest_is_named_as_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "rank-00000-00001.safetensors").write_bytes(b"")
    said = call(capsys, *command, tmp_path / "copy", code=1)
    assert "expected a snapshot in" in said
    assert "found no manifest.json there" in said


def test_without_a_command_it_shows_them_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["snapshot"]) == 2
    said = capsys.readouterr()
    assert "reshard" in said.out
    assert said.err == "tiermem: expected a command (see tiermem snapshot --help)\n"
