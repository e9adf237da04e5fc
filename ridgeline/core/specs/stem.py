"""The first layers of an encoder that does not read tokens, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.base.sounds import FRAME, HOP, RATE

TAPS, STRIDE = 3, 2  # of both convolutions, and of the second


@dataclass(frozen=True, kw_only=True)
class SoundStem:
    """Two convolutions over the bands of a window of sound, of which the second halves the frames, and a table of
    positions (Whisper).

    bands: of the mel scale.
    positions: the encoder's inputs of a window, always as many.
    """

    bands: int
    positions: int

    @property
    def samples(self) -> int:
        """The samples of a window."""
        return self.positions * STRIDE * HOP

    @property
    def seconds(self) -> float:
        return self.samples / RATE

    def scratch(self, width: int) -> int:
        """Return the numbers that it holds for each position at once: spectra in float32 count twice."""
        return 2 * STRIDE * (2 * FRAME + TAPS * self.bands + width) + TAPS * width

    def parameters(self, width: int) -> tuple[int, int, int]:
        """Return the numbers of its matrices, of its table and of its biases."""
        return TAPS * width * (self.bands + width), self.positions * width, 2 * width
