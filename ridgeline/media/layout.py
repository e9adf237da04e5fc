"""A picture in a prompt: what the tower sees of it, and which tokens stand for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ridgeline.kernels.pictures.views import RGB, Box, Filter, Patching, View

__all__ = ["NEWLINE", "PLACEHOLDER", "RGB", "SEPARATOR", "Box", "Encode", "Filter", "Layout", "Patching", "Piece",
           "Processor", "ReadingProcessor", "SoundProcessor", "VideoProcessor", "View"]  # fmt: skip

PLACEHOLDER = -1  # in the place of a token whose embedding comes from the picture
NEWLINE = -1  # in `Layout.order`: the vector that ends a line of patches, a parameter of the model
SEPARATOR = -2  # and the vector between a picture's tiles and its whole, in Phi-4's

Encode = Callable[[str], Sequence[int]]  # text, in which special tokens are recognised, to ids
Piece = str | int  # text, or a number of placeholders


@dataclass(frozen=True)
class Layout:
    """A picture's part of a prompt.

    views: the tower's inputs, in the order in which their vectors are used.
    pieces: what stands in the prompt in place of the processor's `marker`.
    token_ids: the same as ids, with `PLACEHOLDER` in each place of a vector. Text at either end of the pieces is
        tokenized by itself here. A caller that has the prompt as text tokenizes all of it together, as transformers
        does: the pieces' texts in place of the marker, with one `Processor.placeholder` for each run.
    grids: (frames, rows, columns) of each run of placeholders, for positions of three axes; (): positions count.
    interval: how far apart two frames of a grid are on the first of these axes.
    order: for each placeholder, the number of its vector among those of all views, NEWLINE or SEPARATOR; None: as
        they come.
    across: the number of the picture's vectors, if layers of cross attention see them; 0: vectors stand in the prompt.
    beside: of a sound: pictures stand in its prompt too, and the model has another projector for that.
    shrunk: ((rows, columns), (rows, columns)): the last vectors of `order` are a grid of the first size, interpolated
        to the second, bilinearly. Then a NEWLINE ends each line of it. None: `order` has all of them.
    """

    views: tuple[View, ...]
    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...] = ()
    interval: float = 1.0
    order: tuple[int, ...] | None = None
    shrunk: tuple[tuple[int, int], tuple[int, int]] | None = None
    across: int = 0
    beside: bool = False

    @property
    def whole(self) -> View | None:
        """The one view, if it is made of the whole picture in one step; None: it is not, or there are several."""
        [first, *others] = self.views
        return None if others or first.box or first.via or first.resampled or first.frames != (0,) else first

    @property
    def placeholders(self) -> int:
        """The number of vectors that stand in the prompt."""
        return sum(piece for piece in self.pieces if isinstance(piece, int))


@runtime_checkable
class Processor(Protocol):
    """The rules of one model.

    marker: the text that a chat template writes where a picture goes. Pieces take its place.
    placeholder: the text of the special token that transformers has in each place of a vector.
    patching: how the views become rows of numbers.
    """

    @property
    def marker(self) -> str: ...

    @property
    def placeholder(self) -> str: ...

    @property
    def patching(self) -> Patching: ...

    def __hash__(self) -> int: ...

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        """Return the part of a picture of that size: number `index` of `pictures` in the prompt.

        Raise InvalidRequest for a size that the model does not take.
        """
        ...


@runtime_checkable
class ReadingProcessor(Processor, Protocol):
    """The rules of a model whose tower reads the prompt's text beside a picture."""

    def read(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt's text, without its markers, as the tower reads them. Raise InvalidRequest for
        a text that is too long."""
        ...


@runtime_checkable
class VideoProcessor(Processor, Protocol):
    """The rules of a model that takes videos as well.

    video_marker, video_placeholder: as `marker` and `placeholder`, of a video.
    video_rate: frames a second of frames that come without times.
    samples: frames of a video in a caller's memory are chosen among, as those of a file are.
    """

    @property
    def video_marker(self) -> str: ...

    @property
    def video_placeholder(self) -> str: ...

    @property
    def video_rate(self) -> float: ...

    @property
    def samples(self) -> bool: ...

    def chosen(self, frames: int, fps: float) -> tuple[int, ...]:
        """Return the numbers of a video's frames that are seen, of so many at so many a second."""
        ...

    def video(self, times: Sequence[float], height: int, width: int, rate: float) -> Layout:
        """Return the part of a video: chosen frames of that size, seen at `times` seconds, `rate` of them a second."""
        ...


@runtime_checkable
class SoundProcessor(Protocol):
    """The rules of a model that hears. sound_marker, sound_placeholder: as `Processor`'s, of a sound."""

    @property
    def sound_marker(self) -> str: ...

    @property
    def sound_placeholder(self) -> str: ...

    def sound(self, samples: int, pictures: int = 0) -> Layout:
        """Return the part of a sound of so many samples, in a prompt with so many pictures. Raise InvalidRequest for a
        length that the model does not take."""
        ...


def token_ids(pieces: Sequence[Piece], encode: Encode) -> tuple[int, ...]:
    """Return the ids of pieces, with PLACEHOLDER where vectors go. Texts beside each other are encoded together."""
    ids: list[int] = []
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        ids += encode(text) if text else ()
        ids += [PLACEHOLDER] * piece
        text = ""
    return (*ids, *(encode(text) if text else ()))
