"""What a machine gives: bytes a second, operations a second, bytes of memory.

Owns the records of a machine and how a table of settings becomes one. Does not open files and measures nothing: numbers
come in. Guarantees that an unknown key is refused with the closest known one, that sizes and rates are positive, and
that every number a plan rests on is in the record, with the place it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiermem.errors import ConfigError
from tiermem.memory.sizes import parse_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One drive, or several equal ones that are striped over.

    Attributes:
        read, write: bytes a second of one of them, one direction alone.
        mixed: bytes a second, both directions together, when as much is read as written.
        latency: seconds that a request takes besides its bytes.
        count: how many there are in one node.
        capacity: bytes free on one; None: not known.
        endurance: bytes that may be written to one in its life, as its maker says; 0: not known.
    """

    read: float
    write: float
    mixed: float
    latency: float = 1e-4
    count: int = 1
    capacity: int | None = None
    endurance: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The processors and the memory of one node.

    Attributes:
        memory: bytes that model state may take on the node; 0: not known.
        cores: processor cores; said for whoever reads the profile, nothing is reckoned with them.
        flops: operations a second in matrix products, by dtype; what computes where there is no device.
        update_rate: parameters a second that the AdamW kernel updates with all cores of the node, by dtype.
        copy_rate: bytes a second at which gradients are moved into pages and measured.
        lease_seconds: seconds of the compute thread for each lease.
        step_seconds: seconds of the compute thread for each step besides.
        tile_seconds: seconds of the update for each tile besides: handing it to the kernel, waking up, calling it.
        compute_beside_update: how much longer computation takes while an update kernel runs; 1.0: twice as long.
        update_beside_compute: how much longer an update kernel takes while computation runs.
        compute_beside_io, update_beside_io: how much longer computation, an update kernel takes while bytes move.
    """

    memory: int = 0
    cores: int = 1
    flops: Mapping[str, float] = field(default_factory=dict)
    update_rate: Mapping[str, float]
    copy_rate: float = 1e10
    lease_seconds: float = 1e-4
    step_seconds: float = 1e-3
    tile_seconds: float = 0.0
    compute_beside_update: float = 0.0
    update_beside_compute: float = 0.0
    compute_beside_io: float = 0.0
    update_beside_io: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The accelerators of one node.

    Attributes:
        memory: bytes that model state may take on one.
        flops: operations a second of one, by dtype: in matrix products, as its maker says, or measured in training.
        efficiency: the share of `flops` that training reaches; 1.0 where they were measured there.
        to_device, to_host: bytes a second between host memory and one of them, each direction.
        count: how many there are in one node.
        simulated: whether the node's own processors play it, and computation shares them with the update.
    """

    memory: int
    flops: Mapping[str, float]
    to_device: float
    to_host: float
    efficiency: float = 0.45
    count: int = 1
    simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the ranks. `rate`: bytes a second that a rank receives in an all-gather; `latency` in seconds.

    `node_rate`: the same among ranks of one node; 0: as between nodes.
    """

    rate: float
    latency: float = 2e-5
    node_rate: float = 0.0

    def of(self, *, within: bool) -> float:
        """The rate among ranks of which all are on one node (`within`), or not all."""
        return (within and self.node_rate) or self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node of a machine. `source` says where the numbers come from: measured when, or described by whom."""

    name: str
    source: str
    host: Host
    drive: Drive
    device: Device | None = None
    link: Link | None = None

    @property
    def ranks_per_node(self) -> int:
        """How many ranks share a node's memory, drives and processors when the node is full."""
        return self.device.count if self.device is not None else 1

    def on_each_node(self, ranks: int) -> int:
        """How many of so many ranks a node has. Raises ConfigError if nodes would differ, and without a [link]."""
        per_node = min(ranks, self.ranks_per_node)
        if ranks % per_node:
            raise ConfigError(f"expected a multiple of the node's {per_node} ranks, found {ranks}")
        if ranks > 1 and self.link is None:
            raise ConfigError(
                f"{self.name}: for {ranks} ranks, expected a [link] in the profile (bytes a second), found none; it is "
                "not measured: write a profile like tiermem/planner/profiles/dgx-h100.toml and name it with --machine"
            )
        return per_node

    def flops(self, dtype: str) -> float:
        """Operations a second of one rank's matrix products in `dtype`. Raises ConfigError if that is not known."""
        if self.device is not None:
            return _of_dtype(self.device.flops, dtype, "device.flops") * self.device.efficiency
        return _of_dtype(self.host.flops, dtype, "host.flops")

    def update_rate(self, dtype: str) -> float:
        """Parameters a second that one node updates. Raises ConfigError if that is not known."""
        return _of_dtype(self.host.update_rate, dtype, "host.update_rate")


def _of_dtype(table: Mapping[str, float], dtype: str, what: str) -> float:
    if dtype not in table:
        raise ConfigError(f"{what}: expected a number for {dtype}, found {', '.join(table) or 'none'}")
    return table[dtype]


_PARTS: dict[str, type[Any]] = {"host": Host, "drive": Drive, "device": Device, "link": Link}
_SIZES = frozenset({"memory", "capacity", "endurance"})
_COUNTS = frozenset({"count", "cores"})
_TABLES = frozenset({"flops", "update_rate"})
_DTYPES = ("bfloat16", "float16", "float32")


def machine_from_dict(table: Mapping[str, Any]) -> Machine:
    """Make a Machine of a table such as a TOML file holds. Sizes may be text ("64GiB").

    Raises ConfigError that names the key, what was expected of it, and for an unknown one the closest known.
    """
    _refuse_unknown(table, [item.name for item in dataclasses.fields(Machine)], "the profile")
    for name in ("name", "source"):
        if not isinstance(table.get(name), str):
            raise ConfigError(f"{name}: expected text, found {table.get(name)!r}")
    parts = {}
    for name, kind in _PARTS.items():
        if name in table:
            parts[name] = _part(kind, name, table[name])
        elif name in ("host", "drive"):
            raise ConfigError(f"expected a table [{name}] in the profile, found {', '.join(table)}")
    return Machine(name=table["name"], source=table["source"], **parts)


def machine_to_dict(machine: Machine) -> dict[str, Any]:
    """The table from which `machine_from_dict` makes an equal Machine."""
    values = {name: value for name, value in dataclasses.asdict(machine).items() if value is not None}
    parts = {
        name: {key: each for key, each in values[name].items() if each is not None} for name in _PARTS.keys() & values
    }
    return values | parts


def _part(kind: type[T], where: str, table: object) -> T:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table, found {table!r}")
    items = dataclasses.fields(kind)  # type: ignore[arg-type]
    _refuse_unknown(table, [item.name for item in items], f"[{where}]")
    needed = [
        item.name
        for item in items
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in needed if name not in table]
    if missing:
        raise ConfigError(f"[{where}]: expected {', '.join(missing)} too; the keys are {', '.join(table)}")
    return kind(**{name: _value(f"{where}.{name}", name, value) for name, value in table.items()})


def _value(where: str, name: str, value: object) -> Any:
    if name in _TABLES:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a number for each dtype, found {value!r}")
        _refuse_unknown(value, _DTYPES, where)
        return {dtype: _positive(f"{where}.{dtype}", number) for dtype, number in value.items()}
    if name == "simulated":
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: expected true or false, found {value!r}")
        return value
    if name in _SIZES:
        return parse_bytes(value, f"{where}: ")  # type: ignore[arg-type]  # it says what it takes
    if name in _COUNTS:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{where}: expected a whole number of one or more, found {value!r}")
        return value
    if name.startswith(("compute_beside", "update_beside")) or name.endswith(("seconds", "latency", "node_rate")):
        return _positive(where, value, zero=True)
    return _positive(where, value)


def _positive(where: str, value: object, *, zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where}: expected a number, found {value!r}")
    if value < 0 or (value == 0 and not zero):
        least = "of zero or more" if zero else "above zero"
        raise ConfigError(f"{where}: expected a number {least}, found {value!r}")
    return float(value)


def _refuse_unknown(table: Mapping[str, Any], known: Any, where: str) -> None:
    names = list(known)
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            advice = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(names)}"
            raise ConfigError(f"unknown key {key!r} in {where}: {advice}")
