"""Kimi-VL and Kimi-K2.5: pictures keep their size within a number of patches, and are filled up on two sides."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.media.layout import Box, Layout, View
from ridgeline.media.processors.files import BICUBIC, HALF, ModelFiles, patching, refuse

DEFAULTS: dict[str, Any] = {"resample": BICUBIC, "image_mean": HALF, "image_std": HALF}


class KimiVL:
    """By `in_token_limit` patches; larger pictures are reduced to about these."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<|media_pad|>")
        self._side = int(files.image.get("patch_size", 14))
        self.patching = patching(files.image, DEFAULTS, self._side)
        merge = files.image.get("merge_kernel_size", files.image.get("merge_size", 2))
        self._factor = self._side * int(merge if isinstance(merge, int) else merge[0])

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        rows, columns = self._size(height, width)
        window = Box(0, 0, -(-rows // self._factor) * self._factor, -(-columns // self._factor) * self._factor)
        tokens = (window.rows // self._factor) * (window.columns // self._factor)
        return self._files.layout([View(rows, columns, window)], [tokens])

    def _size(self, height: int, width: int) -> tuple[int, int]:
        most = int(self._files.image.get("in_token_limit", 4096))
        patches = (height // self._side) * (width // self._side)
        if patches > most:
            scale = math.sqrt(most / patches)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) // self._side >= 512:
            raise refuse(height, width, "has 512 or more patches along a side")
        return height, width


class KimiK25(KimiVL):
    """By `max_patches` in all and along each side."""

    def _size(self, height: int, width: int) -> tuple[int, int]:
        most = int(self._files.image.get("max_patches", 16384))
        longest = int((self._files.image.get("size") or {}).get("max_height", 512)) * self._side
        patches = max(1.0, height // self._side) * max(1.0, width // self._side)
        scale = min(1.0, math.sqrt(most / patches), longest / height, longest / width)
        return min(max(1, int(height * scale)), longest), min(max(1, int(width * scale)), longest)
