"""Text as batches of tokens.

Owns the reading of text files and what a token is: a byte, or what a tokenizer.json makes of the bytes. Does not hold
a corpus in memory: each sequence is read from a random place when it is asked for, so its size does not matter.
Guarantees that a batch depends on the files, the seed and its number only, so that a run can be repeated or continued.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tiermem.errors import ConfigError
from tiermem.runtime.beginning import SPACE_NAME

NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
# What is in a swap directory: a commit's manifest, also a damaged one or one that was not finished.
RUN_FILES = re.compile(re.escape(SPACE_NAME) + r"\.(swapfile|lock|\d{20}\.manifest.*|manifest\.new)")
# A token of a trained tokenizer covers about four bytes of text; reading eight makes a second read rare.
BYTES_PER_TOKEN_READ = 8


class Corpus:
    """Files laid end to end, read by offset; nothing of them stays in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        sized = [(path, path.stat().st_size) for path in paths]
        self.paths = [path for path, size in sized if size]
        self.starts = [0, *itertools.accumulate(size for _, size in sized if size)]

    @property
    def nbytes(self) -> int:
        """Bytes in all files together."""
        return self.starts[-1]

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, across the ends of files; OSError if a file shrank meanwhile."""
        parts: list[bytes] = []
        while length > 0:
            index = bisect.bisect_right(self.starts, offset) - 1
            path = self.paths[index]
            here = min(length, self.starts[index + 1] - offset)
            with path.open("rb") as file:
                file.seek(offset - self.starts[index])
                part = file.read(here)
            if len(part) != here:
                raise OSError(f"{path} became shorter while it was being read")
            parts.append(part)
            offset += here
            length -= here
        return b"".join(parts)


class ByteTokens:
    """Every byte is a token: a vocabulary of 256, and no tokenizer to fetch."""

    vocabulary = 256
    made_by = "none"  # else the tokenizer, by the size of its file

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def sequence(self, generator: np.random.Generator, length: int) -> np.ndarray:
        """Return `length` consecutive bytes as int64; ConfigError if the corpus is shorter than that."""
        offset = choose_offset(self.corpus, generator, length)
        return np.frombuffer(self.corpus.read(offset, length), dtype=np.uint8).astype(np.int64)


class TokenizerTokens:
    """Tokens of a Hugging Face tokenizer.json, made on the fly from a window of bytes."""

    def __init__(self, corpus: Corpus, path: Path) -> None:
        if not path.is_file():
            found = f"the folder {path}: name the file in it" if path.is_dir() else f"no file {path}"
            raise ConfigError(f"--tokenizer: expected a tokenizer.json, found {found}")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(f"--tokenizer needs tokenizers: pip install 'tiermem[hf]' ({error})") from error
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer.json: {error}") from error
        self.corpus = corpus
        self.path = path
        self.made_by = f"{path.stat().st_size} bytes"
        # Numbers may be left out, so that there are fewer tokens than the largest number says.
        self.vocabulary = 1 + max(self.tokenizer.get_vocab().values(), default=-1)

    def sequence(self, generator: np.random.Generator, length: int) -> np.ndarray:
        """Return `length` consecutive tokens as int64; ConfigError if the corpus does not yield that many."""
        window = min(length * BYTES_PER_TOKEN_READ, self.corpus.nbytes)
        while True:
            offset = choose_offset(self.corpus, generator, window)
            text = self.corpus.read(offset, window).decode("utf-8", errors="ignore")
            ids = self._encode(text)
            if len(ids) >= length:
                return np.asarray(ids[:length], dtype=np.int64)
            if window == self.corpus.nbytes:
                raise ConfigError(f"the text has {len(ids)} tokens, a sequence needs {length}")
            window = min(2 * window, self.corpus.nbytes)

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{self.path} cannot make tokens of the text: {error}; choose another one") from error


TokenSource = ByteTokens | TokenizerTokens
"""What cuts sequences of tokens from a corpus, each from a place chosen by a generator."""


def choose_offset(corpus: Corpus, generator: np.random.Generator, length: int) -> int:
    """Return a place with `length` bytes after it; ConfigError if the corpus is shorter."""
    if corpus.nbytes < length:
        raise ConfigError(f"the text has {corpus.nbytes} bytes, a sequence needs {length}")
    return int(generator.integers(0, corpus.nbytes - length + 1))


def batch(source: TokenSource, *, seed: int, number: int, rows: int, length: int) -> torch.Tensor:
    """Return batch `number` of the run `seed`: int64 tokens of shape [rows, length]."""
    generator = np.random.default_rng([seed, number])
    return torch.from_numpy(np.stack([source.sequence(generator, length) for _ in range(rows)]))


def find_texts(paths: Sequence[Path]) -> list[Path]:
    """Return the files meant by `paths`: files as they are, directories with all visible files below, sorted.

    But for a run's own, which are there when it is resumed and were not when it began. Links to directories are not
    followed: they may lead upwards, or to the same text again.
    Without paths: the Python standard library's own sources. Raises `ConfigError` naming a path that does not exist or
    a file that may not be read, or if there is nothing to read.
    """
    if not paths:
        return standard_library_sources()
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if file.is_file() and is_text(file, path))
        elif path.is_file():
            found.append(path)
        elif os.path.lexists(path):
            raise ConfigError(f"--text: expected files or folders of text, found {path}, which is neither")
        else:
            raise ConfigError(f"--text: expected files or folders of text, found no {path}; correct the path")
    for file in found:
        if not os.access(file, os.R_OK):  # else the first batch that comes upon it would end the training
            raise ConfigError(f"text file {file} cannot be read; allow it, or name the files to read one by one")
    if not any(file.stat().st_size for file in found):
        names = ", ".join(map(str, paths))
        raise ConfigError(
            f"--text: expected text in {names}, found no file with anything in it; hidden ones are left out, and those "
            "behind links to directories: name these one by one"
        )
    return found


def standard_library_sources() -> list[Path]:
    """Return the .py files of the running Python's standard library, sorted: real text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[str] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_STANDARD_LIBRARY]
        files += (os.path.join(folder, name) for name in names if name.endswith(".py"))
    if not files:
        raise ConfigError(f"no Python sources in {root}; give --text")
    # As paths are sorted, whose comparison takes many times as long.
    return [Path(file) for file in sorted(files, key=lambda file: file.split(os.sep))]


def is_text(file: Path, root: Path) -> bool:
    """Return whether neither the file nor a folder on the way to it starts with a dot, and it is no file of a run's."""
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return not hidden and RUN_FILES.fullmatch(file.name) is None
