"""Idefics 3 and SmolVLM: square splits, named by row and column, and the whole picture in one more."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.media.layout import Layout, Piece
from ridgeline.media.processors.files import HALF, LANCZOS, ModelFiles, patching, tiles, whole

DEFAULTS: dict[str, Any] = {"resample": LANCZOS, "image_mean": HALF, "image_std": HALF}
LARGEST = 4096  # pixels of the longer side


class Idefics3:
    """A picture is resized twice: to its longest side, and to whole splits. The last view is made of that."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = "<image>"
        side = int(files.vision.get("patch_size", 14))
        merge = int(files.config.get("scale_factor", 2))
        self.patching = patching(files.image, DEFAULTS, side, merge=merge)
        self._size = files.image.get("size", {"longest_edge": 4 * 364})
        self._split = int(files.image.get("max_image_size", {"longest_edge": 364})["longest_edge"])
        own = files.processor.get("image_seq_len") or files.image.get("image_seq_len")
        self._tokens = int(own or (self._split // side) ** 2 // merge**2)

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        first = self._first(height, width)
        one = whole(self._split, self._split, via=(first,))
        alone: list[Piece] = ["<fake_token_around_image><global-img>", self._tokens, "<fake_token_around_image>"]
        if not self._files.image.get("do_image_splitting", True):
            return self._files.layout([one], alone)
        second = self._second(*first)
        if max(second) <= self._split:
            return self._files.layout([one], alone)
        views = tiles(*second, self._split, self._split, via=(first,))
        pieces: list[Piece] = []
        for row in range(1, second[0] // self._split + 1):
            for column in range(1, second[1] // self._split + 1):
                pieces += [f"<fake_token_around_image><row_{row}_col_{column}>", self._tokens]
            pieces.append("\n")
        last = whole(self._split, self._split, via=(first, second))
        return self._files.layout([*views, last], [*pieces, "\n", *alone])

    def _first(self, height: int, width: int) -> tuple[int, int]:
        """Return the size whose longer side is `longest_edge`; the other becomes even."""
        if "longest_edge" not in self._size:
            return int(self._size["height"]), int(self._size["width"])
        edge, shape = int(self._size["longest_edge"]), width / height
        if width >= height:
            height, width = int(edge / shape), edge
            height += height % 2
        else:
            height, width = edge, int(edge * shape)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        shape = width / height
        if width >= height and width > LARGEST:
            height, width = int(LARGEST / shape), LARGEST
        elif height > width and height > LARGEST:
            height, width = LARGEST, int(LARGEST * shape)
        return max(height, 1), max(width, 1)

    def _second(self, height: int, width: int) -> tuple[int, int]:
        """Return the size in whole splits: the longer side is rounded up, and the other follows its shape."""
        shape = width / height
        if width >= height:
            width = math.ceil(width / self._split) * self._split
            return math.ceil(int(width / shape) / self._split) * self._split, width
        height = math.ceil(height / self._split) * self._split
        return height, math.ceil(int(height * shape) / self._split) * self._split
