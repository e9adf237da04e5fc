"""The function of a sealed process that decodes (`core.confined`, `media.pool`).

It gets the file in shared memory, and asks for memory of the result once it knows the size: the asking process counts
what all results take, and may say that there is none now.
"""

from __future__ import annotations

import json
import math
import wave
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from ridgeline.kernels.pictures.views import FILTERS
from ridgeline.media import audio, images, video
from ridgeline.media.bounds import BadMedia, MediaBounds, MemoryTaken

MODES = {"jpeg": "CMYK", "png": "RGBA", "webp": "RGBA", "gif": "P", "bmp": "RGB", "tiff": "RGB"}


def decoder() -> Callable[[Any, Any], Any]:
    """Return the function: from what is asked for to the result's shape, or {"error": a sentence}."""
    _warm()
    return _answer


def _answer(asked: Any, caller: Any) -> Any:
    bounds = bounds_of(asked["bounds"])
    try:
        return KINDS[asked["kind"]](asked, caller, bounds)
    except BadMedia as error:
        return {"error": str(error)}
    except MemoryTaken as error:
        return {"full": error.size}


@lru_cache(1)
def bounds_of(told: str) -> MediaBounds:
    """Return bounds from their JSON."""
    given = json.loads(told)
    return MediaBounds(**{each.name: _tuple(given[each.name]) for each in fields(MediaBounds)})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _room(caller: Any, dtype: str = "uint8") -> Callable[[Sequence[int]], np.ndarray]:
    def room(shape: Sequence[int]) -> np.ndarray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        answer, memory = caller.ask({"room": size})
        if memory is None or not answer:
            raise MemoryTaken(size)
        return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)

    return room


def _picture(asked: Any, caller: Any, bounds: MediaBounds) -> Any:
    pixels = images.decode(caller.data, bounds, _room(caller), asked["background"])
    return {"shape": pixels.shape}


def _resize(asked: Any, caller: Any, bounds: MediaBounds) -> Any:
    height, width = asked["to"]
    room = _room(caller)((height, width, 3))
    seen = Image.frombuffer("RGB", asked["size"][::-1], caller.data, "raw", "RGB", 0, 1)
    number = next(number for number, name in FILTERS.items() if name == asked["filter"])
    room[:] = np.asarray(seen.resize((width, height), Image.Resampling(number)))
    return {"shape": room.shape}


def _video(asked: Any, caller: Any, bounds: MediaBounds) -> Any:
    def choose(total: int, rate: float) -> list[int]:
        return [int(index) for index in caller.ask({"frames": total, "rate": rate})[0]]

    found = video.decode(caller.data, bounds, _room(caller), choose)
    return {"shape": found.frames_FHWC.shape, "times": found.times_F.tolist(), "fps": found.fps}


def _sound(asked: Any, caller: Any, bounds: MediaBounds) -> Any:
    samples, rate = audio.decode(caller.data, bounds, asked["rate"])
    room = _room(caller, "float32")(samples.shape)
    room[:] = samples
    return {"shape": samples.shape, "rate": rate}


KINDS: dict[str, Callable[[Any, Any, MediaBounds], Any]] = {
    **{"picture": _picture, "video": _video, "sound": _sound},
    "resize": _resize,
}


def _warm() -> None:
    """Decode a little of every form, because what libraries load late cannot be loaded in a sealed process."""
    for form, mode in MODES.items():
        file = BytesIO()
        Image.new(mode, (8, 8)).save(file, form)
        images.decode(file.getvalue(), MediaBounds(), lambda shape: np.empty(shape, np.uint8))
    audio.decode(_wav(), MediaBounds(), 16_000)


def _wav() -> bytes:
    file = BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(6400))
    return file.getvalue()
