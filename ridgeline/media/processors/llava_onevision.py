"""LLaVA-OneVision and 1.6: the whole picture, and tiles of the resolution that fits best, without their borders."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.media.layout import NEWLINE, Box, Layout, View
from ridgeline.media.processors.files import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ModelFiles,
    patching,
    square,
    square_box,
    tiles,
    whole,
)

DEFAULTS: dict[str, Any] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
NEXT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


class LlavaOnevision:
    """One picture alone is cut into tiles. Of several each is one square on the mean color."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", str(files.processor.get("image_token", "<image>")))
        self.patching = patching(files.image, DEFAULTS, int(files.vision.get("patch_size", 14)))
        self._size = square(files.image.get("size", {"height": 384, "width": 384}))
        self._points = files.image.get("image_grid_pinpoints") or PINPOINTS
        own = files.processor.get("num_image_tokens")
        self._edge = math.isqrt(int(own)) if own else self._size[0] // self.patching.rows
        aspect = files.processor.get("vision_aspect_ratio") or files.config.get("vision_aspect_ratio", "anyres_max_9")
        self._most = int(str(aspect).removeprefix("anyres_max_"))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        base = tuple(range(self._edge**2))
        if pictures > 1:
            box = square_box(height, width) if height != width else None
            red, green, blue = (int(255 * mean) for mean in self.patching.mean)
            view = View(*self._size, Box(0, 0, *self._size), box=box, fill=(red, green, blue))
            return self._files.layout([view], [len(base) + 1], order=(*base, NEWLINE))
        best = self._resolution(height, width)
        size = _within(height, width, best)
        shift = (best[0] - size[0]) // 2, (best[1] - size[1]) // 2
        cut = tiles(*best, *self._size)
        views = [View(*size, each.window._replace(top=each.window.top - shift[0], left=each.window.left - shift[1]))
                 for each in cut]  # fmt: skip
        order, lines = self._order(height, width, best[0] // self._size[0], best[1] // self._size[1])
        shrunk = self._shrunk(lines)
        rows, columns = shrunk or lines
        more: dict[str, Any] = {"shrunk": (lines, shrunk)} if shrunk else {}
        if not shrunk:
            ended = [[*order[row * columns : (row + 1) * columns], NEWLINE] for row in range(rows)]
            order = [each for line in ended for each in line]
        tokens = len(base) + rows * (columns + 1)
        return self._files.layout([whole(*self._size), *views], [tokens], order=(*base, *order), **more)

    def _shrunk(self, lines: tuple[int, int]) -> tuple[int, int] | None:
        """Return the size to which so many lines and columns of vectors are interpolated; None: they are not."""
        ratio = math.sqrt(math.prod(lines) / (self._most * self._edge**2))
        return (int(lines[0] // ratio), int(lines[1] // ratio)) if ratio > 1.1 else None

    def _resolution(self, height: int, width: int) -> tuple[int, int]:
        """Return the resolution that keeps most pixels of the picture; of equal ones, which wastes least."""

        def worth(point: list[int]) -> tuple[int, int]:
            scale = min(point[1] / width, point[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - point[0] * point[1]

        rows, columns = max(self._points, key=worth)
        return int(rows), int(columns)

    def _order(self, height: int, width: int, rows: int, columns: int) -> tuple[list[int], tuple[int, int]]:
        """Return the vectors of the tiles' patches, line by line over all tiles, without lines and columns that only
        fill up; and how many lines and columns there are."""
        edge = self._edge
        tall, wide = edge * rows, edge * columns
        top = left = 0
        if width / height > wide / tall:
            top = (tall - int(round(height * (wide / width), 7))) // 2
        else:
            left = (wide - int(round(width * (tall / height), 7))) // 2
        order = [
            edge * edge * (1 + y // edge * columns + x // edge) + y % edge * edge + x % edge
            for y in range(top, tall - top)
            for x in range(left, wide - left)
        ]
        return order, (tall - 2 * top, wide - 2 * left)


class LlavaNextTiles(LlavaOnevision):
    """LLaVA 1.6 cuts each of several pictures into tiles too, and interpolates none."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self._size = square(files.image.get("crop_size") or files.image.get("size", 336))
        self._points = files.image.get("image_grid_pinpoints") or NEXT_PINPOINTS
        self._edge = self._size[0] // self.patching.rows

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        return super().layout(height, width)

    def _shrunk(self, lines: tuple[int, int]) -> tuple[int, int] | None:
        return None


def _within(height: int, width: int, best: tuple[int, int]) -> tuple[int, int]:
    """Return the size of the picture's shape that fills one side of a resolution."""
    wide, tall = best[1] / width, best[0] / height
    if wide < tall:
        return min(math.ceil(height * wide), best[0]), best[1]
    return best[0], min(math.ceil(width * tall), best[1])
