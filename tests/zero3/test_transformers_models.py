"""Unmodified Hugging Face models, tiny and random."""

from __future__ import annotations

import pytest
import torch
from doubles_sharded import Sharded, compare

from tiermem.zero3.deferred import deferred_init

transformers = pytest.importorskip("transformers")

COMMON = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(**extra):
    config = transformers.LlamaConfig(**COMMON, intermediate_size=24, num_key_value_heads=1, **extra)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2))


def mixtral():
    config = transformers.MixtralConfig(
        **COMMON, intermediate_size=24, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def qwen3():
    config = transformers.Qwen3Config(**COMMON, intermediate_size=24, num_key_value_heads=1, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "qwen3": qwen3,
    "t5": t5,
}


def step(model):
    tokens = torch.randint(0, 64, (2, 7))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("name", MODELS)
def test_same_gradients(name, checkpointing):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    torch.manual_seed(0)
    reference = MODELS[name]()
    reference.load_state_dict(model.state_dict())
    reference.train()
    if checkpointing is not None:
        reference.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    sharded = compare(model, step, reference=reference, early=True)
    assert sharded.gatherer.statistics().lingering == 0
    assert len(sharded.divided.units) >= 4


def test_a_tied_weight_that_the_head_has_first_is_initialised_as_an_embedding_is():
    """Its padding was drawn, as the head's would be."""
    with deferred_init():
        model = transformers.CamembertForMaskedLM(
            transformers.CamembertConfig(
                vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
            )
        )
    assert next(iter(dict(model.named_parameters(remove_duplicate=False)))).startswith("lm_head")
    values = Sharded(model).value("lm_head.decoder.weight")
    assert not values[model.config.pad_token_id].any()
    assert values[2:].std().item() == pytest.approx(0.02, rel=0.2)
