"""The cache as the scheduler sees it: hits, growth, publication, release. It ties pool, prefix index and specs.

Every group follows one rule, given by its spec: a token at position p needs the state from `first_needed(p)` on. It
decides which blocks a window releases, and where a prefix hit can resume. Full attention is the case where the first
needed position is 0.

A hit may include the first tokens of one more block, which need not be full. The sequence then gets a block of its own,
and its first plan copies the other one into it (copy on write).

    names.py        hashes of a sequence's blocks
    hits.py         what is found under them
    tables.py       blocks for running sequences
    published.py    what others can find of them
    checkpoints.py  which states of constant size are kept
    events.py       changes of what can be found, for those outside who follow them
    sounds.py       what encoders made of sounds
    sessions.py     what is kept for turns that are expected
    host_tier.py    what is kept in the host's memory
    disk.py         what passes between that and a disk; disk_hits.py: the part of a prompt that is there
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Sequence as PySequence

from ridgeline.core.clock import Clock
from ridgeline.core.plan.step import CopyBlocks, SetBlocks
from ridgeline.core.plan.worker import KeepsBelow
from ridgeline.core.settings.host_tier import HostTierSettings, SessionBounds
from ridgeline.core.specs.cache_layout import NULL_BLOCK, CacheLayout
from ridgeline.engine.cache.checkpoints import Checkpoint, Checkpoints
from ridgeline.engine.cache.disk import BlockStore, DiskBelow
from ridgeline.engine.cache.disk_hits import DiskHits
from ridgeline.engine.cache.hits import NOTHING, Found, Hit, PrefixSearch
from ridgeline.engine.cache.host_tier import DeviceParts, HostTier, TierCounts
from ridgeline.engine.cache.names import Names
from ridgeline.engine.cache.plain_pool import pool_of
from ridgeline.engine.cache.prefix import Hash
from ridgeline.engine.cache.published import Published
from ridgeline.engine.cache.sessions import Sessions
from ridgeline.engine.cache.sounds import Sounds
from ridgeline.engine.cache.tables import Tables
from ridgeline.engine.price import Price
from ridgeline.engine.sequence import Sequence

Fits = Callable[[PySequence[Sequence]], bool]


def _to_hold(seq: Sequence) -> int:
    """Return the tokens for which a sequence that starts needs blocks. One more comes, unless the prompt is pooled."""
    return len(seq.tokens) + (seq.request.task is None)


class CacheManager:
    """Blocks of all sequences. With `prefix_caching` off nothing is published, so nothing is found.

    max_chunk: tokens one step runs at most for a sequence. price: of running tokens, beside which loading them from the
    host's memory must pay.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        prefix_caching: bool,
        max_chunk: int,
        state_share: float = 0.5,
        state_interval: int | None = None,
        host_tier: HostTierSettings | None = None,
        price: Price = Price(),
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.specs = [group.spec for group in layout.groups]
        self.names = Names(layout, prefix_caching=prefix_caching)
        self.checkpoints = Checkpoints(layout, share=state_share, interval=state_interval)
        self._exact = self.checkpoints.groups
        self._prefixed = [spec for spec in self.specs if not spec.encoded]  # groups of tokens come first
        self.published = Published(len(self._prefixed), self.names, self.checkpoints)
        self.index = self.published.index
        worth, most = self.checkpoints.page_worth if self._exact else None, self.checkpoints.most_pages
        self.pool = self.published.pool = pool_of(layout, self._evicted, worth, most)
        self.sounds = Sounds(self.specs, self.pool, self.block_size, enabled=prefix_caching)
        self.tier: HostTier | None = None
        if host_tier is not None and prefix_caching:
            self.tier = self.published.tier = HostTier(host_tier, layout, self.index, self.checkpoints, price)
            self.tier.device = DeviceParts(self.pool, self.published.publish_loaded, self.published.forget)
        self.tables = Tables(self.specs, self.names, self.pool, self.published, self.checkpoints)
        self._search = PrefixSearch(self._prefixed, self.names, self.index)
        self._max_chunk = max_chunk
        self.sessions: Sessions | None = None
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.group_hits = [0] * len(self.specs)  # tokens after which each group could have gone on

    def _evicted(self, group: int, blocks: PySequence[int]) -> None:
        self.published.on_evict(group, self.sounds.evicted(group, blocks))

    def keep_sessions(self, bounds: SessionBounds, clock: Clock) -> None:
        """Keep what requests leave that ask for it."""
        if self.names.prefix_caching:
            pools = [self.pool] if self.tier is None else [self.pool, self.tier.pool]
            self.sessions = Sessions(bounds, self.names, self.index, pools, clock)
            if self.tier is not None:
                self.tier.saved = self.sessions.saved

    def keep_on_disk(self, store: BlockStore, memory: KeepsBelow, clock: Clock) -> DiskBelow:
        """Let blocks go from the host's memory to a store, and come back. There is a tier in the host's memory."""
        assert self.tier is not None
        hits = DiskHits(self.specs, self.names, self._search, self.index, self.tier.layout.block_bytes)
        self.tier.memory, self.tier.disk = memory, DiskBelow(self.tier, hits, store, memory, clock)
        if self.sessions is not None:
            self.sessions.disk = self.tier.disk
        return self.tier.disk

    # ---- admission --------------------------------------------------------------------------------------------

    def admit(self, *seqs: Sequence, reserve_blocks: int, fits: Fits = lambda seqs: True) -> bool:
        """Give `seqs` their prefix hits, if the rest of what they know would fit beside `reserve_blocks` spare blocks.

        A hit leaves at least one token to run (`Sequence.may_skip`). Sets blocks, source, published, cached_tokens and
        shared_tokens. fits: asked whether they may start, once they have their hits.
        """
        hits = [self._search.search(seq) if self.tier is None else self._find(seq) for seq in seqs]
        alone = len(self.specs) == 1  # no group of pictures' keys stands beside the one that is searched
        if len(hits) == 1 and hits[0] is NOTHING and self.tier is None and alone:
            [seq] = seqs
            self._take_nothing(seq)
            needed = self.specs[0].blocks_needed(_to_hold(seq), self._max_chunk, self.block_size)
            if not self.pool.can_take([reserve_blocks + needed]):
                return False
        elif not self._take_ends(seqs, hits, reserve_blocks):
            wanted = self._take_hits(seqs, [hit.whole for hit in hits], reserve_blocks)
            if not self.pool.can_take(wanted):
                self._take_back(seqs)
                return False
        for seq in seqs if any(hit.whole.blocks for hit in hits) else ():
            seq.shared_tokens = self._shared(seq)
        if not fits(seqs):
            self._take_back(seqs)
            return False
        for seq, hit in zip(seqs, hits, strict=True) if self.tier is not None else ():
            self._count_below(seq, hit.here)
        for seq, hit in zip(seqs, hits, strict=True):
            for checkpoint in self._begun_from(seq) if self._exact else ():
                seq.checkpoint = checkpoint
                self.checkpoints.use(checkpoint)
            if seq.preemptions:
                self.pool.returned(seq)
            else:  # later it finds what it wrote itself, which says nothing about prompts
                seq.prompt_hit = seq.cached_tokens
                self.queried_tokens += len(seq.tokens)
                self.hit_tokens += seq.cached_tokens
                for g, tokens in enumerate(hit.by_group):
                    self.group_hits[g] += tokens
                if self._exact and self.names.shares(seq):
                    self.checkpoints.note_prompt(self.names.skippable(seq), seq.cached_tokens)
            if seq.rising:
                assert self.tier is not None
                self.tier.load(seq)
        return True

    def _find(self, seq: Sequence) -> Found:
        """Return the longest hit, with blocks from the host's memory where loading them beats running the tokens."""
        assert self.tier is not None
        if not self.index.has_below or (seq.preemptions and self.tier.preempted == "recompute"):
            return self._search.search(seq)
        found = self._search.search(seq, below=True)
        num_bytes = self._search.bytes_below(seq, found.best, self.tier.layout.block_bytes)
        if not num_bytes:
            return found
        here = self._search.search(seq)
        start, end = here.best.tokens(self.block_size), found.best.tokens(self.block_size)
        pays = end > start and self.tier.pays(seq, num_bytes, start, end)
        return found._replace(here=start) if pays else here

    def _count_below(self, seq: Sequence, here: int | None) -> None:
        """Count what the device does not have of a request that starts, and what is found below."""
        assert self.tier is not None
        if not seq.preemptions and self.names.shares(seq):
            here = seq.cached_tokens if here is None else min(here, seq.cached_tokens)
            self.tier.counts.queried += len(seq.tokens) - here
            self.tier.counts.hit += seq.cached_tokens - here

    def would_admit(self, *seqs: Sequence, reserve_blocks: int, without: PySequence[Sequence]) -> bool:
        """Return True if `admit` would succeed if the sequences `without` had given their blocks back."""
        wanted = self._take_hits(seqs, [self._search.search(seq).whole for seq in seqs], reserve_blocks)
        found = self.pool.can_take(wanted)
        if not found and without:
            freed = [[block for seq in without for block in seq.blocks[g] if block] for g in range(len(self.specs))]
            found = self.pool.can_take(wanted, freed)
        self._take_back(seqs)
        return found

    def surely_admits(self, *seqs: Sequence, reserve_blocks: int) -> bool:
        """Return True if `admit` would find blocks, whatever is found of `seqs`. False says nothing."""
        most = reserve_blocks
        for seq in seqs:  # each copies a block at most
            most += -(-max(len(seq.tokens) + 1, seq.encoded) // self.block_size) + 1
        return not self._exact and self.pool.surely_has(most)

    def comes_with(self, seq: Sequence, chunks: Iterable[tuple[Sequence, int, int]]) -> bool:
        """Return True if `seq` should wait for the next plan, since one of these `chunks` (sequence, start, end) of the
        plan in the making runs tokens that it begins with, and leaves a state behind them. It is asked to."""
        if not self._exact or not self.names.shares(seq):
            return False
        own, size = self.names.skippable(seq), self.block_size
        best, fork = 0, b""
        for other, start, end in chunks:
            theirs = other.hashes[: end // size] if self.names.shares(other) else []
            n = bisect_left(range(min(len(own), len(theirs))), True, key=lambda i: own[i] != theirs[i])
            if n > best and n > -(-start // size):
                best, fork = n, own[n - 1]
        if not best or best * size - self._search.search(seq).whole.tokens(size) < self.checkpoints.least:
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
            taken = self.pool.take([not spec.encoded for spec in self.specs]) if seq.source else None
            for blocks, new in zip(seq.blocks, taken or (), strict=False):
                blocks += new
        return True

    def _take_hits(self, seqs: PySequence[Sequence], hits: PySequence[Hit], reserve_blocks: int) -> list[int]:
        """Give `seqs` their hits. The blocks per group that they need besides, and the spare ones. A block that is
        exact is only read, so it is none of those that a sequence needs; nor do such groups need spare ones, since a
        sequence takes its block along."""
        wanted = [0 if spec.exact or spec.encoded else reserve_blocks for spec in self.specs]
        for seq, hit in zip(seqs, hits, strict=True):
            self._take_hit(seq, hit)
            for g, (spec, blocks) in enumerate(zip(self.specs, seq.blocks, strict=True)):
                held = 0 if spec.exact else sum(block != NULL_BLOCK for block in blocks)
                size = seq.encoded if spec.encoded else _to_hold(seq)
                wanted[g] += spec.blocks_needed(size, self._max_chunk, self.block_size) - held
            for rising in seq.rising:
                wanted[rising.group] += rising.group in self._exact and rising.node_hash is not None
        return wanted

    def _take_nothing(self, seq: Sequence) -> None:
        """Do as `_take_hit` of a hit without blocks, where there is one group."""
        seq.has_emitted, seq.blocks, seq.source, seq.passed = False, [[]], [], [0]
        seq.published = seq.cached_tokens = seq.shared_tokens = seq.keeps_at = 0
        seq.checkpoint = None

    def _take_hit(self, seq: Sequence, hit: Hit) -> None:
        seq.has_emitted = False
        seq.blocks = [[] if spec.encoded else self._search.blocks(seq, g, hit) for g, spec in enumerate(self.specs)]
        if seq.encoded:
            seq.heard, found = self.sounds.find(seq)
            for g, blocks in found.items():
                seq.blocks[g] = blocks
        seq.source = [] if hit.end is None else [block or NULL_BLOCK for block in hit.end.blocks]
        if self.tier is not None:
            self.tier.hold(seq, hit)
        for g, blocks in enumerate(seq.blocks):
            for block in [*blocks, *seq.source[g : g + 1]]:
                if block != NULL_BLOCK:
                    self.pool.share(g, block)
        seq.published = hit.blocks
        seq.passed = [0] * len(self.specs)
        seq.cached_tokens, seq.shared_tokens = hit.tokens(self.block_size), 0
        seq.checkpoint, seq.keeps_at = None, 0

    def _shared(self, seq: Sequence) -> int:
        """Return the number of tokens of a sequence's hit that lie in blocks which others hold as well."""
        blocks = seq.blocks[0] if self.specs[0].span is None else []
        if seq.rising and NULL_BLOCK in blocks:
            blocks = blocks[: blocks.index(NULL_BLOCK)]
        return bisect_left(blocks, True, key=lambda block: self.pool.refs(0, block) < 2) * self.block_size

    def _take_back(self, seqs: PySequence[Sequence]) -> None:
        for seq in seqs:
            self.release(seq, 0)

    def _begun_from(self, seq: Sequence) -> set[Checkpoint]:
        """Return the checkpoint that it begins at, if there is one: all groups whose blocks are exact know the same."""
        blocks = seq.source or [blocks[-1] if blocks else NULL_BLOCK for blocks in seq.blocks]
        found = [self.checkpoints.at(g, blocks[g]) for g in self._exact]
        found += [self.checkpoints.below(rising.group, rising.below) for rising in seq.rising]
        return {checkpoint for checkpoint in found if checkpoint is not None}

    def copies(self, seqs: PySequence[Sequence], plan: int) -> tuple[CopyBlocks, ...]:
        """Return the copies that `plan`, the first of these sequences, must make. There are some sequences. Later plans
        may overwrite the sources."""
        starting = [(seq, seq.cached_tokens // self.block_size) for seq in seqs]
        copies = list[CopyBlocks]()
        for g in range(len(self._prefixed)):
            pairs = [(seq.source[g], seq.blocks[g][n]) for seq, n in starting if seq.source[g] != NULL_BLOCK]
            if pairs:  # what else they need was loaded
                copies.append(CopyBlocks(g, *zip(*pairs, strict=True)))
        for seq in seqs:
            self._release_source(seq, plan)
        return tuple(copies)

    def _release_source(self, seq: Sequence, last_plan: int) -> None:
        for g, block in enumerate(seq.source):
            if block != NULL_BLOCK:
                self.pool.release(g, block, last_plan)
        seq.source = []

    # ---- prompts ----------------------------------------------------------------------------------------------

    def chunk_end(self, seq: Sequence, start: int, end: int) -> int:
        """Return the end of a chunk that begins at `start` and could go on to `end`. A fork in the block in which
        the next one would begin could have no mark there, so that chunk begins with the block."""
        size, n = self.block_size, end // self.block_size
        cuts = start < n * size < end and (n + 1) * size <= len(seq.tokens)
        if not (cuts and self._exact and self.names.shares(seq)):
            return end
        return n * size if self.checkpoints.is_fork(self.names.hashes(seq, n + 1)[n]) else end

    def publish_chunk(self, seq: Sequence, start: int, end: int) -> list[Hash]:
        """Publish blocks as `publish` does, for a plan that is about to run the sequence's known tokens from `start` to
        `end`.

        Rows of one plan attend to each other's keys once all are written, but in a step of single tokens each row
        attends in the launch that writes its own. Where blocks are exact, other rows cannot use keys alone. Blocks that
        this plan may not read become matchable later.
        """
        return self.published.publish(seq, start if self._exact or end - start == 1 else end)

    def keep_state(self, seq: Sequence, start: int, end: int, reserve: int) -> tuple[int, list[SetBlocks], list[Hash]]:
        """Publish what a plan writes that runs the sequence's known tokens from `start` to `end`, once no other
        sequence can join that plan. It may keep a state at a boundary of blocks: returns after how many of the row's
        tokens (0: nowhere inside of it), the changes to the block tables, and the hashes that are new to the index.

        reserve: so many blocks must be left of each group that grows.
        """
        if not self._exact or not self.names.shares(seq):
            return 0, [], []
        boundary = self._boundary(seq, start, end)
        inside = 0 < boundary < end
        needs = inside or (boundary > 0 and self.tables.goes_on(seq, boundary))
        taken = self._spare_states(reserve) if needs else None
        changes = self._give_mark(seq, boundary, taken) if inside else self.tables.part(seq, boundary, taken)
        fresh = self.published.publish(seq, end)
        if boundary and bool(changes) == needs:
            fresh += self.published.publish_state(seq, boundary)
        return boundary - start if inside and changes else 0, changes, fresh

    def _spare_states(self, reserve: int) -> list[list[int]] | None:
        """Take one block of each exact group, if there are any to spare."""
        one = [int(g in self._exact) for g in range(len(self.specs))]
        return self.pool.take(one) if self.pool.can_take([have or reserve for have in one]) else None

    def _give_mark(self, seq: Sequence, boundary: int, taken: list[list[int]] | None) -> list[SetBlocks]:
        """Put blocks into the sequence's tables for its state at `boundary`, if there are any."""
        column, changes = boundary // self.block_size - 1, list[SetBlocks]()
        for g, new in enumerate(taken or ()):
            for block in new:
                if seq.blocks[g][column] != NULL_BLOCK:  # that of the state at the row's end, for pieces of the row
                    self.pool.release(g, seq.blocks[g][column], 0)
                seq.blocks[g][column] = block
                changes.append(SetBlocks(seq.slot, g, column, (block,)))
        return changes

    def _boundary(self, seq: Sequence, start: int, end: int) -> int:
        """Return after how many tokens of the sequence a row from `start` to `end` keeps its state; 0: nowhere."""
        size, reached = self.block_size, seq.reached
        first = -(-start // size)  # in the block in which the row begins, its state before it is still to be read
        hashes = self.names.hashes(seq, end // size)
        boundary = self.checkpoints.boundary(hashes, first, end, len(seq.tokens), reached)
        column = boundary // size - 1
        node = self.index.get(hashes[column]) if boundary else None
        if not boundary or (node is not None and all(node.blocks[g] is not None for g in self._exact)):
            return 0
        if boundary < end and any(seq.blocks[g][column] not in (NULL_BLOCK, seq.blocks[g][-1]) for g in self._exact):
            return 0
        return boundary if all(self.pool.is_worth(g, boundary - reached) for g in self._exact) else 0

    # ---- release ----------------------------------------------------------------------------------------------

    def release(
        self, seq: Sequence, last_plan: int, kv_len: int = 0, *, resumes: bool = False, ended: bool = False
    ) -> None:
        """Give all blocks back, the last first, so that it is evicted before what it continues. kv_len: tokens that
        they will hold the state of when all that is submitted has run. resumes: the sequence will go on. ended: its
        request has ended."""
        self.published.leave(seq, last_plan, kv_len, resumes=resumes)
        if ended and seq.request.keep and self.sessions is not None and seq.leader is seq and not seq.loads:
            self.sessions.left(seq)
        self._release_source(seq, last_plan)
        if self.tier is not None:
            self.tier.let_go(seq)
        if resumes and self.names.shares(seq):
            self.pool.await_return(seq, ((g, block) for g, blocks in enumerate(seq.blocks) for block in set(blocks)))
        for g, blocks in enumerate(seq.blocks):
            if blocks:
                self.pool.release_all(g, blocks, last_plan)
        seq.blocks = [[] for _ in self.specs]
        if seq.loads and self.tier is not None:
            self.tier.prune()
        seq.published, seq.checkpoint, seq.keeps_at = 0, None, 0

    def keep_below(self, seq: Sequence, *, below: bool, at_once: bool = True) -> None:
        """Note by which way a request that is preempted will have its blocks again, before it gives them back. below:
        from the host's memory; else what the device gives up of them is lost. at_once: as many of them go there now as
        may be on their way, the first ones first, since the device will need their room."""
        assert self.tier is not None
        for member in seq.members:
            member.runs_again = not below
        growing = [g for g in range(len(self._prefixed)) if g not in self._exact]
        for member in seq.members if below and at_once and self.names.shares(seq) else ():
            for node_hash in member.hashes[: member.published]:
                if not all(self.tier.save_early(node_hash, g) for g in growing):
                    return

    def forget_prefixes(self, *, on_disk: bool = True) -> None:
        """Let no later sequence find anything of what was, but for the disk if not `on_disk`. Requests may run
        meanwhile."""
        self.sounds.forget()
        self.published.unpublish(self.index.hashes())
        if self.sessions is not None:
            self.sessions.forget()
        if on_disk and self.tier is not None and self.tier.disk is not None:
            self.tier.disk.forget()
        if self.published.changes is not None:
            self.published.changes.cleared()
        self.checkpoints.forget_prompts()

    def forget_all(self) -> None:
        """Let no later sequence find anything of what was, and start counting anew."""
        self.forget_prefixes()
        self.checkpoints.forget_all()
        self.queried_tokens = self.hit_tokens = 0
        self.group_hits = [0] * len(self.specs)
        if self.tier is not None:
            self.tier.counts = TierCounts()

    @property
    def usage(self) -> float:
        """Share of the pages that running requests hold."""
        return 1 - self.pool.free_pages / max(1, self.pool.num_pages)
