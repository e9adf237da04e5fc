"""The keys and values that encoders made of sounds, or towers of pictures, by what these are called: a second request
on the same sound attends to the same blocks, and no encoder runs for it.

Of pictures a run has a name, which follow each other directly in a prompt, so a conversation that goes on with another
picture finds those that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as PySequence
from itertools import groupby
from typing import NamedTuple

from ridgeline.core.specs.state import StateSpec
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.sequence import Sequence

Name = tuple[str, tuple[str, ...], bytes]


class NamedPart(NamedTuple):
    """A part of an encoder input that is shared under a name: its first token, and its end."""

    name: Name
    start: int
    end: int


class Sounds:
    """The sounds that are held, each with its blocks in each group. Blocks that the pool gives up leave by `evicted`.

    enabled: sounds are shared. found, asked: requests that found their sound, and all that have one.
    """

    def __init__(self, specs: PySequence[StateSpec], pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self._groups = [g for g, spec in enumerate(specs) if spec.encoded]
        self._pool, self._size, self._enabled = pool, block_size, enabled
        self._blocks: dict[Name, list[list[int]]] = {}
        self._names: dict[tuple[int, int], Name] = {}
        self.found = self.asked = 0

    def find(self, seq: Sequence) -> tuple[int, dict[int, list[int]]]:
        """Return the number of tokens of a request's encoder input that are there, and the blocks of each group that
        hold what the encoder made of them: whole parts, the first ones."""
        end, found = 0, {g: list[int]() for g in self._groups}
        for part in self._parts(seq):
            held = self._blocks.get(part.name)
            if held is None:
                break
            end = part.end
            for g, blocks in zip(self._groups, held, strict=True):
                found[g] += blocks
        return end, found if end else {}

    def keep(self, seq: Sequence) -> None:
        """Let others find the blocks that the plan in the making writes."""
        for part in self._parts(seq):
            if part.name in self._blocks:
                continue
            first, end = part.start // self._size, -(-part.end // self._size)
            self._blocks[part.name] = [seq.blocks[g][first:end] for g in self._groups]
            for g, blocks in zip(self._groups, self._blocks[part.name], strict=True):
                for block in blocks:
                    self._pool.mark_cached(g, block)
                    self._names[g, block] = part.name

    def evicted(self, group: int, blocks: PySequence[int]) -> PySequence[int]:
        """The pool gives blocks up. Return those that were no sound's. The others of a sound are of no use then."""
        if not self._names:
            return blocks
        left = list[int]()
        for block in blocks:
            name = self._names.pop((group, block), None)
            if name is None:
                left.append(block)
            else:
                self._blocks.pop(name, None)
        return left

    def forget(self, *seqs: Sequence) -> None:
        """Let no request find what some requests read, or what any did if none is given."""
        names = [part.name for seq in seqs for part in self._parts(seq)] if seqs else list(self._blocks)
        for name in names:
            for g, blocks in zip(self._groups, self._blocks.pop(name, ()), strict=False):
                for block in blocks:
                    if self._names.pop((g, block), None) is not None:
                        self._pool.forget(g, block)

    def _parts(self, seq: Sequence) -> Iterator[NamedPart]:
        """Yield the parts of a request's encoder input that others may share."""
        request = seq.request
        whose = request.cache_salt, request.prefix_keys
        if not self._enabled or seq.distrusted:
            return
        if request.sound is not None and request.sound.key:
            yield NamedPart((*whose, request.sound.key), 0, seq.encoded)
        seen = zip(seq.crossed, (each for each in request.inserted if each.across), strict=True)
        for _, run in groupby(seen, key=lambda both: both[0].run):
            pictures = list(run)
            if all(each.key for _, each in pictures):
                name = b"".join(each.key for _, each in pictures)
                yield NamedPart((*whose, name), pictures[0][0].start, pictures[-1][0].end)
