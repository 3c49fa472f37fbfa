"""Ways of writing a training loop, each against plain PyTorch: the same losses, gradients and weights, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from doubles_combinations import half_of, in_turn, part_of, some_of
from doubles_models import CheckpointingBlock, Stack, mlp
from doubles_training import Script, Trainee, check, config_for, offloaded, plain
from torch import nn
from torch.optim import lr_scheduler

import tiermem
from tiermem.runtime.plans import StepPlans

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle, which turns betas too": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "on plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
}


def tokens() -> torch.Tensor:
    return torch.randint(0, 40, (2, 5))


def backward(trainee: Trainee, loss: torch.Tensor, **how) -> None:
    loss.backward(**how)
    trainee.note(loss)


def scheduled(name: str) -> Script:
    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        scheduler = SCHEDULERS[name](optimizer)
        for _ in range(5):
            loss = trainee.model(tokens()).square().mean()
            backward(trainee, loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(loss.item()) if name == "on plateau" else scheduler.step()

    return script


def groups_change(trainee: Trainee) -> None:
    first, *others = trainee.model.layers
    optimizer = trainee.adamw(first.parameters(), lr=1e-2)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": others[0].parameters(), "lr": 3e-3, "weight_decay": 0.5})
        if step == 4:
            optimizer.param_groups[0].update(lr=1e-4, betas=(0.5, 0.6), eps=1e-5)
        backward(trainee, trainee.model(tokens()).square().mean())
        optimizer.step()
        trainee.model.zero_grad()
        optimizer.zero_grad()


def groups_replaced(trainee: Trainee) -> None:
    """As callbacks do that rebuild groups: other dictionaries, and parameters that go from one to another."""
    parameters = list(trainee.model.parameters())
    optimizer = trainee.adamw([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 3e-3}], lr=1e-2)
    for step in range(6):
        backward(trainee, trainee.model(tokens()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        groups = optimizer.param_groups
        if step == 0:
            groups[0] = {**groups[0], "lr": 0.1}
        if step == 1:
            optimizer.param_groups = [{**group, "lr": 1e-3, "weight_decay": 0.5} for group in groups]
        if step == 2:
            groups[1]["params"].append(groups[0]["params"].pop())
            groups[0]["lr"] = 0.0
        if step == 3:
            groups[0]["params"][0], groups[1]["params"][0] = groups[1]["params"][0], groups[0]["params"][0]
        if step == 4:
            optimizer.param_groups = [{**groups[1], "params": parameters}]


def moments_forgotten(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for step in range(4):
        backward(trainee, trainee.model(tokens()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and isinstance(optimizer, tiermem.AdamW):
            state = optimizer.full_state_dict()
            for entry in state["state"].values():
                for tensor in entry.values():
                    tensor.zero_()
            optimizer.load_state_dict(state)
        elif step == 1:
            optimizer.state.clear()


def two_optimizers(trainee: Trainee) -> None:
    parts = trainee.model.layers[:1], nn.ModuleList([*trainee.model.layers[1:], trainee.model.head])
    optimizers = [trainee.adamw(part.parameters(), lr=lr) for part, lr in zip(parts, (1e-2, 1e-3), strict=True)]
    for _ in range(4):
        backward(trainee, trainee.model(tokens()).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def other_numbers_of_batches(trainee: Trainee) -> None:
    """What a step was expected to bring after the one before comes, or less, or more; and all of it is clipped."""
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2, max_grad_norm=0.01)
    for count in (3, 3, 1, 1, 2, 4):
        for batch in range(count):
            backward(trainee, trainee.model(tokens()).square().mean())
            if batch == 0:
                trainee.note_gradients()
        optimizer.step()
        trainee.note(torch.as_tensor(optimizer.grad_norm))
        optimizer.zero_grad()


def clipped_across_groups(trainee: Trainee) -> None:
    """Scripts clip `model.parameters()`, whatever the order of the groups; the last bit of a sum depends on it."""
    parameters = list(trainee.model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() == dim], "weight_decay": dim - 1} for dim in (2, 1)]
    optimizer = trainee.adamw(groups, lr=1e-2)
    for _ in range(8):
        backward(trainee, trainee.model(tokens()).square().mean())
        if isinstance(optimizer, tiermem.AdamW):
            trainee.note(optimizer.clip_grad_norm_(0.01))
        else:
            trainee.note(torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()


def forward_twice(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for _ in range(3):
        first, second = trainee.model(tokens()), trainee.model(tokens())
        backward(trainee, (first * second).mean())
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


def backward_twice(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for _ in range(3):
        loss = trainee.model(tokens()).square().mean()
        backward(trainee, loss, retain_graph=True)
        backward(trainee, 2 * loss)
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


def adversaries(trainee: Trainee) -> None:
    """Each has its turn, and what the first gets in that of the second is dropped: behind it, or before its own."""
    judge, maker = trainee.model.layers[:1], nn.ModuleList([*trainee.model.layers[1:], trainee.model.head])
    judging, making = (trainee.adamw(part.parameters(), lr=1e-2) for part in (judge, maker))
    for step in range(6):
        with torch.no_grad():
            made = trainee.model(tokens())
        judging.zero_grad()
        backward(trainee, (judge[0](trainee.model.embed(tokens())).mean() - made.mean()).square())
        judging.step()
        making.zero_grad()
        for _ in range(1 + step // 2):
            backward(trainee, trainee.model(tokens()).square().mean())
            making.step()
            making.zero_grad()
            if step % 2:
                judging.zero_grad()
        if step == 4:
            backward(trainee, trainee.model(tokens()).square().mean())
            judging.zero_grad()
            making.zero_grad()


def two_models(trainee: Trainee) -> None:
    torch.manual_seed(7)
    teacher = mlp()
    reading = nn.Linear(40, 6)
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    other = torch.optim.AdamW([*teacher.parameters(), *reading.parameters()], fused=True)
    for _ in range(3):
        backward(trainee, teacher(reading(trainee.model(tokens()))).square().mean())
        trainee.note(teacher[0].weight.grad)
        optimizer.step(), other.step()
        optimizer.zero_grad(), other.zero_grad()


def parts_outside(trainee: Trainee) -> None:
    model = trainee.model
    optimizer = trainee.adamw(model.parameters(), lr=1e-2)
    for _ in range(3):
        x = model.embed(tokens())
        backward(trainee, model.layers[1].down(model.layers[0](x).repeat(1, 1, 2)).square().mean())
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


def gradients_of_inputs_only(trainee: Trainee) -> None:
    trainee.model.requires_grad_(False)
    x = torch.randn(2, 5, 12, requires_grad=True)
    trainee.note(torch.autograd.grad(trainee.model.layers[0](x).square().sum(), x)[0])
    trainee.model.requires_grad_(True)


def autograd_grad(trainee: Trainee) -> None:
    loss = trainee.model(tokens()).square().mean()
    for gradient in torch.autograd.grad(loss, list(trainee.model.parameters())):
        trainee.note(gradient)
    trainee.note_gradients()  # none: they went to the caller


def closure(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = trainee.model(tokens()).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        trainee.note(optimizer.step(evaluate))


def hooks_of_ones_own(trainee: Trainee) -> None:
    model = trainee.model
    model.layers[0].register_forward_hook(lambda _, __, out: out * 2)
    model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.layers[1].register_full_backward_hook(lambda _, grads, __: tuple(3 * grad for grad in grads))
    model.layers[2].down.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    model.layers[2].register_forward_hook(lambda module, _, __: trainee.note(module.down.weight))
    optimizer = trainee.adamw(model.parameters(), lr=1e-2)
    for _ in range(3):
        backward(trainee, model(tokens()).square().mean())
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


def frozen_for_a_while(trainee: Trainee) -> None:
    layer = trainee.model.layers[1]
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for step in range(6):
        layer.requires_grad_(step not in (2, 3))
        backward(trainee, trainee.model(tokens()).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def evaluation_between(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for _ in range(3):
        backward(trainee, trainee.model(tokens()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        trainee.model.eval()
        with torch.no_grad():
            trainee.note(trainee.model(tokens()))
        with torch.inference_mode():
            trainee.note(trainee.model(tokens()).clone())
        trainee.model.train()


def autocast(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = trainee.model(tokens()).float().square().mean()
        backward(trainee, loss)
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_state_round_trip(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for step in range(4):
        backward(trainee, trainee.model(tokens()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())


def compiled(of: str) -> Script:
    def script(trainee: Trainee) -> None:
        model = trainee.model
        run = torch.compile(model, backend="eager") if of == "whole" else model
        for layer in model.layers if of == "units" else ():
            layer.compile(backend="eager")
        optimizer = trainee.adamw(model.parameters(), lr=1e-2)
        for _ in range(3):
            backward(trainee, run(tokens()).square().mean())
            trainee.note_gradients()
            optimizer.step()
            optimizer.zero_grad()

    return script


def compiled_step(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)

    @torch.compile(backend="aot_eager")
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = trainee.model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(3):
        trainee.note(step(tokens()))


SCRIPTS: dict[str, Script] = {
    "groups change": groups_change,
    "groups replaced": groups_replaced,
    "moments forgotten": moments_forgotten,
    "two optimizers": two_optimizers,
    "other numbers of batches": other_numbers_of_batches,
    "clipped across groups": clipped_across_groups,
    "forward twice": forward_twice,
    "adversaries": adversaries,
    "two models": two_models,
    "parts outside their parent": parts_outside,
    "autograd.grad of parameters": autograd_grad,
    "closure": closure,
    "hooks of one's own": hooks_of_ones_own,
    "frozen for a while": frozen_for_a_while,
    "evaluation between": evaluation_between,
    "autocast": autocast,
    "optimizer state round trip": optimizer_state_round_trip,
}


def compare(make: Callable[[], nn.Module], script: Script, directory, update: str = "forward", budget="tight") -> None:
    check(offloaded(make, script, directory, update=update, budget=budget), plain(make, script))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(name, tmp_path):
    compare(Stack, scheduled(name), tmp_path)


@pytest.mark.parametrize(("name", "update"), part_of(3, SCRIPTS, ["auto", "forward", "step"]))
def test_loops(name, update, tmp_path):
    compare(Stack, SCRIPTS[name], tmp_path, update)


@pytest.mark.parametrize("update", ["forward", "step"])
def test_backward_twice_with_retain_graph(update, tmp_path):
    compare(Stack, backward_twice, tmp_path, update)


def deep() -> nn.Sequential:
    """More units, each with its own, than the least budget holds at a time."""
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(48, 48), nn.Tanh())))


def deep_and_checkpointed() -> nn.Sequential:
    return nn.Sequential(*(CheckpointingBlock(48) for _ in range(3)))


def slope_of_inputs(model: nn.Module) -> torch.Tensor:
    x = torch.randn(4, 48, requires_grad=True)
    out = model(x).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + (slope.norm(dim=1) - 1).square().mean()


def slope_of_parameters(model: nn.Module) -> torch.Tensor:
    out = model(torch.randn(4, 48)).square().mean()
    slopes = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
    return out + sum(slope.square().sum() for slope in slopes)


def slope_of_a_slope(model: nn.Module) -> torch.Tensor:
    x = torch.randn(4, 48, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return second.square().sum()


@pytest.mark.parametrize(
    ("loss", "make", "update", "budget"),
    part_of(
        4,
        [slope_of_inputs, slope_of_parameters, slope_of_a_slope],
        [deep, deep_and_checkpointed],
        ["backward", "step"],
        ["least", "generous"],
    ),
)
def test_gradients_of_gradients(loss, make, update, budget, tmp_path):
    """Their graph keeps no frames: what it needs of parameters comes and goes as in any other backward."""

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for step in range(3):
            torch.manual_seed(step)
            result = loss(trainee.model)
            trainee.note(result)
            result.backward()
            if update == "step":
                trainee.note_gradients()
            optimizer.step()
            optimizer.zero_grad()

    compare(make, script, tmp_path, update, budget)


def test_gradients_of_inputs_only(tmp_path):
    compare(Stack, gradients_of_inputs_only, tmp_path)


class SomeAgain(nn.Module):
    """More kinds of layers than dynamo compiles a function for, and it comes to some of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 40)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden + self.layers[0](hidden))


@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it meets in torch itself
@pytest.mark.parametrize(("make", "of"), some_of([(SomeAgain, "whole")], [(Stack, "whole"), (Stack, "units")]))
def test_torch_compile(make, of, tmp_path):
    """Hooks are where dynamo stops: what lies between them is compiled, or nothing is; the numbers stay."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        compare(make, compiled(of), tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of", some_of(["its layers before offload"], ["a model before offload"]))
def test_torch_compile_ahead_of_time(of, tmp_path):
    def make() -> nn.Module:
        model = Stack(depth=1)
        for part in {"a model": [model], "its layers": model.layers}[of.removesuffix(" before offload")]:
            part.compile(backend="aot_eager")
        return model

    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        compare(make, evaluation_between, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="dynamo fails at attributes of optimizers"
)
def test_a_whole_step_is_compiled_but_for_what_goes_on_around_its_update(tmp_path, monkeypatch):
    """Compiling the plan of the next step and the queue of updates took several times as long as the model."""
    compiling = []
    close_step = StepPlans.close_step

    def noted(plans, *given):
        compiling.append(torch.compiler.is_compiling())
        close_step(plans, *given)

    monkeypatch.setattr(StepPlans, "close_step", noted)
    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        compare(lambda: nn.Sequential(nn.Embedding(40, 8), nn.Tanh(), nn.Linear(8, 40)), compiled_step, tmp_path)
    assert compiling == [False] * 3


@pytest.mark.parametrize("kind", ["weight_norm", "weight_norm, the old one", "spectral_norm", "parametrize"])
def test_weights_computed_from_others(kind, tmp_path):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    def make() -> nn.Module:
        model = mlp()
        for layer in (model[0], model[2]):
            if kind == "weight_norm":
                nn.utils.parametrizations.weight_norm(layer)
            elif kind == "spectral_norm":
                nn.utils.parametrizations.spectral_norm(layer)
            elif kind == "parametrize":
                nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
            else:
                nn.utils.weight_norm(layer)
        return model

    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for _ in range(3):
            backward(trainee, trainee.model(torch.randn(4, 6)).square().sum())
            trainee.note_gradients()
            optimizer.step()
            optimizer.zero_grad()

    with contextlib.ExitStack() as stack:
        if "old" in kind:
            stack.enter_context(pytest.warns(FutureWarning))
        compare(make, script, tmp_path)


def test_a_layer_that_checkpoints_itself_under_autocast(tmp_path):
    def make() -> nn.Module:
        model = Stack(mode="inner")
        assert isinstance(model.layers[0], CheckpointingBlock)
        return model

    compare(make, autocast, tmp_path)


class Placed(nn.Module):
    """A gradient of `place` is a view of what goes on upstream: nobody is to add to it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(width, width), nn.Parameter(torch.randn(5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.place.unsqueeze(0)


def in_several_batches(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    for _ in range(3):
        for _ in range(3):
            backward(trainee, trainee.model(torch.randn(1, 5, 16)).square().mean())
        trainee.note_gradients()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("update", "budget"), in_turn(["auto", "forward", "backward"], ["tight", "generous"]))
def test_gradients_that_are_views_of_what_goes_upstream(update, budget, tmp_path):
    script = without_gradients(in_several_batches) if update == "backward" else in_several_batches  # it uses them up
    compare(lambda: nn.Sequential(*(Placed() for _ in range(3))), script, tmp_path, update, budget)


def test_a_gradient_given_to_backward_stays_what_it_is(tmp_path):
    """In plain PyTorch the parameter's `.grad` may be that very memory, to which the next backward adds."""
    model, own = Placed(), torch.ones(1, 5, 16)
    with tiermem.offload(model, config_for(tmp_path, 64 << 20, "step")) as runtime:
        for _ in range(3):
            model(torch.randn(1, 5, 16)).backward(gradient=own)
        assert torch.equal(own, torch.ones(1, 5, 16))
        assert torch.equal(runtime.gradient(model.place), torch.full((5, 16), 3.0))
        assert torch.equal(runtime.gradient(model.linear.bias), torch.full((16,), 15.0))


def without_gradients(script: Script) -> Script:
    def run(trainee: Trainee) -> None:
        trainee.note_gradients = lambda: None
        script(trainee)

    return run


def with_a_graph_still_alive(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
    alive = []
    for _ in range(4):
        alive = [*alive[-1:], trainee.model(torch.randn(3, 48)).square().mean()]
        backward(trainee, trainee.model(torch.randn(3, 48)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def in_two_backwards_by_inputs(trainee: Trainee) -> None:
    parameters = list(trainee.model.parameters())
    optimizer = trainee.adamw(parameters, lr=1e-2)
    for _ in range(4):
        loss = trainee.model(torch.randn(3, 48)).square().mean()
        backward(trainee, loss, inputs=parameters[:3], retain_graph=True)
        backward(trainee, loss, inputs=parameters[3:])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("update", "script"), half_of(["auto", "backward"], [with_a_graph_still_alive, in_two_backwards_by_inputs])
)
def test_units_announced_late_find_room_in_the_least_budget(script, update, tmp_path):
    compare(deep, script, tmp_path, update, "least")


class Dropping(nn.Module):
    """Embeddings, layers of which some may have no gradients, and a head."""

    def __init__(self, words: int = 500, width: int = 96) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(mlp_of(width) for _ in range(4))
        self.dropped: list[int] = []

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for number, layer in enumerate(self.layers):
            x = x if number in self.dropped else x + layer(x)
        return self.head(x)


def mlp_of(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def frozen_from_the_second_step_on(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-3)
    for step in range(3):
        trainee.model.layers.requires_grad_(step < 1)
        backward(trainee, trainee.model(torch.randint(500, (2, 8))).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def layers_dropped(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-3)
    for step in range(3):
        trainee.model.dropped = [number for number in range(4) if step and (3 * step + number) % 5 < 2]
        backward(trainee, trainee.model(torch.randint(500, (2, 8))).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("script", [frozen_from_the_second_step_on, layers_dropped])
def test_units_without_gradients_leave_room_in_the_least_budget(script, tmp_path):
    compare(Dropping, script, tmp_path, "backward", "least")


def rate_set_before_the_step(*rates: float) -> Script:
    def script(trainee: Trainee) -> None:
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-3)
        for rate in rates:
            backward(trainee, trainee.model(tokens()).square().mean())
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    return script


@pytest.mark.parametrize("update", ["auto", "forward", "step"])
def test_a_rate_that_is_set_between_backward_and_step(update, tmp_path):
    compare(Stack, rate_set_before_the_step(1e-3, 2e-3, 3e-3, 4e-3), tmp_path, update)


@pytest.mark.parametrize("budget", ["tight", "generous"])
def test_one_that_comes_too_late_is_told_and_comes_in_time_from_then_on(budget, tmp_path):
    with pytest.warns(RuntimeWarning, match="settings .* were changed between backward and step") as caught:
        found = offloaded(
            Stack, rate_set_before_the_step(1e-3, 2e-3, 3e-3, 4e-3), tmp_path, update="backward", budget=budget
        )
    assert len([each for each in caught if "settings" in str(each.message)]) == 1
    check(found, plain(Stack, rate_set_before_the_step(1e-3, 1e-3, 3e-3, 4e-3)))  # early updates begin in the second


class Normed(nn.Module):
    """Norms, each a unit, whose bias no graph keeps: nothing says that its gradient comes behind the weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.LayerNorm(8)))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def frozen_in_part(*, thawed_early: bool, dropped: bool) -> Script:
    """A bias of each unit is frozen in the second step, until before that step or until the next one begins."""

    def script(trainee: Trainee) -> None:
        biases = [layer.bias for layer in trainee.model.layers]
        optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-2)
        for step in range(4):
            for bias in biases:
                bias.requires_grad_(step != 1)
            for batch in range(2 if dropped and step == 2 else 1):
                backward(trainee, trainee.model(torch.randn(4, 8)).square().mean())
                if dropped and step == 2 and batch == 0:
                    optimizer.zero_grad()
            for bias in biases:
                bias.requires_grad_(thawed_early or step != 1)
            optimizer.step()
            optimizer.zero_grad()

    return script


@pytest.mark.parametrize(
    ("thawed_early", "dropped", "update"), half_of([True, False], [False, True], ["auto", "backward"])
)
def test_a_part_of_a_unit_that_is_frozen_in_one_step_and_trained_in_the_next(thawed_early, update, dropped, tmp_path):
    compare(Normed, frozen_in_part(thawed_early=thawed_early, dropped=dropped), tmp_path, update)
