"""The same training script on a plain model and on the same model offloaded, and their comparison bit for bit.

A script is a function of a `Trainee`, written as users write training loops. `plain` runs it with torch's fused AdamW,
`offloaded` with tiermem's; what the scripts note (losses, gradients) and the final weights must then be the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.runtime.blueprint import draw
from tiermem.zero3.keep import Keeping

Make = Callable[[], nn.Module]
MIB = 1 << 20
UPDATES = ("step", "forward", "backward", "auto")
BUDGETS = ("generous", "tight", "least")


class PlainAdamW(torch.optim.AdamW):
    """torch's, with clipping where tiermem's has it."""

    def __init__(self, params, *, max_grad_norm=None, **settings):
        super().__init__(params, fused=True, **settings)
        self.max_grad_norm = max_grad_norm
        self.grad_norm = None

    def clip_grad_norm_(self, max_norm):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return self.grad_norm

    def step(self, closure=None):
        if self.max_grad_norm is not None:
            self.clip_grad_norm_(self.max_grad_norm)
        return super().step(closure)


@dataclass
class Trainee:
    """What a script sees."""

    model: nn.Module
    adamw: Callable[..., torch.optim.Optimizer]
    gradient: Callable[[nn.Parameter], torch.Tensor | None]
    noted: list[torch.Tensor | None] = field(default_factory=list)

    def note(self, value: torch.Tensor | None) -> None:
        self.noted.append(None if value is None else value.detach().clone())

    def note_gradients(self) -> None:
        for parameter in self.model.parameters():
            self.note(self.gradient(parameter))


@dataclass
class Outcome:
    noted: list[torch.Tensor | None]
    weights: dict[str, torch.Tensor]
    statistics: tiermem.Statistics | None = None


Script = Callable[[Trainee], None]


def plain(make: Make, script: Script) -> Outcome:
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(2)
    trainee = Trainee(model, PlainAdamW, lambda p: None if p.grad is None else p.grad.clone())
    script(trainee)
    return Outcome(trainee.noted, {name: values.clone() for name, values in model.state_dict().items()})


def config_for(directory: Path, budget: int | str, update: str, **settings) -> tiermem.Config:
    defaults = {"param_dtype": "float32", "poison": True, "device": "cpu", "stall_timeout": 30.0}
    return tiermem.Config(host_memory=budget, swap_dirs=[directory], update=update, **(defaults | settings))


def as_found_before(find: Callable[..., int]) -> Callable[..., int]:
    """`find`, carried out once for all models that are divided alike: looking for a budget takes as long as some steps.

    What is found is told by what is asked and by the model's modules and parameters; not by the directory.
    """
    found: dict[Any, int] = {}

    @functools.wraps(find)
    def asked(model: nn.Module, directory: Path, *wishes: Any, **settings: Any) -> int:
        shared = {id(values): name for name, values in model.named_parameters()}
        parameters = tuple(
            (name, shared[id(values)], values.shape, values.dtype, values.requires_grad)
            for name, values in model.named_parameters(remove_duplicate=False)
        )
        modules = tuple((name, type(module)) for name, module in model.named_modules())
        key = (parameters, modules, wishes, tuple(sorted(settings.items(), key=str)))
        try:
            hash(key)
        except TypeError:  # a list of modules
            return find(model, directory, *wishes, **settings)
        if key not in found:
            found[key] = find(model, directory, *wishes, **settings)
        return found[key]

    return asked


@as_found_before
def least_budget(model: nn.Module, directory: Path, units=None, keeping=None, **settings) -> int:
    """What BudgetError names when the budget is a single page."""
    try:
        draw(model, config_for(directory, 4096, "step", **settings), units, keeping=keeping)
    except tiermem.BudgetError as error:
        return int(re.search(r"set host_memory to (\d+) bytes", str(error)).group(1))
    raise AssertionError("a budget of one page should never do")


@as_found_before
def largest_unit(model: nn.Module, directory: Path, units=None, keeping=None, **settings) -> int:
    layouts = draw(model, config_for(directory, 1024 * MIB, "step", **settings), units, keeping=keeping).layouts
    return max(layout.nbytes for layout in layouts)


@as_found_before
def budget_for(model: nn.Module, directory: Path, budget: str, units=None, keeping=None, **settings) -> int:
    """Bytes for "generous", "tight" (twice the largest unit's parameters, but what can work at all) and "least".

    "beside": the least with which updates run beside the computation; "resting": with which units rest, not all.
    """
    if budget == "generous":
        return 64 * MIB
    least = least_budget(model, directory, units, keeping, **settings)
    if budget == "beside":
        while draw(model, config_for(directory, least, "step", **settings), units, keeping=keeping).footprint.serial:
            least += 4096
        return least
    if budget == "resting":
        while not (
            drawn := draw(model, config_for(directory, least, "auto", **settings), units, keeping=keeping)
        ).resting:
            least += 4096
        assert len(drawn.resting) < len(drawn.states)
        assert drawn.swap_nbytes(1) > least, "where everything fits nothing is updated early"
        return least
    return least if budget == "least" else max(least, 2 * largest_unit(model, directory, units, keeping, **settings))


def within_budgets(statistics: tiermem.Statistics) -> None:
    for tier in statistics.tiers:
        assert tier.reserved <= tier.budget, tier
        assert tier.high_water <= tier.budget, tier


def offloaded(
    make: Make,
    script: Script,
    directory: Path,
    *,
    update: str,
    budget: str,
    units=None,
    coalesce: int | str = 0,  # these models are all small: all of one would be a unit
    keep=None,
    **settings,
) -> Outcome:
    torch.manual_seed(1)
    model = make()
    nbytes = budget_for(model, directory, budget, units, Keeping(keep), **settings)
    torch.manual_seed(2)
    config = config_for(directory, nbytes, update, **settings)
    with tiermem.offload(model, config, units=units, coalesce=coalesce, keep=keep) as runtime:
        torch.manual_seed(2)
        trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
        script(trainee)
        weights = {name: values.detach().clone() for name, values in model.named_buffers()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            weights[name] = runtime.parameter(parameter)
        statistics = runtime.statistics()
    within_budgets(statistics)
    assert list(directory.iterdir()) == []
    return Outcome(trainee.noted, weights, statistics)


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Equal in shape, dtype and every bit but the sign of zero and the kind of NaN."""
    if left is None or right is None:
        return left is right
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(torch.nan_to_num(left.float(), 7e9), torch.nan_to_num(right.float(), 7e9))
    )


def check(found: Outcome, expected: Outcome) -> None:
    assert len(found.noted) == len(expected.noted)
    for number, (here, there) in enumerate(zip(found.noted, expected.noted, strict=True)):
        assert same(here, there), f"note {number} differs: {here} and {there}"
    for name, values in expected.weights.items():
        if name in found.weights:
            assert same(found.weights[name], values), f"{name} differs"
    assert set(found.weights) >= {name for name in expected.weights if "num_batches" not in name}
