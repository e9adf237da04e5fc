"""Chameleon: the middle square, between tokens that begin and end a picture. Each of its patches is a token."""

from __future__ import annotations

from typing import Any

from ridgeline.media.layout import Box, Layout, Patching, View
from ridgeline.media.processors.files import LANCZOS, ModelFiles, patching, resized, square

SIZE: dict[str, Any] = {"size": {"shortest_edge": 512}, "crop_size": {"height": 512, "width": 512}}
DEFAULTS: dict[str, Any] = {"resample": LANCZOS, "image_mean": 1.0, "image_std": 1.0}
SCALE = 0.0078  # of pixels, about 2 / 255, so that they become numbers from -1 to 1
LEVELS = (1, 1, 2, 2, 4)  # of the encoder, each but one of which halves the sides


class ChameleonPictures:
    """The shorter side is resized, and the middle is seen."""

    def __init__(self, files: ModelFiles) -> None:
        self._files, self._image = files, {"rescale_factor": SCALE, **SIZE, **files.image}
        self.marker = self.placeholder = files.token("image_token", str(files.processor.get("image_token", "<image>")))
        self._begin, self._end = files.token("boi_token", "<racm3:break>"), files.token("eoi_token", "<eoss>")
        levels = (files.config.get("vq_config") or {}).get("channel_multiplier") or LEVELS
        self.patching: Patching = patching(self._image, DEFAULTS, 1 << (len(levels) - 1))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        height, width = resized(height, width, self._image["size"])
        rows, columns = square(self._image["crop_size"])
        view = View(height, width, Box((height - rows) // 2, (width - columns) // 2, rows, columns))
        tokens = (rows // self.patching.rows) * (columns // self.patching.columns)
        return self._files.layout([view], [self._begin, tokens, self._end])
