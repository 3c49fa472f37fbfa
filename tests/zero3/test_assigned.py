"""What constructors write into parameters that have no storage yet is written again when they have it."""

from __future__ import annotations

import copy
import math
import threading

import numpy as np
import pytest
import torch
from doubles_sharded import Sharded
from torch import nn

from tiermem.errors import ConfigError
from tiermem.zero3 import assigned
from tiermem.zero3.deferred import deferred_init
from tiermem.zero3.guards import refuse_unfit
from tiermem.zero3.made import ValueWatch
from tiermem.zero3.writes import all_written


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


def data_with_values(self):
    filled_later = torch.zeros(24)
    self.one.weight.data = torch.arange(576.0).view(24, 24)
    self.one.weight.data[0] = 5.0
    self.one.bias.data = filled_later
    filled_later.fill_(4.0)
    self.conv.weight.data = torch.ones(4, 4, 1, 1)
    self.two = copy.deepcopy(self.one)
    self.two.bias.data = torch.from_numpy(np.arange(24.0)).float().expand(24)
    nn.utils.vector_to_parameters(torch.arange(4.0), [self.conv.bias])


def put_back(self):
    nn.init.constant_(self.one.weight, 2.0)
    kept = self.one.weight.data.clone()
    nn.init.constant_(self.one.weight, 3.0)
    self.one.weight.data = kept
    self.one.weight.data[0].mul_(4.0)
    before = self.two.weight.data.clone()
    nn.init.constant_(self.two.weight, 3.0)
    self.two.weight.data = before


def rounded(self):
    nn.init.constant_(self.one.weight, 0.1)
    self.one.half().float()
    self.two.half()
    nn.init.constant_(self.two.weight, 0.1)
    self.two.weight.data.mul_(3.3)
    self.two.double()
    nn.init.constant_(self.conv.weight, 0.1)
    self.conv.weight.data.mul_(3.3)
    self.conv.half()


def rounded_by_swapping(self):
    nn.init.constant_(self.one.weight, 0.1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        self.one.half().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def copied_onto_itself(self):
    self.one.weight.data.copy_(torch.arange(576.0).view(24, 24))
    self.one.weight.data.copy_(self.one.weight.data)


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
    "data with values": data_with_values,
    "values of before": put_back,
    "a conversion and back": rounded,
    "conversions by swapping": rounded_by_swapping,
    "its own": copied_onto_itself,
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


def test_a_module_that_comes_behind_the_models_own_initialisation_is_initialised_by_itself_alone():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head, self.left_out = nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 30)
            for module in (self.inner, self.head):
                self._init_weights(module)

        def _init_weights(self, module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 2.0)
                nn.init.constant_(module.bias, 2.0)

    with deferred_init():
        model = Model()
        model.head = nn.Linear(30, 4)
        model.again = copy.deepcopy(model.head)
        nn.init.ones_(model.again.bias)
    found = Sharded(model)
    for name in ("inner.weight", "inner.bias"):
        assert (found.value(name) == 2.0).all(), name
    for name in ("head.weight", "head.bias", "left_out.weight", "left_out.bias", "again.weight"):
        assert 0 < found.value(name).abs().max() <= 30**-0.5, name
    assert (found.value("again.bias") == 1.0).all()


def test_what_lies_beside_a_wrapped_model_is_not_initialised_as_the_models_parts_are():
    """peft's models answer for the model they wrap, and have prompts of their own."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(30, 30)
            self.apply(self._init_weights)

        def _init_weights(self, module) -> None:
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    class Wrapping(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.prompts = nn.Embedding(30, 30)

        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("base"), name)

    with deferred_init():
        model = Wrapping(Model())
    found = Sharded(model)
    deviations = [found.value(name).std().item() for name in ("base.inner.weight", "prompts.weight")]
    assert deviations == pytest.approx([0.02, 1.0], rel=0.2)


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


def data_computed(self):
    self.one.weight.data = self.one.weight.data * 0.02


def data_computed_and_converted(self):
    self.one.weight.data = (self.one.weight.data * 0.02).double().float()


def data_of_its_form(self):
    self.one.weight.data = torch.zeros_like(self.one.weight.data)


def data_of_another(self):
    self.one.weight.data = self.two.weight.data.clone()


def data_of_another_converted(self):
    self.two.double()
    self.one.weight.data = self.two.weight.data.float()


def data_of_its_form_written_before(self):
    copied = self.one.weight.data.clone()
    copied[0] *= 2
    self.one.weight.data = copied.double().float()


def data_turned(self):
    self.one.weight.data.copy_(torch.arange(576.0).view(24, 24))
    self.one.weight.data = self.one.weight.data.t()


def data_turned_and_copied(self):
    self.one.weight.data.copy_(torch.arange(576.0).view(24, 24))
    self.one.weight.data = self.one.weight.data.t().contiguous()


def data_of_which_a_part_is_left(self):
    self.one.weight.data[:, 0] = 1.0
    self.one.weight.data = self.one.weight.data[1:]


def parameter_turned(self):
    self.one.weight.data.copy_(torch.arange(576.0).view(24, 24))
    self.one.weight = nn.Parameter(self.one.weight.data.t())


def data_of_a_deep_copy_turned(self):
    self.one.weight.data.copy_(torch.arange(576.0).view(24, 24))
    self.one = copy.deepcopy(self.one)
    self.one.weight.data = self.one.weight.data.t()


def swapped(self):
    nn.init.ones_(self.one.weight)
    torch.utils.swap_tensors(self.one.weight, self.two.weight)


def swapped_for_what_was_computed(self):
    torch.utils.swap_tensors(self.one.weight, nn.Parameter(self.one.weight.data * 2))
    self.one.weight.data[0] = 1.0


def data_padded(self):
    self.one.weight.data = nn.functional.pad(self.one.weight.data, (0, 0, 0, 8))


@pytest.mark.parametrize(
    "write",
    [
        from_another,
        made_of_what_was_there,
        drawn_beside,
        data_computed,
        data_computed_and_converted,
        data_of_its_form,
        data_of_another,
        data_of_another_converted,
        data_of_its_form_written_before,
        data_turned,
        data_turned_and_copied,
        data_of_which_a_part_is_left,
        parameter_turned,
        data_of_a_deep_copy_turned,
        data_padded,
        swapped,
        swapped_for_what_was_computed,
    ],
)
def test_what_cannot_be_repeated_is_named_unless_somebody_else_says_the_values(write):
    with pytest.raises(ConfigError, match=r"parameter one\.weight was written under deferred_init .* pass init="):
        deferred(write)

    def fill(module):
        for parameter in module.parameters(recurse=False):
            parameter.fill_(2.0)

    with deferred_init():
        model = Written(write)
    assert (Sharded(model, init=fill).value("one.weight") == 2).all()
    if write is not swapped:  # the other one's are as lost
        assert torch.isfinite(
            deferred(lambda self: (write(self), nn.init.ones_(self.one.weight))).value("one.weight")
        ).all()


def test_data_in_another_form_is_no_loss():
    def write(self):
        nn.init.constant_(self.one.weight, 0.25)
        self.one.weight.data = self.one.weight.data.half().contiguous().float()
        self.two.weight.data = self.two.weight.data.clone()
        self.two.bias.data = nn.functional.pad(self.two.bias.data, (0, 0))

    assert (deferred(write).value("one.weight") == 0.25).all()


def test_what_is_drawn_is_rounded_as_a_conversion_and_back_rounds():
    values = deferred(lambda self: self.one.half().float()).value("one.weight")
    assert values.std() > 0
    assert torch.equal(values, values.half().float())


def test_writes_behind_a_conversion_or_a_deep_copy_count_whoever_makes_them():
    """Not a method of a module, as a rule, whose parts could be looked through for that memory."""
    with deferred_init():
        model = Written(lambda self: None)
        model.to(torch.float64).to(memory_format=torch.channels_last)
        model.one.weight.data.fill_(1.5)
        model.conv.weight.data.mul_(1e-4)
        other = copy.deepcopy(model).to(torch.float32)
        other.one.weight.data[0] = 2.0
        nn.init.zeros_(other.two.weight)
        both = nn.ModuleList([model, other])
    found = Sharded(both)
    assert (found.value("0.one.weight") == 1.5).all()
    assert (found.value("1.one.weight")[0] == 2.0).all()
    assert (found.value("1.one.weight")[1:] == 1.5).all()
    assert (found.value("1.two.weight") == 0.0).all()
    for number in range(2):
        assert 0 < found.value(f"{number}.conv.weight").abs().max() < 1e-4
        assert found.value(f"{number}.two.bias").std() > 0


def test_data_assigned_by_an_initialisation_that_is_called_again_is_no_loss():
    class Halved(nn.Linear):
        def reset_parameters(self):
            super().reset_parameters()
            self.bias.data = torch.full_like(self.bias.data, 0.5)

    with deferred_init():
        model = Halved(3, 3)
        model.reset_parameters()
    assert (Sharded(model).value("bias") == 0.5).all()


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


class Made(nn.Module):
    """A module that makes a parameter and initialises nothing."""

    def __init__(self, make) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.made = nn.Parameter(make())


def written_piece_by_piece():
    values = torch.zeros(4, 6)
    values[1] = torch.arange(6.0)
    values[2:].fill_(7.0)
    return values


def grown():
    values = torch.ones(4)
    return values.resize_(8)


def filled_from_memory_nobody_wrote():
    return torch.ones(4).copy_(torch.empty(4))


def one_half_written():
    values = torch.empty(8)
    values[:4] = 1.0
    return values


VALUES = {
    "ones": lambda: torch.ones(6),
    "a scalar computed": lambda: torch.ones([]) * math.log(1 / 0.07),
    "a list": lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "numpy": lambda: torch.from_numpy(np.arange(6.0)),
    "computed": lambda: torch.log(torch.arange(1.0, 9.0)).repeat(3, 1).t(),
    "bare memory, filled": lambda: nn.init.constant_(torch.empty(5), 2.0),
    "the old constructor, filled": lambda: torch.Tensor(5).fill_(2.0),
    "of a form": lambda: torch.zeros_like(torch.empty(3, 3)),
    "piece by piece": written_piece_by_piece,
    "another dtype": lambda: torch.linspace(0, 1, 7).to(torch.bfloat16),
    "large, all equal": lambda: torch.full((1200, 1000), 0.5),
    "none": lambda: torch.zeros(0),
}
NO_VALUES = {
    "bare memory": lambda: torch.empty(5),
    "the old constructor": lambda: torch.Tensor(5),
    "computed from bare memory": lambda: torch.empty(5) * 0,
    "one half": one_half_written,
    "grown": grown,
    "copied": filled_from_memory_nobody_wrote,
    "large, and not all equal": lambda: torch.arange(1200.0 * 1000),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_parameter_that_nobody_initialises_has_the_values_it_was_made_of(name):
    with deferred_init():
        model = Made(VALUES[name])
    assert model.made.is_meta
    found = Sharded(model)
    assert torch.equal(found.value("made").float(), VALUES[name]().float())
    assert found.value("inner.weight").std() > 0


@pytest.mark.parametrize("name", NO_VALUES)
def test_memory_that_nobody_wrote_is_never_taken_for_values(name):
    with deferred_init():
        model = Made(NO_VALUES[name])
    with pytest.raises(ConfigError, match=r"parameter made was built without storage.* pass init="):
        Sharded(model)


def test_what_was_made_out_of_sight_is_not_taken_for_values():
    outside = torch.ones(4)
    with deferred_init():
        model = Made(lambda: outside)
    with pytest.raises(ConfigError, match=r"parameter made was built without storage"):
        Sharded(model)


def test_a_storage_at_the_address_of_another_is_not_taken_for_it():
    watch = ValueWatch()
    for _ in range(3000):
        values = torch.ones(4)
        watch.computed("aten::ones", (), values)
        assert watch.has_values(values)
        del values
        assert not watch.has_values(torch.empty(4))
    assert len(watch._written) < 3000, "what is gone is forgotten"


def test_random_values_are_those_that_were_drawn():
    def drawn():
        torch.manual_seed(5)
        return torch.randn(1, 1, 64) * 0.02

    with deferred_init():
        model = Made(drawn)
    assert torch.equal(Sharded(model).value("made"), drawn())


def test_values_are_not_written_where_they_would_lie_otherwise():
    with deferred_init():
        model = Made(lambda: torch.arange(16.0).reshape(4, 4))
    model.made.data = model.made.data.t()
    with pytest.raises(ConfigError, match=r"parameter made was built without storage"):
        Sharded(model)


def test_a_scalar_can_take_the_place_of_another():
    def replace(self):
        self.made = nn.Parameter(torch.tensor(3.0))

    with deferred_init():
        model = Made(lambda: torch.tensor(2.0))
        replace(model)
    assert Sharded(model).value("made").item() == 3.0


def test_its_initialisation_wins_over_what_a_parameter_was_made_of_and_writes_come_after_that():
    class Initialised(Made):
        def __init__(self, make) -> None:
            super().__init__(make)
            self.reset_parameters()

        def reset_parameters(self):
            self.made.data[0] = 5.0

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Initialised(lambda: torch.ones(4))
            self.child.made.data.mul_(2.0)

    with deferred_init():
        model = Parent()
    assert Sharded(model).value("child.made").tolist() == [10.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("freeze", [True, False])
def test_an_embedding_made_of_vectors_has_them(kind, freeze):
    """They were drawn anew, in silence: the initialisation that such an embedding never calls was called for it."""
    vectors = torch.randn(1200, 1000)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = kind.from_pretrained(vectors, freeze=freeze)
            self.new = kind(5, 8)

    with deferred_init():
        model = nn.Sequential(Words())
    found = Sharded(model)
    assert torch.equal(found.value("0.known.weight"), vectors)
    assert found.value("0.new.weight").std() > 0


def test_with_an_init_of_its_own_a_model_has_none_of_the_values_it_was_made_of():
    with deferred_init():
        model = Made(lambda: torch.ones(4))

    def init(module):
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    with pytest.raises(ConfigError, match="parameter made was built without storage"):
        Sharded(model, init=init)


class Copied(nn.Module):
    """Layers that are copies of one, which was written into before; one copy is written into once more."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(24, 24), Made(lambda: torch.full((3,), 2.0)))
        layer[1].tied = layer[0].weight
        nn.init.constant_(layer[0].weight, 0.5)
        layer[0].bias.data.mul_(1e-3)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        nn.init.zeros_(layer[0].weight)
        nn.init.constant_(self.layers[1][0].weight, 4.0)
        self.layers.append(copy.deepcopy(self.layers[1]))


def test_a_deep_copy_has_what_was_written_into_the_original_before():
    with deferred_init():
        model = Copied()
    found = Sharded(model)
    for layer, expected in enumerate([0.5, 4.0, 0.5, 4.0]):
        assert (found.value(f"layers.{layer}.0.weight") == expected).all()
        assert found.value(f"layers.{layer}.0.bias").abs().max() < 1e-3
        assert (found.value(f"layers.{layer}.1.made") == 2.0).all()
        assert found.value(f"layers.{layer}.1.inner.weight").std() > 0


def test_a_parameter_that_was_converted_can_still_be_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(24, 24).to(torch.bfloat16)
            self.two = nn.Linear(24, 24)
            self.two.weight = self.one.weight

    with deferred_init():
        model = Tied()
    assert Sharded(model).value("one.weight").std() > 0
    assert model.two.weight is model.one.weight


def of_a_module_outside(self):
    template = nn.Linear(24, 24)
    nn.init.constant_(template.weight, 3.0)
    self.two.weight = template.weight
    self.two.weight.data.mul_(2)


def of_a_module_taken_out(self):
    nn.init.constant_(self.one.weight, 6.0)
    weight, self.one = self.one.weight, nn.Identity()
    self.two.weight = nn.Parameter(weight.detach(), requires_grad=False)


def tied_and_tied_no_longer(self):
    nn.init.constant_(self.one.weight, 5.0)
    self.two.weight = self.one.weight
    self.one.weight = nn.Parameter(torch.ones(24, 24))
    nn.init.constant_(self.two.weight, 6.0)


def in_each_others_place(self):
    nn.init.constant_(self.one.weight, 6.0)
    nn.init.constant_(self.two.weight, 1.0)
    self.one.weight, self.two.weight = self.two.weight, self.one.weight


@pytest.mark.parametrize(
    "write", [of_a_module_outside, of_a_module_taken_out, tied_and_tied_no_longer, in_each_others_place]
)
def test_a_parameter_takes_what_was_written_into_it_to_another_place(write):
    found = deferred(write)
    assert (found.value("two.weight") == 6.0).all()
    assert write in (of_a_module_outside, of_a_module_taken_out) or (found.value("one.weight") == 1.0).all()


def test_what_was_written_into_tied_parameters_is_repeated_once():
    def write(self):
        nn.init.constant_(self.one.weight, 2.0)
        self.two.weight = self.one.weight
        self.one.weight.data.mul_(3)
        self.two.weight.data.add_(1)

    assert (deferred(write).value("one.weight") == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_part_of_the_values_that_a_parameter_was_made_of_is_named(dtype):
    """It was an error of torch's, about sizes."""

    def part(self):
        self.made = nn.Parameter(torch.arange(16.0).view(4, 4))
        self.to(dtype)
        self.made = nn.Parameter(self.made[1:])

    with pytest.raises(ConfigError, match=r"parameter made was written under deferred_init"):
        deferred(part)
    assert (deferred(lambda self: (part(self), self.made.data.fill_(2.0))).value("made") == 2.0).all()


class Words(nn.Module):
    """An embedding and a head, one weight; `tied`: whose place the other one's weight takes."""

    def __init__(self, first, tied, when) -> None:
        super().__init__()
        kinds = {"embed": lambda: nn.Embedding(40, 16), "head": lambda: nn.Linear(16, 40, bias=False)}
        other = "head" if first == "embed" else "embed"
        setattr(self, first, kinds[first]())
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        setattr(self, other, kinds[other]())
        if when == "before":
            self.apply(self.initialise)
        getattr(self, tied).weight = getattr(self, "head" if tied == "embed" else "embed").weight
        if when == "after":
            self.apply(self.initialise)

    def initialise(self, module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
        if isinstance(module, nn.Embedding):
            nn.init.constant_(module.weight, 0.25)


class OwnWords(Words):
    def _init_weights(self, module) -> None:
        self.initialise(module)

    def apply(self, function):
        return super().apply(self._init_weights)


@pytest.mark.parametrize("first", ["embed", "head"])
@pytest.mark.parametrize("tied", ["embed", "head"])
@pytest.mark.parametrize("when", ["never", "before", "after"])
@pytest.mark.parametrize("kind", [Words, OwnWords])
def test_what_is_tied_has_the_values_of_that_whose_initialisation_came_last(first, tied, when, kind):
    """It was initialised as what comes first in the model, in silence."""
    torch.manual_seed(1)
    plain = kind(first, tied, when).head.weight.detach()
    with deferred_init():
        model = kind(first, tied, when)
    values = Sharded(model, units=list(model.layers)).value("head.weight")
    if when == "never":
        assert values.std().item() == pytest.approx(plain.std().item(), rel=0.2)
    else:
        assert torch.equal(values, plain)


def test_a_block_in_a_block_and_a_block_behind_it_write_as_one_would():
    """The first noted everything twice, and the second nothing that was made before it."""
    with deferred_init():
        one = nn.Linear(24, 24)
        with deferred_init():
            two = nn.Linear(24, 24)
            for module in (one, two):
                nn.init.constant_(module.weight, 2.0).data.mul_(3.0)
        nn.init.constant_(two.bias, 2.0).data.mul_(3.0)
    with deferred_init():
        one.weight.data.mul_(2.0)
        nn.init.constant_(one.bias, 0.1)
        one.half().float()
        three = copy.deepcopy(two)
        three.bias = one.bias
        four = nn.Linear(24, 24)
        four.weight = two.weight
    found = Sharded(nn.Sequential(one, two, three, four))
    for name, expected in {"0.weight": 12.0, "0.bias": 0.1, "1.weight": 6.0, "1.bias": 6.0, "2.weight": 6.0}.items():
        assert (found.value(name) == torch.tensor(expected).half().float()).all(), name
    assert found.model[2].bias is found.model[0].bias
    assert found.model[3].weight is found.model[1].weight


def test_what_another_thread_builds_meanwhile_is_built_as_ever():
    """Its parameters lost what was written into them there, in silence."""

    def build(built):
        built.append(nn.Linear(24, 24))
        nn.init.constant_(built[0].weight, 3.0)

    built: list[nn.Module] = []
    with deferred_init():
        model = nn.Linear(24, 24)
        thread = threading.Thread(target=build, args=(built,))
        thread.start()
        thread.join()
        both = nn.Sequential(model, *built)
    assert both[0].weight.is_meta
    assert not both[1].weight.is_meta
    found = Sharded(both)
    assert (found.value("1.weight") == 3.0).all()
    assert found.value("0.weight").std() > 0


def drawn_by_the_one_that_was_registered(self):
    weight = nn.Parameter(torch.zeros(30, 30))
    self.register_parameter("made", weight)
    nn.init.constant_(weight, 3.0)
    weight.data[2:4].mul_(torch.arange(30.0))


def drawn_by_those_in_a_list(self):
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    self.made = nn.ParameterList(weights)
    for weight in weights:
        nn.init.ones_(weight)


def filled_behind(self):
    values = torch.zeros(24)
    self.made = nn.Parameter(values)
    values[5:] = torch.arange(19.0)
    others = values.clone()
    self.one.bias = nn.Parameter(others)
    others[0] = 7.0
    self.two.bias.data = torch.eye(24)[3]
    self.two.bias.data[0] = 5.0


def bare_memory_filled_behind(self):
    self.made = nn.Parameter(torch.empty(24))
    values = torch.empty(3, 24)
    self.other = nn.Parameter(values[1])
    values[1].fill_(2.0)
    self.made.data.fill_(1.0)


@pytest.mark.parametrize(
    "write",
    [drawn_by_the_one_that_was_registered, drawn_by_those_in_a_list, filled_behind, bare_memory_filled_behind],
)
def test_what_is_written_into_the_memory_that_a_parameter_was_made_of_is_in_the_parameter(write):
    """It had the values of before, in silence."""
    plain = Written(write)
    found = deferred(write)
    changed = ("made", "other", *(("one.bias", "two.bias") if write is filled_behind else ()))
    for name, parameter in plain.named_parameters():
        if name.startswith(changed):
            assert torch.equal(found.value(name), parameter.detach()), name


def test_a_write_beyond_the_parameter_into_the_memory_it_was_made_of_is_named():
    def write(self):
        values = torch.zeros(2, 24)
        self.made = nn.Parameter(values[0])
        values.fill_(2.0)

    with pytest.raises(ConfigError, match=r"parameter made was written .* into the memory it was made of"):
        deferred(write)


def data_of_one_tensor(self):
    values = torch.arange(576.0).view(24, 24)
    self.one.weight.data = values
    self.two.weight.data = values


def parameters_of_one_tensor(self):
    values = torch.ones(600, 24)
    self.one.weight = nn.Parameter(values[:24])
    self.two.weight = nn.Parameter(values[23:47])


def parameter_of_a_resident_one(self):
    self.two.weight = RESIDENT.weight
    self.resident = RESIDENT


def parameter_kept_in_a_list(self):
    self.all = [nn.Parameter(torch.ones(3))]
    self.made = self.all[0]


RESIDENT = nn.Linear(24, 24)


@pytest.mark.parametrize(
    "write", [data_of_one_tensor, parameters_of_one_tensor, parameter_of_a_resident_one, parameter_kept_in_a_list]
)
def test_what_would_lie_in_one_memory_is_refused_as_it_is_in_a_plain_model(write):
    """They became two, in silence."""
    with deferred_init():
        model = Written(write)
    with pytest.raises(ConfigError, match=r"two parameters in one memory|is a view of parameter"):
        refuse_unfit(model)


def test_a_model_may_name_its_parameters_otherwise():
    checkpoint_wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    with deferred_init():
        model = nn.Sequential(checkpoint_wrapper.checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
    model = checkpoint_wrapper.checkpoint_wrapper(model)
    refuse_unfit(model)
    Sharded(model)


def test_parts_of_one_memory_that_have_nothing_in_common_are_not_refused():
    def write(self):
        values = torch.arange(1152.0).view(48, 24)
        self.one.weight.data, self.two.weight.data = values.chunk(2)
        self.three, self.four = (nn.Parameter(each) for each in torch.ones(8, 8).chunk(2, dim=1))
        self.shown = torch.ones(3)
        self.frozen = nn.Parameter(self.shown, requires_grad=False)

    with deferred_init():
        model = Written(write)
    refuse_unfit(model)
    found = Sharded(model)
    assert torch.equal(found.value("two.weight"), torch.arange(576.0, 1152.0).view(24, 24))
    assert (found.value("four") == 1.0).all()


def test_a_write_behind_the_block_is_named():
    """It was lost in silence."""
    with deferred_init():
        model = Written(lambda self: nn.init.ones_(self.one.weight))
    with deferred_init():
        model.one.weight.data[0] = 2.0
        nn.init.ones_(model.one.bias)
    model.requires_grad_(False).double()
    Sharded(model)
    with deferred_init():
        model = Written(lambda self: None)
    nn.init.zeros_(model.two.weight)
    with pytest.raises(ConfigError, match=r"parameter two\.weight was written behind deferred_init"):
        Sharded(model)
    Sharded(model, init=lambda module: [each.fill_(2.0) for each in module.parameters(recurse=False)])


def test_a_write_between_two_blocks_is_named_unless_nothing_is_left_of_it():
    """The second block took it for seen."""
    with deferred_init():
        model = Written(lambda self: None)
    nn.init.zeros_(model.two.weight)
    with deferred_init():
        model.three = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"parameter two\.weight was written behind deferred_init"):
        Sharded(model)
    with deferred_init():
        nn.init.ones_(model.two.weight)
    assert (Sharded(model).value("two.weight") == 1.0).all()


def test_memory_counts_only_as_long_as_the_parameter_is_as_it_was():
    """A parameter has memory of its own once it is converted."""
    with deferred_init():
        model = Written(parameters_of_one_tensor)
        model.one.bias.data = torch.ones(24)
    model.one.bias.data = model.one.bias.data.unsqueeze(0)
    refuse_unfit(model.half())


def test_what_is_written_into_memory_of_several_parameters_is_in_that_which_it_belongs_to():
    def write(self):
        values = torch.zeros(4, 24)
        self.made, self.other = nn.Parameter(values[:2]), nn.Parameter(values[2:])
        values[0].fill_(2.0)
        values[2:] = torch.arange(24.0)

    plain, found = Written(write), deferred(write)
    for name in ("made", "other"):
        assert torch.equal(found.value(name), plain.get_parameter(name).detach()), name


def test_what_is_assigned_to_the_data_of_a_deep_copy_may_be_written_later():
    """It was a KeyError."""

    def write(self):
        self.other, values = copy.deepcopy(self.one), torch.ones(24, 24)
        self.other.weight.data = values
        values[0] = 5.0

    assert torch.equal(deferred(write).value("other.weight"), Written(write).other.weight.detach())


@pytest.mark.parametrize("write", [lambda _: None, lambda self: nn.init.constant_(self.one.weight, 2.0)])
def test_what_is_tied_behind_the_block_has_the_values_of_that_which_is_put_there(write):
    """It was taken for one that had been written there, or had what was written into the one before."""

    def make(block):
        with block():
            model = Written(write)
            for std in (0.1, 0.2, 5.0):
                nn.init.normal_(model.two.weight, std=std)
                nn.init.normal_(model.two.weight[:8], std=std)
        model.one.weight = model.two.weight
        return model

    found = Sharded(make(deferred_init))
    assert found.value("one.weight").std().item() == pytest.approx(5.0, rel=0.2)


def test_a_block_does_not_look_at_what_others_have_made_unless_it_is_asked_for(monkeypatch):
    """A model that is built layer by layer, each in a block, took time by the square of them."""
    with deferred_init():
        model = Written(lambda self: None)
    looks = []
    monkeypatch.setattr(assigned, "all_written", lambda: looks.append(None) or all_written())
    with deferred_init():
        model.three = nn.TransformerEncoderLayer(8, 2, 8)
        nn.init.ones_(model.three.linear1.weight)
        model.three.norm1.weight.data[0] = 2.0
    assert not looks
    with deferred_init():
        nn.init.ones_(model.one.weight)
        nn.init.ones_(model.two.weight)
    assert len(looks) == 1
    assert (Sharded(model).value("two.weight") == 1.0).all()


class Scaled(nn.Module):
    """Layers of which a part is drawn once more by the layer, and a module that is drawn again behind the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.apply(self._init_weights)
        nn.init.normal_(self.layers[0][0].bias)

    def _init_weights(self, module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
        if isinstance(module, nn.Sequential):
            nn.init.normal_(module[1].weight, std=0.1)


def test_a_deep_copy_begins_with_what_is_drawn_for_its_original():
    """An average of a model, or a target network, began elsewhere than the model, in silence."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = Scaled()
            self.target = copy.deepcopy(self.online)
            self.third = copy.deepcopy(self.target)
            self.third.layers[0][0].reset_parameters()
            nn.init.normal_(self.third.layers[1][0].weight, std=0.1)
            nn.init.normal_(self.online.layers[0][0].bias)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3)

    with deferred_init():
        model = Both()
    found = Sharded(model)
    values = {name: found.value(name) for name, _ in model.named_parameters()}
    for name, each in values.items():
        parts = name.split(".", 1)
        # The layer of which a part was initialised again draws anew.
        again = ["layers.0.0.weight", "layers.0.1.weight", "layers.1.0.weight"]
        apart = ["layers.0.0.bias", *(again if parts[0] == "third" else [])]
        if parts[0] in ("target", "third"):
            assert torch.equal(each, values[f"online.{parts[1]}"]) == (parts[1] not in apart), name
        elif parts[0] == "encoder":
            assert torch.equal(each, values["encoder.layers.0." + name.split(".", 3)[3]]), name
    drawn = [each for name, each in values.items() if name.startswith("online.layers") and each.dim() > 1]
    assert len({each.sum().item() / each.std().item() for each in drawn}) == len(drawn)
    assert values["online.layers.1.1.weight"].std().item() == pytest.approx(0.1, rel=0.3)
    # In another runtime, too.
    with deferred_init():
        one = nn.Linear(8, 8)
        nn.init.normal_(one.weight)
        other = copy.deepcopy(one)
    found, copied = Sharded(one), Sharded(other)
    for name in ("weight", "bias"):
        assert torch.equal(found.value(name), copied.value(name)), name


class Reset(nn.Module):
    """A module whose constructor may initialise what it has made, or not."""

    def __init__(self, *given, called=True) -> None:
        super().__init__()
        self.made = nn.Parameter(torch.full((4,), 2.0))
        if called:
            self.reset_parameters(*given)

    def reset_parameters(self, value=7.0) -> None:
        nn.init.constant_(self.made, value)


def test_an_initialisation_that_the_constructor_does_not_call_or_calls_otherwise_is_not_what_counts():
    """It was called in any case, and without arguments, in silence."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.given, self.never = Reset(), Reset(0.5), Reset(called=False)
            self.own, self.own_given = nn.Linear(4, 4), nn.Linear(4, 4)
            self.own.apply(self._init_weights)
            self.own_given.apply(lambda module: self._init_weights(module, 3.0))
            self.other = nn.Linear(4, 4)
            del self.other.weight
            self.other.weight = nn.Parameter(torch.eye(4))

        def _init_weights(self, module, value=1.0) -> None:
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.constant_(module.weight, value)
                nn.init.constant_(module.bias, value)

    plain = Model()
    with deferred_init():
        model = Model()
    found = Sharded(model)
    for name, parameter in plain.named_parameters():
        if name != "other.bias":
            assert torch.equal(found.value(name), parameter.detach()), name


def test_buffers_stay_as_the_constructor_has_left_them():
    """Their module's initialisation is called for its parameters, and wrote them anew, in silence."""

    class Counting(nn.Linear):
        def __init__(self, *, called: bool) -> None:
            nn.Module.__init__(self)
            self.weight, self.bias = nn.Parameter(torch.empty(4, 4)), None
            self.register_buffer("seen", torch.empty(3))
            if called:
                self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)
            self.seen = torch.zeros(3)

    resident = nn.BatchNorm1d(4)
    resident.running_var.fill_(5.0)
    with deferred_init():
        model = nn.Sequential(nn.BatchNorm1d(4), Counting(called=True), Counting(called=False), resident)
        model[0].running_mean.fill_(2.0)
        model[1].seen.fill_(3.0)
        resident.bias = nn.Parameter(torch.ones(4))
    seen = model[1].seen
    Sharded(model)
    assert (model[0].running_mean == 2.0).all()
    assert (model[1].seen == 3.0).all()
    assert model[1].seen is seen
    assert (model[2].seen == 0.0).all()
    assert (resident.running_var == 5.0).all()


def test_a_constructor_may_compute_with_sparse_tensors():
    """torch's error was that they have no storage to look at."""
    with deferred_init():
        model = nn.Linear(4, 4)
        adjacent = torch.eye(4).to_sparse()
        adjacent.mul_(2.0)
        model.register_buffer("adjacent", adjacent)
        model.register_buffer("sums", torch.sparse.mm(adjacent, torch.ones(4, 1)))
    found = Sharded(model)
    assert found.value("weight").std() > 0
    assert torch.equal(model.adjacent.to_dense(), 2 * torch.eye(4))
    assert (model.sums == 2.0).all()


@pytest.mark.parametrize("tied", ["embed", "head"])
@pytest.mark.parametrize("kind", [Words, OwnWords])
def test_a_deep_copy_of_what_is_tied_begins_as_its_original(tied, kind):
    """It was initialised as what comes first in the copy."""
    first = "embed" if tied == "embed" else "head"
    with deferred_init():
        model = nn.ModuleList([kind(first, tied, "never")])
        model.append(copy.deepcopy(model[0]))
    found = Sharded(model)
    assert torch.equal(found.value("1.head.weight"), found.value("0.head.weight"))
    assert found.value("0.head.weight").std().item() == pytest.approx(
        16**-0.5 * 3**-0.5 if tied == "embed" else 1, rel=0.2
    )


def test_a_parameter_made_anew_of_the_one_before_was_not_written_behind_the_block():
    with deferred_init():
        model = Written(lambda self: nn.init.ones_(self.one.weight))
    with deferred_init():
        model.one.weight = nn.Parameter(model.one.weight.data)
        model.one.weight.data.mul_(3.0)
        nn.init.ones_(model.one.bias)
        model.one.bias = nn.Parameter(model.one.bias)
    found = Sharded(model)
    assert (found.value("one.weight") == 3.0).all()
    assert (found.value("one.bias") == 1.0).all()


def test_an_initialisation_that_puts_a_value_for_none_or_another_is_the_one_that_is_called_again():
    class Normed(nn.Linear):
        def reset_parameters(self, deviation=None, gain=1.0) -> None:
            deviation = deviation or self.in_features**-0.5
            gain = 0.5 * gain
            nn.init.normal_(self.weight, std=gain * deviation)
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
            nn.init.zeros_(self.bias)

    with deferred_init():
        model = Normed(8, 8)
    assert Sharded(model).value("weight").norm().item() == pytest.approx(1.0)


def test_a_parents_own_initialisation_goes_over_what_that_of_a_part_has_done():
    """The part's alone was called again, in silence."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(40, 40), nn.Linear(40, 40)
            self.apply(self._init_weights)

        def _init_weights(self, module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.1)
                nn.init.constant_(module.bias, 2.0)

    class Parent(nn.Module):
        def __init__(self, *, all_parts: bool) -> None:
            super().__init__()
            self.part, self.head = Part(), nn.Linear(40, 40)
            (self if all_parts else self.head).apply(self._init_weights)
            self.average = copy.deepcopy(self.part)
            if not all_parts:
                self.part.apply(self._init_weights)
                self.part.apply(self.part._init_weights)

        def _init_weights(self, module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.0)

    with deferred_init():
        model = nn.ModuleList([Parent(all_parts=True), Parent(all_parts=False)])
        model.append(copy.deepcopy(model[0]))
    found = Sharded(model)
    for number, expected in enumerate((1.0, 0.1, 1.0)):
        for name in ("part.one", "part.two", "average.one"):
            assert found.value(f"{number}.{name}.weight").std().item() == pytest.approx(expected, rel=0.1)
            assert (found.value(f"{number}.{name}.bias") == 2.0).all()
    for number in (0, 2):
        one = found.value(f"{number}.part.one.weight")
        assert torch.equal(one, found.value(f"{number}.average.one.weight"))
        assert torch.equal(one, found.value("0.part.one.weight"))


def test_a_parents_own_initialisation_leaves_the_buffers_of_what_is_present_alone():
    class Loud(nn.Module):
        def __init__(self, present) -> None:
            super().__init__()
            self.present, self.head = present, nn.Linear(4, 4)

        def _init_weights(self, module) -> None:
            for each in module.modules():
                if isinstance(each, nn.BatchNorm1d):
                    each.reset_parameters()

    present = nn.BatchNorm1d(4)
    present.running_mean.fill_(3.0)
    with deferred_init():
        model = Loud(present)
    Sharded(model)
    assert (present.running_mean == 3.0).all()
    assert present.num_batches_tracked is model.present.num_batches_tracked


def test_a_model_made_in_inference_mode_is_still_refused_by_name():
    with torch.inference_mode(), deferred_init():
        model = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"weight was made in torch\.inference_mode"):
        Sharded(model)
