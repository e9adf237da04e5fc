"""A caller's samples as a window of sound that a model reads."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.octets import SharedOctets
from ridgeline.core.plan.sounds import Waveform
from ridgeline.kernels.base.sounds import RATE
from ridgeline.media.rates import resampled
from ridgeline.text.arguments import short

LOWEST_RATE, HIGHEST_RATE = 1000, 384_000
MOST_CHANNELS = 8


def waveform(samples_N: np.ndarray) -> Waveform:
    """Return float32 samples in the models' rate as a window, named by its content."""
    samples_N = np.ascontiguousarray(samples_N, "<f4")
    hashed = sha256(b"sound ")
    hashed.update(samples_N.data)
    return Waveform(samples=SharedOctets(samples_N), key=hashed.digest())


def samples_of(audio: Any) -> np.ndarray:
    """Return a caller's sound in the models' rate, float32 in one channel. Raise InvalidRequest.

    audio: (samples, rate), or samples in that rate.
    """
    if isinstance(audio, list) and len(audio) == 1:
        audio = audio[0]
    given, rate = audio if isinstance(audio, tuple) and len(audio) == 2 else (audio, RATE)
    if not isinstance(rate, (int, float, np.number)) or not LOWEST_RATE <= rate <= HIGHEST_RATE or rate != int(rate):
        raise InvalidRequest(
            f"audio has a rate from {LOWEST_RATE} to {HIGHEST_RATE} samples a second, got {short(rate)}.", param="audio"
        )
    try:
        samples = np.asarray(given)
    except (TypeError, ValueError):
        samples = np.empty(0, object)
    if samples.dtype.kind == "i":
        samples = samples / float(1 << (8 * samples.dtype.itemsize - 1))
    if samples.ndim == 2:  # channels by samples, or the other way round
        samples = samples.mean(0 if samples.shape[0] <= MOST_CHANNELS else 1)
    if samples.ndim != 1 or samples.dtype.kind != "f" or not len(samples):
        raise InvalidRequest(
            "audio is (samples, rate) with an array of numbers in -1..1, and one of whole numbers in their type's "
            f"range, got {type(given).__name__}.",
            param="audio",
        )
    if not np.isfinite(samples).all():
        raise InvalidRequest("audio has samples that are not finite numbers.", param="audio")
    return resampled(samples.astype(np.float32), int(rate), RATE)
