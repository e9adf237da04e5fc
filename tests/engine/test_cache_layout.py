"""Pages that serve groups of unlike bytes: what is left over, and that no two blocks share a byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.specs.cache_layout import NULL_BLOCK, PADDING, CacheGroup, CacheLayout
from ridgeline.core.specs.state import KVSpec, RecurrentSpec, StatePart, StateSpec
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.sequence import Sequence
from ridgeline.models import model_config
from tests.engine.layouts import Latent
from tests.models.selective_configs import SELECTIVE
from tests.models.test_configs import QWEN3_5_9B, ZAMBA2_2_7B

FULL, WINDOW = KVSpec(num_kv_heads=8, head_dim=128), KVSpec(num_kv_heads=8, head_dim=128, window=1024)
LATENT, STATE = Latent(width=576), RecurrentSpec(parts=(StatePart((32, 128, 128)),))


def layout_of(*groups: tuple[StateSpec, int], num_pages: int, block_size: int = 16) -> CacheLayout:
    layers = iter(range(200))
    made = [CacheGroup(spec=spec, layers=tuple(next(layers) for _ in range(n))) for spec, n in groups]
    return CacheLayout(groups=tuple(made), block_size=block_size, dtype="bfloat16", num_pages=num_pages)


def bytes_of(layout: CacheLayout, group: int, page: int, index: int) -> Iterator[tuple[int, int]]:
    """First byte and first byte beyond, of each layer's unit of a block."""
    block = layout.block_id(group, page, index)
    for layer in range(len(layout.groups[group].layers)):
        begin = (block + layer * layout.layer_step(group)) * layout.step_bytes[group]
        yield begin, begin + layout.unit_bytes[group]


@pytest.mark.parametrize(
    "groups",
    [
        ((FULL, 3),),
        ((FULL, 2), (WINDOW, 3)),
        ((FULL, 2), (LATENT, 4), (WINDOW, 3)),
        ((STATE, 3), (FULL, 1)),
        ((KVSpec(num_kv_heads=1, head_dim=33), 2), (KVSpec(num_kv_heads=3, head_dim=40), 1), (Latent(width=7), 3)),
    ],
)
def test_blocks_of_a_group_share_no_byte_and_those_of_other_pages_share_none_with_any(
    groups: tuple[tuple[StateSpec, int], ...],
) -> None:
    layout = layout_of(*groups, num_pages=5)
    total, owners = layout.num_pages * layout.page_bytes, dict[int, tuple[int, int]]()
    by_page: dict[int, list[tuple[int, int]]] = {}
    for g in range(len(groups)):
        found: list[tuple[int, int]] = []
        for page in range(layout.num_pages):
            for index in range(layout.blocks_per_page(g)):
                block = layout.block_id(g, page, index)
                assert layout.page_of(g, block) == page
                assert owners.setdefault(block * 100 + g, (page, index)) == (page, index)
                found += (parts := list(bytes_of(layout, g, page, index)))
                by_page.setdefault(page, []).extend(parts)
        ordered = sorted(found)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))
        assert ordered[0][0] == 0
        assert ordered[-1][1] <= total
    slabs = [{begin // layout.slab_bytes for begin, _ in parts} for parts in by_page.values()]
    assert sum(map(len, slabs)) == len(set().union(*slabs))
    assert all(
        (end - 1) // layout.slab_bytes == begin // layout.slab_bytes for p in by_page.values() for begin, end in p
    )


def test_equal_bytes_give_one_unit_a_slab_and_no_padding() -> None:
    layout = layout_of((FULL, 2), (WINDOW, 3), num_pages=7)
    assert layout.padding == (0, 0)
    assert layout.units_per_slab == (1, 1)
    assert layout.slab_bytes == 2 * 8 * 128 * 16 * 2
    assert [layout.block_id(0, 4, i) for i in range(3)] == [4, 2 * 7 + 4, 4 * 7 + 4]


@given(
    heads=st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=2, max_size=3),
    width=st.sampled_from([64, 80, 96, 128, 192, 256]),
    latent=st.sampled_from([192, 320, 512, 576]),
)
def test_the_padding_is_little_for_the_shapes_of_models(heads: list[int], width: int, latent: int) -> None:
    specs: list[StateSpec] = [KVSpec(num_kv_heads=n, head_dim=width) for n in heads]
    layout = layout_of(*((spec, 1) for spec in [*specs, Latent(width=latent)]), num_pages=2)
    assert max(layout.padding) <= PADDING


@pytest.mark.parametrize("shape", [(15,), (4, 33), (1537,), (3, 2560)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_block_ids_of_the_largest_memory_fit_into_32_bits(shape: tuple[int, ...], block_size: int) -> None:
    """Whatever bytes a state has that lies beside keys and values; and every unit begins where any dtype may."""
    groups = (FULL, 2), (RecurrentSpec(parts=(StatePart(shape),)), 3)
    pages = 192 * 10**9 // layout_of(*groups, num_pages=2, block_size=block_size).page_bytes
    layout = layout_of(*groups, num_pages=pages, block_size=block_size)
    for g, (_, layers) in enumerate(groups):
        last = layout.block_id(g, pages - 1, layout.blocks_per_page(g) - 1) + (layers - 1) * layout.layer_step(g)
        assert last < 2**31
        assert last * layout.step_bytes[g] + layout.unit_bytes[g] <= pages * layout.page_bytes
        assert layout.step_bytes[g] % 16 == 0


def conversations(draw: random.Random) -> int:
    """Tokens of a request and its answer as in logs of chats: a median of some hundred, and a long tail."""
    return min(8000, max(8, int(draw.lognormvariate(5.3, 1.2)) + int(draw.lognormvariate(5.2, 0.9))))


LAYOUTS = {
    "three kinds": layout_of((FULL, 12), (LATENT, 24), (WINDOW, 24), num_pages=1500),
    "keys, windows and states": layout_of((FULL, 6), (WINDOW, 6), (STATE, 12), num_pages=400),
    **{
        name: CacheLayout(
            groups=model_config(config).spec.cache_groups, block_size=16, dtype="bfloat16", num_pages=pages
        )
        for name, config, pages in (
            ("qwen3.5", QWEN3_5_9B, 100),
            ("bamba", SELECTIVE["bamba"], 80),
            ("zamba2", ZAMBA2_2_7B, 60),
        )
    },
}


SLOW = ("keys, windows and states", "qwen3.5")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, id=name, marks=[pytest.mark.thorough] * (name in SLOW)) for name, x in LAYOUTS.items()],
)
def test_a_full_pool_of_unlike_kinds_wastes_less_than_a_twenty_fifth(layout: CacheLayout) -> None:
    manager, draw = CacheManager(layout, prefix_caching=False, max_chunk=8192), random.Random(1)
    held: list[Sequence] = []
    for n in range(20_000):
        length = conversations(draw)
        params = SamplingParams(max_tokens=1)
        request = Request(id=str(n), prompt_token_ids=(7,) * length, params=params, seed=0, max_total_tokens=length + 1)
        seq = Sequence(request, len(layout.groups))
        if not manager.admit(seq, reserve_blocks=0):
            if not held or n > 6000:
                break
            for _ in range(draw.randint(1, 12)):  # others come in their place, so pages get holes
                if held:
                    manager.release(held.pop(draw.randrange(len(held))), 0)
            continue
        for start in range(0, length, 1024):
            manager.tables.let_go(seq, start, 0)
            assert manager.tables.extend(seq, min(length, start + 1024) - 1, min(length, start + 1024)) is not None
        held.append(seq)
    used = sum(
        len({*seq.blocks[g]} - {NULL_BLOCK}) * layout.unit_bytes[g] * len(group.layers)
        for seq in held
        for g, group in enumerate(layout.groups)
    )
    taken = (manager.pool.num_pages - manager.pool.free_pages) * layout.page_bytes
    waste, free = 1 - used / taken, manager.pool.free_pages / manager.pool.num_pages
    print(
        f"{len(held)} requests; padding {', '.join(f'{p:.1%}' for p in layout.padding)}, "
        f"wasted of the pages taken {waste:.1%}, not taken {free:.1%}"
    )
    assert free < 0.05
    assert waste < 0.04
