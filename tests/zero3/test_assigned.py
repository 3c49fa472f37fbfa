"""What constructors write into parameters that have no storage yet is written again when they have it."""

from __future__ import annotations

import math

import pytest
import torch
from doubles_sharded import Sharded
from torch import nn

from tiermem.errors import ConfigError
from tiermem.zero3.deferred import deferred_init


class Written(nn.Module):
    """A parent that writes into its children, once they are made."""

    def __init__(self, write) -> None:
        super().__init__()
        self.one = nn.Linear(24, 24)
        self.two = nn.Linear(24, 24)
        self.conv = nn.Conv2d(4, 4, 3)
        write(self)


def deferred(write) -> Sharded:
    torch.manual_seed(1)
    with deferred_init():
        model = Written(write)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(2)
    return Sharded(model)


def parts(self):
    with torch.no_grad():
        self.one.weight.zero_()
        self.one.weight[0] = 3.0
        self.one.weight[1, 2:5] = torch.tensor([1.0, 2.0, 3.0])
        self.one.weight[2].add_(1).mul_(torch.arange(24.0))
        self.one.weight[3] = torch.tensor(4.0)
        self.one.weight.t()[5, 7:9].copy_(torch.tensor([8.0, 9.0]))
        self.one.weight.data[self.one.weight.new_ones(24, dtype=torch.bool, device="cpu"), 23] = 6.0


def put_in_place(self):
    self.one.weight = nn.Parameter(torch.eye(24))
    self.one.bias = nn.Parameter(torch.full((24,), 5.0))
    self.two.weight = self.one.weight


def after_its_own(self):
    self.one.reset_parameters()
    nn.init.ones_(self.one.weight)
    nn.init.ones_(self.one.weight).data.mul_(3)


def after_a_conversion(self):
    self.to(torch.float64)
    self.one.weight.data.fill_(1.5)


CONSTANTS = {
    "zeros of nn.init": lambda self: nn.init.zeros_(self.one.weight),
    "fill of data": lambda self: self.one.bias.data.fill_(3.0),
    "copy": lambda self: self.one.weight.data.copy_(torch.arange(576.0).view(24, 24)),
    "out": lambda self: nn.init.eye_(self.one.weight),
    "dirac, which asks for storage": lambda self: nn.init.dirac_(self.conv.weight),
    "parts": parts,
    "other parameters": put_in_place,
    "after its own": after_its_own,
    "after a conversion": after_a_conversion,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_does_not_depend_on_chance_is_what_a_plain_model_has(name):
    write = CONSTANTS[name]
    torch.manual_seed(3)
    one = {key: values.detach().float() for key, values in Written(write).named_parameters()}
    torch.manual_seed(4)
    other = {key: values.detach().float() for key, values in Written(write).named_parameters()}
    fixed = [key for key in one if torch.equal(one[key], other[key])]
    assert fixed, "nothing would be compared"
    found = deferred(write)
    for key in fixed:
        assert torch.equal(found.value(key).float(), one[key]), key
    for key in set(one) - set(fixed):
        assert found.value(key).float().std() > 0, key


RANDOM = {
    "normal": (lambda self: nn.init.normal_(self.two.weight, mean=2.0, std=1e-3), 1e-3),
    "scaled": (lambda self: self.two.weight.data.mul_(1e-2), 1e-2 / math.sqrt(3 * 24)),
    "truncated": (lambda self: nn.init.trunc_normal_(self.two.weight, std=1e-3), 1e-3),
    "orthogonal": (lambda self: nn.init.orthogonal_(self.two.weight, gain=3.0), 3.0 / math.sqrt(24)),
    "kaiming": (lambda self: nn.init.kaiming_normal_(self.two.weight), math.sqrt(2 / 24)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_have_the_distribution_of_the_last_who_wrote(name):
    write, deviation = RANDOM[name]
    values = deferred(write).value("two.weight")
    assert values.std().item() == pytest.approx(deviation, rel=0.2)
    if name == "orthogonal":
        assert torch.allclose(values @ values.T, 9.0 * torch.eye(24), atol=1e-4)


def test_a_subclass_that_initialises_its_own_parameters_in_its_constructor():
    class Gate(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 5)
            nn.init.constant_(self.bias, -2.0)

    with deferred_init():
        model = nn.Sequential(Gate())
    found = Sharded(model)
    assert (found.value("0.bias") == -2).all()
    assert found.value("0.weight").std() > 0


def test_a_module_without_reset_parameters_that_writes_what_it_registered():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(40, 40))
            nn.init.normal_(self.table, std=0.02)

    with deferred_init():
        model = Own()
    assert Sharded(model).value("table").std().item() == pytest.approx(0.02, rel=0.2)


def test_what_comes_behind_the_models_own_initialisation_is_kept_and_what_came_before_is_not():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))
            nn.init.ones_(self.layers[2].bias)
            self.apply(self._init_weights)
            nn.init.normal_(self.layers[1].weight, std=1e-4)

        def _init_weights(self, module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    with deferred_init():
        model = Net()
    found = Sharded(model)
    deviations = [found.value(f"layers.{number}.weight").std().item() for number in range(3)]
    assert deviations == pytest.approx([0.02, 1e-4, 0.02], rel=0.2)
    assert not found.value("layers.2.bias").any()


@pytest.mark.parametrize("name", ["_init_weights", "initialise"])
def test_an_initialisation_of_another_form_is_repeated_as_it_was(name):
    """transformers' `_init_weights` takes a module; one that takes none is the constructor's own affair."""

    def everything(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.5)
                nn.init.constant_(module.bias, 7.0)

    def construct(self) -> None:
        nn.Module.__init__(self)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        getattr(self, name)()

    kind = type("Net", (nn.Module,), {name: everything, "__init__": construct})
    with deferred_init():
        model = kind()
    found = Sharded(model)
    for key, _ in model.named_parameters():
        assert (found.value(key) == (0.5 if "weight" in key else 7.0)).all(), key


def test_torchs_transformer_has_the_distribution_that_its_constructor_gives_it():
    torch.manual_seed(0)
    plain = nn.Transformer(64, 4, 1, 1, 64, batch_first=True)
    with deferred_init():
        model = nn.Transformer(64, 4, 1, 1, 64, batch_first=True)
    found = Sharded(model)
    for name, parameter in plain.named_parameters():
        if parameter.dim() > 1:
            assert found.value(name).std().item() == pytest.approx(parameter.std().item(), rel=0.1), name


def from_another(self):
    self.one.weight.data.copy_(self.two.weight.data)


def made_of_what_was_there(self):
    self.one.weight = nn.Parameter(self.one.weight.detach() * 2)


def drawn_beside(self):
    with torch.no_grad():
        self.one.weight.copy_(torch.empty_like(self.one.weight).normal_())


@pytest.mark.parametrize("write", [from_another, made_of_what_was_there, drawn_beside])
def test_what_cannot_be_repeated_is_named_unless_somebody_else_says_the_values(write):
    with pytest.raises(ConfigError, match=r"parameter one\.weight was written under deferred_init .* pass init="):
        deferred(write)

    def fill(module):
        for parameter in module.parameters(recurse=False):
            parameter.fill_(2.0)

    with deferred_init():
        model = Written(write)
    assert (Sharded(model, init=fill).value("one.weight") == 2).all()
    assert torch.isfinite(
        deferred(lambda self: (write(self), nn.init.ones_(self.one.weight))).value("one.weight")
    ).all()


def test_several_parameters_written_by_one_operation_are_named():
    with pytest.raises(ConfigError, match=r"parameter one\.weight .*_foreach_zero_"):
        deferred(lambda self: torch._foreach_zero_([self.one.weight.data, self.two.weight.data]))


def test_a_model_can_be_converted_and_its_layers_used_elsewhere_before_it_is_offloaded():
    with deferred_init():
        model = Written(lambda self: nn.init.constant_(self.one.weight, 0.25))
    found = Sharded(nn.Sequential(model.to(torch.bfloat16)), dtype=torch.bfloat16)
    assert found.value("0.one.weight").dtype == torch.bfloat16
    assert (found.value("0.one.weight") == 0.25).all()


def test_nothing_is_noted_behind_the_block():
    with deferred_init():
        model = Written(lambda self: None)
    plain = nn.Linear(3, 3)
    nn.init.ones_(plain.weight)
    assert (plain.weight == 1).all()
    assert Sharded(model).value("one.weight").std() > 0
