"""InternVL: a grid of square tiles, and the whole picture in one more."""

from __future__ import annotations

from typing import Any

from ridgeline.media.layout import Layout, View
from ridgeline.media.processors.files import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ModelFiles,
    canvas,
    patching,
    square,
    tiles,
    whole,
)

DEFAULTS: dict[str, Any] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}


class InternVL:
    """Each tile has `image_seq_length` tokens."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("context_image_token", "<IMG_CONTEXT>")
        self._begin = files.token("start_image_token", "<img>")
        self._end = files.token("end_image_token", "</img>")
        side = files.vision.get("patch_size", 14)
        merge = round(1 / float(files.config.get("downsample_ratio", 0.5)))
        self.patching = patching(files.image, DEFAULTS, side if isinstance(side, int) else int(side[0]), merge=merge)
        self._size = square(files.image.get("size", {"height": 384, "width": 384}))
        own = files.processor.get("image_seq_length") or files.config.get("image_seq_length")
        self._tokens = int(own or 256)

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        views = self._views(height, width)
        return self._files.layout(views, [self._begin, self._tokens * len(views), self._end])

    def _views(self, height: int, width: int) -> list[View]:
        most = int(self._files.image.get("max_patches", 12))
        if not self._files.image.get("crop_to_patches", True) or most < 2:
            return [whole(*self._size)]
        rows, columns = canvas(height, width, self._size, int(self._files.image.get("min_patches", 1)), most)
        found = tiles(rows * self._size[0], columns * self._size[1], *self._size)
        return [*found, *([whole(*self._size)] if len(found) > 1 else [])]
