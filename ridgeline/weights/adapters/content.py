"""The bytes of an adapter's file. They are read once, in pieces that threads read and hash side by side, so what was
hashed is what runs. Tensors are views of them: nothing is copied."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError

MOST_HEADER = 1 << 24  # bytes: a tensor takes about 150, and a large mixture has 60,000
MOST_DIMENSIONS, MOST_SIZE = 8, 1 << 48  # of a tensor
PIECE = 1 << 20  # bytes that a thread reads and hashes at a time
MOST_THREADS = 8
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class AdapterBytes:
    """The bytes of a file, uint8, and a hash of them, which also names their number."""

    path: Path
    octets: Tensor
    digest: bytes

    @cached_property
    def header(self) -> dict[str, Any]:
        """The header of a file of safetensors: the dtype and shape of each tensor. Raise ModelLoadError if it is
        damaged."""
        path, size = self.path, len(self.octets)
        length = int.from_bytes(self.octets[:8].numpy().tobytes(), "little")
        if length > min(MOST_HEADER, size):
            raise ModelLoadError(f"{path} is damaged: it says that its header has {length:,} bytes; copy it again.")
        try:
            header = json.loads(self.octets[8 : 8 + length].numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path} is damaged: its header is no JSON; copy it again.") from error
        if not isinstance(header, dict):
            raise ModelLoadError(f"{path} is damaged: its header is no object; copy it again.")
        header.pop("__metadata__", None)
        for name, each in header.items():
            shape = each.get("shape") if isinstance(each, dict) else None
            if isinstance(shape, list) and len(shape) > MOST_DIMENSIONS:  # whose product may take minutes
                shape = None
            whole = isinstance(shape, list) and all(type(n) is int and 0 <= n <= MOST_SIZE for n in shape)
            if not whole or not isinstance(each.get("dtype"), str):
                raise ModelLoadError(f"{path} is damaged: its header says nothing clear of {name[:99]}; copy it again.")
        return header

    def tensors(self, header: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return all tensors of a header. Raise ModelLoadError unless they fill the file, one behind the other."""
        start = 8 + int.from_bytes(self.octets[:8].numpy().tobytes(), "little")
        found, end = dict[str, Tensor](), 0
        for name, each in sorted(header.items(), key=lambda item: _first(item[1])):
            dtype, offsets = _DTYPES.get(each["dtype"]), each.get("data_offsets")
            if dtype is None:
                raise ModelLoadError(
                    f"{self.path} holds {name[:99]} as {each['dtype'][:20]}; save it as plain numbers."
                )
            size = prod(each["shape"]) * dtype.itemsize
            if offsets != [end, end + size] or start + end + size > len(self.octets):
                raise ModelLoadError(f"{self.path} is damaged or incomplete ({name[:99]}); copy it again.")
            own = self.octets[start + end : start + end + size]
            if (start + end) % dtype.itemsize:
                own = own.clone()
            found[name] = own.view(dtype).view(each["shape"])
            end += size
        if start + end != len(self.octets):
            raise ModelLoadError(f"{self.path} is damaged: it has bytes behind its tensors; copy it again.")
        return found


def read_content(path: Path, most_bytes: int, *, page_locked: bool = False) -> AdapterBytes:
    """Return the bytes of an adapter's file. page_locked: in memory from which a GPU copies by itself. Raise
    ModelLoadError if they are too many, OSError if the file cannot be read."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ModelLoadError(
                f"{path} has {size:,} bytes, and an adapter of this model within max_lora_rank at most {most_bytes:,}."
            )
        octets = torch.empty(size, dtype=torch.uint8, pin_memory=page_locked)
        view = memoryview(octets.numpy().data)

        def hashed(start: int) -> bytes:
            piece = view[start : start + PIECE]
            done = 0
            while done < len(piece):
                count = os.preadv(file.fileno(), [piece[done:]], start + done)
                if not count:
                    raise ModelLoadError(f"{path} became shorter while it was read; copy it again.")
                done += count
            return blake2b(piece, digest_size=32).digest()

        starts = range(0, size, PIECE)
        if len(starts) < 4:
            pieces = [hashed(start) for start in starts]
        else:
            with ThreadPoolExecutor(min(MOST_THREADS, len(starts), len(os.sched_getaffinity(0)))) as threads:
                pieces = list(threads.map(hashed, starts))
    return AdapterBytes(path, octets, blake2b(size.to_bytes(8, "little") + b"".join(pieces), digest_size=32).digest())


def _first(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return the places at which a tensor begins and ends. Entries that do not say it come first, and are damaged."""
    match entry.get("data_offsets"):
        case [int(first), int(end)]:
            return first, end
    return -1, -1
