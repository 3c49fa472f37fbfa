"""Batches come from the files, depend on nothing but seed and number, and hold no corpus in memory."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles_commit import Training, make_config
from hypothesis import given
from hypothesis import strategies as st

from tiermem.cli.subject import TrainOptions, find_subject
from tiermem.cli.text import ByteTokens, Corpus, TokenizerTokens, batch, find_texts
from tiermem.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    contents = [b"one", b"", b"two!", b"three"]
    paths = [tmp_path / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def test_files_are_laid_end_to_end(files: list[Path]) -> None:
    corpus = Corpus(files)
    whole = b"onetwo!three"
    assert corpus.nbytes == len(whole)
    for start in range(len(whole)):
        for length in range(len(whole) - start + 1):
            assert corpus.read(start, length) == whole[start : start + length]


def test_a_file_that_shrinks_is_said(files: list[Path]) -> None:
    corpus = Corpus(files)
    files[0].write_bytes(b"o")
    with pytest.raises(OSError, match="became shorter"):
        corpus.read(0, 5)


def test_batches_depend_on_seed_and_number_only(files: list[Path]) -> None:
    def tokens(seed: int, number: int) -> torch.Tensor:
        return batch(ByteTokens(Corpus(files)), seed=seed, number=number, rows=8, length=4)

    assert tokens(0, 0).shape == (8, 4)
    assert tokens(0, 0).dtype == torch.int64
    assert torch.equal(tokens(0, 1), tokens(0, 1))
    assert not torch.equal(tokens(0, 0), tokens(0, 1))
    assert not torch.equal(tokens(0, 0), tokens(1, 0))
    assert not torch.equal(tokens(0, 1), tokens(1, 0))


@given(seed=st.integers(0, 2**32), length=st.integers(1, 12))
def test_every_sequence_is_a_piece_of_the_text(
    seed: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(b"onetwo!three")
    sequence = ByteTokens(Corpus([path])).sequence(np.random.default_rng(seed), length)
    assert bytes(sequence.astype(np.uint8)) in b"onetwo!three"


def test_too_short_a_text_is_refused(files: list[Path]) -> None:
    with pytest.raises(ConfigError, match="12 bytes, a sequence needs 13"):
        ByteTokens(Corpus(files)).sequence(np.random.default_rng(0), 13)


def test_directories_give_their_visible_files_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert find_texts([tmp_path]) == [tmp_path / "a/z.md", tmp_path / "b.txt"]
    assert find_texts([tmp_path / ".git"]) == [tmp_path / ".git/config"], "which is named"


def test_a_run_among_the_texts_is_none_of_them(tmp_path: Path) -> None:
    """Else a resumed one would learn from its own swap file, and go on with other batches."""
    texts = [tmp_path / "a.txt", tmp_path / "run" / "tiermem.md", tmp_path / "run" / "tiermem.swapfile.txt"]
    (tmp_path / "run").mkdir()
    for path in texts:
        path.write_text("text")
    training = Training(make_config(tmp_path / "run"))
    training.step()
    training.commit().wait()
    assert find_texts([tmp_path]) == texts
    training.close()
    (manifest,) = (tmp_path / "run").glob("tiermem.*.manifest")
    for name in ("tiermem.manifest.new", f"{manifest.name}.damaged1"):
        (tmp_path / "run" / name).write_text("left by a run that was killed")
    assert len(list((tmp_path / "run").iterdir())) > 5
    assert find_texts([tmp_path]) == texts


def test_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--text: expected files or folders of text, found no .*nothing; correct"):
        find_texts([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="found /dev/null, which is neither"):
        find_texts([Path("/dev/null")])
    for empty in ((), ("empty.txt",)):
        for name in empty:
            (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=r"--text: expected text in .*, found no file with anything in it"):
            find_texts([tmp_path])
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("text")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "link").symlink_to("../real")
    with pytest.raises(ConfigError, match="those behind links to directories: name these one by one"):
        find_texts([tmp_path / "texts"])
    assert find_texts([tmp_path / "texts" / "link"]) == [tmp_path / "texts" / "link" / "a.txt"]


def test_a_file_that_may_not_be_read_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.R_OK or path.name != "b.txt")  # root may read all
    with pytest.raises(ConfigError, match=r"b\.txt cannot be read"):
        find_texts([tmp_path])


def test_the_default_is_the_standard_library(tmp_path: Path) -> None:
    found = find_texts([])
    assert {"argparse.py", "ast.py"} <= {path.name for path in found}
    assert not any("site-packages" in path.parts for path in found)
    assert {path.suffix for path in found} == {".py"}
    assert found == sorted(found)
    assert Corpus(found).nbytes > 5_000_000


def test_a_tokenizer_json_makes_the_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"[UNK]": 0, "red": 1, "green": 2, "blue": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # What begins a text begins no sequence from somewhere in it.
    tokenizer.post_processor = processors.TemplateProcessing(single="[UNK] $A", special_tokens=[("[UNK]", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("red green blue " * 100)
    source = TokenizerTokens(Corpus([tmp_path / "text"]), tmp_path / "tokenizer.json")
    assert source.vocabulary == 4
    sequence = source.sequence(np.random.default_rng(0), 50)
    assert sequence.shape == (50,)
    assert set(sequence[1:-1].tolist()) <= {1, 2, 3}  # the ends may cut a word
    assert len(source.sequence(np.random.default_rng(0), 300)) == 300
    with pytest.raises(ConfigError, match="the text has 300 tokens, a sequence needs 301"):
        source.sequence(np.random.default_rng(0), 301)


def test_a_window_with_too_few_tokens_is_widened(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text(
        "ährägräßöwördöüßärößß " * 100, encoding="utf-8"
    )  # a window may begin within a letter
    source = TokenizerTokens(Corpus([tmp_path / "text"]), tmp_path / "tokenizer.json")
    for seed, length in itertools.product(range(4), (20, 98)):
        assert len(source.sequence(np.random.default_rng(seed), length)) == length


def save_word_level(path: Path, vocabulary: dict[str, int], unknown: str | None) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


def test_the_vocabulary_holds_the_largest_number_though_others_are_missing(tmp_path: Path) -> None:
    save_word_level(tmp_path / "tokenizer.json", {"[UNK]": 0, "red": 700}, "[UNK]")
    (tmp_path / "text").write_text("red " * 100)
    source = TokenizerTokens(Corpus([tmp_path / "text"]), tmp_path / "tokenizer.json")
    assert source.sequence(np.random.default_rng(0), 20).max() == 700
    assert source.vocabulary == 701


def test_what_a_tokenizer_cannot_do_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("red green " * 10)
    short = TrainOptions("llama-tiny", 1, 1, seq=30, texts=(tmp_path / "text",), tokenizer=tmp_path / "tokenizer.json")
    save_word_level(tmp_path / "tokenizer.json", {"[UNK]": 0}, "[UNK]")
    with pytest.raises(ConfigError, match="the text has 20 tokens, a sequence needs 30"):
        find_subject(short)
    save_word_level(tmp_path / "tokenizer.json", {"red": 0}, None)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot make tokens of the text: .*; choose another"):
        find_subject(short)
