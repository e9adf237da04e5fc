"""DeepSeek-OCR 2: square tiles of a large picture, the whole picture on gray, and a vector that ends them."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.media.layout import Box, Layout, View
from ridgeline.media.processors.files import BICUBIC, HALF, ModelFiles, canvas, patching, refuse, square, tiles

DEFAULTS: dict[str, Any] = {"resample": BICUBIC, "image_mean": HALF, "image_std": HALF}


class DeepseekOcr2:
    """The last placeholder is the model's separator of views."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<image>")
        self._side = int(files.processor.get("patch_size", 16))
        self._factor = self._side * int(files.processor.get("downsample_ratio", 4))
        self.patching = patching(files.image, DEFAULTS, self._side)
        self._size = square(files.image.get("size", {"height": 1024, "width": 1024}))[0]
        self._tile = int(files.image.get("tile_size", 768))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        crops = self._files.image.get("crop_to_patches", True)
        views: list[View] = []
        if crops and max(height, width) > self._tile:
            fewest, most = (
                int(self._files.image.get(name, at)) for name, at in (("min_patches", 2), ("max_patches", 6))
            )
            rows, columns = canvas(height, width, (self._tile, self._tile), fewest, most)
            views = tiles(rows * self._tile, columns * self._tile, self._tile, self._tile)
        tokens = len(views) * math.ceil(self._tile / self._factor) ** 2 + math.ceil(self._size / self._factor) ** 2 + 1
        return self._files.layout([*views, self._whole(height, width, self._size if crops else self._tile)], [tokens])

    def _whole(self, height: int, width: int, edge: int) -> View:
        scale = edge / max(height, width)
        rows, columns = round(height * scale), round(width * scale)
        if not rows or not columns:
            raise refuse(height, width, "leaves no pixel along one side")
        red, green, blue = self._files.image.get("background_color", (127, 127, 127))
        side = max(rows, columns)
        window = Box(-((side - rows) // 2), -((side - columns) // 2), side, side)
        return View(rows, columns, window, fill=(red, green, blue))
