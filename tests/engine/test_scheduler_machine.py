"""The scheduler under everything at once: arrivals, aborts, faults, masks, tiny pools, plans in flight.

`RIDGELINE_EXAMPLES=1000 pytest tests/engine` looks harder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, takewhile

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ridgeline.core.plan.request import Request, SamplingParams, TokenEvent
from ridgeline.core.plan.step import Finish, StepPlan, StepResult
from ridgeline.core.plan.token_bits import packed
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.settings.host_tier import HostTierSettings
from ridgeline.core.settings.policies import PolicySettings
from ridgeline.engine.cache.events import Changes
from ridgeline.engine.cache.host_tier import HostTier
from ridgeline.engine.cache.prefix import chain_hash, root_hash
from ridgeline.engine.plan_builder import InFlight
from ridgeline.engine.policy import POLICIES
from ridgeline.engine.prefix_groups import PrefixGroups
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.sequence import Sequence
from tests.engine.followed import Follower, findable
from tests.engine.ideal_host import ON_ITS_WAY
from tests.engine.ideal_worker import EOS, NAN, VOCAB, IdealWorker, alone, digests
from tests.engine.layouts import GROUPS, layout_of
from tests.engine.profiles import machine_settings

MAX_LEN = 22
PREFIXES = [(1, 2, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2)[:n] for n in (3, 6, 8, 11, 12)]


class Alternating:
    """Even and odd tokens in turn; `faulty_at`: what fails there ("accept", "allowed", "nothing")."""

    def __init__(self, fault: str | None = None, faulty_at: int = 0) -> None:
        self.count = 0
        self.fault = fault
        self.faulty_at = faulty_at

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == self.count % 2, "the mask was not obeyed, or came for another position"
        if self.fault == "accept" and self.count == self.faulty_at:
            raise RuntimeError("the grammar broke")
        self.count += 1

    def allowed(self) -> np.ndarray:
        if self.fault == "allowed" and self.count == self.faulty_at:
            raise RuntimeError("the grammar broke")
        nothing = self.fault == "nothing" and self.count == self.faulty_at
        return packed((np.arange(VOCAB) % 2 == self.count % 2) & (not nothing))


class Returning(Alternating):
    """The same, along drafts and back."""

    walks = True

    def forced(self) -> list[int]:
        return [self.count * 5 % VOCAB]  # some of which are allowed, and some right

    def save(self) -> object:
        return self.count

    def restore(self, state: object) -> None:
        assert isinstance(state, int)
        self.count = state


class Fickle:
    """Rows verify now so many drafts and now none."""

    def __init__(self, most: int) -> None:
        self._most, self._turn = most, 0

    def wanted(self, seq: Sequence) -> int:
        self._turn += 1
        return self._turn * 7 % 5 % (self._most + 1) if seq.guessable else 0

    def width(self, rows: int, *, masked: bool) -> int:
        self._turn += 1
        return self._most if self._turn % 3 else 0

    def note(self, record: InFlight, result: StepResult, seconds: float) -> bool:
        for seq in record.seqs:
            seq.drafts = self.wanted(seq)
        return True


@dataclass
class Expected:
    """What must come out for one request."""

    request: Request
    tokens: list[int]
    may_fail: bool
    got: list[int] = field(default_factory=list)
    prompt_positions: list[float] = field(default_factory=list)
    ended: str | None = None


# What every machine draws
SETTINGS = {
    "block_size": st.sampled_from([1, 2, 4]),
    "extra_pages": st.integers(0, 9),
    "max_num_seqs": st.sampled_from([1, 2, 3, 4, 4]),
    "extra_tokens": st.integers(0, 12),
    "depth": st.sampled_from([1, 2, 2, 3]),
    "policy": st.sampled_from([*POLICIES]),
    "caching": st.sampled_from([True, True, True, False]),
    "lazy": st.booleans(),
    "below": st.none()
    | st.tuples(st.sampled_from([2, 4, 9, 60]), st.sampled_from([1e6, 1e9]), st.sampled_from([1, 1 << 20])),
}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(GROUPS),
        **SETTINGS,
        each=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def start(
        self, groups, block_size, extra_pages, max_num_seqs, extra_tokens, depth, policy, caching, lazy, below, each,
        ahead=0, deep=None, cuts=False,
    ) -> None:  # fmt: skip
        """each: tokens of a decoding row, of which the device takes any number. ahead: positions behind a plan's tokens
        that need blocks too. deep: the depth of the trees that drafts form, if they do. cuts: chunks may be run in
        pieces. below: pages of the host's memory, bytes a second to and from it, and bytes that may be on their way."""
        budget = max_num_seqs * each + extra_tokens
        self.each, self.ahead, self.deep = each, ahead, deep
        needed = layout_of(groups, block_size, 2).pages_needed(MAX_LEN + each - 1 + ahead, budget + ahead)
        self.layout = layout_of(groups, block_size, 1 + needed + extra_pages)
        self.config = EngineConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=(0, 2, 7)[extra_tokens % 3],
            max_num_partial_prefills=(0, 1, 2, 3)[extra_pages % 4],
            max_long_partial_prefills=(0, 1)[extra_pages % 4 // 2],
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            policy=PolicySettings(slo_ttft=3600, priority_aging=1e-3),
            lookahead_depth=depth,
            cascade=True,
            num_drafts=each - 1,
            draft_depth=deep,
            drafted_ahead=ahead,
            cuts_chunks=cuts,
            host_tier=below and HostTierSettings(pages=below[0], bytes_per_second=below[1], staging_bytes=below[2]),
            debug_checks=True,
        )
        ticks = count()
        self.clock = lambda: next(ticks) / 1e3  # the same in every run: policies ask it
        self.lazy, self.longer = lazy, extra_pages % 2 == 1
        self.distrusted: set[str] = set()
        self.expected: dict[str, Expected] = {}
        self.ended: list[str] = []
        self.boot()

    def boot(self) -> None:
        """Make a scheduler and a worker."""
        self.scheduler = Scheduler(self.config, self.layout, clock=self.clock)
        if self.longer:  # outputs become longer than was forecast
            self.scheduler.running.pressure.admits = lambda seqs, num_running, outranked: True  # type: ignore[method-assign]
        self.follower, self.changes = Follower(), Changes(self.layout.block_size)
        self.scheduler.cache.published.changes = None if self.lazy else self.changes
        if self.each == 1:
            self.scheduler.running.prefixes = PrefixGroups(self.layout, self.config.max_num_seqs, min_saved=1)
        before = getattr(self, "worker", None)
        self.worker = self.make_worker(self.lazy)
        if before is not None:
            self.worker.poison, self.worker.blamed, self.worker.told_nan = before.poison, before.blamed, before.told_nan
        self.worker.script = lambda seed, turn, bound: (7 * seed + turn * (turn + 3)) % 11 % (bound + 1)
        self.scheduler.on_finish = lambda request, stats: self.ended.append(request.id)

        if self.each > 1:
            self.scheduler.running.drafting = Fickle(self.each - 1)  # type: ignore[assignment]

    def settle(self) -> None:
        """Everything has ended, and nothing is in flight."""

    def make_worker(self, lazy: bool) -> IdealWorker:
        return IdealWorker(self.layout, lazy=lazy, depth=self.deep)

    # ---- what callers do --------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=4) | st.sampled_from(PREFIXES),
        max_tokens=st.sampled_from([1, 4, 10, 10]),
        lookahead=st.sampled_from([2, 2, 1, 0]),
        masked=st.sampled_from([None, None, Alternating, Returning, Returning]),
        fault=st.sampled_from([None, None, None, "accept", "allowed", "nothing"]),
        faulty_at=st.integers(0, 3),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(0, 2),
        ignore_eos=st.sampled_from([True, True, False]),
        scored=st.sampled_from([None, None, 0, 3, 9]),
        poison=st.sampled_from([False] * 7 + [True]),
        scale=st.sampled_from([1.0, 1.0, 0.0, 1.5]),
        negative=st.none() | st.lists(st.integers(1, 2), min_size=1, max_size=4) | st.sampled_from(PREFIXES),
    )
    def add(
        self,
        prompt,
        max_tokens,
        lookahead,
        masked,
        fault,
        faulty_at,
        salt,
        priority,
        ignore_eos,
        scored,
        poison,
        scale,
        negative,
    ) -> None:
        number = len(self.expected)
        if not self._holds(len(prompt) + max_tokens, len(negative or [0]) + max_tokens):
            scale = 1.0
        request = Request(
            id=f"r{number}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                prompt_logprobs=None if scored is None else 0,
                prompt_logprobs_start=scored or 0,
                guidance_scale=scale,
                negative_prompt=None if negative is None or scale == 1 else list(negative),
            ),
            seed=number,
            max_total_tokens=len(prompt) + max_tokens,
            eos_ids=frozenset([EOS]),
            cache_salt=salt,
            priority=priority,
            owner=salt,
            lookahead=lookahead,
            token_mask=masked(fault, faulty_at) if masked else None,
            arrival=self.clock(),
        )
        tokens = alone(request, self.layout, Alternating() if masked else None)
        if poison:
            self.worker.poison.add(request.seed)
        self.expected[request.id] = Expected(
            request, tokens, may_fail=poison or (masked is not None and fault is not None)
        )
        self.scheduler.add(request)

    def _holds(self, *lengths: int) -> bool:
        """Whether a guided request of such sequences could run alone, as `Engine.check` asks."""
        budget, more = self.config.max_num_batched_tokens, self.each - 1 + self.ahead
        pages = sum(self.layout.pages_needed(length + more, budget + self.ahead) for length in lengths)
        return min(self.config.max_num_seqs, budget) > 1 and pages < self.layout.num_pages

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), rest=st.lists(st.integers(1, 2), max_size=2), max_tokens=st.sampled_from([1, 4, 8]))
    def go_on(self, data, rest, max_tokens) -> None:
        """As the next turn of a conversation does, or a beam: from another request's tokens so far, or some of them."""
        earlier = data.draw(st.sampled_from(list(self.expected.values())))
        known = [*earlier.request.prompt_token_ids, *earlier.got][: MAX_LEN - 1 - len(rest) - max_tokens]
        prompt = known[: data.draw(st.integers(1, len(known)))] + rest
        salt, plain = earlier.request.cache_salt, {"fault": None, "faulty_at": 0, "scored": None, "poison": False}
        plain |= {"scale": earlier.request.params.guidance_scale, "negative": earlier.request.params.negative_prompt}
        self.add(prompt, max_tokens, 2, masked=None, salt=salt, priority=0, ignore_eos=True, **plain)

    @precondition(lambda self: any(e.ended is None for e in self.expected.values()))
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from([n for n, e in self.expected.items() if e.ended is None]))
        at_token = data.draw(st.none() | st.integers(0, len(self.expected[name].got)))
        if self.scheduler.abort(name, at_token):
            self.expected[name].ended = "abort"
        else:
            assert name in self._ended_unheard()
        assert not self.scheduler.abort(name)

    # ---- what the device does ---------------------------------------------------------------------------------

    @rule(fault=st.sampled_from(["early", "late"]))
    def fail(self, fault) -> None:
        self.worker.fail_next = fault

    @precondition(lambda self: any(e.ended is None for e in self.expected.values()))
    @rule(data=st.data())
    def compute_no_numbers(self, data) -> None:
        names = [name for name, expected in self.expected.items() if expected.ended is None]
        self.worker.turns_nan.add(self.expected[data.draw(st.sampled_from(names))].request.seed)

    @rule(times=st.integers(1, 4))
    def schedule(self, times) -> None:
        for _ in range(times):
            if len(self.scheduler.in_flight) < self.config.lookahead_depth:
                plan = self.scheduler.schedule()
                if plan is None:
                    return
                assert plan.num_tokens <= self.config.max_num_batched_tokens
                assert len(plan.rows) <= self.config.max_num_seqs
                self._check_prefixes(plan)
                self.worker.submit(plan)
                self._provide_masks()

    def _check_prefixes(self, plan: StepPlan) -> None:
        """Rows said to share their first blocks do, and each has more keys than these."""
        grouped = [row for group in plan.rows.prefixes for row in group.rows.tolist()]
        assert len(grouped) == len(set(grouped))
        for rows, tokens in plan.rows.prefixes:
            assert plan.expected is not None
            assert (plan.rows.num_tokens_R[rows] == 1).all()
            forms = [plan.expected[slot] for slot in plan.rows.slots_R[rows].tolist()]
            assert min(form.kv_len for form in forms) >= tokens
            for g, group in enumerate(self.layout.groups):
                if group.spec.span is None:
                    assert len({form.blocks[g][: tokens // self.layout.block_size] for form in forms}) == 1

    @rule(times=st.integers(1, 4))
    def deliver(self, times) -> None:
        for _ in range(times):
            if self.scheduler.in_flight:
                seqs, result = self.scheduler.in_flight[0].seqs, self.worker.collect()
                for event in self.scheduler.update(result):
                    self._note(event)
                self._check_withdrawn([seqs[row].request for row in np.flatnonzero(result.finish_R == Finish.NAN)])
                self._provide_masks()

    def _check_withdrawn(self, lost: list[Request]) -> None:
        """No request finds the prompts of requests whose scores were no numbers for the first time. The second time
        they shared nothing, and a prompt found there belongs to another request."""
        size = self.layout.block_size
        fresh = [request for request in lost if request.id.partition(" ")[0] not in self.distrusted]
        self.distrusted |= {request.id.partition(" ")[0] for request in lost}
        for request in fresh:
            node_hash = root_hash(request.cache_salt)
            for end in range(size, len(request.prompt_token_ids) + 1, size):
                node_hash = chain_hash(node_hash, request.prompt_token_ids[end - size : end])
                assert self.scheduler.cache.index.get(node_hash) is None

    @rule(times=st.integers(1, 12))
    def run(self, times) -> None:
        """As the engine's loop does: keep the worker supplied, take one result."""
        for _ in range(times):
            self.schedule(self.config.lookahead_depth)
            self.deliver(1)

    def _provide_masks(self) -> None:
        due = self.scheduler.masks_due()
        if due is not None:
            self.worker.provide_masks(*due)

    def _note(self, event: TokenEvent) -> None:
        expected = self.expected[event.request_id]
        assert expected.ended is None, "an event came after the end"
        if event.token_id >= 0:
            expected.got.append(event.token_id)
        assert expected.got == expected.tokens[: len(expected.got)], "other tokens than alone"
        expected.prompt_positions += [entry.logprob for entry in event.prompt_logprobs or []]
        expected.ended = event.finish_reason
        if event.finish_reason == "error":
            seed = expected.request.seed
            assert expected.may_fail or seed in self.worker.blamed or self.worker.told_nan[seed] > 1, (
                f"an innocent request ended: {event.error}"
            )
            assert event.error
        elif event.finish_reason is not None:
            assert expected.got == expected.tokens
            assert event.finish_reason == ("stop" if expected.got[-1] in expected.request.all_stop_ids else "length")
            if (first := expected.request.params.scored_from) is not None:
                assert expected.prompt_positions == [*range(first, len(expected.request.prompt_token_ids))]

    # ---- what always holds ------------------------------------------------------------------------------------

    @invariant()
    def listeners_hear_of_every_end_once(self) -> None:
        if hasattr(self, "expected"):
            ended = [name for name, expected in self.expected.items() if expected.ended]
            assert sorted(self.ended) == sorted({*ended, *self._ended_unheard()})

    def _ended_unheard(self) -> set[str]:
        """Requests whose token mask failed: they end at once, and the next result tells."""
        return {event.request_id for event in self.scheduler._results.unsent}

    @invariant()
    def lengths_are_the_devices_once_all_results_are_in(self) -> None:
        if hasattr(self, "expected") and not self.scheduler.in_flight and not self.scheduler._recovery.failed:
            for seq in (*self.scheduler.running.decoding, *self.scheduler.running.paced):
                assert self.scheduler.slots.kv_len[seq.slot] == len(seq.tokens) - 1

    @invariant()
    def followers_of_the_cache_know_all_that_can_be_found(self) -> None:
        if hasattr(self, "expected") and self.scheduler.cache.published.changes is not None:
            self.follower.follow(self.changes.take())
            assert self.follower.found == findable(self.scheduler.cache.index)

    @invariant()
    def names_are_those_of_full_blocks(self) -> None:
        for seq in self.scheduler.running.leaders() if hasattr(self, "expected") else ():
            assert len(seq.hashes) * self.layout.block_size <= len(seq.tokens)

    @invariant()
    def cached_blocks_hold_what_the_index_says(self) -> None:
        """Nothing unaccepted, stale or written by a failed plan can be found."""
        if not hasattr(self, "expected") or self.scheduler.in_flight or self.scheduler._recovery.failed:
            return
        index, pool = self.scheduler.cache.index, self.scheduler.cache.pool
        states = self._states() if any(group.spec.exact for group in self.layout.groups) else {}
        tier = self.scheduler.cache.tier
        self.worker.host.finish(self.worker.memory, self.worker.unit)
        for g, block, node_hash in index.published():
            assert pool.is_cached(g, block)
            if tier is not None and (g, block) in tier._arriving:
                continue
            if node_hash.startswith(b"parted"):
                continue  # no request can ask for it until a result brings its name
            for layer in range(len(self.layout.groups[g].layers)):
                cells = [self.worker.memory.get(cell) for cell in self.worker.unit(g, block, layer)]
                if self.layout.groups[g].spec.exact:
                    assert cells[0] is not None
                    length, found = cells[0][0] + 1, cells[0][2]
                    assert (length, found) in states[node_hash] or found == NAN  # of a prompt that gave no token yet
                    continue
                self._holds_tokens(cells, node_hash)
        if tier is not None:
            self._check_below(tier, states)

    def _holds_tokens(self, cells: list[tuple[int, int, int] | None], node_hash: bytes) -> None:
        index, size = self.scheduler.cache.index, self.layout.block_size
        tokens = [token for _, token, _ in takewhile(bool, cells)]
        node = index.get(node_hash)
        lengths = [len(node.end)] if node.end else range(size + 1)
        assert any(chain_hash(node.parent, tokens[:n]) == node_hash for n in lengths)
        assert tuple(tokens[: len(node.end or ())]) == (node.end or ())

    def _check_below(self, tier: HostTier, states: dict[bytes, set[tuple[int, int]]]) -> None:
        """The host's memory holds what the index says, but for what the next plan will bring."""
        coming = {(move.group, move.below) for move in tier._saves}
        for g, known in enumerate(self.scheduler.cache.index._hash_below):
            for block, node_hash in known.items():
                assert tier.pool.is_cached(g, block)
                assert self.scheduler.cache.index.get(node_hash).below[g] == block
                if (g, block) in coming:
                    continue
                held = self.worker.host.blocks[g, block]
                assert held != [ON_ITS_WAY], "a block can be matched that is still being read"
                each = len(held) // len(self.layout.groups[g].layers)
                for layer in range(len(self.layout.groups[g].layers)):
                    cells = held[layer * each :][:each]
                    if self.layout.groups[g].spec.exact:
                        assert cells[0] is not None
                        length, found = cells[0][0] + 1, cells[0][2]
                        assert (length, found) in states[node_hash] or found == NAN
                    else:
                        self._holds_tokens(cells, node_hash)

    def _states(self) -> dict[bytes, set[tuple[int, int]]]:
        """Hash → what a block that is exact may hold under it: (tokens, their digest)."""
        found: dict[bytes, set[tuple[int, int]]] = {}
        size = self.layout.block_size
        for expected in self.expected.values():
            request = expected.request
            for prompt in (request.prompt_token_ids, request.params.negative_prompt or request.prompt_token_ids[-1:]):
                tokens = [*prompt, *expected.tokens]
                parent, sums = root_hash(request.cache_salt), digests(tokens)
                for n in range(len(tokens)):
                    node_hash = chain_hash(parent, tokens[n // size * size : n + 1])
                    found.setdefault(node_hash, set()).add((n + 1, sums[n]))
                    parent = node_hash if (n + 1) % size == 0 else parent
        return found

    def teardown(self) -> None:
        """Without newcomers everything ends within bounds, and nothing is left behind."""
        if not hasattr(self, "expected"):
            return
        left = [e for e in self.expected.values() if e.ended is None]
        bound = 20 + 8 * sum(e.request.max_total_tokens for e in left)
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.run(1)
        assert not self.scheduler.has_work, "a request starves"
        self.listeners_hear_of_every_end_once()
        self.cached_blocks_hold_what_the_index_says()
        assert all(expected.ended for expected in self.expected.values())
        self.settle()
        pool, slots = self.scheduler.cache.pool, self.scheduler.slots
        assert pool.free_pages == pool.num_pages
        if (tier := self.scheduler.cache.tier) is not None:
            held = {(move.group, move.below) for move in tier._saves}
            assert {key for key in held if not tier.pool.refs(*key)} == set()
            tier.leave_device()
            assert tier.pool.free_pages == tier.pool.num_pages
            assert not tier._staged
        assert slots.num_free == self.config.max_num_seqs
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = machine_settings(examples=120, steps=30)
