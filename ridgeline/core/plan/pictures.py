"""Pictures on their way to a tower, and the places that their vectors take in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.kernels.pictures.views import Patching, View


class Pixels(NamedTuple):
    """A picture, or a frame of a video. data: red, green and blue of each pixel, a byte each, line by line."""

    height: int
    width: int
    data: bytes


@dataclass(frozen=True)
class ShownPictures:
    """The tower's inputs for a picture, or for the frames of a video.

    views: what the tower sees; their frames are numbers of pictures.
    order: the number of each placeholder's vector among those of all views, or -1 for the vector that ends a line;
        None: as they come.
    shrunk: as `media.layout.Layout.shrunk`: the last vectors of `order` are a grid (rows, columns) that is interpolated
        to another size, and then a vector ends each line of it. None: they are not.
    """

    pictures: tuple[Pixels, ...]
    views: tuple[View, ...]
    patching: Patching
    order: tuple[int, ...] | None = None
    shrunk: tuple[tuple[int, int], tuple[int, int]] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of all pixels."""
        return sum(len(each.data) for each in self.pictures)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """The rows and columns of patches of each view."""
        each, windows = self.patching, (view.window for view in self.views)
        return tuple((window.rows // each.rows, window.columns // each.columns) for window in windows)

    @property
    def tiling(self) -> tuple[int, int]:
        """The rows and columns of tiles, if the views are tiles of one picture."""
        return len({view.window.top for view in self.views}), len({view.window.left for view in self.views})

    @property
    def patches(self) -> int:
        """The number of patches that the tower sees."""
        return sum(rows * columns for rows, columns in self.grids)

    @property
    def vectors(self) -> int:
        """The number of vectors that take places in a prompt, unless the tower pools them further."""
        if self.order is None:
            return self.patches // self.patching.merge**2
        if self.shrunk is None:
            return len(self.order)
        (rows, columns), (fewer, narrower) = self.shrunk
        return len(self.order) - rows * columns + fewer * (narrower + 1)
