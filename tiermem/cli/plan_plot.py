"""The picture of a plan: where the seconds of a step go, and what would make it shorter.

Owns the drawing and nothing else. Does not simulate. Guarantees that without matplotlib it says what to install.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiermem.cli.disk import require_drawable, save_picture
from tiermem.errors import ConfigError
from tiermem.figures import format_number
from tiermem.planner.predict import Prediction

_BLUE, _GREEN, _RED, _GREY = "#3b6ea8", "#5a9e6f", "#b5533c", "#9a9a9a"


def plot_plan(prediction: Prediction, path: Path) -> None:
    """Draw it to `path`. Raises ConfigError if matplotlib is missing, or a plan that does not fit has no step."""
    simulation = prediction.simulation
    if simulation is None:
        raise ConfigError("a plan that does not fit has no step to draw; leave --plot out")
    require_drawable(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    step, relief = figure.subplots(1, 2)
    bars = {
        "step": (simulation.seconds, _GREY),
        "computation runs": (simulation.computing, _GREEN),
        "update kernel runs": (simulation.updating, _GREEN),
        "drive reads": (simulation.reading, _BLUE),
        "drive writes": (simulation.writing, _BLUE),
    }
    bars |= {f"waits: {cause}": (seconds, _RED) for cause, seconds in simulation.stalls.items()}
    _bars(step, bars)
    step.set_title(f"{prediction.workload.name}: seconds of a step (simulated)", fontsize=10)
    doubled = {f"2 x {item.resource}": (item.seconds, _BLUE) for item in prediction.relief}
    _bars(relief, {"as it is": (simulation.seconds, _GREY), **doubled})
    relief.set_title("seconds of a step with twice as much of one thing", fontsize=10)
    figure.suptitle(f"{prediction.machine.name} ({prediction.machine.source})", fontsize=8)
    save_picture(figure, path)


def _bars(axes: Any, bars: dict[str, tuple[float, str]]) -> None:
    names = list(bars)[::-1]
    axes.barh(names, [bars[name][0] for name in names], color=[bars[name][1] for name in names])
    for place, name in enumerate(names):
        axes.text(bars[name][0], place, f" {format_number(bars[name][0])}", va="center", fontsize=8)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
