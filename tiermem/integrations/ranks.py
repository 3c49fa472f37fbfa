"""What the processes of a Trainer do together, where torch.distributed has joined several.

Owns how they wait for each other around files, and how they tell each other of errors. Does not know Trainers, and asks
nothing of torch.distributed but its default group, whatever backend that has. Guarantees that a process by itself never
communicates, and that an error of one is an error on all, not a wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tiermem.errors import TiermemError
from tiermem.zero3.collectives import by_rank, reason_of

T = TypeVar("T")


def joined() -> int:
    """How many processes have joined, whatever the environment says."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def is_first() -> bool:
    """Whether this is the only process, or the first of several."""
    return joined() == 1 or torch.distributed.get_rank() == 0


def together(what: str, action: Callable[[], T]) -> list[T]:
    """Do something in every process, and wait for the others; what each returned, in their order.

    The results are pickled. Where it fails in one it fails in all: there its error is raised, elsewhere a TiermemError.
    """
    if joined() == 1:
        return [action()]
    failure: BaseException | None = None
    own: tuple[list[T], str]  # the result, if there is one, and why there is none
    try:
        own = ([action()], "")
    except BaseException as error:  # noqa: BLE001 - told to the others, then raised
        failure, own = error, ([], reason_of(error))
    told: list[tuple[list[T], str]] = [own] * joined()
    torch.distributed.all_gather_object(told, own)
    if failure is not None:
        raise failure
    if reasons := by_rank([reason for _, reason in told]):
        raise TiermemError(f"another rank could not {what}: {reasons}")
    return [value for (value,), _ in told]


def by_first(what: str, action: Callable[[], T]) -> T:
    """Do something in the first process, for which the others wait; what it returned, in all of them.

    Where it fails, all raise, as `together` says.
    """
    return together(what, action if is_first() else lambda: None)[0]  # type: ignore[return-value]  # the first's


def share_values(tensors: Sequence[torch.Tensor]) -> None:
    """Give all processes the values that the first one has; as bytes, for not every backend has all dtypes."""
    for tensor in tensors if joined() > 1 else ():
        values = tensor.detach().contiguous()
        torch.distributed.broadcast(values.reshape(-1).view(torch.uint8), 0)
        if not tensor.is_contiguous():
            tensor.detach().copy_(values)


def average_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Make `.grad` of each the mean over processes, as DistributedDataParallel does; None where none has one.

    A process without one counts as zeros. All pass the same parameters, all on one device.
    """
    if joined() == 1 or not parameters:
        return
    own = [int(parameter.grad is not None) for parameter in parameters]
    present = torch.tensor(own, device=parameters[0].device)
    torch.distributed.all_reduce(present)
    under_way = []
    for parameter, processes in zip(parameters, present.tolist(), strict=True):
        if processes:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient.div_(joined())
            under_way.append(torch.distributed.all_reduce(gradient, async_op=True))
    for each in under_way:
        each.wait()
