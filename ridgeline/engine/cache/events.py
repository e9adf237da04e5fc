"""The changes of what can be found in a cache, in order, for those outside the engine who follow them.

A block is known by its group and its hash. Blocks of a sequence that follow each other come as one `Stored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ridgeline.engine.cache.prefix import HASH_BYTES, Hash
from ridgeline.engine.sequence import Sequence as Request


class Stored:
    """Blocks that can be found from now on, each after the one before.

    parent: the block before the first one; None: it begins a prompt.
    tokens: those of all blocks together. size: tokens of a block.
    extra: for each block what its hash depends on besides: the salt and further keys of a prompt in its first block,
        and the keys of vectors in the place of tokens, as hexadecimal digits.
    """

    __slots__ = ("extra", "group", "hashes", "parent", "size", "tokens")

    def __init__(self, group: int, parent: Hash | None, size: int) -> None:
        self.group, self.parent, self.size = group, parent, size
        self.hashes, self.tokens = list[Hash](), list[int]()
        self.extra = list[tuple[str, ...]]()


class Removed:
    """Blocks of a group that can no longer be found."""

    __slots__ = ("group", "hashes")

    def __init__(self, group: int) -> None:
        self.group, self.hashes = group, list[Hash]()


class Cleared:
    """Nothing can be found any more."""

    __slots__ = ()


Change = Stored | Removed | Cleared


class BlockSink(Protocol):
    """Takes the changes of a step. It must return at once."""

    def take(self, changes: list[Change]) -> None: ...
    def close(self) -> None: ...


class Changes:
    """The changes since they were last taken."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._all = list[Change]()

    def stored(self, seq: Request, blocks: Sequence[int], n: int, names: tuple[Hash, Hash], length: int) -> None:
        """Note block n of a sequence, of these groups, with `length` tokens. names: its hash, and the one before."""
        start = n * self._block_size
        tokens, extra = seq.tokens[start : start + length], _extra(seq, start, start + length)
        for group in blocks:
            last = self._all[-1] if self._all else None
            follows = isinstance(last, Stored) and last.group == group and last.hashes[-1] == names[1]
            if follows and isinstance(last, Stored) and last.size == length == self._block_size:
                each = last
            else:
                each = Stored(group, names[1] if n else None, length)
                self._all.append(each)
            each.hashes.append(names[0])
            each.tokens += tokens
            each.extra.append(extra)

    def removed(self, group: int, node_hash: Hash) -> None:
        """Note a block that left. Temporary hashes of preempted sequences were never told of."""
        if len(node_hash) != HASH_BYTES:
            return
        last = self._all[-1] if self._all else None
        if not isinstance(last, Removed) or last.group != group:
            last = Removed(group)
            self._all.append(last)
        last.hashes.append(node_hash)

    def cleared(self) -> None:
        """Note that all blocks left, whatever was noted before."""
        self._all = [Cleared()]

    def take(self) -> list[Change]:
        """Return the changes, and begin anew."""
        taken, self._all = self._all, []
        return taken


def _extra(seq: Request, start: int, end: int) -> tuple[str, ...]:
    found = [key for key in (seq.request.cache_salt, *seq.request.prefix_keys) if key] if not start else []
    found += [each.key.hex() for each in seq.inserted if each.start < end and start < each.end]
    return tuple(found)
