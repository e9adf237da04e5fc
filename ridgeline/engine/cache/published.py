"""The part of the cache that can be matched: blocks are published under their hashes, and withdrawn or evicted again.

Keys and values are published block by block as they fill. A state is published where it was kept on purpose, and where
a sequence ended. Where a sequence, or its prompt, ended, the index has an *end*: a block that need not be full, and
whose first tokens another request can use. Where some group's blocks are exact (`core.specs.state`), all of its tokens
must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as PySequence

from ridgeline.engine.cache.checkpoints import Checkpoint, Checkpoints
from ridgeline.engine.cache.events import Changes
from ridgeline.engine.cache.host_tier import HostTier
from ridgeline.engine.cache.names import Names
from ridgeline.engine.cache.partings import Parted, Partings
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.cache.prefix import Hash, PrefixIndex, Tokens, chain_hash, next_hash, packer
from ridgeline.engine.sequence import Sequence


class Published:
    """index: what can be found. Blocks that the pool gives up leave it by `on_evict`. partings: preempted sequences.
    changes: where changes of the index are noted, if they are followed. tier: where evicted blocks go, if they do."""

    def __init__(self, num_groups: int, names: Names, checkpoints: Checkpoints) -> None:
        self.index = PrefixIndex(num_groups)
        self.pool: BlockPool
        self.changes: Changes | None = None
        self.tier: HostTier | None = None
        self._names, self._checkpoints, self._exact = names, checkpoints, checkpoints.groups
        self._num_groups = num_groups
        self._growing = [g for g in range(num_groups) if g not in self._exact]
        self._alone = num_groups == 1 and not self._exact
        self.partings = Partings(self.index, names.block_size, self._exact)

    def publish(self, seq: Sequence, kv_len: int) -> list[Hash]:
        """Make the sequence's full blocks below kv_len matchable, and its state at the end of one of them, if it was to
        be kept; returns the hashes that are new to the index.

        kv_len: tokens that the blocks hold the state of, once what is submitted has run.
        """
        end, first = kv_len // self._names.block_size, seq.published
        if (end <= first and not seq.keeps_at) or not self._names.shares(seq):
            return []
        fresh = list[Hash]()
        if end > first:
            hashes = self._names.hashes(seq, end)
            parent = hashes[first - 1] if first else self._names.root(seq)
            if self._alone and self.changes is None and (self.tier is None or self.tier.disk is None):
                new = zip(hashes[first:end], seq.blocks[0][first:end], strict=True)
                fresh = self.index.publish_run(new, parent, self.pool.mark_cached)
            else:
                for n in range(first, end):
                    if self._publish_block(seq, n, hashes[n], parent, [(g, seq.blocks[g][n]) for g in self._growing]):
                        fresh.append(hashes[n])
                    parent = hashes[n]
            seq.published = end
        if seq.keeps_at and seq.reached < seq.keeps_at <= kv_len:
            fresh += self.publish_state(seq, seq.keeps_at)
        return fresh

    def publish_filled(self, seqs: Iterable[Sequence], ends: Iterable[int]) -> None:
        """Do as `publish` for many sequences that have just filled a block each, most of them the one behind those that
        they published."""
        size, pack, named = self._names.block_size, packer(self._names.block_size), self._names.prefix_caching
        plain = self._alone and named and self.changes is None and (self.tier is None or self.tier.disk is None)
        index, mark = self.index, self.pool.mark_cached
        for seq, end in zip(seqs, ends, strict=True):
            hashes, n = seq.hashes, seq.published
            if not plain or n != len(hashes) or not n or end != (n + 1) * size or seq.private or seq.inserted:
                self.publish(seq, end)
                continue
            parent, block = hashes[n - 1], seq.blocks[0][n]
            node_hash = next_hash(parent, seq.tokens[end - size : end], pack)
            hashes.append(node_hash)
            seq.published = n + 1
            if block and index.publish(node_hash, parent, 0, block):  # a window may have passed it
                mark(0, block)

    def _publish_block(
        self, seq: Sequence, n: int, node_hash: Hash, parent: Hash, blocks: Iterable[tuple[int, int]], length: int = 0
    ) -> bool:
        """Make the sequence's block n matchable, which has `length` tokens (0: it is full). False where others hold the
        same already."""
        fresh = list[int]()
        for g, block in blocks:
            if block and self.index.publish(node_hash, parent, g, block):
                self.pool.mark_cached(g, block)
                fresh.append(g)
        if not fresh:
            return False
        if self.tier is not None and self.tier.disk is not None and length in (0, self._names.block_size):
            self.tier.disk.note(node_hash, fresh, seq.request.salt_owner)
        if self.changes is not None:
            self.changes.stored(seq, fresh, n, (node_hash, parent), length or self._names.block_size)
        return True

    def publish_loaded(self, seq: Sequence, n: int, group: int, block: int) -> bool:
        """Make the sequence's full block n matchable, which is loaded for it. False where others hold the same."""
        return self._publish_block(seq, n, seq.hashes[n], self._names.parent(seq, n), [(group, block)])

    def _drop(self, group: int, block: int) -> None:
        """Take a block out of the index."""
        if self.changes is not None and (node_hash := self.index.hash_of(group, block)) is not None:
            self.changes.removed(group, node_hash)
        self.index.drop(group, block)

    def publish_state(self, seq: Sequence, kv_len: int) -> list[Hash]:
        """Make the state after kv_len tokens matchable, which is where it ends a block."""
        n = kv_len // self._names.block_size - 1
        blocks = [(g, seq.blocks[g][n]) for g in self._exact]
        if not all(block for _, block in blocks):
            return []
        if not self._publish_block(seq, n, self._names.hashes(seq, n + 1)[n], self._names.parent(seq, n), blocks):
            return []
        self._note_checkpoint(seq, kv_len, blocks)
        return [seq.hashes[n]]

    def _note_checkpoint(self, seq: Sequence, length: int, blocks: PySequence[tuple[int, int]]) -> None:
        seq.checkpoint = Checkpoint(length, seq.checkpoint)
        self._checkpoints.add(blocks, seq.checkpoint)

    def unpublish(self, node_hashes: Iterable[Hash]) -> None:
        """Withdraw blocks whose plan failed: what they hold was never written."""
        for node_hash in node_hashes:
            node = self.index.get(node_hash)
            if node is None:
                continue
            for g, block in enumerate(node.blocks):
                if block is not None:
                    self.forget(g, block)
            if self.tier is not None:
                self.tier.forget_all_of(node)

    def forget(self, group: int, block: int) -> None:
        self._drop(group, block)
        self._checkpoints.drop(group, block)
        self.pool.forget(group, block)

    def on_evict(self, group: int, blocks: PySequence[int]) -> None:
        """The pool evicts blocks. Of groups of sounds alone, which have no index, these are none."""
        if not blocks:
            return
        if self._alone and self.changes is None and self.tier is None:
            self.index.drop_all(group, blocks)
            return
        for block in blocks:
            self._evict(group, block)

    def _evict(self, group: int, block: int) -> None:
        """Evict a block. Where keys and values are gone, no request can begin at the state behind them."""
        node_hash = self.index.hash_of(group, block) or b""
        node, tier = self.index.get(node_hash), self.tier
        lost = tier is not None and self._runs_again(tier, group, block)
        saved = tier is not None and node is not None and not lost and tier.save(node_hash, group, block)
        self._drop(group, block)
        self._checkpoints.drop(group, block, saved=saved)
        if node is None or saved or group in self._exact:
            return
        for g in self._exact:
            if (state := node.blocks[g]) is not None and not self.pool.refs(g, state):
                self.forget(g, state)
            if tier is not None and (below := node.below[g]) is not None and not tier.pool.refs(g, below):
                tier.forget(g, below)

    def _runs_again(self, tier: HostTier, group: int, block: int) -> bool:
        """Return True if preempted requests come back for a block, and all of them will run its tokens again."""
        owners, always = self.pool.awaiting(group, block), tier.preempted == "recompute"
        return bool(owners) and all(always or (isinstance(each, Sequence) and each.runs_again) for each in owners)

    def withdraw(self, *seqs: Sequence) -> None:
        """Withdraw what these sequences published, shared or left behind, and anything that continues it: keys
        and values there may be no numbers, and sequences that attended to them wrote more of the same."""
        known: set[Hash] = set()
        for seq in seqs:
            first = seq.identity(0, self._names.block_size)
            known.update(chain_hash(self._names.root(seq), first[:count]) for count in range(1, len(first) + 1))
            known.update(seq.hashes)  # ends of later blocks continue these
        self.settle_nothing()  # their content hashes are not known yet
        self.unpublish(self.index.with_continuations(known))
        if self.tier is not None and self.tier.disk is not None:
            for seq in seqs:
                self.tier.disk.remove(seq.hashes, seq.request.salt_owner)

    # ---- ends -------------------------------------------------------------------------------------------------

    def leave(self, seq: Sequence, last_plan: int, kv_len: int, *, resumes: bool) -> None:
        """Leave behind what a sequence has that gives its blocks back. The arguments are those of
        `CacheManager.release`."""
        if not self._names.shares(seq) or seq.loads:  # it has not run yet
            return
        size = self._names.block_size
        for length in (seq.num_prompt, seq.written) if seq.written > 0 else ():
            self._leave_end(seq, (length - 1) // size, kv_len)
        if resumes and self._exact and kv_len != seq.written and kv_len - seq.reached >= self._checkpoints.least:
            self._part(seq, kv_len, last_plan)

    def _leave_end(self, seq: Sequence, n: int, kv_len: int) -> None:
        """Make the written part of the sequence's block n matchable; where a group's blocks are exact, only if its
        state has come as far."""
        size, index = self._names.block_size, self.index
        tokens, parent = tuple(seq.identity(n * size, min(seq.written, (n + 1) * size))), self._names.parent(seq, n)
        if not tokens or (index.has_ends(parent) and index.is_covered(parent, tokens)):
            return
        end, whole = n * size + len(tokens), len(tokens) == size
        node_hash = self._names.hashes(seq, n + 1)[n] if whole else chain_hash(parent, tokens)
        blocks = [(g, seq.blocks[g][n]) for g in range(self._num_groups)]
        if not whole:
            if n < seq.published or not all(block for _, block in blocks):
                return  # the caller takes the block's last tokens back, or a window has passed
            if self._exact and end != kv_len:
                return
            if self._publish_block(seq, n, node_hash, parent, blocks, len(tokens)) and self._exact:
                self._note_checkpoint(seq, end, [blocks[g] for g in self._exact])
        elif self._exact and end == kv_len:
            self.publish_state(seq, end)
        self._make_end(node_hash, parent, tokens)

    def _make_end(self, node_hash: Hash, parent: Hash, tokens: Tokens) -> None:
        node = self.index.get(node_hash)
        if node is None or None in node.blocks:
            return
        if self.index.has_ends(parent) and (shorter := self.index.shorter_end(parent, tokens)) is not None:
            self.unpublish([shorter])
        self.index.add_end(node_hash, tokens)

    # ---- preempted sequences ----------------------------------------------------------------------------------

    def settle(self, retired: int) -> None:
        """Make the states of preempted sequences matchable, once the last of their tokens are known."""
        for parted in self.partings.due(retired):
            self._leave_parted(parted)

    def settle_nothing(self) -> None:
        """Drop the last blocks of preempted sequences: a plan failed."""
        for parted in self.partings.due(None):
            self.unpublish([column.name for column in parted.columns])

    def _part(self, seq: Sequence, kv_len: int, last_plan: int) -> None:
        """Keep the state of a preempted sequence, until its tokens are known and longer."""
        parted = self.partings.begin(self.pool, seq, kv_len, self._names.parent(seq, seq.published), last_plan)
        if parted is not None:
            states = [(g, block) for g, block in parted.columns[-1].blocks if g in self._exact]
            self._checkpoints.add(states, parted.checkpoint)

    def _leave_parted(self, parted: Parted) -> None:
        """Replace the temporary hashes of a preempted sequence's blocks by content hashes, up to its last retired
        token."""
        seq, size, length = parted.seq, self._names.block_size, parted.length
        states, last = self.partings.kept(parted.columns[-1], exact=True), (length - 1) // size
        right = self._names.shares(seq) and len(seq.tokens) > length
        whole = right and last >= parted.since and len(states) == len(self._exact)
        parent = self._names.parent(seq, parted.columns[0].n) if right else b""
        for column in parted.columns:
            tokens, kept = self._tokens(seq, column.n, length), self.partings.kept(column, exact=False)
            fits = right and len(tokens) == size
            if column.n == last and len(tokens) < size:
                everything = sum(g not in self._exact for g, _ in column.blocks) == len(kept)
                whole = fits = whole and everything and not self.index.is_covered(parent, tokens)
            node_hash = chain_hash(parent, tokens)
            for g, block in kept:
                if self._rename(g, block, node_hash, parent, fits):
                    self._note_stored(seq, column.n, g, (node_hash, parent), len(tokens))
            parent = node_hash
        parent = self._names.parent(seq, last) if whole else b""
        tokens = self._tokens(seq, last, length)
        parted.checkpoint.length = length
        node_hash = chain_hash(parent, tokens)
        for g, block in states:
            if self._rename(g, block, node_hash, parent, whole):
                self._note_stored(seq, last, g, (node_hash, parent), len(tokens))
        if whole and len(tokens) < size:
            self._make_end(node_hash, parent, tokens)

    def _tokens(self, seq: Sequence, n: int, length: int) -> Tokens:
        """Return the tokens of a sequence's block n, of the first `length`."""
        size = self._names.block_size
        return tuple(seq.identity(n * size, min(length, (n + 1) * size)))

    def _rename(self, group: int, block: int, node_hash: Hash, parent: Hash, fits: bool) -> bool:
        """Publish a block under its content hash, unless others hold the same. fits: it has one; else it is
        released. Return True if it is published."""
        self.index.drop(group, block)  # its temporary hash
        if fits and self.index.publish(node_hash, parent, group, block):
            return True
        self._checkpoints.drop(group, block)
        self.pool.forget(group, block)
        return False

    def _note_stored(self, seq: Sequence, n: int, group: int, names: tuple[Hash, Hash], length: int) -> None:
        if self.changes is not None:
            self.changes.stored(seq, [group], n, names, length)
