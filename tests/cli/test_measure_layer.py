"""The layer that stands for a workload, and the machine that is fitted to it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.cli import measure, measure_layer, timing
from tiermem.cli.measure_layer import ANY_LAYER, LayerShape, layer_for, train_layer
from tiermem.errors import ConfigError
from tiermem.planner.workload import transformer

CPU = torch.device("cpu")


@given(
    parameters=st.integers(10**6, 10**12),
    batch=st.integers(1, 64),
    seq=st.integers(2, 4096),
)
def test_a_layer_is_as_large_as_most_units_and_no_larger_than_a_second_allows(
    parameters: int, batch: int, seq: int
) -> None:
    work = transformer(parameters, batch=batch, seq=seq)
    shape = layer_for(work, seq=seq)
    tokens, units = shape.rows * shape.seq, [unit.numel for unit in work.units if unit.flops]
    typical = max(units, key=lambda numel: numel * units.count(numel))
    assert tokens <= min(512, work.tokens)
    assert 2 * tokens > min(512, work.tokens), "whole sequences, as many as there may be"
    assert shape.width % shape.heads == 0
    assert shape.width % 64 == 0
    if shape.width < 2048:
        assert shape.weights == pytest.approx(typical, rel=0.25) or shape.width == 64
    else:
        assert typical > 0.9 * shape.weights


def test_processors_train_more_weights_than_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LayerShape] = []
    layer, weights = measure_layer._layer, measure_layer._weights

    def narrow(shape: LayerShape) -> LayerShape:
        return dataclasses.replace(shape, width=64, mlp=64)

    def counted(dtype: torch.dtype, device: torch.device, shape: LayerShape, like: list[torch.Tensor]) -> Any:
        made.append(shape)
        return layer(dtype, device, narrow(shape), like)

    monkeypatch.setattr(measure_layer, "_layer", counted)
    monkeypatch.setattr(measure_layer, "_weights", lambda dtype, device, shape: weights(dtype, device, narrow(shape)))
    for shape, nbytes in ((ANY_LAYER, 226 << 20), (LayerShape(rows=1, seq=8, width=2048, mlp=5440), 380 << 20)):
        made.clear()
        train_layer(torch.float32, CPU, shape)()
        assert len(made) > 1
        assert len(made) * shape.weights * 4 > nbytes


def test_a_gradient_is_that_of_every_weight() -> None:
    shape = LayerShape(rows=2, seq=6, width=192, mlp=128)
    for dtype in (torch.float32, torch.bfloat16):
        gradients = measure_layer._layer(dtype, CPU, shape, measure_layer._weights(dtype, CPU, shape))()
        assert isinstance(gradients, tuple)
        assert [gradient.dtype for gradient in gradients] == [dtype] * 5
        assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)


def test_a_dtype_is_compared_with_float32_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the least of several times, for what else the machine does makes some longer."""
    seconds = {torch.float32: iter([0.5, 0.1, 0.4, 0.3]), torch.float16: iter([3.0, 1.2, 1.7, 8.0])}
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(3)

    def train(dtype: torch.dtype, device: torch.device, shape: LayerShape) -> Any:
        return lambda: found.append(torch.get_num_threads()) or next(seconds[dtype])

    monkeypatch.setattr(measure_layer, "_layer", train)
    monkeypatch.setattr(measure_layer, "seconds_of", lambda work: work())
    try:
        assert measure_layer.times_float32(torch.float16) == pytest.approx(12)
        assert (found, torch.get_num_threads()) == ([1] * 8, 3)
    finally:
        torch.set_num_threads(threads)


def test_a_comparison_takes_no_random_numbers_of_a_training_that_is_about_to_begin() -> None:
    """Else a training that is resumed, with the state that was committed, would go on with other ones."""
    before = torch.get_rng_state()
    assert measure_layer.times_float32(torch.bfloat16) > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("rate", "whole"), [(1e9, False), (1e11, True)])
def test_a_processor_without_instructions_for_a_dtype_is_timed_on_few_tokens(
    monkeypatch: pytest.MonkeyPatch, rate: float, whole: bool
) -> None:
    """Which would take half a minute otherwise for what others do in a hundredth of a second."""
    small, large = LayerShape(rows=1, seq=16, width=64, mlp=64), LayerShape(rows=2, seq=512, width=256, mlp=512)
    timed: list[LayerShape] = []

    def train(dtype: torch.dtype, device: torch.device, shape: LayerShape) -> Any:
        timed.append(shape)
        return lambda: None

    monkeypatch.setattr(measure_layer, "_layer", train)
    threads: list[int] = []

    def taken(_: object) -> float:
        threads.append(torch.get_num_threads())
        return measure_layer.operations(timed[-1]) / rate

    monkeypatch.setattr(measure_layer, "seconds_of", taken)
    before = torch.get_num_threads()
    few = LayerShape(rows=1, seq=8, width=256, mlp=512)
    assert measure_layer.in_time(torch.bfloat16, CPU, large, 0.25) == (large if whole else few)
    assert measure_layer.in_time(torch.bfloat16, CPU, small, 0.25) == small, "takes no time anyway"
    assert set(threads) == {1}, "several wait for each other on a busy machine"
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("dtype", "whole"), [(torch.float32, True), (torch.bfloat16, False)])
def test_float32_is_timed_on_all_tokens_however_slow_it_seems(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, whole: bool
) -> None:
    """On a busy machine a layer on few tokens waits at the end of every small operation, and would count for all."""
    large, timed = LayerShape(rows=2, seq=512, width=256, mlp=512), []

    def train(dtype: torch.dtype, device: torch.device, shape: LayerShape, like: Any = None) -> Any:
        timed.append(shape)
        return lambda: None

    monkeypatch.setattr(measure_layer, "_layer", train)
    monkeypatch.setattr(measure_layer, "_weights", lambda *_: [])
    monkeypatch.setattr(measure_layer, "seconds_of", lambda _: measure_layer.operations(timed[-1]) / 1e9)
    monkeypatch.setattr(measure_layer, "median_seconds", lambda *_: 1.0)
    rate = measure_layer.layer_flops(dtype, CPU, 0.25, large)
    assert (timed[-1] == large) is whole
    assert rate == measure_layer.operations(timed[-1])


def test_what_takes_long_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    for each, once, more in ((9.0, 2, 1), (0.2, 4, 3), (0.01, 26, 25)):
        monkeypatch.setattr(timing, "seconds_of", lambda work, each=each: (work(), each)[1])
        for measured, expected in ((timing.median_seconds, once), (timing.mean_seconds, more)):
            calls.clear()
            assert measured(lambda: calls.append(1.0), 0.25) == pytest.approx(each)
            assert len(calls) == expected


def test_work_beside_another_that_fails_at_once_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(super().wait(timeout))
            return waited[-1]

    def fail() -> None:
        raise ConfigError("nothing to be measured")

    monkeypatch.setattr(measure.threading, "Event", Noted)
    with pytest.raises(ConfigError, match="nothing to be measured"), measure._repeating(fail):
        pass
    assert waited
    assert all(waited), "not until the time was up"
