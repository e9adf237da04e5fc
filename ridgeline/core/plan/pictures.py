"""Pictures on their way to a tower, and the places that their vectors take in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.octets import SharedOctets, told_octets
from ridgeline.core.shared import MemoryPlace
from ridgeline.kernels.pictures.views import Patching, View


class EncoderFigures(NamedTuple):
    """The work of a tower since the worker was made: pictures, their patches, and seconds of the device."""

    pictures: int = 0
    patches: int = 0
    seconds: float = 0.0

    def plus(self, other: EncoderFigures) -> EncoderFigures:
        """Return the work of both."""
        return EncoderFigures(
            self.pictures + other.pictures, self.patches + other.patches, self.seconds + other.seconds
        )


class Pixels(SharedOctets):
    """A picture, or a frame of a video: red, green and blue of each pixel, a byte each, line by line."""

    __slots__ = ("height", "width")

    def __init__(self, height: int, width: int, data: bytes | np.ndarray | MemoryPlace) -> None:
        super().__init__(data)
        self.height, self.width = height, width
        if self.num_bytes != 3 * height * width:
            raise ContractViolation(
                f"a picture of {height} x {width} pixels has {3 * height * width} bytes, got {self.num_bytes}."
            )

    def sent(self) -> tuple[int, int, Any]:
        """Return the size, and the octets or their place, for a message."""
        return self.height, self.width, super().sent()

    @classmethod
    def received(cls, told: Any) -> Pixels:
        """Return the pixels that `sent` told of. Raise ValueError if they are none of ours."""
        height, width, data = told
        return cls(height, width, told_octets(data))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pixels):
            return NotImplemented
        return (self.height, self.width) == (other.height, other.width) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.height, self.width))


@dataclass(frozen=True)
class ShownPictures:
    """The tower's inputs for a picture, or for the frames of a video.

    views: what the tower sees; their frames are numbers of pictures.
    order: the number of each placeholder's vector among those of all views, or -1 for the vector that ends a line;
        None: as they come.
    shrunk: as `media.layout.Layout.shrunk`: the last vectors of `order` are a grid (rows, columns) that is interpolated
        to another size, and then a vector ends each line of it. None: they are not.
    text: the tokens of the prompt's text, for a projector that reads them.
    """

    pictures: tuple[Pixels, ...]
    views: tuple[View, ...]
    patching: Patching
    order: tuple[int, ...] | None = None
    shrunk: tuple[tuple[int, int], tuple[int, int]] | None = None
    text: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of all pixels."""
        return sum(each.num_bytes for each in self.pictures)

    @property
    def sent_bytes(self) -> int:
        """The bytes that a message takes for all pixels."""
        return sum(each.sent_bytes for each in self.pictures)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """The rows and columns of patches of each view."""
        each = self.patching
        return tuple((height // each.rows, width // each.columns) for height, width in (v.size for v in self.views))

    @property
    def covered(self) -> tuple[tuple[int, int], ...]:
        """The rows and columns of patches of each view that show some of the picture, if it begins within the first."""
        rows, columns, found = self.patching.rows, self.patching.columns, []
        for view, grid in zip(self.views, self.grids, strict=True):
            tall, wide = view.height - view.window.top, view.width - view.window.left
            whole = view.resampled is not None
            found.append(grid if whole else (min(grid[0], -(-tall // rows)), min(grid[1], -(-wide // columns))))
        return tuple(found)

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
