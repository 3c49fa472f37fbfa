"""The sweep of `tiermem bench` as a picture.

Owns the drawing, from the JSON of a report, so that a committed result can be drawn again. Does not measure. Needs
matplotlib, which is an extra; guarantees one clear line where it is missing or no picture can be drawn there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiermem.cli.disk import require_drawable, save_picture

_PATTERNS = ("read", "write", "mixed")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw bandwidth and 99th percentile of latency over queue depth, a line for each block size; errors as above."""
    require_drawable(path)
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, len(_PATTERNS), sharex=True, squeeze=False)
    for column, pattern in enumerate(_PATTERNS):
        rate, latency = axes[0][column], axes[1][column]
        for label, points in lines(found[pattern]["all"]).items():
            style = "o-" if len(points) > 1 else "x"
            depths = [point["queue_depth"] for point in points]
            rate.plot(depths, [point["gigabytes_per_second"] for point in points], style, label=label)
            latency.plot(depths, [point["latency_ms"]["p99"] for point in points], style)
        rate.set_title(pattern)
        rate.set_ylim(bottom=0)
        latency.set_yscale("log")  # buffered requests take ten times as long and would flatten the others
        latency.set_xlabel("queue depth")
        depths = sorted({point["queue_depth"] for point in found[pattern]["all"]})
        latency.set_xscale("log", base=2)  # shared with the row above
        latency.set_xticks(depths, [str(depth) for depth in depths])
        latency.tick_params(axis="x", which="minor", bottom=False)
    axes[0][0].set_ylabel("GB/s")
    axes[1][0].set_ylabel("p99 of a request, ms")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(", ".join(found["directories"]))
    save_picture(figure, path)


def lines(measurements: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Measurements that belong on one line of the picture, by their label, each line by rising queue depth."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for one in sorted(measurements, key=lambda one: (one["block_size"], one["queue_depth"])):
        way = "" if one["direct"] else ", buffered"
        found.setdefault(f"{one['backend']} {one['block_size'] / 2**20:g} MiB{way}", []).append(one)
    return found
