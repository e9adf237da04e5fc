"""Writing of safetensors files tensor by tensor, so that memory holds one tensor at a time.

The format (https://github.com/huggingface/safetensors#format): the header's length, the header in JSON, the bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written. `make` returns it in this shape and dtype."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def parse_size(text: str, what: str = "shard size") -> int:
    """Return the bytes of "5GB", "500MB", "1GiB" or a plain number. Raise InvalidConfig, which says `what` it is of."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
    if size < 1:
        raise InvalidConfig(f"{what} {text!r} is no size; write 5GB, 500MB or 1GiB.")
    return size


def split(tensors: Sequence[Planned], shard_size: int) -> list[list[Planned]]:
    """Return the tensors in shards, in order and each as full as possible. A tensor larger than a shard has one of its
    own."""
    shards: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = shard_size
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def write_shards(folder: Path, shards: Sequence[Sequence[Planned]], done: Callable[[Planned], None]) -> None:
    """Write model.safetensors, or numbered files and their index. `done` is called after each tensor."""
    if len(shards) == 1:
        _write(folder / "model.safetensors", shards[0], done)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / name, shard, done)
        places |= {tensor.name: name for tensor in shard}
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write(path: Path, tensors: Sequence[Planned], done: Callable[[Planned], None]) -> None:
    """Write one file, wider types first as the library does, so that every tensor begins at a multiple of its type's
    size."""
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        span = [at, at + tensor.num_bytes]
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at = span[1]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in ordered:
            values = tensor.make()
            assert values.dtype == tensor.dtype
            assert list(values.shape) == list(tensor.shape)
            file.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
            done(tensor)
        file.flush()
        os.fsync(file.fileno())
