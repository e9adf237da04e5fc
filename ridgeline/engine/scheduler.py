"""Decides, step by step, which requests run how many tokens.

Requests that decode advance by one token per plan (or several, `Scheduler`), as one standing set of rows: a steady step
costs a few vector operations. Requests that prefill feed what they know: their prompt, what a prefix hit left of it, or
everything again after a preemption. Counts are optimistic: the next plan is made before the last result is in, and
`update` corrects them.

`running.py` holds the requests that have slots, `results.py` takes a plan's result apart, and `recovery.py` says what
happens after a plan has failed.

A guided request is two sequences, the second with the negative prompt (`Sequence.members`). They start, are preempted
and end together, reach their last known token in the same plan, and from there on both take the token that the device
draws for the two of them. So each is planned like any other sequence, and no plan waits until the host has passed a
token from one to the other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as PySequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ridgeline.core.clock import MONOTONIC, Clock
from ridgeline.core.errors import ContractViolation, InvalidConfig
from ridgeline.core.plan.cache_figures import CacheFigures
from ridgeline.core.plan.embeds import parts_between, positions_between
from ridgeline.core.plan.request import Preemption, Request, RequestStats, StepEvents, TokenEvent
from ridgeline.core.plan.step import Feature, MaskedDrafts, RowKind, StepPlan, StepResult
from ridgeline.core.plan.worker import KeepsBelow
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.state import WINDOW_CHUNK
from ridgeline.engine import masks
from ridgeline.engine.cache.census import census
from ridgeline.engine.cache.disk import BlockStore, DiskBelow
from ridgeline.engine.figures import Figures
from ridgeline.engine.itl import ItlBound
from ridgeline.engine.masked_drafts import drafted
from ridgeline.engine.pace import Pace
from ridgeline.engine.pictures import HeldVectors
from ridgeline.engine.plan_builder import InFlight, PlanBuilder
from ridgeline.engine.policy import POLICIES, Policy
from ridgeline.engine.policy.base import Terms
from ridgeline.engine.price import price_of
from ridgeline.engine.recovery import Recovery
from ridgeline.engine.results import Results
from ridgeline.engine.running import Running
from ridgeline.engine.sequence import NO_SLOT, Sequence, Status
from ridgeline.engine.together import parts, runs_of, uncut
from ridgeline.engine.waiting import WaitingQueue
from ridgeline.kernels.base.cost import CostModel

LOOK_AGAIN = 16  # plans after which it is looked again if the first waiting request can start, or in whose place
LONG = 0.04  # of the context: longer prompts are long, if no threshold says otherwise


class Looked(NamedTuple):
    """The waiting request for which it was looked who would make way, with the number that ran and the newest plan
    then."""

    seq: Sequence | None = None
    running: int = 0
    plan_id: int = 0


NOTHING = Looked()


class Scheduler:
    """The requests of one engine. `schedule` makes plans; `update` takes their results in the same order.

    A decoding row runs its last token, and `config.num_drafts` drafts to verify behind it; it may emit as many tokens
    as it runs, or one more than a tree of drafts is deep. Blocks are taken for all of them, and for
    `config.drafted_ahead` positions behind them, so a request's cache may come to hold that many positions more than
    `max_total_tokens`. Such rows do not share reads of keys (`cascade`).
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout,
        cost_model: CostModel | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.config, tokens_each = config, 1 + config.num_drafts
        self._clock = clock
        self._price = price_of(cost_model, config)
        self.running = Running(config, layout, clock, self._price)
        self.cache, self.slots = self.running.cache, self.running.slots
        self.in_flight: deque[InFlight] = deque()
        self.on_finish: Callable[[Request, RequestStats], None] = lambda request, stats: None
        self.on_begin: Callable[[list[Request]], None] = lambda requests: None
        terms = Terms(config.policy, self._price, clock)
        self._policy: Policy = POLICIES[config.scheduling_policy](terms)
        self._by_id: dict[str, Sequence] = {}
        self._waiting = WaitingQueue(self._policy)
        self._looked = NOTHING
        self._pace = Pace(config.max_num_batched_tokens, config.max_num_seqs, tokens_each)
        self._itl = ItlBound(config.itl_target, cost_model, encodes=bool(config.encodes))
        self.pictures = HeldVectors(
            config.kept_bytes, config.vector_bytes, config.patch_cost, config.picture_patches, config.pixel_cost
        )
        self._whole, self._longest_chunk = not config.chunked_prefill, config.long_prefill_token_threshold
        self._most_partial, self._most_long = config.max_num_partial_prefills, config.max_long_partial_prefills
        self._long = config.long_prefill_token_threshold or int(LONG * config.max_model_len)
        self._recovery = Recovery()
        self._results = Results(self.running, self._recovery.suspects, self._finish, self._preempt)
        self.preemptions = Counter[Preemption]()
        self._arrivals = 0
        self._disk: DiskBelow | None = None
        self._plan_id = 0  # newest submitted
        self._retired = 0  # newest whose result is in

    # ---- requests ---------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return self.running.num_requests

    @property
    def num_waiting(self) -> int:
        return len(self._by_id) - self.num_running

    @property
    def newest_plan(self) -> int:
        """The number of the newest plan."""
        return self._plan_id

    @property
    def has_work(self) -> bool:
        return bool(self._by_id or self.in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. Ids must be unique among unfinished requests. Raise CannotPromise if the policy has an
        objective for it that cannot be met."""
        if request.id in self._by_id:
            raise ContractViolation(f"request id {request.id!r} is already in use.")
        self._policy.check(request)
        seq = Sequence(request, len(self.cache.specs), block_size=self.cache.block_size)
        if self.config.draft_depth is not None and seq.features & (Feature.PENALTY | Feature.MASK):
            seq.guessable = False  # what it may draw depends on the tokens before, which differ along a tree
        self._arrivals += 1
        seq.order = self._policy.order(request, self._arrivals)
        self._policy.come(seq)
        if self._looked.seq is not None and self._looked.seq.request.owner != request.owner:
            self._looked = NOTHING  # it may be entitled to what another owner has
        self._by_id[request.id] = seq
        longest = 1
        if self.config.both_ways is not None:
            seq.together = runs_of(request, self.config.both_ways)
            seq.private |= self.config.both_ways == "prompt"  # keys of its first tokens depend on the last one
            longest = max((end - first for first, end in seq.together), default=1)
        self._pace.keep_room(len(seq.members), len(seq.tokens) if request.whole else longest)
        sessions = self.cache.sessions
        session = sessions.came(seq) if sessions is not None and sessions.due else None
        if self._disk is None or not self._disk.fetch(seq, None if session is None else session.ahead):
            self._wait(seq)

    def keep_on_disk(self, store: BlockStore, memory: KeepsBelow) -> None:
        """Let blocks go from the host's memory to a store, and come back. There is a tier in the host's memory."""
        self._disk = self.cache.keep_on_disk(store, memory, self._clock)

    def leave_disk(self, seconds: float) -> None:
        """Write what is in the host's memory, for at most so many seconds, and close the store."""
        if self._disk is not None and self.cache.tier is not None:
            self._disk.close(seconds)
            self._disk = self.cache.tier.disk = None

    def await_disk(self, seconds: float) -> None:
        """Wait for the next block from the disk, if requests wait for one, at most so long."""
        if self._disk is not None and self._disk.awaited:
            self._disk.wait(seconds)

    def knows(self, request_id: str) -> bool:
        """Return True if the request is here and unfinished."""
        return request_id in self._by_id

    def figures(self) -> Figures:
        """Return the figures that the server shows of a scheduler."""
        cache, pool = self.cache, self.cache.pool
        pages_used = pool.num_pages - pool.free_pages
        requests, found = (self.num_running, self.num_waiting), (cache.queried_tokens, cache.hit_tokens)
        groups = Counter(dict(zip(cache.layout.names, cache.group_hits, strict=True)))
        counts = cache.checkpoints.counts if cache.checkpoints.groups else None
        drafts = None
        if (drafting := self.running.drafting) is not None:
            drafts = {**self._results.drafts, "seconds_saved": drafting.saved}
        shown = self._policy.figures()
        below = None if cache.tier is None else cache.tier.figures()
        pages = pages_used, pool.num_pages
        seen = self._pictures_seen()
        return Figures(*requests, *pages, *found, self.preemptions, groups, counts, drafts, shown, below, seen)

    def _pictures_seen(self) -> dict[str, int] | None:
        """Return the counts of pictures; None for a model that sees none."""
        held, known = self.pictures, self.slots.kv_len
        if not held.most:
            return None
        waiting = 0
        for seq in self._by_id.values():
            if seq.inserted:
                done = 0 if seq.slot < 0 else int(known[seq.slot])
                waiting += len({each.name for each in seq.inserted if each.made_of is not None and each.start >= done})
        return {"queries": held.hits + held.misses, "hits": held.hits, "waiting": waiting}

    def census(self) -> CacheFigures:
        """Return the figures of the cache, by a few milliseconds' look at it."""
        return census(self.cache, (member for seq in self._by_id.values() for member in seq.members))

    def stats_of(self, request_id: str) -> RequestStats:
        """Return the statistics so far of an unfinished request."""
        return self._by_id[request_id].stats(self._clock())

    def abort(self, request_id: str, at_token: int | None = None) -> bool:
        """End a request now; tokens still in flight for it will be dropped. False if it is not (or no longer) here.

        at_token: output tokens the caller keeps (it found a stop string there); later ones do not count.
        """
        seq = self._by_id.get(request_id)
        if seq is None:
            return False
        if at_token is not None:
            del seq.tokens[seq.num_prompt + at_token :]
        self._finish(seq)
        return True

    # ---- making a plan ----------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run before a result comes in."""
        if self._recovery.failed and not self.recovered():
            return None
        if self.in_flight and not self.in_flight[-1].masks_given:
            return None  # what the next plan needs is not sampled before the masks are there
        if self._disk is not None:
            for seq in self._disk.arrivals():
                self._wait(seq)
        if self.cache.sessions is not None and self.cache.sessions.due:
            self.cache.sessions.tick()
        builder = PlanBuilder(self._pace.tokens, self.slots)
        if self._recovery.suspects:
            self._run_a_suspect(builder)
        else:
            if self._waiting.lanes:
                self._follow_policy()
            self._grow_running()
            builder.standing = self.running.standing_rows()
            builder.budget -= int(np.add.reduce(builder.standing.rows.num_tokens_R))
            if self.running.paced:
                self._advance_paced(builder)
            if self.running.prefilling or (self._waiting.lanes and self.running.num_seqs < self._pace.rows):
                self._advance_prompts(builder)
            if self._waiting.aside:
                self._waiting.back()
            self._advance_decoding(builder)
        if not builder.others and not builder.standing.seqs and not self._load_at_once(builder):
            return self._unblock()
        return self._submit(builder)

    def _follow_policy(self) -> None:
        """Give waiting requests the places that they have by now, and preempt those that may not run any more."""
        if self._policy.fell:
            self._policy.fell = False
            self._waiting.sort()
        for seq, order in self._policy.due():
            seq.order = order
            self._push(seq)
        for seq in self._policy.overdrawn(self.running.leaders):
            self._preempt(seq, Preemption.PRIORITY)
        if self._policy.preempts:
            self._make_way_by_rank()

    def _make_way_by_rank(self) -> None:
        """Preempt requests that the first waiting one outranks, the last in order first, until it can start.

        Done before any row is drafted, as `_grow_running` is: a preempted request must not be in the plan. Not in every
        plan, unless another comes first by its own doing: its prefix is searched each time, which takes milliseconds
        where it is long.
        """
        looked = self._looked
        waits = looked.seq is not None and looked.seq.status is Status.WAITING
        if waits and looked.running <= self.running.num_seqs and self._plan_id < looked.plan_id + LOOK_AGAIN:
            return
        seq = self._waiting.head()
        if seq is None or seq.last_plan > self._retired:
            return
        self._take_places(seq)
        self._looked = Looked(seq, self.running.num_seqs, self._plan_id)

    def _take_places(self, seq: Sequence) -> None:
        if self._surely_starts(seq):
            return
        entitled = self._policy.entitled(self._waiting.heads(), self._waiting.lanes)
        if entitled is not None and not self._could_start(seq, ()):
            entitled.order = self._policy.promote(entitled)  # also before those preempted for it
            self._push(entitled)
            seq = entitled
        lower = self._policy.lower(seq, self.running.leaders)
        if not lower or not self._could_start(seq, lower) or self._could_start(seq, ()):
            return
        lower = self._policy.lower(seq, self.running.leaders, self.running.pressure.cost)
        while not self._could_start(seq, ()):
            self._preempt(lower.pop(), Preemption.PRIORITY)

    def _outranks(self, seq: Sequence) -> bool:
        """Return True if some running request would be preempted for this one."""
        return self._policy.preempts and bool(self._policy.lower(seq, self.running.leaders))

    def _surely_starts(self, seq: Sequence) -> bool:
        """Return True if there are slots and blocks for a request, whatever is found of it. It takes no search."""
        free = self.running.num_seqs + len(seq.members) <= self._pace.rows and not seq.request.adapter
        return free and self.cache.surely_admits(*seq.members, reserve_blocks=self.running.num_seqs)

    def _could_start(self, seq: Sequence, without: PySequence[Sequence]) -> bool:
        """Return True if there would be slots and blocks for `seq` if the running requests `without` had none."""
        leaving = [member for other in without for member in other.members]
        staying = self.running.num_seqs - len(leaving)
        room = staying + len(seq.members) <= self._pace.rows
        if room and (adapter := seq.request.adapter):
            room = self.running.adapters.has_room(adapter, (each.request.adapter for each in leaving))
        return room and self.cache.would_admit(*seq.members, reserve_blocks=staying, without=leaving)

    def _grow_running(self) -> None:
        """Give blocks to every request whose next tokens have none, preempting the last in order if need be."""
        standing, kv_len, capacity = self.running.standing_rows(), self.slots.kv_len, self.slots.capacity
        full_R = kv_len[standing.columns_R] >= capacity[standing.columns_R]
        full = [standing.seqs[i] for i in full_R.nonzero()[0].tolist()]
        if self.running.paced:
            full += [seq for seq in self.running.due(self._retired) if kv_len[seq.slot] >= capacity[seq.slot]]
        if full and self._relieve():
            full = [seq for seq in full if seq.slot != NO_SLOT]
        if not full:
            return
        for seq in full if self.cache.tables.windowed else ():
            certain = self.running.certain(seq, len(self.in_flight))
            self.running.deltas += self.cache.tables.let_go(seq, certain, self._plan_id)
        changes = self.cache.tables.add_block(full) if self.running.each <= self.cache.block_size else None
        if changes is not None:
            self.running.deltas += changes
            capacity[[seq.slot for seq in full]] += self.cache.block_size
            return
        for seq in full:
            if seq.slot != NO_SLOT:
                self._grow(seq)

    def _relieve(self) -> bool:
        """Preempt requests if too few blocks are left. Return True if any was."""
        before = self.running.departures
        pressure = self.running.pressure
        while self.num_running > 1 and pressure.is_high(self.running.num_seqs):
            if self._shrink_windows():
                continue
            if len(leaders := self.running.leaders()) < 2:
                break  # the others' last tokens are on the way, and their blocks come back then
            for victim in pressure.victims(self._policy.keeping(leaders, pressure.cost)):
                self._make_way(victim)
        return self.running.departures > before

    def _grow(self, seq: Sequence) -> bool:
        """Allocate blocks for a row's tokens; False if the request itself was preempted."""
        while not self._extend(seq, self.running.each, known=False):
            if self._shrink_windows():
                continue
            victim = self._policy.keeping(self.running.leaders(), self.running.pressure.cost)[-1]
            self._make_way(victim)
            if victim is seq.leader:
                return False
        return True

    def _shrink_windows(self) -> bool:
        return self.running.shrink_windows(len(self.in_flight), self._plan_id)

    def _make_way(self, seq: Sequence) -> None:
        """Preempt for want of blocks. A request that runs alone will do without the cache: then its blocks fill whole
        pages, and it fits (`CacheLayout.pages_needed`)."""
        if self.num_running == 1:
            seq.make_private()
        self._preempt(seq, Preemption.BLOCKS)

    def _advance_decoding(self, builder: PlanBuilder) -> None:
        if self.running.drafting is not None:
            builder.standing = self.running.beside(
                builder.standing, others=bool(builder.others), chunks=bool(builder.chunks)
            )
        seqs, rows, columns_R, last_kv_len_R, *_ = builder.standing
        kv_len_R = self.slots.kv_len[columns_R] + rows.num_logits_R
        self.slots.kv_len[columns_R] = kv_len_R
        for i in (kv_len_R >= last_kv_len_R).nonzero()[0].tolist():
            self.running.end_decoding(seqs[i])  # its last token is on the way, if every row emits what it may

    def _advance_paced(self, builder: PlanBuilder) -> None:
        for seq in self.running.due(self._retired):
            self.slots.kv_len[seq.slot] += 1
            builder.add(seq, 1, 1, None)
            seq.last_plan = self._plan_id + 1
            if self.slots.kv_len[seq.slot] >= self.slots.last_kv_len[seq.slot]:
                del self.running.paced[seq]

    def _advance_prompts(self, builder: PlanBuilder) -> None:
        """Continue prompts under way and admit waiting requests, all in one order, until the budget is used up.

        No request is admitted past one that waits for room, and nothing runs past a prompt that is held up. Requests
        that wait for something of their own let others pass (engine/waiting.py).
        """
        if self._most_partial > 1:
            prompts = len(self.running.prefilling) + self.num_waiting
            builder.share = max(1, builder.budget // max(1, min(self._most_partial, prompts)))
        self._itl.promise(self._policy.itl)
        prefilling, tier = self.running.prefilling, self.cache.tier
        ready = prefilling if tier is None else filter(tier.is_there, prefilling)
        under_way = deque(sorted(ready, key=self._policy.place))
        waiting, cut = self._waiting.head(), self._itl.target is not None and not self._whole
        decodes = cut and any(not seq.request.background for seq in builder.seqs)  # a client waits for a token
        while builder.budget > 0 and (under_way or waiting is not None):
            starts = waiting is not None and not (
                under_way and self._policy.place(under_way[0]) < self._policy.place(waiting)
            )
            seq = waiting if starts and waiting is not None else under_way[0]
            if cut and (decodes or (seq.request.background and not seq.request.whole)):
                cut = False
                self._bound(builder, seq)
            elif starts and (seq.request.adapter or self._most_long) and self._passes(seq):
                waiting = self._waiting.head()
            elif starts:
                waits = builder.chunks and not seq.has_waited and self._waits(builder, seq)
                admitted = not waits and self._admit(seq)
                there = admitted and (tier is None or tier.is_there(seq))
                if there and not self._add_chunk(builder, seq):
                    return
                others = admitted and (not self._waiting.aside or self._waiting.lets_more_pass)
                waiting = self._waiting.head() if others else None
            elif not self._add_chunk(builder, under_way.popleft()):
                return

    def _passes(self, seq: Sequence) -> bool:
        """Let those behind the first waiting request come first, if it cannot start for a reason that they need not
        have. Return True if so."""
        adapter = seq.request.adapter
        lacks = bool(adapter) and not self.running.adapters.has_room(adapter)
        return (lacks or self._is_one_too_many(seq)) and self._waiting.pass_by(seq)

    def _is_one_too_many(self, seq: Sequence) -> bool:
        """Return True if a waiting prompt is long, and enough long ones are under way."""
        if not self._most_long or len(seq.tokens) <= self._long:
            return False
        return sum(len(each.tokens) > self._long for each in self.running.prefilling) >= self._most_long

    def _bound(self, builder: PlanBuilder, seq: Sequence) -> None:
        """Take from the budget what would make the step too long for others.

        The others are requests that decode. A background prompt is cut for later arrivals as well, and nothing is cut
        for requests that decode in the background, because no client waits for their tokens.
        """
        start = int(self.slots.kv_len[seq.slot]) if seq.slot != NO_SLOT else 0
        spent = builder.encoded_tokens + builder.seen_tokens + sum(end - start for _, start, end in builder.chunks)
        wanted = len(seq.tokens) - start if not spent and self._is_alone(seq) else None
        lengths_R = self.slots.kv_len[builder.columns_R]
        builder.budget = self._itl.prompt_tokens(lengths_R, start, builder.budget + spent, wanted) - spent

    def _is_alone(self, seq: Sequence) -> bool:
        """Return True if only this one request has tokens of a prompt to run."""
        starting = seq.slot == NO_SLOT
        alone = self.num_waiting == starting and len(self.running.prefilling) == (not starting)
        return alone and seq.companion is None and not seq.encoded

    def _admit(self, seq: Sequence) -> bool:
        """Start a waiting request beside those that run. False if there is no room for it."""
        num_seqs = self.running.num_seqs
        room = self.cache.pool.free_pages, num_seqs
        if seq.last_plan > self._retired or self._waiting.refused(seq, *room, self._plan_id - LOOK_AGAIN):
            return False
        if 0 < self._most_partial <= len(self.running.prefilling) or (self._most_long and self._is_one_too_many(seq)):
            return False
        if num_seqs + len(seq.members) > self._pace.rows or (self._policy.counts and self._policy.held(seq)):
            return False
        outranked = self._policy.preempts and self._policy.outranked(seq)
        if not self.running.start(seq, reserve_blocks=num_seqs, outranks=self._outranks, outranked=outranked):
            self._waiting.refuse(seq, *room, self._plan_id)
            return False
        self._policy.begin(seq)
        if self._waiting.aside:
            self._waiting.overtake()
        return True

    def _waits(self, builder: PlanBuilder, seq: Sequence) -> bool:
        """Return True if a request should skip this plan, once, because the next one finds more of its beginning
        in the cache."""
        found = [self.cache.comes_with(member, builder.chunks) for member in seq.members]
        seq.has_waited = any(found)
        return seq.has_waited

    def _run_a_suspect(self, builder: PlanBuilder) -> None:
        if self.in_flight:
            return
        seq = min(self._recovery.suspects, key=self._policy.place)
        room = self.slots.num_free >= len(seq.members)
        if seq.slot == NO_SLOT:
            if not (room and self.running.start(seq, reserve_blocks=0)):
                self._preempt_all(Preemption.RECOVERY)
                self.running.start(seq, reserve_blocks=0)
            if seq.slot != NO_SLOT:
                self._policy.begin(seq)
        self._await_loads(builder, seq)
        if not self._add_chunk(builder, seq):
            self._preempt_all(Preemption.RECOVERY)
            seq.make_private()

    def _await_loads(self, builder: PlanBuilder, seq: Sequence) -> None:
        """Let the plan's rows wait for what the request needs from the host's memory."""
        if self.cache.tier is not None and not self.cache.tier.is_there(seq):
            builder.loads = max(member.loads for member in seq.members)

    def _load_at_once(self, builder: PlanBuilder) -> bool:
        """Add the first prompt if it waits for its blocks alone: there is no other work that loads could hide behind.
        If no result is due, later ones make way for it. False if it has them, or there is no room for its row."""
        tier, prefilling = self.cache.tier, self.running.prefilling
        seq = min(prefilling, key=self._policy.place) if tier is not None and prefilling else None
        if tier is None or seq is None or tier.is_there(seq):
            return False
        self._await_loads(builder, seq)
        while not self._add_chunk(builder, seq):
            last = max(prefilling, key=self._policy.place)
            if self.in_flight or last is seq:
                return False
            self._make_way(last)
        return True

    def _unblock(self) -> StepPlan | None:
        """Nothing could be planned. If no result is due either, prompts hold each other's blocks: one is preempted."""
        if self.in_flight or not self.running.prefilling:
            return None
        self._make_way(max(self.running.prefilling, key=self._policy.place))
        return self.schedule()

    # ---- pieces of a plan -------------------------------------------------------------------------------------

    def _add_chunk(self, builder: PlanBuilder, seq: Sequence) -> bool:
        """Rows for as much of the request's known tokens as the budget allows; False when it, or blocks, are short.
        Encoder inputs use up the budget too. They are never cut, so the first one of a step may exceed it."""
        first = self.slots.kv_len[seq.slot] == seq.cached_tokens
        reads = len(seq.request.encoder_ids) if first and not seq.heard else 0
        if seq.crossed and first:
            reads = sum(map(self.pictures.cost, seq.unseen.shown))
        if (builder.encoded_tokens or builder.seen_tokens) and reads >= builder.budget:
            return False
        sure, budget = WINDOW_CHUNK - self.running.ahead, builder.budget
        whole = seq.request.whole or (self._whole and not self._pace.shrunk)
        if not whole:
            most = min(self._longest_chunk or budget, builder.share or budget)
            budget = min(budget, max(most, len(seq.members)))  # whose last tokens run together
        smaller = [sure] if self.cache.tables.windowed and budget > sure else []
        for most in (budget, *smaller):  # admission made room for no more beside a window
            chunks = self._chunks(builder, seq.members, most, whole=whole)
            if not chunks:
                return False
            if all(self._extend(member, count, known=True) for member, count in chunks):
                for member, count in chunks:
                    self._add_row(builder, member, count)
                return True
            whole = seq.request.whole
        return False

    def _chunks(
        self, builder: PlanBuilder, members: tuple[Sequence, ...], budget: int, *, whole: bool
    ) -> list[tuple[Sequence, int]]:
        """Return the sequences whose tokens come next, with the number of tokens of each. Two keep their last tokens
        until both can have theirs. A prompt that runs whole waits for a step that has room for it."""
        starts = [int(self.slots.kv_len[member.slot]) for member in members]
        ends = [len(member.tokens) for member in members]
        if len(members) > 1 and sum(ends) - sum(starts) > budget:
            ends = [end - 1 for end in ends]
        chunks: list[tuple[Sequence, int]] = []
        for member, start, end in zip(members, starts, ends, strict=True):
            if whole and end - start > budget:
                break
            stop = min(end, start + budget)
            if member.inserted and not member.crossed:
                stop = self.pictures.end(member.inserted, start, stop, builder)
            if member.together:
                stop = uncut(member.together, start, stop, builder)
            count = self.cache.chunk_end(member, start, stop) - start
            budget -= count
            if count:
                chunks.append((member, count))
        return chunks

    def _add_row(self, builder: PlanBuilder, seq: Sequence, num_tokens: int) -> None:
        """The sequence's next known tokens, for which it has room."""
        columns, slot = self.slots, seq.slot
        start = int(columns.kv_len[slot])
        end = start + num_tokens
        columns.kv_len[slot] = end
        complete = end == len(seq.tokens)
        inserted = parts_between(seq.inserted, start, end) if seq.inserted else ()
        crossed, first = None, start == seq.cached_tokens
        if self.config.crosses:
            inserted = tuple(replace(each, shown=None) for each in inserted)
            crossed = seq.unseen if first else None
        elif inserted:
            inserted = self.pictures.placed(inserted, builder)
            if self.config.adapted_encoders and seq.request.adapter:
                place = self.running.adapters.place(seq.request.adapter)
                inserted = tuple(replace(each, adapter=place) for each in inserted)
        if seq.inserted and (positions_3T := positions_between(seq.inserted, start, end)) is not None:
            builder.positions[seq] = positions_3T
        if seq.together:
            builder.both_ways[seq] = parts(seq.together, start, end)
        ids, encoded = np.array(seq.tokens[start:end], np.int32), seq.request.encoder_ids if first else ()
        builder.add(seq, end - start, int(complete), ids, inserted, encoded, crossed)
        if first and seq.heard < seq.encoded:
            self.cache.sounds.keep(seq)
        if crossed is not None:
            builder.takes(sum(map(self.pictures.cost, crossed.shown)))
        seq.loads = 0
        if seq.source:
            builder.copying.append(seq)
        builder.published += self.cache.publish_chunk(seq, start, end)
        builder.chunks.append((seq, start, end))
        if complete:
            self.running.prefilling.pop(seq.leader, None)
            if end < columns.last_kv_len[slot]:
                self.running.begin_decoding(seq, self._plan_id)

    def _extend(self, seq: Sequence, num_tokens: int, *, known: bool) -> bool:
        return self.running.extend(seq, num_tokens, len(self.in_flight), self._plan_id, known=known)

    def _keep_states(self, builder: PlanBuilder) -> None:
        """Choose where prompts leave states behind, now that no sequence can join the plan any more."""
        for seq, start, end in builder.chunks:
            mark, changes, published = self.cache.keep_state(seq, start, end, reserve=self.running.num_seqs)
            if mark:
                builder.marks[seq] = mark
            self.running.deltas += changes
            builder.published += published

    def _submit(self, builder: PlanBuilder) -> StepPlan:
        self._plan_id += 1
        if builder.chunks:
            self._keep_states(builder)
        seqs, rows, spans = builder.assemble()
        kv_bound_R = self.slots.kv_len[rows.slots_R]
        if self.config.draft_depth is not None:
            kv_bound_R = kv_bound_R + np.where(rows.kinds_R == RowKind.VERIFY, rows.num_tokens_R - rows.num_logits_R, 0)
        copies = self.cache.copies(builder.copying, self._plan_id) if builder.copying else ()
        moves, tier = None, self.cache.tier
        if tier is not None:
            moves = tier.moves(self._plan_id, lambda: self._price.of_rows(rows, kv_bound_R).sum(), builder.loads)
        plan = StepPlan(
            id=self._plan_id,
            rows=rows,
            kv_bound_R=kv_bound_R,
            spans=spans,
            deltas=tuple(self.running.deltas),
            copies=copies,
            moves=moves,
            adapters=tuple(self.running.adapters.placed),
            forgets=self.pictures.forgotten() if self.pictures.due else (),
            reset=self._recovery.reset,
            expected=self.running.expected(seqs, rows, self.in_flight) if self.config.debug_checks else None,
            drafts=self.running.drafting is not None and self.running.drafts_pay,
        )
        self.running.deltas.clear()
        self.running.adapters.placed.clear()
        if self._policy.counts:
            self._policy.serve(seqs, rows, kv_bound_R)
        self._recovery.reset = False
        departures = self.running.departures
        flying = InFlight(plan, seqs, builder.published, departures, self._clock(), builder.standing)
        self.in_flight.append(flying)
        if self.running.begun:
            self.on_begin(self.running.begun)
            self.running.begun = []
        return plan

    # ---- taking a result --------------------------------------------------------------------------------------

    def update(self, result: StepResult, limit: float | None = None) -> StepEvents:
        """Take the result of the oldest plan in flight. limit: the least seconds that the cost model gives its step, if
        they are known."""
        record = self.in_flight.popleft() if self.in_flight else None
        if record is None or record.plan.id != result.plan_id:
            raise ContractViolation(f"a result for plan {result.plan_id} came where another was due.")
        if result.error is not None or result.dropped:
            events = StepEvents(events=self._note_failure(record, result))
        else:
            self._retired = result.plan_id
            if self.cache.tier is not None:
                self.cache.tier.retire(result.plan_id)
            if self._policy.counts:
                self._policy.ran()
            if self._pace.shrunk:
                self._pace.went_well()
            if self._itl.target is not None:
                self._itl.note(record.plan, result.elapsed, limit)
            events = self._results.accept(record, result, self.in_flight, self._plan_id)
            if self.cache.published.partings.parted:
                self.cache.published.settle(self._retired)
        events.events.extend(self._results.unsent)
        self._results.unsent.clear()
        return events

    def masks_due(self) -> tuple[int, dict[int, np.ndarray], dict[int, MaskedDrafts] | None] | None:
        """Masks and drafts for the oldest plan in flight if it waits for them, as `Worker.provide_masks` takes them."""
        record = self.in_flight[0] if self.in_flight else None
        if record is None or record.masks_given:
            return None
        record.masks_given = True
        seqs, rows, fail = record.seqs, record.plan.rows, self._results.fail
        found = masks.due({row: seqs[row] for row in np.flatnonzero(rows.num_logits_R).tolist()}, fail)
        if not rows.features & Feature.GIVEN:
            return record.plan.id, found, None
        verify = (rows.kinds_R == RowKind.VERIFY).nonzero()[0].tolist()
        wanted = {row: (seqs[row], int(rows.num_tokens_R[row]) - 1) for row in verify}
        return record.plan.id, found, drafted(wanted, found, self.config.lookup, fail)

    # ---- leaving ----------------------------------------------------------------------------------------------

    def _preempt(self, seq: Sequence, reason: Preemption) -> None:
        resumes = reason not in (Preemption.RECOVERY, Preemption.SLEEP)
        if resumes and self.cache.tier is not None:
            below, at_once = self.running.pressure.way_back(seq).below, reason is Preemption.BLOCKS
            self.cache.keep_below(seq, below=below, at_once=at_once)
        self.running.leave(seq, self._plan_id, resumes=resumes)
        for member in seq.members:
            member.preemptions[reason] += 1
        self.preemptions[reason] += 1
        self._policy.left(seq)
        self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self._policy.wait(seq)
        self._push(seq)

    def _push(self, seq: Sequence) -> None:
        """Let a request wait in its place."""
        self._waiting.push(seq)
        if self._looked.seq is not None and self._policy.place(seq) < self._policy.place(self._looked.seq):
            self._looked = NOTHING

    def _preempt_all(self, reason: Preemption) -> None:
        for seq in [seq for seq in self._by_id.values() if seq.slot != NO_SLOT]:
            self._preempt(seq, reason)

    def vacate(self) -> None:
        """Preempt all requests, and forget all prefixes in the cache: its memory goes. No plan may be in
        flight. The disk is not forgotten: the weights stay."""
        self._preempt_all(Preemption.SLEEP)
        self.cache.forget_prefixes(on_disk=False)
        self.pictures.forget()
        if self.cache.tier is not None:
            self.cache.tier.leave_device()

    def renew_weights(self, version: str) -> None:
        """Give all that is cached from now on other names, but for blocks of requests that hold some: these continue
        what older weights began. No plan may be in flight."""
        self.cache.forget_prefixes()
        self.cache.names.weights = version
        for seq in (member for leader in self._by_id.values() for member in leader.members):
            if not seq.loads and not any(seq.blocks):
                seq.hashes.clear()

    def forget_adapter(self, number: int) -> bool:
        """Forget an adapter, with which no request waits or runs. Return False while a plan under way may bring it to
        the device; call again then."""
        placed = (each for record in self.in_flight for each in record.plan.adapters)
        if any(each.adapter == number for each in (*placed, *self.running.adapters.placed)):
            return False
        self.running.adapters.drop(number)
        return True

    def untouched(self) -> list[Request]:
        """Return the requests, none of which has a token yet. Raise InvalidConfig if some have."""
        begun = sum(bool(seq.output) for seq in self._by_id.values())
        if begun:
            raise InvalidConfig(f"{begun} requests have written some of their output; pause with mode abort or wait.")
        return [seq.request for seq in self._by_id.values()]

    def _finish(self, seq: Sequence, *, stopped: bool = False) -> None:
        for member in seq.members:
            self.cache.pool.returned(member)
        if seq.slot != NO_SLOT:
            self.running.leave(seq, self._plan_id, stopped=stopped, ended=True)
            self._policy.left(seq)
        elif self._disk is None or not self._disk.leave(seq):
            self._policy.dropped(seq)
        self._policy.ended(seq)
        if seq.request.task is None:
            self.running.forecast.outputs.note(len(seq.output), cut=len(seq.tokens) >= seq.request.max_total_tokens)
        seq.status = Status.FINISHED
        self._recovery.suspects.pop(seq, None)
        del self._by_id[seq.request.id]
        self.on_finish(seq.request, seq.stats(self._clock()))

    # ---- failure ----------------------------------------------------------------------------------------------

    def _note_failure(self, record: InFlight, result: StepResult) -> list[TokenEvent]:
        if self._policy.counts:
            self._policy.failed(record.seqs, record.plan.rows, record.plan.kv_bound_R)
        shrunk = result.out_of_memory and self._pace.shrink(record.plan)  # together they were too many
        guilty = self._recovery.note(record, blame=result.error is not None and not shrunk)
        if guilty is None:
            return []
        self._finish(guilty)
        return [TokenEvent(guilty.request.id, -1, "error", error=result.error)]

    def recovered(self) -> bool:
        """If plans failed, start over from what retired plans left, once nothing is in flight. False while plans still
        drain."""
        if not self._recovery.failed:
            return True
        if self.in_flight:
            return False
        self.cache.published.settle_nothing()
        self.cache.sounds.forget()
        for node_hashes in self._recovery.start_over():
            self.cache.published.unpublish(node_hashes)
        if self.cache.tier is not None:
            self.cache.tier.undo()
        self._preempt_all(Preemption.RECOVERY)
        self.running.deltas.clear()
        self.pictures.forget()
        self.running.adapters.forget()
        self._retired = self._plan_id
        return True
