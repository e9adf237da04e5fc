"""Pictures that layers of cross attention see: which keys belong to which picture, and which of them a token sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import ShownPictures

MOST_PICTURES = 32  # of a request
MOST_RUNS = 8  # of pictures that follow each other directly, in a request


class PictureKeys(NamedTuple):
    """The places of a picture's keys in its request's cache, and of those that tokens see from this picture on, until
    the next one comes.

    token: the picture's place in the prompt.
    run: the number of its run: pictures that follow each other directly, whose keys lie side by side.
    first: the run's first key. Tokens see the keys from this one to `end`.
    start, end: the picture's own keys.
    """

    token: int
    run: int
    first: int
    start: int
    end: int


@dataclass(frozen=True)
class CrossedPictures:
    """The pictures of a request, which its first row of a slot brings. The last ones are encoded now, and the cache
    holds the keys of the others."""

    keys: tuple[PictureKeys, ...] = ()
    shown: tuple[ShownPictures, ...] = ()


def picture_keys(inserted: Sequence[Inserted], block_size: int) -> tuple[PictureKeys, ...]:
    """Return the places of the keys of a request's pictures. A run begins with a block of the cache."""
    found = list[PictureKeys]()
    for each in inserted:
        if not each.across:
            continue
        if found and found[-1].token + 1 == each.start:
            before = found[-1]
            run, first, start = before.run, before.first, before.end
        else:
            run = found[-1].run + 1 if found else 0
            first = start = -(-found[-1].end // block_size) * block_size if found else 0
        found.append(PictureKeys(each.start, run, first, start, start + each.across))
    return tuple(found)
