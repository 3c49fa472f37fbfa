"""Which machine a plan is for: this one, measured, or one that a small file describes.

Owns the search for a profile (a shipped name, a TOML file, or this machine) and the cache of measurements. Does not
measure by itself. Guarantees that a cached measurement says when it was made, that one of other directories,
processors, numbers of threads or devices is not taken for it, and that a file which cannot be understood is refused,
not guessed at.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import torch

from tiermem.cli.disk import require_directory
from tiermem.cli.measure import measure_machine, with_room_now
from tiermem.cli.measure_device import rates_key
from tiermem.cli.measure_workload import stand_for, with_rates_for
from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.memory.machine import available_cores
from tiermem.output_file import write_whole
from tiermem.planner.machine import Machine, machine_from_dict, machine_to_dict
from tiermem.planner.tilesizes import planned_tile
from tiermem.planner.workload import Workload

# Raised where something else is measured, or in another way: what an older version has kept is not taken for it.
_HOW = 4


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    folder = resources.files("tiermem.planner") / "profiles"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_profile(profile: str) -> Machine:
    """The machine of a shipped profile's name, or of a TOML file.

    Raises ConfigError for a name that is neither, and for a file that is no profile.
    """
    if profile in profile_names():
        text = (resources.files("tiermem.planner") / "profiles" / f"{profile}.toml").read_text(encoding="utf-8")
    else:
        file = Path(profile)
        if not file.is_file():
            raise ConfigError(f"no profile and no file {profile!r}; profiles: {', '.join(profile_names())}")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {profile}: {error}") from error
    try:
        return machine_from_dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{profile} is not TOML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{profile}: {error}") from error


def this_machine(directories: Sequence[Path], config: Config, *, again: bool = False) -> Machine:
    """This machine with swap files in `directories` and the device of `config`: the cached measurement, or a new one.

    `again`: a new one in any case. Rates are kept; what is free of memory, of the device's too, and of the disks is
    looked up each time. Raises ConfigError for a directory that cannot be used, and a device that is not there.
    """
    for directory in directories:
        require_directory(directory)
    key = rates_key(config)
    return _kept(directories, config, key, again=again, measure=lambda: measure_machine(directories, config))


def machine_for(workload: Workload, config: Config, *, seq: int, again: bool = False) -> Machine:
    """This machine with the rates at which it trains `workload`, of sequences of `seq` tokens; as `this_machine`."""
    directories = config.swap_paths
    machine = this_machine(directories, config, again=again)
    tile = config.tile_nbytes or planned_tile(config.host_nbytes or machine.host.memory)
    return _kept(
        directories,
        config,
        f"{rates_key(config)} {stand_for(workload, seq=seq, tile_nbytes=tile)}",
        again=again,
        measure=lambda: with_rates_for(machine, workload, directories, seq=seq, tile_nbytes=tile),
        lasts=lambda found: found.source == machine.source,
    )


def _kept(
    directories: Sequence[Path],
    config: Config,
    key: str,
    *,
    again: bool,
    measure: Callable[[], Machine],
    lasts: Callable[[Machine], bool] = lambda _: True,
) -> Machine:
    """What was measured under this key, with the room there is now; else what `measure` finds, kept if it `lasts`."""
    file = cache_file(directories, key)
    if file is None:
        return measure()
    if not again:
        # None yet, damaged, of an older version, or not ours to read: measured anew.
        with contextlib.suppress(OSError, ValueError):
            return with_room_now(machine_from_dict(json.loads(file.read_text(encoding="utf-8"))), directories, config)
    machine = measure()
    with contextlib.suppress(OSError):  # a home that cannot be written: the measurement is good all the same
        if not lasts(machine):
            file.unlink(missing_ok=True)  # else what was to be measured again would be back the next time
            return machine
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(machine_to_dict(machine), indent=1) + "\n")
    return machine


def cache_file(directories: Sequence[Path], device: str) -> Path | None:
    """Where the measurement of these directories is kept: one file for each drive, core and thread count, and device.

    `device`: what its rates depend on, as text.

    None for a user without a home, such as a number that a container runs as.
    """
    drives = sorted({directory.stat().st_dev for directory in directories if directory.exists()})
    kind = [_HOW, drives, len(directories), available_cores(), torch.get_num_threads(), torch.__version__, device]
    key = json.dumps(kind)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home) / "tiermem" / f"machine-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
