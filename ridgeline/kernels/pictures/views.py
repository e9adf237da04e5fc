"""The part of a picture that a tower sees, at its size, and in its numbers. Free of torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

RGB = tuple[int, int, int]
Filter = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
# PIL's numbers of its filters, which preprocessor_config.json has as `resample`
FILTERS: dict[int, Filter] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


class Box(NamedTuple):
    """A rectangle of pixels. It may reach beyond the picture that it is a part of."""

    top: int
    left: int
    rows: int
    columns: int


class View(NamedTuple):
    """One input of a tower, made of a picture: a box of the picture, resized, of which a window is seen.

    height, width: the size to which the box is resized; equal to that of the box: it is taken as it is.
    window: the part of the resized box that the tower sees. What lies outside has the color `fill`.
    box: the part of the picture that is resized; None: all of it. What lies outside has the color `fill`.
    via: sizes (height, width) to which the box is resized before, one after the other, each rounded to uint8.
    fill: the color outside, before numbers are normalised; None: zeros after it.
    frames: the numbers of the pictures or frames that its patches span, `Patching.frames` of them; one: all are copies.
    resampled: the size (height, width) to which the window's numbers are interpolated after they were normalised
        (`worker.resampled`); None: they are not.
    """

    height: int
    width: int
    window: Box
    box: Box | None = None
    via: tuple[tuple[int, int], ...] = ()
    fill: RGB | None = (0, 0, 0)
    frames: tuple[int, ...] = (0,)
    resampled: tuple[int, int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """The pixels (height, width) that the tower sees."""
        return self.resampled or (self.window.rows, self.window.columns)


class Patching(NamedTuple):
    """The numbers of a row, made of pixels: x = (pixel · scale - mean) / std, then patches of rows x columns.

    filter: how pictures are resized, as PIL does with antialiasing.
    scale, mean, std: of the three channels. Rounding follows float32.
    rows, columns: of a patch. A window's edges are multiples of these.
    frames: the frames that a patch spans.
    merge: patches come in squares of merge x merge, each square's patches one after the other; 1: line by line.
    channels_last: a row has the order [frames, rows, columns, channels]; otherwise [channels, frames, rows, columns].
    """

    filter: Filter
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rows: int
    columns: int
    frames: int = 1
    merge: int = 1
    channels_last: bool = False

    @property
    def width(self) -> int:
        """The numbers of a row."""
        return 3 * self.frames * self.rows * self.columns
