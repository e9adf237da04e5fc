"""Idle pages that are filled up: chats one after the other share pages, in the layouts of published models."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.sequence import Sequence
from ridgeline.models import model_config
from tests.engine.desk import make_request
from tests.engine.layouts import layout_of
from tests.models.selective_configs import SELECTIVE
from tests.models.test_configs import QWEN3_5_9B, ZAMBA2_2_7B

TOKENS, CHATS, PAGES = 1000, 150, 40


def kept(config: dict[str, Any], *, ends: bool) -> tuple[int, int]:
    """The states that a cache keeps of chats one after the other, and how many of these chats it finds again.

    ends: a chat leaves the state at its end as well as its prompt's.
    """
    layout = CacheLayout(
        groups=model_config(config).spec.cache_groups, block_size=16, dtype="bfloat16", num_pages=PAGES + 1
    )
    manager = CacheManager(layout, prefix_caching=True, max_chunk=2048)
    exact = manager.checkpoints.groups

    def begun(seed: int) -> Sequence:
        draw = random.Random(seed)
        words = [draw.randrange(1, 10_000) for _ in range(TOKENS)]
        seq = Sequence(make_request(f"{seed}", words, max_tokens=1), len(layout.groups))
        seq.slot = 0
        assert manager.admit(seq, reserve_blocks=0)
        return seq

    for n in range(CHATS):
        seq = begun(n)
        assert manager.tables.extend(seq, TOKENS - 1, TOKENS) is not None
        manager.publish_chunk(seq, 0, TOKENS)
        manager.keep_state(seq, 0, TOKENS, reserve=0)
        seq.has_emitted = ends
        seq.tokens += [7] * ends
        manager.release(seq, n + 1, TOKENS)
    states = sum(g in exact for g, _, _ in manager.index.published()) // len(exact)
    return states, sum(begun(n).cached_tokens > TOKENS - 16 for n in reversed(range(CHATS)))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("config", "ends", "cut", "filled"),
    [  # blocks of keys, and states, that a page holds
        pytest.param(QWEN3_5_9B, False, (20, 20), (38, 38), id="qwen3.5, 195 and 2"),
        pytest.param(QWEN3_5_9B, True, (36, 18), (40, 20), id="qwen3.5 with ends"),  # they filled their pages already
        pytest.param(SELECTIVE["bamba"], False, (20, 20), (39, 39), id="bamba, 1856 and 3"),
        pytest.param(SELECTIVE["bamba"], True, (36, 18), (58, 32), id="bamba with ends"),
        pytest.param(ZAMBA2_2_7B, False, (20, 20), (119, 118), id="zamba2, 270 and 11"),
        pytest.param(ZAMBA2_2_7B, True, (36, 18), (189, 93), id="zamba2 with ends"),
    ],
)
def test_chats_one_after_the_other_share_pages(
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    ends: bool,
    cut: tuple[int, int],
    filled: tuple[int, int],
) -> None:
    assert kept(config, ends=ends) == filled
    take = BlockPool.take
    monkeypatch.setattr(BlockPool, "take", lambda pool, wanted, *, fill=True: take(pool, wanted, fill=False))
    monkeypatch.setattr(BlockPool, "_to_fill", lambda pool, group: None)
    assert kept(config, ends=ends) == cut


def test_a_page_is_filled_up_before_another_is_cut_and_the_last_laid_down_comes_first() -> None:
    """Three blocks a page. The first page keeps one block, the second two, and no request holds any."""
    pool = BlockPool(layout_of(((None, 2), (6, 3)), 16, 6))
    pages = []
    for count in (1, 2):
        [blocks, _] = pool.take([3, 0], fill=False) or []
        for block in blocks[:count]:
            pool.mark_cached(0, block)
        for block in blocks:
            pool.release(0, block, 1)
        pages.append(pool.layout.page_of(0, blocks[0]))
    [blocks, _] = pool.take([4, 0]) or []
    assert [pool.layout.page_of(0, block) for block in blocks[:3]] == [pages[1], pages[0], pages[0]]
    assert pool.layout.page_of(0, blocks[3]) not in pages
    assert pool.free_pages == 2


def test_without_a_page_to_spare_nothing_is_filled_up() -> None:
    """Three blocks a page, two pages: six blocks fit on them only if their content is given up."""
    pool = BlockPool(layout_of(((None, 2), (6, 3)), 16, 3))
    [blocks, _] = pool.take([3, 0]) or []
    pool.mark_cached(0, blocks[0])
    for block in blocks:
        pool.release(0, block, 1)
    [taken, _] = pool.take([6, 0]) or []
    assert len({pool.layout.page_of(0, block) for block in taken}) == 2
    assert not pool.is_cached(0, blocks[0])
