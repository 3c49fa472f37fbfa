"""`tiermem tune`: the settings with which this model trains fastest here.

Owns the order: simulate many settings, train a few steps with the best of them and with the default, choose, write
a file. Does not know how to search (the planner does) or to train (`train.py` does). Guarantees that the file it writes
is one `Config.load` reads, that nothing is chosen over the default which was not measured to be faster (with
`--steps 0`: simulated), and that the training of its trials leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from tiermem.cli.plan import plan_settings
from tiermem.config import Config
from tiermem.memory.sizes import exact_bytes
from tiermem.planner.machine import Machine
from tiermem.planner.settings import PlanSettings
from tiermem.planner.tuning import WORTH_WHILE, Trial, Tuning, tune
from tiermem.planner.workload import Workload

# The first steps of a run are not like the others: demand paged, and with new states.
WARM_UP = 3

# What can be set, and its name in a table that a terminal of 80 columns has room for.
_COLUMNS = {
    "update": "update",
    "look_ahead": "look-ahead",
    "tile_size": "tile",
    "queue_depth": "depth",
    "block_size": "block",
}
# What a trial calls otherwise than `Config` does.
_SETTINGS = {"tile_nbytes": "tile_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """What was tried and what was chosen.

    Attributes:
        tuning: the search.
        measured: seconds of a step (median) by trial, for those that were measured.
        chosen: the settings to use, and `config` the configuration that says so.
        output: the file that holds it; None: there is none.
        output_error: why there is none although it was asked for.
    """

    model: str
    machine: Machine
    tuning: Tuning
    measured: tuple[tuple[Trial, float], ...]
    chosen: Trial
    config: Config
    output: Path | None
    output_error: str | None

    @property
    def is_default_best(self) -> bool:
        """Whether the default stays."""
        return self.chosen is self.tuning.default

    def to_json(self) -> str:
        """Return the report as one JSON object. What is chosen is called as in the file: "auto" where that stays."""
        times = {id(trial): seconds for trial, seconds in self.measured}
        curve = [
            {
                "changed": _SETTINGS.get(trial.knob, trial.knob),
                **changed(trial.settings),
                "predicted_seconds": trial.seconds,
                "measured_seconds": times.get(id(trial)),
            }
            for trial in self.tuning.trials
        ]
        default, written = self.tuning.default, self.config.to_dict()
        settings = {name: written[name] for name in changed(self.chosen.settings)}
        return json.dumps(
            {
                "model": self.model,
                "machine": {"name": self.machine.name, "source": self.machine.source},
                "settings": settings,
                **settings,
                "predicted_seconds": self.chosen.seconds,
                "measured_seconds": times.get(id(self.chosen)),
                "default_predicted_seconds": default.seconds,
                "default_measured_seconds": times.get(id(default)),
                "default_is_best": self.is_default_best,
                "output": None if self.output is None else str(self.output),
                "curve": curve,
            }
        )

    def to_table(self) -> RenderableType:
        """Return the curve and the choice for a terminal."""
        times = {id(trial): seconds for trial, seconds in self.measured}
        title = f"{self.model}: seconds of a step"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("", "changed", *_COLUMNS.values()):  # a mark first, for where nothing is bold
            table.add_column(name, no_wrap=True)
        for name in ("simulated", "measured"):
            table.add_column(name, justify="right", no_wrap=True)
        for trial in sorted(self.tuning.trials, key=lambda trial: trial.seconds):
            settings = changed(trial.settings)
            measured = times.get(id(trial))
            table.add_row(
                "*" if trial is self.chosen else "",
                _COLUMNS[_SETTINGS.get(trial.knob, trial.knob)] if trial.knob else "(default)",
                *(str(settings[name]) for name in _COLUMNS),
                f"{trial.seconds:.3f}",
                "" if measured is None else f"{measured:.3f}",
                style="bold" if trial is self.chosen else None,
            )
        how = "by measurement" if self.measured else "by simulation"
        verdict = f"The default is best, {how}." if self.is_default_best else f"The line with * is fastest, {how}."
        written = []
        if self.output:
            written = [f"Written to {self.output}: tiermem train --config {shlex.quote(str(self.output))}"]
        return Group(table, verdict, *written)


def changed(settings: PlanSettings) -> dict[str, Any]:
    """The settings under the names of `Config`, as it takes them."""
    return {
        "update": settings.update,
        "look_ahead": "auto" if settings.look_ahead is None else exact_bytes(settings.look_ahead),
        "tile_size": "auto" if settings.tile_nbytes is None else exact_bytes(settings.tile_nbytes),
        "queue_depth": settings.queue_depth,
        "block_size": exact_bytes(settings.block_size),
    }


Measure = Callable[[Config], float]


def run(
    workload: Workload,
    machine: Machine,
    config: Config,
    *,
    measure: Measure | None,
    best: int,
    output: Path | None,
    console: Console,
) -> TuneReport:
    """Search, measure the `best` settings and the default by `measure`, choose, and write `output`.

    `measure` gives the median seconds of a step under a configuration; without it the simulation decides. Raises what
    the planner and `measure` raise. A file that cannot be written is said in the report: what was measured is not lost.
    """
    settings = plan_settings(config, machine, 1, workload, commits=False)  # as its trials measure
    # An update that the user has chosen stays.
    updates = ("forward", "backward", "step") if config.update == "auto" else ()
    tuning = tune(workload, machine, settings, updates=updates)
    measured: list[tuple[Trial, float]] = []
    chosen = tuning.chosen
    if measure is not None:
        for trial in dict.fromkeys([tuning.default, *tuning.best(best)]):
            console.print(f"measuring {_words(trial, tuning.default)}", highlight=False, soft_wrap=True)
            measured.append((trial, measure(tuned(config, trial, tuning.default))))
        default_seconds = measured[0][1]
        fastest, seconds = min(measured, key=lambda pair: pair[1])
        chosen = fastest if seconds < default_seconds * (1 - WORTH_WHILE) else tuning.default
    final = tuned(config, chosen, tuning.default)
    lost = _save(final, output) if output is not None else None
    return TuneReport(
        model=workload.name,
        machine=machine,
        tuning=tuning,
        measured=tuple(measured),
        chosen=chosen,
        config=final,
        output=output if lost is None else None,
        output_error=lost,
    )


def _save(config: Config, output: Path) -> str | None:
    """Write it; return why that could not be done."""
    try:
        config.save(output)
    except OSError as error:
        return f"--output: the settings could not be written: {error}"
    return None


def tuned(config: Config, trial: Trial, default: Trial) -> Config:
    """The configuration with what the trial changes; what it leaves alone stays as it was given, "auto" included."""
    return dataclasses.replace(config, **_differences(trial, default))


def _words(trial: Trial, default: Trial) -> str:
    return ", ".join(f"{name} {value}" for name, value in _differences(trial, default).items()) or "the default"


def _differences(trial: Trial, default: Trial) -> dict[str, Any]:
    before, after = changed(default.settings), changed(trial.settings)
    return {name: value for name, value in after.items() if value != before[name]}
