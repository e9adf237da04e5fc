"""Vectors in the place of the embedding table's rows: a prompt that comes as such, or the output of an encoder of
pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import floor

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.pictures import ShownPictures
from ridgeline.core.plan.sounds import HeardSound
from ridgeline.core.specs.model import ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLACEHOLDER = 0  # stands for each position in the prompt's tokens, as in vLLM
MOST_BYTES = 48 << 20  # of one prompt: what the connection between the processes carries
LARGEST = 32_768  # of a vector's numbers: float16 holds the sums of such, and every norm their squares
LARGEST_BITS = {"float32": ("<u4", 0x4700_0000), "bfloat16": ("<u2", 0x4700), "float16": ("<u2", 0x7800)}


@dataclass(frozen=True)
class Embeds:
    """The vectors of some positions: numbers of the type `dtype`, little-endian, `width` of them for each position."""

    dtype: str
    width: int
    data: bytes

    def __len__(self) -> int:
        return len(self.data) // self._stride

    def __getitem__(self, part: slice) -> Embeds:
        start, end, _ = part.indices(len(self))
        return Embeds(self.dtype, self.width, self.data[start * self._stride : max(start, end) * self._stride])

    @property
    def fault(self) -> str:
        """The end of a sentence that says what is wrong with the numbers; empty: nothing. Those above LARGEST overflow
        in layers."""
        bits, largest = LARGEST_BITS[self.dtype]
        numbers = np.frombuffer(self.data, bits)
        sign = np.asarray(1 << 8 * numbers.itemsize - 1, numbers.dtype)
        if not ((numbers & ~sign) > largest).any():  # infinities and NaN have the largest exponent
            return ""
        return f"has entries that are not finite numbers from -{LARGEST} to {LARGEST}; mend them."

    @property
    def _stride(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Inserted:
    """Vectors in the place of the embeddings of some tokens, which are placeholders.

    start: the first of the `count` tokens, counted from the beginning of the prompt, or of a span.
    key: at most 32 bytes that stand for the vectors in prefix hashes, such as a hash of the picture. Empty: the request
        neither takes from the prefix cache nor leaves anything there.
    embeds: the vectors; None: the worker holds them under `name`, from number `first` on.
    shown: what a tower makes them of. In a plan it is there only if the worker does not hold them yet.
    heard: what a listener makes them of, in the same way.
    grid: frames, rows and columns of these vectors, by which their positions have three axes; None: positions count.
    interval: how far apart two of the frames are on the first axis.
    across: the number of a picture's vectors that layers of cross attention see. The token that stands for the picture
        keeps its embedding. 0: vectors take the places of tokens.
    adapter: in a plan, the place of the adapter with which the picture or sound is encoded, from 1; 0: none.
    """

    start: int
    count: int
    key: bytes = b""
    embeds: Embeds | None = None
    name: str = ""
    first: int = 0
    shown: ShownPictures | None = None
    heard: HeardSound | None = None
    grid: tuple[int, int, int] | None = None
    interval: float = 1.0
    across: int = 0
    adapter: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def made_of(self) -> ShownPictures | HeardSound | None:
        """The picture or sound that a tower or a listener makes them of."""
        return self.shown or self.heard

    def part(self, start: int, end: int) -> Inserted | None:
        """Return the part between two positions, with places counted from the first of these; None: there is none."""
        left, right = max(start, self.start), min(end, self.end)
        if left >= right:
            return None
        skipped = left - self.start
        return replace(
            self,
            start=left - start,
            count=right - left,
            embeds=None if self.embeds is None else self.embeds[skipped : right - self.start],
            first=self.first + skipped,
        )

    def identity(self, position: int) -> int:
        """Return the number that stands for the placeholder at a position: no token has it. It has at most 41 bytes."""
        return (int.from_bytes(self.key, "little") << 32 | self.first + position - self.start) << 32


def positions_between(inserted: Iterable[Inserted], start: int, end: int) -> np.ndarray | None:
    """Return the positions of the tokens start … end - 1 on three axes, int32 [3, tokens]. None: there are no grids, or
    all lie before these tokens, whose positions are then shifted alike (`shift_of`).

    A picture begins where the last token before it ended. Its vectors lie in a box of frames, rows and columns, and
    what follows it begins behind the farthest of them.
    """
    own = [each for each in inserted if each.grid is not None]
    if not own or start >= own[-1].end:
        return None
    found = np.empty((3, end - start), np.int32)
    behind, shift = 0, 0  # the first token behind the pictures so far, and the shift from there on
    for each in own:
        if each.start >= end:
            break
        left, right = max(start, each.start), min(end, each.end)
        if start < each.start:
            _fill_words(found, start, behind, each.start, shift)
        if left < right:
            axes_3L = _box(each) + each.start + shift
            found[:, left - start : right - start] = axes_3L[:, left - each.start : right - each.start]
        behind, shift = each.end, shift + _length(each) - each.count
    _fill_words(found, start, behind, end, shift)
    return found


def shift_of(inserted: Iterable[Inserted]) -> int:
    """Return the difference between the position and the number of tokens behind all grids."""
    shift = 0
    for each in inserted:
        if each.grid is not None:
            shift += _length(each) - each.count
    return shift


def _fill_words(found_3T: np.ndarray, start: int, first: int, end: int, shift: int) -> None:
    """Write the positions of words first … end - 1 into those of a chunk that begins at `start`."""
    left, right = max(first, start), min(end, start + found_3T.shape[1])
    if left < right:
        found_3T[:, left - start : right - start] = np.arange(left, right) + shift


def _length(inserted: Inserted) -> int:
    """Return the number of positions up to the farthest of `_box`. A long video has thousands of boxes, of which a
    chunk needs few."""
    assert inserted.grid is not None
    frames, rows, columns = inserted.grid
    return 1 + max(floor((frames - 1) * inserted.interval), rows - 1, columns - 1)


def _box(inserted: Inserted) -> np.ndarray:
    """Return the places of vectors on three axes, counted from the corner: int64 [3, vectors]."""
    assert inserted.grid is not None
    places = np.indices(inserted.grid).reshape(3, -1)
    places[0] = np.floor(places[0] * inserted.interval)
    return places


def parts_between(inserted: Iterable[Inserted], start: int, end: int) -> tuple[Inserted, ...]:
    """Return the parts that lie between two positions, with places counted from the first of these."""
    return tuple(part for each in inserted if (part := each.part(start, end)) is not None)


def sent_bytes(inserted: Inserted) -> int:
    """Return the bytes that a message takes for vectors, or for the picture or sound that becomes them."""
    own = inserted.made_of
    return (0 if own is None else own.sent_bytes) + (0 if inserted.embeds is None else len(inserted.embeds.data))


def named_within(inserted: Iterable[Inserted], salt: str) -> tuple[Inserted, ...]:
    """Return vectors under names of a tenant's own: tenants share no vectors, as they share no blocks."""
    return tuple(replace(each, name=f"{salt}/{each.name}") if each.name else each for each in inserted)


def media_widths(enabled: bool, spec: ModelSpec) -> tuple[int, int]:
    """Return the numbers of a vector of a picture and of a sound, which may come as such; 0: they may not. Raise
    InvalidConfig for a model in whose prompts no such vectors stand."""
    apart = spec.pooling is not None and spec.pooling.apart
    if enabled and (not any(spec.media_widths) or spec.crosses or apart):
        raise InvalidConfig(
            "enable_mm_embeds is for models in whose prompts vectors of pictures or sounds stand; leave it out."
        )
    return spec.media_widths if enabled else (0, 0)


def embeds_width(enabled: bool, spec: ModelSpec) -> int:
    """Return the width of vectors that prompts may be made of; 0: they may not. Raise InvalidConfig for a model that
    cannot take them."""
    if not enabled:
        return 0
    if spec.pooling is not None:
        raise InvalidConfig("enable_prompt_embeds is for models that generate; leave it out.")
    if spec.encoder is not None:
        raise InvalidConfig("enable_prompt_embeds is not for models with an encoder; leave it out.")
    if spec.embedding_multiplier != 1:
        raise InvalidConfig(
            "enable_prompt_embeds: this model scales its embeddings, and nothing tells whether a prompt's are "
            "scaled already; leave it out."
        )
    return spec.hidden_size
