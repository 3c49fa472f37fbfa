"""The measured half of `tiermem tune`: real steps of the user's own model under each candidate.

Owns the way from the options of `tiermem train` to a measurement. Does not choose. Guarantees that each candidate
trains from the same weights on the same batches, in a folder of its own that is removed.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tiermem.cli.abandoned import remove_abandoned
from tiermem.cli.beginning import say_slow
from tiermem.cli.disk import new_folders
from tiermem.cli.modelwork import model_workload
from tiermem.cli.plan import find_machine
from tiermem.cli.subject import TrainOptions, find_subject
from tiermem.cli.train import Training
from tiermem.cli.tune import WARM_UP, TuneReport, run
from tiermem.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How to choose: for which machine, measured again or not, by how many steps of how many candidates."""

    machine: str | None
    again: bool
    steps: int
    best: int
    output: Path | None


def tune_training(options: TrainOptions, config: Config, choice: Choice, console: Console) -> TuneReport:
    """Tune for the training that `options` and `config` describe. Raises ConfigError for what cannot work."""
    subject = find_subject(options)
    if choice.steps:
        for directory in config.swap_paths:
            remove_abandoned(directory)
        # Of "auto" all are tried, and "backward" takes most.
        subject.require_room(config, "backward" if config.update == "auto" else config.update, commits=False)
    workload = model_workload(
        subject.model_config,
        options.model,
        batch=options.batch,
        seq=options.seq,
        batches=options.accumulate,
        settings=config,
    )
    machine = find_machine(choice.machine, config, workload, seq=options.seq, again=choice.again)

    if choice.machine is None and machine.device is None:
        say_slow(config.dtype, console)

    def measure(candidate: Config) -> float:
        with new_folders(candidate.swap_paths, prefix="tiermem-tune-") as made:
            mine = dataclasses.replace(candidate, swap_dirs=made, commits=False)
            training = Training(options, mine, subject)
            try:
                seconds = [training.step(number).seconds for number in range(WARM_UP + choice.steps)]
            finally:
                training.close()
        return statistics.median(seconds[WARM_UP:])

    return run(
        workload,
        machine,
        config,
        measure=measure if choice.steps else None,
        best=choice.best,
        output=choice.output,
        console=console,
    )
