"""Gradients of several ranks, from autograd into the pages of the rank that updates them.

Owns the bucket in which one unit's gradients are collected, the exchange that adds the buckets of all ranks up, and
for each parameter whether it has a gradient in this step and its norm. Does not know modules or the update. Guarantees
that all ranks agree on which parameters have a gradient and on every bit of their norms, that a parameter without one
on some ranks counts as zeros there, and that the sum over ranks is taken in rank order, so that runs repeat bit by bit.

A gradient's way. Contributions are added up in the bucket, in the parameter's dtype, until the unit is left: its last
expected gradient has come, another unit's comes, or backward ends. Then the bucket is exchanged tile by tile: each rank
receives all ranks' slices of what it owns, adds them (16-bit ones in float32), divides by the number of ranks, and adds
the mean to its GRAD tile. One rounding, whatever the number of ranks; no more bytes on the wire than a reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from tiermem.errors import TiermemError
from tiermem.future import Future
from tiermem.pager.page import Intent
from tiermem.pager.pager import Pager
from tiermem.zero3.buckets import Bucket, Buckets
from tiermem.zero3.collectives import Collectives
from tiermem.zero3.conductor import Act, Conductor, Operation
from tiermem.zero3.layout import Slot, memory_order
from tiermem.zero3.norms import gradient_norm, norm_dtype
from tiermem.zero3.shards import Shard, bucket_ranges, owned_of
from tiermem.zero3.step_gradients import StepGradients, copy_out, plain, take_gradient
from tiermem.zero3.sums import mean_over_ranks


class RankGradients(StepGradients):
    """As `reduce.GradientStore`, for several ranks. `parameters` by global number.

    `accumulate` and the other verbs are for the compute thread; `serve` runs on the conductor's.
    """

    alone = False

    def __init__(
        self,
        pager: Pager,
        shards: Sequence[Shard],
        parameters: Sequence[nn.Parameter],
        conductor: Conductor,
        buckets: Buckets,
        *,
        beside: bool,
    ) -> None:
        """`beside`: whether a bucket may be exchanged while the next is computed; else it is waited for.

        `buckets`: if they are `late` they are kept until all line up (ZeRO's stage 1), so that several backwards cost
        one exchange.
        """
        super().__init__(pager, [shard.layout for shard in shards], parameters)
        self._shards = tuple(shards)
        self._conductor = conductor
        self._beside = beside
        self._buckets = buckets
        self._places: dict[int, tuple[Shard, Slot]] = {
            slot.parameter: (shard, slot) for shard in shards for slot in shard.layout.trainable
        }
        self._open: Bucket | None = None
        self._under_way: tuple[Bucket, Future[None]] | None = None
        self._lined_up = self._ended = -1
        conductor.connect(self.serve)

    def prepare_together(self) -> None:
        """Nothing to prepare: no gradient waits here for another one."""

    def accumulate(self, parameter: int, *, more: bool = False, together: bool = False) -> None:  # noqa: ARG002
        """Move `p.grad` of this parameter into its unit's bucket, whatever comes. Waits for the bucket's page."""
        gradient = take_gradient(self._parameters[parameter])
        if gradient is None:
            return
        shard, slot = self._places[parameter]
        flat = memory_order(plain(gradient), slot)
        if self._open is not None and self._open.shard is not shard:
            self.release(self._open.shard.unit)
        if self._open is None:
            self._wait()
            self._open = self._buckets.take(shard)
        bucket = self._open
        whole = bucket.tensor()
        for cut in bucket_ranges(shard, slot):
            place = whole[cut.start : cut.start + cut.length]
            fresh = flat[cut.begin : cut.begin + cut.length]
            if parameter in bucket.present:
                place.add_(fresh)
            else:
                place.copy_(fresh)
        bucket.present.add(parameter)

    def release(self, unit: int | None = None) -> None:
        """Let go of the unit written last: start adding it up, unless it is kept until all line up.

        With `unit`, only if that is the one. Without, also of the room for one whose gradients have not come.
        """
        bucket = self._open
        if bucket is not None and unit in (None, bucket.shard.unit):
            self._open = None
            if self._buckets.late:
                self._buckets.keep(bucket)
            else:
                self._add_up(bucket)
        if unit is None:
            self._buckets.give_up()

    def expect(self, unit: int | None) -> None:
        """The unit's gradients come next: room for its bucket is made from now on. Does not wait. None: none come next.

        Not while another one is filled, nor while one is exchanged, where there is no room for two.
        """
        if unit is None or self._open is not None:
            return
        exchanged = self._under_way is None or self._under_way[1].done()
        if exchanged or (self._buckets.two and self._under_way is not None and self._under_way[0].shard.unit != unit):
            self._buckets.ask(self._shards[unit])

    def backward_ended(self, *, together: bool) -> None:
        """Start adding up what was written last."""
        super().backward_ended(together=together)
        self.release()

    def batch_complete(self, unit: int) -> None:
        """Nothing: other ranks may see it differently, and the bucket is added up before the next one is filled."""

    def complete(self, unit: int, then: Callable[[int], None]) -> None:
        """Say to the others, with the bucket, that it is this rank's last one of the unit.

        `then(unit)` follows on the calling thread when all have said so and all is added up: in a later call of these
        verbs, or, where another rank says less, not at all.
        """
        if self._open is not None and self._open.shard.unit == unit:
            self._open.then = then
        self.release(unit)

    def catch_up(self, unit: int | None) -> None:
        """Where the unit's last bucket is under way, wait for it: all ranks go on from the same values. None: any's."""
        bucket = self._under_way[0] if self._under_way is not None else None
        if bucket is not None and bucket.then and unit in (None, bucket.shard.unit):
            self._wait()

    def _add_up(self, bucket: Bucket) -> None:
        if self._conductor.is_closed:  # an error has ended the run in the middle of a backward
            bucket.lease.release()
            return
        whole = bucket.tensor()
        for slot in bucket.shard.layout.trainable:
            if slot.parameter not in bucket.present:
                for cut in bucket_ranges(bucket.shard, slot):
                    whole[cut.start : cut.start + cut.length].zero_()
        del whole
        bucket.lease.hand_over()
        undo = bucket.lease.release
        operation: Operation[None] = Operation(Act.REDUCE, bucket.shard.unit, undo=lambda _: undo(), bucket=bucket)
        self._under_way = bucket, self._conductor.start(operation)
        if not self._beside:
            self._wait()

    def line_up(self, act: Act = Act.SETTLE, alike: Callable[[], str] = lambda: "") -> None:
        """Wait until all ranks have come here, and all gradients until here are added up. Collective.

        They have to come for the same `act`, with the same words: a rank that forgets gradients with which others step,
        or clip, would leave half a model updated. Nothing to wait for where nothing was done together since the last
        time, which is the same on every rank; for DROP, since the last step or DROP.
        """
        self._end()
        for shard in self._buckets.kept():
            self._add_up(self._buckets.take(shard))
            self._wait()
        since = self._ended if act is Act.DROP else self._lined_up
        if act in (Act.STEP, Act.CLIP) or self._conductor.announced() != since:
            self._conductor.run(Operation(act, alike=alike()))
            self._lined_up = self._conductor.announced()
        if act in (Act.STEP, Act.DROP):
            self._ended = self._conductor.announced()

    def read(self, parameter: int) -> torch.Tensor | None:
        """Return a copy of this step's gradient in the parameter's shape, or None if it has none. Collective."""
        if parameter not in self._norms:
            return None
        shard, slot = self._places[parameter]
        whole = torch.zeros(slot.numel, dtype=slot.dtype, device="cpu")

        def fill() -> None:
            for piece in owned_of(shard, slot):
                start = slot.start + piece.begin - shard.begin
                copy_out(self._pager, shard.layout, start, whole[piece.begin : piece.begin + piece.length])

        look(self._conductor, shard, slot, fill, whole)
        return whole.as_strided(slot.shape, slot.stride).to(self._parameters[parameter].device)

    def serve(self, unit: int, bucket: Bucket | None, senders: Sequence[bool]) -> None:
        """Take part in adding a unit up, with this rank's gradients or without any. On the conductor's thread."""
        shard = self._shards[unit]
        try:
            present = self._present(shard, bucket)
            squares = self._exchange(shard, bucket, senders, present)
        finally:
            if bucket is not None:
                self._pager.start_discard([shard.bucket_key])
                bucket.lease.release()
        told = self._conductor.grid.everyone.tell_floats(squares)
        own = self._conductor.grid.of_own_copy(told)
        _require_same(self._conductor.grid.of_copies(told), shard.layout.name)
        for index, number in enumerate(self.trainable(unit)):
            if present[index]:
                total = math.sqrt(sum(each[index] for each in own))
                self._norms[number] = torch.tensor(total, dtype=norm_dtype(shard.layout.dtype), device="cpu")

    def _end(self) -> None:
        self.release()
        self._wait()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            bucket, future = under_way
            self._conductor.wait(future)
            if bucket.complete and bucket.then is not None:
                bucket.then(bucket.shard.unit)

    def _present(self, shard: Shard, bucket: Bucket | None) -> list[bool]:
        own = bucket.present if bucket is not None else set()
        last = bucket is not None and bucket.then is not None
        numbers = [int(last), *(int(number in own) for number in self.trainable(shard.unit))]
        told = list(zip(*self._conductor.grid.everyone.tell(numbers), strict=True))
        if bucket is not None:
            bucket.complete = all(told[0])
        return [any(each) for each in told[1:]]

    def _exchange(
        self, shard: Shard, bucket: Bucket | None, senders: Sequence[bool], present: Sequence[bool]
    ) -> torch.Tensor:
        """Add up, store, and return this rank's share of each parameter's squared norm, in float64."""
        received = self._pager.lease([shard.received_key], Intent.FRESH)
        try:
            room = received.tensor(shard.received_key)
            squares = torch.zeros(len(present), dtype=torch.float64, device=room.device)
            sent = bucket.tensor() if bucket is not None else room[:0].view(shard.layout.dtype)

            def store(tile: int, mean: torch.Tensor) -> None:
                self._store(shard, tile, mean, present, squares)

            mean_over_ranks(self._conductor.grid, shard, room, sent, senders, store)
        finally:
            self._pager.start_discard([shard.received_key])
            received.release()
        return squares

    def _store(
        self, shard: Shard, tile: int, mean: torch.Tensor, present: Sequence[bool], squares: torch.Tensor
    ) -> None:
        """Add one tile of the mean to what it had in this step."""
        key = shard.layout.gradient_key(tile)
        lease = self._pager.lease([key], Intent.WRITE if key in self._written else Intent.FRESH)
        try:
            self._written.add(key)
            page = lease.tensor(key).view(shard.layout.dtype)
            low = tile * shard.layout.tile_numel
            high = low + shard.tile_length(tile)
            for index, slot in enumerate(shard.layout.trainable):
                begin = max(slot.start - shard.begin, low) - low
                end = min(slot.start + slot.numel - shard.begin, high) - low
                if begin >= end or not present[index]:
                    continue
                fresh, kept = mean[begin:end], page[begin:end]
                if slot.parameter in self._norms:
                    fresh.add_(kept)
                kept.copy_(fresh)
                # Not looked at here, so that a device is not waited for.
                squares[index].add_(gradient_norm(fresh).double().square())
        except BaseException as error:
            lease.fail(error)
            raise
        lease.release()


def _require_same(told: Sequence[Sequence[Sequence[float]]], name: str) -> None:
    """Raise TiermemError unless all copies of the model have told the same of a gradient; NaN is like NaN."""
    if len({str(each) for each in told}) > 1:
        raise TiermemError(
            f"the copies of the model have different gradients of unit {name} (squared norms {told}), and would go "
            "different ways; all of them need the same kind of processor or GPU, and the same version of torch"
        )


def look(conductor: Conductor, shard: Shard, slot: Slot, fill: Callable[[], None], whole: torch.Tensor) -> None:
    """Have `fill` write this rank's elements of `whole`, a parameter's, and complete it from the others. Collective."""
    conductor.run(Operation(Act.LOOK, shard.unit, fill, lambda _: join(conductor.grid.shards, shard, slot, whole)))


def join(collectives: Collectives, shard: Shard, slot: Slot, whole: torch.Tensor) -> None:
    """Complete `whole`, a parameter's elements (1-D, CPU) of which this rank has filled in its own, with the others'.

    One rank after the other tells what it owns; for looking at single parameters, not for training.
    """
    if collectives.size == 1 or not whole.numel():
        return
    nbytes = collectives.size * whole.numel() * whole.element_size()
    every = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    collectives.all_gather(every, whole.view(torch.uint8))
    told = every.view(collectives.size, -1)
    for rank in range(collectives.size):
        for piece in owned_of(Shard(shard.layout, rank), slot):
            theirs = told[rank].view(whole.dtype)
            whole[piece.begin : piece.begin + piece.length] = theirs[piece.begin : piece.begin + piece.length]
