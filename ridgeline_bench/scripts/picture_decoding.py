"""What decoding JPEG files takes, beside libjpeg-turbo alone, in milliseconds of processor time.

    python -m ridgeline_bench.scripts.picture_decoding [--sides 640x480 1024x1024 4000x3000] [--runs 25]
        [--output FILE.jsonl]

The pictures are drawn: patches of colors, blurred, with noise, at quality 85 and half the colors.

    turbo     libjpeg-turbo into memory that was written before
    fresh     the same into new memory that processes share, whose pages the kernel makes meanwhile
    child     the process that decodes, with its part of the messages
    caller    the process that asks: it shares the file, hashes it, and makes the memory
    pillow    what the child's function takes without libjpeg-turbo, by Pillow, into such memory

Each is the least of all runs, which take turns. The checks come first: all pixels are Pillow's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ridgeline.core.confined import processor_time
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.shared import SharedMemory
from ridgeline.media import images
from ridgeline.media.bounds import MediaBounds
from ridgeline.media.pool import VERSIONS, Decoders
from ridgeline_bench.scripts.asked import asked, keep, told

QUALITY = 85


def drawn(width: int, height: int) -> bytes:
    """Return a JPEG file of about the bytes of a photograph."""
    random = np.random.default_rng(0)
    small = random.integers(0, 256, (max(height // 16, 1), max(width // 16, 1), 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels = pixels + random.integers(-12, 12, (height, width, 1), dtype=np.int16)
    file = BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def shared(shape: Sequence[int]) -> np.ndarray:
    """Return new memory that processes share: uint8, of this shape."""
    return np.frombuffer(SharedMemory.made(int(np.prod(shape))), np.uint8).reshape(shape)


def ways(data: bytes, width: int, height: int, decoders: Decoders) -> dict[str, Callable[[], np.ndarray]]:
    """Return what is measured. Each returns the pixels."""
    import simplejpeg  # an extra's, which `main` has looked for

    shape = height, width, 3
    warm = np.ones(shape, np.uint8)

    def pillow() -> np.ndarray:
        before, images.TURBO = images.TURBO, False
        try:
            return images.decode(data, MediaBounds(), shared)
        finally:
            images.TURBO = before

    def turbo(memory: np.ndarray) -> np.ndarray:
        found: np.ndarray = simplejpeg.decode_jpeg(data, "RGB", buffer=memory)
        return found

    return {
        "turbo": lambda: turbo(warm),
        "fresh": lambda: turbo(shared(shape)),
        "pool": lambda: decoders.picture(data).pixels_HWC,
        "pillow": pillow,
    }


def measured(width: int, height: int, runs: int) -> dict[str, Any]:
    """Return a line of results. Raise InvalidConfig for pixels that are not Pillow's."""
    data, decoders, least = drawn(width, height), Decoders(processes=1), dict[str, tuple[float, float]]()
    found = ways(data, width, height, decoders)
    expected = np.asarray(Image.open(BytesIO(data)))
    if wrong := [name for name, way in found.items() if not np.array_equal(way(), expected)]:
        raise InvalidConfig(f"the pixels of {' and '.join(wrong)} are not Pillow's.")
    [child] = decoders.children
    for _ in range(runs):
        for name, way in found.items():
            before = time.process_time(), processor_time(child)
            way()
            took = time.process_time() - before[0], processor_time(child) - before[1]
            least[name] = min(least.get(name, took), took, key=sum)
    own = {name: round(1e3 * sum(took), 3) for name, took in least.items() if name != "pool"}
    caller, inside = (round(1e3 * each, 3) for each in least["pool"])
    return {
        "what": "picture decoding",
        "width": width,
        "height": height,
        "bytes": len(data),
        **{f"{name}_ms": took for name, took in own.items()},
        "child_ms": inside,
        "caller_ms": caller,
        "child_of_turbo": round(inside / own["turbo"], 3),
        "child_of_fresh": round(inside / own["fresh"], 3),
        "versions": VERSIONS,
    }


def main() -> None:
    a = asked(__doc__, sides=["640x480", "1024x1024", "4000x3000"], runs=25, output="")
    with told():
        if not images.TURBO:
            raise InvalidConfig("this compares with libjpeg-turbo, and simplejpeg is not installed.")
        for side in a.sides:
            width, height = map(int, side.split("x"))
            line = measured(width, height, a.runs)
            print(" ".join(f"{name}={value}" for name, value in line.items()), flush=True)
            keep(Path(a.output) if a.output else None, line)


if __name__ == "__main__":
    main()
