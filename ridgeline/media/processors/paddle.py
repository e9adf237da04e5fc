"""PaddleOCR-VL: as Qwen2-VL, with patches of one frame, and small pictures made larger first."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.media.layout import Layout
from ridgeline.media.processors.files import BICUBIC, CLIP_MEAN, CLIP_STD, ModelFiles, patching, whole
from ridgeline.media.processors.qwen import bounds, smart_resize

DEFAULTS: dict[str, Any] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}


class PaddleOCR:
    adjustable = ("min_pixels", "max_pixels")

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<|IMAGE_PLACEHOLDER|>")
        side = int(files.image.get("patch_size", 14))
        merge, frames = int(files.image.get("merge_size", 2)), int(files.image.get("temporal_patch_size", 1))
        self.patching = patching(files.image, DEFAULTS, side, frames=frames, merge=merge)
        self._factor = side * merge
        self._bounds = bounds(files.image, (384 * 384, 1536 * 1536))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        if height < self._factor:
            height, width = self._factor, round(width * self._factor / height)
        if width < self._factor:
            height, width = round(height * self._factor / width), self._factor
        size = smart_resize(height, width, self._factor, self._bounds)
        grid = (1, size[0] // self._factor, size[1] // self._factor)
        return self._files.layout([whole(*size)], [math.prod(grid)], grids=(grid,))
