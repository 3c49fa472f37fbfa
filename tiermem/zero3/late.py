"""What comes for a unit after its update has begun, and cannot be served any more.

Owns the errors, and the warning of who looks too early. Does not know updates, nor when they begin. Guarantees that
each names the way out.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Mapping

from torch import nn

from tiermem.errors import TiermemError
from tiermem.zero3.layout import Slot

_COMPLETE = "update='backward' updates what has as many gradients as in the step before"
_MORE = "this step brought more (more micro-batches, a second backward, or a parameter that had none then)"
_INSTEAD = "Choose update='auto', 'forward' or 'step' instead"


def late_gradient(parameter: int, slots: Mapping[int, tuple[int, Slot]]) -> TiermemError:
    """The error of a gradient of `parameter`, by its global number. `slots`: as of the gatherer."""
    name = next(slot.names[0] for _, slot in slots.values() if slot.parameter == parameter)
    return TiermemError(
        f"a gradient of {name} arrived after the update of its unit had begun: {_COMPLETE}, and {_MORE}. {_INSTEAD}"
    )


def look_at_updated(
    read: Iterable[nn.Parameter],
    updated: Container[int],
    slots: Mapping[int, tuple[int, Slot]],
    *,
    backward: bool,
) -> None:
    """Raise TiermemError if one of `read` is `updated`, by its global number: one that is frozen beside it may be read.

    In `backward`, where it is read by what no graph has told of; else, in an evaluation before the step, warn: the
    backward of a loss would be an error of its own. `slots`: the gatherer's.
    """
    found = (slots.get(id(parameter)) for parameter in read)
    name = next((each[1].names[0] for each in found if each is not None and each[1].parameter in updated), None)
    if name is None:
        return
    if backward:
        raise TiermemError(
            f"{name} is read in backward after its update has begun, and would give the values of the "
            f"next step: {_COMPLETE}, and what no graph has saved. Either {_MORE}, or it is read by what no graph "
            "tells of: a hook, a `ctx` (other than by save_for_backward), a checkpointed function that detaches "
            f"parameters. {_INSTEAD}"
        )
    warnings.warn(
        f"the model was evaluated between backward and step, and computes with values of after the step: {_COMPLETE}. "
        f"Evaluate it behind optimizer.step(). {_INSTEAD}",
        RuntimeWarning,
        stacklevel=2,
    )
