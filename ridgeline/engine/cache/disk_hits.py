"""The part of a prompt that lies on the disk: beyond what device and host have of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as PySequence
from typing import NamedTuple

from ridgeline.core.specs.state import StateSpec
from ridgeline.engine.cache.hits import PrefixSearch
from ridgeline.engine.cache.names import Names
from ridgeline.engine.cache.prefix import Hash, PrefixIndex
from ridgeline.engine.sequence import Sequence

MOST_LOOKS = 4096  # at the disk's index for one request, some 3 µs each


class Lacking(NamedTuple):
    """A block to read: its hash and its parent's, its group, and the tokens of the prompt up to its end.

    generation: what was on the disk then, before everything was forgotten.
    """

    node_hash: Hash
    parent: Hash
    group: int
    end: int
    generation: bytes


class DiskHit(NamedTuple):
    """The tokens from `start`, which device and host have, to `end`, for which blocks are lacking.

    asked: tokens that were looked for. held: blocks of the beginning that are in the host's memory alone, with their
    groups.
    """

    start: int
    end: int
    asked: int
    lacking: list[Lacking]
    held: list[tuple[int, int]]


class DiskHits:
    """The search of a prompt's blocks on the disk.

    sizes: bytes of each group's blocks. disk_has: asked for a hash, a group and a salt.

    generation: the first part of all names on the disk.
    """

    def __init__(
        self,
        specs: PySequence[StateSpec],
        names: Names,
        search: PrefixSearch,
        index: PrefixIndex,
        sizes: PySequence[int],
    ) -> None:
        self.index, self.block_size, self.generation = index, names.block_size, b""
        self.disk_has: Callable[[Hash, int, str], bool] = lambda node_hash, group, salt: False
        self._specs, self._names, self._search, self._sizes = specs, names, search, sizes
        self._groups = [g for g, size in enumerate(sizes) if size]

    def find(self, seq: Sequence, most_bytes: int) -> DiskHit | None:
        """Return the longest hit whose lacking blocks have at most so many bytes, or None if the cache is not for this
        sequence."""
        size = self.block_size
        if not self._names.shares(seq) or any(spec.encoded for spec in self._specs):
            return None
        hashes = self._names.skippable(seq)
        start = self._search.search(seq, below=True).best.tokens(size) if self.index else 0
        asked = len(hashes) * size - start
        if asked <= 0:
            return None
        looks = _Looks(self, hashes, seq.request.salt_owner)
        most = len(hashes)
        while (n := self._longest(looks, start // size, most)) > start // size:
            needed = [(g, column) for g in self._groups for column in range(self._first(g, n), n)]
            absent = sorted((column, g) for g, column in needed if not looks.is_here(g, column))
            total = sum(self._sizes[g] for _, g in absent)
            if total <= most_bytes:
                parents = [self._names.root(seq), *hashes]
                lacking = [Lacking(hashes[c], parents[c], g, (c + 1) * size, self.generation) for c, g in absent]
                return DiskHit(start, n * size, asked, lacking, looks.held(needed))
            most = min(n - 1, n * most_bytes // total)
        return DiskHit(start, start, asked, [], [])

    def _first(self, group: int, n: int) -> int:
        """Return the first block that the group needs to go on behind n of them."""
        return self._specs[group].first_needed(n * self.block_size) // self.block_size

    def _longest(self, looks: _Looks, start: int, most: int) -> int:
        """Return the most blocks up to `most` at which every group could go on; `start` if that is no gain."""
        for g in self._groups:
            if self._specs[g].span is None:
                most = next((n for n in range(most) if not looks.is_there(g, n)), most)
        others = [g for g in self._groups if self._specs[g].span is not None]
        for n in range(most, start, -1):
            if looks.count > MOST_LOOKS:
                break
            if all(looks.is_there(g, column) for g in others for column in reversed(range(self._first(g, n), n))):
                return n
        return start


class _Looks:
    """The looks at a prompt's blocks, each of which is looked for once."""

    def __init__(self, hits: DiskHits, hashes: PySequence[Hash], salt: str) -> None:
        self._hits, self._hashes, self._salt = hits, hashes, salt
        self._known: dict[tuple[int, int], bool] = {}
        self.count = 0

    def is_here(self, group: int, column: int) -> bool:
        node = self._hits.index.get(self._hashes[column])
        return node is not None and (node.blocks[group] is not None or node.below[group] is not None)

    def is_there(self, group: int, column: int) -> bool:
        """Return True if the block is here or on the disk."""
        key = group, column
        if key not in self._known:
            self._known[key] = self.is_here(group, column)
            if not self._known[key] and self.count <= 2 * MOST_LOOKS:
                self.count += 1
                self._known[key] = self._hits.disk_has(self._hashes[column], group, self._salt)
        return self._known[key]

    def held(self, needed: PySequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those of the needed blocks that are in the host's memory alone."""
        found = list[tuple[int, int]]()
        for g, column in needed:
            node = self._hits.index.get(self._hashes[column])
            if node is not None and node.blocks[g] is None and (below := node.below[g]) is not None:
                found.append((g, below))
        return found
