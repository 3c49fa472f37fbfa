"""Where a made-up machine's nodes are, and memory of this one that is asked to lie on its first node."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.memory import cuda, numa, pagelock
from tiermem.memory.cuda import CudaDevice, bus_address
from tiermem.memory.mapping import Mapping
from tiermem.memory.pagelock import HostSlab
from tiermem.memory.slab import SlabArena
from tiermem.memory.tiers import Tier

MIB = 1 << 20
FLAG_ADDRESS = 2  # MPOL_F_ADDR: the policy of the memory at an address


def machine(root: Path, nodes: str = "0-1\n", **files: str) -> Path:
    """A tree like sysfs's: `nodes` with memory, and files by name ("bus/pci/..." has no slashes in Python)."""
    tree = {"devices/system/node/has_memory": nodes, **files}
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", (0,)), ("0-3\n", (0, 1, 2, 3)), ("0,2-3,8\n", (0, 2, 3, 8)), ("\n", ()), ("x-1\n", ())]
)
def test_the_nodes_that_have_memory(tmp_path: Path, text: str, nodes: tuple[int, ...]) -> None:
    assert numa.memory_nodes(machine(tmp_path, text)) == nodes
    assert numa.memory_nodes(tmp_path / "elsewhere") == ()


@given(st.sets(st.integers(0, 200), min_size=1))
def test_any_list_of_nodes_is_read_as_the_kernel_writes_it(nodes: set[int]) -> None:
    class File:
        def __truediv__(self, name: str) -> File:
            return self

        def read_text(self, encoding: str) -> str:
            ordered, parts = sorted(nodes), []
            for node in ordered:
                if node - 1 not in nodes:
                    last = next(end for end in range(node, 300) if end + 1 not in nodes)
                    parts.append(str(node) if last == node else f"{node}-{last}")
            return ",".join(parts) + "\n"

    assert numa.memory_nodes(File()) == tuple(sorted(nodes))  # type: ignore[arg-type]


def test_a_device_is_found_by_its_address(tmp_path: Path) -> None:
    address = numa.pci_address(0, 0x3B, 0)
    assert address == "0000:3b:00.0"
    root = machine(tmp_path, **{f"bus/pci/devices/{address}/numa_node": "1\n"})
    root = machine(root, **{"bus/pci/devices/0000:00:01.0/numa_node": "-1\n"})
    assert numa.pci_node(address, root) == 1
    assert numa.pci_node("0000:00:01.0", root) is None
    assert numa.pci_node("0000:00:02.0", root) is None


@pytest.mark.parametrize(
    ("nodes", "node", "preferred"), [("0-1", "1", 1), ("0-1", "0", 0), ("0", "0", None), ("0-1", "-1", None)]
)
def test_memory_is_preferred_beside_the_device(tmp_path: Path, nodes: str, node: str, preferred: int | None) -> None:
    root = machine(tmp_path, nodes, **{"bus/pci/devices/0000:3b:00.0/numa_node": node})
    assert numa.node_to_prefer("0000:3b:00.0", root) == preferred


def test_a_node_without_memory_is_not_preferred(tmp_path: Path) -> None:
    root = machine(tmp_path, "0,2", **{"bus/pci/devices/0000:3b:00.0/numa_node": "1"})
    assert numa.node_to_prefer("0000:3b:00.0", root) is None


def test_a_drives_node_is_that_of_the_slot_above_it(tmp_path: Path) -> None:
    slot = "devices/pci0000:3a/0000:3b:00.0"
    root = machine(tmp_path, **{f"{slot}/numa_node": "1", f"{slot}/nvme/nvme0/nvme0n1/nvme0n1p1/size": "9"})
    blocks = root / "dev/block"
    blocks.mkdir(parents=True)
    (blocks / "259:1").symlink_to(root / slot / "nvme/nvme0/nvme0n1/nvme0n1p1")
    (blocks / "8:0").symlink_to(root / "devices")
    assert numa.block_node(259, 1, root) == 1
    assert numa.block_node(8, 0, root) is None
    assert numa.block_node(7, 7, root) is None


def policy_at(address: int) -> tuple[int, int]:
    """The policy of the memory at an address, and the nodes it names, as a mask."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    numa.system_call(
        "get_mempolicy", ctypes.addressof(mode), ctypes.addressof(mask), 16 * 64 + 1, address, FLAG_ADDRESS
    )
    return mode.value, mask[0]


def works_here() -> bool:
    try:
        numa.system_call("get_mempolicy", ctypes.addressof(ctypes.c_int()), 0, 0, 0, 0)
    except OSError:
        return False
    return True


needs_policies = pytest.mark.skipif(not works_here(), reason="this system has no memory policies, or denies them")


@needs_policies
def test_the_kernel_takes_the_preference_and_the_pages_come_from_there() -> None:
    mapping = Mapping(8 * MIB)
    assert policy_at(mapping.address) == (0, 0)
    assert numa.prefer(mapping.address, 4 * MIB, 0)
    assert policy_at(mapping.address) == (1, 1), "preferred, not bound; node 0"
    assert policy_at(mapping.address + 4 * MIB - mmap.PAGESIZE) == (1, 1)
    assert policy_at(mapping.address + 4 * MIB) == (0, 0), "no further than asked"
    node, node_of_address = ctypes.c_int(-1), 3  # MPOL_F_NODE | MPOL_F_ADDR
    numa.system_call("get_mempolicy", ctypes.addressof(node), 0, 0, mapping.address + MIB, node_of_address)
    assert node.value == 0, "the page that was touched by asking lies there"
    mapping.close()


@needs_policies
def test_a_slab_is_placed_before_it_is_touched_and_says_where() -> None:
    slab = HostSlab(4 * MIB, node=0)
    arena = SlabArena(slab, Tier.HOST)
    frame = arena.allocate(MIB)
    assert frame is not None
    assert policy_at(frame.tensor.data_ptr()) == (1, 1)
    assert slab.node == 0
    arena.close()
    assert HostSlab(MIB).node is None


@needs_policies
def test_a_node_that_is_not_there_is_refused_by_the_kernel() -> None:
    slab = HostSlab(MIB, node=1000)
    assert slab.node is None
    assert SlabArena(slab, Tier.HOST).allocate(MIB) is not None
    assert numa.why_not(0) is None
    reason = numa.why_not(1000)
    assert reason is not None
    assert "mbind" in reason


def denied(name: str, *arguments: int) -> int:
    raise PermissionError(1, f"{name}: Operation not permitted")


def test_where_the_system_refuses_the_memory_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError, match="get_mempolicy"):
        numa.prefer(0, 4096, 1, call=denied)
    assert "not permitted" in str(numa.why_not(1, call=denied))
    monkeypatch.setattr(numa, "system_call", denied)
    slab = HostSlab(MIB, node=1)
    assert slab.node is None
    frame = SlabArena(slab, Tier.HOST).allocate(MIB)
    assert frame is not None
    frame.tensor.fill_(1)


class System:
    """Notes what it is asked for; `mode`: the policy the process was started with."""

    def __init__(self, mode: int) -> None:
        self.mode, self.asked = mode, []

    def __call__(self, name: str, *arguments: int) -> int:
        if name == "get_mempolicy":
            ctypes.c_int.from_address(arguments[0]).value = self.mode
        else:
            address, nbytes, mode, mask, bits, flags = arguments
            words = (ctypes.c_ulong * (bits // 64)).from_address(mask)
            nodes = [64 * word + bit for word, value in enumerate(words) for bit in range(64) if value >> bit & 1]
            self.asked.append((address, nbytes, mode, nodes, flags))
        return 0


@pytest.mark.parametrize("node", [0, 1, 63, 64, 130])
def test_what_the_kernel_is_asked_for(node: int) -> None:
    system = System(0)
    assert numa.prefer(8192, 4096, node, call=system)
    assert system.asked == [(8192, 4096, 1, [node], 0)]


def test_a_policy_that_somebody_chose_stays() -> None:
    system = System(2)  # as under `numactl --membind`
    assert not numa.prefer(8192, 4096, 1, call=system)
    assert system.asked == []
    assert "numactl" in str(numa.why_not(1, call=system))


class Properties:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x9A, 1


class OldProperties:
    name = "of a torch that does not say"


def test_host_memory_of_a_device_is_preferred_on_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [Properties]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda *arguments, **options: None)
    monkeypatch.setattr(cuda, "CudaRegistry", lambda device: None)
    root = machine(tmp_path, **{"bus/pci/devices/0000:9a:01.0/numa_node": "1"})
    monkeypatch.setattr(cuda, "node_to_prefer", lambda address: numa.node_to_prefer(address, root))
    system = System(0)
    monkeypatch.setattr(pagelock.numa, "system_call", system)
    device = CudaDevice(torch.device("cuda", 0))
    arena = device.make_host_arena(MIB, poison=False)
    assert [(nbytes, nodes) for _, nbytes, _, nodes, _ in system.asked] == [(MIB, [1])]
    assert arena._slab.node == 1  # type: ignore[attr-defined]
    arena.close()
    found[0] = OldProperties
    assert bus_address(0) is None
    arena = device.make_host_arena(MIB, poison=False)
    machine(tmp_path, "0")  # one node: nothing is done
    found[0] = Properties
    device.make_host_arena(MIB, poison=False).close()
    assert len(system.asked) == 1
    arena.close()
    device.close()
