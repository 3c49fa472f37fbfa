"""What comes for a unit after its update has begun, and cannot be served any more.

Owns the errors. Does not know updates, nor when they begin. Guarantees that each names a parameter and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiermem.errors import TiermemError
from tiermem.zero3.layout import Slot

_INSTEAD = "Choose update='auto', 'forward' or 'step' instead"


def late_gradient(parameter: int, slots: Mapping[int, tuple[int, Slot]]) -> TiermemError:
    """The error of a gradient of `parameter`, by its global number. `slots`: as of the gatherer."""
    name = next(slot.names[0] for _, slot in slots.values() if slot.parameter == parameter)
    return TiermemError(
        f"a gradient of {name} arrived after the update of its unit had begun: update='backward' updates what "
        "has as many gradients as in the step before, and this step brought more (more micro-batches, a second "
        f"backward, or a parameter that had none then). {_INSTEAD}"
    )


def late_read(unit: int, slots: Mapping[int, tuple[int, Slot]]) -> TiermemError:
    """The error of what reads a unit in backward without a graph that has told of it."""
    name = next(slot.names[0] for number, slot in slots.values() if number == unit)
    return TiermemError(
        f"the unit of {name} is read in backward after its update has begun, and would give values of the next step: "
        "update='backward' updates what has all its gradients and what no graph has saved, and does not see what a "
        "hook, a `ctx` (other than by save_for_backward) or a checkpointed function that detaches parameters will "
        f"read. {_INSTEAD}"
    )
