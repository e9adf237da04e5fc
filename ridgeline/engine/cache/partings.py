"""Preempted sequences: their state is kept if that saves enough tokens.

When a sequence is preempted, plans are in flight whose tokens are not known yet. So its last blocks are kept under
temporary hashes, which no request can ask for, and get the hashes of their content when the tokens are known. No
request holds them, so they can be evicted. Content that no preempted request will use again is evicted first.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from ridgeline.engine.cache.checkpoints import Checkpoint
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.cache.prefix import Hash, PrefixIndex
from ridgeline.engine.sequence import Sequence, Status


class Column(NamedTuple):
    """Block n of the sequence: its temporary hash, and the blocks kept under it, each with its group."""

    n: int
    name: Hash
    blocks: tuple[tuple[int, int], ...]


class Parted(NamedTuple):
    """A preempted sequence. kv_len: the tokens of its state once `last_plan` has run, the newest that runs it; at
    most so many, if rows verified drafts. since: the first of its blocks behind which the state would lie where it is
    kept."""

    seq: Sequence
    kv_len: int
    last_plan: int
    checkpoint: Checkpoint
    columns: tuple[Column, ...]
    since: int

    @property
    def length(self) -> int:
        """The tokens of its state, now that all of them are known that it emitted. Of one that has ended since they are
        not known if they are fewer than they could be."""
        known = len(self.seq.tokens) - 1
        return self.kv_len if self.seq.leader.status is Status.FINISHED else min(self.kv_len, known)


class Partings:
    """parted: those whose tokens are not all known."""

    def __init__(self, index: PrefixIndex, block_size: int, exact: tuple[int, ...]) -> None:
        self._index, self._block_size, self._exact = index, block_size, exact
        self._numbers = count(1)
        self.parted: list[Parted] = []

    def begin(self, pool: BlockPool, seq: Sequence, kv_len: int, parent: Hash, last_plan: int) -> Parted | None:
        """Keep what a sequence has not published, which its blocks hold up to kv_len. parent: the hash of what it has.
        None: it has let go of some of that."""
        last = (kv_len - 1) // self._block_size
        if not all(blocks[last] for blocks in seq.blocks):
            return None
        columns = []
        for n in range(min(seq.published, last), last + 1):
            groups = [g for g in range(len(seq.blocks)) if g not in self._exact or n == last]
            own = tuple((g, seq.blocks[g][n]) for g in groups if seq.blocks[g][n])
            own = tuple((g, block) for g, block in own if self._index.hash_of(g, block) is None)
            name = b"parted" + next(self._numbers).to_bytes(16)  # no hash is as long
            for g, block in own:
                self._index.publish(name, parent, g, block)
                pool.mark_cached(g, block)
            columns.append(Column(n, name, own))
            parent = name
        since = last
        while since and all(seq.blocks[g][since - 1] == seq.blocks[g][last] for g in self._exact):
            since -= 1
        parted = Parted(seq, kv_len, last_plan, Checkpoint(kv_len, seq.checkpoint), tuple(columns), since)
        self.parted.append(parted)
        return parted

    def due(self, retired: int | None) -> list[Parted]:
        """Take out those of which all is known once plan `retired` has run; with None all."""
        found = [parted for parted in self.parted if retired is None or parted.last_plan <= retired]
        self.parted = [parted for parted in self.parted if parted not in found] if retired is not None else []
        return found

    def kept(self, column: Column, *, exact: bool) -> list[tuple[int, int]]:
        """Return the blocks that have not been given up since, of states or of keys and values."""
        own = [(g, block) for g, block in column.blocks if (g in self._exact) is exact]
        return [(g, block) for g, block in own if self._index.hash_of(g, block) == column.name]
