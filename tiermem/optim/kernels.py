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

Moments of 8 bits are made float32 slice by slice, updated by the same call, and rounded again: the bits then depend on
where blocks begin, which is where a parameter or a tile does, and not on slices.

Two forms with the same bits
----------------------------
What torch's operations do in eleven passes over a slice in cache, `loops.py` does in one (`compiled.py` says whether
this process has it). float32 parameters with float32 moments are one call of torch's already, and what a run has
beyond its last multiple of 64 elements, or its last whole block, is left to torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiermem.errors import InvariantError
from tiermem.memory.rounding import round_down
from tiermem.optim.blocks import BLOCK_NUMEL, HOST, BlockScratch, block_count
from tiermem.optim.codebook import CodeBook, signed_book, unsigned_book
from tiermem.optim.compiled import CompiledLoops, compiled_loops
from tiermem.optim.planes import BlockPlanes, MixedPlanes, StatePlanes
from tiermem.optim.shares import Job, Shares
from tiermem.optim.split import join, join_masked, split, split_masked
from tiermem.optim.tiles import UnitState
from tiermem.optim.updates import Settings
from tiermem.pager.tiling import ALIGN_NUMEL

SLICE_NUMEL = 262144  # three slices of 1 MiB stay in cache while the calls into torch stay few
# On a device a slice is some twenty kernels, each of which takes longer to ask for than to do on less than about this.
# Scratch is outside the budget of device memory, and a small part of it.
_DEVICE_SLICES, _SCRATCH_ITEMSIZE, _SCRATCH_PART = (1 << 20, 1 << 24), 12, 32


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a tile that is updated with one set of settings; `begin` and `length` in elements of the tile."""

    begin: int
    length: int
    settings: Settings


def device_slice_numel(budget: int) -> int:
    """Elements of a slice on a device with a budget of `budget` bytes."""
    smallest, largest = _DEVICE_SLICES
    numel = min(max(budget // (_SCRATCH_ITEMSIZE * _SCRATCH_PART), smallest), largest)
    return round_down(numel, ALIGN_NUMEL)


class _Coded(NamedTuple):
    """What 8-bit moments take besides: both of them in float32, scratch, and the books their codes are in."""

    first: torch.Tensor
    second: torch.Tensor
    scratch: BlockScratch
    signed: CodeBook
    unsigned: CodeBook


class Workspace:
    """Scratch for one worker: allocated once, used by one kernel at a time.

    `compiled` False: torch's operations only, where the default is the compiled loops if this process has them. These
    are done in `shares`; torch's operations have threads of their own. `device`: where tiles are that lie on one; for
    these there are torch's operations only, and none that has to wait for the device.
    """

    def __init__(
        self,
        slice_numel: int = SLICE_NUMEL,
        *,
        compiled: bool = True,
        shares: Shares | None = None,
        device: torch.device | None = None,
    ) -> None:
        if slice_numel <= 0 or slice_numel % ALIGN_NUMEL:
            raise InvariantError(f"slices of {slice_numel} elements, expected a multiple of {ALIGN_NUMEL}")
        self.slice_numel = slice_numel
        self.coded_slice_numel = numel = block_count(slice_numel) * BLOCK_NUMEL
        self._place = HOST if device is None else device
        self.master = torch.empty(numel, dtype=torch.float32, device=self._place)
        self.grad = torch.empty(numel, dtype=torch.float32, device=self._place)
        self.integers = torch.empty(numel, dtype=torch.int32, device=self._place)
        self.step = torch.zeros((), dtype=torch.float32, device=self._place)
        self.shares = shares if shares is not None else Shares()
        self.device = device
        self._compiled = compiled and device is None
        self._coded: _Coded | None = None

    @property
    def loops(self) -> CompiledLoops | None:
        """The compiled loops, if they are to be used and can be."""
        return compiled_loops() if self._compiled else None

    def prepare(self, units: Iterable[UnitState]) -> None:
        """Compile the loops now, if updates of these units are done by them."""
        if self._compiled and any(map(_has_loops, units)):
            compiled_loops()

    def slices(self, length: int, *, coded: bool = False) -> Iterator[slice]:
        """Cut `length` elements into slices that fit the scratch; `coded`: for 8-bit moments."""
        numel = self.coded_slice_numel if coded else self.slice_numel
        for start in range(0, length, numel):
            yield slice(start, min(start + numel, length))

    def moments(self, numel: int) -> _Coded:
        """Room for both moments of a slice in float32, whole blocks. Only who has 8-bit moments pays for it."""
        if self._coded is None:
            whole, device = self.coded_slice_numel, self.device
            both = torch.empty(2, whole, dtype=torch.float32, device=self._place)
            books = signed_book().on(device), unsigned_book().on(device)
            self._coded = _Coded(both[0], both[1], BlockScratch(whole, self._place), *books)
        whole = block_count(numel) * BLOCK_NUMEL
        return self._coded._replace(first=self._coded.first[:whole], second=self._coded.second[:whole])


def _has_loops(state: UnitState) -> bool:
    """Whether there are loops for such a unit: float32 with float32 moments is one call of torch's."""
    return state.dtype == torch.bfloat16 or any(segment.quantized for segment in state.segments)


def adamw_tile(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    planes: StatePlanes | MixedPlanes,
    runs: Sequence[Run],
    workspace: Workspace,
    grad_scale: float = 1.0,
) -> None:
    """Update one tile in place.

    `parameter` and `grad` are 1-D of one dtype (float32, bfloat16 or float16) and of the tile's length, as are
    `planes`; `grad` is only read. Elements outside `runs` are not touched. A run over 8-bit moments is all
    that the tile has of a parameter. Raises `InvariantError` when the tensors do not fit together.
    """
    if parameter.dtype != grad.dtype or parameter.numel() != grad.numel() or planes.numel != grad.numel():
        raise InvariantError(
            f"a tile of {parameter.numel()} {parameter.dtype} parameters came with {grad.numel()} gradients of "
            f"{grad.dtype} and {planes.numel} moments"
        )
    jobs: list[Job] = []
    for run in runs if workspace.device is None or isinstance(planes, MixedPlanes) else _joined(runs):
        whole = slice(run.begin, run.begin + run.length)
        part = planes.part(run.begin, run.length)
        jobs += _update_run(parameter[whole], grad[whole], part, _Task(run.settings, grad_scale, workspace))
    workspace.shares.run(jobs)


def _joined(runs: Sequence[Run]) -> list[Run]:
    """The same elements in as few runs as settings allow: on a device what costs time is how often it is asked."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.settings == run.settings and last.begin + last.length == run.begin:
            joined[-1] = Run(last.begin, last.length + run.length, run.settings)
        else:
            joined.append(run)
    return joined


def update_by_torch(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    planes: StatePlanes | BlockPlanes,
    settings: Settings,
    grad_scale: float,
) -> None:
    """Update one run by torch's operations only: what the compiled loops are compared with."""
    workspace = Workspace(parameter.numel(), compiled=False)
    _update_run(parameter, grad, planes, _Task(settings, grad_scale, workspace))


class _Task(NamedTuple):
    """What a run is updated with, and the memory for it."""

    settings: Settings
    grad_scale: float
    workspace: Workspace


def _update_run(
    parameter: torch.Tensor, grad: torch.Tensor, planes: StatePlanes | BlockPlanes, task: _Task
) -> list[Job]:
    """Update what torch is to update of a run; return what is left to loops: other elements, so the order is free."""
    begin, jobs = _update_compiled(parameter, grad, planes, task)
    left = parameter.numel() - begin
    if left:
        _update_rest(parameter[begin:], grad[begin:], planes.part(begin, left), task)
    return jobs


def _update_rest(parameter: torch.Tensor, grad: torch.Tensor, planes: StatePlanes | BlockPlanes, task: _Task) -> None:
    """Update a run, or what loops have left of it, by torch's operations."""
    workspace = task.workspace
    workspace.step.fill_(task.settings.step)
    if isinstance(planes, StatePlanes):
        if parameter.dtype == torch.float32 and task.grad_scale == 1.0:
            # One pass over memory however long the run is: nothing to gain from slices.
            _fused(parameter, grad, (planes.exp_avg, planes.exp_avg_sq), task)
            return
        for piece in workspace.slices(parameter.numel()):
            part = planes.part(piece.start, piece.stop - piece.start)
            _update_slice(parameter[piece], grad[piece], part, (part.exp_avg, part.exp_avg_sq), task)
        return
    for piece in workspace.slices(parameter.numel(), coded=True):
        coded = planes.part(piece.start, piece.stop - piece.start)
        first, second, scratch, signed, unsigned = workspace.moments(coded.numel)
        coded.exp_avg.load(signed, first, scratch)
        coded.exp_avg_sq.load(unsigned, second, scratch)
        moments = first[: coded.numel], second[: coded.numel]
        _update_slice(parameter[piece], grad[piece], coded, moments, task)
        coded.exp_avg.store(signed, first, scratch)
        coded.exp_avg_sq.store(unsigned, second, scratch)


def _update_compiled(
    parameter: torch.Tensor, grad: torch.Tensor, planes: StatePlanes | BlockPlanes, task: _Task
) -> tuple[int, list[Job]]:
    """How many elements compiled loops update, from the first one on, and the loops that are still to be run."""
    settings, grad_scale, workspace = task
    numel = parameter.numel()
    coded = isinstance(planes, BlockPlanes)
    block = BLOCK_NUMEL if coded else ALIGN_NUMEL
    end = numel - numel % block
    # Whoever has no use for the loops does not pay for numba's memory.
    loops = workspace.loops if end and (coded or planes.remainder is not None) else None
    if loops is None:
        return 0, []
    if isinstance(planes, StatePlanes):
        loop = loops.split(parameter[:end], grad[:end], planes.part(0, end), settings, grad_scale)
    elif planes.remainder is not None:
        loop = loops.coded_split(parameter[:end], grad[:end], planes.part(0, end), settings, grad_scale)
    else:
        for piece in workspace.slices(end, coded=True):  # one at a time: they need scratch
            part = planes.part(piece.start, piece.stop - piece.start)
            _update_coded(loops, parameter[piece], grad[piece], part, task)
        return end, []
    return end, [Job(end, block, loop)]


def _update_coded(
    loops: CompiledLoops, parameter: torch.Tensor, grad: torch.Tensor, planes: BlockPlanes, task: _Task
) -> None:
    master = parameter if planes.master is None else planes.master
    loops.update_coded(master, _scaled_grad(grad, task), planes, task.settings, 1.0)
    if planes.master is not None:
        parameter.copy_(planes.master)


def _update_slice(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    planes: StatePlanes | BlockPlanes,
    moments: tuple[torch.Tensor, torch.Tensor],
    task: _Task,
) -> None:
    workspace, numel = task.workspace, parameter.numel()
    grad32 = _scaled_grad(grad, task)
    if planes.remainder is not None:
        master, integers = workspace.master[:numel], workspace.integers[:numel]
        if workspace.device is not None:
            masks = planes.masks
            join_masked(parameter, planes.remainder, masks, master)
            _fused(master, grad32, moments, task)
            split_masked(master, parameter, planes.remainder, masks)
            return
        marks = planes.marks
        join(parameter, planes.remainder, marks, master, integers)
        _fused(master, grad32, moments, task)
        split(master, parameter, planes.remainder, marks, integers)
    elif planes.master is not None:
        _fused(planes.master, grad32, moments, task)
        parameter.copy_(planes.master)
    else:
        _fused(parameter, grad32, moments, task)


def _scaled_grad(grad: torch.Tensor, task: _Task) -> torch.Tensor:
    """Return a slice of gradients in float32, after scaling in its own dtype as `clip_grad_norm_` does.

    float16 is scaled in float32: undoing a loss scale in float16 would lose what the scale was there to keep.
    The result is `grad` itself or scratch, valid until the next slice.
    """
    grad_scale, workspace, numel = task.grad_scale, task.workspace, grad.numel()
    grad32 = workspace.grad[:numel]
    if grad_scale == 1.0:
        return grad if grad.dtype == torch.float32 else grad32.copy_(grad)
    if grad.dtype == torch.float32:
        return torch.mul(grad, grad_scale, out=grad32)
    if grad.dtype == torch.float16:
        return grad32.copy_(grad).mul_(grad_scale)
    narrow = workspace.integers.view(grad.dtype)[:numel]
    torch.mul(grad, grad_scale, out=narrow)
    return grad32.copy_(narrow)


def _fused(master: torch.Tensor, grad: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor], task: _Task) -> None:
    settings = task.settings
    torch._fused_adamw_(
        [master],
        [grad],
        [moments[0]],
        [moments[1]],
        [],
        [task.workspace.step],
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
