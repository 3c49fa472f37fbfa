"""What users hold in their hands: the `Runtime` that `offload` returns.

Owns the public verbs and the state open/closed. Does not do their work: every verb is a few calls into the rooms.
Guarantees that a closed runtime says so wherever pages are needed, and that closing twice is harmless.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tiermem.checkpoint.pretrained import MAX_SHARD, ModelSource, model_files, save_pretrained
from tiermem.config import Config
from tiermem.errors import ResumeError, TiermemError
from tiermem.interrupts import empty_all_frames, refuse_amid
from tiermem.memory.sizes import parse_bytes
from tiermem.overlap import OverlapReport, explain_stalls
from tiermem.process import HomeProcess
from tiermem.runtime.abandoned import abandon
from tiermem.runtime.activations import make_store, paging
from tiermem.runtime.capture import start_commit, start_snapshot
from tiermem.runtime.closing import Closing, begin_to_close, refuse_to_close
from tiermem.runtime.commits import PendingCommit
from tiermem.runtime.extra import from_record, to_record
from tiermem.runtime.house import House
from tiermem.runtime.places import place_of, require_path, units_of
from tiermem.runtime.record import optimizer_state
from tiermem.runtime.snapshots import PendingSnapshot
from tiermem.runtime.storage import close_all
from tiermem.runtime.strangers import watch_optimizers
from tiermem.runtime.vertical import forward_backward
from tiermem.stats import Statistics
from tiermem.zero3.activations import ActivationStore
from tiermem.zero3.conductor import Act
from tiermem.zero3.guards import ModelGuards, refuse_placeholders
from tiermem.zero3.layout import Slot
from tiermem.zero3.lend import give, lend


class Runtime(Closing):
    """A model that is offloaded, for one thread at a time. Made by `offload`; a context manager that closes."""

    def __init__(self, house: House, config: Config | None = None) -> None:
        self._house = house
        self._config = config or house.config
        self._closed = False
        self._home = HomeProcess()
        self._activations: ActivationStore | None = None
        self._guards = ModelGuards(house.blueprint.divided, house.gatherer, watch_optimizers())
        self._lent = 0  # how many `gathered` are open
        self._writing: list[list[int]] = []  # the units of each open `gathered(write=True)`
        self._abandoned = weakref.finalize(self, abandon, house, self._guards, self._home)  # last: it is all there

    def __repr__(self) -> str:
        there = self._home.is_here and not self._closed
        return f"<tiermem.Runtime: {self._house.in_words}>" if there else "<tiermem.Runtime, closed>"

    @property
    def config(self) -> Config:
        """The configuration as given."""
        return self._config

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._house.model

    def statistics(self) -> Statistics:
        """What happened in the last step and in total, what tiers hold, what drives moved; the look-ahead in use."""
        house, storage = self._house, self._house.storage
        found = storage.counters.snapshot(storage.tiers(), storage.drives())
        return replace(found, look_ahead=house.steps.plans.look_ahead, ranks=house.company.size)

    def timeline(self, path: str | os.PathLike[str] | None = None) -> OverlapReport:
        """Write the latest events (moves, stalls, update kernels, units, steps) as a Chrome/Perfetto trace to `path`.

        Returns what the computation waited for in those steps, and what would have prevented it; without a path only
        that. Raises ConfigError for what is no path, OSError where it cannot be written.
        """
        timeline = self._house.storage.timeline
        if path is not None:
            timeline.write(require_path("timeline", path))
        return explain_stalls(timeline.events())

    def commit(self, extra: Any = None) -> PendingCommit:
        """Make the state after the last step durable, beside the next step; returns at once unless one is under way.

        What is captured now: `extra` (numbers, text, None, lists, tuples, dicts, tensors, numpy's arrays, bytes, and so
        the states of loaders and optimizers; None alone becomes {}), random generators, changed
        buffers, the optimizers' settings and step counts. Pages follow as the step's updates end. The next step's
        updates wait until the commit is durable, forward and backward do not.

        Raises:
            ConfigError: `extra` holds anything else, or the configuration has commits=False.
            TiermemError: it was called between backward and step, or inside `gathered(write=True)`.
            Exception: the error of the commit before, unless its `wait` has raised it already.
        """
        house = self._open()
        record = to_record({} if extra is None else extra)
        if self._writing:
            raise TiermemError("commit inside gathered(write=True): what is being written would be half there")
        return start_commit(house, record)

    def snapshot(self, path: str | os.PathLike[str], extra: Any = None) -> PendingSnapshot:
        """Write a portable copy of the state after the last step, beside training; returns before it is written.

        A folder of safetensors files and a manifest, which `offload(..., resume=path)` continues from on other swap
        directories, under other budgets, with another division into units. Captured now: what `commit` captures
        (`extra` is that of a commit of this state if none is given), and all buffers. The next step's updates wait for
        it if a commit of another step holds the second copy of pages, or there is none (`commits=False`); so it is best
        called just after `commit`. `path`: a free name or an empty folder; it is there whole or not at all.

        Raises:
            ConfigError: `extra` is not what `commit` takes, the path is taken, or no path.
            TiermemError: it was called between backward and step, or inside `gathered(write=True)`.
            Exception: the error of the snapshot before, unless its `wait` has raised it already.
        """
        house = self._open()
        folder = require_path("snapshot", path)
        steps = house.steps
        record = house.commits.extra_of(steps.number, steps.open_calls) if extra is None else to_record(extra)
        if self._writing:
            raise TiermemError("snapshot inside gathered(write=True): what is being written would be half there")
        return start_snapshot(house, folder, record)

    @property
    def committed(self) -> Any:
        """The `extra` of the last durable commit, at first of the one resumed from: {} without one. None: no commit."""
        record = self._house.commits.record
        return None if record is None else from_record(record["extra"])

    def committed_optimizer_state(self, index: int = 0) -> dict[str, Any]:
        """What `load_state_dict` of an optimizer takes to have the settings of the last durable commit.

        `index`: which optimizer, in the order of the parameters. Step counts come back without this. Raises ResumeError
        if there is no commit, or no such optimizer in it.
        """
        record = self._house.commits.record
        if record is None:
            raise ResumeError("nothing has been committed")
        return optimizer_state(record, index)

    def save_pretrained(self, path: str | os.PathLike[str], *, max_shard_size: int | str = MAX_SHARD) -> None:
        """Write the model as sharded safetensors with index, as transformers reads them; waits until it is durable.

        Parameters in their dtypes after all updates, tied ones once, persistent buffers, and config.json and
        generation_config.json of a model that has them. A unit is in memory at a time. `path`: a free name or an empty
        folder; it is there whole or not at all. Collective: the first rank writes, into a folder that only it need see,
        with its own buffers; what fails on it is an error on all.

        Raises:
            ConfigError: the path is taken, or none; the size makes no sense; a name has become another parameter's.
            TiermemError: it was called between backward and step, or another rank could not save.
            swap.SwapError: the disk is full, or failed; training may go on.
        """
        house, folder = self._open(), require_path("save_pretrained", path)
        max_shard_nbytes = parse_bytes(max_shard_size, "max_shard_size: ")
        house.require_between_steps(Act.SAVE_PRETRAINED)
        source = ModelSource(self.model, house.gatherer, house.layouts, house.parameters, house.coordinator.unit_needed)
        try:
            save_pretrained(
                folder,
                source,
                model_files(self.model, house.config.dtype),
                max_shard_nbytes=max_shard_nbytes,
                stall_seconds=house.config.stall_timeout,
                writes=house.company.rank == 0,
                together=house.company.together,
            )
        except BaseException as error:
            empty_all_frames(error)  # they hold views of the unit that was being written
            raise

    def parameter(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of the parameter's values, of its shape and dtype, after all updates; waits for them. Collective."""
        unit, _ = place_of(parameter, self._house)
        house = self._open()
        house.scheduler.let_go_between()
        with lend(house.gatherer, house.layouts, [unit], needed=house.coordinator.unit_needed):
            return parameter.detach().clone()

    def master(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of the float32 master of a parameter, of its shape, after all updates; waits for them. Collective.

        Of a frozen one its values. TiermemError inside `gathered(write=True)` of its unit: it follows at the end of it.
        """
        unit, slot = place_of(parameter, self._house)
        house = self._open()
        if not slot.trainable:
            return self.parameter(parameter).float()
        if any(unit in units for units in self._writing):  # its page is leased for writing: reading would wait for ever
            raise TiermemError(
                f"master of {slot.names[0]} inside gathered(write=True) of its unit: it follows what is written when "
                "that ends; ask before or after it"
            )
        house.coordinator.unit_needed(unit)
        whole = torch.zeros(slot.numel, dtype=torch.float32, device="cpu")

        def read() -> None:
            for piece in house.owned(unit, slot):
                house.states.read_master(unit, slot.parameter, whole[piece.begin : piece.begin + piece.length])

        house.look(unit, slot, read, whole)
        return whole.as_strided(slot.shape, slot.stride)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A copy of this step's gradient, of the parameter's shape and dtype, or None; waits for it. Collective.

        Before clipping; the mean over ranks. TiermemError where update="backward" has used it up before `step()`.
        """
        unit, slot = place_of(parameter, self._house)
        house = self._open()
        house.ledger.line_up()
        if not house.ledger.is_readable(unit, slot, spent=house.coordinator.spent):
            return None
        return house.scheduler.gradients.read(slot.parameter)

    @contextmanager
    def gathered(
        self, what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False
    ) -> Iterator[None]:
        """Real storage for a while, for all units that hold the parameters of `what`; with `write` changes are kept.

        Values of trainable parameters written here become their masters; moments stay as they are. Collective: every
        rank writes the same values, and each keeps those of its shard. What was put into a module after `offload` stays
        as it is. Graphs that kept what is written here are stale.

        Raises ConfigError for what is not of the model, CapacityError where these units do not fit into memory
        together; with `write` TiermemError between backward and step where update="backward" has used gradients up.
        """
        house = self._open()
        units = units_of(what, house)
        house.scheduler.let_go_between()
        for unit in units:
            house.coordinator.unit_needed(unit)
        if write:
            house.ledger.end_interrupted()  # what it left is held for reading
            house.coordinator.settle_early()
            house.snapshots.wait_open()
            house.scheduler.saved.may_change(units)
            house.scheduler.order.rest()
        changed: list[tuple[int, Slot, torch.Tensor]] = []

        def note(unit: int, slot: Slot, values: torch.Tensor) -> None:
            changed.append((unit, slot, values.clone()))

        self._lent += 1
        try:
            if write:
                self._writing.append(units)
            needed, written, watched = house.coordinator.unit_needed, note if write else None, not self._writing
            with lend(house.gatherer, house.layouts, units, needed=needed, written=written, watched=watched):
                yield
        finally:
            self._lent -= 1
            self._writing = [each for each in self._writing if each is not units]
            house.scheduler.saved.were_written(slot.parameter for _, slot, _ in changed)
            masters: dict[int, dict[int, torch.Tensor]] = {}
            for unit, slot, values in changed:
                for piece in house.owned(unit, slot) if slot.trainable else ():
                    own = values[piece.begin : piece.begin + piece.length]
                    masters.setdefault(unit, {})[slot.parameter] = own
            for unit, of_unit in masters.items():
                house.states.change_masters(unit, of_unit)

    def forward_backward(
        self, micro_batches: Iterable[Any], loss: Callable[[Any], torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Forward and backward of several micro-batches together: each unit is brought once per pass for all of them.

        The gradients are those of a loop that calls `loss(micro_batch).backward()` for one after the other, bit for
        bit; call `optimizer.step()` afterwards. Parameters cross the wires once per pass however many
        micro-batches there are; the activations of all of them are in memory at one time (gradient checkpointing keeps
        them few). Each micro-batch has random numbers of its own, see `vertical.py` beside this file.

        Args:
            micro_batches: whatever `loss` takes; they must not depend on each other's results.
            loss: computes the tensor to go backward from, on a stack of its own; divide by the number of micro-batches
                in it for a mean. Default: micro-batches are keyword arguments of the model, and the loss is
                `model(**micro_batch).loss` divided by their number.

        Returns the losses, detached. Raises the error of the first micro-batch that fails, after the others have ended;
        `optimizer.zero_grad()` forgets what they left, as after any backward that fails. ConfigError for arguments of
        another kind, TiermemError under `torch.no_grad`.
        """
        return forward_backward(self._open(), micro_batches, loss)

    @contextmanager
    def offload_activations(self, threshold: int | str = "1MiB") -> Iterator[None]:
        """Keep what autograd saves for backward in pages: HOST as far as the budget goes, the rest in SWAP.

        Beside a device they leave its memory: what was computed there passes through frames of `device_memory`.
        Put it around the forward; backward may be inside or outside. With torch.utils.checkpoint it keeps the inputs of
        the checkpointed parts, without it all activations. `threshold`: bytes (or text, "1MiB") below which a saved
        tensor stays where it is. The numbers do not change. Room on disk is taken as it is needed and given back by
        `close`. One thread at a time; tensors that are not where the model computes are left alone.

        Raises BudgetError, naming the least that works, if a budget leaves no room to pass tensors through; inside,
        forward and backward raise swap.SwapFullError where the disk is full, or an I/O error.
        """
        house = self._open()
        if self._activations is None:
            self._activations = make_store(house)
        with paging(house, self._activations, threshold):
            yield

    def settle(self) -> None:
        """Wait until no update is pending. Raises the error of one that failed."""
        self._open().coordinator.wait_updates()

    def close(self, *, restore_model: bool = False, remove: bool | None = None) -> None:
        """Finish pending updates and the commit under way, and close everything. May be called twice.

        Args:
            restore_model: give every parameter storage of its own again; ConfigError where an earlier close did not.
                What is raised before all have their values (an interrupt, too little memory) closes nothing.
            remove: delete the swap files, and what is committed in them. Default: if nothing is; False: never.

        Raises the error of an update or commit that failed; closes nevertheless. TiermemError inside `gathered` and
        `forward_backward`, and while another thread is inside a forward or backward; then it closes nothing.
        Dropped without this, it is closed by Python, late, with a ResourceWarning.
        """
        again = self._closed  # to its end, or an interrupt came before that
        if not self._home.is_here or not self._abandoned.alive:  # in a forked child there is nothing to end
            if again and restore_model:
                refuse_placeholders(self.model)
            return
        house = self._house if again else self._open()
        refuse_to_close(house.scheduler, lent=bool(self._lent))
        values = [] if again else begin_to_close(house, restore_model=restore_model)
        self._closed = True
        # Given twice: an interrupt may end the first. The guards last: what an interrupted forward had gathered is
        # placeholders only then.
        give_back, detach = partial(give, values), partial(house.ending.then, self._abandoned.detach)
        close_all([give_back, give_back, partial(house.close, remove=remove), self._guards.close, detach])

    def _open(self) -> House:
        self._home.check()
        if self._closed:
            raise TiermemError("this runtime is closed; offload the model again to go on")
        refuse_amid()
        return self._house
