"""WAV files without a decoder of others."""

from __future__ import annotations

import io
import wave

import numpy as np

from ridgeline.core.errors import InvalidRequest

MOST_CHANNELS = 8


def read_wav(data: bytes, most_seconds: float) -> tuple[np.ndarray, int]:
    """Return float32 samples in -1..1 in one channel, and their rate. Raise InvalidRequest for a file that is none, or
    is longer."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            rate, width, channels, count = (
                file.getframerate(), file.getsampwidth(), file.getnchannels(), file.getnframes()
            )  # fmt: skip
            if rate <= 0 or channels > MOST_CHANNELS:
                raise wave.Error(f"{channels} channels at {rate} Hz")
            if count > most_seconds * rate:
                raise InvalidRequest(
                    f"the sound has {count / rate:.0f} s, and at most {most_seconds:g} s are read; send less.",
                    param="file",
                )
            held = file.readframes(count)
    except (wave.Error, EOFError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the file is no WAV file ({error}); send another.", param="file") from error
    held = held[: len(held) // (width * channels) * width * channels]
    return numbers(held, width).reshape(-1, channels).mean(1, dtype=np.float32), rate


def numbers(held: bytes, width: int) -> np.ndarray:
    """Return whole numbers of so many bytes, little-endian, as float32 in -1..1. Those of one byte have no sign."""
    if width == 1:
        return (np.frombuffer(held, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        padded = np.zeros((len(held) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(held, np.uint8).reshape(-1, 3)
        return padded.view("<i4")[:, 0].astype(np.float32) / (1 << 31)
    return np.frombuffer(held, f"<i{width}").astype(np.float32) / (1 << (8 * width - 1))
