"""What people do with a model beside calling it: useful, or refused with what to do. Never NaN in silence."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import operator
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles_garbage import collect
from doubles_models import Stack, mlp
from doubles_training import config_for
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import tiermem

MIB = 1 << 20


def offload(model: nn.Module, directory: Path, **settings) -> tiermem.Runtime:
    return tiermem.offload(model, config_for(directory, 8 * MIB, "forward", **settings))


def tokens() -> torch.Tensor:
    return torch.randint(0, 40, (2, 5))


def values(runtime: tiermem.Runtime) -> dict[str, torch.Tensor]:
    return {name: runtime.parameter(parameter) for name, parameter in runtime.model.named_parameters()}


def same_state(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], tensor) for name, tensor in right.items())


# Copies.


def test_deepcopy_is_refused_unless_gathered_and_then_gives_a_plain_model(tmp_path):
    model = Stack()
    plain = copy.deepcopy(model)
    x = tokens()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, "forward"), coalesce=0) as runtime:
        with pytest.raises(tiermem.TiermemError, match="gathered"):
            copy.deepcopy(model)
        with runtime.gathered(model.embed), pytest.raises(tiermem.TiermemError, match="gathered"):
            copy.deepcopy(model)  # a part of it is not enough
        with runtime.gathered(model):
            twin = copy.deepcopy(model)
        assert same_state(twin.state_dict(), plain.state_dict())
        twin(x).sum().backward()
        plain(x).sum().backward()
        assert torch.equal(twin.embed.weight.grad, plain.embed.weight.grad)
        assert runtime.gradient(model.embed.weight) is None, "the copy's gradients are its own"
        model(x).sum().backward()
        assert torch.equal(runtime.gradient(model.embed.weight), plain.embed.weight.grad)


def test_saving_a_module_is_refused_unless_gathered(tmp_path):
    model = mlp()
    plain = copy.deepcopy(model)
    with offload(model, tmp_path) as runtime:
        with pytest.raises(tiermem.TiermemError, match="pickled"):
            torch.save(model, io.BytesIO())
        buffer = io.BytesIO()
        with runtime.gathered(model):
            torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        x = torch.randn(3, 6)
        assert torch.equal(loaded(x), plain(x))


def test_an_average_of_the_weights_is_made_and_updated_while_gathered(tmp_path):
    model = mlp()
    plain = copy.deepcopy(model)
    with offload(model, tmp_path) as runtime:
        with pytest.raises(tiermem.TiermemError, match="AveragedModel"):
            AveragedModel(model)
        with runtime.gathered(model):
            average = AveragedModel(model)
        expected = AveragedModel(plain)
        optimizer, other = tiermem.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
        for _ in range(3):
            x = torch.randn(4, 6)
            model(x).sum().backward(), plain(x).sum().backward()
            optimizer.step(), other.step()
            other.zero_grad()
            with runtime.gathered(model):
                average.update_parameters(model)
            expected.update_parameters(plain)
        assert same_state(average.state_dict(), expected.state_dict())


# State dicts.


def test_state_dict_is_refused_unless_gathered(tmp_path):
    model = Stack()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offload(model, tmp_path) as runtime:
        for part in (model, model.layers[0], model.layers[0].up):
            with pytest.raises(tiermem.TiermemError, match=r"runtime\.gathered"):
                part.state_dict()
        with runtime.gathered(model):
            assert same_state(model.state_dict(), plain)
        with runtime.gathered(model.layers[0]):
            assert same_state(model.layers[0].state_dict(prefix="layers.0."), {})
        tiermem.AdamW(model.parameters()).state_dict()
        runtime.close(restore_model=True)
    assert same_state(model.state_dict(), plain)


def test_what_state_dict_gives_is_saved_whole_also_by_who_takes_a_storage_for_one_value(tmp_path):
    """Safetensors refuse such, and accelerate's `save_model` and `save_state` would leave out all but one of a unit."""
    model = mlp()
    model[0].weight.data = model[0].weight.detach().T.contiguous().T
    for name, dtype in (("complexes", torch.complex128), ("flags", torch.bool), ("codes", torch.int8)):
        setattr(model[2], name, nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False))
    model[2].scale, model[2].none = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0))
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offload(model, tmp_path, commits=False) as runtime:
        with runtime.gathered(model, write=True):
            state = model.state_dict()
            assert same_state(state, plain)
            assert all(state[name].dtype == tensor.dtype for name, tensor in plain.items())
            assert all(
                tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values() if tensor.numel()
            )
            assert all(value is model.get_parameter(name) for name, value in model.state_dict(keep_vars=True).items())
            del state["2.complexes"]  # safetensors know none of 128 bits
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "all.safetensors")
            state["2.scale"].fill_(2)
            del state
        assert runtime.parameter(model[2].scale) == 2, "it is the same memory"
        with runtime.gathered(model), torch.inference_mode():
            kept = model.state_dict()["0.bias"]
        assert not kept.is_inference()
        optimizer = tiermem.AdamW(model[0].parameters())
        model(torch.randn(2, 6)).sum().backward()
        with pytest.raises(tiermem.TiermemError, match="is still alive"):
            optimizer.step()
        del kept
        optimizer.step()
    assert same_state(
        load_file(tmp_path / "all.safetensors"), {name: plain[name] for name in plain if "comp" not in name}
    )


def test_tied_values_of_a_state_dict_are_saved_once(tmp_path):
    model = nn.ModuleDict({"words": nn.Embedding(40, 8), "head": nn.Linear(8, 40, bias=False)})
    model["head"].weight = model["words"].weight
    with offload(model, tmp_path) as runtime:
        with runtime.gathered(model):
            buffer, copied = io.BytesIO(), copy.deepcopy(model.state_dict())
            torch.save(model.state_dict(), buffer)
            state = model.state_dict()
            state["words.weight"].data = torch.zeros(40, 8)
            assert torch.equal(model.state_dict()["words.weight"], state["head.weight"])
            del state
    buffer.seek(0)
    for state in (copied, torch.load(buffer)):
        assert state["words.weight"].data_ptr() == state["head.weight"].data_ptr()


def test_parameters_change_places_by_what_state_dict_gives(tmp_path):
    """Values that were parts of a frame, but with storages of their own, were read when it had been written already."""

    def other(name: str) -> str:
        return f"{1 - int(name[0])}{name[1:]}"

    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offload(model, tmp_path) as runtime:
        with runtime.gathered(model, write=True):
            state = model.state_dict()
            for name, parameter in model.named_parameters():
                parameter.data = state[other(name)]
            del state
        assert same_state(values(runtime), {other(name): tensor for name, tensor in plain.items()})


def test_a_write_into_what_state_dict_gave_is_noticed_behind_gathered_too(tmp_path):
    """The parameter had it, until its bytes were read again."""
    model = mlp()
    with offload(model, tmp_path) as runtime:
        for mode in (True, False):  # behind the first looks, which compare bits
            with torch.set_grad_enabled(mode):
                model(torch.randn(2, 6))
        with runtime.gathered(model):
            state = model.state_dict()
        state["0.bias"].add_(1)
        del state
        with pytest.raises(tiermem.TiermemError, match=r"0\.bias was written in place while it was gathered"):
            model(torch.randn(2, 6))


def test_state_dict_after_close_is_refused_until_there_are_values_again(tmp_path):
    """`torch.save(model.state_dict())` below the with block is easily written, and would save NaN."""
    model = Stack()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offload(model, tmp_path):
        pass
    for part in (model, model.layers[0].up):
        with pytest.raises(tiermem.TiermemError, match="after its runtime was closed would be full of NaN"):
            part.state_dict()
    model.load_state_dict(plain, assign=True)
    assert same_state(model.state_dict(), plain)


@pytest.mark.parametrize("module_by_module", [False, True])
def test_load_state_dict_is_refused_unless_gathered_for_writing(module_by_module, tmp_path):
    torch.manual_seed(1)
    other = Stack().state_dict()
    torch.manual_seed(2)
    model = Stack()
    with offload(model, tmp_path) as runtime:
        before = values(runtime)
        with pytest.raises(tiermem.TiermemError, match="write=True"):
            model.load_state_dict(other)
        with pytest.raises(tiermem.TiermemError, match="assign"), runtime.gathered(model, write=True):
            model.load_state_dict(Stack().state_dict(), assign=True)
        assert same_state(values(runtime), before)
        if module_by_module:
            for name, layer in model.layers.named_children():
                prefix = f"layers.{name}."
                own = {key.removeprefix(prefix): value for key, value in other.items() if key.startswith(prefix)}
                with runtime.gathered(layer, write=True):
                    layer.load_state_dict(own)
        else:
            with runtime.gathered(model, write=True):
                model.load_state_dict(other)
        loaded = values(runtime)
        assert all(
            torch.equal(loaded[name], other[name]) for name in loaded if not module_by_module or "layers" in name
        )
        optimizer = tiermem.AdamW(model.parameters())
        model(tokens()).sum().backward()
        optimizer.step()


def test_reinitialising_while_gathered(tmp_path):
    model = Stack()
    with offload(model, tmp_path) as runtime:
        with runtime.gathered(model.layers[1], write=True):
            torch.manual_seed(3)
            model.layers[1].up.reset_parameters()
        torch.manual_seed(3)
        fresh = nn.Linear(12, 24)
        assert torch.equal(runtime.parameter(model.layers[1].up.weight), fresh.weight)
        assert torch.equal(runtime.master(model.layers[1].up.weight), fresh.weight)


# Conversions.


def test_an_embedding_that_scales_its_rows_in_forward_needs_to_be_gathered_for_writing(tmp_path):
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(40, 8, max_norm=1.0), nn.Linear(8, 8))

    plain, model, x = make(), make(), tokens()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    with offload(model, tmp_path) as runtime:
        with pytest.raises(tiermem.TiermemError, match=r"0\.weight was written in place"):
            model(x)
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            with runtime.gathered(model[0], write=True):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plain(x).square().mean().backward()
            other.step()
            other.zero_grad()
        assert same_state(values(runtime), plain.state_dict())


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda model: model.to(torch.bfloat16)])
def test_another_dtype_is_refused_by_the_next_call_and_undone(convert, tmp_path):
    model = Stack()
    x = tokens()
    expected = model(x).detach()
    with offload(model, tmp_path):
        convert(model)
        with pytest.raises(tiermem.TiermemError, match="param_dtype"):
            model(x)
        assert torch.equal(model(x), expected)


def to_new_parameters_that_are_placeholders(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach()))


@pytest.mark.parametrize(
    "replace",
    [
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="meta"),
        lambda model: model.embed.to("meta"),
        lambda model: model.layers[1].to("meta"),
        to_new_parameters_that_are_placeholders,
    ],
    ids=["to", "to_empty", "a tied part", "a layer", "placeholders"],
)
def test_parameters_replaced_by_ones_without_values_are_noticed_and_undone(replace, tmp_path):
    model = Stack()
    x = tokens()
    expected = model(x).detach()
    with offload(model, tmp_path) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        before = [id(parameter) for parameter in model.parameters()]
        replace(model)
        with pytest.raises(tiermem.TiermemError, match="replaced after offload by one without values"):
            model(x)
        assert [id(parameter) for parameter in model.parameters()] == before
        assert model.head.weight is model.embed.weight
        assert torch.equal(model(x), expected)
        model(x).square().mean().backward()
        optimizer.step()
        assert not torch.equal(model(x), expected)
        assert runtime.parameter(model.head.weight).isfinite().all()


@pytest.mark.parametrize("coalesce", [0, "auto"])  # "auto": all of the model is there when a part of it is called
def test_weights_tied_after_offload_are_an_error_and_parted_again(tmp_path, coalesce):
    model = nn.Sequential(nn.Embedding(40, 12), nn.Linear(12, 12), nn.Linear(12, 40, bias=False))
    x = tokens()
    expected = model(x).detach()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, "forward"), coalesce=coalesce) as runtime:
        own = model[2].weight
        model[2].weight = model[0].weight
        with pytest.raises(tiermem.TiermemError, match=r"2\.weight was replaced after offload by another parameter"):
            model(x)
        assert model[2].weight is own
        with runtime.gathered(model):
            model[2].weight = model[0].weight
            with pytest.raises(tiermem.TiermemError, match="tie weights before"):
                model(x)
        assert torch.equal(model(x), expected)


def test_to_empty_is_noticed_and_undone(tmp_path):
    model = Stack()
    x = tokens()
    expected = model(x).detach()
    with offload(model, tmp_path):
        model.layers[0].up.to_empty(device="cpu")
        with pytest.raises(tiermem.TiermemError, match="given other values"):
            model(x)
        assert torch.equal(model(x), expected)


# Weights computed from others, after offload: what is computed at once needs values.


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def old_spectral_norm(layer: nn.Linear) -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        nn.utils.spectral_norm(layer)


def old_weight_norm(layer: nn.Linear) -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        nn.utils.weight_norm(layer)


def pruned(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)


def parametrized(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled())


@pytest.mark.parametrize(
    "change",
    [
        pruned,
        old_weight_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ],
)
@pytest.mark.filterwarnings("ignore:.*whose values are paged out, and makes NaN of it:RuntimeWarning")
def test_what_was_computed_from_paged_out_weights_is_an_error_at_every_call(change, tmp_path):
    model = mlp()
    with offload(model, tmp_path):
        change(model[0])
        for _ in range(2):
            with pytest.raises(
                tiermem.TiermemError, match=r"is NaN: it was computed after offload from parameter 0\.weight"
            ):
                model(torch.randn(4, 6))


@pytest.mark.parametrize(
    ("change", "gathered"),
    [
        (pruned, True),
        (old_spectral_norm, False),
        (old_spectral_norm, True),
        (parametrizations.spectral_norm, True),
        (parametrizations.orthogonal, True),
        (parametrized, False),
        (parametrized, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*whose values are paged out, and makes NaN of it:RuntimeWarning")
def test_weights_computed_from_others_since_offload_train_as_in_plain_torch(change, gathered, tmp_path):
    plain = mlp()
    model = copy.deepcopy(plain)
    inputs = [torch.randn(4, 6) for _ in range(3)]
    with offload(model, tmp_path) as runtime:
        for trained in (plain, model):
            torch.manual_seed(1)  # what is drawn for the change
            with runtime.gathered(model[0], write=True) if gathered else contextlib.nullcontext():
                change(trained[0])
        optimizers = (torch.optim.AdamW(plain.parameters(), fused=True), tiermem.AdamW(model.parameters()))
        for x in inputs:
            losses = [trained(x).square().sum() for trained in (plain, model)]
            assert torch.equal(*losses)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(runtime.parameter(model[2].weight), plain[2].weight)


def test_what_converts_nothing_is_harmless(tmp_path):
    model = Stack()
    x = tokens()
    expected = model(x).detach()
    with offload(model, tmp_path):
        for convert in (nn.Module.cpu, nn.Module.float, nn.Module.share_memory, lambda m: m.to("cpu", torch.float32)):
            convert(model)
            assert torch.equal(model(x), expected)
        nn.DataParallel(model)(x)  # without GPUs it is a call


# Gradients in places where they are not looked for.


def test_a_gradient_that_would_be_ignored_is_an_error(tmp_path):
    model = mlp()
    model[0].requires_grad_(False)
    with offload(model, tmp_path) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        model[0].requires_grad_(True)
        model(torch.randn(2, 6)).sum().backward()
        assert model[0].weight.grad is not None
        with pytest.raises(tiermem.ConfigError, match="frozen when it was offloaded"):
            optimizer.step()
        model[0].requires_grad_(False)
        optimizer.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        optimizer.step()
        model[2].weight.grad = torch.zeros_like(model[2].weight)
        with pytest.raises(tiermem.ConfigError, match="assigned"):
            optimizer.step()
        assert runtime.gradient(model[2].weight) is None


@pytest.mark.parametrize("update", ["forward", "backward", "auto"])
@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_torchs_own_clipping_finds_no_gradients_and_says_what_to_use(clip, update, tmp_path):
    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, MIB, update)):
        optimizer = tiermem.AdamW(model.parameters())
        model(torch.randn(2, 6)).sum().backward()
        with pytest.raises(
            tiermem.TiermemError, match=r"finds no gradients.* Use optimizer.clip_grad_norm_\(max_norm\)"
        ):
            clip(model.parameters(), 1e-3)
        if update != "backward":
            assert optimizer.clip_grad_norm_(1e-3) > 1e-3
        optimizer.step()
        optimizer.zero_grad()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == 0, "there is nothing to clip"


@pytest.mark.parametrize("update", ["forward", "backward", "auto"])
def test_who_looks_for_a_gradient_that_plain_pytorch_would_have_is_warned(update, tmp_path):
    def found(model):
        return [parameter for parameter in model.parameters() if parameter.grad is not None]

    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, MIB, update)):
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(3):  # from the second on "backward" uses gradients up
            assert found(model) == []
            model(torch.randn(2, 6)).sum().backward()
            with pytest.warns(RuntimeWarning, match=r"Change them with p.register_hook") as seen:
                assert found(model) == [], "as in clipping by hand"
            assert {warning.filename for warning in seen} == {__file__}
            optimizer.step()
            with pytest.warns(RuntimeWarning, match="or was until a step used it"):
                assert found(model) == [], "as in wrappers of an optimizer, such as timm's Lookahead"
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:a hook registered by register_post_accumulate_grad_hook")
def test_a_hook_after_accumulation_that_finds_the_gradient_is_not_warned(tmp_path):
    """Called in `forward_backward`, it reads `p.grad` of parameters that have gradients of other micro-batches."""
    model, found = mlp(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: found.append(weight.grad.sum()))
    with offload(model, tmp_path) as runtime:
        runtime.forward_backward([torch.randn(2, 6) for _ in range(3)], lambda rows: model(rows).sum())
    assert len(found) == 3


def test_what_is_made_of_an_absent_parameter_has_no_gradient_of_its_own(tmp_path):
    model = mlp()
    with offload(model, tmp_path):
        model(torch.randn(2, 6)).sum().backward()
        other = nn.Module()
        other.weight = nn.Parameter(model[0].weight.detach())
        other.zero_grad()
        assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-3) == 0


def test_who_clips_in_its_step_or_only_measures_is_not_told(tmp_path):
    model = mlp()
    with offload(model, tmp_path):
        optimizer = tiermem.AdamW(model.parameters(), max_grad_norm=1e-3)
        model(torch.randn(2, 6)).sum().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == 0
        optimizer.step()
        assert optimizer.grad_norm > 1e-3
        optimizer.max_grad_norm = None
        model(torch.randn(2, 6)).sum().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf) == 0


@pytest.mark.parametrize("update", ["forward", "backward", "auto"])
def test_the_models_own_zero_grad_finds_nothing_to_forget_and_says_so(update, tmp_path):
    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, MIB, update)) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        model.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        with pytest.raises(
            tiermem.TiermemError, match=r"Module.zero_grad finds no gradients.* Use optimizer.zero_grad"
        ):
            model.zero_grad()
        with pytest.raises(tiermem.TiermemError, match=r"Module.zero_grad finds no gradients"):
            model[2].zero_grad()
        if update == "backward":
            optimizer.step()
        else:
            optimizer.zero_grad()
        assert runtime.gradient(model[0].weight) is None
        model.zero_grad()


@pytest.mark.parametrize("update", ["forward", "backward", "auto"])
def test_clearing_gradients_by_hand_is_refused_where_some_would_stay(update, tmp_path):
    """Of a layer, say, that is not to be trained in this step. Behind a step and before a backward nothing would."""
    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, MIB, update)):
        optimizers = [tiermem.AdamW(part.parameters()) for part in (model[:1], model[1:])]
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = None
            model(torch.randn(3, 6)).sum().backward()
            with pytest.raises(
                tiermem.TiermemError, match=r"p.grad = None finds no gradients.* Use optimizer.zero_grad"
            ):
                model[0].weight.grad = None
            for part, optimizer in zip((model[:1], model[1:]), optimizers, strict=True):
                optimizer.step()
                for parameter in part.parameters():
                    parameter.grad = None


@pytest.mark.parametrize("update", ["forward", "backward", "auto"])
def test_clearing_by_hand_what_was_assigned_to_grad_says_that_the_gradient_is_elsewhere(update, tmp_path):
    model = mlp()
    with tiermem.offload(model, config_for(tmp_path, MIB, update)):
        optimizer, weight = tiermem.AdamW(model.parameters()), model[0].weight
        model(torch.randn(3, 6)).sum().backward()
        weight.grad = torch.ones(weight.shape)
        with pytest.raises(tiermem.ConfigError, match=r"has a .grad, which would be ignored.*zero_grad\(\) first"):
            optimizer.step()
        for by in ("p.grad = None", "Module.zero_grad"):
            with pytest.raises(
                tiermem.TiermemError,
                match=f"{by} finds not the gradients, but what was assigned to p.grad: .* Use optimizer.zero_grad",
            ):
                model.zero_grad() if by == "Module.zero_grad" else setattr(weight, "grad", None)
        optimizer.zero_grad()
        assert weight.grad is None
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()


def test_forward_called_past_the_hooks_gives_nan(tmp_path):
    """Of a module that owns parameters; one that calls others as modules may be called so."""
    model = mlp()
    x = torch.randn(3, 6)
    with offload(model, tmp_path), torch.no_grad():
        with pytest.warns(RuntimeWarning, match="linear was given a parameter whose values are paged out"):
            assert torch.isnan(model[0].forward(x)).all()
        assert torch.equal(model.forward(x), model(x))


def test_vectors_of_parameters_are_made_while_gathered(tmp_path):
    model = mlp()
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    with offload(model, tmp_path) as runtime:
        with pytest.warns(RuntimeWarning, match="view was given a parameter whose values are paged out"):
            assert nn.utils.parameters_to_vector(model.parameters()).isnan().all(), "placeholders show"
        with runtime.gathered(model):
            assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), expected)


def test_a_parameter_that_is_printed_says_that_it_is_paged_out(tmp_path):
    model = mlp()
    plainly = repr(model[0].weight)
    with offload(model, tmp_path) as runtime:
        shown = f"size={tuple(model[0].weight.shape)}, dtype=torch.float32, requires_grad=True)"
        assert repr(model[0].weight) == f"Parameter containing:\ntensor(<paged out: see runtime.parameter(p)>, {shown}"
        assert "nan" not in f"{model[0].weight} {[*model.parameters()]}"
        with runtime.gathered(model):
            assert repr(model[0].weight) == plainly


@pytest.mark.parametrize("write", ["mul_", "zero_", "fill_", "copy_", "clamp_"])
def test_a_write_through_data_at_rest_is_an_error(tmp_path, write):
    model = mlp()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    given = {"copy_": [torch.ones(70, 6)], "zero_": []}.get(write, [2.0])
    with offload(model, tmp_path) as runtime:
        with pytest.raises(tiermem.TiermemError, match=f"was to be written by {write} while its values are paged out"):
            getattr(model[0].weight.data, write)(*given)
        assert not isinstance(model[0].weight.data, nn.Parameter)
        with runtime.gathered(model[0], write=True):
            getattr(model[0].weight.data, write)(*given)
        expected = getattr(before["0.weight"], write)(*given)
        assert torch.equal(runtime.parameter(model[0].weight), expected)


@pytest.mark.parametrize(
    "assign", [operator.iadd, operator.imul, operator.itruediv, operator.ipow, operator.iand, operator.ilshift]
)
def test_an_assignment_to_what_is_paged_out_is_an_error(tmp_path, assign):
    whole = assign in (operator.iand, operator.ilshift)
    model = mlp()
    model.mask = nn.Parameter(torch.ones(6, dtype=torch.int32), requires_grad=False)
    with offload(model, tmp_path):
        values = (model.mask if whole else model[0].weight).data
        with pytest.raises(tiermem.TiermemError, match="while its values are paged out"):
            assign(values, 2)


@pytest.mark.parametrize("place", [(0, 0), 0, slice(None), ...])
def test_writing_a_part_of_what_is_paged_out_is_an_error_at_once(tmp_path, place):
    """Also of one element, which torch lets through: all elements of a placeholder are in one place."""
    model = mlp()
    with offload(model, tmp_path), torch.no_grad():
        for values in (model[0].weight, model[0].weight.data):
            with pytest.raises(tiermem.TiermemError, match="was to be written by __setitem__ while its values are"):
                values[place] = 2.0


def test_who_computes_with_what_is_paged_out_is_told(tmp_path, recwarn):
    model = mlp()
    with offload(model, tmp_path), torch.no_grad():
        average = torch.zeros_like(model[0].weight)
        with torch.enable_grad():
            result = model(torch.ones(2, 6))
        for compute in (
            lambda: model[0].weight.norm(),
            lambda: torch.isnan(model[0].weight).any(),
            lambda: average.lerp_(model[0].weight, 0.1),
            lambda: torch.stack([model[0].bias, model[0].bias]),
            lambda: torch.ones(2, 6) @ model[0].weight.T,
            lambda: model[0].weight.data.mT,
            lambda: torch.block_diag(result, model[0].weight),  # not for a loss: it would have no graph
            lambda: model[0].weight.detach().clone(),
            lambda: model[0].weight.detach().cpu().numpy(),
            lambda: np.asarray(model[0].weight.data),
            lambda: average.mul_(0.9).add_(model[0].weight.detach(), alpha=0.1),
            lambda: average.mul_(0.9).add_(model[0].weight.data, alpha=0.1),
        ):
            advice = r"paged out, and makes NaN of it: use runtime.parameter.* no gradient .* and.* around backward"
            with pytest.warns(RuntimeWarning, match=advice) as caught:
                compute()
            assert [each.filename for each in caught] == [__file__]
        assert not recwarn.list
        model.to(torch.float32).cpu().float()
        print(model[0].weight, model[0].weight.numel(), model[0].weight.data.shape)
    assert not recwarn.list


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_at_rest_are_told_apart_by_their_addresses(dtype, tmp_path):
    """As people do who count tied parameters once, or ask whether a head is tied."""
    model = Stack()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    with offload(model, tmp_path, param_dtype=dtype):
        named = dict(model.named_parameters(remove_duplicate=False))
        for address in (lambda p: p.data_ptr(), lambda p: p.untyped_storage().data_ptr(), lambda p: p.data.data_ptr()):
            assert sum({address(p): p.numel() for p in named.values()}.values()) == numbers
            assert address(model.head.weight) == address(model.embed.weight)


def test_who_asks_a_parameter_at_rest_for_more_than_its_values_is_not_told(tmp_path):
    model = mlp()
    arrived = []
    with offload(model, tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = model[0].weight
        weight.retain_grad()
        assert not weight.is_shared()
        assert weight.is_same_size(torch.zeros(70, 6))
        assert weight.dim_order() == (0, 1)
        assert torch.result_type(weight, torch.zeros((), dtype=torch.float64)) is torch.float32
        # As it was found before there was `register_post_accumulate_grad_hook`; who computes otherwise is told.
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: arrived.append(1))
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(RuntimeWarning, match="expand_as was given a parameter whose values are paged out"):
            model[0].bias.expand_as(torch.ones(2, 70))
    assert arrived == [1]


def test_hooks_after_accumulation_see_the_gradient_only_if_they_were_there_first(tmp_path):
    model = mlp()
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
    with offload(model, tmp_path):
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
        model(torch.randn(2, 6)).sum().backward()
    assert seen == [True, False]


@pytest.mark.parametrize("update", ["auto", "step"])
def test_hooks_after_accumulation_are_told_that_they_see_each_backward_by_itself(update, tmp_path):
    """One that changed the gradient gave other numbers than in plain PyTorch, in silence."""
    model = mlp()
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, update)) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(2):  # one backward a step: nothing to be told
            model(torch.randn(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.clear()
        model(torch.randn(2, 6)).sum().backward()
        with pytest.warns(RuntimeWarning, match="the gradient of each backward of a step by itself"):
            model(torch.randn(2, 6)).sum().backward()
        assert torch.equal(runtime.gradient(model[0].weight), seen[0] + seen[1])
        model(torch.randn(2, 6)).sum().backward()  # once is enough


def without_a_word(parameter):
    parameter.grad.mul_(3)


class HookedFromTheStart(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_hook(lambda gradient: gradient * 2)
        self.taken_off = self.weight.register_hook(lambda gradient: gradient * 7)
        self.bias.register_post_accumulate_grad_hook(without_a_word)
        made = nn.Parameter(torch.ones(4))
        made.register_hook(lambda gradient: gradient * 5)
        self.made = made

    def forward(self, x):
        return super().forward(x) + self.made

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "made" in self._parameters:
            nn.init.ones_(self.made)


@pytest.mark.parametrize("build", [tiermem.deferred_init, lambda: torch.device("meta")])
def test_hooks_that_a_model_got_before_it_had_memory_see_its_gradients(build, tmp_path):
    with build():
        model = HookedFromTheStart()
    with offload(model, tmp_path) as runtime:
        model.taken_off.remove()
        model(torch.ones(3, 4)).sum().backward()
        for parameter, gradient in ((model.weight, 6), (model.bias, 9), (model.made, 15)):
            assert (runtime.gradient(parameter) == gradient).all()


# Function transforms.


def test_functional_calls_and_vmap_work_and_functional_gradients_are_refused(tmp_path):
    model = mlp()
    x = torch.randn(4, 6)
    with torch.no_grad():
        expected, ones = model(x), {name: torch.ones_like(p) for name, p in model.named_parameters()}
        other = torch.func.functional_call(model, ones, x)
    with offload(model, tmp_path):
        with torch.no_grad():
            assert torch.equal(torch.func.functional_call(model, ones, x), other)
            assert torch.allclose(torch.func.vmap(model)(x), expected)
        for transform in (torch.func.grad, torch.func.jacrev, lambda f: torch.func.vmap(torch.func.grad(f))):
            with pytest.raises(tiermem.TiermemError, match=r"torch\.func\.grad"):
                transform(lambda x: model(x).sum())(x)
        assert torch.equal(model(x), expected)


class WithSlope(nn.Linear):
    """Adds the slope of a function without parameters to its result."""

    functional = False

    def forward(self, x):
        result = super().forward(x)
        if self.functional:
            return result + torch.func.grad(lambda value: value.sin().sum())(result.detach())
        with torch.enable_grad():
            point = result.detach().requires_grad_()
            return result + torch.autograd.grad(point.sin().sum(), point)[0]


def test_a_functional_gradient_within_a_forward_is_torchs_error_and_one_of_autograd_works(tmp_path):
    model, x = nn.Sequential(WithSlope(6, 6), WithSlope(6, 6)), torch.randn(4, 6)
    expected = model(x)
    model[1].functional = True
    assert torch.allclose(model(x), expected)
    with offload(model, tmp_path):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            model(x)
        model[1].functional = False
        assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore:.*deprecated.*", "ignore::torch.jit.TracerWarning")
def test_what_records_a_model_records_it_gathered(tmp_path):
    model = mlp()
    x = torch.randn(4, 6)
    expected = model(x).detach()
    with offload(model, tmp_path) as runtime:
        for record in (lambda: torch.jit.trace(model, x), lambda: torch.export.export(model, (x,)).module()):
            with pytest.raises((RuntimeError, NotImplementedError)):
                record()
            with runtime.gathered(model):
                found = record()(x)
            assert torch.equal(found, expected)
        model(x).sum().backward()


# The end.


def test_a_model_whose_runtime_is_closed_says_so(tmp_path):
    model = mlp()
    x = torch.randn(2, 6)
    offload(model, tmp_path).close()
    with pytest.raises(tiermem.TiermemError, match="restore_model=True"):
        model(x)
    with pytest.raises(tiermem.ConfigError, match="no values"):
        offload(model, tmp_path)
    for parameter in model.parameters():
        parameter.data = torch.ones(parameter.shape)
    assert model(x).isfinite().all()
    with offload(model, tmp_path):
        assert model(x).isfinite().all()


def test_a_closed_run_is_continued_by_its_own_model(tmp_path):
    model = mlp()
    x = torch.randn(2, 6)
    with offload(model, tmp_path) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        model(x).sum().backward()
        optimizer.step()
        runtime.commit().wait()
        expected = model(x).detach()
    with tiermem.offload(model, config_for(tmp_path, 8 * MIB, "forward"), resume=True) as runtime:
        assert torch.equal(model(x), expected)
        runtime.close(remove=True)


def test_a_runtime_that_is_dropped_is_closed_with_a_warning(tmp_path):
    model = mlp()
    runtime = offload(model, tmp_path)
    optimizer = tiermem.AdamW(model.parameters())
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    held = [runtime]
    del runtime
    with pytest.warns(ResourceWarning, match="never closed"):
        held.clear()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(tiermem.TiermemError, match="restore_model=True"):
        model(torch.randn(2, 6))
    with pytest.raises(tiermem.TiermemError):
        optimizer.step()


def test_a_runtime_that_is_dropped_is_closed_where_warnings_are_errors(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: said.append(unraisable.exc_type))
    held = [offload(mlp(), tmp_path)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held.clear()
    assert said == [ResourceWarning]
    assert list(tmp_path.iterdir()) == []
    offload(mlp(), tmp_path).close()


def test_a_dropped_runtime_keeps_what_is_committed(tmp_path):
    model = mlp()
    runtime = offload(model, tmp_path)
    runtime.commit({"kept": True}).wait()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        del runtime
        collect()
    with tiermem.offload(mlp(), config_for(tmp_path, 8 * MIB, "forward"), resume=True) as runtime:
        assert runtime.committed == {"kept": True}
        runtime.close(remove=True)


# Processes.


class Rows(torch.utils.data.Dataset):
    """A data set whose workers are forked while the model, which it even refers to, is offloaded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), float(index))


def test_forked_data_loader_workers(tmp_path):
    model = mlp()
    plain = copy.deepcopy(model)
    with offload(model, tmp_path):
        optimizer, other = tiermem.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
        for _ in range(2):
            loader = DataLoader(Rows(model), batch_size=4, num_workers=2, multiprocessing_context="fork")
            for batch in loader:
                ours, theirs = model(batch).square().sum(), plain(batch).square().sum()
                assert torch.equal(ours, theirs)
                ours.backward(), theirs.backward()
                optimizer.step(), other.step()
                optimizer.zero_grad(), other.zero_grad()
