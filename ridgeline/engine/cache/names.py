"""The hashes under which a sequence's blocks are found: each covers the block's tokens and all before them."""

from __future__ import annotations

from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.latent import LatentSpec
from ridgeline.core.specs.state import KVSpec
from ridgeline.engine.cache.prefix import Hash, chain_hashes, root_hash
from ridgeline.engine.sequence import Sequence


class Names:
    def __init__(self, layout: CacheLayout, *, prefix_caching: bool) -> None:
        self.block_size, self.prefix_caching = layout.block_size, prefix_caching
        self.weights = ""  # those by which the contents of blocks are computed; empty: the files'
        specs = [group.spec for group in layout.groups]
        # What other tiers know by a hash is of one format. Plain ones add nothing
        held = {str(spec.format) for spec in specs if isinstance(spec, KVSpec | LatentSpec)}
        self._formats = sorted(held - {"None"})

    def shares(self, seq: Sequence) -> bool:
        """Return True if the sequence can match blocks of others, and they can match its blocks."""
        return self.prefix_caching and not seq.private

    def root(self, seq: Sequence) -> Hash:
        """Return the hash before the sequence's first block."""
        own = [f"weights {self.weights}"] if self.weights else []
        return root_hash(seq.request.cache_salt, *seq.request.prefix_keys, *self._formats, *own)

    def parent(self, seq: Sequence, n: int) -> Hash:
        """Return the hash before the sequence's block n."""
        return self.hashes(seq, n)[n - 1] if n else self.root(seq)

    def skippable(self, seq: Sequence) -> list[Hash]:
        """Hashes of the sequence's blocks that a hit may have."""
        end = seq.may_skip // self.block_size
        return self.hashes(seq, end)[:end]

    def hashes(self, seq: Sequence, end: int) -> list[Hash]:
        """Hashes of the sequence's blocks, at least the first `end`; each computed once."""
        hashes, size = seq.hashes, self.block_size
        if (known := len(hashes)) < end:
            first, last = known * size, end * size
            tokens = seq.identity(first, last) if seq.inserted else seq.tokens[first:last]
            hashes += chain_hashes(hashes[-1] if known else self.root(seq), tokens, size)
        return hashes
