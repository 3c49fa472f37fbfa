"""AdamW on one tile.

Owns the arithmetic of the update, and the scratch memory it runs in. Does not know pages, threads or where the tensors
came from. Guarantees, for float32 parameters, the bits of `torch.optim.AdamW(fused=True)` on the whole parameter, and
for bfloat16 and float16 ones the bits of the same applied to a float32 master that is then rounded to the parameter.

Slicing and bits
----------------
`torch._fused_adamw_`, which `fused=True` ends in, updates whole vector registers first and the rest of the tensor one
element at a time, and the two can differ in the last bit (a multiplication and an addition are fused in one only). So a
parameter may be cut at multiples of 64 elements, counted from its own start, and nowhere else: then exactly the
elements that are left over in the whole parameter are left over in the last slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tiermem.errors import InvariantError
from tiermem.optim.split import join, split
from tiermem.optim.tiles import SEGMENT_ALIGNMENT, StatePlanes
from tiermem.optim.updates import Settings

SLICE_NUMEL = 262144  # three slices of 1 MiB stay in cache while the calls into torch stay few


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a tile that is updated with one set of settings; `begin` and `length` in elements of the tile."""

    begin: int
    length: int
    settings: Settings


class Workspace:
    """Scratch for one worker: allocated once, used by one kernel at a time."""

    def __init__(self, slice_numel: int = SLICE_NUMEL) -> None:
        if slice_numel <= 0 or slice_numel % SEGMENT_ALIGNMENT:
            raise InvariantError(f"slices of {slice_numel} elements, expected a multiple of {SEGMENT_ALIGNMENT}")
        self.slice_numel = slice_numel
        self.master = torch.empty(slice_numel, dtype=torch.float32)
        self.grad = torch.empty(slice_numel, dtype=torch.float32)
        self.integers = torch.empty(slice_numel, dtype=torch.int32)
        self.step = torch.zeros((), dtype=torch.float32)

    def slices(self, begin: int, length: int) -> Iterator[slice]:
        """Cut [begin, begin + length) into slices that fit the scratch."""
        end = begin + length
        for start in range(begin, end, self.slice_numel):
            yield slice(start, min(start + self.slice_numel, end))


def adamw_tile(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    planes: StatePlanes,
    runs: Sequence[Run],
    workspace: Workspace,
    grad_scale: float = 1.0,
) -> None:
    """Update one tile in place.

    `parameter` and `grad` are 1-D of one dtype (float32, bfloat16 or float16) and of the tile's length, as are
    `planes`; `grad` is only read. Elements outside `runs` are not touched. Raises `InvariantError` when the tensors do
    not fit together.
    """
    if parameter.dtype != grad.dtype or parameter.numel() != grad.numel() or planes.exp_avg.numel() != grad.numel():
        raise InvariantError(
            f"a tile of {parameter.numel()} {parameter.dtype} parameters came with {grad.numel()} gradients of "
            f"{grad.dtype} and {planes.exp_avg.numel()} moments"
        )
    for run in runs:
        workspace.step.fill_(run.settings.step)
        if parameter.dtype == torch.float32 and grad_scale == 1.0:
            # One pass over memory however long the run is: nothing to gain from slices.
            whole = slice(run.begin, run.begin + run.length)
            _fused(parameter[whole], grad[whole], planes, whole, run.settings, workspace.step)
            continue
        for part in workspace.slices(run.begin, run.length):
            _update_slice(parameter[part], grad[part], planes, part, run.settings, (workspace, grad_scale))


def _update_slice(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    planes: StatePlanes,
    part: slice,
    settings: Settings,
    scaling: tuple[Workspace, float],
) -> None:
    workspace, grad_scale = scaling
    numel = parameter.numel()
    grad32 = scaled_grad(grad, grad_scale, workspace)
    if planes.remainder is not None:
        master, integers = workspace.master[:numel], workspace.integers[:numel]
        remainder, exp_avg_sq = planes.remainder[part], planes.exp_avg_sq[part]
        join(parameter, remainder, exp_avg_sq, master, integers)
        _fused(master, grad32, planes, part, settings, workspace.step)
        split(master, parameter, remainder, exp_avg_sq, integers)
    elif planes.master is not None:
        master = planes.master[part]
        _fused(master, grad32, planes, part, settings, workspace.step)
        parameter.copy_(master)
    else:
        _fused(parameter, grad32, planes, part, settings, workspace.step)


def scaled_grad(grad: torch.Tensor, grad_scale: float, workspace: Workspace) -> torch.Tensor:
    """Return a slice of gradients in float32, after scaling in its own dtype as `clip_grad_norm_` does.

    float16 is scaled in float32: undoing a loss scale in float16 would lose what the scale was there to keep.
    The result is scratch, valid until the next slice.
    """
    numel = grad.numel()
    grad32 = workspace.grad[:numel]
    if grad_scale == 1.0:
        return grad32.copy_(grad)
    if grad.dtype == torch.float32:
        return torch.mul(grad, grad_scale, out=grad32)
    if grad.dtype == torch.float16:
        return grad32.copy_(grad).mul_(grad_scale)
    narrow = workspace.integers.view(grad.dtype)[:numel]
    torch.mul(grad, grad_scale, out=narrow)
    return grad32.copy_(narrow)


def _fused(
    master: torch.Tensor,
    grad: torch.Tensor,
    planes: StatePlanes,
    part: slice,
    settings: Settings,
    step: torch.Tensor,
) -> None:
    torch._fused_adamw_(
        [master],
        [grad],
        [planes.exp_avg[part]],
        [planes.exp_avg_sq[part]],
        [],
        [step],
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
