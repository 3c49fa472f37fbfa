"""float32 where host memory is a seventh of the state: the bytes a real step moves beside its plan and its simulation.

There a unit's gradient tiles are leased a few at a time, as its gradients arrive: last parameters first, and a tile
that several parameters share again and again.
"""

from __future__ import annotations

import statistics
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import some_of
from doubles_models import small_llama
from doubles_planner import INSTANT, plans_made, trained
from torch import nn

import tiermem
from tiermem.cli.modelwork import workload_of
from tiermem.pager.plan import Plan
from tiermem.planner.design import PlanSettings, make_design
from tiermem.planner.simulate import Simulation, simulate


def model() -> nn.Module:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"width": 112, "mlp_width": 300, "layers": 6, "heads": 7, "key_value_heads": 7}
    return small_llama(words=512, **shape, tie_word_embeddings=False, use_cache=False)


def both(
    update: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *, batches: int = 1, share: float = 0.15
) -> tuple[float, float, Plan, Simulation]:
    """Bytes read and written in a step (the median of three, of the one that moved least where updates lag), what its
    plan counts, and the simulated step.
    """
    plans = plans_made(monkeypatch)
    llama = model()
    work = workload_of(llama, "small", batch=2, seq=16, batches=batches, dtype="float32")
    host = round(work.parameters * 12 * share) // 4096 * 4096
    design = make_design(work, INSTANT, PlanSettings(host_memory=host, update=update, tile_nbytes=128 << 10))
    config = tiermem.Config(
        device="cpu",
        host_memory=host,
        swap_dirs=[directory],
        param_dtype="float32",
        update=update,  # type: ignore[arg-type]
        tile_size="128KiB",
        look_ahead=design.footprint.look_ahead,  # as planned, and never refined
        io_backend="inline",
        commits=False,
    )
    moved, surprises, lags = [], [0], update == "backward"
    with tiermem.offload(llama, config) as runtime:
        forecast = runtime._house.storage.pager._core.residency.forecast
        for step, last in enumerate(islice(trained(llama, runtime, batches=batches), 9 if lags else 6)):
            moved.extend([(last.bytes_read, last.bytes_written)] if step >= 3 else [])
            surprises.append(forecast.surprises)
    assert surprises[-1] == surprises[-3], "the schedule knows every access of the computation"
    assert design.footprint.hold_tiles == (share > 0.2), "all gradient tiles of a unit, or a few at a time"
    read, written = min(moved, key=sum) if lags else (statistics.median(each) for each in zip(*moved, strict=True))
    return read, written, plans[-1], simulate(design)


# Forward is that of several batches below, too.
@pytest.mark.parametrize("update", some_of(["step"], ["forward"]))
def test_what_is_foreseen_is_moved(update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With each gradient tile once, in order, in the schedule, a fifth more was read and a sixth more written.
    read, written, planned, foreseen = both(update, tmp_path, monkeypatch)
    assert read == pytest.approx(foreseen.bytes_read, rel=0.05)
    assert written == pytest.approx(foreseen.bytes_written, rel=0.05)
    assert read + written <= planned.moved * 1.05


def test_where_updates_lag_it_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which of two ends first decides some of it. What the plan counts was exceeded by 37 %, now it is by 7 (in single
    # steps of a machine with much else to do by 18).
    read, written, planned, foreseen = both("backward", tmp_path, monkeypatch)
    assert read + written == pytest.approx(planned.moved, rel=0.2)
    assert read + written == pytest.approx(foreseen.bytes_read + foreseen.bytes_written, rel=0.25)


@pytest.mark.parametrize(
    ("update", "batches", "share"),
    some_of([("forward", 2, 0.15)], [("step", 4, 0.4), ("step", 2, 0.15), ("forward", 4, 0.4)]),
)
def test_gradients_of_several_batches_that_are_added_up(
    update: str, batches: int, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When the schedule had the first batch's only, the others led the forecast into the next step (28 % more was read).
    read, written, _, foreseen = both(update, tmp_path, monkeypatch, batches=batches, share=share)
    assert read == pytest.approx(foreseen.bytes_read, rel=0.05)
    assert written == pytest.approx(foreseen.bytes_written, rel=0.05)
