"""Prefix index and cache manager against brute force: what is found, and when it can no longer be found."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.cache.prefix import PrefixIndex, Tokens, chain_hash, root_hash
from ridgeline.engine.sequence import Sequence, Status
from tests.engine.layouts import GROUPS, Groups, layout_of
from tests.engine.profiles import machine_settings

MAX_LEN, CHUNK = 24, 6
Prefix = tuple[str, tuple[int, ...]]  # (salt, tokens)


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, run in chunks, publish, leave. The model notes the prefix each block was filled with: a block may
    be found only under that salt and those tokens, and the longest hit is searched by trying every length. It may go on
    into a block that is copied, of which the model knows the tokens too."""

    @initialize(
        groups=st.sampled_from(GROUPS), block_size=st.sampled_from([1, 2, 4]), extra=st.integers(0, 12) | st.just(80)
    )
    def start(self, groups, block_size, extra) -> None:
        pages = 1 + layout_of(groups, block_size, 2).pages_needed(MAX_LEN, CHUNK) + extra
        self.layout, self.size = layout_of(groups, block_size, pages), block_size
        self.manager = CacheManager(self.layout, prefix_caching=True, max_chunk=CHUNK)
        self.running: list[tuple[Sequence, int]] = []  # with tokens run so far
        self.content: dict[tuple[int, int], Prefix] = {}  # (group, block) → what it was filled with
        self.exact = [g for g, group in enumerate(self.layout.groups) if group.spec.exact]
        self.parted: list[tuple[Sequence, int]] = []  # with tokens run until they gave way
        self.plan = 0
        self.ends: set[Prefix] = set()  # up to the end of blocks in which sequences or their prompts ended
        self.count = 0

    def findable(self) -> dict[tuple[int, Prefix], int]:
        """(group, prefix) → block, as far as the pool still keeps it for the index."""
        pool, published = self.manager.pool, self.manager.index.published()
        named = ((g, b) for g, b, node_hash in published if not node_hash.startswith(b"parted"))
        return {(g, self.content[g, b]): b for g, b in named if pool.is_cached(g, b)}

    def longest_hit(self, salt: str, tokens: list[int]) -> int:
        found = self.findable()
        for n in range((len(tokens) - 1) // self.size, 0, -1):
            for g, group in enumerate(self.layout.groups):
                first = group.spec.first_needed(n * self.size) // self.size
                if any((g, (salt, tuple(tokens[: (i + 1) * self.size]))) not in found for i in range(first, n)):
                    break
            else:
                return n
        return 0

    def continuations(self, salt: str, tokens: list[int], hit: int) -> tuple[int, int]:
        """How many tokens after the hit a copied block gives: at least, from blocks that are not full, and at most. (A
        full block found, forgotten and found again is no end.) Exact ones give all their tokens or none, and they may
        follow any whole blocks."""
        found, start = self.findable(), hit * self.size
        if self.exact:
            best = max([0, *(len(end) - start for end in self.whole_ends(salt, tokens))])
            return best, best
        limit, fewest, most = min(len(tokens) - 1, start + self.size - 1), 0, 0
        for owner, end in self.ends:
            whole = owner == salt and all((g, (salt, end)) in found for g in range(len(self.layout.groups)))
            if whole and len(end) <= start + self.size and end[:start] == tuple(tokens[:start]):
                same = [x == y for x, y in zip(end[start:], tokens[start:limit], strict=False)]
                count = [*same, False].index(False)
                fewest, most = max(fewest, count * bool(len(end) % self.size)), max(most, count)
        return fewest, most

    def whole_ends(self, salt: str, tokens: list[int]) -> list[tuple[int, ...]]:
        """The ends that a prompt begins with, and before which the groups that grow have what they need."""
        index, found = self.manager.index, self.findable()
        ends = []
        for node in index._nodes.values():
            if node.end is None or None in node.blocks or len(node.end) == self.size:
                continue
            owner, end = self.content[self.exact[0], node.blocks[self.exact[0]]]
            n = len(end) // self.size
            held = [
                (g, (salt, end[: (i + 1) * self.size])) in found
                for g, group in enumerate(self.layout.groups)
                if g not in self.exact
                for i in range(group.spec.first_needed(n * self.size) // self.size, n)
            ]
            if owner == salt and end == tuple(tokens[: len(end)]) and len(end) < len(tokens) and all(held):
                ends.append(end)
        return ends

    def is_roomy(self, reserve: int) -> bool:
        """Whether any sequence fits beside copies of blocks, wherever these lie."""
        groups = len(self.layout.groups)
        needed = self.layout.pages_needed(MAX_LEN, CHUNK) + (2 + reserve) * groups
        if self.exact:  # a hit may go on far behind whole blocks that all groups have, over a page for each block
            needed += groups * MAX_LEN // self.size
        return self.manager.pool.free_pages >= needed

    @precondition(lambda self: self.content)
    @rule(data=st.data(), rest=st.lists(st.integers(1, 2), min_size=1, max_size=5), reserve=st.integers(0, 2))
    def admit_what_goes_on(self, data, rest, reserve) -> None:
        """From something that was written, or a part of it."""
        salt, known = data.draw(st.sampled_from(sorted(set(self.content.values()))))
        known = known[: data.draw(st.integers(0, len(known)))] if data.draw(st.booleans()) else known
        self.admit([*known, *rest][: MAX_LEN - 1], salt, None, reserve)

    @rule(
        tokens=st.lists(st.integers(1, 2), min_size=1, max_size=MAX_LEN - 1),
        salt=st.sampled_from(["", "a"]),
        scored=st.sampled_from([None, None, 0, 3, 6]),
        reserve=st.integers(0, 2),
    )
    def admit(self, tokens, salt, scored, reserve) -> None:
        self.count += 1
        params = SamplingParams(prompt_logprobs=None if scored is None else 0, prompt_logprobs_start=scored or 0)
        request = Request(
            id=str(self.count),
            prompt_token_ids=tuple(tokens),
            params=params,
            seed=0,
            max_total_tokens=MAX_LEN,
            cache_salt=salt,
        )
        seq = Sequence(request, len(self.layout.groups))
        seq.slot = self.count
        known = tokens if scored is None else tokens[: max(1, scored)]  # a hit leaves the last of these to run
        hit = self.longest_hit(salt, known)
        (fewest, most), found, roomy = self.continuations(salt, known, hit), self.findable(), self.is_roomy(reserve)
        if not self.manager.admit(seq, reserve_blocks=reserve):
            assert self.running or hit or reserve, "an empty cache takes every request"
            assert seq.blocks == [[] for _ in self.layout.groups]
            return
        copied = seq.cached_tokens - hit * self.size
        assert copied <= most
        assert copied >= fewest or not (copied or roomy)
        assert bool(seq.source) == bool(copied)
        whole = seq.published
        assert whole == hit or (self.exact and seq.source and whole > hit)
        for g, blocks in enumerate(seq.blocks):
            assert len(blocks) == whole + bool(copied)
            first = self.layout.groups[g].spec.first_needed(whole * self.size) // self.size
            first = whole if g in self.exact and seq.source else first
            for n, block in enumerate(blocks[:whole]):
                expected = found[g, (salt, tuple(tokens[: (n + 1) * self.size]))] if n >= first else NULL_BLOCK
                assert block == expected
        self.running.append((seq, seq.cached_tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, CHUNK), fails=st.sampled_from([False, False, True]))
    def run_a_chunk(self, data, chunk, fails) -> None:
        """Let go, extend, fill, publish as the scheduler does. If the plan `fails`, all requests leave, as there."""
        index = data.draw(st.sampled_from(range(len(self.running))))
        seq, start = self.running[index]
        end = min(start + chunk, len(seq.tokens))
        self.manager.tables.let_go(seq, start, 0)
        if end == start or self.manager.tables.extend(seq, end - 1, end) is None:
            return
        salt = seq.request.cache_salt
        for g, sources, targets in self.manager.copies([seq], 0) if seq.source else ():
            owner, there = self.content[g, sources[0]]
            assert (owner, list(there[:start])) == (salt, seq.tokens[:start])
            assert targets == (seq.blocks[g][start // self.size],)
            assert len(there) == start or not self.layout.groups[g].spec.exact
            self.content[g, targets[0]] = salt, there[:start]
        for g, blocks in enumerate(seq.blocks):
            first = (end - 1 if self.layout.groups[g].spec.exact else start) // self.size
            for n in range(first, -(-end // self.size)):
                assert blocks[n] != NULL_BLOCK
                written = start if fails else end
                self.content[g, blocks[n]] = salt, tuple(seq.tokens[: min(written, (n + 1) * self.size)])
        before = set(self.manager.index._nodes)
        made = self.manager.checkpoints.counts.made
        mark, changes, fresh = self.manager.keep_state(seq, start, end, reserve=0)
        if not self.exact:
            assert (mark, changes, fresh) == (0, [], [])
            fresh = self.manager.published.publish(seq, end)
        assert set(fresh) >= set(self.manager.index._nodes) - before
        assert bool(changes) == bool(mark)
        assert mark < end - start
        assert not mark or self.manager.checkpoints.counts.made > made
        for _, g, n, (block,) in changes:
            assert (n + 1) * self.size == start + mark
            assert block == seq.blocks[g][n]
            assert block not in [*seq.blocks[g][:n], *seq.blocks[g][n + 1 :]]
            self.content[g, block] = salt, tuple(seq.tokens[: start if fails else start + mark])
        self.running[index] = seq, end
        if fails:
            self.manager.published.unpublish(fresh)
            assert not set(fresh) & set(self.manager.index._nodes)
            while self.running:
                self.release(*self.running.pop())
        elif end == len(seq.tokens):
            seq.has_emitted = True
            seq.tokens.append(data.draw(st.integers(1, 2)))

    def release(self, seq: Sequence, ran: int, gives_way: int = 0) -> None:
        for length in (seq.num_prompt, seq.written) if seq.has_emitted else ():
            block_end = -(-length // self.size) * self.size
            self.ends.add((seq.request.cache_salt, tuple(seq.tokens[: min(seq.written, block_end)])))
        self.manager.release(seq, gives_way, ran, resumes=bool(gives_way))
        assert not seq.source

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_way(self, data) -> None:
        """Its last tokens are known later, if at all."""
        seq, ran = self.running.pop(data.draw(st.sampled_from(range(len(self.running)))))
        self.plan += 1
        self.release(seq, ran, self.plan)
        self.parted.append((seq, ran))

    @precondition(lambda self: self.parted)
    @rule(fails=st.booleans(), stopped=st.booleans())
    def hear_of_the_last_tokens(self, fails, stopped) -> None:
        for seq, ran in self.parted if not fails else ():
            if stopped:
                del seq.tokens[ran:]  # it ended before
                seq.status = Status.FINISHED
        self.parted.clear()
        if fails:
            self.manager.published.settle_nothing()
        self.manager.published.settle(self.plan)
        assert not self.manager.published.partings.due(None)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data) -> None:
        self.release(*self.running.pop(data.draw(st.sampled_from(range(len(self.running))))))
        if not self.running:
            assert self.manager.pool.free_pages == self.manager.pool.num_pages

    @invariant()
    def index_and_pool_agree(self) -> None:
        """What the index names is kept under its true hash; what was evicted is no longer named."""
        if not hasattr(self, "manager"):
            return
        index, pool = self.manager.index, self.manager.pool
        named = {(g, b): h for h, node in index._nodes.items() for g, b in enumerate(node.blocks) if b is not None}
        assert named == {(g, b): h for g, b, h in index.published()}
        for (g, block), node_hash in named.items():
            assert pool.is_cached(g, block)
            if node_hash.startswith(b"parted"):
                assert self.parted
                continue
            salt, tokens = self.content[g, block]
            expected, node = root_hash(salt), index._nodes[node_hash]
            for n in range(0, len(tokens), self.size):
                parent, expected = expected, chain_hash(expected, tokens[n : n + self.size])
            assert (node_hash, node.parent) == (expected, parent)
            assert node.end is None or (node.end == tokens[n:] and None not in node.blocks)
            assert node_hash in index.children(parent)
        groups = range(len(self.manager.specs))
        cached = {(g, b) for g in groups for b in pool.blocks_in_use(g) if pool.is_cached(g, b)}
        assert cached == set(named)

    @invariant()
    def held_blocks_are_what_sequences_hold(self) -> None:
        if hasattr(self, "manager"):
            held: dict[tuple[int, int], int] = {}
            for seq, _ in self.running:
                for g, blocks in enumerate(seq.blocks):
                    for block in [*blocks, *seq.source[g : g + 1]]:
                        if block != NULL_BLOCK:
                            held[g, block] = held.get((g, block), 0) + 1
            pool, groups = self.manager.pool, range(len(self.manager.specs))
            blocks = {(g, b): pool.refs(g, b) for g in groups for b in pool.blocks_in_use(g)}
            assert held == {block: refs for block, refs in blocks.items() if refs}


TestCacheManager = CacheMachine.TestCase
TestCacheManager.settings = machine_settings(examples=60, steps=40)


def test_salts_make_different_roots_and_no_salt_imitates_a_block() -> None:
    prefix = chain_hash(root_hash(""), [65] * 4)
    assert len({root_hash(""), root_hash("a"), root_hash("", ""), prefix}) == 4
    block = (0x41414141, 0x42424242)  # its bytes are text
    for text in ("A" * 16, "salt for sixteen"):
        imitation = text.encode() + b"AAAABBBB"
        assert root_hash(imitation.decode()) != chain_hash(text.encode(), block)


def test_equal_content_is_kept_once_and_its_node_goes_with_the_last_block() -> None:
    index, root = PrefixIndex(2), root_hash("")
    node = chain_hash(root, [1, 2])
    assert index.publish(node, root, 0, 7)
    assert not index.publish(node, root, 0, 8)
    assert index.publish(node, root, 1, 7)
    assert index.children(root) == {node}
    index.drop(0, 7)
    assert index.get(node) is not None
    index.drop(1, 7)
    assert (index.get(node), index.children(root), len(index)) == (None, frozenset(), 0)


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=40), TOKENS)
def test_the_nearest_end_is_the_one_that_agrees_longest(steps: list[tuple[Tokens, bool]], asked: Tokens) -> None:
    """Added as the manager does, or dropped, in any order."""
    index, parent = PrefixIndex(1), root_hash("")
    ends: dict[Tokens, int] = {}
    for block, (tokens, drops) in enumerate(steps):
        covered = any(end[: len(tokens)] == tokens for end in ends)
        assert index.is_covered(parent, tokens) == covered
        if drops and tokens in ends:
            index.drop(0, ends.pop(tokens))
        elif not covered:
            shorter = [end for end in ends if tokens[: len(end)] == end]
            found = index.shorter_end(parent, tokens)
            assert [found] == ([chain_hash(parent, end) for end in shorter] or [None])
            for end in shorter:
                index.drop(0, ends.pop(end))
            index.publish(chain_hash(parent, tokens), parent, 0, block)
            index.add_end(chain_hash(parent, tokens), tokens)
            ends[tokens] = block
    agreement = {end: [*(x == y for x, y in zip(end, asked, strict=False)), False].index(False) for end in ends}
    count, node_hash = index.nearest_end(parent, asked)
    assert count == max(agreement.values(), default=0)
    if count:
        assert count == next(agreed for end, agreed in agreement.items() if chain_hash(parent, end) == node_hash)
    assert index.nearest_end(root_hash("other"), asked) == (0, None)


def test_a_full_context_is_found_again_even_if_it_fills_the_pool() -> None:
    groups: Groups = ((None, 1),)
    layout = layout_of(groups, 4, 1 + layout_of(groups, 4, 2).pages_needed(MAX_LEN, CHUNK))
    manager = CacheManager(layout, prefix_caching=True, max_chunk=CHUNK)
    prompt = tuple(range(1, MAX_LEN))
    request = Request(id="a", prompt_token_ids=prompt, params=SamplingParams(), seed=0, max_total_tokens=MAX_LEN)
    for cached in (0, 20):
        seq = Sequence(request, 1)
        assert manager.admit(seq, reserve_blocks=0)
        assert seq.cached_tokens == cached
        assert manager.tables.extend(seq, len(prompt) - 1, len(prompt)) is not None
        manager.published.publish(seq, len(prompt))
        manager.release(seq, 0)


@given(groups=st.sampled_from(GROUPS), data=st.data())
def test_the_longest_hit_with_gaps_anywhere_is_that_of_trying_every_length(groups: Groups, data: st.DataObject) -> None:
    """Blocks are given up by group and in any order, so a chain may have holes that later blocks outlive."""
    size, number = 2, 10
    layout = layout_of(groups, size, 400)
    manager = CacheManager(layout, prefix_caching=True, max_chunk=100)
    params = SamplingParams(max_tokens=1)
    request = Request(
        id="a", prompt_token_ids=tuple(range(size * number + 1)), params=params, seed=0, max_total_tokens=99
    )
    writer, reader = Sequence(request, len(groups)), Sequence(request, len(groups))
    assert manager.admit(writer, reserve_blocks=0)
    assert manager.tables.extend(writer, size * number - 1, size * number) is not None
    manager.published.publish(writer, size * number)
    exact = manager.checkpoints.groups
    for n in range(number if exact else 0):  # a state at every boundary
        taken = manager.pool.take([int(g in exact and not writer.blocks[g][n]) for g in range(len(groups))])
        assert taken is not None
        for g, new in enumerate(taken):
            writer.blocks[g][n : n + len(new)] = new
        assert manager.published.publish_state(writer, size * (n + 1))
    kept = data.draw(
        st.lists(st.lists(st.booleans(), min_size=number, max_size=number), min_size=len(groups), max_size=len(groups))
    )
    for g, blocks in enumerate(writer.blocks):
        for n, block in enumerate(blocks):
            kept[g][n] = kept[g][n] and block != NULL_BLOCK
            if not kept[g][n] and block != NULL_BLOCK:
                manager.index.drop(g, block)
                manager.pool.forget(g, block)
    first = [spec.first_needed for spec in manager.specs]
    fits = [
        n for n in range(number + 1) if all(all(kept[g][first[g](n * size) // size : n]) for g in range(len(groups)))
    ]
    assert manager.admit(reader, reserve_blocks=0)
    assert reader.published == max(fits)


def plain_request(num_tokens: int, name: str = "a") -> Request:
    """Of distinct tokens, so that nothing of it is found in another's."""
    prompt = tuple(range(1, num_tokens + 1))
    return Request(
        id=name, prompt_token_ids=prompt, params=SamplingParams(), seed=0, max_total_tokens=99, cache_salt=name
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_request_is_admitted_where_its_tokens_the_next_one_and_the_reserve_have_room(size: int) -> None:
    for length, reserve, spare in itertools.product(range(1, 10), range(3), (0, 1)):
        needed = math.ceil((length + 1) / size) + reserve
        manager = CacheManager(layout_of(((None, 1),), size, 1 + needed - 1 + spare), prefix_caching=True, max_chunk=64)
        seq = Sequence(plain_request(length), 1)
        assert manager.would_admit(seq, reserve_blocks=reserve, without=()) == bool(spare), (length, reserve)
        assert manager.admit(seq, reserve_blocks=reserve) == bool(spare), (length, reserve)


def test_what_is_gone_already_does_not_keep_the_rest_from_being_withdrawn() -> None:
    manager = CacheManager(layout_of(((None, 1),), 4, 40), prefix_caching=True, max_chunk=64)
    seq = Sequence(plain_request(12), 1)
    assert manager.admit(seq, reserve_blocks=0)
    assert manager.tables.extend(seq, 11, 12) is not None
    written = manager.published.publish(seq, 12)
    manager.published.unpublish(written[:1])
    manager.published.unpublish(written)
    assert len(manager.index) == 0


def test_what_lies_behind_a_gap_is_withdrawn_too() -> None:
    """Its first blocks were given up, as a window's are, so its later ones hang from nothing that is still there."""
    manager = CacheManager(layout_of(((3, 1),), 4, 40), prefix_caching=True, max_chunk=64)
    seq = Sequence(plain_request(18), 1)
    assert manager.admit(seq, reserve_blocks=0)
    assert manager.tables.extend(seq, 17, 18) is not None
    manager.published.publish(seq, 18)
    for block in seq.blocks[0][:2]:
        manager.index.drop(0, block)
        manager.pool.forget(0, block)
    assert len(manager.index) == 2
    manager.published.withdraw(seq)
    assert len(manager.index) == 0
