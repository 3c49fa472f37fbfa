"""Models with weights, without, and half of each become the same pages."""

from __future__ import annotations

import copy

import pytest
import torch
from doubles_garbage import collect
from doubles_pager import MemoryPager
from doubles_sharded import Sharded, same
from torch import nn

from tiermem.errors import ConfigError, TiermemError
from tiermem.zero3.deferred import deferred_init
from tiermem.zero3.initialise import is_marked, mark
from tiermem.zero3.lend import copies, give
from tiermem.zero3.materialize import Materializer, plan_layouts
from tiermem.zero3.placeholder import Placeholders, is_placeholder
from tiermem.zero3.shards import shards_of
from tiermem.zero3.units import find_units
from tiermem.zero3.writes import all_written

transformers = pytest.importorskip("transformers")


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


def test_weights_of_a_present_model_move_out():
    model = small()
    plain = copy.deepcopy(model)
    sharded = Sharded(model, dtype=torch.bfloat16)
    for name, parameter in plain.named_parameters():
        assert same(sharded.value(name), parameter.detach().bfloat16())
        _, slot = sharded.slots[name]
        assert same(sharded.masters[slot.parameter].view(parameter.shape), parameter.detach())
        placeholder = model.get_parameter(name)
        assert placeholder.shape == parameter.shape
        assert placeholder.dtype == torch.bfloat16
        assert is_placeholder(placeholder)
    assert sharded.leased() == []


def test_one_unit_at_a_time():
    """While a unit is written, the earlier ones have lost their storage."""
    present = []
    original = Sharded.store_master

    class Watching(Sharded):
        def store_master(self, unit, parameter, values):
            collect()
            present.append(sum(p.device.type == "cpu" and p.untyped_storage().nbytes() > 8 for p in model.parameters()))
            original(self, unit, parameter, values)

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(6)))
    Watching(model)
    assert max(present) == 2


def test_deferred_init_keeps_ties_subclasses_and_buffers():
    class Special(nn.Parameter):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8)
            self.head.weight = self.embed.weight
            shared = nn.Parameter(torch.ones(3), requires_grad=False)
            self.one, self.two = shared, shared
            self.special = Special(torch.ones(2))
            self.special.note = "kept"
            self.register_buffer("table", torch.arange(5))

    with deferred_init():
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert model.one is model.two
    assert not model.one.requires_grad
    assert type(model.special) is Special
    assert model.special.note == "kept"
    assert model.table.tolist() == [0, 1, 2, 3, 4]
    assert not nn.Linear(2, 2).weight.is_meta


def test_absent_model_is_initialised_by_reset_parameters():
    with deferred_init():
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.LSTM(9, 4), nn.MultiheadAttention(4, 2))
    identities = [id(p) for p in model[0].parameters()]
    sharded = Sharded(model)
    assert [id(p) for p in model[0].parameters()] == identities
    for name, _ in model.named_parameters():
        assert torch.isfinite(sharded.value(name)).all(), name
    assert torch.isfinite(model[2](model[1](model[0](torch.randn(3, 6))))[0]).all()


def test_init_is_called_for_modules_that_own_parameters():
    with deferred_init():
        model = small()
    called = []

    def init(module):
        called.append(module)
        for parameter in module.parameters(recurse=False):
            parameter.fill_(2.0)

    sharded = Sharded(model, init=init)
    assert called == [model[0], model[1], model[2]]
    assert (sharded.value("2.weight") == 2).all()


def test_parameter_nobody_initialises_is_named():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.secret = nn.Parameter(torch.empty(3))

    with deferred_init():
        model = Bare()
    with pytest.raises(ConfigError, match="secret"):
        Sharded(model)


class ComputingAgain(nn.Linear):
    """As a parametrized layer: its weight is computed of what is not there yet."""

    built = False

    def reset_parameters(self) -> None:
        if self.built:
            torch.randn(3, 3) + torch.empty(3, 3, device="meta")


def test_values_that_a_module_has_beside_absent_ones_stay():
    """Its initialisation, which is called for those, writes all of them."""
    pretrained, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    for parameter in (*pretrained.parameters(), *tied.parameters()):
        nn.init.constant_(parameter, 7.0)
    with deferred_init():
        pretrained.bias = nn.Parameter(torch.full((4,), 3.0))
        tied.bias = pretrained.bias
        model = nn.Sequential(pretrained, tied, nn.Linear(4, 4))
    sharded = Sharded(model)
    assert (sharded.value("0.weight") == 7.0).all()
    assert (sharded.value("0.bias") == 3.0).all()
    assert (sharded.value("1.weight") == 7.0).all()
    assert sharded.value("2.weight").std() > 0


class Parent(nn.Module):
    """Writes into its parts, too: by `reset_parameters`, or by `_init_weights`."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(4))
        self.one, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4)
        if own:
            self._init_weights = self.write
            self.write(self)
        else:
            self.reset_parameters()

    def write(self, module) -> None:
        if module is self:
            self.reset_parameters()
        elif isinstance(module, nn.BatchNorm1d):
            module.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)


@pytest.mark.parametrize("own", [False, True])
def test_values_that_parts_have_stay_as_a_parent_initialises_its_own(own):
    with deferred_init():
        model = nn.Sequential(Parent(own), nn.Linear(4, 4))
    model[0].one.weight = nn.Parameter(torch.full((4, 4), 3.0))
    model[0].two = nn.BatchNorm1d(4)
    model[0].two.running_var.fill_(7.0)
    sharded = Sharded(model, units=[model[0].one, model[0].two, model[0]])
    assert (sharded.value("0.own") == 0.5).all()
    assert (sharded.value("0.one.weight") == 3.0).all()
    assert (sharded.value("0.two.weight") == 1.0).all()
    assert (model[0].two.running_var == 7.0).all()
    if own:
        assert (sharded.value("0.one.bias") == 0.5).all()
    assert sharded.value("1.weight").std() > 0


def test_an_error_of_an_initialisation_says_what_it_was_about():
    """torch's own speaks of devices only, as for spectral_norm under deferred_init."""
    with deferred_init():
        model = nn.Sequential(ComputingAgain(3, 3))
    model[0].built = True
    with pytest.raises(RuntimeError, match="device") as caught:
        Sharded(model)
    assert caught.value.__notes__[0].startswith("raised while 0 (ComputingAgain) was given values")
    assert "Pass weights= or init=" in caught.value.__notes__[0]


def test_whether_values_were_made_is_looked_at_in_pieces(monkeypatch):
    """An answer for each element of a large embedding would be half a gigabyte beside the budget."""
    asked, isnan = [], torch.isnan
    monkeypatch.setattr(torch, "isnan", lambda values: asked.append(values.numel()) or isnan(values))
    values = mark(torch.empty(1000, 1000))
    values.view(-1)[:-1] = 0.0
    assert is_marked(values)
    assert sum(asked) == values.numel()
    assert max(asked) <= values.numel() // 2


def test_meta_buffer_is_initialised_or_named():
    with torch.device("meta"):
        model = small()
    Sharded(model)
    assert (model[1].running_var == 1).all()

    class Table(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("table", torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(Table())
    with pytest.raises(ConfigError, match=r"0\.table"):
        Sharded(model)
    with torch.device("meta"):
        model = Table()
    with pytest.raises(ConfigError, match="buffer table is on the meta device"):
        Sharded(model)


class Shown(nn.Linear):
    """Says how its buffer gets values."""

    def __init__(self, make, write=lambda _: None) -> None:
        self.write = lambda _: None
        super().__init__(2, 2)
        self.register_buffer("shown", make())
        self.write = write

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.write(self)


FORMS = {
    **{
        str(dtype): lambda dtype=dtype: torch.ones(4, dtype=dtype)
        for dtype in (torch.bool, torch.uint8, torch.uint32, torch.int8, torch.int64, torch.bfloat16, torch.complex64)
    },
    "float8": lambda: torch.empty(4, dtype=torch.float8_e4m3fn),
    "sparse": lambda: torch.sparse_coo_tensor(torch.zeros(2, 1), torch.ones(1), (2, 2), check_invariants=False),
    "int4": lambda: torch.empty(4, dtype=torch.int4),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, also where it is told not to check
@pytest.mark.parametrize("form", sorted(FORMS))
def test_meta_buffer_of_any_kind_that_nobody_wrote_is_named(form):
    with torch.device("meta"):
        model = nn.Sequential(Shown(FORMS[form]))
    with pytest.raises(ConfigError, match=r"buffer 0\.shown is on the meta device.*deferred_init"):
        Sharded(model)


@pytest.mark.parametrize(
    ("write", "values"),
    [
        (lambda module: module.shown.zero_(), [False, False]),
        (lambda module: module.shown.data.copy_(torch.tensor([True, False])), [True, False]),
        (lambda module: module.shown.data.zero_(), [False, False]),
        (lambda module: module.shown.numpy().fill(False), [False, False]),
        (lambda module: setattr(module, "shown", torch.zeros(2, dtype=torch.bool)), [False, False]),
    ],
)
def test_meta_mask_that_is_written_is_taken_as_it_is(write, values):
    """However that is done: what `data.zero_()` leaves was taken for what nobody has written."""
    with torch.device("meta"):
        model = nn.Sequential(Shown(lambda: torch.ones(2, dtype=torch.bool), write))
    Sharded(model)
    assert model[0].shown.tolist() == values


class Masked(nn.Linear):
    """Says how a mask that is a parameter gets values."""

    def __init__(self, mask, write=lambda _: None) -> None:
        super().__init__(2, 2)
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.write = write

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "mask" in self._parameters:
            with torch.no_grad():
                self.write(self.mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.int8, torch.complex64])
def test_meta_parameter_of_any_kind_that_nobody_wrote_is_named(dtype):
    """A mask became all False."""
    with torch.device("meta"):
        model = nn.Sequential(Masked(torch.ones(2, dtype=dtype)))
    with pytest.raises(ConfigError, match=r"parameter 0\.mask was built without storage.*pass init="):
        Sharded(model)


@pytest.mark.parametrize("write", [lambda mask: mask.zero_(), lambda mask: mask.copy_(torch.tensor([True, False]))])
def test_meta_parameter_that_is_a_mask_and_is_written_is_taken_as_it_is(write):
    with torch.device("meta"):
        model = nn.Sequential(Masked(torch.ones(2, dtype=torch.bool), write))
    expected = torch.ones(2, dtype=torch.bool)
    write(expected)
    assert torch.equal(Sharded(model).value("0.mask"), expected)


@pytest.mark.parametrize("values", [[-128, 127], [float("nan"), 1.0]])
def test_what_a_parameter_was_made_of_may_look_like_nothing(values):
    """The least of int8 was taken for memory that nobody wrote."""
    dtype = torch.int8 if values[0] == -128 else torch.float32
    with deferred_init():
        model = nn.Sequential(Masked(torch.tensor(values, dtype=dtype)))
    assert str(Sharded(model).value("0.mask").tolist()) == str(values)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "modernbert", "camembert"])
def test_absent_hugging_face_model_has_the_distribution_of_a_present_one(kind):
    make = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
            )
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
        ),
        "camembert": lambda: (
            transformers.CamembertForCausalLM(  # has the head, which is tied, before what it is tied to
                transformers.CamembertConfig(
                    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
                )
            )
        ),
        "modernbert": lambda: transformers.ModernBertForMaskedLM(  # initialises the head, which is then tied, otherwise
            transformers.ModernBertConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
            )
        ),
    }[kind]
    torch.manual_seed(0)
    plain = make()
    with deferred_init():
        model = make()
    sharded = Sharded(model)
    for name, parameter in plain.named_parameters():
        value = sharded.value(name)
        if parameter.numel() >= 256:
            assert 0.7 < value.std() / parameter.std() < 1.4, name
        elif parameter.std() == 0:
            assert same(value, parameter.detach()), name


def test_weights_are_streamed_in():
    plain = small()
    values = dict(plain.named_parameters())

    class Source:
        def dtype_of(self, names, own):
            return own

        def fill(self, names, into):
            into.copy_(values[names[0]].detach())
            return True

    with deferred_init():
        model = small()
    sharded = Sharded(model, weights=Source())
    for name, parameter in plain.named_parameters():
        assert same(sharded.value(name), parameter.detach())


def test_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="no parameters"):
        find_units(nn.ReLU())


def test_lent_for_writing_reports_what_changed():
    model = small()
    sharded = Sharded(model)
    written = []
    with sharded.lend([0], written=lambda unit, slot, values: written.append((slot.names[0], values.clone()))):
        with torch.no_grad():
            model[0].weight.fill_(3.0)
    assert [name for name, _ in written] == ["0.weight"]
    assert (written[0][1] == 3).all()
    assert (sharded.value("0.weight") == 3).all()


def test_written_placeholder_is_noticed():
    model = small()
    Sharded(model)
    with pytest.raises(TiermemError, match="write=True"), torch.no_grad():
        model[0].weight.zero_()
    with pytest.warns(RuntimeWarning, match="numpy was given a parameter whose values are paged out"):
        values = model[0].weight.data.numpy()
    values.fill(0.0)
    with pytest.raises(TiermemError, match="write=True"):
        model(torch.randn(2, 6))
    assert torch.isfinite(model(torch.randn(2, 6))).all()


def test_write_into_a_parameter_lent_for_reading_is_noticed():
    class Clamping(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Clamping(3, 3)
    sharded = Sharded(model)
    with pytest.raises(TiermemError, match="write=True"):
        model(torch.randn(2, 3))
    assert sharded.leased() == []


def test_pages_that_exist_are_adopted():
    with deferred_init():
        model = small()
        model.kept = nn.Parameter(torch.arange(3.0))
    divided = find_units(model)
    layouts = plan_layouts(divided, dtype=torch.bfloat16, tile_numel=2048)
    materializer = Materializer(MemoryPager(), Placeholders(), lambda unit, parameter, values: None)
    parameters = materializer.adopt(divided, shards_of(layouts, 0, whole=False, copies=1))
    assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]
    assert all(p.dtype == torch.bfloat16 and p.requires_grad and is_placeholder(p) for p in parameters)
    # What was to be written into them takes memory.
    assert not any(module in model.modules() for module, _, _ in all_written())


def test_gradient_is_read_back_across_tiles():
    model = nn.Linear(90, 70)
    sharded = Sharded(model)
    assert sharded.scheduler.gradients.read(0) is None
    model(torch.ones(1, 90)).sum().backward()
    assert same(sharded.scheduler.gradients.read(0), torch.ones(70, 90))
    assert same(sharded.scheduler.gradients.read(1), torch.ones(70))
    assert sharded.leased() == []


def test_model_has_its_values_again_after_restore():
    model = small()
    plain = copy.deepcopy(model)
    sharded = Sharded(model)
    sharded.scheduler.close()
    give(copies(sharded.gatherer, sharded.layouts, sharded.parameters, needed=sharded.unit_needed))
    x = torch.randn(5, 6)
    assert same(model(x).detach(), plain(x).detach())
    assert sharded.leased() == []


def test_what_the_models_own_initialisation_leaves_out_is_as_its_module_initialises_it():
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.norm = nn.LayerNorm(16)
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 3.0)

    with deferred_init():
        model = Partial()
    sharded = Sharded(model)
    assert (sharded.value("linear.weight") == 3.0).all(), "the model's own comes last"
    assert 0 < sharded.value("linear.bias").abs().max() <= 0.25, "Linear's own: uniform within 1 / sqrt(16)"
    assert (sharded.value("norm.weight") == 1).all()
    assert (sharded.value("norm.bias") == 0).all()
