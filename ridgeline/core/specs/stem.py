"""The first layers of an encoder that does not read tokens, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.core.specs.norm import NormSpec, parameters_of
from ridgeline.core.specs.spectra import SpectraSpec
from ridgeline.kernels.base.sounds import FRAME, HOP, RATE

TAPS, STRIDE = 3, 2  # of both convolutions, and of the second
HALVINGS = 3  # convolutions of Qwen3-Omni's `GridStem`


def halved(frames: int, times: int = HALVINGS) -> int:
    """Return the positions that so many frames become by so many convolutions of a `GridStem`."""
    for _ in range(times):
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

    def frames_of(self, samples: int) -> int:
        """Return the frames of a sound of so many samples."""
        return -(-samples // HOP)

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
    """Convolutions over frames and bands, each of which halves both, and a linear map of what is left of the bands
    (Qwen3-Omni, conformers).

    bands, positions: as of `SoundStem`. channels: of each convolution.
    spectra: what they read; None: the spectra of Whisper.
    activation: behind each convolution. norm: before that, of a place's channels; None: there is none.
    cumulative: in place of that, what is before the activation is normalized by the mean and the deviation of all
        frames so far, with learned weights of the channels; this number is added to the variance. 0: it is not. Then
        convolutions read two frames behind their own, and none before it.
    bias, out_bias: the convolutions, and the map, have biases.
    separable: all but the first convolve each channel by itself, and a map of a place's channels follows.
    standardized: a learned number is taken from each band, and another multiplies it.
    frames_first: the convolutions' kernels are stored by frames, then by bands.
    channels_last: the map's inputs are the channels of one band after the other; otherwise the bands of one channel.
    together: chunks, or positions of a sound, that they make at once.
    """

    bands: int
    positions: int
    channels: tuple[int, ...]
    spectra: SpectraSpec | None = None
    activation: Literal["gelu", "relu"] = "gelu"
    norm: NormSpec | None = None
    cumulative: float = 0.0
    bias: bool = True
    out_bias: bool = False
    separable: bool = False
    standardized: bool = False
    frames_first: bool = False
    channels_last: bool = False
    together: int = 64

    @property
    def rows(self) -> int:
        """The bands that are left."""
        return self.positions_of(self.bands)

    @property
    def shrinks(self) -> int:
        """The frames of a position."""
        return STRIDE ** len(self.channels)

    def frames_of(self, samples: int) -> int:
        """Return the frames of a sound of so many samples."""
        return -(-samples // HOP) if self.spectra is None else self.spectra.frames_of(samples)

    def positions_of(self, frames: int) -> int:
        """Return the positions that so many frames become."""
        return halved(frames, len(self.channels))

    def scratch(self, width: int) -> int:
        """Return the numbers that it holds for each position at once, where chunks have a second and few run together:
        spectra in float32 count twice."""
        return 2 * STRIDE**HALVINGS * 2 * FRAME + 8 * max(self.channels) + 4 * width

    def parameters(self, width: int) -> tuple[int, int, int]:
        """Return the numbers of its matrices, of its table, and of its biases and norms."""
        first, *others = self.channels
        matrices, vectors = TAPS**2 * first, first * self.bias
        for inputs, outputs in zip(self.channels, others, strict=False):
            matrices += TAPS**2 * inputs * (1 if self.separable else outputs) + inputs * outputs * self.separable
            vectors += self.bias * (outputs + inputs * self.separable)
        vectors += width * self.out_bias + 2 * self.bands * self.standardized
        vectors += sum(self.channels) if self.cumulative else 0
        norms = 0 if self.norm is None else sum(parameters_of(self.norm, each) for each in self.channels)
        return matrices + self.channels[-1] * self.rows * width, 0, vectors + norms
