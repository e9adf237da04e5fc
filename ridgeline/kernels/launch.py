"""What all Triton kernels share about being launched.

Programmatic dependent launch: on Hopper and later a kernel may start while the one before it drains, so its launch, its
index arithmetic and its first weight loads cost nothing. The rules a kernel with `PDL: tl.constexpr` keeps:

    1. before touching anything an earlier kernel wrote or reads (all but weights), every program waits (`gdc_wait`);
    2. it always waits, even if it needs nothing: whoever follows trusts that everything before it is complete;
    3. it lets its successor start (`gdc_launch_dependents`) as early as that does not cost it its own resources;
    4. a step has one strict kernel, the embedding, behind all that derives the step's inputs and attention schedules:
       there every program waits before it lets the successor start. Whatever starts later in the step may then read
       these, block tables, and keys and values of steps before without waiting, as `decode_attention` does.
       (A kernel without dependent launch, such as any of torch's, is strict by nature.)
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# What kernels are chosen by. Whoever compiles them without the GPU says what these would (see aot.py).


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) of a Hopper GPU; (0, 0) of what is not NVIDIA's."""
    if device.type != "cuda" or INTERPRETED or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU; 4 for the interpreter, to exercise the same code."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 65_536
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)


@cache
def settle_cache_keys() -> None:
    """Let processes agree on the names under which Triton keeps what it compiled.

    Triton 3.6 hashes a kernel together with the constants of those functions it calls that happen to have been hashed
    before, so the name depends on what the process ran first. Hashing them before the kernel, as later versions do,
    ends that.
    """
    from triton.runtime.jit import DependenciesFinder

    update = getattr(DependenciesFinder, "_update_hash", None)
    if update is None:
        return  # not a version we know: the worst is that a kernel is compiled again

    def callee_first(self: Any, function: Any) -> None:
        _ = function.cache_key
        update(self, function)

    DependenciesFinder._update_hash = callee_first


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments for a kernel that has a `PDL: tl.constexpr` parameter."""
    if compute_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Where kernels for tensors on `device` must be launched: Triton asks for the thread's current device only."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
