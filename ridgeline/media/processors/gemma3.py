"""Gemma 3: squares of a fixed size. With pan and scan, long pictures are also seen in crops."""

from __future__ import annotations

import math
from math import isqrt
from typing import Any

from ridgeline.media.layout import Box, Layout, Piece, View
from ridgeline.media.processors.files import BILINEAR, HALF, ModelFiles, patching, square, whole

DEFAULTS: dict[str, Any] = {"resample": BILINEAR, "image_mean": HALF, "image_std": HALF}


class Gemma3Pictures:
    """Each view has the same number of tokens, between two that mark its ends and two blank lines."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = files.token("boi_token", "<start_of_image>")
        self.placeholder = files.token("image_token", "<image_soft_token>")
        self._end = files.token("eoi_token", "<end_of_image>")
        self._size = square(files.image.get("size", {"height": 224, "width": 224}))
        side = int(files.vision.get("patch_size", 14))
        own = files.processor.get("image_seq_length") or files.image.get("image_seq_length")
        self._tokens = int(own or files.config.get("mm_tokens_per_image", 256))
        merge = max(1, self._size[0] // side // max(1, isqrt(self._tokens)))  # squares whose average is a vector
        self.patching = patching(files.image, DEFAULTS, side, merge=merge)

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        boxes = self._crops(height, width) if self._files.image.get("do_pan_and_scan") else []
        views = [whole(*self._size), *(View(*self._size, Box(0, 0, *self._size), box=box) for box in boxes)]
        one: list[Piece] = [f"\n\n{self.marker}", self._tokens, f"{self._end}\n\n"]
        if not boxes:
            return self._files.layout(views, one)
        pieces = ["Here is the original image ", *one, " and here are some crops to help you see better "]
        for number in range(len(boxes)):
            pieces += [*([" "] if number else []), *one]
        return self._files.layout(views, pieces)

    def _crops(self, height: int, width: int) -> list[Box]:
        """Return the parts of a long picture, side by side, which are at least `pan_and_scan_min_crop_size` long."""
        least = int(self._files.image.get("pan_and_scan_min_crop_size", 256))
        most = int(self._files.image.get("pan_and_scan_max_num_crops", 4))
        long, short = max(height, width), min(height, width)
        if long / short < float(self._files.image.get("pan_and_scan_min_ratio_to_activate", 1.2)):
            return []
        crops = min(most, max(2, min(long // least, math.floor(long / short + 0.5))))
        length = math.ceil(long / crops)
        if min(length, short) < least:
            return []
        starts = range(0, length * crops, length)
        if width >= height:
            return [Box(0, start, height, min(length, width - start)) for start in starts]
        return [Box(start, 0, min(length, height - start), width) for start in starts]
