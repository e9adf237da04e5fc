"""A follower of a cache's changes, who knows nothing else of it."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.engine.cache.events import Change, Cleared, Removed, Stored
from ridgeline.engine.cache.prefix import Hash, PrefixIndex, chain_hash, root_hash


class Follower:
    """found: (group, hash) of all blocks that can be found. Each hash is computed anew from the tokens that were told,
    so a wrong token, parent or salt is an error here."""

    def __init__(self) -> None:
        self.found = set[tuple[int, Hash]]()

    def follow(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Stored():
                    self._store(change)
                case Removed():
                    removed = {(change.group, each) for each in change.hashes}
                    assert removed <= self.found
                    assert len(removed) == len(change.hashes)
                    self.found -= removed
                case Cleared():
                    self.found.clear()

    def _store(self, stored: Stored) -> None:
        assert len(stored.tokens) == stored.size * len(stored.hashes) > 0
        assert len(stored.extra) == len(stored.hashes)
        parent = root_hash(*(stored.extra[0] or ("",))) if stored.parent is None else stored.parent
        for n, each in enumerate(stored.hashes):
            assert each == (parent := chain_hash(parent, stored.tokens[n * stored.size : (n + 1) * stored.size]))
            assert (stored.group, each) not in self.found
            self.found.add((stored.group, each))


def findable(index: PrefixIndex) -> set[tuple[int, Hash]]:
    """What requests can find. Those of preempted sequences have temporary hashes until their tokens are known."""
    return {(g, node_hash) for g, _, node_hash in index.published() if not node_hash.startswith(b"parted")}
