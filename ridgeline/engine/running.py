"""The requests that hold slots: which of them prefill and which decode, their blocks, and the changes to send to the
worker.

A running request is *prefilling* while it has known tokens to feed, and *decoding* when its next input is the token it
just sampled. Decoding requests form one standing set of rows. Successive plans share its object until the set changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ridgeline.core.clock import MONOTONIC, Clock
from ridgeline.core.plan.embeds import shift_of
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import Assign, Delta, Release, RowKind, Rows, StepResult
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.engine.adapters import AdapterPlaces
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.cache.prefix import tenant_number
from ridgeline.engine.forecast import Forecast
from ridgeline.engine.plan_builder import NOBODY, InFlight, Standing
from ridgeline.engine.prefix_groups import PrefixGroups
from ridgeline.engine.pressure import Pressure
from ridgeline.engine.price import Price
from ridgeline.engine.row_drafting import RowDrafting
from ridgeline.engine.sequence import Sequence, Status
from ridgeline.engine.slots import SlotTable
from ridgeline.engine.step_drafting import StepDrafting


class Running:
    """The cache, the slot table and the sequences that have a place in them.

    each: tokens of a decoding row at most. emits: how many of them it may emit. ahead: positions behind a plan's tokens
    that need blocks too. drafting: how many drafts each verifies, if there are any. prefilling, decoding, paced:
    ordered sets; those in `paced` decode with lookahead 0, and those in `decoding` may be planned before their last
    token is known. deltas: what the next plan tells the worker, in order. begun: requests that it runs for the first
    time. adapters: the places of their adapters. prefixes: which decoding rows share their first blocks, if attention
    makes use of it.
    """

    def __init__(
        self, config: EngineConfig, layout: CacheLayout, clock: Clock = MONOTONIC, price: Price = Price()
    ) -> None:
        self.clock = clock
        self.each, self.ahead = 1 + config.num_drafts, config.drafted_ahead
        self._depth = config.draft_depth
        self.emits = self.each if self._depth is None else 1 + self._depth
        self.drafting: RowDrafting | StepDrafting | None = None
        if config.num_drafts:
            kind = StepDrafting if config.even_drafts else RowDrafting
            self.drafting = kind(config.num_drafts, depth=self._depth)
        self.cache = CacheManager(
            layout,
            prefix_caching=config.enable_prefix_caching,
            max_chunk=config.max_num_batched_tokens + self.ahead,
            state_share=config.state_cache_share,
            state_interval=config.state_checkpoint_interval,
            host_tier=config.host_tier,
            price=price,
        )
        if config.sessions is not None:
            self.cache.keep_sessions(config.sessions, clock)
        self.slots = SlotTable(config.max_num_seqs)
        self.adapters = AdapterPlaces(config.max_loras)
        self.forecast = Forecast(layout, self.slots, self.each - 1 + self.ahead)
        self.pressure = Pressure(self.cache, self.forecast, price)
        self.prefilling: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}
        self.paced: dict[Sequence, None] = {}
        self.deltas: list[Delta] = []
        self.begun: list[Request] = []
        self.prefixes = PrefixGroups(layout, config.max_num_seqs) if config.cascade and self.each == 1 else None
        self._standing: Standing | None = NOBODY  # rows of `decoding`; None when they are to be made anew
        self._changes: list[tuple[Sequence, bool]] = []  # those that came to that set since (True), or left it
        self._plain: tuple[Standing, Standing] | None = None  # rows with drafts, and the same without
        self._even, self._max_model_len = config.even_drafts, config.max_model_len
        self._cuts = config.cuts_chunks
        self._max_num_seqs = config.max_num_seqs
        self._companions = 0  # in slots
        self._last_result = 0.0  # when it came
        self.departures = 0  # the number of requests that have left
        self._left: deque[tuple[int, Sequence]] = deque()  # those that left last, each with that number then

    @property
    def num_seqs(self) -> int:
        return self._max_num_seqs - self.slots.num_free

    @property
    def num_requests(self) -> int:
        return self.num_seqs - self._companions

    def leaders(self) -> set[Sequence]:
        """Requests that give up their blocks if they are preempted."""
        running = {*self.decoding, *self.paced, *self.prefilling}
        return {seq.leader for seq in running} if self._companions else running

    def due(self, retired: int) -> list[Sequence]:
        """Requests with lookahead 0 whose last result is in: that of a plan up to `retired`."""
        return [seq for seq in self.paced if seq.last_plan <= retired]

    # ---- coming and going -------------------------------------------------------------------------------------

    def start(
        self,
        seq: Sequence,
        *,
        reserve_blocks: int,
        outranks: Callable[[Sequence], bool] = lambda seq: True,
        outranked: bool = False,
    ) -> bool:
        """Move a waiting request into its slots, with its prefix hits. False if its known tokens would not fit, nor if
        all would come to need more than there is, unless it outranks others. outranked: as `Pressure.admits` takes
        it."""
        members = seq.members
        if seq.request.adapter and not self.adapters.has_room(seq.request.adapter):
            return False
        admitted = self.cache.admit(
            *members,
            reserve_blocks=reserve_blocks,
            fits=lambda seqs: (
                self.num_requests == 0
                or self.pressure.admits(seqs, self.num_seqs, outranked=outranked)
                or outranks(seq)
            ),
        )
        if not admitted and self.num_requests == 0 and not seq.private:
            seq.make_private()  # its hit lies scattered over too many pages
            admitted = self.cache.admit(*members, reserve_blocks=0)
        if not admitted:
            return False
        for member in members:
            self.slots.acquire(member, member.cached_tokens)
            if member.request.adapter:
                self.adapters.take(member.request.adapter)
            self.deltas.append(self.full_form(member))
        self._companions += len(members) - 1
        seq.status = Status.RUNNING
        if seq.admitted is None:
            seq.admitted = self.clock()
            self.begun.append(seq.request)
        self.prefilling[seq] = None
        return True

    def begin_decoding(self, seq: Sequence, plan_id: int) -> None:
        if seq.request.lookahead == 0:
            self.paced[seq] = None
            seq.last_plan = plan_id + 1
        else:
            seq.drafts = self.drafting.wanted(seq) if self.drafting is not None else 0
            self.decoding[seq] = None
            self._changes.append((seq, True))
            if self.prefixes is not None:
                self.prefixes.note(seq.slot, seq.blocks, int(self.slots.kv_len[seq.slot]))

    def learn(self, drafting: RowDrafting | StepDrafting, record: InFlight, result: StepResult) -> None:
        """Let the next rows verify as many drafts as pays, by how those of a step turned out."""
        now = self.clock()
        since, self._last_result = max(record.made, self._last_result), now
        if drafting.note(record, result, now - since):
            self._standing = None

    def end_decoding(self, seq: Sequence) -> None:
        """Take a sequence out of those that decode: it leaves, or its last token is on the way."""
        del self.decoding[seq]
        self._changes.append((seq, False))

    def leave(
        self, seq: Sequence, plan_id: int, *, stopped: bool = False, resumes: bool = False, ended: bool = False
    ) -> None:
        """Take a running request off its slots and blocks. Plans up to plan_id may still refer to it. stopped: the
        device has ended it, so they do nothing for it. resumes: it will go on. ended: it will not."""
        self.departures += 1
        self._left.append((self.departures, seq))
        self.prefilling.pop(seq, None)
        self._companions -= len(seq.members) - 1
        for member in seq.members:
            self.paced.pop(member, None)
            if member in self.decoding:
                self.end_decoding(member)
            member.last_plan = plan_id
            ahead = int(self.slots.kv_len[member.slot])
            kv_len = member.written if stopped and member is seq else ahead
            self.cache.release(member, plan_id, kv_len, resumes=resumes, ended=ended)
            self.deltas.append(Release(member.slot))
            if member.request.adapter:
                self.adapters.release(member.request.adapter)
            self.slots.release(member)

    def finished_since(self, departures: int) -> list[Sequence]:
        """Return the requests that have left since there were so many departures, and have ended. It is asked about
        plans in the order in which they were made."""
        if not self._left:
            return []
        while self._left and self._left[0][0] <= departures:
            self._left.popleft()
        return [seq for _, seq in self._left if seq.status is Status.FINISHED]

    # ---- rows and blocks --------------------------------------------------------------------------------------

    def extend(self, seq: Sequence, num_tokens: int, plans: int, plan_id: int, *, known: bool) -> bool:
        """Give a sequence room for its next tokens; False if blocks are short. plans: in flight, plan_id the newest.
        known: it runs exactly these tokens, from where it is known to be."""
        certain = self.certain(seq, plans)
        self.deltas += self.cache.tables.let_go(seq, certain, plan_id)
        start = int(self.slots.kv_len[seq.slot])
        last = start + num_tokens - 1 if known and not self._cuts else certain  # a piece of it may end anywhere
        changes = self.cache.tables.extend(seq, last, start + num_tokens + self.ahead)
        if changes is None:
            return False
        self.deltas += changes
        self.slots.capacity[seq.slot] = len(seq.blocks[0]) * self.cache.block_size - (self.each - 1) - self.ahead
        return True

    def shrink_windows(self, plans: int, plan_id: int) -> bool:
        """Release what windows hold that no later token needs. Return False if that is nothing. plans: in flight,
        plan_id the newest."""
        changes = list[Delta]()
        for seq in (*self.decoding, *self.paced, *self.prefilling) if self.cache.tables.windowed else ():
            for member in seq.members:
                changes += self.cache.tables.let_go(member, self.certain(member, plans), plan_id)
        self.deltas += changes
        return bool(changes)

    def certain(self, seq: Sequence, plans: int) -> int:
        """The position from which on it goes on at the earliest: plans in flight may emit nothing where they verify."""
        uncertain = self.emits if self.emits > 1 else 0
        return max(0, int(self.slots.kv_len[seq.slot]) - plans * uncertain)

    def standing_rows(self) -> Standing:
        if self._standing is None or self._changes:
            old, changes, self._changes = self._standing, self._changes, []
            if not self.decoding:
                self._standing = NOBODY
            elif old is not None and self.drafting is None and len(changes) <= len(self.decoding):
                self._standing = old.after(changes, self.slots)
            else:
                drafts = self._most_drafts()
                self._standing = Standing.of(list(self.decoding), self.slots, drafts=drafts, emits=self.emits)
            if self.prefixes is not None and self._some_share(self._standing.columns_R):
                rows = replace(self._standing.rows, prefixes=self.prefixes.find(self._standing.columns_R))
                self._standing = self._standing._replace(rows=rows)
        return self._standing

    def _some_share(self, columns_R: np.ndarray) -> bool:
        """Return False if no decoding request can have blocks in common with another. The one that came later found
        them held, where the first group is one of full attention."""
        return bool(self.cache.specs[0].span is not None or self.slots.shared[columns_R].any())

    @property
    def drafts_pay(self) -> bool:
        """Return False if the requests that decode now should verify no drafts. Even steps are chosen one by one."""
        return self._even or self._most_drafts() > 0

    def _most_drafts(self) -> int:
        """Return the most drafts that a decoding row should verify. Those of even steps verify some if all of
        them can."""
        if self.drafting is None or (self._even and not all(seq.guessable for seq in self.decoding)):
            return 0
        masked = any(seq.request.token_mask is not None for seq in self.decoding)
        return self.drafting.width(len(self.decoding), masked=masked)

    def beside(self, standing: Standing, *, others: bool, chunks: bool) -> Standing:
        """Return the standing rows as they run beside others, or beside chunks of prompts, or alone. Trees are never
        verified beside chunks. Where steps are even rows verify drafts only if they run alone, and only where no draft
        could lie behind the longest context."""
        if standing.rows.tokens_each == 1 or not standing.seqs:
            return standing
        kv_len_R = self.slots.kv_len[standing.columns_R]
        uneven = self._even and (others or int(kv_len_R.max()) + self.emits > self._max_model_len)
        if not uneven and not (chunks and self._depth is not None):
            return standing
        if self._plain is None or self._plain[0] is not standing:
            self._plain = standing, Standing.of(standing.seqs, self.slots, drafts=0)
        return self._plain[1]

    def full_form(self, seq: Sequence) -> Assign:
        request = seq.request
        return Assign(
            slot=seq.slot,
            generation=seq.generation,
            kv_len=int(self.slots.kv_len[seq.slot]),
            last_token=-1,
            blocks=tuple(tuple(blocks) for blocks in seq.blocks),
            params=request.params,
            seed=request.seed,
            stop_ids=request.all_stop_ids,
            max_total_tokens=request.max_total_tokens,
            prompt=request.prompt_token_ids,
            output=tuple(seq.output),
            task=request.task,
            embedded=request.embeds is not None,
            tenant=tenant_number(request.cache_salt),
            keys=request.prefix_keys,
            adapter=self.adapters.place(request.adapter) if request.adapter else 0,
            shift=shift_of(seq.inserted) if seq.inserted else 0,
            speech=request.speech,
        )

    def expected(self, seqs: list[Sequence], rows: Rows, before: Iterable[InFlight]) -> dict[int, Assign]:
        """Full forms as they must stand on the device after the plan's deltas and before its rows. Those of requests
        that verify drafts in the plan, or in one in flight before it, are not known."""
        unsure = {
            seq
            for record in before
            for seq, kind in zip(record.seqs, record.plan.rows.kinds_R, strict=True)
            if kind == RowKind.VERIFY
        }
        return {
            seq.slot: replace(self.full_form(seq), kv_len=int(self.slots.kv_len[seq.slot] - n), last_token=None)
            for seq, kind, n in zip(seqs, rows.kinds_R, rows.num_tokens_R, strict=True)
            if kind != RowKind.VERIFY and seq not in unsure
        }
