"""LoRA by the peft library on a frozen Llama: as in plain PyTorch, and nothing frozen is ever written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from doubles_combinations import in_turn
from doubles_models import small_llama
from doubles_pager import save_all
from doubles_training import PlainAdamW, Trainee, check, config_for, least_budget, offloaded, plain
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import tiermem
from tiermem.pager.page import Kind

VOCABULARY = 64


def llama() -> nn.Module:
    return small_llama(words=VOCABULARY, mlp_width=48, key_value_heads=4)


def adapters() -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.1)


def adapted(kind: str = "plain") -> nn.Module:
    model = llama()
    if kind == "checkpointed":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return peft.get_peft_model(model, adapters())


def of_adapters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(trainee: Trainee) -> None:
    optimizer = trainee.adamw(of_adapters(trainee.model), lr=1e-2, max_grad_norm=1.0)
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (2, 8))
        loss = trainee.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        trainee.note(loss)
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("update", "kind"), in_turn(["forward", "step", "backward"], ["plain", "checkpointed"]))
def test_the_numbers_of_plain_pytorch(kind: str, update: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return adapted(kind)

    check(offloaded(make, train, tmp_path, update=update, budget="tight"), plain(make, train))


def adapted_experts() -> nn.Module:
    """Experts are parameters, not modules: peft parametrizes them anew in every call."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(
        MixtralForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"], target_parameters=experts, r=2)
    )


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # of older peft, which adapts it all the same
@pytest.mark.parametrize("update", ["step", "backward"])
def test_adapters_of_experts(update: str, tmp_path: Path) -> None:
    check(offloaded(adapted_experts, train, tmp_path, update=update, budget="tight"), plain(adapted_experts, train))


def test_beside_a_device(tmp_path: Path) -> None:
    """The frozen part and what is trained of a layer are on the device together, in two frames."""
    settings = {"device": "simulated", "device_memory": "160KiB"}
    found = offloaded(adapted, train, tmp_path, update="forward", budget="generous", **settings)
    check(found, plain(adapted, train))


def test_only_adapters_have_state_and_nothing_frozen_is_written_after_the_beginning(tmp_path: Path) -> None:
    model = adapted()
    trained = sum(parameter.numel() for parameter in of_adapters(model))
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    budget = least_budget(model, tmp_path)
    assert budget < 4 * frozen, "the frozen base does not fit"
    with tiermem.offload(model, config_for(tmp_path, budget, "step")) as runtime:
        house = runtime._house
        assert sum(state.numel for state in house.states._units.values()) < trained + 64 * 3
        pager, generations = house.storage.pager, house.storage.extents.generations
        pages = {layout.key for layout in house.layouts if not layout.trainable}
        assert all(slot.trainable for layout in house.layouts if layout.trainable for slot in layout.slots)
        save_all(pager)
        before = {key: generations.current(key) for key in pages}
        written, read = runtime.statistics().total.bytes_written, runtime.statistics().total.bytes_read
        train(Trainee(model, tiermem.AdamW, runtime.gradient))
        save_all(pager)
        total = runtime.statistics().total
        assert {key: generations.current(key) for key in pages} == before
        assert all(key.kind is Kind.PARAM for key in pages)
        adapters_alone = 3 * sum(-(-nbytes // 4096) * 4096 for key, nbytes in house_pages(house) if key not in pages)
        assert 0 < total.bytes_written - written <= adapters_alone
        assert total.bytes_read - read > 3 * 4 * frozen, "what is frozen came from disk in every step"


def house_pages(house) -> list:
    pages = [page for shard in house.blueprint.shards for page in shard.pages()]
    states = [
        (key, house.states._units[key.unit].state_nbytes(key.tile))
        for key in house.storage.pager.residency()
        if key.kind is Kind.STATE
    ]
    return pages + states


def test_the_adapters_are_saved_and_found_again(tmp_path: Path) -> None:
    """`save_pretrained` of peft reads parameters, so they have to be there."""
    torch.manual_seed(1)
    model = adapted()
    with tiermem.offload(model, config_for(tmp_path, "4MiB", "forward")) as runtime:
        train(Trainee(model, tiermem.AdamW, runtime.gradient))
        with pytest.raises(tiermem.TiermemError, match=r"runtime\.gathered"):
            model.save_pretrained(tmp_path / "refused")
        with runtime.gathered(of_adapters(model)):
            model.save_pretrained(tmp_path / "saved", state_dict=trained_values(model))
        expected = {name: runtime.parameter(parameter) for name, parameter in model.named_parameters()}
    torch.manual_seed(1)
    found = peft.PeftModel.from_pretrained(llama(), tmp_path / "saved")
    assert {name for name, _ in found.named_parameters()} == set(expected)
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def trained_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_without_adapters_and_with_them_merged(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plainly = adapted().eval()
    for parameter in of_adapters(plainly):
        nn.init.normal_(parameter, std=0.1)
    model, tokens = copy.deepcopy(plainly), torch.randint(0, VOCABULARY, (2, 8))
    with tiermem.offload(model, config_for(tmp_path, "4MiB", "forward")) as runtime, torch.no_grad():
        with model.disable_adapter(), plainly.disable_adapter():
            assert torch.equal(model(tokens).logits, plainly(tokens).logits)
        with runtime.gathered(model, write=True):
            model.merge_adapter()
        plainly.merge_adapter()
        assert torch.equal(model(tokens).logits, plainly(tokens).logits)


def test_adapters_built_without_storage_are_given_their_own_beginning(tmp_path: Path) -> None:
    """transformers' initialisation knows no adapters, and would not have the second half of each begin with zeros."""
    torch.manual_seed(1)
    with tiermem.deferred_init():
        model = adapted()
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    with tiermem.offload(model, config_for(tmp_path, "4MiB", "forward")) as runtime:
        for layer in layers:
            assert not runtime.parameter(layer.lora_B["default"].weight).any()
            assert runtime.parameter(layer.lora_A["default"].weight).std() > 0
        assert not runtime.master(layers[0].lora_B["default"].weight).any()


@pytest.mark.parametrize("build", ["whole", "deferred"])
def test_adapters_put_on_a_model_that_is_offloaded_are_ordinary_parameters(build: str, tmp_path: Path) -> None:
    """For a base that never fits: its weights come from the files, adapters stay in memory with torch's AdamW."""

    def run(prepare: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        if build == "deferred":
            with tiermem.deferred_init():
                base = llama()
        else:
            base = llama()
        model = peft.get_peft_model(prepare(base), adapters())
        torch.manual_seed(2)
        for parameter in of_adapters(model):
            nn.init.normal_(parameter, std=0.1)
        trainee = Trainee(model, PlainAdamW, lambda p: p.grad)
        train(trainee)
        return [*trainee.noted, *(parameter.detach() for parameter in of_adapters(model))]

    torch.manual_seed(1)
    llama().save_pretrained(tmp_path / "base")
    runtimes = []

    def offload(base: nn.Module) -> nn.Module:
        base.requires_grad_(False)
        (tmp_path / "swap").mkdir()
        config = config_for(tmp_path / "swap", least_budget(base, tmp_path), "forward")
        runtimes.append(tiermem.offload(base, config, weights=tmp_path / "base"))
        return base

    found = run(offload)
    runtimes[0].close()
    expected = run(lambda _: LlamaForCausalLM.from_pretrained(tmp_path / "base").train())
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_adapters_put_on_an_offloaded_model_are_saved_and_merged_while_it_is_gathered(tmp_path: Path) -> None:
    """Adapters are among the model's parameters then, and nobody's pages."""
    torch.manual_seed(1)
    base = llama()
    other, another = copy.deepcopy(base), copy.deepcopy(base)
    plainly = peft.get_peft_model(other, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()
    for parameter in of_adapters(plainly):
        nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, VOCABULARY, (2, 8))
    with tiermem.offload(base, config_for(tmp_path, "4MiB", "forward")) as runtime, torch.no_grad():
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()
        for parameter, values in zip(of_adapters(model), of_adapters(plainly), strict=True):
            parameter.copy_(values)
        with runtime.gathered(model):
            model.save_pretrained(tmp_path / "saved")
        with runtime.gathered(base, write=True):
            merged = model.merge_and_unload()
        found = merged(tokens).logits
        with pytest.raises(tiermem.ConfigError, match="does not belong"), runtime.gathered(plainly):
            pass
    saved = peft.PeftModel.from_pretrained(another, tmp_path / "saved").eval()
    assert torch.equal(found, saved.merge_and_unload()(tokens).logits)
