"""A process keeps to the cores near its device, where the machine says which ones these are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ridgeline.core.numa import bind, cores_of, node_of, nodes
from ridgeline.worker.machine import pci_address

GPU = "0000:3b:00.0"
CORES = sorted(os.sched_getaffinity(0))


def machine(folder: Path, cores: dict[int, str], node: str) -> Path:
    """Write what the kernel says of a machine with such nodes, and a device at one of them."""
    for number, text in cores.items():
        (folder / f"devices/system/node/node{number}").mkdir(parents=True)
        (folder / f"devices/system/node/node{number}/cpulist").write_text(text + "\n")
    (folder / "bus/pci/devices" / GPU).mkdir(parents=True)
    (folder / "bus/pci/devices" / GPU / "numa_node").write_text(node + "\n")
    return folder


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5\n", {0, 1, 4, 5})]
)
def test_lists_of_cores_are_read_as_the_kernel_writes_them(text: str, cores: set[int]) -> None:
    assert cores_of(text) == cores


def test_nodes_and_the_device_s_node_are_found(tmp_path: Path) -> None:
    sys_folder = machine(tmp_path, {0: "0-3", 1: "4-7", 2: ""}, "1")
    assert nodes(sys_folder) == {0: frozenset(range(4)), 1: frozenset(range(4, 8))}  # the third has memory alone
    assert node_of("0000:3B:00.0", sys_folder) == 1
    assert node_of("0000:99:00.0", sys_folder) is None


@pytest.mark.parametrize(
    ("cores", "node"),
    [({0: "0-9999"}, "0"), ({0: "0-9999"}, "-1"), ({0: "0-9999", 1: "90000"}, "-1"), ({0: "0-9999", 1: "90000"}, "1")],
    ids=["one node", "one node that is not named", "no node is named", "none of its cores may be used"],
)
def test_nothing_is_bound_where_it_would_mean_nothing(tmp_path: Path, cores: dict[int, str], node: str) -> None:
    assert bind(GPU, machine(tmp_path, cores, node)) is None
    assert sorted(os.sched_getaffinity(0)) == CORES


BIND = """
import os, sys, threading
from pathlib import Path
from ridgeline.core.numa import bind
told = threading.Event()
seen = []
thread = threading.Thread(target=lambda: (told.wait(), seen.append(sorted(os.sched_getaffinity(0)))))
thread.start()
node = bind(sys.argv[1], Path(sys.argv[2]))
told.set(); thread.join()
policy = Path("/proc/self/numa_maps")
print(node, sorted(os.sched_getaffinity(0)), seen[0], "prefer" in policy.read_text() if policy.exists() else "unknown")
"""


def test_a_process_and_its_threads_keep_to_the_node(tmp_path: Path) -> None:
    """In a process of its own, since it stays bound. The real kernel takes the affinity and the memory's node."""
    folder = machine(tmp_path, {0: str(CORES[-1]), 1: "99999"}, "0")
    said = subprocess.run(
        [sys.executable, "-c", BIND, GPU, str(folder)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split(maxsplit=1)
    assert said[0] == "0"
    assert said[1].startswith(f"[{CORES[-1]}] [{CORES[-1]}]")
    assert said[1].split()[-1] in ("True", "unknown")


@pytest.mark.gpu
def test_a_gpu_is_on_the_bus_of_this_machine() -> None:
    address = pci_address(torch.device("cuda", 0))
    assert (Path("/sys/bus/pci/devices") / address).exists() or not Path("/sys/bus/pci/devices").exists(), address
