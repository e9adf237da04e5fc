"""The search for a sequence's beginning in the cache.

A token at position p needs the state from `first_needed(p)` on. So a sequence can resume at n blocks, if every group
has the blocks from `first_needed(n * block_size)` to n. A hit may include the first tokens of one more block, which
need not be full: one of the index's ends.
"""

from __future__ import annotations

from collections.abc import Sequence as PySequence
from typing import NamedTuple

from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.core.specs.state import StateSpec
from ridgeline.engine.cache.names import Names
from ridgeline.engine.cache.prefix import Hash, Node, PrefixIndex
from ridgeline.engine.sequence import Sequence

BELOW = -1  # in a table: the block must come from the host's memory


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
    """The longest hit of whole blocks, and the longest of all. by_group: the tokens after which each group by itself
    could resume, at most those of full attention's blocks. here: the tokens of a hit without blocks from the host's
    memory, if this one has any."""

    whole: Hit
    best: Hit
    by_group: tuple[int, ...]
    here: int | None = None


NOTHING = Found(Hit(), Hit(), (0,))  # of one group


class PrefixSearch:
    def __init__(self, specs: PySequence[StateSpec], names: Names, index: PrefixIndex) -> None:
        self._specs, self._names, self._index, self._block_size = specs, names, index, names.block_size
        self._exact = {g for g, spec in enumerate(specs) if spec.exact}

    def search(self, seq: Sequence, *, below: bool = False) -> Found:
        """Return the most tokens at which every group can resume: of whole blocks, and with a block to copy. below:
        with blocks in the host's memory too.

        That block follows whole ones of which all groups have what they need. One that is exact has all that its group
        needs, so there it may follow any number of them.
        """
        if not self._names.shares(seq):
            return Found(Hit(), Hit(), (0,) * len(self._specs))
        size, hashes = self._block_size, self._names.skippable(seq)
        bounded = int(self._specs[0].span is None)  # full attention ends every hit where its own run from 0 ends
        nodes: list[Node | None] = []
        for node_hash in hashes:
            node = self._index.get(node_hash)
            if bounded and (node is None or (node.blocks[0] is None and not (below and node.below[0] is not None))):
                break
            nodes.append(node)
        if bounded and len(self._specs) == 1:
            if not nodes and not self._index.has_ends(self._names.root(seq)):
                return NOTHING
            whole, alone, ends = Hit(len(nodes)), [len(nodes) * size], [len(nodes)]
        else:
            whole, alone, ends = self._common(nodes, bounded, below)
        best = whole
        for n in reversed(ends):  # an end behind fewer blocks than another hit has is the shorter one
            if n < whole.blocks:
                break
            hit = self._with_end(seq, n, hashes[n - 1] if n else self._names.root(seq), below)
            if hit.end is not None:
                best = hit
                break
        return Found(whole, best, tuple(max(tokens, best.tokens(size)) for tokens in alone))

    def _common(self, nodes: PySequence[Node | None], bounded: int, below: bool) -> tuple[Hit, list[int], list[int]]:
        """Return the most whole blocks at which every group can resume, after how many tokens each could by itself, and
        behind how many blocks an end would do."""
        size, others = self._block_size, list(enumerate(self._specs))[bounded:]
        whole, ends = Hit(), []
        runs = [0] * len(self._specs)  # consecutive cached blocks of the group, ending here
        alone = [0] * len(self._specs)
        for n in range(len(nodes) + 1):
            for g, _ in others if n else ():
                node = nodes[n - 1]
                there = node is not None and (node.blocks[g] is not None or (below and node.below[g] is not None))
                runs[g] = runs[g] + 1 if there else 0
            lacking = {g for g, spec in others if runs[g] < n - spec.first_needed(n * size) // size}
            for g in range(len(alone)):
                alone[g] = alone[g] if g in lacking else n * size
            if not lacking:
                whole = Hit(n)
            if lacking <= self._exact:
                ends.append(n)
        return whole, alone, ends

    def _with_end(self, seq: Sequence, n: int, parent: Hash, below: bool) -> Hit:
        """Return the hit of n blocks, lengthened by an end after `parent` that agrees with what follows."""
        if not self._index.has_ends(parent):
            return Hit()
        tokens = tuple(seq.identity(n * self._block_size, min(seq.may_skip, (n + 1) * self._block_size - 1)))
        count, end = self._index.nearest_end(parent, tokens) if tokens else (0, None)
        node = self._index.get(end) if count and end is not None else None
        if node is None or (self._exact and count < len(node.end or ())) or (None in node.blocks and not below):
            return Hit()
        return Hit(n, node, count)

    def bytes_below(self, seq: Sequence, hit: Hit, block_bytes: PySequence[int]) -> int:
        """Return the bytes of a hit's blocks that are in the host's memory alone. block_bytes: of each group's."""
        blocks = sum(block_bytes[g] * self.blocks(seq, g, hit).count(BELOW) for g in range(len(self._specs)))
        if hit.end is None:
            return blocks
        return blocks + sum(size for size, block in zip(block_bytes, hit.end.blocks, strict=True) if block is None)

    def blocks(self, seq: Sequence, group: int, hit: Hit) -> list[int]:
        """Return the group's whole blocks of a hit, for a table; BELOW for those that are in the host's memory
        alone."""
        first = self._specs[group].first_needed(hit.blocks * self._block_size) // self._block_size
        if hit.end is not None and group in self._exact:
            first = hit.blocks
        blocks = [NULL_BLOCK] * min(first, hit.blocks)
        for node_hash in seq.hashes[first : hit.blocks]:
            node = self._index.get(node_hash)
            assert node is not None
            block = node.blocks[group]
            assert block is not None or node.below[group] is not None
            blocks.append(BELOW if block is None else block)
        return blocks
