"""Parts of a model that are called on streams of the user's own: nobody uses their frames too early."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from doubles_streams import StreamDevice, Streams
from doubles_training import MIB, config_for
from torch import nn

import tiermem
from tiermem.memory.tiers import Tier
from tiermem.pager.lease import Lease
from tiermem.runtime.beginning import Beginning
from tiermem.runtime.blueprint import draw
from tiermem.runtime.company import find_company
from tiermem.runtime.face import Runtime
from tiermem.runtime.house import build
from tiermem.zero3.fibers import OwnStack

WIDTH = 64


class Layer(nn.Linear):
    """Says that a kernel reads its weight, on whatever stream that is."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(WIDTH, WIDTH)
        self.streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.streams.use(self.weight.detach(), "a kernel", writes=False)
        return super().forward(x)


class Branches(nn.Module):
    """Layers beside each other, each on a stream of its own, for which the caller's waits in the end.

    As torch's engine has it, what belongs to a layer in backward is on the layer's stream, too.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(Layer(streams) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        streams, x, found = self.streams, self.embed(tokens), []
        caller = streams.current()
        for number, layer in enumerate(self.layers):
            streams.enter(number)
            streams.wait_for(caller)
            result = torch.tanh(layer(x))
            result.register_hook(lambda _, number=number: streams.enter(number))
            found.append(result)
            streams.enter(caller)
        for number in range(len(found)):
            streams.wait_for(number)
        return torch.stack(found).sum(0)


def least_device(model: nn.Module, directory: Path) -> int:
    config = config_for(directory, 64 * MIB, "step", device="simulated", device_memory=4096)
    with pytest.raises(tiermem.BudgetError, match="device_memory") as caught:
        draw(model, config, None)
    return int(re.search(r"at least (\d+) bytes", str(caught.value)).group(1))


def runtime_on(device: StreamDevice, model: nn.Module, config: tiermem.Config) -> Runtime:
    return Runtime(build(draw(model, config, None), config, Beginning(), find_company(config), device=device))


@pytest.mark.parametrize("update_on", ["host", "auto"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_what_is_called_on_several_streams_is_waited_for(update, update_on, tmp_path, monkeypatch):
    device = StreamDevice()
    model, caller = Branches(device.streams), device.streams.current()
    more = {"device": "simulated", "device_memory": 2 * least_device(model, tmp_path), "update_on": update_on}
    config = config_for(tmp_path, 64 * MIB, update, poison=False, **more)
    with runtime_on(device, model, config) as runtime:
        monkeypatch.setattr(Lease, "tensor", device.watch_leases(runtime._house.storage.arenas[Tier.DEVICE]))
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            model(torch.randint(40, (2, 6))).square().mean().backward()
            device.streams.enter(caller)
            for number in range(len(model.layers)):  # as torch's engine does in the end
                device.streams.wait_for(number)
            optimizer.step()
            optimizer.zero_grad()
    assert device.streams.checks > 20
    assert device.streams.early == []


@pytest.mark.parametrize("update", ["step", "backward"])
def test_micro_batches_that_go_through_together_may_each_be_on_a_stream_of_their_own(update, tmp_path, monkeypatch):
    """What one of them had brought the others use, too; and the caller's lets go of it."""
    monkeypatch.setattr(OwnStack, "possible", False)  # a thread each, which is what has a stream here
    device = StreamDevice()
    streams, caller = device.streams, device.streams.current()
    model = nn.Sequential(nn.Embedding(40, WIDTH), *(Layer(streams) for _ in range(4)))
    more = {"device": "simulated", "device_memory": least_device(model, tmp_path)}

    def loss(micro_batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, tokens = micro_batch
        streams.enter(number)
        streams.wait_for(caller)
        return model(tokens).square().mean()

    with runtime_on(device, model, config_for(tmp_path, 64 * MIB, update, poison=False, **more)) as runtime:
        monkeypatch.setattr(Lease, "tensor", device.watch_leases(runtime._house.storage.arenas[Tier.DEVICE]))
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            runtime.forward_backward([(number, torch.randint(40, (2, 6))) for number in range(3)], loss)
            for number in range(3):
                streams.wait_for(number)
            optimizer.step()
            optimizer.zero_grad()
    assert streams.checks > 20
    assert streams.early == []


def test_gradients_of_a_backward_that_has_failed_are_dropped_when_its_stream_is_done_with_them(tmp_path, monkeypatch):
    device = StreamDevice()
    streams, caller = device.streams, device.streams.current()
    model = nn.Sequential(nn.Embedding(40, WIDTH), *(nn.Sequential(Layer(streams), Layer(streams)) for _ in range(3)))
    more = {"device": "simulated", "device_memory": 4 * least_device(model, tmp_path)}

    def fail(*_: object) -> None:
        raise RuntimeError("amid backward")

    with runtime_on(device, model, config_for(tmp_path, 64 * MIB, "step", poison=False, **more)) as runtime:
        monkeypatch.setattr(Lease, "tensor", device.watch_leases(runtime._house.storage.arenas[Tier.DEVICE]))
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number in range(4):
            streams.enter(number)
            streams.wait_for(caller)
            amid = model[3][1].register_full_backward_hook(fail)  # its unit has some gradients and lacks others
            with pytest.raises(RuntimeError, match="amid backward"):
                model(torch.randint(40, (2, 6))).square().mean().backward()
            amid.remove()
            streams.enter(caller)  # and waits for nothing
            optimizer.zero_grad()
            model(torch.randint(40, (2, 6))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert streams.checks > 20
    assert streams.early == []
