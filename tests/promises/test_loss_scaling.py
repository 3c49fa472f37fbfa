"""torch.amp.GradScaler with an offloaded model: the same skips, the same scales, the same weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from doubles_models import mlp
from doubles_training import config_for

import tiermem

pytestmark = pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")

MIB = 1 << 20
OVERFLOWS = (2, 3, 6)


def factor(step: int) -> float:
    """In three steps the loss is so large that its scaled gradients are not finite."""
    return 1e38 if step in OVERFLOWS else 1.0


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)


@pytest.mark.parametrize("update", ["forward", "step"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_skips_scales_and_weights_are_those_of_plain_training(update, max_grad_norm, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    plain = copy.deepcopy(model)
    theirs, ours = new_scaler(), new_scaler()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, update)) as runtime:
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=max_grad_norm)
        for step in range(9):
            x = torch.randn(4, 6)
            theirs.scale(plain(x).square().sum() * factor(step)).backward()
            if max_grad_norm is not None:
                theirs.unscale_(other)
                torch.nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
            theirs.step(other)
            theirs.update()
            other.zero_grad()
            ours.scale(model(x).square().sum() * factor(step)).backward()
            ours.step(optimizer)
            ours.update()
            optimizer.zero_grad()
            assert ours.get_scale() == theirs.get_scale(), step
        assert optimizer.skipped == len(OVERFLOWS)
        for name, parameter in plain.named_parameters():
            found = runtime.parameter(dict(model.named_parameters())[name])
            assert torch.equal(found, parameter), name


def test_small_gradients_survive_float16(tmp_path: Path) -> None:
    """Without a scale they are zero in float16; unscaled in float16 they would be zero again."""
    model = torch.nn.Linear(8, 8, bias=False)
    config = config_for(tmp_path, 8 * MIB, "step", param_dtype="float16")
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-30)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        before = runtime.master(model.weight)
        x = torch.full((1, 8), 2.0**-10, dtype=torch.float16)
        (scaler.scale((model(x).float() * 2.0**-18).sum())).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.allclose(before - runtime.master(model.weight), torch.full((8, 8), 1e-2), rtol=1e-3)


def test_unscale_says_what_to_use(tmp_path: Path) -> None:
    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, "forward")):
        optimizer, scaler = tiermem.AdamW(model.parameters()), new_scaler()
        scaler.scale(model(torch.randn(4, 6)).sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(tiermem.ConfigError, match="max_grad_norm"):
            scaler.step(optimizer)


def test_updates_in_backward_are_refused(tmp_path: Path) -> None:
    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, "backward")):
        optimizer, scaler = tiermem.AdamW(model.parameters()), new_scaler()
        scaler.scale(model(torch.randn(4, 6)).sum()).backward()
        with pytest.raises(tiermem.ConfigError, match="update='forward'"):
            scaler.step(optimizer)


def test_a_scaler_that_is_hidden_by_a_wrapping_is_refused(tmp_path: Path) -> None:
    """accelerate puts a function of (*args, **kwargs) in place of `step`: gradients would be used scaled."""
    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, "forward")) as runtime:
        optimizer, scaler = tiermem.AdamW(model.parameters()), new_scaler()
        before = runtime.parameter(model[0].weight)
        step = optimizer.step
        optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)
        scaler.scale(model(torch.randn(4, 6)).sum()).backward()
        with pytest.raises(tiermem.ConfigError, match="hides the scaler"):
            scaler.step(optimizer)
        optimizer.step = step
        assert torch.equal(runtime.parameter(model[0].weight), before)
        scaler.step(optimizer)  # the same gradients, with the scaler in sight
        scaler.update()
        assert optimizer.steps_of(model[0].weight) == 1


def test_a_disabled_scaler_changes_nothing(tmp_path: Path) -> None:
    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, "forward")):
        optimizer, scaler = tiermem.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(model(torch.randn(4, 6)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.steps_of(model[0].weight) == 1


def test_a_step_that_failed_and_is_tried_again_unscales_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with tiermem.offload(model := mlp(), config_for(tmp_path, 8 * MIB, "forward")):
        optimizer, scaler = tiermem.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, max_grad_norm=1e9), new_scaler()
        x = torch.randn(4, 6)
        norms = []
        for _ in range(2):
            scaler.scale(model(x).square().sum()).backward()
            if not norms:
                optimizer.max_grad_norm = -1.0
                with pytest.raises(tiermem.ConfigError, match="max_grad_norm must be positive"):
                    scaler.step(optimizer)
                optimizer.max_grad_norm = 1e9
            scaler.step(optimizer)
            norms.append(float(optimizer.grad_norm))
            scaler.update()
            optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
