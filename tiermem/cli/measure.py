"""A few seconds of measuring what this machine gives, as a record the planner understands.

Owns the short measurements: the swap directories through the same engine that training uses, matrix products, the
update kernel, each beside the other. Does not cache or choose (`machines.py` does). Guarantees that its files are its
own and gone afterwards, and that what runs beside something else is timed while that something really runs.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from swap import AlignedBuffer, Extent, Request, SwapSpace, free_together
from tiermem.cli.abandoned import remove_abandoned
from tiermem.cli.disk import new_folders, require_directory
from tiermem.cli.measure_device import device_room, is_real, measure_device, rates_key
from tiermem.cli.measure_layer import ANY_LAYER, LayerShape, in_time, layer_flops, slowed, train_layer
from tiermem.cli.timing import mean_seconds, median_seconds, seconds_of
from tiermem.config import Config, resolve_host_memory
from tiermem.errors import ConfigError
from tiermem.memory.machine import available_cores, available_host_memory
from tiermem.memory.sizes import format_bytes
from tiermem.optim.kernels import Run, Workspace, adamw_tile
from tiermem.optim.planes import tile_planes
from tiermem.optim.shares import Shares, update_threads
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.updates import Settings
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.runtime.beginning import SPACE_NAME
from tiermem.zero3.norms import gradient_norm

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CPU = torch.device("cpu")
# A tile as training updates it.
_TILE, _TILES = 1 << 20, 12
# And beside a device, where threads take long turns at large ones (`optim/README.md`).
_LARGE_TILE, _LARGE_TILES = 8 << 20, 4
# What a tile costs the update besides its elements, where it is not found by training (`measure_workload.py`): 0.4 to
# 1.4 ms with two cores, as `benchmarks/prediction.py` found.
_TILE_SECONDS = 7e-4
# Forward, backward and the gradients of a unit are leased; and what a lease costs where nothing has to move
# (`planner/README.md`, "The plan, and who carries it out").
LEASES, LEASE_SECONDS = 3, 2.5e-4
# What a layer takes in training besides its products, where it is not found by training: in memory its forward took
# 1.4 ms longer than in plain PyTorch, and its backward 3 (two cores; nine parameters, width 512), leases included.
BESIDES_SECONDS = 4.4e-3 - LEASES * LEASE_SECONDS
SECONDS = 0.25
_DRIVE_SECONDS = 0.7
_PROBE_BYTES = 256 << 20
_PIECES = 16
_LEAST_FREE = 64 << 20


def measure_machine(
    directories: Sequence[Path],
    config: Config | None = None,
    *,
    seconds: float = SECONDS,
    drive_seconds: float = _DRIVE_SECONDS,
    nbytes: int = _PROBE_BYTES,
    layer: LayerShape | None = None,
) -> Machine:
    """Measure drives, processors and the device of `config`.

    About `seconds` for each rate, and `drive_seconds` for each pattern on the drives. `layer`: what processors compute,
    `ANY_LAYER` if None. Raises ConfigError for a directory that is missing or full and for a device that is not there,
    SwapError for a directory that cannot be used.
    """
    config = config or Config(device="cpu", swap_dirs=[str(directory) for directory in directories])
    beside_device = is_real(config)
    numel, update = _LARGE_TILE if beside_device else _TILE, functools.partial(_update, beside_device=beside_device)
    layer = ANY_LAYER if layer is None else layer
    shape = in_time(torch.bfloat16, CPU, layer, seconds)
    train, renew = train_layer(torch.bfloat16, CPU, shape), update(torch.bfloat16)
    with nullcontext() if beside_device else _repeating(train):
        drive = measure_drive(directories, seconds=drive_seconds, nbytes=nbytes)
    products, updates, copies = {}, {}, {}
    for name, dtype in DTYPES.items():
        products[name] = slowed(layer_flops(dtype, CPU, seconds, layer), layer, BESIDES_SECONDS)
        updates[name] = numel / median_seconds(update(dtype), seconds)
        copies[name] = _TILE * dtype.itemsize / median_seconds(_move_gradient(dtype), seconds)
    beside_update, beside_compute = _beside(train, renew, seconds)
    alone = [mean_seconds(work, seconds) for work in (train, renew)]
    with _moving(directories[0]):
        beside_io = [mean_seconds(work, seconds) for work in (train, renew)]
    products["float16"], updates["float16"] = products["bfloat16"], updates["bfloat16"]
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    conditions = [f"torch {torch.__version__}", f"{torch.get_num_threads()} threads", rates_key(config)]
    return Machine(
        name=platform.node() or "this machine",
        source=f"measured {now}, {', '.join(filter(None, conditions))}",
        host=Host(
            memory=_host_memory(),
            cores=max(1, int(available_cores())),
            flops=products,
            update_rate=updates,
            copy_rate=min(copies.values()),
            **({} if beside_device else {"lease_seconds": LEASE_SECONDS, "tile_seconds": _TILE_SECONDS}),
            compute_beside_update=beside_update,
            update_beside_compute=beside_compute,
            compute_beside_io=max(0.0, beside_io[0] / alone[0] - 1),
            update_beside_io=max(0.0, beside_io[1] / alone[1] - 1),
        ),
        drive=drive,
        device=measure_device(config, products, seconds=seconds),
    )


def with_room_now(machine: Machine, directories: Sequence[Path], config: Config) -> Machine:
    """The machine as it was measured, with the memory and the disk that are free now. Raises as `measure_machine`."""
    device = machine.device
    return replace(
        machine,
        device=None if device is None else replace(device, memory=device_room(config)),
        host=replace(machine.host, memory=_host_memory()),
        drive=replace(machine.drive, capacity=free_together(directories)),
    )


def slower_together(dtype: torch.dtype, seconds: float = SECONDS) -> tuple[float, float]:
    """How much longer computation takes beside the update, and the update beside computation: see `Host`."""
    return _beside(train_layer(dtype, CPU, in_time(dtype, CPU, ANY_LAYER, seconds)), _update(dtype), seconds)


def _host_memory() -> int:
    """What "auto" takes of it; the directories are nobody's here."""
    return resolve_host_memory(Config(swap_dirs=["."]), available_host_memory())


def measure_drive(directories: Sequence[Path], *, seconds: float = _DRIVE_SECONDS, nbytes: int = _PROBE_BYTES) -> Drive:
    """Bandwidths of all directories together, striped as training stripes, and the latency of one small read.

    Of requests as large as tiles are, two at a time each way. Each pattern goes over the same `nbytes` again and again
    for `seconds`. A drive's caches and a virtual drive's credits flatter a short look: measure for longer where that
    matters.
    """
    for directory in directories:
        require_directory(directory)
        remove_abandoned(directory)
    free = free_together(directories)
    nbytes = min(nbytes, free // 4)
    if nbytes < _LEAST_FREE:
        raise ConfigError(
            f"measuring the drive needs {format_bytes(4 * _LEAST_FREE)} free, {directories[0]} has {format_bytes(free)}"
        )
    with _space(directories, 2 * nbytes) as space, AlignedBuffer(2 * nbytes) as buffer:
        half = nbytes // _PIECES // 4096 * 4096
        extents = [space.allocate(half) for _ in range(2 * _PIECES)]
        views = [buffer.view[index * half : (index + 1) * half] for index in range(2 * _PIECES)]
        one, other = range(_PIECES), range(_PIECES, 2 * _PIECES)
        moved = half * _PIECES

        def read(which: range) -> Iterator[Request]:
            return (space.start_read(extents[index], views[index]) for index in which)

        def write(which: range) -> Iterator[Request]:
            return (space.start_write(extents[index], views[index]) for index in which)

        _move(write(one), write(other))  # the first write of a stretch also pays for the file system's bookkeeping
        rates = {
            "write": moved / mean_seconds(lambda: _move(write(one)), seconds),
            "read": moved / mean_seconds(lambda: _move(read(one)), seconds),
            "mixed": 2 * moved / mean_seconds(lambda: _move(read(one), write(other)), seconds),
        }
        small, place = space.allocate(4096), buffer.view[:4096]
        _wait([space.start_write(small, place)])
        latency = min(seconds_of(lambda: _wait([space.start_read(small, place)])) for _ in range(20))
        for view in views:
            view.release()
        place.release()
    return Drive(read=rates["read"], write=rates["write"], mixed=rates["mixed"], latency=latency, capacity=free)


@contextmanager
def _space(directories: Sequence[Path], nbytes: int) -> Iterator[SwapSpace]:
    """A swap space of its own in a new folder of each directory, removed afterwards."""
    with (
        new_folders(directories, prefix="tiermem-measure-") as made,
        SwapSpace.open(made, name=SPACE_NAME, nbytes=nbytes + (64 << 20)) as space,
    ):
        yield space


def _move(*rows: Iterator[Request]) -> None:
    """Start requests and wait for them: of each row two are on their way at a time, as of the tiles of an update."""
    under_way = [deque(itertools.islice(row, 2)) for row in rows]
    while any(under_way):
        for row, started in zip(rows, under_way, strict=True):
            if started:
                started.popleft().wait()
                started.extend(itertools.islice(row, 1))


def _wait(requests: Sequence[Request]) -> None:
    for request in requests:
        request.wait()


def _beside(one: Callable[[], None], other: Callable[[], None], seconds: float) -> tuple[float, float]:
    """How much longer each takes while the other runs, in shares of its time alone.

    Means: a thread that has lost its core waits for a while, seldom, and others with it at the end of each operation.
    """
    one()
    other()
    alone = (mean_seconds(one, seconds), mean_seconds(other, seconds))
    found: list[float] = []
    for work, beside, undisturbed in ((one, other, alone[0]), (other, one, alone[1])):
        with _repeating(beside):
            found.append(max(0.0, mean_seconds(work, seconds) / undisturbed - 1))
    return found[0], found[1]


@contextmanager
def _repeating(work: Callable[[], None]) -> Iterator[None]:
    """Do it again and again on another thread meanwhile."""
    ended, began = threading.Event(), threading.Event()

    def run() -> None:
        try:
            while not ended.is_set():
                work()
                began.set()
        finally:
            began.set()  # an error is raised at the end, and nobody waits for what will not begin

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        began.wait(60)
        try:
            yield
        finally:
            ended.set()
            running.result()


@contextmanager
def _moving(directory: Path) -> Iterator[None]:
    """Bytes are read and written meanwhile."""
    half = 16 << 20
    with _space([directory], 4 * half) as space, AlignedBuffer(2 * half) as buffer:
        extents: list[Extent] = [space.allocate(half), space.allocate(half)]
        views = [buffer.view[:half], buffer.view[half:]]
        _wait([space.start_write(extents[0], views[0])])

        def move() -> None:
            _wait([space.start_read(extents[0], views[0]), space.start_write(extents[1], views[1])])

        with _repeating(move):
            yield
        for view in views:
            view.release()


def _update(dtype: torch.dtype, *, beside_device: bool = False) -> Callable[[], None]:
    """Tiles in turn, more than caches hold, as they come from the drive in training."""
    numel, count = (_LARGE_TILE, _LARGE_TILES) if beside_device else (_TILE, _TILES)
    gradient = torch.randn(numel).to(dtype)
    parameters = [gradient.clone() for _ in range(count)]
    state = UnitState(0, dtype, (Segment(0, 0, numel),), numel, numel)
    planes = [tile_planes(torch.zeros(state.state_nbytes(0), dtype=torch.uint8), state, 0) for _ in range(count)]
    workspace = Workspace(shares=Shares(update_threads(beside_device=beside_device)))
    turn = itertools.cycle(range(count))
    runs = [Run(0, numel, Settings(lr=1e-6, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=10))]

    def update() -> None:
        tile = next(turn)
        adamw_tile(parameters[tile], gradient, planes[tile], runs, workspace)

    return update


def _move_gradient(dtype: torch.dtype) -> Callable[[], None]:
    gradient, page = torch.randn(_TILE).to(dtype), torch.empty(_TILE, dtype=dtype)

    def move() -> None:
        page.copy_(gradient)
        gradient_norm(gradient)

    return move
