"""Ordinary life on a device: scenarios, compiled layers, fused attention in bfloat16; the resident model's bits."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path

import doubles_scenarios
import pytest
import torch
from doubles_gpu import Attending, HostAdamW, MadeOn, tokens, torch_place
from doubles_models import Stack
from doubles_scenarios import SCENARIOS, Scenario, loop, tokens_batch
from doubles_training import MIB, Outcome, Trainee, check, config_for, offloaded
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiermem
from tiermem.runtime.blueprint import draw

# The norm of gradients on the device is a sum in another order than the processor's.
HERE = tuple(name for name in SCENARIOS if name != "max_grad_norm")
FAMILIES = (
    "llama",
    "llama, checkpointing",
    "llama, reentrant checkpointing",
    "gpt2",
    "qwen3",
    "mixtral",
    "t5",
)


def least_device(scenario: Scenario, place: str, directory: Path, **settings) -> int:
    config = config_for(directory, 64 * MIB, "step", device=place, device_memory=4096, **settings)
    with pytest.raises(tiermem.BudgetError, match="device_memory") as caught:
        draw(scenario.make(), config, scenario.units)
    return int(re.search(r"at least (\d+) bytes", str(caught.value)).group(1))


def resident(scenario: Scenario, place: str) -> Outcome:
    torch.manual_seed(1)
    model = scenario.make().to(torch_place(place))
    torch.manual_seed(2)
    trainee = Trainee(model, HostAdamW, lambda p: None if p.grad is None else p.grad.clone())
    scenario.script(trainee)
    return Outcome(trainee.noted, {name: values.clone() for name, values in model.state_dict().items()})


def compare(scenario: Scenario, place: str, directory: Path, *, update: str, budget: str, device: int) -> None:
    found = offloaded(
        scenario.make,
        scenario.script,
        directory,
        update=update,
        budget=budget,
        units=scenario.units,
        device=place,
        device_memory=device,
    )
    for edge in ("host->device", "device->host"):
        assert found.statistics.total.edge(edge).nbytes > 0
    expected = resident(scenario, place)
    for outcome in (found, expected):
        outcome.noted = [None if value is None else value.cpu() for value in outcome.noted]
        outcome.weights = {name: values.cpu() for name, values in outcome.weights.items()}
    check(found, expected)


@pytest.mark.parametrize("name", [*HERE, *FAMILIES])
def test_scenarios_at_the_least_budgets(name, place, tmp_path, monkeypatch):
    monkeypatch.setattr(doubles_scenarios, "torch", MadeOn(torch_place(place)))
    scenario = SCENARIOS[name] if name in SCENARIOS else doubles_scenarios.hugging_face()[name]
    device = least_device(scenario, place, tmp_path)
    compare(scenario, place, tmp_path, update="backward", budget="least", device=device)


@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn of what they meet in torch itself
@pytest.mark.parametrize("update", ["step", "forward"])
def test_compiled_layers(update, place, tmp_path, monkeypatch):
    monkeypatch.setattr(doubles_scenarios, "torch", MadeOn(torch_place(place)))

    def make() -> torch.nn.Module:
        model = Stack()
        for layer in model.layers:
            layer.compile(backend="inductor" if place == "cuda" else "aot_eager")
        return model

    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        compare(Scenario(make, loop(tokens_batch)), place, tmp_path, update=update, budget="generous", device=64 * MIB)


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_kernels_of_attention_in_bfloat16(kernel, place, tmp_path):
    device = torch_place(place)
    if kernel is SDPBackend.EFFICIENT_ATTENTION and place != "cuda":
        pytest.skip("this kernel needs a CUDA device")
    torch.manual_seed(1)
    model = Attending()
    plain = copy.deepcopy(model).to(device, torch.bfloat16)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    config = config_for(tmp_path, 64 * MIB, "forward", device=place, device_memory=64 * MIB, param_dtype="bfloat16")
    with tiermem.offload(model, config) as runtime, sdpa_kernel(kernel):
        ours = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            batch = tokens(step, device)
            losses = [each(batch).float().square().mean() for each in (model, plain)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses), f"loss {step}"
            ours.step()
            ours.zero_grad()
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.cpu().float(), None
            theirs.step()
            with torch.no_grad():
                for master, parameter in zip(masters, plain.parameters(), strict=True):
                    parameter.copy_(master)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(runtime.master(parameter).cpu(), master.detach())
