"""The first layers of an encoder that does not read tokens, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.base.sounds import FRAME, HOP, RATE

TAPS, STRIDE = 3, 2  # of both convolutions, and of the second
HALVINGS = 3  # convolutions of a `GridStem`


def halved(frames: int) -> int:
    """Return the positions that so many frames become by the convolutions of a `GridStem`."""
    for _ in range(HALVINGS):
        frames = -(-frames // STRIDE)
    return frames


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

    def positions_of(self, frames: int) -> int:
        """Return the positions that so many frames become."""
        return -(-frames // STRIDE)

    def scratch(self, width: int) -> int:
        """Return the numbers that it holds for each position at once: spectra in float32 count twice."""
        return 2 * STRIDE * (2 * FRAME + TAPS * self.bands + width) + TAPS * width

    def parameters(self, width: int) -> tuple[int, int, int]:
        """Return the numbers of its matrices, of its table and of its biases."""
        return TAPS * width * (self.bands + width), self.positions * width, 2 * width


@dataclass(frozen=True, kw_only=True)
class GridStem:
    """Three convolutions over frames and bands, each of which halves both, and a linear map of what is left of the
    bands; positions are computed (Qwen3-Omni).

    bands, positions: as of `SoundStem`. channels: of the convolutions. together: chunks that they run at once.
    """

    bands: int
    positions: int
    channels: int
    together: int = 64

    @property
    def rows(self) -> int:
        """The bands that are left."""
        return self.positions_of(self.bands)

    def positions_of(self, frames: int) -> int:
        """Return the positions that so many frames become."""
        return halved(frames)

    def scratch(self, width: int) -> int:
        """Return the numbers that it holds for each position at once, where chunks have a second and few run together:
        spectra in float32 count twice."""
        return 2 * STRIDE**HALVINGS * 2 * FRAME + 8 * self.channels + 4 * width

    def parameters(self, width: int) -> tuple[int, int, int]:
        """Return the numbers of its matrices, of its table and of its biases."""
        convolutions = TAPS**2 * self.channels * (1 + (HALVINGS - 1) * self.channels)
        return convolutions + self.channels * self.rows * width, 0, HALVINGS * self.channels
