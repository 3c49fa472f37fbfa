"""What a commit says besides the bytes of pages, and whether a model fits what was committed.

Owns the record: step, layout, optimizers' settings and step counts; what the caller keeps is extra.py's. Does not write
or read files: a record is JSON values. Guarantees that what goes in comes out equal, that what JSON would change is
refused when the commit is asked for, and that a model which differs from the committed one is named with the first
difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiermem.config import Config
from tiermem.errors import ResumeError
from tiermem.optim.service import SettingsSource
from tiermem.optim.tiles import UnitState
from tiermem.runtime.extra import from_record, to_record
from tiermem.zero3.layout import UnitLayout

FORMAT = 1


def layout_record(
    layouts: Sequence[UnitLayout], config: Config, tile_numel: int, *, copies: int = 1, small: int = 0
) -> dict[str, Any]:
    """Everything on which the meaning of the pages' bytes depends."""
    ranks = layouts[0].ranks
    return {
        "world_size": ranks,
        "copies": copies if copies > 1 else None,
        "stage": config.stage if ranks > 1 else None,
        "param_dtype": str(config.param_dtype),
        "moments": config.moments,
        "kept": [layout.name for layout in layouts if layout.kept] or None,
        "coalesce": small or None,
        "tile_numel": tile_numel,
        "units": [
            [
                layout.name,
                [
                    [slot.names[0], list(slot.shape), list(slot.stride), str(slot.dtype), slot.trainable, slot.offset]
                    for slot in layout.slots
                ],
            ]
            for layout in layouts
        ],
    }


def parameters_record(layouts: Iterable[UnitLayout], states: Iterable[UnitState]) -> dict[str, Any]:
    """What whoever has no model has to know of its parameters: all names, by number, and whose moments have 8 bits."""
    names = {slot.parameter: [*slot.names] for layout in layouts for slot in layout.slots}
    coded = {segment.parameter for state in states for segment in state.segments if segment.quantized}
    return {"names": [names[number] for number in sorted(names)], "coded": sorted(coded)}


def require_same_layout(committed: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ResumeError naming the first difference between the committed layout and the one of this model."""
    for name, value in here.items():
        if name != "units" and committed.get(name) != value:
            snapshot = (
                ", from a snapshot of it (`tiermem snapshot reshard` makes one, resume=path)"
                if name == "world_size"
                else ""
            )
            raise _differs(name, committed.get(name), value, snapshot)
    there, mine = committed["units"], here["units"]
    # First of all: which parameters are in one unit follows from their sizes, too.
    shapes, own_shapes = _shapes(there), _shapes(mine)
    for name in dict.fromkeys((*shapes, *own_shapes)):
        if shapes.get(name) != own_shapes.get(name):
            found, expected = (each.get(name, "not there") for each in (shapes, own_shapes))
            raise _differs(f"parameter {name}", found, expected)
    for (name, slots), (own_name, own_slots) in zip(there, mine, strict=False):
        if name != own_name:
            raise _differs("the division into units", repr(name), repr(own_name))
        words = ("name", "shape", "strides", "dtype", "requires_grad", "place")
        for slot, own in zip(slots, own_slots, strict=False):
            for word, found, expected in zip(words, slot, own, strict=True):
                if found != expected:
                    raise _differs(f"{word} of parameter {slot[0]} in unit {name!r}", found, expected)
        if len(slots) != len(own_slots):
            raise _differs(f"the number of parameters in unit {name!r}", len(slots), len(own_slots))
    if len(there) != len(mine):
        raise _differs("the number of units", len(there), len(mine))


def _shapes(units: Iterable[Any]) -> dict[str, Any]:
    return {slot[0]: slot[1] for _, slots in units for slot in slots}


def optimizer_records(sources: Iterable[SettingsSource]) -> list[dict[str, Any]]:
    """Settings and step counts of each optimizer. Raises ConfigError for a setting that cannot be kept."""
    records = []
    for source in sources:
        state = source.state_dict()
        records.append(
            {
                # A learning rate that is a tensor comes back as one: as a number its schedule would round otherwise.
                "param_groups": to_record(state["param_groups"], "param_groups"),
                "state": [[number, entry["step"]] for number, entry in state["state"].items()],
                "steps": [[number, count] for number, count in source.step_counts().items()],
            }
        )
    return records


def step_counts(record: Mapping[str, Any]) -> dict[int, int]:
    """The updates each parameter has had, by its number, of all optimizers of a record."""
    return {int(number): int(count) for each in record["optimizers"] for number, count in each["steps"]}


def optimizer_state(record: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What `load_state_dict` of the optimizer takes. Raises ResumeError if the record has fewer optimizers."""
    optimizers = [each for each in record["optimizers"] if each["param_groups"]]  # without: counts that wait for one
    if not (isinstance(index, int) and 0 <= index < len(optimizers)):
        raise ResumeError(f"the commit holds {len(optimizers)} optimizers, asked for number {index!r}")
    groups = [
        {name: tuple(value) if name == "betas" else value for name, value in group.items()}
        for group in from_record(optimizers[index]["param_groups"])
    ]
    return {"state": {number: {"step": step} for number, step in optimizers[index]["state"]}, "param_groups": groups}


def _differs(what: str, committed: object, here: object, otherwise: str = "") -> ResumeError:
    return ResumeError(
        f"this is not the run that was committed: {what} was {committed}, is {here}; resume with what was "
        f"committed{otherwise}, or start anew with Config(overwrite=True) (tiermem train --overwrite)"
    )
