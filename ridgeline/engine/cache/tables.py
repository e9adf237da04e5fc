"""Growth: the block tables of running sequences get blocks as these advance, and release those that are no longer
needed.

A group whose blocks are exact needs one block for a sequence, which moves along with it: the entries in which a step
may end get the block in which the step before ended. A step that verifies drafts may end in any entry up to its last,
and so may a piece of a chunk that a pipeline cuts, so all of these entries have a block, mostly the same one. If
another request holds that block, or the cache keeps its state, the sequence continues in a new block.
"""

from __future__ import annotations

from collections.abc import Sequence as PySequence

from ridgeline.core.plan.step import SetBlocks
from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.core.specs.state import StateSpec
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
        self._plain = len(specs) == 1 and not specs[0].exact and not specs[0].encoded
        self._forgetful = [(g, spec) for g, spec in enumerate(specs) if spec.span is not None]

    @property
    def windowed(self) -> bool:
        """Return True if some group remembers the last tokens only."""
        return bool(self._forgetful)

    def let_go(self, seq: Sequence, kv_len: int, last_plan: int) -> list[SetBlocks]:
        """Release the blocks no token at kv_len or later needs; returns the changes to the slot's block tables."""
        changes: list[SetBlocks] = []
        for g, spec in self._forgetful:
            blocks, start = seq.blocks[g], seq.passed[g]
            end = seq.passed[g] = max(start, min(spec.first_needed(kv_len) // self._block_size, len(blocks)))
            held = [n for n in range(start, end) if blocks[n] != NULL_BLOCK]
            for n in held:
                self._pool.release(g, blocks[n], last_plan)
            if held:
                nothing = [NULL_BLOCK] * (held[-1] + 1 - held[0])
                blocks[held[0] : held[-1] + 1] = nothing
                changes.append(SetBlocks(seq.slot, g, held[0], tuple(nothing)))
        return changes

    def extend(self, seq: Sequence, last: int, new_len: int) -> list[SetBlocks] | None:
        """Make room for a step that ends at position `last` or behind it, and for positions below new_len. Returns the
        changes, or None (nothing done) if blocks are short."""
        size, end, encoded = self._block_size, -(-new_len // self._block_size), seq.encoded
        if self._plain:
            return self._lengthen(seq, end)
        wanted = [
            list(range(len(blocks), -(-encoded // size) if spec.encoded else end))
            for spec, blocks in zip(self._specs, seq.blocks, strict=True)
        ]
        for g in self._exact:
            known = len(seq.blocks[g])
            wanted[g] = [n for n in range(last // size, end) if n >= known or seq.blocks[g][n] == NULL_BLOCK]
        states = {g: self._state(seq, g) for g in self._exact if wanted[g]}
        counts = [int(states[g] == NULL_BLOCK) if g in states else len(places) for g, places in enumerate(wanted)]
        taken = self._pool.take(counts, fill=self._names.shares(seq))
        if taken is None:
            if not any(self._stop_keeping(seq, g) for g in self._exact):
                return None
            return self.extend(seq, last, new_len)
        changes: list[SetBlocks] = []
        for g, (blocks, places, new) in enumerate(zip(seq.blocks, wanted, taken, strict=True)):
            if not places:
                continue
            if g in states:
                new = self._alike(g, len(places), states[g], new)
            first = min(places[0], len(blocks))
            blocks += [NULL_BLOCK] * (places[-1] + 1 - len(blocks))
            for n, block in zip(places, new, strict=True):
                blocks[n] = block
            changes.append(SetBlocks(seq.slot, g, first, tuple(blocks[first : places[-1] + 1])))
        return changes

    def _lengthen(self, seq: Sequence, end: int) -> list[SetBlocks] | None:
        """Do as `extend`, where the only group's table grows up to `end`."""
        blocks = seq.blocks[0]
        if (first := len(blocks)) >= end:
            return []
        taken = self._pool.take([end - first], fill=self._names.shares(seq))
        if taken is None:
            return None
        blocks += taken[0]
        return [SetBlocks(seq.slot, 0, first, tuple(taken[0]))]

    def _alike(self, group: int, count: int, held: int, new: list[int]) -> list[int]:
        """Return one block for so many entries of an exact group, each of which holds it: the one that the sequence
        holds, or a new one that was just taken."""
        block = held or new[0]
        for _ in range(count - len(new)):
            self._pool.share(group, block)
        return [block] * count

    def _state(self, seq: Sequence, group: int) -> int:
        """Return the block of an exact group in which the sequence may go on: the one that holds the state so far, if
        no other sequence needs that; NULL_BLOCK if there is none."""
        held = self._held(seq, group)
        if held == NULL_BLOCK or self._pool.is_cached(group, held) or not self._is_own(seq, group, held):
            return NULL_BLOCK
        return held

    def _held(self, seq: Sequence, group: int) -> int:
        """Return the block of an exact group that holds the sequence's state, or will: that of the last entry."""
        return seq.blocks[group][-1] if seq.blocks[group] else NULL_BLOCK

    def _is_own(self, seq: Sequence, group: int, block: int) -> bool:
        blocks, passed = seq.blocks[group], seq.passed[group]
        return self._pool.refs(group, block) == blocks[passed:].count(block)

    def _stop_keeping(self, seq: Sequence, group: int) -> bool:
        """Give up the checkpoint in the block that holds the sequence's state, so that it can go on there. False if
        there is none, or others use it."""
        block = self._held(seq, group)
        node_hash = self._published.index.hash_of(group, block)
        if node_hash is None or not self._is_own(seq, group, block):
            return False
        self._published.forget(group, block)
        return True

    def add_block(self, seqs: PySequence[Sequence]) -> list[SetBlocks] | None:
        """Add a block per group to each of `seqs`, which have filled theirs, and return the changes. Return None, with
        nothing done, if there are too few blocks for all. Some leave their state at that point in the old block."""
        if self._exact:
            return self._add_states(seqs)
        taken = self._pool.take([len(seqs) * (not spec.encoded) for spec in self._specs], fill=self._all_share(seqs))
        if taken is None:
            return None
        changes: list[SetBlocks] = []
        for g, new in enumerate(taken):
            for seq, block in zip(seqs, new, strict=False):  # none for an encoder's group
                blocks = seq.blocks[g]
                changes.append(SetBlocks(seq.slot, g, len(blocks), (block,)))
                blocks.append(block)
        return changes

    def _all_share(self, seqs: PySequence[Sequence]) -> bool:
        return all(self._names.shares(seq) for seq in seqs)

    def _add_states(self, seqs: PySequence[Sequence]) -> list[SetBlocks] | None:
        """Do as `add_block`, where some groups' blocks are exact."""
        filled = [len(seq.blocks[0]) * self._block_size for seq in seqs]
        keeps = [self._leaves(seq, tokens) for seq, tokens in zip(seqs, filled, strict=True)]
        growing = [g for g, spec in enumerate(self._specs) if not spec.encoded]
        states = [
            [
                NULL_BLOCK if keep or g not in self._exact else self._state(seq, g)
                for seq, keep in zip(seqs, keeps, strict=True)
            ]
            for g in growing
        ]
        counts = [0] * len(self._specs)
        for g, states_of in zip(growing, states, strict=True):
            counts[g] = states_of.count(NULL_BLOCK)
        taken = self._pool.take(counts, fill=self._all_share(seqs))
        if taken is None:
            return None
        changes: list[SetBlocks] = []
        for g, states_of in zip(growing, states, strict=True):
            new = iter(taken[g])
            for seq, state in zip(seqs, states_of, strict=True):
                blocks, block = seq.blocks[g], next(new) if state == NULL_BLOCK else state
                if state != NULL_BLOCK:
                    self._pool.share(g, block)
                changes.append(SetBlocks(seq.slot, g, len(blocks), (block,)))
                blocks.append(block)
        for seq, tokens, keep in zip(seqs, filled, keeps, strict=True):
            seq.keeps_at = tokens if keep else seq.keeps_at
        return changes

    def goes_on(self, seq: Sequence, boundary: int) -> bool:
        """Return True if entries behind a boundary point to the block in which the sequence's state there will lie."""
        n = boundary // self._block_size
        return any(seq.blocks[g][n - 1] in seq.blocks[g][n:] for g in self._exact)

    def part(self, seq: Sequence, boundary: int, taken: list[list[int]] | None) -> list[SetBlocks]:
        """Let the entries behind a boundary point to other blocks, if these were taken: so the state there stays."""
        n, changes = boundary // self._block_size, list[SetBlocks]()
        for g, new in enumerate(taken or ()):
            blocks = seq.blocks[g]
            for block in new:
                for _ in blocks[n:-1]:
                    self._pool.share(g, block)
                for old in blocks[n:]:
                    self._pool.release(g, old, 0)
                blocks[n:] = [block] * (len(blocks) - n)
                changes.append(SetBlocks(seq.slot, g, n, tuple(blocks[n:])))
        return changes

    def _leaves(self, seq: Sequence, tokens: int) -> bool:
        reached = max(seq.reached, seq.keeps_at)
        return bool(self._exact) and self._names.shares(seq) and self._checkpoints.pays(tokens, reached)
