"""Llama 3.2 Vision: up to four tiles. The text reads them by cross attention, so one token stands for a picture."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.media.layout import Layout, View
from ridgeline.media.processors.files import BILINEAR, HALF, ModelFiles, patching, square, tiles

DEFAULTS: dict[str, Any] = {"resample": BILINEAR, "image_mean": HALF, "image_std": HALF}


class Mllama:
    """Views are the tiles, line by line."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<|image|>")
        self.patching = patching(files.image, DEFAULTS, int(files.vision.get("patch_size", 14)))
        self._tile = square(files.image.get("size", {"height": 224, "width": 224}))[0]
        self._most = int(files.image.get("max_image_tiles", 4))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        rows, columns = self._canvas(height, width)
        size = self._fit(height, width, rows * self._tile, columns * self._tile)
        views = [
            View(*size, each.window) for each in tiles(rows * self._tile, columns * self._tile, self._tile, self._tile)
        ]
        vectors = rows * columns * ((self._tile // self.patching.rows) ** 2 + 1)  # a tile's patches and its class token
        return self._files.layout(views, [1], across=vectors)

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns): those that enlarge least, or else reduce least; of equal ones the smallest."""
        numbers = range(1, self._most + 1)
        shapes = [(rows, columns) for rows in numbers for columns in numbers if rows * columns <= self._most]
        scales = {each: min(each[0] * self._tile / height, each[1] * self._tile / width) for each in shapes}
        larger = [scale for scale in scales.values() if scale >= 1]
        wanted = min(larger) if larger else max(scales.values())
        return min((each for each in shapes if scales[each] == wanted), key=math.prod)

    def _fit(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the largest size of the picture's shape within rows x columns pixels; small ones grow to a tile."""
        tall, wide = min(max(height, self._tile), rows), min(max(width, self._tile), columns)
        if wide / width < tall / height:
            return min(math.floor(height * (wide / width)) or 1, tall), wide
        return tall, min(math.floor(width * (tall / height)) or 1, wide)
