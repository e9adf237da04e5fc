"""Answers that take fewer steps than the plain way to them: they are the same, or never say too much."""

from __future__ import annotations

from collections.abc import Sequence as PySequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.plan.step import Rows
from ridgeline.engine.cache.idle import Idle, IdlePages
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.cache.plain_pool import PlainPool
from ridgeline.engine.cache.pool import PINNED, BlockPool
from ridgeline.engine.forecast import Forecast
from ridgeline.engine.itl import ItlBound
from ridgeline.engine.plan_builder import Standing
from ridgeline.engine.sequence import Sequence
from ridgeline.engine.slots import SlotTable
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.hardware import find
from ridgeline.perf.roofline import Roofline
from tests.engine.layouts import GROUPS, Groups, layout_of
from tests.engine.profiles import quick_settings
from tests.simulation.fleets import setup

KINDS = (PlainPool, BlockPool)


def request(number: int, prompt: PySequence[int], tokens: int) -> Request:
    params = SamplingParams(max_tokens=tokens, temperature=number % 2)
    return Request(
        id=str(number),
        prompt_token_ids=tuple(prompt),
        params=params,
        seed=0,
        max_total_tokens=len(prompt) + tokens,
    )


@quick_settings(100)
@given(moves=st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0.0, 1.0, 2.0, float("inf")])), max_size=80))
def test_idle_pages_go_by_rank_and_age_in_whatever_order_they_come(moves: list[tuple[int, float]]) -> None:
    """A page that is there already leaves, another one comes; a heap of all is the plain way."""
    pages, there = IdlePages(), dict[int, Idle]()
    for order, (page, rank) in enumerate(moves):
        if there.pop(page, None) is not None:
            pages.discard(page)
        else:
            there[page] = Idle(rank, order, page)
            pages.add(there[page])
        assert pages.least() == min(there.values(), default=None)
        assert len(pages) == len(there)


MOVES = ("take", "release", "share", "cache", "forget", "await", "pin", "return")


@quick_settings(150)
@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 6), st.integers(0, 3)), max_size=60))
def test_a_plain_pool_does_what_the_pool_for_all_layouts_does(moves: list[tuple[str, int, int]]) -> None:
    """Both hand out the same blocks, give up the same ones in the same order, and count alike."""
    layout, evicted = layout_of(((None, 1),), 4, 7), (list[int](), list[int]())
    pools = [
        kind(layout, lambda _, blocks, gone=gone: gone.extend(blocks))
        for kind, gone in zip(KINDS, evicted, strict=True)
    ]
    plain, general = pools
    for move, block, number in moves:
        held, cached = plain.refs(0, block) > 0, plain.is_cached(0, block)
        assert (held, cached) == (general.refs(0, block) > 0, general.is_cached(0, block))
        if move == "take":
            assert plain.can_take([number]) == general.can_take([number])
            assert plain.take([number]) == general.take([number])
        for pool in pools:
            if move == "release" and held:
                pool.release_all(0, [0, block], number)
            elif move == "share" and (held or cached):
                pool.share(0, block)
            elif move == "cache" and held:
                pool.mark_cached(0, block)
            elif move == "forget" and cached:
                pool.forget(0, block)
            elif move in ("await", "pin"):
                pool.await_return(number, [(0, block)], *([PINNED] if move == "pin" else []))
            elif move == "return":
                pool.returned(number)
        assert evicted[0] == evicted[1]
        assert plain.count(0) == general.count(0)
        assert (plain.free_pages, plain.fresh_pages) == (general.free_pages, general.fresh_pages)
        assert (plain.num_idle, plain.awaited_pages) == (general.num_idle, general.awaited_pages)
        assert plain.is_quiet(0, block, 1) == general.is_quiet(0, block, 1)


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("caching", [True, False])
def test_filled_blocks_are_published_like_any_others(caching: bool, gone: bool) -> None:
    """gone: a window has passed the block before its tokens were known."""
    found = []
    for many in (False, True):
        manager = CacheManager(layout_of(((5, 1),), 4, 20), prefix_caching=caching, max_chunk=64)
        seq = Sequence(request(1, range(9), 20), 1)
        assert manager.admit(seq, reserve_blocks=0)
        assert manager.tables.extend(seq, 8, 12) is not None
        manager.publish_chunk(seq, 0, 9)
        seq.tokens += [7, 8, 9]
        if gone:
            manager.tables.let_go(seq, 17, 1)
        if many:
            manager.published.publish_filled([seq], [12])
        else:
            manager.published.publish(seq, 12)
        cached = [manager.pool.is_cached(0, block) for block in range(20)]
        found.append((sorted(manager.index.published()), seq.published, seq.hashes, cached))
    assert found[0] == found[1]
    assert len(found[0][0]) == caching * (3 - gone)


@quick_settings(50)
@given(steps=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=12))
def test_standing_rows_follow_from_those_before(steps: list[list[int]]) -> None:
    """In each step some sequences come that are not there, and others leave, in any order and back and forth."""
    slots, decoding = SlotTable(10), dict[int, Sequence]()
    everyone = [Sequence(request(n, range(5 + n), 20 + n), 1) for n in range(10)]
    for seq in everyone:
        slots.acquire(seq, len(seq.tokens))
    standing = Standing.of([], slots, drafts=0)
    for step in steps:
        changes = list[tuple[Sequence, bool]]()
        for n in step:
            changes.append((everyone[n], n not in decoding))
            if decoding.pop(n, None) is None:
                decoding[n] = everyone[n]
        standing = standing.after(changes, slots)
        plain = Standing.of(list(decoding.values()), slots, drafts=0)
        assert (standing.seqs, standing.ids) == (plain.seqs, plain.ids)
        assert standing.tokens == plain.tokens
        for found, wanted in zip(arrays(standing), arrays(plain), strict=True):
            assert found.dtype == wanted.dtype
            assert found.tolist() == wanted.tolist()
        assert standing.rows.features == plain.rows.features


def arrays(standing: Standing) -> list[np.ndarray]:
    rows: Rows = standing.rows
    own = [rows.slots_R, rows.generations_R, rows.kinds_R, rows.num_tokens_R, rows.num_logits_R]
    return [standing.columns_R, standing.last_kv_len_R, *own]


@quick_settings(60)
@given(
    groups=st.sampled_from(GROUPS),
    running=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 60)), max_size=6),
    new=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)
def test_requests_never_grow_by_more_than_what_is_known_at_once(
    groups: Groups, running: list[tuple[int, int, int]], new: tuple[int, int]
) -> None:
    slots = SlotTable(8)
    forecast = Forecast(layout_of(groups, 4, 9000), slots, 2)
    for number, (prompt, tokens, written) in enumerate(running):
        seq = Sequence(request(number, range(prompt), tokens), len(groups))
        slots.acquire(seq, 0)
        slots.kv_len[seq.slot] = min(written, prompt + tokens)
        if number % 3 == 2:
            slots.release(seq)
    coming = [Sequence(request(9, range(new[0]), new[1]), len(groups))]
    assert forecast.growth(new=coming) <= forecast.at_limits(coming)


@quick_settings(60)
@given(
    pages=st.integers(4, 24),
    before=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.booleans()), max_size=6),
    prompt=st.tuples(st.integers(0, 2), st.integers(1, 60)),
    reserve=st.integers(0, 4),
)
def test_what_surely_fits_is_admitted(
    pages: int, before: list[tuple[int, int, bool]], prompt: tuple[int, int], reserve: int
) -> None:
    """Prompts of few kinds share beginnings, whose blocks may be held or idle."""
    manager = CacheManager(layout_of(((None, 1),), 4, pages), prefix_caching=True, max_chunk=64)
    for number, (kind, length, stays) in enumerate(before):
        seq = Sequence(request(number, range(100 * kind, 100 * kind + length), 4), 1)
        if not manager.admit(seq, reserve_blocks=0):
            continue
        if manager.tables.extend(seq, length - 1, length) is not None:
            manager.publish_chunk(seq, 0, length)
            seq.has_emitted = True
        if not stays:
            manager.release(seq, 0, length)
    kind, length = prompt
    seq = Sequence(request(99, range(100 * kind, 100 * kind + length), 4), 1)
    if manager.surely_admits(seq, reserve_blocks=reserve):
        assert manager.would_admit(seq, reserve_blocks=reserve, without=())
        assert manager.admit(seq, reserve_blocks=reserve)


@pytest.mark.parametrize("model", ["llama-8b", "qwen3-30b-a3b-2-layers"])
@pytest.mark.parametrize(("kv_len", "start", "tokens"), [([], 0, 700), ([7, 3000, 9], 40, 1000), ([5] * 64, 0, 0)])
def test_a_model_of_costs_says_the_same_of_sums(model: str, kv_len: list[int], start: int, tokens: int) -> None:
    limit = Roofline(setup(model).model, find("H200"), "bfloat16")
    assert limit.sums_suffice
    some = [tokens][: bool(tokens)]
    shape = StepShape([1] * len(kv_len) + some, kv_len + [start + n for n in some], len(kv_len) + len(some))
    found = limit.of_prompt(len(kv_len), float(sum(kv_len)), tokens, start + tokens)
    assert found == limit.step_limit(shape)
    if kv_len and tokens:
        slow = ItlBound(0.02, limit)
        slow._sums = None
        most = ItlBound(0.02, limit).prompt_tokens(np.array(kv_len), start, 8192)
        assert most == slow.prompt_tokens(np.array(kv_len), start, 8192)
