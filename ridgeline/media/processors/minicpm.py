"""MiniCPM-V: the whole picture at about 448 x 448 pixels, and slices of a larger one."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.media.layout import Layout, Piece
from ridgeline.media.processors.files import BICUBIC, HALF, ModelFiles, patching, tiles, whole

DEFAULTS: dict[str, Any] = {"resample": BICUBIC, "image_mean": HALF, "image_std": HALF}


class MiniCPM:
    """Pictures of a prompt are numbered. A square of 4 x 4 patches is one token."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<|image_pad|>")
        self._image = files.token("image_start_token", "<image>"), files.token("image_end_token", "</image>")
        self._slice = files.token("slice_start_token", "<slice>"), files.token("slice_end_token", "</slice>")
        self._id = files.token("image_id_start_token", "<image_id>"), files.token("image_id_end_token", "</image_id>")
        self._side = int(files.image.get("patch_size", 14))
        self.patching = patching(files.image, DEFAULTS, self._side, merge=4)
        self._edge = int(files.image.get("scale_resolution", 448))
        self._most = int(files.image.get("max_slice_nums", 9))
        if (mode := files.image.get("downsample_mode") or files.config.get("downsample_mode", "16x")) != "16x":
            raise InvalidConfig(
                f"downsample_mode is {mode!r}; pictures of MiniCPM-V have one token for 16 patches here."
            )

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        grid = self._grid(height, width) if self._files.image.get("slice_mode", True) else None
        size = self._best(height, width, grid is None)
        views = [whole(*size)]
        number = f"{self._id[0]}{index}{self._id[1]}" if self._files.image.get("use_image_id", True) else ""
        pieces: list[Piece] = [number + self._image[0], self._tokens(*size), self._image[1]]
        if grid is not None:
            rows, columns = grid
            tall, wide = _rounded(height, rows) / rows, _rounded(width, columns) / columns
            tile = self._best(tall, wide, True)
            views += tiles(tile[0] * rows, tile[1] * columns, *tile)
            line: list[Piece] = [self._slice[0], self._tokens(*tile), self._slice[1]]
            for row in range(rows):
                pieces += [*(["\n"] if row else []), *line * columns]
        return self._files.layout(views, pieces)

    def _tokens(self, height: int, width: int) -> int:
        return (height // self._side) * (width // self._side) // 16

    def _best(self, height: float, width: float, larger: bool) -> tuple[int, int]:
        """Return about the size, in whole squares of 4 x 4 patches. larger: small pictures grow as well."""
        if height * width > self._edge * self._edge or larger:
            shape = width / height
            height = int(self._edge / math.sqrt(shape))
            width = int(height * shape)
        return _rounded(height, self._side * 4), _rounded(width, self._side * 4)

    def _grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Return (rows, columns) of the slices; None: the picture is small enough."""
        wanted = min(math.ceil(width * height / (self._edge * self._edge)), self._most)
        if wanted <= 1:
            return None
        shape, best, found = math.log(width / height), float("inf"), (1, 1)
        for slices in (wanted - 1, wanted, wanted + 1):
            if slices == 1 or slices > self._most:
                continue
            for columns in range(1, slices + 1):
                if slices % columns == 0:
                    apart = abs(shape - math.log(columns / (slices // columns)))
                    if apart < best:
                        best, found = apart, (slices // columns, columns)
        return found


def _rounded(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)
