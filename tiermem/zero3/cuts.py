"""The graph of a micro-batch, cut where it enters a unit, so that backward can be done a unit at a time.

Owns the cuts, the segments of graph between them, and the proof that nothing leads around a cut. Does not know threads,
nor when a segment has its turn. Guarantees the gradients of the graph that was not cut, bit for bit: whatever has two
gradients gets them in the order in which the engine would have added them; a graph where that cannot be had is found
before anything goes backward through it.

Why cut. A backward in one piece can only wait for other micro-batches inside a hook, with its whole stack, that is on a
thread of its own; and GNU's OpenMP keeps a team of threads for each thread that computes. More teams than cores sleep
after every operation (`benchmarks/MEASURED.md`). Segments go backward one by one on the caller's thread.

Which graphs can be cut is not known beforehand, so in those of a model's first micro-batches it is only noted where
the cuts would be. (A view there would be a node, with a sum of its own of what a unit adds up for what it was given:
other last bits where others use that, too.) A graph can be cut if every way from a segment into an earlier one leads
from within a call to what was given to it, each leaf belongs to one segment, and no unit writes into what it was given.
Nodes know when they were made (`node_number`), and so to which segment and call they belong. Where it cannot be cut
segments are joined, so that words and positions may be two units; not if two units' values would have to be brought for
each micro-batch.

Several segments may use one tensor: a parameter (tied words), or what several units are given (what an encoder has
made). The engine adds up its gradients one by one, those of the last use first. So each segment begins with what later
ones have given, and adds its own to that: a parameter's gradient is kept back until the first segment that uses it has
its turn, and a unit is given what an earlier one was given of the same tensor. Hooks of a parameter see the sum of all
of its gradients in plain PyTorch; so one that has some is used by one segment, or these are joined.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tiermem.errors import TiermemError
from tiermem.interrupts import call_out
from tiermem.zero3.engine import has_hooks, node_number, sequence_number, version
from tiermem.zero3.step_gradients import take_gradient

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Cutting:
    """Where the graphs of a model can be cut, as far as is known.

    `why_not`: why they cannot be cut at all, None while nothing speaks against it. `joined`: the entries into units,
    counted from 1 in each micro-batch, where they cannot. `why_no_more`: why not from the next `forward_backward` on.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], needed: Callable[[int], object]) -> None:
        """`parameters`: whose gradients may be kept back. `needed(unit)`: whether a graph needs its values."""
        self.why_not: str | None = None
        self.why_no_more: str | None = None
        self.joined: set[int] = set()
        self.parameters = {id(parameter) for parameter in parameters}
        self.needed = needed
        self._looked_at = False

    def cuts(self, count: int) -> Cuts:
        """What cuts the graph of one of `count` micro-batches, or notes where; or leaves it in one piece."""
        return Cuts(self, whole=count < 2 or self.why_not is not None, sever=self._looked_at)

    def severs(self, count: int) -> bool:
        """Whether it cuts: then nothing is left of a micro-batch that would have to be stopped in its backward."""
        return count > 1 and self.why_not is None and self._looked_at

    def succeeded(self, count: int) -> None:
        """All of `count` micro-batches have been through the model."""
        self._looked_at = self._looked_at or count > 1
        self.why_not = self.why_not or self.why_no_more


class _Segment:
    """What was computed from one cut to the next, which is where a call begins that ends, or comes back, at `end`.

    `ends`: what later ones were given, its gradient, and which one.
    """

    __slots__ = ("begin", "end", "ends", "unit")

    def __init__(self, unit: int | None) -> None:
        self.unit = unit
        self.begin = sequence_number()
        self.end = math.inf
        self.ends: list[tuple[torch.Tensor, list[torch.Tensor], int]] = []


class Cuts:
    """The cuts in one micro-batch's graph; not `sever`: where they would be; `whole`: none. One thread at a time."""

    def __init__(self, cutting: Cutting, *, whole: bool, sever: bool) -> None:
        self._cutting = cutting
        self._whole = whole
        self._sever = sever
        self._segments: list[_Segment] = []
        self._entries = 0
        self._calls: dict[object, _Segment] = {}  # in progress, that began a segment
        self._marks: dict[tuple[Any, int], list[int]] = {}  # outputs of nodes, to the segments they were given to
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._given: dict[int, tuple[int, torch.Tensor]] = {}  # ids of tensors, to who had them last, and as what
        self._open = False
        # All segments but the last that use a parameter, where several do; by id, as what is kept of their gradients.
        self._uses: dict[int, set[int]] = {}
        self._kept: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def begin(self) -> None:
        """What this thread computes from now on is the micro-batch's."""
        if not self._whole:
            self._segments = [_Segment(None)]
            self._open = True

    def enter(self, call: object, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A module of `unit` is called with these; returns what to call it with instead, None: nothing else."""
        if not self._open:
            return None
        self._entries += 1
        joined = self._sever and self._entries in self._cutting.joined
        if joined:
            self._segments[-1].unit = unit
        else:
            self._segments.append(_Segment(unit))
            self._calls[call] = self._segments[-1]
        if not torch.is_grad_enabled():
            return None
        return tuple(self._give(value, joined=joined) for value in args), {
            name: self._give(value, joined=joined) for name, value in kwargs.items()
        }

    def leave(self, call: object) -> None:
        """A call has ended."""
        segment = self._calls.pop(call, None)
        if segment is not None:
            segment.end = sequence_number()

    def looked_back(self) -> None:
        """Another backward went from one unit to another, before the micro-batch's own."""
        if self._open:
            self._cutting.why_not = "the loss goes backward through several units itself"

    def strayed(self) -> None:
        """Backward computes a unit again that is not its segment's, and so brings it for each micro-batch."""
        if not self._whole:
            self._cutting.why_no_more = "a checkpoint computes units again that backward has not come to"

    def close(self, loss: torch.Tensor) -> None:
        """Backward begins at `loss`. Raises TiermemError if the graph was cut and should not have been."""
        if self._whole:
            return
        self._open = False
        reason = self._cutting.why_not or self._why_not(loss)
        self._calls.clear()
        self._marks.clear()
        self._versions.clear()
        self._given.clear()
        if self._sever and reason is not None:
            self._cutting.why_not = reason
            raise TiermemError(
                f"a micro-batch went another way through the model than those before: {reason}; forget this step's "
                "gradients (optimizer.zero_grad()) and do it again: from now on each micro-batch goes by itself"
            )
        if self._sever:
            self._segments.pop()  # backward from the loss goes through this one
        else:
            self._cutting.why_not = reason
            self._segments.clear()
            self._uses.clear()

    @property
    def units(self) -> list[int | None]:
        """The units backward has still to go through, the next one last."""
        return [segment.unit for segment in self._segments]

    def go_back(self) -> None:
        """Go backward through the last segment that is left."""
        roots: list[tuple[torch.Tensor, torch.Tensor | None]]
        # In the order in which the engine meets them; it adds up gradients of one tensor as they come.
        roots = [(end, gradients[0]) for end, gradients, _ in reversed(self._segments.pop().ends) if gradients]
        number = len(self._segments)
        kept = [self._kept.pop(key) for key in [*self._kept] if number in self._uses[key]]
        roots += [(_begin_with(parameter, gradients), None) for parameter, gradients in kept]
        if roots:
            tensors, gradients = zip(*roots, strict=True)
            del roots
            with torch.autograd.set_multithreading_enabled(False):
                call_out(torch.autograd.backward, tensors, gradients)

    def keeps_back(self, parameter: torch.Tensor) -> bool:
        """A gradient of `parameter` has arrived in `parameter.grad`; whether it is kept here, for more will come."""
        number = len(self._segments)  # of the segment that backward is going through
        if min(self._uses.get(id(parameter), ()), default=number) >= number:
            return False
        gradient = take_gradient(parameter)
        if gradient is not None:
            self._kept[id(parameter)] = parameter, [gradient]
        return gradient is not None

    def _give(self, value: Any, *, joined: bool) -> Any:
        if type(value) is tuple:
            return tuple(self._give(part, joined=joined) for part in value)
        if type(value) is not torch.Tensor or value.grad_fn is None:
            return value  # anything else with a graph behind it is found to lead around the cut
        number = len(self._segments) - 1
        maker, latest = self._given.get(id(value)) or (self._made_in(value.grad_fn, number), value)
        if joined or maker == number:
            return latest
        gradients: list[torch.Tensor] = []
        self._segments[maker].ends.append((latest, gradients, number))
        self._versions.append((value, version(value)))
        given = _cut(latest, gradients) if self._sever else latest
        self._given[id(value)] = number, given
        self._marks.setdefault((given.grad_fn, given.output_nr), []).append(number)
        return given

    def _made_in(self, node: Any, before: int) -> int:
        """The segment that a node belongs to, of those before number `before`."""
        begins = [segment.begin for segment in self._segments[:before]]
        return max(bisect_right(begins, node_number(node)) - 1, 0)

    def _why_not(self, loss: torch.Tensor) -> str | None:
        """Why the graph cannot be cut; what has to be joined is noted."""
        if any(version(tensor) != before for tensor, before in self._versions):
            return "a unit writes into what it was given"
        around = "what is made before a unit, and was not given to it, is used after it"
        if self._sever:
            return around if self._around(loss, set()) else None
        joined = self._cutting.joined
        while found := self._around(loss, joined):
            joined |= found
        if not any(to not in joined for segment in self._segments for _, _, to in segment.ends):
            return around if joined else "there is one unit only"
        first = 0
        for stop in [number for number in range(1, len(self._segments)) if number not in joined]:
            units = {segment.unit for segment in self._segments[first:stop]}
            if sum(unit is not None and bool(self._cutting.needed(unit)) for unit in units) > 1:
                return around
            first = stop
        return None

    def _around(self, loss: torch.Tensor, joined: set[int]) -> set[int]:
        """Which segments would have to be joined to the one before, for all that leads around a cut."""
        owners: dict[Any, int] = {}
        found: set[int] = set()
        edges: list[tuple[Any, int, int | None]] = [(loss.grad_fn, loss.output_nr, None)]
        for number, segment in reversed(list(enumerate(self._segments))):
            edges.extend((end.grad_fn, end.output_nr, None) for end, _, to in segment.ends if to not in joined)
            if number in joined:
                continue
            while edges:
                node, output, user = edges.pop()
                if node is None or owners.get(node) == number or self._is_given(node, output, number, user, joined):
                    continue
                if (owner := owners.setdefault(node, number)) != number:
                    leaf: Any = getattr(node, "variable", None)
                    if id(leaf) in self._cutting.parameters and not has_hooks(leaf):
                        self._uses.setdefault(id(leaf), set()).add(number)
                    else:
                        found.update(range(number + 1, owner + 1))
                elif node_number(node) < segment.begin and not self._is_cast(node):
                    found.update(range(self._made_in(node, number) + 1, number + 1))
                else:
                    edges.extend((following, output, node_number(node)) for following, output in node.next_functions)
        return found

    def _is_given(self, node: Any, output: int, number: int, user: int | None, joined: set[int]) -> bool:
        """Whether the node numbered `user` has this output of another as segment `number` was given it.

        Before anything is cut whoever was not called with it has what lies in front of the cut.
        """
        given = self._marks.get((node, output), [])
        if number not in given:
            return False
        if self._sever or user is None:
            return True
        calls = [self._segments[other] for other in given if other == number or other in joined]
        return any(segment.begin <= user < segment.end for segment in calls)

    def _is_cast(self, node: Any) -> bool:
        """Whether all behind it are parameters: what autocast has cast for one micro-batch it gives to others, too."""
        leaves = [id(getattr(following, "variable", None)) for following, _ in node.next_functions]
        return bool(leaves) and all(leaf in self._cutting.parameters for leaf in leaves)


class _Cut(torch.autograd.Function):
    """The same numbers; their gradient is kept and goes no further."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gradients.extend(gradient for gradient in gradients if gradient is not None)
        return None, None


class _BeginWith(torch.autograd.Function):
    """Gives a leaf its first gradient; as nobody else has that any more, the engine adds the others to it in place."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.empty((), dtype=gradients[0].dtype, device=gradients[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.gradients.pop(), None


def _begin_with(leaf: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = _BeginWith.apply(leaf, gradients)  # type: ignore[no-untyped-call]
    return result


def _cut(tensor: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = _Cut.apply(tensor.detach().requires_grad_(), gradients)  # type: ignore[no-untyped-call]
    return result
