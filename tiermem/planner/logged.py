"""Which units are updated under backward with their old bytes in host memory, where everything fits there.

Owns the choice, from sizes. Does not know pages, or when anything happens. Guarantees that old bytes take no more than
half of what pages leave, and that nothing is chosen where pages leave nothing.

Why. Beside a device the processor rests while backward is computed. An update that begins there, though the step may
yet be clipped or skipped, needs the old bytes of what it changes: a copy in memory, as much again as parameters and
states of that unit. It is made for the last units of the model, whose gradients come first; how far the processor gets
before the step, nobody knows, and what has not begun by then is an update like any other.
"""

from __future__ import annotations

from collections.abc import Mapping

# Of what pages leave of the host budget; the rest is for activations that are offloaded.
_SHARE = 2


def logged_units(nbytes: Mapping[int, int], spare: int) -> tuple[int, ...]:
    """The units, by number, from the last one on, until one has no room.

    `nbytes`: of the parameters and states of each unit that may be chosen. `spare`: bytes of the host budget that are
    left when all pages are there; none if negative.
    """
    free, found = spare // _SHARE, []
    for unit in sorted(nbytes, reverse=True):
        if nbytes[unit] > free:
            break
        free -= nbytes[unit]
        found.append(unit)
    return tuple(found)
