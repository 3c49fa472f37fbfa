"""What is trained on what: the options of a training, the model and the text they name, and whether these go together.

Owns the checks of `tiermem train` and `tiermem tune` that come before anything is written. Does not train. Guarantees
that a subject which was found can be trained on: its tokens are in the vocabulary, and a sequence of them can be made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiermem
from tiermem.cli.disk import require_room
from tiermem.cli.launch import Launch
from tiermem.cli.presets import count_parameters, find_model, require_length
from tiermem.cli.text import ByteTokens, Corpus, TokenizerTokens, TokenSource, find_texts
from tiermem.errors import ConfigError
from tiermem.memory.machine import available_host_memory
from tiermem.memory.sizes import format_bytes
from tiermem.optim.tiles import master_dtypes
from tiermem.planner.reserved import wanted_copies


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train, on what, for how long."""

    model: str
    steps: int
    batch: int
    seq: int
    accumulate: int = 1
    vertical: bool = False
    lr: float = 3e-4
    seed: int = 0
    texts: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    resume: bool = False
    keep: bool = False
    commit_every: int | None = None  # None: see `Training`
    timeline: Path | None = None
    weights: Path | None = None
    tensorboard: Path | None = None
    endurance: str | None = None

    @property
    def commits(self) -> bool:
        """Whether the run commits, which keeps its swap files."""
        return self.keep or self.resume or bool(self.commit_every)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained on what, known to fit together: a model, its number of parameters, and tokens."""

    model_config: Any
    parameters: int
    source: TokenSource

    def require_room(self, config: tiermem.Config, update: str, *, commits: bool, launch: Launch | None = None) -> None:
        """Raise ConfigError unless the swap directories have room for the model's state as often as a run wants it.

        What is kept in memory needs no disk, but its room is reserved all the same. `launch`: the ranks, of which those
        on this machine share the directories. What of the state each has whole, at stages 1 and 2, and what 8-bit
        moments take beside their codes, is left to the runtime to ask for.
        """
        gradient = config.dtype.itemsize
        moments = 2 if config.moments == "int8" else 8
        durable = config.dtype.itemsize + sum(kept.itemsize for kept in master_dtypes(config.dtype)) + moments
        nbytes = self.parameters * (durable * wanted_copies(update, commits=commits) + gradient)
        require_room(config.swap_paths, (launch or Launch()).on_machine(nbytes))


def find_subject(options: TrainOptions) -> Subject:
    """The model and the text that the options name. Raises ConfigError for what no training can be made with."""
    refuse_impossible(options)
    source = open_text(options)
    model_config = find_model(options.model, vocabulary=source.vocabulary)
    require_length(model_config, options.model, options.seq)
    return Subject(model_config, count_parameters(model_config), source)


def refuse_impossible(options: TrainOptions) -> None:
    """Raise ConfigError for numbers that no training can be made with, whatever the model."""
    nbytes, available = options.batch * options.seq * torch.int64.itemsize, available_host_memory()
    if nbytes > available:
        raise ConfigError(
            f"--batch {options.batch} of --seq {options.seq} are {format_bytes(nbytes)} of token numbers alone, and "
            f"{format_bytes(available)} of memory are available: take fewer at a time, and --accumulate"
        )


def open_text(options: TrainOptions) -> TokenSource:
    """Return the tokens that the options ask for; ConfigError if there are too few for one sequence."""
    corpus = Corpus(find_texts(options.texts))
    source = ByteTokens(corpus) if options.tokenizer is None else TokenizerTokens(corpus, options.tokenizer)
    source.sequence(np.random.default_rng(options.seed), options.seq)  # raises now what the first batch would raise
    return source
