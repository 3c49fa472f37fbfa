"""Where things are: parameters that callers name in their units, and what they name on disk.

Owns the look at a parameter, or a path, that was given. Does not know values or files. Guarantees that a parameter of
another model is refused, and so is what is no path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from tiermem.errors import ConfigError
from tiermem.registry import registry
from tiermem.runtime.house import House
from tiermem.zero3.layout import Slot


def place_of(parameter: nn.Parameter, house: House) -> tuple[int, Slot]:
    """The unit and the slot of a parameter. Raises ConfigError for one of another model."""
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(f"expected a parameter of the model, found {type(parameter).__name__}")
    found = house.gatherer.slots.get(id(parameter))
    if found is None:
        raise ConfigError(f"a parameter of shape {tuple(parameter.shape)} does not belong to this runtime's model")
    return found


def units_of(what: nn.Module | nn.Parameter | Iterable[nn.Parameter], house: House) -> list[int]:
    """The units of a parameter, of several, or of a module, whatever else was put into that after `offload`.

    Raises ConfigError for a parameter of another model, a module that has only such, and other things.
    """
    if isinstance(what, nn.Module):
        parameters: Iterable[nn.Parameter] = list(what.parameters())
        paged = [each for each in parameters if registry.find(each) is not None]
        parameters = paged or parameters
    else:
        parameters = [what] if isinstance(what, nn.Parameter) else what
    if not isinstance(parameters, Iterable):
        raise ConfigError(f"gathered expects a module, a parameter or several, found {type(what).__name__}")
    return list(dict.fromkeys(place_of(parameter, house)[0] for parameter in parameters))


def require_path(verb: str, path: object) -> Path:
    """The path that a verb was given. Raises ConfigError for anything that names no file or folder."""
    given = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given:
        found = "an empty one" if isinstance(given, str) else type(path).__name__
        raise ConfigError(f"{verb}: expected a path, as text or pathlib.Path, for `path`, found {found}")
    if "\0" in given:  # the operating system's own error would name nothing
        raise ConfigError(f"{verb}: expected a path without null characters, found {given!r}")
    return Path(given)
