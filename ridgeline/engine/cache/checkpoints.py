"""The choice of states of constant size that are kept, so that another request can begin there.

Keys and values are there after every token; a state is there only where it was stored. So the engine chooses boundaries
of blocks at which a prompt's state is stored as it runs (a *mark*), and states that a request leaves behind. A kept
state is a *checkpoint*. Its worth is the number of tokens that must run again without it, back to the checkpoint before
it on the same chain of blocks, times the number of its uses.

Boundaries are chosen by these rules, the first one first; a row has one mark at most.

    fork      other prompts had the same blocks up to here, and no state lies so far: the next one begins here
    end       the last boundary before the last token of a prompt, for the same prompt again and for what follows it
    interval  so many tokens have run since the last checkpoint that they are worth a state's bytes
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.engine.cache.prefix import Hash

KNOWN_BLOCKS = 1 << 17  # blocks of prompts that are remembered, some 100 bytes each
KNOWN_FORKS = 1 << 10
# A checkpoint should spare this share of the tokens whose keys and values take as many bytes as it does
LEAST_SHARE = 1 / 16
# Along a prompt there is one for so many times these tokens, so that states take half of what keys and values take
INTERVAL_SHARE = 2
LEAST_INTERVAL, LONE_INTERVAL = 1024, 2048  # tokens; the second for models without keys and values


class Checkpoint:
    """A state after `length` tokens. before: the one before it on the same chain, when it was made. kept: it is still
    there."""

    __slots__ = ("before", "kept", "length", "uses")

    def __init__(self, length: int, before: Checkpoint | None) -> None:
        self.length, self.before = length, before
        self.uses, self.kept = 0, True

    @property
    def worth(self) -> float:
        """The tokens that it spares."""
        while self.before is not None and not self.before.kept:
            self.before = self.before.before
        start = 0 if self.before is None else self.before.length
        return (self.length - start) * max(1, self.uses)


class Counts(NamedTuple):
    """Checkpoints made, given up, begun from, and there now."""

    made: int = 0
    evicted: int = 0
    used: int = 0
    kept: int = 0

    def __add__(self, other: object) -> Counts:
        if not isinstance(other, Counts):
            return NotImplemented
        return Counts(*map(sum, zip(self, other, strict=True)))


class Checkpoints:
    """The checkpoints of one cache, by group and block.

    share: the part of the pages that may hold checkpoints which no request uses at the time.
    interval: tokens between checkpoints of a long prompt or output; None: by their bytes.
    """

    def __init__(self, layout: CacheLayout, *, share: float, interval: int | None) -> None:
        size, groups = layout.block_size, layout.groups
        self.groups = tuple(g for g, group in enumerate(groups) if group.spec.exact)
        self._block_size = size
        state = sum(layout.unit_bytes[g] * groups[g].depth for g in self.groups)
        token = sum(g.spec.token_bytes(layout.dtype) * g.depth for g in groups if g.spec.span is None)
        even = state / token if token else 0.0  # the tokens whose keys and values are as large as a state
        self.least = max(size, round(even * LEAST_SHARE))
        self.interval = interval or (max(LEAST_INTERVAL, round(even * INTERVAL_SHARE)) if token else LONE_INTERVAL)
        alone = len(self.groups) == len(groups)
        self.most_pages = layout.num_pages if alone else int((layout.num_pages - 1) * share)
        self._kept: list[dict[int, Checkpoint]] = [{} for _ in groups]
        self._below: list[dict[int, Checkpoint]] = [{} for _ in groups]  # in the host's memory
        self._known: OrderedDict[Hash, None] = OrderedDict()  # blocks of prompts, the one seen longest ago first
        self._forks: OrderedDict[Hash, None] = OrderedDict()
        self._counts = Counter[str]()

    @property
    def counts(self) -> Counts:
        return Counts(**self._counts, kept=max(map(len, self._kept)))

    def forget_prompts(self) -> None:
        """Forget what prompts looked like."""
        self._known.clear()
        self._forks.clear()

    def forget_all(self) -> None:
        """Forget what prompts looked like, and start counting anew."""
        self.forget_prompts()
        self._counts.clear()

    # ---- what is kept -----------------------------------------------------------------------------------------

    def add(self, blocks: Sequence[tuple[int, int]], checkpoint: Checkpoint) -> None:
        """Note that these blocks, each with its group, hold the state of `checkpoint` together."""
        self._counts["made"] += 1
        for g, block in blocks:
            self._kept[g][block] = checkpoint

    def drop(self, group: int, block: int, *, saved: bool = False) -> None:
        """Forget the checkpoint of a block whose content was evicted. saved: it is in the host's memory."""
        self._gone(self._kept[group].pop(block, None), saved)

    def _gone(self, checkpoint: Checkpoint | None, kept: bool) -> None:
        if checkpoint is not None and checkpoint.kept and not kept:
            checkpoint.kept = False
            self._counts["evicted"] += 1

    def at(self, group: int, block: int) -> Checkpoint | None:
        return self._kept[group].get(block)

    def below(self, group: int, block: int) -> Checkpoint | None:
        """Return the checkpoint of a block in the host's memory."""
        return self._below[group].get(block)

    def sink(self, group: int, block: int, checkpoint: Checkpoint) -> None:
        """Note that a block in the host's memory holds the checkpoint too."""
        self._below[group][block] = checkpoint

    def rise(self, group: int, below: int, block: int) -> None:
        """Note that a block has what one in the host's memory holds."""
        if (checkpoint := self._below[group].get(below)) is not None:
            self._kept[group][block] = checkpoint

    def drop_below(self, group: int, block: int, *, gone: bool) -> None:
        """Forget the checkpoint of a block in the host's memory. gone: it is not on the device either."""
        self._gone(self._below[group].pop(block, None), not gone)

    def use(self, checkpoint: Checkpoint) -> None:
        """Note that a request begins at it."""
        checkpoint.uses += 1
        self._counts["used"] += 1

    def page_worth(self, group: int, blocks: Sequence[int], *, below: bool = False) -> float:
        """Return the worth of the cached blocks of an idle page: the tokens that must run again without them.

        Where there are no states, all pages of keys and values are worth the same, so that they go in the order in
        which they were freed: the end of a conversation before its beginning. Beside states they are worth the tokens
        that they hold. A page holds thousands, and one that few were written to must not outlive the state behind them,
        without which no request can use them.

        below: the page is one of the host's memory.
        """
        if not self.groups:
            return 0.0
        if group not in self.groups:
            return float(len(blocks) * self._block_size)
        kept = self._below[group] if below else self._kept[group]
        found = (kept.get(block) for block in blocks)
        return sum(checkpoint.worth for checkpoint in found if checkpoint is not None)

    # ---- where to keep one ------------------------------------------------------------------------------------

    def note_prompt(self, hashes: Sequence[Hash], reached: int) -> None:
        """Remember a prompt's blocks. Where other prompts began with them, and no state was found beyond `reached`
        tokens, there is a fork."""
        seen = next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in self._known), 0)
        if seen * self._block_size - reached >= self.least:
            self.note_fork(hashes[seen - 1])
        for node_hash in hashes:
            self._known[node_hash] = None
            self._known.move_to_end(node_hash)
        _shorten(self._known, KNOWN_BLOCKS)

    def note_fork(self, node_hash: Hash) -> None:
        """The next to run up to this block leaves a checkpoint there."""
        self._forks[node_hash] = None
        self._forks.move_to_end(node_hash)
        _shorten(self._forks, KNOWN_FORKS)

    def is_fork(self, node_hash: Hash) -> bool:
        return node_hash in self._forks

    def boundary(self, hashes: Sequence[Hash], first: int, end: int, known: int, reached: int) -> int:
        """Return after how many tokens a state should be kept of a sequence that runs from block `first` to the tokens
        before `end`, and has `known` tokens; 0 for none.

        hashes: of its blocks up to `end`. reached: the tokens of the last checkpoint on its chain.
        """
        size = self._block_size
        last = end // size
        for n in range(last, first, -1):
            if hashes[n - 1] in self._forks:
                del self._forks[hashes[n - 1]]
                return n * size
        goal = (known - 1) // size  # the same prompt again must run its last token
        wanted = self.least if goal <= last else self.interval
        last = min(last, goal)
        return last * size if last > first and last * size - reached >= wanted else 0

    def pays(self, tokens: int, reached: int) -> bool:
        """Return True if a request that has so many tokens should leave a checkpoint as it goes on."""
        return tokens - reached >= self.interval


def _shorten(kept: OrderedDict[Hash, None], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
