"""What a step has to do: units, the order they are used in, and how long each computes.

Owns the record of a training step as numbers, and the shape of a transformer that has a given number of parameters.
Does not know modules, machines, ranks or budgets. Guarantees that an order uses known units only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.config import parse_dtype
from tiermem.errors import ConfigError
from tiermem.figures import format_number
from tiermem.optim import tiles
from tiermem.zero3.order import Access, Phase

# Backward computes two products for each one of forward.
BACKWARD_SHARE = 2.0
_VOCABULARY = 32_000
_SCALES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (1, ""))


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit as the planner sees it.

    Attributes:
        name: for messages.
        numel: elements of its parameters.
        trainable: those of them that are trained.
        flops: operations of one forward call for one batch.
        nested_nbytes: parameter bytes of the units leased while this one is computed.
        nested_count: how many those are at most.
        kept: whether its parameters stay in host memory by choice.
        seconds: (forward, backward) of one batch where they were measured; None: from `flops`.
        runs: where its trained parameters lie (first element, elements), in the order in which their gradients arrive;
            empty: as if it had one parameter.
        exact: with 8-bit moments, where those lie whose moments are float32 all the same (first element, elements).
    """

    name: str
    numel: int
    trainable: int
    flops: float
    nested_nbytes: int = 0
    seconds: tuple[float, float] | None = None
    kept: bool = False
    nested_count: int = 0
    runs: tuple[tuple[int, int], ...] = ()
    exact: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """A training step.

    Attributes:
        name: the model.
        units: all units.
        order: how one batch uses them; a unit's GRADIENT stands where its first gradient arrives.
        tokens: of one batch.
        batches: whose gradients are added up for one step.
        dtype: of parameters and gradients.
        moments: "float32" or "int8".
        counted: elements of the model's parameters, without what aligns them; None: those of all units.
    """

    name: str
    units: tuple[UnitWork, ...]
    order: tuple[Access, ...]
    tokens: int
    batches: int = 1
    dtype: str = "bfloat16"
    moments: str = "float32"
    counted: int | None = None

    def __post_init__(self) -> None:
        parse_dtype("dtype", self.dtype)  # which refuses others
        if self.moments not in ("float32", "int8"):
            raise ConfigError(f"moments: expected float32 or int8, found {self.moments!r}")
        if any(not 0 <= access.unit < len(self.units) for access in self.order):
            raise ConfigError(f"the order of {self.name} uses a unit that is not among its {len(self.units)}")

    @property
    def parameters(self) -> int:
        """Elements of all units."""
        return sum(unit.numel for unit in self.units)

    @property
    def model_parameters(self) -> int:
        """Parameters as people count those of the model."""
        return self.parameters if self.counted is None else self.counted

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter, and of a gradient."""
        return itemsize(self.dtype)

    @property
    def state_itemsize(self) -> int:
        """Bytes of optimizer state for one parameter."""
        return state_itemsize(self.dtype, self.moments)

    @property
    def widest_itemsize(self) -> int:
        """The same of a parameter that has most."""
        return state_itemsize(self.dtype, "float32" if any(unit.exact for unit in self.units) else self.moments)

    @property
    def step_order(self) -> tuple[Access, ...]:
        """The accesses of a whole step."""
        return self.order * self.batches


def itemsize(dtype: str) -> int:
    """Bytes of a parameter of `dtype`, and of its gradient."""
    return parse_dtype("dtype", dtype).itemsize


def state_itemsize(dtype: str, moments: str) -> int:
    """Bytes of optimizer state for one parameter of `dtype`."""
    return tiles.state_itemsize(parse_dtype("dtype", dtype), quantized=moments == "int8")


def order_of(calls: Sequence[tuple[int, bool]]) -> tuple[Access, ...]:
    """The order of one batch that makes these calls, and goes back the same way.

    Each call is a unit and whether backward needs the unit's values there: an embedding's look-up does not. Autograd
    adds up what the calls of a unit contribute, so its gradient arrives where backward meets it last.
    """
    order = [Access(unit, Phase.FORWARD) for unit, _ in calls]
    first = {unit: position for position, (unit, _) in reversed(list(enumerate(calls)))}
    for position, (unit, values_needed) in reversed(list(enumerate(calls))):
        if values_needed:
            order.append(Access(unit, Phase.BACKWARD))
        if first[unit] == position:
            order.append(Access(unit, Phase.GRADIENT))
    return tuple(order)


def unit_flops(numel: int, tokens: int, *, seq: int = 0, width: int = 0) -> float:
    """Operations of one forward call: two for each weight and token, and attention's 4 seq width for each token.

    After Kaplan et al., "Scaling laws for neural language models" (2020), table 1, with the causal half not left out:
    plain kernels compute it.
    """
    return 2.0 * numel * tokens + 4.0 * seq * width * tokens


def require_plannable(parameters: int) -> None:
    """Raise ConfigError unless a transformer of so many parameters can be made."""
    if not 100_000 <= parameters <= 10**15:
        raise ConfigError(f"expected a model of 100,000 to 1,000T parameters, found {parameters}")


def transformer(
    parameters: int, *, batch: int, seq: int, batches: int = 1, dtype: str = "bfloat16", moments: str = "float32"
) -> Workload:
    """The step of a transformer of `parameters` parameters: 12 width^2 a layer, untied embeddings of 32,000 tokens.

    Width is about 128 times depth, as in published models. Raises ConfigError for fewer than 100,000 parameters,
    and for more than 1,000T, whose layers alone would take long to write down.
    """
    require_plannable(parameters)
    width = 64
    while 12 * (2 * width) ** 2 * max(2, 2 * width // 128) <= parameters:
        width *= 2
    while 12 * (width * 5 // 4) ** 2 * max(2, width * 5 // 4 // 128) <= parameters:
        width = width * 5 // 4 // 64 * 64 + (64 if width < 256 else 0)
    vocabulary = min(_VOCABULARY, parameters // (8 * width))
    rest = parameters - 2 * vocabulary * width
    layers = max(1, round(rest / (12 * width * width)))
    tokens = batch * seq
    words = vocabulary * width
    units = [UnitWork("embedding", words, words, 0.0, exact=((0, words),) if moments == "int8" else ())]
    for layer in range(layers):
        numel = rest * (layer + 1) // layers - rest * layer // layers
        units.append(UnitWork(f"layer {layer}", numel, numel, unit_flops(numel, tokens, seq=seq, width=width)))
    units.append(UnitWork("head", words, words, unit_flops(words, tokens)))
    order = order_of([(unit, unit > 0) for unit in range(len(units))])
    scale, letter = next((scale, letter) for scale, letter in _SCALES if parameters >= scale)
    name = f"{format_number(parameters / scale)} {letter}".rstrip()
    return Workload(f"{name} parameters", tuple(units), order, tokens, batches, dtype, moments)
