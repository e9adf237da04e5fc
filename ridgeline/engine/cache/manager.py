"""The cache as the scheduler sees it: hits, growth, publication, release. It ties pool, prefix index and specs.

Every group follows one rule, given by its spec: a token at position p needs the state from `first_needed(p)` on. It
says which blocks a window lets go, and where a prefix hit can resume: at n blocks, if the blocks from
`first_needed(n * block_size)` to n are cached. Full attention is the case where the first needed position is 0.

A hit may go on into a block that is not full, or of which only the first tokens are the same: the sequence gets a
block of its own, and its first plan copies the other one into it (copy on write). This is done with the index's ends:
the blocks in which sequences, or their prompts, ended. Where some group's blocks are exact (`core.state_spec`), all
tokens of such an end must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as PySequence

from ridgeline.core.cache_layout import NULL_BLOCK, CacheLayout
from ridgeline.core.plan import CopyBlocks, SetBlocks
from ridgeline.core.state_spec import KVSpec
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.cache.prefix import Hash, Node, PrefixIndex, chain_hash, root_hash
from ridgeline.engine.sequence import Sequence


class CacheManager:
    """Blocks of all sequences. With `prefix_caching` off nothing is published, so nothing is found.

    max_chunk: tokens one step runs at most for a sequence.
    """

    def __init__(self, layout: CacheLayout, *, prefix_caching: bool, max_chunk: int) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.specs = [group.spec for group in layout.groups]
        self._forgetful = [(g, spec) for g, spec in enumerate(self.specs) if spec.span is not None]
        # What other tiers know by a hash is of one format. Plain ones add nothing
        self._formats = sorted({str(spec.format) for spec in self.specs if isinstance(spec, KVSpec)} - {"None"})
        self._exact = any(spec.exact for spec in self.specs)
        self.index = PrefixIndex(len(self.specs))
        self.pool = BlockPool(layout, on_evict=self.index.drop)
        self.prefix_caching = prefix_caching
        self._max_chunk = max_chunk
        self.queried_tokens = 0
        self.hit_tokens = 0

    # ---- admission --------------------------------------------------------------------------------------------

    def admit(self, *seqs: Sequence, reserve_blocks: int) -> bool:
        """Give `seqs` their prefix hits, if the rest of what they know would fit beside `reserve_blocks` spare blocks.

        A hit leaves at least one token to run (`Sequence.may_skip`). Sets blocks, source, published, cached_tokens.
        """
        wanted = self._take_hits(seqs, reserve_blocks)
        if not self.pool.can_take(wanted):
            for seq in seqs:
                self.release(seq, 0)
            return False
        for seq in seqs:
            if self._shares(seq):
                self._begin_like_another(seq, wanted)
            if not seq.preemptions:  # later it finds what it wrote itself, which says nothing about prompts
                seq.prompt_hit = seq.cached_tokens
                self.queried_tokens += len(seq.tokens)
                self.hit_tokens += seq.cached_tokens
        return True

    def would_admit(self, *seqs: Sequence, reserve_blocks: int, without: PySequence[Sequence]) -> bool:
        """Return whether `admit` would if the sequences `without` had given their blocks back."""
        wanted = self._take_hits(seqs, reserve_blocks)
        freed = [[block for seq in without for block in seq.blocks[g] if block] for g in range(len(self.specs))]
        found = self.pool.can_take(wanted, freed)
        for seq in seqs:
            self.release(seq, 0)
        return found

    def _take_hits(self, seqs: PySequence[Sequence], reserve_blocks: int) -> list[int]:
        """Give `seqs` their hits of whole blocks. The blocks per group that they need besides, and the spare ones."""
        wanted = [reserve_blocks] * len(self.specs)
        for seq in seqs:
            self._take_hit(seq)
            for g, (spec, blocks) in enumerate(zip(self.specs, seq.blocks, strict=True)):
                held = sum(block != NULL_BLOCK for block in blocks)
                wanted[g] += spec.blocks_needed(len(seq.tokens) + 1, self._max_chunk, self.block_size) - held
        return wanted

    def _take_hit(self, seq: Sequence) -> None:
        seq.has_emitted = False
        hit = self._longest_hit(seq) if self._shares(seq) else 0
        seq.blocks = [self._hit_blocks(seq, g, hit) for g in range(len(self.specs))]
        for g, blocks in enumerate(seq.blocks):
            for block in blocks:
                if block != NULL_BLOCK:
                    self.pool.share(g, block)
        seq.published = hit
        seq.passed = [0] * len(self.specs)
        seq.cached_tokens = hit * self.block_size

    def _longest_hit(self, seq: Sequence) -> int:
        """Largest number of leading blocks at which every group can resume."""
        best, size = 0, self.block_size
        bounded = int(self.specs[0].span is None)  # full attention ends every hit where its own run from 0 ends
        others = list(enumerate(self.specs))[bounded:]
        runs = [0] * len(self.specs)  # consecutive cached blocks of the group, ending here
        end = seq.may_skip // size
        for n, node_hash in enumerate(self._hashes(seq, end)[:end], start=1):
            node = self.index.get(node_hash)
            if bounded and (node is None or node.blocks[0] is None):
                break
            for g, _ in others:
                runs[g] = runs[g] + 1 if node is not None and node.blocks[g] is not None else 0
            if all(runs[g] >= n - spec.first_needed(n * size) // size for g, spec in others):
                best = n
        return best

    def _hit_blocks(self, seq: Sequence, group: int, hit: int) -> list[int]:
        first = self.specs[group].first_needed(hit * self.block_size) // self.block_size
        blocks = [NULL_BLOCK] * min(first, hit)
        for node_hash in seq.hashes[first:hit]:
            node = self.index.get(node_hash)
            assert node is not None
            block = node.blocks[group]
            assert block is not None
            blocks.append(block)
        return blocks

    def _begin_like_another(self, seq: Sequence, wanted: PySequence[int]) -> None:
        """Lengthen the hit by a block to copy into, and its source, if some end agrees with what follows.

        wanted: blocks per group that were promised to `seq`, and maybe to others. They must fit beside the source.
        """
        size, hit = self.block_size, seq.published
        tokens = tuple(seq.tokens[hit * size : min(seq.may_skip, (hit + 1) * size - 1)])
        count, node = self._best_end(self._parent(seq, hit), tokens) if tokens else (0, None)
        if node is None:
            return
        seq.source = [block for block in node.blocks if block is not None]
        for g, block in enumerate(seq.source):
            self.pool.share(g, block)
        taken = self.pool.take([1] * len(self.specs)) if self.pool.can_take(wanted) else None
        if taken is None:
            self._release_source(seq, 0)
            return
        for blocks, new in zip(seq.blocks, taken, strict=True):
            blocks += new
        seq.cached_tokens += count

    def _best_end(self, parent: Hash, tokens: tuple[int, ...]) -> tuple[int, Node | None]:
        """The end after `parent` to begin with, and for how many of these tokens it serves."""
        count, end = self.index.nearest_end(parent, tokens)
        node = self.index.get(end) if count and end is not None else None
        if node is None or (self._exact and count < len(node.end or ())):
            return 0, None
        return count, node

    def copies(self, seqs: PySequence[Sequence], plan: int) -> tuple[CopyBlocks, ...]:
        """Return the copies that `plan`, the first of these sequences, must make. Later plans may overwrite the
        sources."""
        starting = [(seq, seq.cached_tokens // self.block_size) for seq in seqs]
        copies = tuple(
            CopyBlocks(g, tuple(seq.source[g] for seq in seqs), tuple(seq.blocks[g][n] for seq, n in starting))
            for g in range(len(self.specs) if seqs else 0)
        )
        for seq in seqs:
            self._release_source(seq, plan)
        return copies

    def _release_source(self, seq: Sequence, last_plan: int) -> None:
        for g, block in enumerate(seq.source):
            self.pool.release(g, block, last_plan)
        seq.source = []

    # ---- growth -----------------------------------------------------------------------------------------------

    def let_go(self, seq: Sequence, kv_len: int, last_plan: int) -> list[SetBlocks]:
        """Release the blocks no token at kv_len or later needs; returns the changes to the slot's block tables."""
        changes: list[SetBlocks] = []
        for g, spec in self._forgetful:
            blocks, start = seq.blocks[g], seq.passed[g]
            end = seq.passed[g] = max(start, min(spec.first_needed(kv_len) // self.block_size, len(blocks)))
            for n in range(start, end):
                if blocks[n] != NULL_BLOCK:
                    self.pool.release(g, blocks[n], last_plan)
                    blocks[n] = NULL_BLOCK
                    changes.append(SetBlocks(seq.slot, g, n, (NULL_BLOCK,)))
        return changes

    def extend(self, seq: Sequence, new_len: int) -> list[SetBlocks] | None:
        """Make room for positions below new_len. Returns the changes, or None (nothing done) if blocks are short."""
        end = -(-new_len // self.block_size)
        wanted = [self._lacking(g, blocks, end) for g, blocks in enumerate(seq.blocks)]
        taken = self.pool.take([len(places) for places in wanted])
        if taken is None:
            return None
        changes: list[SetBlocks] = []
        for g, (blocks, places, new) in enumerate(zip(seq.blocks, wanted, taken, strict=True)):
            if not new:
                continue
            first = min(len(blocks), places.start)
            blocks += [NULL_BLOCK] * (end - len(blocks))
            blocks[places.start : places.stop] = new
            changes.append(SetBlocks(seq.slot, g, first, tuple(blocks[first:end])))
        return changes

    def _lacking(self, group: int, blocks: PySequence[int], end: int) -> range:
        """Return which of the first `end` blocks must still get memory for a step that ends in the last of them."""
        written = self.specs[group].written(len(blocks), end)
        return range(0) if written and written.start < len(blocks) and blocks[written.start] else written

    def add_block(self, seqs: PySequence[Sequence]) -> list[SetBlocks] | None:
        """One more block per group for each of `seqs`, or None (nothing done) if blocks are short for all of them."""
        taken = self.pool.take([len(seqs)] * len(self.specs))
        if taken is None:
            return None
        changes: list[SetBlocks] = []
        for g, new in enumerate(taken):
            for seq, block in zip(seqs, new, strict=True):
                blocks = seq.blocks[g]
                changes.append(SetBlocks(seq.slot, g, len(blocks), (block,)))
                blocks.append(block)
        return changes

    def chunk_end(self, start: int, end: int) -> int:
        """Return where a chunk should end that begins at `start` and could go on to `end`. With exact blocks it ends
        where it fills one, if it can, so that a point to resume at is left."""
        boundary = end // self.block_size * self.block_size
        return boundary if self._exact and boundary > start else end

    # ---- publication ------------------------------------------------------------------------------------------

    def publish_chunk(self, seq: Sequence, start: int, end: int) -> list[Hash]:
        """As `publish`, for a plan that is about to run the sequence's known tokens from `start` to `end`.

        Rows of one plan attend to each other's keys once all are written, but in a step of single tokens each attends
        in the launch that writes its own. Exact blocks are read before any is written. What this plan may not read is
        matchable later.
        """
        return self.publish(seq, start if self._exact or end - start == 1 else end)

    def publish(self, seq: Sequence, kv_len: int) -> list[Hash]:
        """Make the sequence's full blocks below kv_len matchable; returns the hashes that are new to the index.

        kv_len: tokens that the blocks hold the state of, once what is submitted has run.
        """
        end = kv_len // self.block_size
        if not self._shares(seq) or end <= seq.published:
            return []
        hashes, first, fresh = self._hashes(seq, end), seq.published, list[Hash]()
        parent = hashes[first - 1] if first else self._root(seq)
        for n in range(first, end):
            node_hash, is_fresh = hashes[n], False
            holds = not self._exact or (n + 1) * self.block_size == kv_len
            for g, blocks in enumerate(seq.blocks):
                block = blocks[n]
                if block == NULL_BLOCK or not (holds or not self.specs[g].exact):
                    continue
                if self.index.publish(node_hash, parent, g, block):
                    self.pool.mark_cached(g, block)
                    is_fresh = True
            if is_fresh:
                fresh.append(node_hash)
            parent = node_hash
        seq.published = end
        return fresh

    def unpublish(self, node_hashes: Iterable[Hash]) -> None:
        """Withdraw blocks whose plan failed: what they hold was never written."""
        for node_hash in node_hashes:
            node = self.index.get(node_hash)
            if node is None:
                continue
            for g, block in enumerate(node.blocks):
                if block is not None:
                    self.index.drop(g, block)
                    self.pool.forget(g, block)

    def withdraw(self, *seqs: Sequence) -> None:
        """Let nobody find what these sequences published, shared or left behind, nor anything that continues it: keys
        and values there may be no numbers, and whoever attended to them wrote more of the same."""
        known: set[Hash] = set()
        for seq in seqs:
            first = seq.tokens[: self.block_size]
            known.update(chain_hash(self._root(seq), first[:count]) for count in range(1, len(first) + 1))
            known.update(seq.hashes)  # ends of later blocks continue these
        self.unpublish(self.index.with_continuations(known))

    # ---- release ----------------------------------------------------------------------------------------------

    def release(self, seq: Sequence, last_plan: int, kv_len: int = 0) -> None:
        """Give all blocks back, the last first, so that it is evicted before what it continues. kv_len: tokens that
        they will hold the state of when all that is submitted has run."""
        if seq.written > 0 and self._shares(seq):
            for n in sorted({(length - 1) // self.block_size for length in (seq.num_prompt, seq.written)}):
                self._leave_end(seq, n, kv_len)
        self._release_source(seq, last_plan)
        for g, blocks in enumerate(seq.blocks):
            for block in reversed(blocks):
                if block != NULL_BLOCK:
                    self.pool.release(g, block, last_plan)
        seq.blocks = [[] for _ in self.specs]
        seq.published = 0

    def _leave_end(self, seq: Sequence, n: int, kv_len: int) -> None:
        """Let others begin like the sequence's block n, as far as it is written; where a group's blocks are exact, only
        if that is as far as its state has come."""
        size, index = self.block_size, self.index
        tokens, parent = tuple(seq.tokens[n * size : min(seq.written, (n + 1) * size)]), self._parent(seq, n)
        if not tokens or index.is_covered(parent, tokens):
            return
        node_hash = chain_hash(parent, tokens)
        if len(tokens) < size:
            blocks = [ids[n] for ids in seq.blocks]
            if n < seq.published or NULL_BLOCK in blocks:
                return  # the caller takes the block's last tokens back, or a window has passed
            if self._exact and n * size + len(tokens) != kv_len:
                return
            for g, block in enumerate(blocks):
                if index.publish(node_hash, parent, g, block):
                    self.pool.mark_cached(g, block)
        node = index.get(node_hash)
        if node is None or None in node.blocks:
            return
        if (shorter := index.shorter_end(parent, tokens)) is not None:
            self.unpublish([shorter])
        index.add_end(node_hash, tokens)

    def forget_all(self) -> None:
        """Let no later sequence find anything of what was."""
        self.unpublish({node_hash for _, _, node_hash in self.index.published()})
        self.queried_tokens = self.hit_tokens = 0

    @property
    def windowed(self) -> bool:
        """Return whether some group remembers the last tokens only."""
        return bool(self._forgetful)

    @property
    def usage(self) -> float:
        """Share of the pages that running requests hold."""
        return 1 - self.pool.free_pages / max(1, self.pool.num_pages)

    def _shares(self, seq: Sequence) -> bool:
        return self.prefix_caching and not seq.private

    def _root(self, seq: Sequence) -> Hash:
        return root_hash(seq.request.cache_salt, *self._formats)

    def _parent(self, seq: Sequence, n: int) -> Hash:
        """Return the hash before the sequence's block n."""
        return self._hashes(seq, n)[n - 1] if n else self._root(seq)

    def _hashes(self, seq: Sequence, end: int) -> list[Hash]:
        """Hashes of the sequence's blocks, at least the first `end`; each computed once."""
        hashes, size = seq.hashes, self.block_size
        while len(hashes) < end:
            n = len(hashes)
            hashes.append(chain_hash(hashes[-1] if n else self._root(seq), seq.tokens[n * size : (n + 1) * size]))
        return hashes
