"""Activations beside parameters in one pager: what `Runtime.offload_activations` needs.

Owns the size of their pages, and the time in which their hooks are active. Does not know how they are kept
(`zero3.activations`). Guarantees that the bytes leased for them are bytes which no other lease is ever counted on to
give back (on a device: that they find their place whatever else is leased there), and that the hooks are off when the
block has ended, whatever ended it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tiermem.errors import BudgetError
from tiermem.memory.arena import FRAME_ALIGNMENT
from tiermem.memory.rounding import round_down
from tiermem.memory.sizes import parse_bytes
from tiermem.memory.tiers import Tier
from tiermem.optim.compiled import are_wanted
from tiermem.planner.device import PIECE
from tiermem.planner.footprint import PASSING
from tiermem.planner.overhead import budget_with
from tiermem.runtime.house import House
from tiermem.zero3.activations import ActivationHooks, ActivationStore

# Two pieces are leased at one time (see `ActivationStore`); each costs a message there and back, whatever its size.
_PIECES = 2
# Beside a device one: a piece that is granted lies in the way of others while the computation waits for the one before.
_PIECES_ABOVE = 1


def make_store(house: House) -> ActivationStore:
    """Where the model's activations are kept.

    Raises BudgetError if a budget leaves no room to pass them through.
    """
    footprint, device, storage = house.blueprint.footprint, house.blueprint.device, house.storage
    if footprint.passing < PASSING:
        loops = are_wanted(house.config.dtype, house.config.moments)
        enough = budget_with(footprint.least + PASSING, compiled=loops)
        raise BudgetError(
            f"host_memory is {storage.arenas[Tier.HOST].capacity + storage.beside_nbytes} bytes, of which parameters, "
            f"gradients and updates leave {footprint.passing}; offloading activations needs {PASSING} to pass them "
            f"through: set host_memory to {enough} bytes or more"
        )
    most, at_once = min(footprint.passing // _PIECES, house.config.block_nbytes), _PIECES
    if device is not None:
        if device.passing < PIECE:
            raise BudgetError(
                f"device_memory is {device.nbytes} bytes, of which computation and updates may lease "
                f"{device.taken.nbytes} in {device.taken.count} pieces; to pass activations through beside "
                f"them, set device_memory to {device.taken.least_for(PIECE)} bytes or more"
            )
        most, at_once = min(most, device.passing), _PIECES_ABOVE
    return ActivationStore(
        storage.pager,
        house.scheduler.order.touch,
        piece_nbytes=round_down(most, FRAME_ALIGNMENT),
        at_once=at_once,
        device=storage.torch_device,
    )


@contextmanager
def paging(house: House, store: ActivationStore, threshold: int | str) -> Iterator[None]:
    """Keep what autograd saves in the body in pages of `store`, from `threshold` bytes a storage on."""
    hooks = ActivationHooks(store, house.scheduler.saved, parse_bytes(threshold, "threshold: "))
    hooks.enter()
    try:
        yield
    except BaseException:
        if not hooks.is_on_top:
            house.scheduler.settle()  # what an interrupted forward has left on top
        hooks.abandon()
        raise
    hooks.leave()
