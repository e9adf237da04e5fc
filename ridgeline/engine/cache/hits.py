"""What is found in the cache of a sequence's beginning."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.engine.cache.prefix import Node


class Hit(NamedTuple):
    """A point at which every group can resume: so many whole blocks, and some tokens more in a block to copy.

    end: that block's node. copied: its tokens.
    """

    blocks: int = 0
    end: Node | None = None
    copied: int = 0

    def tokens(self, block_size: int) -> int:
        return self.blocks * block_size + self.copied


class Found(NamedTuple):
    """The longest hit of whole blocks, and the longest of all. by_group: after how many tokens each group by itself
    could resume, as far as full attention's blocks go."""

    whole: Hit
    best: Hit
    by_group: tuple[int, ...]
