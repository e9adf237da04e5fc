"""The contents of the device's memory, as JSON of our own, because torch's snapshot pickles are neither safe nor
readable."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.onednn import address, num_bytes
from ridgeline_bench.profile.allocations import fragments, maker

HISTORY = 100_000  # allocations remembered, with the Python lines that made them


@contextmanager
def remembering(device: torch.device) -> Iterator[None]:
    """Have the CUDA allocator record the Python lines that allocate, for `snapshot`."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=HISTORY)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def snapshot(device: torch.device) -> dict[str, Any]:
    """Return the tensors alive by shape and dtype; on CUDA also the allocator's totals, how its segments are used, and
    its blocks with the code that made them.

    All sizes are in bytes.
    """
    record: dict[str, Any] = {"device": str(device), "tensors": tensors(device)}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        record |= {key: stats[f"{key}_bytes.all.{when}"] for key in ("allocated", "reserved") for when in ("peak",)}
        segments = torch.cuda.memory._snapshot()["segments"]
        record["fragments"] = fragments(segments)._asdict()
        record["blocks"] = [
            {"size": block["size"], "state": block["state"], "made_by": maker(block.get("frames", []))}
            for segment in segments
            for block in segment["blocks"]
        ]
    return record


def tensors(device: torch.device) -> list[dict[str, Any]]:
    """Return the device's tensors that own memory, largest first, with equal shapes and dtypes together."""
    seen: set[int] = set()
    groups: Counter[tuple[str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for thing in gc.get_objects():
        if type(thing) not in (Tensor, torch.nn.Parameter) or thing.device.type != device.type:
            continue
        if address(thing) not in seen:
            seen.add(address(thing))
            key = str(thing.dtype).removeprefix("torch."), tuple(thing.shape)
            groups[key] += 1
            sizes[key] += num_bytes(thing)
    return [
        {"dtype": dtype, "shape": list(shape), "count": groups[dtype, shape], "bytes": size}
        for (dtype, shape), size in sizes.most_common()
    ]


def write_snapshot(path: Path, device: torch.device) -> dict[str, Any]:
    """Write `snapshot` as JSON and return it."""
    record = snapshot(device)
    path.write_text(json.dumps(record, indent=1))
    return record
