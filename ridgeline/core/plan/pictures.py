"""Pictures on their way to a tower, and the places that their vectors take in a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ridgeline.core.errors import ContractViolation
from ridgeline.core.shared import MemoryPlace, SharedMemory, place_of
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


class Pixels:
    """A picture, or a frame of a video: red, green and blue of each pixel, a byte each, line by line.

    data: bytes, or an array. What lies in memory that processes share is not copied into messages: these say where it
    lies, and `data` is read there.
    """

    __slots__ = ("_array", "_place", "height", "width")

    def __init__(self, height: int, width: int, data: bytes | np.ndarray | MemoryPlace) -> None:
        self.height, self.width = height, width
        self._place = data if isinstance(data, MemoryPlace) else None
        self._array = None if isinstance(data, MemoryPlace) else _flat(data)
        size = data.size if isinstance(data, MemoryPlace) else len(_flat(data))
        if size != self.num_bytes:
            raise ContractViolation(f"a picture of {height} x {width} pixels has {self.num_bytes} bytes, got {size}.")

    @property
    def data(self) -> np.ndarray:
        """The octets: uint8 [3 * height * width], read-only. Raise NoSuchMemory if another process had them, and has
        closed them."""
        return self.opened({})

    def opened(self, known: dict[tuple[int, int, int], SharedMemory]) -> np.ndarray:
        """Return `data`. known: files of memory that are open here already, to which this one's is added: all frames of
        a video lie in one, which would be open once for each otherwise."""
        if self._array is None:
            assert self._place is not None
            if (memory := known.get(self._place.file)) is None or not self._place.fits(len(memory)):
                memory = known[self._place.file] = SharedMemory.opened(self._place)
            self._array = np.frombuffer(memory, np.uint8, self._place.size, self._place.start)
        return self._array

    @property
    def num_bytes(self) -> int:
        """The bytes of all pixels, wherever they lie."""
        return 3 * self.height * self.width

    @property
    def sent_bytes(self) -> int:
        """The bytes that a message takes for it, besides a few."""
        return 0 if self._array is None or place_of(self._array) is not None else self.num_bytes

    def sent(self) -> tuple[int, int, memoryview | MemoryPlace]:
        """Return the size, and the octets or their place, for a message."""
        if self._array is None:
            assert self._place is not None
            return self.height, self.width, self._place
        return self.height, self.width, place_of(self._array) or self._array.data

    @staticmethod
    def received(told: Sequence[Any]) -> Pixels:
        """Return the pixels that `sent` told of. Raise ValueError if it is none of ours."""
        height, width, data = told
        if not isinstance(data, (bytes, list, tuple)):
            raise ValueError(f"a picture's pixels are bytes or their place, got {type(data).__name__}.")
        return Pixels(height, width, data if isinstance(data, bytes) else MemoryPlace(*map(int, data)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pixels):
            return NotImplemented
        alike = (self.height, self.width) == (other.height, other.width)
        return alike and np.array_equal(self.data, other.data)

    def __hash__(self) -> int:
        return hash((self.height, self.width))


def open_all(pictures: Iterable[Pixels]) -> None:
    """Hold the memory of pixels from now on, wherever it lies. Raise NoSuchMemory."""
    known = dict[tuple[int, int, int], SharedMemory]()
    for each in pictures:
        each.opened(known)


def _flat(data: bytes | np.ndarray) -> np.ndarray:
    if not isinstance(data, np.ndarray):
        return np.frombuffer(data, np.uint8)
    found = np.ascontiguousarray(data).reshape(-1)
    found.flags.writeable = False
    return found


def plain_pixels(value: Any) -> Any:
    """Return the message's form of pixels, as msgspec's `enc_hook`."""
    if isinstance(value, Pixels):
        return value.sent()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def pixels_received(kind: type, value: Any) -> Any:
    """Return pixels of a message, as msgspec's `dec_hook`."""
    if kind is Pixels:
        return Pixels.received(value)
    raise NotImplementedError(f"{kind.__name__} cannot be received")


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
