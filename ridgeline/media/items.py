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


class Picture(NamedTuple):
    """pixels_HWC: uint8.

    digest: 32 bytes, SHA-256 over kind, shape and pixels.
    """

    pixels_HWC: np.ndarray
    digest: bytes


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


Item = Picture | Clip | Sound


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
