"""Between a rank's pages and the computation: where units come from, and where gradients go to.

Owns the choice: one's own pages where there is one process, the other ranks where there are several; and the issuer of
what ranks do together. Does not know when a unit is due. Guarantees that one process has nothing between its pages and
the computation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import nn

from tiermem.optim.updater import Updater
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.company import Company
from tiermem.runtime.storage import Storage
from tiermem.zero3.buckets import Buckets
from tiermem.zero3.conductor import Conductor
from tiermem.zero3.exchange import RankGradients
from tiermem.zero3.neighbours import Gradients
from tiermem.zero3.reduce import GradientStore
from tiermem.zero3.sources import LocalUnits, RankAccess, RankUnits, UnitSource
from tiermem.zero3.whole import WholeUnits

# Of the host budget, for gradients that wait beside it for those of the next micro-batch: a unit's, for whose
# parameters and gradients twice as much has to be in the budget anyway. Those on a device do not wait.
_PAIRING = 4


def open_conductor(storage: Storage, company: Company, names: Sequence[str]) -> Conductor:
    """The issuer of what all ranks do together. `names`: of the units."""

    def begin() -> None:
        storage.pager.waits.aside.add(threading.get_ident())
        if storage.device is not None:
            storage.device.work_beside()

    return Conductor(company.grid, names, storage.timeline, storage.counters, begin)


def open_exchanges(
    blueprint: Blueprint,
    parameters: Sequence[nn.Parameter],
    storage: Storage,
    company: Company,
    conductor: Conductor,
    updater: Updater,
) -> tuple[UnitSource, Gradients]:
    """Where units come from and gradients go to: one's own pages, or the other ranks."""
    shards, pager = blueprint.shards, storage.pager
    if company.size == 1:
        hold_tiles = blueprint.hold_tiles
        apart = blueprint.apart if hold_tiles else frozenset()
        pairing = blueprint.host_nbytes // _PAIRING if storage.torch_device.type == "cpu" else 0
        gradients = GradientStore(
            pager, blueprint.layouts, parameters, hold_tiles=hold_tiles, apart=apart, pairing_nbytes=pairing
        )

        def let_go(unit: int) -> None:
            if unit not in apart:  # what is kept takes no room of the rest
                gradients.release()

        return LocalUnits(pager, blueprint.layouts, before=let_go), gradients

    for shard in shards:
        for key, nbytes in shard.transit_pages():
            pager.add_page(key, nbytes)

    def needed(unit: int) -> None:  # on the issuer's thread, for units that are gathered ahead
        if updater.pending(unit):
            updater.hurry(unit)
            updater.wait(unit)

    kind = WholeUnits if blueprint.stage < 3 else RankUnits
    source: UnitSource = kind(RankAccess(pager, shards, conductor, needed, blueprint.beside))
    for unit in blueprint.states if storage.recovered is not None else ():
        source.changed(unit)  # by updates of which the other ranks had not told before the commit
    # Beside the computation host memory has room for one bucket that is filled and one that is exchanged, a device not.
    buckets = Buckets(pager, late=blueprint.stage == 1, two=blueprint.beside and blueprint.device is None)
    return source, RankGradients(pager, shards, parameters, conductor, buckets, beside=blueprint.beside)
