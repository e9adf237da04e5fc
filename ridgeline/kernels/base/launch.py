"""Facts about the device, launch options, and the rules of dependent launch, for all Triton kernels.

Programmatic dependent launch: on Hopper and later a kernel may start while the kernel before it ends. Its launch, its
index arithmetic and its first weight loads then cost nothing. A kernel with `PDL: tl.constexpr` keeps these rules:

    1. A program waits (`gdc_wait`) before it touches anything that an earlier kernel writes or reads (all but weights).
    2. It always waits, even if it needs nothing: the kernels behind it rely on everything before it being complete.
    3. It lets its successor start (`gdc_launch_dependents`) as early as that does not take resources it needs itself.
    4. A step has one strict kernel: the embedding, which runs behind everything that derives the step's inputs and
       attention schedules. In it every program waits before it lets the successor start. Kernels that start later in
       the step may then read these inputs, block tables, and keys and values of earlier steps without waiting, as
       `decode_attention` does. (A kernel without dependent launch, such as any of torch's, is strict by nature.)
    5. Work on other parts of the same op's inputs may go ahead of the kernel in front, if that one was strict, and if
       at least one program waits all the same, so that the launch does not end before it (`gated_delta`).
    6. A weight that a step writes, such as one in codes that is dequantized, is multiplied by torch's kernels: by rule
       1 ours would read it too early.
    7. A kernel may tell its successor by a number in memory that its own wait is over. So the successor may read what
       was written before both, and waits later for what the kernel in front of it makes. It asks so often at most, and
       waits then. Until its wait both run, so they share no memory and no counters (`gemm/plain/hopper_beside.py`).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# Kernels are chosen by these functions. aot.py replaces them, to compile for a GPU that is not there.


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return (9, 0) for a Hopper GPU, and (0, 0) for a device that is not NVIDIA's."""
    if device.type != "cuda" or INTERPRETED or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the streaming multiprocessors (compute units) of a GPU; 4 for the interpreter, so that it runs the same
    code."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 65_536
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)


@cache
def settle_cache_keys() -> None:
    """Make the names under which Triton keeps compiled kernels the same in all processes.

    Triton 3.6 hashes a kernel together with the constants of those functions it calls that happen to have been hashed
    before, so the name depends on what the process ran first. Later versions hash these functions before the kernel;
    this does the same.
    """
    from triton.runtime.jit import DependenciesFinder

    update = getattr(DependenciesFinder, "_update_hash", None)
    if update is None:
        return  # another version of Triton; at the worst a kernel is compiled again

    def callee_first(self: Any, function: Any) -> None:
        _ = function.cache_key
        update(self, function)

    DependenciesFinder._update_hash = callee_first


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments for launching a kernel that has a `PDL: tl.constexpr` parameter."""
    if compute_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels for tensors on `device` can be launched: Triton launches on the thread's
    current device only."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
