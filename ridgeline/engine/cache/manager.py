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

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as PySequence

from ridgeline.core.cache_layout import NULL_BLOCK, CacheLayout
from ridgeline.core.plan import CopyBlocks, SetBlocks
from ridgeline.core.state_spec import KVSpec
from ridgeline.engine.cache.checkpoints import Checkpoint, Checkpoints
from ridgeline.engine.cache.hits import Found, Hit
from ridgeline.engine.cache.partings import Parted, Partings
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.cache.prefix import Hash, PrefixIndex, Tokens, chain_hash, root_hash
from ridgeline.engine.sequence import Sequence


class CacheManager:
    """Blocks of all sequences. With `prefix_caching` off nothing is published, so nothing is found.

    max_chunk: tokens one step runs at most for a sequence.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        prefix_caching: bool,
        max_chunk: int,
        state_share: float = 0.5,
        state_interval: int | None = None,
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.specs = [group.spec for group in layout.groups]
        self._forgetful = [(g, spec) for g, spec in enumerate(self.specs) if spec.span is not None]
        # What other tiers know by a hash is of one format. Plain ones add nothing
        self._formats = sorted({str(spec.format) for spec in self.specs if isinstance(spec, KVSpec)} - {"None"})
        self.checkpoints = Checkpoints(layout, share=state_share, interval=state_interval)
        self._exact = self.checkpoints.groups
        self._growing = [g for g, spec in enumerate(self.specs) if not spec.exact]
        self.index = PrefixIndex(len(self.specs))
        self.pool = BlockPool(layout, self._on_evict, self.checkpoints.page_worth, self.checkpoints.most_pages)
        self._partings = Partings(self.index, self.pool, self.block_size, self._exact)
        self.prefix_caching = prefix_caching
        self._max_chunk = max_chunk
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.group_hits = [0] * len(self.specs)  # tokens after which each group could have gone on

    # ---- admission --------------------------------------------------------------------------------------------

    def admit(self, *seqs: Sequence, reserve_blocks: int) -> bool:
        """Give `seqs` their prefix hits, if the rest of what they know would fit beside `reserve_blocks` spare blocks.

        A hit leaves at least one token to run (`Sequence.may_skip`). Sets blocks, source, published, cached_tokens.
        """
        hits = [self._search(seq) for seq in seqs]
        if not self._take_ends(seqs, hits, reserve_blocks):
            wanted = self._take_hits(seqs, [hit.whole for hit in hits], reserve_blocks)
            if not self.pool.can_take(wanted):
                self._take_back(seqs)
                return False
        for seq, hit in zip(seqs, hits, strict=True):
            for checkpoint in {checkpoint for checkpoint in self._begun_from(seq) if checkpoint is not None}:
                seq.checkpoint = checkpoint
                self.checkpoints.use(checkpoint)
            if not seq.preemptions:  # later it finds what it wrote itself, which says nothing about prompts
                seq.prompt_hit = seq.cached_tokens
                self.queried_tokens += len(seq.tokens)
                self.hit_tokens += seq.cached_tokens
                for g, tokens in enumerate(hit.by_group):
                    self.group_hits[g] += tokens
                if self._exact and self._shares(seq):
                    self.checkpoints.note_prompt(self._skippable(seq), seq.cached_tokens)
        return True

    def would_admit(self, *seqs: Sequence, reserve_blocks: int, without: PySequence[Sequence]) -> bool:
        """Return whether `admit` would if the sequences `without` had given their blocks back."""
        wanted = self._take_hits(seqs, [self._search(seq).whole for seq in seqs], reserve_blocks)
        freed = [[block for seq in without for block in seq.blocks[g] if block] for g in range(len(self.specs))]
        found = self.pool.can_take(wanted, freed)
        self._take_back(seqs)
        return found

    def comes_with(self, seq: Sequence, chunks: Iterable[tuple[Sequence, int, int]]) -> bool:
        """Return whether `seq` should wait for the next plan, since one of these `chunks` (sequence, start, end) of the
        plan in the making runs tokens that it begins with, and leaves a state behind them. It is asked to."""
        if not self._exact or not self._shares(seq):
            return False
        own, size = self._skippable(seq), self.block_size
        best, fork = 0, b""
        for other, start, end in chunks:
            theirs = other.hashes[: end // size] if self._shares(other) else []
            n = bisect_left(range(min(len(own), len(theirs))), True, key=lambda i: own[i] != theirs[i])
            if n > best and n > -(-start // size):
                best, fork = n, own[n - 1]
        if not best or best * size - self._search(seq).whole.tokens(size) < self.checkpoints.least:
            return False
        self.checkpoints.note_fork(fork)
        return True

    def _take_ends(self, seqs: PySequence[Sequence], hits: PySequence[Found], reserve_blocks: int) -> bool:
        """Give `seqs` their hits with the blocks to copy, if there are any and all fits beside these."""
        if not any(hit.best.end for hit in hits):
            return False
        wanted = self._take_hits(seqs, [hit.best for hit in hits], reserve_blocks)
        if not self.pool.can_take(wanted):
            self._take_back(seqs)
            return False
        for seq in seqs:
            taken = self.pool.take([1] * len(self.specs)) if seq.source else None
            for blocks, new in zip(seq.blocks, taken or (), strict=False):
                blocks += new
        return True

    def _take_hits(self, seqs: PySequence[Sequence], hits: PySequence[Hit], reserve_blocks: int) -> list[int]:
        """Give `seqs` their hits. The blocks per group that they need besides, and the spare ones. A block that is
        exact is only read, so it is none of those that a sequence needs; nor do such groups need spare ones, since a
        sequence takes its block along."""
        wanted = [0 if spec.exact else reserve_blocks for spec in self.specs]
        for seq, hit in zip(seqs, hits, strict=True):
            self._take_hit(seq, hit)
            for g, (spec, blocks) in enumerate(zip(self.specs, seq.blocks, strict=True)):
                held = 0 if spec.exact else sum(block != NULL_BLOCK for block in blocks)
                wanted[g] += spec.blocks_needed(len(seq.tokens) + 1, self._max_chunk, self.block_size) - held
        return wanted

    def _take_hit(self, seq: Sequence, hit: Hit) -> None:
        seq.has_emitted = False
        seq.blocks = [self._hit_blocks(seq, g, hit) for g in range(len(self.specs))]
        seq.source = [] if hit.end is None else [block for block in hit.end.blocks if block is not None]
        for g, blocks in enumerate(seq.blocks):
            for block in [*blocks, *seq.source[g : g + 1]]:
                if block != NULL_BLOCK:
                    self.pool.share(g, block)
        seq.published = hit.blocks
        seq.passed = [0] * len(self.specs)
        seq.cached_tokens = hit.tokens(self.block_size)
        seq.checkpoint, seq.keeps_at = None, 0

    def _take_back(self, seqs: PySequence[Sequence]) -> None:
        for seq in seqs:
            self.release(seq, 0)

    def _begun_from(self, seq: Sequence) -> list[Checkpoint | None]:
        """Return the checkpoint that it begins at, as each group whose blocks are exact knows it."""
        blocks = seq.source or [blocks[-1] if blocks else NULL_BLOCK for blocks in seq.blocks]
        return [self.checkpoints.at(g, blocks[g]) for g in self._exact]

    def _search(self, seq: Sequence) -> Found:
        """Return the most tokens at which every group can resume: of whole blocks, and with a block to copy.

        That block follows whole ones of which all groups have what they need. One that is exact has all that its group
        needs, so there it may follow any number of them.
        """
        whole = best = Hit()
        if not self._shares(seq):
            return Found(whole, best, (0,) * len(self.specs))
        size, hashes, root = self.block_size, self._skippable(seq), self._root(seq)
        bounded = int(self.specs[0].span is None)  # full attention ends every hit where its own run from 0 ends
        others = list(enumerate(self.specs))[bounded:]
        runs = [0] * len(self.specs)  # consecutive cached blocks of the group, ending here
        alone = [0] * len(self.specs)
        for n in range(len(hashes) + 1):
            node = self.index.get(hashes[n - 1]) if n else None
            if n and bounded and (node is None or node.blocks[0] is None):
                break
            for g, _ in others if n else ():
                runs[g] = runs[g] + 1 if node is not None and node.blocks[g] is not None else 0
            lacking = [g for g, spec in others if runs[g] < n - spec.first_needed(n * size) // size]
            for g in range(len(alone)):
                alone[g] = alone[g] if g in lacking else n * size
            if not lacking:
                whole = Hit(n)
            if not lacking or set(lacking) <= set(self._exact):
                hit = self._with_end(seq, n, hashes[n - 1] if n else root)
                best = max(whole, best, hit, key=lambda hit: hit.tokens(size))
        return Found(whole, best, tuple(max(tokens, best.tokens(size)) for tokens in alone))

    def _hit_blocks(self, seq: Sequence, group: int, hit: Hit) -> list[int]:
        first = self.specs[group].first_needed(hit.blocks * self.block_size) // self.block_size
        if hit.end is not None and group in self._exact:
            first = hit.blocks
        blocks = [NULL_BLOCK] * min(first, hit.blocks)
        for node_hash in seq.hashes[first : hit.blocks]:
            node = self.index.get(node_hash)
            assert node is not None
            block = node.blocks[group]
            assert block is not None
            blocks.append(block)
        return blocks

    def _with_end(self, seq: Sequence, n: int, parent: Hash) -> Hit:
        """Return the hit of n blocks, lengthened by an end after `parent` that agrees with what follows."""
        if not self.index.has_ends(parent):
            return Hit()
        tokens = tuple(seq.tokens[n * self.block_size : min(seq.may_skip, (n + 1) * self.block_size - 1)])
        count, end = self.index.nearest_end(parent, tokens) if tokens else (0, None)
        node = self.index.get(end) if count and end is not None else None
        if node is None or (self._exact and count < len(node.end or ())):
            return Hit()
        return Hit(n, node, count)

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

    def extend(self, seq: Sequence, start: int, new_len: int) -> list[SetBlocks] | None:
        """Make room for positions from `start`, where the sequence goes on, to below new_len. Returns the changes, or
        None (nothing done) if blocks are short."""
        end = -(-new_len // self.block_size)
        states = {g: self._state(seq, g, start, end) for g in self._exact}
        wanted = [range(len(blocks), end) for blocks in seq.blocks]
        for g, block in states.items():
            wanted[g] = range(end - 1, end - (block != NULL_BLOCK))
        taken = self.pool.take([len(places) for places in wanted])
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
                self.pool.share(g, kept)
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
        held = blocks[(start - 1) // self.block_size] if start else NULL_BLOCK
        if held == NULL_BLOCK or self.pool.is_cached(group, held) or not self._is_own(seq, group, held):
            return NULL_BLOCK
        return held

    def _is_own(self, seq: Sequence, group: int, block: int) -> bool:
        blocks, passed = seq.blocks[group], seq.passed[group]
        return self.pool.refs(group, block) == blocks[passed:].count(block)

    def _stop_keeping(self, seq: Sequence, group: int, start: int) -> bool:
        """Give up the checkpoint in the block that holds the sequence's state, so that it can go on there. False if
        there is none, or others use it."""
        block = seq.blocks[group][(start - 1) // self.block_size] if start else NULL_BLOCK
        node_hash = self.index.hash_of(group, block)
        if node_hash is None or not self._is_own(seq, group, block):
            return False
        self._forget(group, block)
        return True

    def add_block(self, seqs: PySequence[Sequence]) -> list[SetBlocks] | None:
        """One more block per group for each of `seqs`, which have filled theirs, or None (nothing done) if blocks are
        short for all of them. Some leave the state there that they have by then."""
        filled = [len(seq.blocks[0]) * self.block_size for seq in seqs]
        keeps = [self._leaves(seq, tokens) for seq, tokens in zip(seqs, filled, strict=True)]
        ends = [tokens // self.block_size + 1 for tokens in filled]
        states = [
            [
                NULL_BLOCK if keep or g not in self._exact else self._state(seq, g, tokens, end)
                for seq, tokens, end, keep in zip(seqs, filled, ends, keeps, strict=True)
            ]
            for g in range(len(self.specs))
        ]
        taken = self.pool.take([states_of.count(NULL_BLOCK) for states_of in states])
        if taken is None:
            return None
        changes: list[SetBlocks] = []
        for g, (states_of, new) in enumerate(zip(states, map(iter, taken), strict=True)):
            for seq, state in zip(seqs, states_of, strict=True):
                blocks, block = seq.blocks[g], next(new) if state == NULL_BLOCK else state
                if state != NULL_BLOCK:
                    self.pool.share(g, block)
                changes.append(SetBlocks(seq.slot, g, len(blocks), (block,)))
                blocks.append(block)
        for seq, tokens, keep in zip(seqs, filled, keeps, strict=True):
            seq.keeps_at = tokens if keep else seq.keeps_at
        return changes

    def _leaves(self, seq: Sequence, tokens: int) -> bool:
        reached = 0 if seq.checkpoint is None else seq.checkpoint.length
        return bool(self._exact) and self._shares(seq) and self.checkpoints.pays(tokens, max(reached, seq.keeps_at))

    # ---- publication ------------------------------------------------------------------------------------------

    def publish_chunk(self, seq: Sequence, start: int, end: int) -> list[Hash]:
        """As `publish`, for a plan that is about to run the sequence's known tokens from `start` to `end`.

        Rows of one plan attend to each other's keys once all are written, but in a step of single tokens each attends
        in the launch that writes its own. Where blocks are exact, other rows could make no use of keys alone. What this
        plan may not read is matchable later.
        """
        return self.publish(seq, start if self._exact or end - start == 1 else end)

    def keep_state(self, seq: Sequence, start: int, end: int, reserve: int) -> tuple[int, list[SetBlocks], list[Hash]]:
        """Publish what a plan writes that runs the sequence's known tokens from `start` to `end`, once nobody else can
        join that plan. It may keep a state at a boundary of blocks: returns after how many of the row's tokens (0:
        nowhere inside of it), the changes to the block tables, and the hashes that are new to the index.

        reserve: so many blocks must be left of each group that grows.
        """
        if not self._exact or not self._shares(seq):
            return 0, [], []
        size = self.block_size
        boundary = self._boundary(seq, start, end)
        column, changes = boundary // size - 1, list[SetBlocks]()
        if boundary and boundary < end:
            one = [int(g in self._exact) for g in range(len(self.specs))]
            spare = [have or reserve for have in one]
            taken = self.pool.take(one) if self.pool.can_take(spare) else None
            if taken is None:
                boundary = 0
            for g in self._exact if taken is not None else ():
                seq.blocks[g][column] = taken[g][0]
                changes.append(SetBlocks(seq.slot, g, column, (taken[g][0],)))
        fresh = self.publish(seq, end)
        if boundary:
            fresh += self._publish_state(seq, boundary)
        return (boundary - start if boundary < end else 0) if boundary else 0, changes, fresh

    def _boundary(self, seq: Sequence, start: int, end: int) -> int:
        """Return after how many tokens of the sequence a row from `start` to `end` keeps its state; 0: nowhere."""
        size = self.block_size
        reached = 0 if seq.checkpoint is None else seq.checkpoint.length
        first = -(-start // size)  # in the block in which the row begins, its state before it is still to be read
        hashes = self._hashes(seq, end // size)
        boundary = self.checkpoints.boundary(hashes, first, end, len(seq.tokens), reached)
        column = boundary // size - 1
        node = self.index.get(hashes[column]) if boundary else None
        if not boundary or (node is not None and all(node.blocks[g] is not None for g in self._exact)):
            return 0
        if boundary < end and any(seq.blocks[g][column] != NULL_BLOCK for g in self._exact):
            return 0
        return boundary if all(self.pool.is_worth(g, boundary - reached) for g in self._exact) else 0

    def publish(self, seq: Sequence, kv_len: int) -> list[Hash]:
        """Make the sequence's full blocks below kv_len matchable, and its state there, if it was to be kept; returns
        the hashes that are new to the index.

        kv_len: tokens that the blocks hold the state of, once what is submitted has run.
        """
        end = kv_len // self.block_size
        if not self._shares(seq):
            return []
        fresh = list[Hash]()
        if end > seq.published:
            hashes, first = self._hashes(seq, end), seq.published
            parent = hashes[first - 1] if first else self._root(seq)
            for n in range(first, end):
                if self._publish_block(hashes[n], parent, [(g, seq.blocks[g][n]) for g in self._growing]):
                    fresh.append(hashes[n])
                parent = hashes[n]
            seq.published = end
        if kv_len and kv_len == seq.keeps_at:
            fresh += self._publish_state(seq, kv_len)
        return fresh

    def _publish_block(self, node_hash: Hash, parent: Hash, blocks: Iterable[tuple[int, int]]) -> bool:
        """Make blocks matchable. False where others hold the same already."""
        fresh = [(g, block) for g, block in blocks if block and self.index.publish(node_hash, parent, g, block)]
        for g, block in fresh:
            self.pool.mark_cached(g, block)
        return bool(fresh)

    def _publish_state(self, seq: Sequence, kv_len: int) -> list[Hash]:
        """Make the state after kv_len tokens matchable, which is where it ends a block."""
        n = kv_len // self.block_size - 1
        blocks = [(g, seq.blocks[g][n]) for g in self._exact]
        if not all(block for _, block in blocks):
            return []
        if not self._publish_block(self._hashes(seq, n + 1)[n], self._parent(seq, n), blocks):
            return []
        self._note_checkpoint(seq, kv_len, blocks)
        return [seq.hashes[n]]

    def _note_checkpoint(self, seq: Sequence, length: int, blocks: PySequence[tuple[int, int]]) -> None:
        seq.checkpoint = Checkpoint(length, seq.checkpoint)
        self.checkpoints.add(blocks, seq.checkpoint)

    def unpublish(self, node_hashes: Iterable[Hash]) -> None:
        """Withdraw blocks whose plan failed: what they hold was never written."""
        for node_hash in node_hashes:
            node = self.index.get(node_hash)
            if node is None:
                continue
            for g, block in enumerate(node.blocks):
                if block is not None:
                    self._forget(g, block)

    def _forget(self, group: int, block: int) -> None:
        self.index.drop(group, block)
        self.checkpoints.drop(group, block)
        self.pool.forget(group, block)

    def _on_evict(self, group: int, block: int) -> None:
        """The pool gives a block up. Where keys and values are gone, nobody can begin at the state behind them."""
        node = self.index.get(self.index.hash_of(group, block) or b"")
        self.index.drop(group, block)
        self.checkpoints.drop(group, block)
        if node is None or group in self._exact:
            return
        for g in self._exact:
            if (state := node.blocks[g]) is not None and not self.pool.refs(g, state):
                self._forget(g, state)

    def withdraw(self, *seqs: Sequence) -> None:
        """Let nobody find what these sequences published, shared or left behind, nor anything that continues it: keys
        and values there may be no numbers, and whoever attended to them wrote more of the same."""
        known: set[Hash] = set()
        for seq in seqs:
            first = seq.tokens[: self.block_size]
            known.update(chain_hash(self._root(seq), first[:count]) for count in range(1, len(first) + 1))
            known.update(seq.hashes)  # ends of later blocks continue these
        self.settle_nothing()  # they have no true names yet
        self.unpublish(self.index.with_continuations(known))

    # ---- release ----------------------------------------------------------------------------------------------

    def release(self, seq: Sequence, last_plan: int, kv_len: int = 0, *, resumes: bool = False) -> None:
        """Give all blocks back, the last first, so that it is evicted before what it continues. kv_len: tokens that
        they will hold the state of when all that is submitted has run. resumes: the sequence will go on."""
        if seq.written > 0 and self._shares(seq):
            for n in sorted({(length - 1) // self.block_size for length in (seq.num_prompt, seq.written)}):
                self._leave_end(seq, n, kv_len)
        if resumes and self._exact and self._shares(seq) and kv_len != seq.written:
            reached = 0 if seq.checkpoint is None else seq.checkpoint.length
            if kv_len - reached >= self.checkpoints.least:
                self._part(seq, kv_len, last_plan)
        self._release_source(seq, last_plan)
        for g, blocks in enumerate(seq.blocks):
            for block in reversed(blocks):
                if block != NULL_BLOCK:
                    self.pool.release(g, block, last_plan)
        seq.blocks = [[] for _ in self.specs]
        seq.published, seq.checkpoint, seq.keeps_at = 0, None, 0

    def settle(self, retired: int) -> None:
        """Let sequences that gave way be found where they were, once the last of their tokens are known."""
        for parted in self._partings.due(retired):
            self._leave_parted(parted)

    def settle_nothing(self) -> None:
        """What sequences that gave way wrote last is lost: a plan failed."""
        for parted in self._partings.due(None):
            self.unpublish([column.name for column in parted.columns])

    def _part(self, seq: Sequence, kv_len: int, last_plan: int) -> None:
        """Keep the state of a sequence that gives way, until its tokens are known and longer."""
        parted = self._partings.begin(seq, kv_len, self._parent(seq, seq.published), last_plan)
        if parted is not None:
            states = [(g, block) for g, block in parted.columns[-1].blocks if g in self._exact]
            self.checkpoints.add(states, parted.checkpoint)

    def _leave_end(self, seq: Sequence, n: int, kv_len: int) -> None:
        """Let others begin like the sequence's block n, as far as it is written; where a group's blocks are exact, only
        if that is as far as its state has come."""
        size, index = self.block_size, self.index
        tokens, parent = tuple(seq.tokens[n * size : min(seq.written, (n + 1) * size)]), self._parent(seq, n)
        if not tokens or index.is_covered(parent, tokens):
            return
        node_hash, end = chain_hash(parent, tokens), n * size + len(tokens)
        blocks = [(g, ids[n]) for g, ids in enumerate(seq.blocks)]
        if len(tokens) < size:
            if n < seq.published or not all(block for _, block in blocks):
                return  # the caller takes the block's last tokens back, or a window has passed
            if self._exact and end != kv_len:
                return
            if self._publish_block(node_hash, parent, blocks) and self._exact:
                self._note_checkpoint(seq, end, [blocks[g] for g in self._exact])
        elif self._exact and end == kv_len:
            self._publish_state(seq, end)
        self._make_end(node_hash, parent, tokens)

    def _make_end(self, node_hash: Hash, parent: Hash, tokens: Tokens) -> None:
        node = self.index.get(node_hash)
        if node is None or None in node.blocks:
            return
        if (shorter := self.index.shorter_end(parent, tokens)) is not None:
            self.unpublish([shorter])
        self.index.add_end(node_hash, tokens)

    def _leave_parted(self, parted: Parted) -> None:
        """Give the blocks of a sequence that gave way their true names, if it came as far as they do."""
        seq, size, index = parted.seq, self.block_size, self.index
        right = self._shares(seq) and len(seq.tokens) > parted.kv_len
        parent = self._parent(seq, parted.columns[0].n) if right else b""
        for column in parted.columns:
            tokens = tuple(seq.tokens[column.n * size : min(parted.kv_len, (column.n + 1) * size)])
            node_hash, kept = chain_hash(parent, tokens), self._partings.kept(column)
            partial = len(tokens) < size
            if partial:
                right = right and len(kept) == len(column.blocks) and not index.is_covered(parent, tokens)
            for g, block in kept:
                index.drop(g, block)
                if not right or not index.publish(node_hash, parent, g, block):
                    self.checkpoints.drop(g, block)
                    self.pool.forget(g, block)
            if right and partial:
                self._make_end(node_hash, parent, tokens)
            parent = node_hash

    def forget_all(self) -> None:
        """Let no later sequence find anything of what was."""
        self.unpublish({node_hash for _, _, node_hash in self.index.published()})
        self.checkpoints.forget_all()
        self.queried_tokens = self.hit_tokens = 0
        self.group_hits = [0] * len(self.specs)

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

    def _skippable(self, seq: Sequence) -> list[Hash]:
        """Hashes of the sequence's blocks that a hit may have."""
        end = seq.may_skip // self.block_size
        return self._hashes(seq, end)[:end]

    def _hashes(self, seq: Sequence, end: int) -> list[Hash]:
        """Hashes of the sequence's blocks, at least the first `end`; each computed once."""
        hashes, size = seq.hashes, self.block_size
        while len(hashes) < end:
            n = len(hashes)
            hashes.append(chain_hash(hashes[-1] if n else self._root(seq), seq.tokens[n * size : (n + 1) * size]))
        return hashes
