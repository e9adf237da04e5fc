"""Pictures and sounds that come as the vectors which a tower or a listener made of them elsewhere: a safetensors file.

    seen = vectors_of("image", file)

A picture's file has `image_embeds` [vectors, width], and where the model's pictures have different numbers of vectors
`image_size`, its height and width in pixels, or `image_grid_thw`, the frames, rows and columns of its patches. A
sound's has `audio_embeds`. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ridgeline.core.plan.embeds import ITEM_BYTES, MOST_BYTES, Embeds
from ridgeline.media.bounds import BadMedia
from ridgeline.media.items import HeardVectors, SeenVectors

NAMES = {"image": "image_embeds", "audio": "audio_embeds"}
SIZE, GRID = "image_size", "image_grid_thw"
MOST_HEADER = 1 << 16  # bytes of JSON before the tensors
MOST_FILE = MOST_BYTES + MOST_HEADER + 1024
MOST_SIDE = 1 << 16
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WHOLE = {"I64": "<i8", "I32": "<i4"}
PICKLED = (b"PK", b"\x80")  # the first bytes of what torch.save writes


class FileTensor(NamedTuple):
    """A tensor of a file. dtype: as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def vectors_of(kind: str, file: bytes) -> SeenVectors | HeardVectors:
    """Return the vectors of a picture or a sound. Raise BadMedia for a file that holds something else."""
    name = NAMES[kind]
    tensors, allowed = read_tensors(file, name), {name, SIZE, GRID} if kind == "image" else {name}
    if name not in tensors or not tensors.keys() <= allowed:
        found = ", ".join(sorted(tensors)) or "none"
        raise BadMedia(f"the file of vectors has the tensors {found[:100]}; give {name} [vectors, width].")
    embeds = _embeds(name, tensors[name])
    height, width = _whole(SIZE, tensors[SIZE], 2) if SIZE in tensors else (0, 0)
    grid = _whole(GRID, tensors[GRID], 3) if GRID in tensors else None
    return given(kind, embeds, (height, width), grid)


def given(
    kind: str, embeds: Embeds, size: tuple[int, ...] = (0, 0), grid: tuple[int, ...] | None = None
) -> SeenVectors | HeardVectors:
    """Return vectors as an item. size: of the picture in pixels. grid: frames, rows and columns of its patches. Raise
    BadMedia for numbers that are too large or none, and for a grid of several frames."""
    if fault := embeds.fault:
        raise BadMedia(f"{NAMES[kind]} {fault}")
    told = f"{kind} vectors {embeds.dtype} {embeds.width} {size} {grid} ".encode()
    digest = sha256(told + sha256(embeds.data).digest()).digest()
    if kind == "audio":
        return HeardVectors(embeds, digest)
    if grid is not None and grid[0] != 1:
        raise BadMedia(f"{GRID} is {list(grid)}, and a picture has 1 frame; videos do not come as vectors.")
    height, width = size
    return SeenVectors(embeds, digest, height, width, None if grid is None else (grid[1], grid[2]))


def read_tensors(file: bytes, name: str) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file. name: what it is called where it is none. Raise BadMedia."""
    if file.startswith(PICKLED) and file[8:9] != b"{":  # a header may be 128 bytes long
        raise BadMedia(
            f"{name} is what torch.save writes, which is never loaded here; send the bytes of "
            f'safetensors.torch.save({{"{name}": tensor}}).'
        )
    header = int.from_bytes(file[:8], "little")
    if len(file) < 8 or header > min(MOST_HEADER, len(file) - 8):
        raise BadMedia(f"{name} is not the bytes of a safetensors file.")
    try:
        listed = json.loads(file[8 : 8 + header])
    except (ValueError, RecursionError):
        raise BadMedia(f"{name} is not the bytes of a safetensors file.") from None
    listed = listed if isinstance(listed, Mapping) else {}
    data = memoryview(file)[8 + header :]
    found, left = dict[str, FileTensor](), len(data)
    for key, each in listed.items():
        if key != "__metadata__":
            found[key] = _stored(key, each, data, left)
            left -= len(found[key].data)
    return found


def _stored(name: str, told: Any, data: memoryview, left: int) -> FileTensor:
    """Return a tensor. left: the bytes that no tensor before it has."""
    told = told if isinstance(told, Mapping) else {}
    dtype, shape, offsets = told.get("dtype"), told.get("shape"), told.get("data_offsets")
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise BadMedia(
            f"the tensor {name[:40]!r} has no dtype, shape and place of its bytes as safetensors writes them."
        )
    size = {**{each: ITEM_BYTES[DTYPES[each]] for each in DTYPES}, "I64": 8, "I32": 4}.get(dtype)
    if size is None:
        raise BadMedia(f"the tensor {name[:40]!r} has the type {dtype[:20]!r}; send {', '.join((*DTYPES, *WHOLE))}.")
    start, end = offsets
    if not 0 <= start <= end <= len(data) or prod(shape) * size != end - start:
        raise BadMedia(
            f"the tensor {name[:40]!r} has the type {dtype} and the shape {shape!s:.60}, and {end - start!s:.20} bytes."
        )
    if end - start > left:
        raise BadMedia(f"the tensor {name[:40]!r} has bytes of a tensor before it; give each bytes of its own.")
    return FileTensor(dtype, tuple(shape), bytes(data[start:end]))


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(each) is int and each >= 0 for each in value)


def _embeds(name: str, tensor: FileTensor) -> Embeds:
    shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
    if tensor.dtype not in DTYPES or len(shape) != 2 or not prod(shape):
        raise BadMedia(f"{name} is {tensor.dtype} {list(tensor.shape)}; send [vectors, width] of {', '.join(DTYPES)}.")
    if len(tensor.data) > MOST_BYTES:
        raise BadMedia(f"{name} has {len(tensor.data)} bytes, of at most {MOST_BYTES}; send fewer vectors.")
    return Embeds(DTYPES[tensor.dtype], shape[1], tensor.data)


def _whole(name: str, tensor: FileTensor, count: int) -> tuple[int, ...]:
    """Return a small tensor of `count` whole numbers."""
    found = np.frombuffer(tensor.data, WHOLE[tensor.dtype]).tolist() if tensor.dtype in WHOLE else []
    if len(found) != count or not all(0 < each <= MOST_SIDE for each in found):
        raise BadMedia(f"{name} holds {count} whole numbers from 1 to {MOST_SIDE}, as {' or '.join(WHOLE)}.")
    return tuple(found)
