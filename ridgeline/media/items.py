"""Pictures, clips and sounds: a client's bytes, decoded.

Legend:
    F  frames
    H  rows of pixels
    W  pixels in a row
    C  red, green, blue
    N  samples
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

import numpy as np

from ridgeline.core.plan.embeds import Embeds


class Picture(NamedTuple):
    """pixels_HWC: uint8.

    digest: 32 bytes, SHA-256 over kind, shape and pixels.
    ready: the whole picture in the size that a model sees, uint8 [H, W, C] too; None: a tower's device resizes it.
    """

    pixels_HWC: np.ndarray
    digest: bytes
    ready: np.ndarray | None = None


class Clip(NamedTuple):
    """The frames of a video that a model sees. frames_FHWC: uint8.

    times_F: seconds from the beginning, float64.
    fps: frames a second of the file, before frames were chosen.
    total: the frames of the file; 0: as many as there are here.
    """

    frames_FHWC: np.ndarray
    times_F: np.ndarray
    fps: float
    digest: bytes
    total: int = 0

    @property
    def rate(self) -> float:
        """Frames a second of those that are seen."""
        return self.fps * len(self.frames_FHWC) / (self.total or len(self.frames_FHWC))


class Sound(NamedTuple):
    """samples_N: float32 in -1..1, one channel. rate: samples a second."""

    samples_N: np.ndarray
    rate: int
    digest: bytes


class SeenVectors(NamedTuple):
    """The vectors of a picture, which a tower has made elsewhere.

    height, width: of the picture in pixels; 0: every picture of the model has as many vectors.
    grid: rows and columns of its patches, where these are known in place of its size.
    """

    embeds: Embeds
    digest: bytes
    height: int = 0
    width: int = 0
    grid: tuple[int, int] | None = None


class HeardVectors(NamedTuple):
    """The vectors of a sound, which a listener has made elsewhere."""

    embeds: Embeds
    digest: bytes


Item = Picture | Clip | Sound | SeenVectors | HeardVectors


def picture(pixels_HWC: np.ndarray) -> Picture:
    return Picture(pixels_HWC, _digest("picture", pixels_HWC))


def clip(frames_FHWC: np.ndarray, times_F: np.ndarray, fps: float, total: int = 0) -> Clip:
    return Clip(frames_FHWC, times_F, fps, _digest(f"clip {fps!r} {total}", frames_FHWC, times_F), total)


def sound(samples_N: np.ndarray, rate: int) -> Sound:
    return Sound(samples_N, rate, _digest(f"sound {rate}", samples_N))


def _digest(kind: str, *arrays: np.ndarray) -> bytes:
    """Return a hash over all that tells two items apart: kinds, shapes and types, besides the numbers."""
    found = sha256(kind.encode())
    for each in arrays:
        found.update(f"{each.dtype.str} {each.shape} ".encode())
        found.update(np.ascontiguousarray(each).data)
    return found.digest()
