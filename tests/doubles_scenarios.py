"""Models and training scripts of ordinary life, for tests that compare offloaded training with plain training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from doubles_models import Block, Stack, mlp
from doubles_training import Make, Script, Trainee
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

STEPS = 4


class Scenario(NamedTuple):
    make: Make
    script: Script
    units: object = None


def loop(batch: Callable[[nn.Module], torch.Tensor], steps: int = STEPS, **settings) -> Script:
    """The plain loop: forward, backward, step; losses noted."""

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), **({"lr": 1e-2} | settings))
        for _ in range(steps):
            loss = batch(trainee.model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trainee.note(loss)

    return script


def tokens_batch(model: nn.Module) -> torch.Tensor:
    return model(torch.randint(0, 40, (2, 5))).square().mean()


def rows_batch(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 6)).square().sum()


class Wide(nn.Module):
    """Layers of a few tiles each, at the smallest tile size."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Checkpointed(nn.Module):
    """Layers that are computed again for backward; the least budgets hold one of them, not two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(40), nn.Linear(40, width), nn.GELU(), nn.Linear(width, 40)) for width in (80, 96)
        )

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def checkpointed_batch(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(3, 40)).square().mean()


def wide_batch(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(3, 48)).square().mean()


class Twice(nn.Module):
    """One layer used two times, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(16), Block(16)])

    def forward(self, x):
        first, second = self.layers
        return first(second(torch.tanh(first(x))))


def frozen() -> nn.Module:
    model = Stack()
    model.layers[1].requires_grad_(False)
    model.layers[0].up.weight.requires_grad_(False)
    model.shift.requires_grad_(False)
    return model


class Branches(nn.Module):
    """Each call takes one branch; the others get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.layers = nn.ModuleList([Block(16), Block(16), Block(16)])

    def forward(self, x, branch):
        return self.layers[branch](self.first(x))


def branches_script(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for branch in (0, 1, 1, 0, 2, 2, 0):
        loss = trainee.model(torch.randn(4, 6), branch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trainee.note(loss)


def partial_gradients_script(trainee: Trainee) -> None:
    """Parts of a unit without gradient in some steps."""
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for number in range(5):
        block = trainee.model.layers[0]
        x = torch.randn(4, 48)
        loss = (block(x) if number % 2 else block.up(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trainee.note(loss)


class Regularised(nn.Module):
    """Dropout and a running mean: training and evaluation differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3)) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def evaluation_script(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for number in range(STEPS):
        trainee.model.train()
        loss = trainee.model(torch.randn(8, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trainee.note(loss)
        trainee.model.eval()
        with torch.inference_mode() if number % 2 else torch.no_grad():
            trainee.note(trainee.model(torch.randn(8, 12)))


def early_evaluation_script(trainee: Trainee) -> None:
    """Evaluation between backward and step: the values before the update are asked for."""
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens_batch(trainee.model).backward()
        with torch.no_grad():
            trainee.note(tokens_batch(trainee.model))
        optimizer.step()
        optimizer.zero_grad()


class Interrupted(nn.Module):
    """Raises in the middle of forward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(3))
        self.fail_at = -1

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number == self.fail_at:
                raise ValueError("the user's own mistake")
            x = layer(x)
        return x


class InsideBlock(Block):
    def forward(self, x):
        result = super().forward(x)
        if torch.isinf(x).any():
            raise ValueError("in the middle of a unit")
        return result


def interrupted_inside() -> nn.Module:
    model = Interrupted()
    model.layers[1] = InsideBlock(16)
    return model


def exception_script(trainee: Trainee) -> None:
    model = trainee.model
    optimizer = trainee.adamw(model.parameters(), lr=1e-2)
    for number in range(5):
        x = torch.randn(4, 16)
        if number in (1, 3):
            model.fail_at = 2
            try:
                model(x)
            except ValueError:
                trainee.note(None)
            model.fail_at = -1
        if number == 2 and isinstance(model.layers[1], InsideBlock):
            try:
                model(x + float("inf"))
            except ValueError:
                trainee.note(None)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trainee.note(loss)


def accumulate(counts: tuple[int, ...], *, gradients: bool = False) -> Script:
    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for count in counts:
            for _ in range(count):
                loss = tokens_batch(trainee.model) / count
                loss.backward()
                trainee.note(loss)
            if gradients:
                trainee.note_gradients()
            optimizer.step()
            optimizer.zero_grad()

    return script


def some_parameters_script(trainee: Trainee) -> None:
    """An optimizer for some parameters of each unit; the others get gradients that nobody uses."""
    matrices = [values for values in trainee.model.parameters() if values.dim() > 1]
    optimizer = trainee.adamw(matrices, lr=1e-2)
    for _ in range(STEPS):
        loss = tokens_batch(trainee.model)
        loss.backward()
        optimizer.step()
        trainee.model.zero_grad()
        optimizer.zero_grad()
        trainee.note(loss)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, d, 3, padding=1), nn.BatchNorm2d(d), nn.ReLU()) for c, d in ((3, 8), (8, 12))
        )
        self.head = nn.ConvTranspose2d(12, 2, 2, stride=2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def images_batch(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(2, 3, 8, 8)).square().mean()


def channels_last_batch(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def recurrent_batch(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(3, 7, 6)).square().mean()


def groups_script(trainee: Trainee) -> None:
    named = dict(trainee.model.named_parameters())
    decayed = [values for values in named.values() if values.dim() > 1]
    rest = [values for values in named.values() if values.dim() <= 1]
    groups = [{"params": decayed, "lr": 2e-2, "weight_decay": 0.3}, {"params": rest, "betas": (0.8, 0.9)}]
    optimizer = trainee.adamw(groups, lr=3e-3, weight_decay=0.0)
    for number in range(STEPS):
        loss = tokens_batch(trainee.model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[1]["lr"] = 1e-3 * (number + 1)
        trainee.note(loss)


def scheduled(make_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> Script:
    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        scheduler = make_scheduler(optimizer)
        for _ in range(6):
            loss = tokens_batch(trainee.model)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            trainee.note(loss)
            trainee.note(torch.tensor(scheduler.get_last_lr()))

    return script


def clip_calls(batch: Callable[[nn.Module], torch.Tensor], max_norm: float = 0.05) -> Script:
    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            loss = batch(trainee.model)
            loss.backward()
            trainee.note(optimizer.clip_grad_norm_(max_norm))
            optimizer.step()
            optimizer.zero_grad()
            trainee.note(loss)

    return script


def gradients_script(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for _ in range(3):
        loss = tokens_batch(trainee.model)
        loss.backward()
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


SCENARIOS: dict[str, Scenario] = {
    "stack, tied embedding": Scenario(Stack, loop(tokens_batch)),
    "several tiles": Scenario(Wide, loop(wide_batch)),
    "no ModuleList": Scenario(mlp, loop(rows_batch)),
    "module used twice": Scenario(Twice, loop(lambda model: model(torch.randn(4, 16)).square().mean())),
    "frozen": Scenario(frozen, loop(tokens_batch)),
    "branches": Scenario(Branches, branches_script),
    "parts of a unit without gradient": Scenario(Wide, partial_gradients_script),
    "evaluation between steps": Scenario(Regularised, evaluation_script),
    "exception between units": Scenario(Interrupted, exception_script),
    "exception inside a unit": Scenario(interrupted_inside, exception_script),
    "checkpoint, reentrant": Scenario(lambda: Stack(mode="reentrant"), loop(tokens_batch)),
    "checkpoint, not reentrant": Scenario(lambda: Stack(mode="non-reentrant"), loop(tokens_batch)),
    "checkpoint inside the layer": Scenario(lambda: Stack(mode="inner"), loop(tokens_batch)),
    "checkpointed layers": Scenario(Checkpointed, loop(checkpointed_batch)),
    "two backwards a step": Scenario(Stack, accumulate((2, 2, 2, 2))),
    "convolutions": Scenario(Convolutions, loop(images_batch)),
    "channels last": Scenario(lambda: Convolutions().to(memory_format=torch.channels_last), loop(channels_last_batch)),
    "lstm": Scenario(Recurrent, loop(recurrent_batch)),
    "param groups": Scenario(Stack, groups_script),
    "optimizer of some parameters": Scenario(Stack, some_parameters_script),
    "one cycle": Scenario(Stack, scheduled(lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=7))),
    "cosine": Scenario(Stack, scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 5))),
    "max_grad_norm": Scenario(Stack, loop(tokens_batch, max_grad_norm=0.05)),
}
"""In every update schedule the same bits."""

LATE_ONLY: dict[str, Scenario] = {
    "evaluation between backward and step": Scenario(Stack, early_evaluation_script),
    "clip_grad_norm_": Scenario(Stack, clip_calls(tokens_batch)),
    "gradients": Scenario(Stack, gradients_script),
    "gradients of several backwards": Scenario(Stack, accumulate((1, 3), gradients=True)),
    "changing number of backwards": Scenario(Stack, accumulate((2, 2, 1, 3))),
}
"""Need gradients or old values between backward and step, or bring a number of gradients that is not known before."""


def hugging_face() -> dict[str, Scenario]:
    """Tiny random models of unmodified architectures."""
    import transformers as hf

    common = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder = common | {"intermediate_size": 24, "num_key_value_heads": 1}

    def batch(model: nn.Module) -> torch.Tensor:
        tokens = torch.randint(0, 64, (2, 7))
        return model(input_ids=tokens, labels=tokens).loss

    def case(kind, config, *, checkpointing=None) -> Scenario:
        def make() -> nn.Module:
            model = kind(config).train()
            if checkpointing is not None:
                model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            return model

        return Scenario(make, loop(batch, steps=3))

    llama = hf.LlamaConfig(**decoder)
    gpt2 = hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    mixtral = hf.MixtralConfig(**decoder, num_local_experts=4, num_experts_per_tok=2)
    t5 = hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return {
        "llama": case(hf.LlamaForCausalLM, llama),
        "llama, checkpointing": case(hf.LlamaForCausalLM, llama, checkpointing=False),
        "llama, reentrant checkpointing": case(hf.LlamaForCausalLM, llama, checkpointing=True),
        "gpt2": case(hf.GPT2LMHeadModel, gpt2),
        "qwen3": case(hf.Qwen3ForCausalLM, hf.Qwen3Config(**decoder, head_dim=8)),
        "mixtral": case(hf.MixtralForCausalLM, mixtral),
        "t5": case(hf.T5ForConditionalGeneration, t5),
    }
