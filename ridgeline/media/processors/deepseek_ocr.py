"""DeepSeek-OCR 1 and 2: square tiles of a large picture, the whole picture on gray, and a vector that ends them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.media.layout import NEWLINE, SEPARATOR, Box, Layout, View
from ridgeline.media.processors.files import BICUBIC, HALF, ModelFiles, canvas, patching, refuse, square, tiles

QUERIES = 144, 256  # of the second one's views
MOST_TILES = 9  # of the first one
MOST_CROPS = 1024  # of the second one, far above any model's: each picture looks at all shapes of so many
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
        self._fewest, self._most = (
            int(files.image.get(name, at)) for name, at in (("min_patches", 2), ("max_patches", 6))
        )
        if not 1 <= self._fewest <= self._most <= MOST_CROPS:
            raise InvalidConfig(
                f"min_patches and max_patches are {self._fewest} and {self._most} in the model's preprocessor files; "
                f"pictures have 1 to {MOST_CROPS} tiles."
            )
        made = {self._vectors(self._tile), self._vectors(self._size)}
        if "sam_config" in files.vision and not made <= {*QUERIES}:
            raise InvalidConfig(
                f"views of {self._tile} and {self._size} pixels in the model's preprocessor files become "
                f"{' and '.join(map(str, sorted(made)))} vectors; this model has queries for "
                f"{' or '.join(map(str, QUERIES))}."
            )

    def _vectors(self, edge: int) -> int:
        return math.ceil(edge / self._factor) ** 2

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        crops = self._files.image.get("crop_to_patches", True)
        views: list[View] = []
        if crops and max(height, width) > self._tile:
            rows, columns = canvas(height, width, (self._tile, self._tile), self._fewest, self._most)
            views = tiles(rows * self._tile, columns * self._tile, self._tile, self._tile)
        tokens = len(views) * self._vectors(self._tile) + self._vectors(self._size) + 1
        whole = self._whole(height, width, self._size if crops else self._tile)
        return self._files.layout([*views, whole], [tokens], order=(*range(tokens - 1), NEWLINE))

    def _whole(self, height: int, width: int, edge: int) -> View:
        scale = edge / max(height, width)
        rows, columns = round(height * scale), round(width * scale)
        side, color = max(rows, columns), self._files.image.get("background_color", (127, 127, 127))
        return padded((height, width), (rows, columns), color, (side - rows) // 2, (side - columns) // 2)


class DeepseekOcr:
    """The first one. Its own code, not its files, has the sizes: that of its default mode, "Gundam", is here. A picture
    of up to 640 x 640 pixels has no tiles. Vectors lie line by line over all tiles, and one ends each line.
    """

    def __init__(self, files: ModelFiles) -> None:
        if files.config.get("architectures") != ["DeepseekOCRForCausalLM"]:
            raise InvalidConfig("of the models whose processor is DeepseekVLV2Processor only DeepSeek-OCR runs.")
        self._files = files
        self.marker = self.placeholder = str(files.processor.get("image_token", "<image>"))
        side = int(files.processor.get("patch_size", 16))
        self._factor = side * int(files.processor.get("downsample_ratio", 4))
        means = {name: files.processor.get(name, HALF) for name in ("image_mean", "image_std")}
        self.patching = patching(means, DEFAULTS, side)
        self._gray = tuple(int(255 * each) for each in self.patching.mean)
        self._size, self._tile = 16 * self._factor, 10 * self._factor

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        views, lines, first = list[View](), list[list[int]](), 0
        if max(height, width) > self._tile:
            rows, columns = canvas(height, width, (self._tile, self._tile), 2, MOST_TILES)
            views = tiles(rows * self._tile, columns * self._tile, self._tile, self._tile)
            each, first = self._tile // self._factor, len(views) * (self._tile // self._factor) ** 2
            number = np.arange(first).reshape(rows, columns, each, each).transpose(0, 2, 1, 3)
            lines = number.reshape(rows * each, columns * each).tolist()
        whole = self._size // self._factor
        lines += (first + np.arange(whole**2)).reshape(whole, whole).tolist()
        order = [number for line in lines for number in (*line, NEWLINE)]
        return self._files.layout([*views, self._whole(height, width)], [len(order) + 1], order=(*order, SEPARATOR))

    def _whole(self, height: int, width: int) -> View:
        """Return the view of the whole picture, which Pillow resizes and puts in the middle."""
        edge = self._size
        if height >= width:
            rows, columns = edge, round(width / height * edge)
        else:
            rows, columns = round(height / width * edge), edge
        top, left = round((edge - rows) * 0.5), round((edge - columns) * 0.5)
        return padded((height, width), (rows, columns), self._gray, top, left)


def padded(given: tuple[int, int], size: tuple[int, int], color: Sequence[int], top: int, left: int) -> View:
    """Return the view of a whole picture of a given size, resized, on a square of one color."""
    if not all(size):
        raise refuse(*given, "leaves no pixel along one side")
    red, green, blue = color
    side = max(size)
    return View(*size, Box(-top, -left, side, side), fill=(red, green, blue))
