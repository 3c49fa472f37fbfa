"""Between a rank's pages and the computation: where units come from, and where gradients go to.

Owns the choice: one's own pages where there is one process, the other ranks where there are several. Does not know when
a unit is due. Guarantees that one process has nothing between its pages and the computation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tiermem.optim.updater import Updater
from tiermem.pager.pager import Pager
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.company import Company
from tiermem.zero3.conductor import Conductor
from tiermem.zero3.exchange import RankGradients
from tiermem.zero3.neighbours import Gradients
from tiermem.zero3.reduce import GradientStore
from tiermem.zero3.sources import LocalUnits, RankUnits, UnitSource


def open_exchanges(
    blueprint: Blueprint,
    parameters: Sequence[nn.Parameter],
    pager: Pager,
    company: Company,
    conductor: Conductor,
    updater: Updater,
) -> tuple[UnitSource, Gradients]:
    """Where units come from and gradients go to: one's own pages, or the other ranks."""
    shards, footprint = blueprint.shards, blueprint.footprint
    if company.size == 1:
        hold_tiles = (blueprint.device or footprint).hold_tiles
        gradients = GradientStore(pager, blueprint.layouts, parameters, hold_tiles=hold_tiles)
        return LocalUnits(pager, blueprint.layouts, before=gradients.release), gradients

    for shard in shards:
        for key, nbytes in shard.transit_pages():
            pager.add_page(key, nbytes)

    def needed(unit: int) -> None:  # on the issuer's thread, for units that are gathered ahead
        if updater.pending(unit):
            updater.hurry(unit)
            updater.wait(unit)

    source = RankUnits(pager, shards, company.computing, conductor, needed, ahead=footprint.beside)
    return source, RankGradients(pager, shards, parameters, company.computing, conductor, beside=footprint.beside)
