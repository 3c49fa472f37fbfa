"""The lower floors of one run: swap space, arenas, device, pager.

Owns their construction from a Config and the budgets of a Blueprint, and their closing in reverse. Does not know
modules or optimizers. Guarantees that what was opened is closed again if a later part fails, that closing goes on
after an error and then raises it, and that what an earlier run has committed stays until the space begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from swap import CommitStore, EngineSettings, Recovered, SwapError, SwapFullError, SwapSpace, file_system_of, recover
from swap.extents import Extent
from swap.probe import measure_weights
from tiermem.config import Config
from tiermem.errors import ConfigError, ResumeError
from tiermem.memory.arena import Arena, HostArena
from tiermem.memory.devices import Device
from tiermem.memory.tiers import Tier
from tiermem.pager.edges import Chain, device_chain, host_chain
from tiermem.pager.extents import Extents, from_rows, page_key
from tiermem.pager.page import PageKey
from tiermem.pager.pager import Pager
from tiermem.planner.world import appetites
from tiermem.runtime.beginning import SPACE_NAME, Beginning, refuse_committed, require_room
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.rhythm import CommitRhythm
from tiermem.stats import Counters, DriveStatistics, TierStatistics
from tiermem.timeline import STEP_LANE, Timeline

# The latest moves, stalls, kernels and units, about 500 bytes each, and levels, about 150: 13 MB outside the budget.
_TIMELINE_EVENTS = 20_000


@dataclass(frozen=True)
class Storage:
    """Where bytes live, and who moves them.

    `recovered`: the commit this run continues, None if it began anew. `beside_nbytes`: as `Blueprint` has them.
    """

    space: SwapSpace
    extents: Extents
    store: CommitStore
    recovered: Recovered | None
    arenas: Mapping[Tier, Arena]
    device: Device | None
    pager: Pager
    counters: Counters
    timeline: Timeline
    rhythm: CommitRhythm
    beside_nbytes: int = 0

    def tiers(self) -> tuple[TierStatistics, ...]:
        """Budget, reserved bytes and high-water mark of each tier, from far to near."""
        swap, scratch = self.space.statistics(), self.extents.scratch
        return (
            TierStatistics(
                Tier.SWAP.name,
                swap.nbytes + scratch.nbytes,
                swap.allocated + scratch.allocated,
                swap.high_water + scratch.high_water,
            ),
            *(self._memory(tier, arena) for tier, arena in sorted(self.arenas.items())),
        )

    def _memory(self, tier: Tier, arena: Arena) -> TierStatistics:
        beside = self.beside_nbytes if tier is Tier.HOST else 0  # in the budget, and never reserved for pages
        return TierStatistics(tier.name, arena.capacity + beside, arena.reserved, arena.high_water)

    def drives(self) -> tuple[DriveStatistics, ...]:
        """What each drive holds and has moved; directories on one file system are one drive."""
        found = self.space.statistics()
        moved = {device.device: device for device in found.engine.devices}
        drives = []
        for number in dict.fromkeys(directory.device for directory in found.directories):
            here = [directory for directory in found.directories if directory.device == number]
            traffic = moved.get(number)
            drives.append(
                DriveStatistics(
                    directories=tuple(directory.path for directory in here),
                    budget=sum(directory.nbytes for directory in here),
                    reserved=sum(directory.allocated for directory in here),
                    share=sum(directory.weight for directory in here),
                    bytes_read=traffic.bytes_read if traffic else 0,
                    bytes_written=traffic.bytes_written if traffic else 0,
                    busy_seconds=traffic.seconds_busy if traffic else 0.0,
                )
            )
        return tuple(drives)

    @property
    def torch_device(self) -> torch.device:
        """Where torch computes."""
        return self.device.torch_device if self.device is not None else torch.device("cpu")

    def follow(self) -> None:
        """See `Device.follow`; nothing without a device."""
        if self.device is not None:
            self.device.follow()

    def close(self, *, remove: bool) -> None:
        """Close everything, the pager first; with `remove` commits and swap files go. Raises the first error.

        Before the space has begun nothing goes but the files that were made for it.
        """
        # Before the files: a commit must never outlive its bytes.
        forget = [self.store.discard] if remove and self.space.has_begun else []
        device = [self.device.close] if self.device is not None else []
        arenas = [arena.close for arena in self.arenas.values()]
        scratch, space = self.extents.scratch, self.space
        close_all([self.pager.close, *device, *arenas, *forget, scratch.close, lambda: space.close(remove=remove)])


def close_all(actions: list[Callable[[], None]]) -> None:
    """Run every action, whatever the ones before it raise; raise the first error at the end.

    Without `contextlib.ExitStack`: where two actions raise one and the same error, as a failed page does for all who
    use it, that makes the error its own context, and the stack around it never finds the end of the chain.
    """
    first: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised when all have had their turn
            first = first or error
    if first is not None:
        raise first


def open_storage(
    config: Config,
    beginning: Beginning,
    blueprint: Blueprint,
    swap_nbytes: int,
    *,
    device: Device | None,
    alone: bool,
) -> Storage:
    """Open the swap files (those of the commit to continue, verified, or new ones), reserve memory, start a pager.

    New ones do not begin yet: see `SwapSpace.begin`. `blueprint`: whose budgets of memory these are. `device`: where
    the DEVICE tier is; it is closed with the storage, also if opening fails. `alone`: whether nobody waits for this
    process while it commits.

    Raises:
        ConfigError: direct I/O was insisted on, and is refused or what the backend does not do.
        ResumeError: the commit does not fit its files, or one was made since `beginning` was found.
        swap.SwapError: a directory is missing, read-only, full, in use, or holds somebody else's or damaged files.
    """
    with ExitStack() as opened:
        if device is not None:
            opened.callback(device.close)
        if config.direct is True and config.io_backend == "aiofiles":
            raise ConfigError("direct=True, but io_backend='aiofiles' goes through the page cache; use 'threads'")
        timeline = Timeline(capacity=_TIMELINE_EVENTS)
        counters = Counters(on_step=lambda started, ended: timeline.record("step", STEP_LANE, started, ended))
        rhythm = CommitRhythm(lambda: counters.steps, rereads=alone)
        store = CommitStore(config.swap_paths, name=SPACE_NAME, stall_seconds=config.stall_timeout)
        resumed = beginning.manifest is not None
        # Before the files: a run that does not get its memory takes nothing from the one before. In a resume after the
        # look at all bytes, which needs memory of its own.
        arenas = [] if resumed else _make_arenas(config, blueprint, device)
        opened.callback(lambda: close_all([arena.close for arena in arenas]))
        space = _open_space(config, beginning, swap_nbytes)
        opened.callback(space.close)
        if config.direct is True and not space.direct:
            raise ConfigError("direct=True, but a swap directory refuses O_DIRECT; use direct='auto' or another drive")
        if not (resumed or config.overwrite):  # again, now that nobody else has these directories
            latest = store.read_latest()
            if latest is not None and latest.generation != beginning.given_up:
                refuse_committed(config, latest)
        recovered = _recover(config, space, store, beginning.generation) if resumed else None
        extents = Extents(
            space,
            recovered.generations if recovered else None,
            likely=rhythm.likely if config.commits or resumed else lambda: False,
            compare=config.verify == "always",
            plain=_claim_plain(space, recovered) if recovered else None,
        )
        arenas = arenas or _make_arenas(config, blueprint, device)
        chain = _make_chain(arenas, blueprint, device, extents)
        pager = Pager(chain, appetites(blueprint.footprint, blueprint.device), counters=counters, timeline=timeline)
        opened.pop_all()
    beside = blueprint.beside_nbytes
    return Storage(space, extents, store, recovered, chain.arenas, device, pager, counters, timeline, rhythm, beside)


def _make_arenas(config: Config, blueprint: Blueprint, device: Device | None) -> list[Arena]:
    """That of HOST, and where there is a device, its own."""
    if device is None or blueprint.device is None:
        return [HostArena(blueprint.host_nbytes, poison=config.poison)]
    host = device.make_host_arena(blueprint.host_nbytes, poison=config.poison, passing=blueprint.passing_nbytes)
    try:
        return [host, device.make_arena(blueprint.device.nbytes, poison=config.poison)]
    except BaseException:
        host.close()
        raise


def _make_chain(arenas: Sequence[Arena], blueprint: Blueprint, device: Device | None, extents: Extents) -> Chain:
    if device is None or blueprint.device is None:
        return host_chain(arenas[0], extents, kept=blueprint.kept)
    settled = frozenset(blueprint.device.settled)
    return device_chain(arenas[0], arenas[1], device, extents, settled=settled, kept=blueprint.kept)


def _open_space(config: Config, beginning: Beginning, nbytes: int) -> SwapSpace:
    settings = EngineSettings(
        backend=config.io_backend,
        block_size=config.block_nbytes,
        queue_depth=config.queue_depth,
        max_bytes_in_flight=config.block_nbytes * config.queue_depth,
        stall_seconds=config.stall_timeout,
        direct=config.direct is not False,
    )
    manifest = beginning.manifest
    if manifest is not None:
        size = sum(manifest.file_sizes)
        return SwapSpace.open(config.swap_paths, name=SPACE_NAME, nbytes=size, settings=settings, keep=True)
    require_room(config, nbytes)
    weights = _weigh(config, settings)  # before anything is given up: it wants a little room
    return SwapSpace.open(
        config.swap_paths, name=SPACE_NAME, nbytes=nbytes, settings=settings, weights=weights, begin=False
    )


def _weigh(config: Config, settings: EngineSettings) -> tuple[float, ...] | None:
    """What part of a page each directory should have, by a moment's look at the drives; None: all the same.

    One drive has nothing to be compared with, and a look takes room, which an earlier run's file may have.
    """
    if len({file_system_of(path) for path in config.swap_paths}) == 1:
        return None
    try:
        return measure_weights(config.swap_paths, name=SPACE_NAME, settings=settings)
    except SwapFullError:
        return None


def _recover(config: Config, space: SwapSpace, store: CommitStore, generation: int) -> Recovered:
    recovered = recover(
        space,
        store,
        key=page_key,
        verify_bytes=config.verify != "never",
        spares=lambda manifest: from_rows(manifest.user["spares"]),
        generation=generation,
    )
    if recovered is None:
        raise ResumeError(f"the commit in {config.swap_paths[0]} has gone since it was looked at")
    return recovered


def _claim_plain(space: SwapSpace, recovered: Recovered) -> dict[PageKey, Extent]:
    claimed = {}
    try:
        for name, extent in from_rows(recovered.manifest.user["plain"]):
            space.claim(extent)
            claimed[page_key(name)] = extent
    except (SwapError, KeyError, TypeError, ValueError) as error:
        raise ResumeError(f"the commit does not fit its swap files: {error}") from error
    return claimed
