"""Which of a machine's NUMA nodes memory lies on.

Owns the reading of the kernel's list of nodes and devices, and the two system calls that place memory and say where it
is. Does not know arenas, or what a device is besides its address on the bus. Guarantees that on a machine of one node
nothing is done, that a full node never ends a run (the node is preferred, not required), and that whoever started the
process under a policy of their own (`numactl`) keeps it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tiermem.memory.machine import number_in

SYSTEM = Path("/sys")
_PREFERRED = 1  # MPOL_PREFERRED: this node while it has room, then any other. MPOL_BIND would end the run instead.
_DEFAULT = 0
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class _Numbers(NamedTuple):
    mbind: int
    get_mempolicy: int


# Of the system calls; glibc has no functions for them (libnuma has, and need not be installed).
_NUMBERS = {"x86_64": _Numbers(237, 239), "aarch64": _Numbers(235, 236)}

# (number, arguments): the result, negative never; raises OSError.
SystemCall = Callable[..., int]


def memory_nodes(root: Path = SYSTEM) -> tuple[int, ...]:
    """The nodes that have memory, in order; () where the kernel does not say. `root`: where sysfs is."""
    try:
        text = (root / "devices/system/node/has_memory").read_text(encoding="ascii").strip()
    except OSError:
        return ()
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            nodes.extend(range(int(first), int(last or first) + 1))
    return tuple(nodes)


def pci_address(domain: int, bus: int, device: int) -> str:
    """How the kernel names the first function of a device on the bus, such as "0000:3b:00.0"."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def pci_node(address: str, root: Path = SYSTEM) -> int | None:
    """The node that a device on the bus hangs on; None where the kernel does not know."""
    return number_in(root / "bus/pci/devices" / address / "numa_node")


def block_node(major: int, minor: int, root: Path = SYSTEM) -> int | None:
    """The node that a drive, or a part of one, hangs on; None where the kernel does not know, or there is no drive."""
    block = (root / f"dev/block/{major}:{minor}").resolve()
    # The drive lies below its controller, and that below the slot on the bus, which is what has a node.
    for folder in (block, *block.parents):
        node = number_in(folder / "numa_node")
        if node is not None or folder == root:
            return node
    return None


def node_to_prefer(address: str, root: Path = SYSTEM) -> int | None:
    """Where memory for a device on the bus is best; None on a machine of one node, or where nobody knows."""
    nodes = memory_nodes(root)
    node = pci_node(address, root) if len(nodes) > 1 else None
    return node if node in nodes else None


def prefer(address: int, nbytes: int, node: int, *, call: SystemCall | None = None) -> bool:
    """Have the pages of a range, none of which was touched yet, come from `node` while it has room.

    Returns False, and changes nothing, where the process has a policy of its own. Raises OSError if the system refuses.
    `address`: a multiple of the page size.
    """
    system = system_call if call is None else call
    if _own_policy(system):
        return False
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << node % _BITS
    # The kernel looks at one bit less than it is told of.
    system("mbind", address, nbytes, _PREFERRED, ctypes.addressof(mask), words * _BITS + 1, 0)
    return True


def why_not(node: int, *, call: SystemCall | None = None) -> str | None:
    """Why memory cannot be placed on `node`: the system's answer, tried with one page; None if it can."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        first = ctypes.c_char.from_buffer(page)
        try:
            placed = prefer(ctypes.addressof(first), mmap.PAGESIZE, node, call=call)
        except OSError as error:
            return str(error)
        finally:
            del first  # a mapping that is looked at cannot be closed
    return None if placed else "this process was started with a policy of its own (numactl), which is kept"


def system_call(name: str, *arguments: int) -> int:
    """One of the calls above. Raises OSError with the system's answer, or where this kind of machine has none."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        raise OSError(f"{name} is not known on {platform.system()} {platform.machine()}")
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    number = ctypes.c_long(numbers.mbind if name == "mbind" else numbers.get_mempolicy)
    answer = int(library.syscall(number, *(ctypes.c_ulong(argument) for argument in arguments)))
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return answer


def _own_policy(system: SystemCall) -> bool:
    """Whether somebody has given this thread another policy than the system's."""
    mode = ctypes.c_int(_DEFAULT)
    system("get_mempolicy", ctypes.addressof(mode), 0, 0, 0, 0)
    return mode.value != _DEFAULT
