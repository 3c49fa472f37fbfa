"""What a user decides about a run.

Owns the knobs, their defaults and their checks; `settings_file.py` reads and writes them. Does not know who uses
them; of the machine it asks whether names are of one directory, and in `resolve_device`. Guarantees that a Config that
exists is valid, that every key given is understood, and that a saved Config loads equal.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, cast, get_args

import numpy as np
import torch

from tiermem.errors import ConfigError, UnknownSettingError
from tiermem.memory.links import parse_link
from tiermem.memory.sizes import exact_bytes, format_bytes, parse_bytes
from tiermem.settings_file import read_settings, settings_path, write_settings

ParamDtype = Literal["float32", "bfloat16", "float16"]
Moments = Literal["float32", "int8"]
Update = Literal["backward", "forward", "step", "auto"]
UpdateOn = Literal["host", "auto"]
IoBackend = Literal["threads", "inline", "aiofiles"]
Direct = Literal["auto", True, False]
Verify = Literal["resume", "always", "never"]
Directory = str | os.PathLike[str]

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(ParamDtype)}
_DEVICES = r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?"
_ALIGNMENT = 4096
_SMALLEST_TILE = 64 << 10
_LARGEST_QUEUE_DEPTH = 256
_SIZES = ("device_memory", "host_memory", "block_size", "tile_size", "look_ahead")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The knobs of a run. Sizes are bytes, as an int or as text ("20GiB"); they are kept as ints, or as "auto".

    device: "cuda", "cuda:1", "cpu", or "auto": cuda if there is one. For tests and experiments also "simulated", a part
        of host memory behind a link of given speed, see `tiermem.memory.links.parse_link`.
    device_memory: model state on the accelerator; "auto" plans it. Means nothing on a CPU.
    host_memory: model state in host memory, a hard budget; "auto" plans it, see `resolve_host_memory`.
    swap_dirs: one or more directories that exist; what is paged out is striped over them, and the first one says what
        is committed. Kept as a tuple of text.
    param_dtype: what forward and backward compute in; a torch dtype is accepted and kept as its name.
    moments: how AdamW's moments are kept: "float32", or "int8" in blocks (small ones and embeddings stay float32).
        Blocks begin where tiles do, and tiles follow the budget: with "int8" another budget has other bits.
    update: when a unit is updated: "backward", "forward", "step" or "auto". The same bits, other overlap.
    update_on: where: in "host" memory; "auto": on the device, too, for units whose state fits there beside the rest. On
        a GPU these have the bits of its own fused AdamW instead of the processor's.
    stage: ZeRO stage over ranks: 1 shards optimizer states, 2 gradients too, 3 parameters too.
    block_size: bytes per I/O submission.
    queue_depth: I/O submissions in flight per device.
    io_backend: "threads"; "inline" performs I/O in the caller, for tests; "aiofiles" goes through the page cache.
    direct: whether to bypass the page cache (O_DIRECT); "auto" does where the file system can, True insists.
    tile_size: bytes of optimizer state that are read, updated and written as one; "auto" plans it.
    look_ahead: bytes fetched ahead of the computation; "auto" plans it.
    verify: when checksums of what is read are compared: on "resume", "always" or "never".
    commits: whether `Runtime.commit` can be used; keeps two copies of all state on disk. False needs half the disk.
    overwrite: whether starting anew may replace a committed run found in `swap_dirs`.
    stall_timeout: seconds without progress after which a wait for I/O is an error.
    poison: fill released memory with NaN; a testing aid.

    Raises ConfigError, which says what was expected, what was found and what to do.
    """

    device: str = "auto"
    device_memory: int | str = "auto"
    host_memory: int | str = "auto"
    swap_dirs: Directory | Sequence[Directory] = ()
    param_dtype: ParamDtype | torch.dtype = "bfloat16"
    moments: Moments = "float32"
    update: Update = "auto"
    update_on: UpdateOn = "host"
    stage: int = 3
    block_size: int | str = 8 << 20
    queue_depth: int = 8
    io_backend: IoBackend = "threads"
    direct: Direct = "auto"
    tile_size: int | str = "auto"
    look_ahead: int | str = "auto"
    verify: Verify = "resume"
    commits: bool = True
    overwrite: bool = False
    stall_timeout: float = 120.0
    poison: bool = False

    def __new__(cls, **settings: object) -> Self:
        """Refuse what is not a knob before the generated `__init__` does, to suggest the closest."""
        _refuse_unknown(settings)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, normalize in _NORMALIZERS.items():
            object.__setattr__(self, name, normalize(name, getattr(self, name)))

    @property
    def device_nbytes(self) -> int | None:
        """The device budget in bytes; None: to be planned."""
        return _size(self.device_memory)

    @property
    def host_nbytes(self) -> int | None:
        """The host budget in bytes; None: to be planned."""
        return _size(self.host_memory)

    @property
    def block_nbytes(self) -> int:
        """Bytes per I/O submission."""
        return parse_bytes(self.block_size)

    @property
    def tile_nbytes(self) -> int | None:
        """Bytes of optimizer state per tile; None: to be planned."""
        return _size(self.tile_size)

    @property
    def look_ahead_nbytes(self) -> int | None:
        """Bytes fetched ahead of the computation; None: to be planned."""
        return _size(self.look_ahead)

    @property
    def dtype(self) -> torch.dtype:
        """`param_dtype` as torch knows it."""
        return _DTYPES[str(self.param_dtype)]

    @property
    def swap_paths(self) -> tuple[Path, ...]:
        """`swap_dirs` as paths, "~" expanded, if there is such a home: else `Path.expanduser` would raise."""
        return tuple(Path(os.path.expanduser(directory)) for directory in cast("tuple[str, ...]", self.swap_dirs))

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Self:
        """Make a Config from a mapping of knobs. Raises ConfigError for an unknown one and suggests the closest."""
        _refuse_unknown(settings)
        return cls(**cast("dict[str, Any]", settings))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, swap_dirs: Directory | Sequence[Directory] = ()) -> Self:
        """Read a `.toml` or `.json` file of knobs, with `swap_dirs`, if given, for its own.

        Raises ConfigError, also where the file cannot be read.
        """
        settings = read_settings(file := settings_path(path))
        try:
            return cls.from_dict(settings | {"swap_dirs": swap_dirs} if swap_dirs else settings)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    def to_dict(self) -> dict[str, str | int | float | bool | list[str]]:
        """Return every knob as plain values that JSON and TOML can hold; `from_dict` makes an equal Config of them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in _SIZES:
            if values[name] != "auto":
                values[name] = exact_bytes(values[name])
        return values | {"swap_dirs": list(values["swap_dirs"])}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every knob to a `.toml` or `.json` file, which `load` reads back as an equal Config.

        Raises ConfigError for another ending, OSError where it cannot be written.
        """
        write_settings(settings_path(path), self.to_dict())


def resolve_host_memory(config: Config, available: int) -> int:
    """Return the host budget in bytes: the one asked for, or what "auto" makes of `available` bytes.

    "auto" leaves a quarter, but no less than 2 GiB, to activations, gradients in flight, the interpreter and the
    model's code; of less than 4 GiB it takes half. `tiermem.memory.machine.available_host_memory` gives `available`.
    Raises ConfigError if that leaves less than a page.
    """
    if config.host_nbytes is not None:
        return config.host_nbytes
    left_to_others = min(max(available // 4, 2 << 30), available // 2)
    budget = (available - left_to_others) // _ALIGNMENT * _ALIGNMENT
    if budget < _ALIGNMENT:
        raise ConfigError(f"host_memory: nothing to plan with, {format_bytes(available)} are available; give a size")
    return budget


def resolve_device(config: Config) -> torch.device:
    """Return the device torch computes on. Raises ConfigError if it was named and is not there."""
    if parse_link(config.device) is not None:
        return torch.device("cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(
            f"device: expected {config.device!r} to exist, found {found} CUDA devices; use 'auto' or 'cpu'"
        )
    return device


def _refuse_unknown(settings: Mapping[str, object]) -> None:
    known = [field.name for field in dataclasses.fields(Config)]
    for key in (key for key in settings if key not in known):
        close = difflib.get_close_matches(str(key).lower(), known, n=1, cutoff=0.5)
        advice = f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(known)}"
        raise UnknownSettingError(f"unknown setting {key!r}: {advice}")


def _size(value: int | str) -> int | None:
    return None if value == "auto" else parse_bytes(value)


def _refuse(name: str, expected: str, found: object, advice: str) -> NoReturn:
    raise ConfigError(f"{name}: expected {expected}, found {found!r}; {advice}")


def _one_of(*choices: object) -> Callable[[str, object], object]:
    """A check that a knob is one of `choices`; 1 is not taken for True."""

    def check(name: str, value: object) -> object:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            _refuse(name, "one of " + ", ".join(map(repr, choices)), value, f"leave it out for {_default(name)!r}")
        return value

    return check


def _integer(highest: int) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= highest:
            _refuse(name, f"a whole number from 1 to {highest}", value, f"leave it out for {_default(name)!r}")
        return int(value)

    return check


def _bytes(lowest: int, *, multiple: int = 1, auto: bool = False) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if auto and isinstance(value, str) and value == "auto":
            return value
        expected = f"at least {exact_bytes(lowest)}" + (f" in multiples of {multiple} bytes" if multiple > 1 else "")
        expected += ", as bytes or as text like '20GiB'" + (", or 'auto'" if auto else "")
        try:
            nbytes = parse_bytes(value)  # type: ignore[arg-type]  # it says what it takes
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}; expected {expected}") from error
        if nbytes < lowest or nbytes % multiple:
            _refuse(name, expected, value, "correct it or leave it out")
        return nbytes

    return check


def _device(name: str, value: object) -> object:
    text = str(value) if isinstance(value, torch.device) else value
    if isinstance(text, str) and (re.fullmatch(_DEVICES, text) or parse_link(text) is not None):
        return text
    return _refuse(name, "'auto', 'cpu', 'cuda' or 'cuda:1'", value, "leave it out for 'auto'")


def _dtype(name: str, value: object) -> object:
    text = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    return _one_of(*_DTYPES)(name, text)


def parse_dtype(name: str, value: object) -> torch.dtype:
    """The torch dtype meant by a value of the argument `name`. Raises ConfigError for one that is not computed in."""
    text = str(value).removeprefix("torch.")
    if not isinstance(value, (str, torch.dtype)) or text not in _DTYPES:
        _refuse(name, "one of " + ", ".join(map(repr, _DTYPES)), value, "leave it out for param_dtype")
    return _DTYPES[text]


def _directories(name: str, value: object) -> object:
    given = [value] if isinstance(value, (str, os.PathLike)) else value
    if isinstance(given, bytes) or not isinstance(given, Sequence) or not given:
        _refuse(name, "one or more directories", value, "name a directory on each drive to use")
    directories = []
    for item in given:
        directory = os.fspath(item) if isinstance(item, (str, os.PathLike)) else None
        if not isinstance(directory, str) or not directory or "\0" in directory:
            _refuse(name, "paths of directories", item, "give text or pathlib paths")
        if not _is_text(directory):
            advice = "rename it, or set PYTHONUTF8=1 if it is and the locale has another encoding"
            _refuse(name, "paths of directories that are UTF-8", item, advice)
        directories.append(directory)
    if len({_place(os.path.expanduser(directory)) for directory in directories}) < len(directories):
        _refuse(name, "different directories", value, "name each directory once")
    return tuple(directories)


def _place(directory: str) -> tuple[int, int] | str:
    """The same for two names of one directory: by a link, or mounted twice."""
    try:
        found = os.stat(directory)
    except OSError:  # of another machine's settings, for one
        return os.path.realpath(directory)
    return found.st_dev, found.st_ino


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # bytes of a path that are not UTF-8: no settings file could hold it
        return False
    return True


def _seconds(name: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        _refuse(name, "a positive number of seconds", value, f"leave it out for {_default(name)!r}")
    return float(value)


def _default(name: str) -> object:
    return next(field.default for field in dataclasses.fields(Config) if field.name == name)


_NORMALIZERS: dict[str, Callable[[str, object], object]] = {
    "device": _device,
    "device_memory": _bytes(_ALIGNMENT, auto=True),
    "host_memory": _bytes(_ALIGNMENT, auto=True),
    "swap_dirs": _directories,
    "param_dtype": _dtype,
    "moments": _one_of(*get_args(Moments)),
    "update": _one_of(*get_args(Update)),
    "update_on": _one_of(*get_args(UpdateOn)),
    "stage": _integer(3),
    "block_size": _bytes(_ALIGNMENT, multiple=_ALIGNMENT),
    "queue_depth": _integer(_LARGEST_QUEUE_DEPTH),
    "io_backend": _one_of(*get_args(IoBackend)),
    "direct": _one_of(*get_args(Direct)),
    "tile_size": _bytes(_SMALLEST_TILE, auto=True),
    "look_ahead": _bytes(0, auto=True),
    "verify": _one_of(*get_args(Verify)),
    "commits": _one_of(True, False),
    "overwrite": _one_of(True, False),
    "stall_timeout": _seconds,
    "poison": _one_of(True, False),
}
# What `help` and editors show: the knobs and their defaults; `__new__` would hide them.
Config.__signature__ = inspect.signature(partial(Config.__init__, None))  # type: ignore[attr-defined, arg-type]
