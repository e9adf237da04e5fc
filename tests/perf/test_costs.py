"""Costs count what the shapes say."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.kernels.attention.paged.cost import attention_cost, visible
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.gemm.plain.cost import linear_cost
from ridgeline.kernels.sampling.cost import sample_cost
from ridgeline.kernels.small.activation.cost import activation_cost
from ridgeline.kernels.small.embedding.cost import embedding_cost
from ridgeline.kernels.small.norm.cost import norm_cost
from ridgeline.kernels.small.rotary.cost import rope_cost, write_kv_cost


@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 25),
    shared=st.integers(0, 15),
)
def test_what_a_row_sees_equals_a_count_one_by_one(
    rows: list[tuple[int, int]], window: int | None, shared: int
) -> None:
    pairs, keys, common = 0, 0, set[int]()
    for new, before in rows:
        seen: set[int] = set()
        for position in range(before, before + new):
            visible_keys = range(0 if window is None else max(0, position - window + 1), position + 1)
            pairs += len(visible_keys)
            seen.update(visible_keys)
        common |= {key for key in seen if key < shared}
        keys += len({key for key in seen if key >= shared})
    lengths = [new + before for new, before in rows]
    assert visible([new for new, _ in rows], lengths, window, shared) == (pairs, keys + len(common))


def test_large_batches_do_not_overflow() -> None:
    import numpy as np

    tokens = np.full(4096, 100_000, np.int32)
    assert visible(tokens, tokens, None)[0] == 4096 * 100_000 * 100_001 / 2


def test_by_hand() -> None:
    assert embedding_cost(3, 8, itemsize=2) == Cost(3 * (4 + 16 + 16), 0)
    assert linear_cost(3, 4, 5, itemsize=2, bias=True) == Cost(2 * (12 + 20 + 15 + 5), 3 * 5 * (8 + 1))
    assert linear_cost(3, 4, 5, itemsize=2, weight_itemsize=0.5) == Cost(10 + 2 * (12 + 15), 120)
    assert linear_cost(0, 4, 5, itemsize=2) == Cost(0, 0)
    assert norm_cost(3, 8, itemsize=2) == Cost(2 * (48 + 8), 96)
    assert norm_cost(3, 8, itemsize=2, kind="layer", residual=True) == Cost(2 * (96 + 16), 24 * 8)
    assert rope_cost(3, 4, 2, 8, 4, itemsize=2) == Cost(2 * 2 * 3 * 6 * 8 + 3 * 4 * 5, 3 * 3 * 6 * 4)
    assert activation_cost(3, 8, kind="silu", itemsize=2, gated=True) == Cost(2 * 24 * 3, 24 * 5)
    assert write_kv_cost(3, 2, 8, itemsize=2, kv_itemsize=1) == Cost(3 * (2 * 2 * 8 * 3 + 4), 0)
    assert sample_cost(3, 100) == Cost(3 * 408, 300)


def test_grouped_heads_share_keys_but_not_arithmetic() -> None:
    def cost(kv_heads: int) -> Cost:
        return attention_cost([1], [100], num_heads=8, num_kv_heads=kv_heads, head_dim=16, itemsize=2, kv_itemsize=2)

    queries_and_outputs = 2 * 8 * 16 * 2
    assert cost(8).flops == cost(2).flops == 4 * 8 * 16 * 100
    assert cost(8).bytes - queries_and_outputs == 4 * (cost(2).bytes - queries_and_outputs)


def test_a_shared_beginning_is_read_once_but_multiplied_by_every_row() -> None:
    """Four rows, each its 10 tokens after 100 shared ones; a key and value of 2 heads x 16 in 2 bytes are 128 bytes."""

    def cost(shared: int) -> Cost:
        return attention_cost(
            [1] * 4, [110] * 4, num_heads=8, num_kv_heads=2, head_dim=16, itemsize=2, kv_itemsize=2, shared=shared
        )

    queries_and_outputs = 2 * 4 * 8 * 16 * 2
    assert cost(0) == Cost(queries_and_outputs + 128 * 4 * 110, 4 * 8 * 16 * 4 * 110)
    assert cost(100) == Cost(queries_and_outputs + 128 * (100 + 4 * 10), cost(0).flops)


def test_of_a_shared_beginning_only_what_windows_reach_is_read() -> None:
    """A window of 8: at 20 tokens 12 … 19 are seen, at 17 tokens 9 … 16. Of the first 15 that is 12-14 and 9-14."""
    assert visible([1, 1], [20, 17], 8, shared=15) == (16, 5 + 2 + 6)


@pytest.mark.parametrize("module", ["roofline", "planner", "explain", "calibration"])
def test_no_torch(module: str) -> None:
    code = f"import sys, ridgeline.perf.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
