"""Pixtral and Mistral 3: pictures of any size, a token behind each line of patches, and another behind the last."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.media.layout import Layout, Piece
from ridgeline.media.processors.files import BICUBIC, CLIP_MEAN, CLIP_STD, ModelFiles, patching, refuse, square, whole

DEFAULTS: dict[str, Any] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}


class Pixtral:
    """With a spatial merge, squares of patches become one token each."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        own = files.processor
        self.marker = self.placeholder = str(own.get("image_token", "[IMG]"))
        self._break = str(own.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(own.get("image_end_token", "[IMG_END]"))
        side = int(own.get("patch_size") or files.vision.get("patch_size", 16))
        merge = int(own.get("spatial_merge_size") or files.config.get("spatial_merge_size", 1))
        self._factor = side * merge
        self.patching = patching(files.image, DEFAULTS, side, merge=merge)
        self._most = square(files.image.get("size", {"longest_edge": 1024}))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        own = height, width
        ratio = max(height / self._most[0], width / self._most[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise refuse(*own, "leaves no pixel along one side")
        rows, columns = (height - 1) // self._factor + 1, (width - 1) // self._factor + 1
        pieces: list[Piece] = [columns, self._break] * rows
        pieces[-1] = self._end
        return self._files.layout([whole(rows * self._factor, columns * self._factor)], pieces)
