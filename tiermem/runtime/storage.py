"""The lower floors of one run: swap space, host arena, pager.

Owns their construction from a Config and their closing in reverse. Does not know modules or optimizers. Guarantees
that what was opened is closed again if a later part fails, and that closing goes on after an error and then raises it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from swap import EngineSettings, SwapSpace
from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.memory.arena import HostArena
from tiermem.memory.tiers import Tier
from tiermem.pager.edges import host_chain
from tiermem.pager.extents import Extents
from tiermem.pager.pager import Pager
from tiermem.pager.service import Appetite
from tiermem.planner.footprint import Footprint
from tiermem.stats import Counters, TierStatistics
from tiermem.timeline import Timeline

SPACE_NAME = "tiermem"
_BACKENDS = {"threads": "threads", "aiofiles": "aio", "inline": "inline"}


@dataclass(frozen=True)
class Storage:
    """Where bytes live, and who moves them."""

    space: SwapSpace
    arena: HostArena
    pager: Pager
    counters: Counters
    timeline: Timeline

    def tiers(self) -> tuple[TierStatistics, ...]:
        """Budget, reserved bytes and high-water mark of each tier, from far to near."""
        swap = self.space.statistics()
        return (
            TierStatistics(Tier.SWAP.name, swap.nbytes, swap.allocated, swap.high_water),
            TierStatistics(Tier.HOST.name, self.arena.capacity, self.arena.reserved, self.arena.high_water),
        )

    def close(self, *, remove: bool) -> None:
        """Close everything, the pager first; with `remove` the swap files go. Raises the first error at the end."""
        close_all([self.pager.close, self.arena.close, lambda: self.space.close(remove=remove)])


def close_all(actions: list[Callable[[], None]]) -> None:
    """Run every action, whatever the ones before it raise; raise the first error at the end."""
    with ExitStack() as stack:
        for action in reversed(actions):
            stack.callback(action)


def open_storage(config: Config, *, swap_nbytes: int, host_nbytes: int, footprint: Footprint) -> Storage:
    """Open the swap files, reserve host memory, start the pager.

    Raises:
        ConfigError: no swap directory is given.
        swap.SwapError: a directory is missing, read-only, full, in use, or holds somebody else's files.
    """
    if not config.swap_paths:
        raise ConfigError("swap_dirs: expected one or more directories for the swap files, found none")
    settings = EngineSettings(
        backend=_BACKENDS[config.io_backend],
        block_size=config.block_nbytes,
        queue_depth=config.queue_depth,
        max_bytes_in_flight=config.block_nbytes * config.queue_depth,
        stall_seconds=config.stall_timeout,
    )
    counters, timeline = Counters(), Timeline()
    space = SwapSpace.open(config.swap_paths, name=SPACE_NAME, nbytes=swap_nbytes, settings=settings)
    try:
        if config.direct is True and not space.direct:
            raise ConfigError("direct=True, but a swap directory refuses O_DIRECT; use direct='auto' or another drive")
        arena = HostArena(host_nbytes, poison=config.poison)
        appetite = {Tier.HOST: Appetite(look_ahead=footprint.look_ahead, reserve=footprint.reserve)}
        pager = Pager(host_chain(arena, Extents(space)), appetite, counters=counters, timeline=timeline)
    except BaseException:
        space.close(remove=True)
        raise
    return Storage(space, arena, pager, counters, timeline)
