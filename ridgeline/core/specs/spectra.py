"""The spectra that encoders of sounds read, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.kernels.base.sounds import HOP, RATE


@dataclass(frozen=True, kw_only=True)
class SpectraSpec:
    """Logarithms of what bands of the mel scale hold of each frame's spectrum. Frames begin every `HOP` samples.

    bands: of the mel scale, between `lowest` and `highest` hertz.
    frame: samples of a frame. transformed: samples of it with the zeros behind it.
    before: zeros before a sound.
    spare: samples that must follow a frame, so that it counts.
    window: by which frames are weighted. "hann" begins anew behind its last sample, "hamming" ends as it begins.
    preemphasis: the share of the sample before that is taken from each; of a frame's first one its own share is.
    scale: of the samples.
    power: of the absolute values of the spectrum: 1 or 2.
    in_mel: the bands' triangles are straight in mel, not in hertz.
    floor: of what bands hold; it is added, or with `cut` the least that counts.
    filled: sounds are filled up with zeros to a multiple of so many samples.
    """

    bands: int
    lowest: float
    highest: float
    frame: int
    transformed: int
    before: int = 0
    spare: int = 0
    window: Literal["hann", "hamming"] = "hann"
    preemphasis: float = 0.0
    scale: float = 1.0
    power: int = 1
    in_mel: bool = False
    floor: float = 1e-3
    cut: bool = False
    filled: int = 1

    def with_bands(self, bands: int) -> SpectraSpec:
        """Return the same spectra in so many bands."""
        return replace(self, bands=bands)

    def frames_of(self, samples: int) -> int:
        """Return the frames of a sound of so many samples."""
        whole = -(-samples // self.filled) * self.filled
        return max(0, (self.before + whole - self.frame - self.spare) // HOP + 1)


GEMMA_4 = SpectraSpec(bands=128, lowest=0.0, highest=RATE / 2, frame=320, transformed=512, before=160, spare=1)
GEMMA_3N = SpectraSpec(
    bands=128,
    lowest=125.0,
    highest=7600.0,
    frame=512,
    transformed=1024,
    spare=1,
    preemphasis=0.97,
    floor=1e-5,
    cut=True,
    filled=128,
)
PHI_4 = SpectraSpec(
    bands=80,
    lowest=0.0,
    highest=7690.0,
    frame=400,
    transformed=512,
    window="hamming",
    preemphasis=0.97,
    scale=32768.0,
    power=2,
    in_mel=True,
    floor=1.0,
    cut=True,
)
