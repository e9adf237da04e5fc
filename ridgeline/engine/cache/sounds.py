"""The keys and values that encoders made of sounds, by what the sounds are called: a second request on the same sound
attends to the same blocks, and no encoder runs for it."""

from __future__ import annotations

from collections.abc import Sequence as PySequence

from ridgeline.core.specs.state import StateSpec
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.sequence import Sequence

Name = tuple[str, tuple[str, ...], bytes]


class Sounds:
    """The sounds that are held, each with its blocks in each group. Blocks that the pool gives up leave by `evicted`.

    enabled: sounds are shared. found, asked: requests that found their sound, and all that have one.
    """

    def __init__(self, specs: PySequence[StateSpec], pool: BlockPool, *, enabled: bool) -> None:
        self._groups = [g for g, spec in enumerate(specs) if spec.encoded]
        self._pool, self._enabled = pool, enabled
        self._blocks: dict[Name, list[list[int]]] = {}
        self._names: dict[tuple[int, int], Name] = {}
        self.found = self.asked = 0

    def find(self, seq: Sequence) -> dict[int, list[int]]:
        """Return the blocks of each group that hold what the encoder makes of a request's sound, if all are there."""
        name = self._name(seq)
        held = None if name is None else self._blocks.get(name)
        return {} if held is None else {g: list(blocks) for g, blocks in zip(self._groups, held, strict=True)}

    def keep(self, seq: Sequence) -> None:
        """Let others find the blocks that the plan in the making writes."""
        name = self._name(seq)
        if name is None or name in self._blocks:
            return
        self._blocks[name] = [list(seq.blocks[g]) for g in self._groups]
        for g in self._groups:
            for block in seq.blocks[g]:
                self._pool.mark_cached(g, block)
                self._names[g, block] = name

    def evicted(self, group: int, block: int) -> bool:
        """The pool gives a block up. Return True if it was one of a sound's, whose others are of no use then."""
        name = self._names.pop((group, block), None)
        if name is None:
            return False
        self._blocks.pop(name, None)
        return True

    def forget(self, *seqs: Sequence) -> None:
        """Let no request find what some requests read, or what any did if none is given."""
        names = [name for seq in seqs if (name := self._name(seq)) is not None] if seqs else list(self._blocks)
        for name in names:
            for g, blocks in zip(self._groups, self._blocks.pop(name, ()), strict=False):
                for block in blocks:
                    if self._names.pop((g, block), None) is not None:
                        self._pool.forget(g, block)

    def _name(self, seq: Sequence) -> Name | None:
        request = seq.request
        if not self._enabled or seq.distrusted or request.sound is None or not request.sound.key:
            return None
        return request.cache_salt, request.prefix_keys, request.sound.key
