"""How fast a processor or a device trains a decoder layer.

Owns a layer that can be timed, and the shape of one that stands for a workload's. Does not know drives or updates.
Guarantees that operations are counted as the planner counts them, and that processors are timed with more weights than
their caches hold, as in training.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

from tiermem.cli.timing import median_seconds, seconds_of
from tiermem.planner.workload import BACKWARD_SHARE, Workload, unit_flops

# Beyond these a processor's rate hardly changes any more, and one layer would take seconds.
_MOST_WIDTH, _MOST_TOKENS = 2048, 512
_STEP = 64  # widths are multiples of it
_HEAD = 128  # elements of an attention head, about
_BEYOND_CACHES = 256 << 20
_MOST_LAYERS = 16
# Operations a second that a processor stays below which has no instructions for a dtype, as AVX2 alone has none for
# bfloat16: 0.8e9 to 2e9, on few tokens and many, by one thread and more; float32 on few tokens has 11e9 there.
_WITHOUT_INSTRUCTIONS = 2.5e9
_FEW_TOKENS = 8
_LONG = 8  # times what is to be measured for


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A layer of `width` with a gated MLP of width `mlp` and causal attention, on `rows` sequences of `seq` tokens."""

    rows: int
    seq: int
    width: int
    mlp: int

    @property
    def weights(self) -> int:
        """Parameters of the layer."""
        return 4 * self.width * self.width + 3 * self.width * self.mlp

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Of its weights, as `decoded` takes them."""
        width, mlp = self.width, self.mlp
        return (3 * width, width), (width, width), (2 * mlp, width), (width, mlp)

    @property
    def heads(self) -> int:
        """Attention heads: as many of about 128 elements as divide the width."""
        return next(heads for heads in range(max(1, self.width // _HEAD), 0, -1) if self.width % heads == 0)


# What stands for any workload: wide enough for a matrix product's full speed on a few hundred tokens.
ANY_LAYER = LayerShape(rows=1, seq=256, width=768, mlp=2048)
# What shows within moments whether a processor has instructions for a dtype.
_SMALL_LAYER = LayerShape(rows=1, seq=32, width=256, mlp=704)
_PAIRS = 4


def layer_for(workload: Workload, *, seq: int) -> LayerShape:
    """A layer as large as the units that most parameters are in, on the tokens of a batch of sequences of `seq`.

    Of a large one, or of many tokens, what a processor's rate still depends on.
    """
    sizes = Counter[int]()
    for unit in workload.units:
        sizes[unit.numel] += unit.numel if unit.flops else 0
    numel = sizes.most_common(1)[0][0]
    width = min(_MOST_WIDTH, max(_STEP, round(math.sqrt(numel / 12) / _STEP) * _STEP))
    length = min(seq, _MOST_TOKENS)
    rows = max(1, min(workload.tokens, _MOST_TOKENS) // length)
    return LayerShape(rows=rows, seq=length, width=width, mlp=max(_STEP, round(8 * width / 3 / _STEP) * _STEP))


def layer_flops(dtype: torch.dtype, device: torch.device, seconds: float, shape: LayerShape) -> float:
    """Operations a second that a decoder layer's forward and backward reach, counted as the planner counts them.

    Timed for about `seconds`.
    """
    shape = in_time(dtype, device, shape, seconds)
    taken = median_seconds(train_layer(dtype, device, shape), seconds)
    return operations(shape) / taken


def slowed(rate: float, shape: LayerShape, besides: float) -> float:
    """Operations a second of a layer that takes `besides` seconds more than it would at `rate`."""
    count = operations(shape)
    return count / (count / rate + besides)


def in_time(dtype: torch.dtype, device: torch.device, shape: LayerShape, seconds: float) -> LayerShape:
    """The layer on a few of its tokens where a processor lacks instructions for `dtype` and all would take long."""
    if device.type != "cpu" or dtype == torch.float32:  # of which every processor has instructions
        return shape
    few = replace(shape, rows=1, seq=min(shape.seq, _FEW_TOKENS))
    train = _layer(dtype, device, few)
    with _one_thread():
        taken = min(seconds_of(train), seconds_of(train))
    slow = operations(few) / taken < _WITHOUT_INSTRUCTIONS
    return few if slow and taken * shape.rows * shape.seq / few.seq > _LONG * seconds else shape


def times_float32(dtype: torch.dtype) -> float:
    """How many times as long as in float32 this processor takes for a small layer in `dtype`, forward and backward.

    Where it has no instructions for it that is least of all: in a larger layer float32 is faster still. Takes none of
    the caller's random numbers.
    """
    with torch.random.fork_rng(devices=()):
        fast, slow = (_layer(each, torch.device("cpu"), _SMALL_LAYER) for each in (torch.float32, dtype))
    with _one_thread():
        pairs = [(seconds_of(fast), seconds_of(slow)) for _ in range(_PAIRS)]
    return min(slow for _, slow in pairs) / min(fast for fast, _ in pairs)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several wait for each other where the machine does something else, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def operations(shape: LayerShape) -> float:
    """Of the layer's forward and backward, as the planner counts them."""
    tokens = shape.rows * shape.seq
    return (1 + BACKWARD_SHARE) * unit_flops(shape.weights, tokens, seq=shape.seq, width=shape.width)


def train_layer(dtype: torch.dtype, device: torch.device, shape: LayerShape) -> Callable[[], None]:
    """Forward and backward of a layer, to be called again and again; on processors of several layers in turn."""
    nbytes = shape.weights * dtype.itemsize
    count = max(2, min(_MOST_LAYERS, _BEYOND_CACHES // nbytes)) if device.type == "cpu" else 1
    weights = _weights(dtype, device, shape)
    turn = itertools.cycle([_layer(dtype, device, shape, weights) for _ in range(count)])

    def train() -> None:
        next(turn)()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return train


def _weights(dtype: torch.dtype, device: torch.device, shape: LayerShape) -> list[torch.Tensor]:
    return [_random(dtype, device, *each) for each in shape.sizes]


def _random(dtype: torch.dtype, device: torch.device, *sizes: int) -> torch.Tensor:
    values = torch.rand(*sizes, device=device).sub_(0.5).mul_((12 / sizes[-1]) ** 0.5)
    return values.to(dtype).requires_grad_()


def _layer(
    dtype: torch.dtype, device: torch.device, shape: LayerShape, like: Sequence[torch.Tensor] | None = None
) -> Callable[[], object]:
    """`like`: weights that it has copies of, which are made sooner than others."""
    made = _weights(dtype, device, shape) if like is None else [each.detach().clone().requires_grad_() for each in like]
    products = [partial(functional.linear, weight=weight) for weight in made]
    inputs = _random(dtype, device, shape.rows, shape.seq, shape.width)
    turns = rotations(shape, dtype, device)
    gradient = torch.ones_like(inputs)

    def train() -> object:
        return torch.autograd.grad(decoded(inputs, products, shape.heads, turns), (inputs, *made), gradient)

    return train


def rotations(shape: LayerShape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of position embeddings, each `[seq, elements of a head]`."""
    angles = torch.rand(shape.seq, shape.width // shape.heads, device=device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def decoded(
    inputs: torch.Tensor,
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    heads: int,
    turns: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Forward of a decoder layer, `[rows, seq, width]` as `inputs`.

    `products`: by the weights of queries, keys and values together, of attention's output, of the gated MLP's both
    halves together, and of its output.
    """
    qkv, out, gated, down = products
    rows, seq, width = inputs.shape
    parts = qkv(_normed(inputs)).chunk(3, dim=-1)
    query, key, value = (part.view(rows, seq, heads, width // heads).transpose(1, 2) for part in parts)
    query, key = _turned(query, *turns), _turned(key, *turns)
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = inputs + out(attended.transpose(1, 2).reshape(inputs.shape))
    gate, up = gated(_normed(hidden)).chunk(2, dim=-1)
    return hidden + down(functional.silu(gate) * up)


def _normed(values: torch.Tensor) -> torch.Tensor:
    """By their root mean square, in float32 and operation by operation, as models write it."""
    wide = values.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(values.dtype)


def _turned(values: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """By rotary position embeddings, operation by operation, as models write it."""
    first, second = values.chunk(2, dim=-1)
    return values * cosines + torch.cat((-second, first), dim=-1) * sines
