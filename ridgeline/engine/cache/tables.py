"""Growth: the block tables of running sequences get blocks as they go on, and let go of those behind them.

A group whose blocks are exact needs one block for a sequence, which goes along: each step ends in the last entry of the
table, and that entry gets the block in which the step begins. Where others hold it, or the cache keeps what it holds,
the step goes on in another block.
"""

from __future__ import annotations

from collections.abc import Sequence as PySequence

from ridgeline.core.cache_layout import NULL_BLOCK
from ridgeline.core.plan import SetBlocks
from ridgeline.core.state_spec import StateSpec
from ridgeline.engine.cache.checkpoints import Checkpoints
from ridgeline.engine.cache.names import Names
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.cache.published import Published
from ridgeline.engine.sequence import Sequence


class Tables:
    def __init__(
        self,
        specs: PySequence[StateSpec],
        names: Names,
        pool: BlockPool,
        published: Published,
        checkpoints: Checkpoints,
    ) -> None:
        self._specs, self._names, self._pool, self._published = specs, names, pool, published
        self._block_size, self._checkpoints, self._exact = names.block_size, checkpoints, checkpoints.groups
        self._forgetful = [(g, spec) for g, spec in enumerate(specs) if spec.span is not None]

    @property
    def windowed(self) -> bool:
        """Return whether some group remembers the last tokens only."""
        return bool(self._forgetful)

    def let_go(self, seq: Sequence, kv_len: int, last_plan: int) -> list[SetBlocks]:
        """Release the blocks no token at kv_len or later needs; returns the changes to the slot's block tables."""
        changes: list[SetBlocks] = []
        for g, spec in self._forgetful:
            blocks, start = seq.blocks[g], seq.passed[g]
            end = seq.passed[g] = max(start, min(spec.first_needed(kv_len) // self._block_size, len(blocks)))
            for n in range(start, end):
                if blocks[n] != NULL_BLOCK:
                    self._pool.release(g, blocks[n], last_plan)
                    blocks[n] = NULL_BLOCK
                    changes.append(SetBlocks(seq.slot, g, n, (NULL_BLOCK,)))
        return changes

    def extend(self, seq: Sequence, start: int, new_len: int) -> list[SetBlocks] | None:
        """Make room for positions from `start`, where the sequence goes on, to below new_len. Returns the changes, or
        None (nothing done) if blocks are short."""
        end = -(-new_len // self._block_size)
        states = {g: self._state(seq, g, start, end) for g in self._exact}
        wanted = [range(len(blocks), end) for blocks in seq.blocks]
        for g, block in states.items():
            wanted[g] = range(end - 1, end - (block != NULL_BLOCK))
        taken = self._pool.take([len(places) for places in wanted], fill=self._names.shares(seq))
        if taken is None:
            if not any(self._stop_keeping(seq, g, start) for g in self._exact):
                return None
            return self.extend(seq, start, new_len)
        changes: list[SetBlocks] = []
        for g, (blocks, new) in enumerate(zip(seq.blocks, taken, strict=True)):
            first, kept = min(len(blocks), end - 1), states.get(g, NULL_BLOCK)
            if kept != NULL_BLOCK and len(blocks) >= end and blocks[end - 1] == kept:
                continue
            if kept != NULL_BLOCK:
                self._pool.share(g, kept)
                new = [kept]
            if new:
                blocks += [NULL_BLOCK] * (end - len(blocks))
                blocks[end - len(new) : end] = new
                changes.append(SetBlocks(seq.slot, g, first, tuple(blocks[first:end])))
        return changes

    def _state(self, seq: Sequence, group: int, start: int, end: int) -> int:
        """Return the block of an exact group to which a step that begins at `start` and ends in block `end` - 1 writes:
        that of the table already, or the one that holds the state so far, if nobody else needs that; NULL_BLOCK if
        there is none."""
        blocks = seq.blocks[group]
        if end <= len(blocks) and blocks[end - 1] != NULL_BLOCK:
            return blocks[end - 1]
        held = blocks[(start - 1) // self._block_size] if start else NULL_BLOCK
        if held == NULL_BLOCK or self._pool.is_cached(group, held) or not self._is_own(seq, group, held):
            return NULL_BLOCK
        return held

    def _is_own(self, seq: Sequence, group: int, block: int) -> bool:
        blocks, passed = seq.blocks[group], seq.passed[group]
        return self._pool.refs(group, block) == blocks[passed:].count(block)

    def _stop_keeping(self, seq: Sequence, group: int, start: int) -> bool:
        """Give up the checkpoint in the block that holds the sequence's state, so that it can go on there. False if
        there is none, or others use it."""
        block = seq.blocks[group][(start - 1) // self._block_size] if start else NULL_BLOCK
        node_hash = self._published.index.hash_of(group, block)
        if node_hash is None or not self._is_own(seq, group, block):
            return False
        self._published.forget(group, block)
        return True

    def add_block(self, seqs: PySequence[Sequence]) -> list[SetBlocks] | None:
        """One more block per group for each of `seqs`, which have filled theirs, or None (nothing done) if blocks are
        short for all of them. Some leave the state there that they have by then."""
        filled = [len(seq.blocks[0]) * self._block_size for seq in seqs]
        keeps = [self._leaves(seq, tokens) for seq, tokens in zip(seqs, filled, strict=True)]
        ends = [tokens // self._block_size + 1 for tokens in filled]
        states = [
            [
                NULL_BLOCK if keep or g not in self._exact else self._state(seq, g, tokens, end)
                for seq, tokens, end, keep in zip(seqs, filled, ends, keeps, strict=True)
            ]
            for g in range(len(self._specs))
        ]
        shares = all(self._names.shares(seq) for seq in seqs)
        taken = self._pool.take([states_of.count(NULL_BLOCK) for states_of in states], fill=shares)
        if taken is None:
            return None
        changes: list[SetBlocks] = []
        for g, (states_of, new) in enumerate(zip(states, map(iter, taken), strict=True)):
            for seq, state in zip(seqs, states_of, strict=True):
                blocks, block = seq.blocks[g], next(new) if state == NULL_BLOCK else state
                if state != NULL_BLOCK:
                    self._pool.share(g, block)
                changes.append(SetBlocks(seq.slot, g, len(blocks), (block,)))
                blocks.append(block)
        for seq, tokens, keep in zip(seqs, filled, keeps, strict=True):
            seq.keeps_at = tokens if keep else seq.keeps_at
        return changes

    def _leaves(self, seq: Sequence, tokens: int) -> bool:
        reached = max(seq.reached, seq.keeps_at)
        return bool(self._exact) and self._names.shares(seq) and self._checkpoints.pays(tokens, reached)
