"""One view, resized to a fixed size: CLIP, SigLIP and PaliGemma; SigLIP 2 keeps the shape of the picture."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.media.layout import Box, Layout, Patching, View
from ridgeline.media.processors.files import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ModelFiles,
    patching,
    resized,
    square,
    whole,
)

CLIP: dict[str, Any] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
SIGLIP: dict[str, Any] = {"resample": BICUBIC, "image_mean": HALF, "image_std": HALF}


class ClipPictures:
    """The shorter side is resized, the middle is seen. A picture stands for itself: there is no prompt around it."""

    marker = placeholder = ""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.patching: Patching = patching(files.image, CLIP, int(files.vision.get("patch_size", 32)))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        return self._files.layout([clip_view(self._files, height, width)], [])


class Siglip:
    """The picture is resized to a square, whatever its shape."""

    marker = placeholder = ""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._size = files.image.get("size", {"height": 224, "width": 224})
        self.patching: Patching = patching(files.image, SIGLIP, int(files.vision.get("patch_size", 16)))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        return self._files.layout([whole(*resized(height, width, self._size))], [])


class Siglip2:
    """The largest size of about the picture's shape whose patches are not too many. Each patch is one row."""

    marker = placeholder = ""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._side = int(files.image.get("patch_size", 16))
        self._most = int(files.image.get("max_num_patches", 256))
        defaults = {"resample": BILINEAR, "image_mean": HALF, "image_std": HALF}
        self.patching: Patching = patching(files.image, defaults, self._side, channels_last=True)

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        return self._files.layout([whole(*self._size(height, width))], [])

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size at the largest scale that the search finds. Its steps are a part of the rule."""
        low, high = 1e-6, 100.0
        while high - low >= 1e-5:
            scale = (low + high) / 2
            if self._patches(scale, height) * self._patches(scale, width) <= self._most:
                low = scale
            else:
                high = scale
        return self._patches(low, height) * self._side, self._patches(low, width) * self._side

    def _patches(self, scale: float, size: int) -> int:
        return max(1, math.ceil(size * scale / self._side))


class PaliGemma(Siglip):
    """As SigLIP, with a token for each patch. Its pictures stand before the prompt, which begins behind them."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.marker = self.placeholder = files.token("image_token", "<image>")
        self.patching = patching(files.image, SIGLIP, int(files.vision.get("patch_size", 14)))
        height, width = square(self._size)
        tokens = (height // self.patching.rows) * (width // self.patching.columns)
        self._tokens = int(files.image.get("image_seq_length", tokens))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        return self._files.layout([whole(*resized(height, width, self._size))], [self._tokens])


def clip_view(files: ModelFiles, height: int, width: int, box: Box | None = None, **more: Any) -> View:
    """Return the middle of a picture, or of a box around it, by `size` and `crop_size` of the settings."""
    if box is not None:
        height, width = box.rows, box.columns
    height, width = resized(height, width, files.image.get("size", {"shortest_edge": 224}))
    window = Box(0, 0, height, width)
    if files.image.get("do_center_crop", True):
        rows, columns = square(files.image.get("crop_size", {"height": 224, "width": 224}))
        window = Box((height - rows) // 2, (width - columns) // 2, rows, columns)
    return View(height, width, window, box=box, **more)
