"""Gemma 4: the largest size of about the picture's shape within a number of patches, which are pooled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ridgeline.core.specs.spectra import GEMMA_4
from ridgeline.core.specs.stem import halved
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.media.layout import Layout, Piece
from ridgeline.media.processors.files import BICUBIC, ModelFiles, check_spectra, patching, refuse, whole
from ridgeline.media.processors.sounds import check_length, some

DEFAULTS: dict[str, Any] = {
    "resample": BICUBIC,
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "do_normalize": False,
}
SPECTRA: dict[str, Any] = {  # of sounds
    **{"sampling_rate": RATE, "feature_size": GEMMA_4.bands, "fft_length": GEMMA_4.transformed, "fft_overdrive": False},
    **{"frame_length": GEMMA_4.frame, "hop_length": HOP, "frame_length_ms": 20.0, "hop_length_ms": 10.0},
    **{"min_frequency": GEMMA_4.lowest, "max_frequency": GEMMA_4.highest, "mel_floor": GEMMA_4.floor},
    **{"preemphasis": 0.0, "input_scale_factor": 1.0, "dither": 0.0, "per_bin_mean": None, "per_bin_stddev": None},
}
LONGEST = 30 * RATE  # samples of a sound
HALVINGS = 2  # of its frames


class Gemma4Pictures:
    """Frames of videos have the time before them, in minutes and seconds."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<|image|>")
        self._begin = files.token("boi_token", "<|image>")
        self._end = files.token("eoi_token", "<image|>")
        self.video_marker = self.video_placeholder = "<|video|>"
        self.video_rate, self.samples = files.video_rate, files.samples(True)
        self._side = int(files.image.get("patch_size", 16))
        self._pool = int(files.image.get("pooling_kernel_size", 3))
        self._tokens = int(files.image.get("max_soft_tokens", 280))
        self._video_tokens = int(files.clip.get("max_soft_tokens", 70)) if files.clip is not files.image else 70
        how = patching(files.image, DEFAULTS, self._side, channels_last=True, merge=self._pool)
        # The tower takes 0 … 1 as -1 … 1. Patches lie square by square, since the averages of squares become vectors
        mean, std = zip(*((m + s / 2, s / 2) for m, s in zip(how.mean, how.std, strict=True)), strict=True)
        self.patching = how._replace(mean=mean, std=std)

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        size, tokens = self._size(height, width, self._tokens)
        return self._files.layout([whole(*size)], [self._begin, tokens, self._end])

    def chosen(self, frames: int, fps: float) -> tuple[int, ...]:
        taken = min(int(self._files.clip.get("num_frames", 32)), frames)
        return tuple(int(each * frames / taken) for each in range(taken))

    def video(self, times: Sequence[float], height: int, width: int, rate: float) -> Layout:
        size, tokens = self._size(height, width, self._video_tokens)
        pieces: list[Piece] = []
        for number, seconds in enumerate(times):
            time = f"{int(seconds // 60):02d}:{int(seconds % 60):02d} {self._begin}"
            pieces += [(" " if number else "") + time, tokens, self._end]
        return self._files.layout([whole(*size, frames=(each,)) for each in range(len(times))], pieces)

    def _size(self, height: int, width: int, most: int) -> tuple[tuple[int, int], int]:
        """Return the size of a picture of at most so many tokens, and its tokens."""
        unit = self._pool * self._side
        scale = math.sqrt(most * unit * unit / (height * width))
        rows, columns = math.floor(scale * height / unit), math.floor(scale * width / unit)
        if rows == columns == 0:
            raise refuse(height, width, "leaves no patch")
        if rows == 0:
            rows, columns = 1, min(width // height, most)
        elif columns == 0:
            rows, columns = min(height // width, most), 1
        return (rows * unit, columns * unit), rows * columns


class Gemma4Sounds(Gemma4Pictures):
    """The processor of a model that hears too. A token stands before a sound's vectors and one behind them."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        check_spectra(files.heard, SPECTRA)
        self.sound_marker = self.sound_placeholder = files.token("audio_token", "<|audio|>")
        self._sounds_begin = files.token("boa_token", "<|audio>")
        self._sounds_end = files.token("eoa_token", "<audio|>")

    def sound(self, samples: int, pictures: int = 0) -> Layout:
        check_length(samples, LONGEST)
        vectors = some(halved(GEMMA_4.frames_of(samples), HALVINGS), samples)
        return self._files.layout((), [self._sounds_begin, vectors, self._sounds_end])


def gemma4(files: ModelFiles) -> Gemma4Pictures:
    """Return the processor of a model with or without a part for sounds."""
    return Gemma4Pictures(files) if files.config.get("audio_config") is None else Gemma4Sounds(files)
