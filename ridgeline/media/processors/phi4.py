"""Phi-4-multimodal: square tiles of a picture on white, without patches that only fill up, and the whole picture.
Eight frames of a sound become a vector."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.listener import LONGEST_SOUND
from ridgeline.core.specs.spectra import PHI_4
from ridgeline.core.specs.stem import halved
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.media.layout import NEWLINE, SEPARATOR, Box, Layout, View
from ridgeline.media.processors.files import (
    BICUBIC,
    BILINEAR,
    HALF,
    ModelFiles,
    canvas,
    check_spectra,
    patching,
    refuse,
    square,
)
from ridgeline.media.processors.sounds import check_length, some

DEFAULTS: dict[str, Any] = {"resample": BILINEAR, "image_mean": HALF, "image_std": HALF}
WHITE = (255, 255, 255)
SPECTRA = {  # of sounds
    **{"sampling_rate": RATE, "hop_length": HOP, "n_fft": PHI_4.transformed, "win_length": PHI_4.frame},
    **{"preemphasis": PHI_4.preemphasis, "mel_min_frequency": PHI_4.lowest, "mel_max_frequency": PHI_4.highest},
    **{"audio_compression_rate": 8, "audio_downsample_rate": 1, "audio_feat_stride": 1},
}
LEAST = 10  # pixels of a resized picture's shorter side


class Phi4:
    """The picture is resized to whole tiles along one axis. The whole picture is made of that, in floating point."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<|image|>")
        side = int(files.image.get("patch_size", files.vision.get("patch_size", 14)))
        if (resample := files.image.get("resample", BICUBIC)) != BICUBIC:  # that of the whole picture alone
            raise InvalidConfig(f"resample is {resample!r}; the whole picture of Phi-4 is resized by {BICUBIC} here.")
        self.sound_marker = self.sound_placeholder = files.token("audio_token", "<|audio|>")
        audio = files.config.get("audio_config") or {}
        check_spectra(files.heard, {**SPECTRA, "feature_size": audio.get("input_size", 80)})
        self._halvings = int(audio.get("time_reduction", 8)).bit_length() - 1
        self.patching = patching({**files.image, "resample": BILINEAR}, DEFAULTS, side, merge=2)
        self._edge, other = square(files.image.get("size", 448))
        self._most = int(files.image.get("dynamic_hd", 36))
        if self._edge != other or self._edge % (2 * side):
            raise InvalidConfig(
                f"size is {self._edge}x{other} in the model's preprocessor files; tiles of Phi-4 are squares of an "
                f"even number of patches of {side} pixels."
            )

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        edge, side = self._edge, self.patching.rows
        rows, columns = math.ceil(height / edge), math.ceil(width / edge)
        if rows * columns > self._most:
            rows, columns = canvas(height, width, (edge, edge), 1, self._most)
        across, down = columns * edge / width, rows * edge / height
        size = (int(height * across), columns * edge) if across < down else (rows * edge, int(width * down))
        if min(size) < LEAST:
            raise refuse(height, width, f"becomes {size[1]}x{size[0]}, of which no side may be below {LEAST}")
        tall, wide = (_squares(each, edge, 2 * side) for each in size)
        views = [
            View(*size, Box(edge * row, edge * column, 2 * side * lines, 2 * side * cells), fill=WHITE)
            for row, lines in enumerate(tall)
            for column, cells in enumerate(wide)
        ]
        box = Box(0, 0, rows * edge, columns * edge)
        views.append(View(*size, box, fill=WHITE, resampled=(edge, edge)))
        order = _order(tall, wide)
        first, own = sum(tall) * sum(wide), edge // (2 * side)
        order += [SEPARATOR, *_lines([range(first + own * line, first + own * (line + 1)) for line in range(own)])]
        return self._files.layout(views, [len(order)], order=tuple(order))

    def sound(self, samples: int, pictures: int = 0) -> Layout:
        check_length(samples, LONGEST_SOUND * RATE)
        vectors = some(halved(PHI_4.frames_of(samples), self._halvings), samples)
        return self._files.layout((), [vectors], beside=pictures > 0)


def _squares(pixels: int, edge: int, side: int) -> list[int]:
    """Return the number of squares of patches of each tile along an axis that show some of so many pixels."""
    return [math.ceil(min(edge, pixels - start) / side) for start in range(0, pixels, edge)]


def _order(tall: list[int], wide: list[int]) -> list[int]:
    """Return the vectors of tiles of such heights and widths, line by line over all tiles."""
    lines = []
    first = 0
    for lines_here in tall:
        starts = [first + lines_here * sum(wide[:column]) for column in range(len(wide))]
        for line in range(lines_here):
            lines.append([start + cells * line + cell for start, cells in zip(starts, wide, strict=True)
                          for cell in range(cells)])  # fmt: skip
        first += lines_here * sum(wide)
    return _lines(lines)


def _lines(lines: list[Any]) -> list[int]:
    return [each for line in lines for each in (*line, NEWLINE)]
