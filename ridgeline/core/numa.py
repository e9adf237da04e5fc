"""The memory that is near to a device: which cores share a NUMA node with it, and how a process keeps to them.

A machine with two sockets has two nodes. A GPU's PCI lanes end at one of them, so what the host writes for the GPU
takes a longer way if its memory, or the core that writes, belongs to the other node. The kernel says which node that is
in /sys; a machine with one node, and most virtual machines, say that there is none.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Set
from pathlib import Path

SYS = Path("/sys")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the number of the system call
PREFERRED = 1  # memory comes from this node while it has some, and else from another
MOST_NODES = 1024

logger = logging.getLogger(__name__)


def cores_of(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it, such as "0-3,8"."""
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(core for first, *last in parts for core in range(int(first), int((last or [first])[0]) + 1))


def nodes(sys: Path = SYS) -> dict[int, frozenset[int]]:
    """Return the cores of each node that has some; nothing where the system does not say."""
    folders = sys.glob("devices/system/node/node[0-9]*")
    lists = {int(folder.name[4:]): folder / "cpulist" for folder in folders}
    found = {number: cores_of(path.read_text()) for number, path in sorted(lists.items()) if path.exists()}
    return {number: cores for number, cores in found.items() if cores}


def node_of(address: str, sys: Path = SYS) -> int | None:
    """Return the node at which a PCI device's lanes end, by an address such as "0000:3b:00.0". None: it is unknown."""
    try:
        number = int((sys / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def bind(address: str, sys: Path = SYS) -> int | None:
    """Keep this process to the cores of a device's node, and take memory from there first. Return the node, or None
    where nothing was bound: the node is unknown, is the only one, or has no core that this process may use.
    """
    known, node = nodes(sys), node_of(address, sys)
    cores = known.get(-1 if node is None else node, frozenset()) & os.sched_getaffinity(0)
    if node is None or len(known) < 2 or not cores:
        logger.info("nothing is bound for device %s: node %s of %d NUMA nodes", address, node, len(known))
        return None
    keep_to(node, cores)
    logger.info("bound to the %d cores and the memory of NUMA node %d, where device %s is", len(cores), node, address)
    return node


def keep_to(node: int, cores: Set[int]) -> None:
    """Run this process on these cores, and take memory from a node first.

    All threads move, and those that begin later stay with them. Memory that was taken before stays where it is.
    """
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except OSError:
            continue  # the thread has ended
    _prefer(node)


def _prefer(node: int) -> None:
    """Take the memory of this thread, and of those that it begins, from a node. A kernel that refuses keeps its way."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    mask = (ctypes.c_ulong * (MOST_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    if ctypes.CDLL(None, use_errno=True).syscall(number, PREFERRED, mask, MOST_NODES) != 0:
        logger.warning("memory of NUMA node %d cannot be preferred: %s", node, os.strerror(ctypes.get_errno()))
