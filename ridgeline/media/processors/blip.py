"""BLIP-2: a square of fixed size, of which learned queries make as many vectors."""

from __future__ import annotations

from ridgeline.media.layout import Layout, Patching
from ridgeline.media.processors.files import ModelFiles, patching, resized, whole
from ridgeline.media.processors.plain import CLIP


class BlipPictures:
    """The picture is resized to a square, whatever its shape."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<image>")
        self._size = files.image.get("size", {"height": 384, "width": 384})
        self._queries = int(files.config.get("num_query_tokens") or 32)
        self.patching: Patching = patching(files.image, CLIP, int(files.vision.get("patch_size", 14)))

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        view = whole(*resized(height, width, self._size))
        return self._files.layout([view], [self._queries], order=tuple(range(self._queries)))
