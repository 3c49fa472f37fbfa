"""The compiled loops, where they may be used.

Owns the decision: numba is installed, compiles here, and its loops give the bits that torch gives, tried once per
process on numbers of every kind before the first update. Does not know tiles or pages. Guarantees that whoever asks
gets loops with the bits of `kernels.py`, or None, and `why_not` then says the reason; training goes on without, only
slower.

The comparison is needed because torch's bits depend on how its compiler fused multiplications and additions on this
processor ("Where multiplications and additions are fused" in `loops.py`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiermem.errands import elsewhere
from tiermem.errors import InvariantError, TiermemError
from tiermem.memory.heap import release_library
from tiermem.optim.blocks import BLOCK_NUMEL, Blocks
from tiermem.optim.planes import BlockPlanes, StatePlanes
from tiermem.optim.shares import Loop
from tiermem.optim.updates import Settings

Update = Callable[[torch.Tensor, torch.Tensor, Any, Settings, float], None]


@dataclass(frozen=True, slots=True)
class CompiledLoops:
    """The loops of `loops.py`, compiled by numba."""

    module: Any

    def split(
        self, parameter: torch.Tensor, grad: torch.Tensor, planes: StatePlanes, settings: Settings, grad_scale: float
    ) -> Loop:
        """Updates pieces of bfloat16 parameters with float32 moments, cut at multiples of 64 elements.

        Raises InvariantError where masters are not split.
        """
        if planes.remainder is None:
            raise InvariantError("a loop for split masters was asked for where masters are not split")
        moments = planes.exp_avg.numpy(), planes.exp_avg_sq.numpy()
        arrays = _bits(parameter), planes.remainder.numpy(), _bits(grad), *moments
        update, constants = self.module.update_split, _constants(settings, grad_scale)

        def loop(piece: slice) -> None:
            update(*[array[piece] for array in arrays], constants)

        return loop

    def coded_split(
        self, parameter: torch.Tensor, grad: torch.Tensor, planes: BlockPlanes, settings: Settings, grad_scale: float
    ) -> Loop:
        """Updates pieces of bfloat16 parameters with 8-bit moments, whole blocks.

        Raises InvariantError where masters are not split.
        """
        if planes.remainder is None or planes.mark_bits is None:
            raise InvariantError("a loop for split masters was asked for where masters are not split")
        left, right, marks = _bits(parameter), planes.remainder.numpy(), planes.mark_bits.numpy()
        gradient, (codes, scales) = _bits(grad), _coded(planes)
        update, books, constants = self.module.update_coded_split, self.module.books(), _constants(settings, grad_scale)

        def loop(piece: slice) -> None:
            blocks = slice(piece.start // BLOCK_NUMEL, -(-piece.stop // BLOCK_NUMEL))
            bits = slice(piece.start // 8, -(-piece.stop // 8))
            own = (codes[0][piece], codes[1][piece]), (scales[0][blocks], scales[1][blocks])
            update(left[piece], right[piece], marks[bits], gradient[piece], *own, books, constants)

        return loop

    def update_coded(
        self, master: torch.Tensor, grad: torch.Tensor, planes: BlockPlanes, settings: Settings, grad_scale: float
    ) -> None:
        """Update float32 masters with 8-bit moments by float32 gradients, already scaled: 1-D, whole blocks."""
        self.module.update_coded(
            master.numpy(), grad.numpy(), *_coded(planes), self.module.books(), _constants(settings, grad_scale)
        )

    def update_split(self, parameter: torch.Tensor, *others: Any) -> None:
        """What `split` gives, on all of it."""
        self.split(parameter, *others)(slice(0, parameter.numel()))

    def update_coded_split(self, parameter: torch.Tensor, *others: Any) -> None:
        """What `coded_split` gives, on all of it."""
        self.coded_split(parameter, *others)(slice(0, parameter.numel()))


def are_wanted(dtype: torch.dtype, moments: str) -> bool:
    """Whether parameters of `dtype` are updated by them where they can be had; `moments`: as `Config` has it."""
    return dtype == torch.bfloat16 or moments == "int8"


@functools.cache
def compiled_loops() -> CompiledLoops | None:
    """The loops, or None where they cannot be had. Imports and compiles at the first call: a second, once."""
    found = _find()
    return found if isinstance(found, CompiledLoops) else None


def why_not() -> str | None:
    """Why there are no compiled loops in this process; None if there are."""
    found = _find()
    return found if isinstance(found, str) else None


@functools.cache
def _find() -> CompiledLoops | str:
    """The loops, or why there are none; tried on a thread that is gone afterwards.

    A second thread that has once computed with torch on several cores keeps OpenMP threads of its own for as long as it
    lives. GNU's OpenMP then counts more threads than cores, and all of them, the computation's too, sleep at the end of
    every operation instead of being ready for the next. Measured with two cores: 4,000 sleeps in a step, 3 % of it.
    """
    try:
        found = elsewhere("tiermem-trial", _try)
    except TiermemError as error:  # a process that is ending, or that may have no more threads
        return f"the compiled loops could not be tried: {error}"
    release_library("libllvmlite")  # the compiler is through
    return found


def _try() -> CompiledLoops | str:
    try:
        loops = CompiledLoops(importlib.import_module("tiermem.optim.loops"))
        different = differences(loops)
    except ImportError as error:
        return f"numba cannot be imported ({error}): install it, or a version of it for this Python and processor"
    except OSError as error:
        return f"numba cannot keep what it compiles ({error}): make room there, or set NUMBA_CACHE_DIR"
    except Exception as error:  # noqa: BLE001  a compiler has many ways to fail, and torch can do without it
        return f"numba cannot compile the update here ({type(error).__name__}: {error})"
    if different:
        return f"the compiled {', '.join(different)} would not have the bits of torch on this processor"
    return loops


def differences(loops: CompiledLoops) -> list[str]:
    """The loops whose results differ from torch's in any bit, on a few thousand numbers of every kind."""
    from tiermem.optim import kernels

    generator = torch.Generator().manual_seed(20)
    trials: list[tuple[str, Update, torch.dtype, type[StatePlanes | BlockPlanes]]] = [
        ("update_split", loops.update_split, torch.bfloat16, StatePlanes),
        ("update_coded_split", loops.update_coded_split, torch.bfloat16, BlockPlanes),
        ("update_coded", loops.update_coded, torch.float32, BlockPlanes),
    ]
    return [
        name
        for name, update, dtype, kind in trials
        if not all(
            _same(kernels.update_by_torch, update, generator, dtype, kind, settings)
            for settings in (
                Settings(3e-4, 0.9, 0.95, 1e-8, 0.1, 1),
                Settings(0.1, 0.3, 0.999, 1e-6, 0.0, 1000),
            )
        )
    ]


_NUMEL = 4096
_WIDE = torch.float32  # whatever torch's default is


def _same(
    by_torch: Update,
    compiled: Update,
    generator: torch.Generator,
    dtype: torch.dtype,
    kind: type[StatePlanes | BlockPlanes],
    settings: Settings,
) -> bool:
    """Three updates of the same numbers by both, with and without a scale of gradients."""
    magnitudes = torch.logspace(-30, 3, _NUMEL, dtype=_WIDE)[torch.randperm(_NUMEL, generator=generator)]
    parameter = (torch.randn(_NUMEL, generator=generator, dtype=_WIDE) * magnitudes).to(dtype)
    sides = [(update, parameter.clone(), _planes(kind, dtype)) for update in (by_torch, compiled)]
    # A scale on float32 gradients is applied before the loop is called.
    for scale in (1.0, 0.37, 1.0) if dtype == torch.bfloat16 else (1.0, 1.0):
        grad = (torch.randn(_NUMEL, generator=generator, dtype=_WIDE) * magnitudes.flip(0)).to(dtype)
        grad[::97] = 0.0
        for update, own, planes in sides:
            update(own, grad, planes, settings, scale)
    (_, left, left_planes), (_, right, right_planes) = sides
    pairs = zip([left, *_tensors(left_planes)], [right, *_tensors(right_planes)], strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _planes(kind: type[StatePlanes | BlockPlanes], dtype: torch.dtype) -> StatePlanes | BlockPlanes:
    split = dtype == torch.bfloat16
    # Every fourth remainder is a tie's, every eighth has its mark.
    remainder = torch.arange(_NUMEL).mul_(4097).to(torch.int16) if split else None
    if remainder is not None:
        remainder[::4] = -0x8000
    if kind is StatePlanes:
        second = torch.rand(_NUMEL, generator=torch.Generator().manual_seed(3), dtype=_WIDE)
        if remainder is not None:
            second[::8] *= -1.0
        return StatePlanes(remainder, None, torch.zeros(_NUMEL, dtype=_WIDE), second)
    marks = torch.zeros(_NUMEL // 8, dtype=torch.uint8) if split else None
    if marks is not None:
        marks[: _NUMEL // 16] = 1  # whole blocks have none
    codes, scales = torch.zeros(_NUMEL, dtype=torch.uint8), torch.zeros(_NUMEL // BLOCK_NUMEL, dtype=_WIDE)
    moments = [Blocks(codes.clone(), scales.clone()) for _ in range(2)]
    return BlockPlanes(remainder, None, marks, *moments)


def _tensors(planes: StatePlanes | BlockPlanes) -> Sequence[torch.Tensor]:
    if isinstance(planes, StatePlanes):
        found = [planes.remainder, planes.exp_avg, planes.exp_avg_sq]
    else:
        blocks = planes.exp_avg, planes.exp_avg_sq
        found = [planes.remainder, planes.mark_bits, *(view for b in blocks for view in (b.codes, b.scales))]
    return [tensor for tensor in found if tensor is not None]


def _bits(narrow: torch.Tensor) -> Any:
    return narrow.view(torch.int16).numpy()


def _coded(planes: BlockPlanes) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    blocks = planes.exp_avg, planes.exp_avg_sq
    return (blocks[0].codes.numpy(), blocks[1].codes.numpy()), (blocks[0].scales.numpy(), blocks[1].scales.numpy())


def _constants(settings: Settings, grad_scale: float) -> tuple[np.float32, ...]:
    """As torch's fused AdamW has them: computed in float64, rounded once."""
    correction1 = 1.0 - settings.beta1**settings.step
    correction2 = 1.0 - settings.beta2**settings.step
    numbers = (
        1.0 - settings.lr * settings.weight_decay,
        1.0 - settings.beta1,
        settings.beta2,
        1.0 - settings.beta2,
        correction2**0.5,
        settings.eps,
        -(settings.lr / correction1),
        grad_scale,
    )
    return tuple(np.float32(number) for number in numbers)
