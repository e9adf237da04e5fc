"""Ranks that divide tokens and cache attend as one device does, each way that they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.core.plan.stripes import held
from ridgeline.kernels.attention.paged.cases import CASES, AttentionCase
from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.perf.context import Attended, moved
from ridgeline.worker.share import Stripes
from ridgeline.worker.state.divided_rounds import Blocks, Heads, Keys, Queries
from ridgeline.worker.state.rounds import Around, Cached, Round, Together
from ridgeline.worker.state.states import DeviceRows
from tests.kernels.attention.test_attention import dense
from tests.kernels.unseen import forgotten, spoiled
from tests.parallel import threads
from tests.parallel.threads import Here, ThreadAxis, on_ranks

OPS = Ops(Platform(device_type="cpu"))
CPU = torch.device("cpu")
WAYS = ("together", "keys", "queries", "heads")
MANY = AttentionCase(
    rows=((29, 29), (1, 90), (0, 7), (16, 83), (2, 2)), num_heads=8, num_kv_heads=8, window=23, sinks=True
)
SLOPED = replace(MANY, alibi=True, softcap=4.0)
# Biases by distance are T5's, whose contexts are not divided
# Models that see pictures are not divided this way
PLAIN = [case for case in CASES if not case.distances and not case.pictures]
ALL = (*PLAIN, MANY, SLOPED, replace(SLOPED, window=None))


def attended(way: str, ranks: int, case: AttentionCase) -> Tensor:
    """What the ranks return, in the order of the step's tokens. What no token sees is NaN in all caches."""
    q_THD, *caches, batch = case.inputs(torch.float32, CPU)
    batch = forgotten(case, batch)
    caches = spoiled(case, caches, batch)
    wide = torch.float32 if way == "heads" else torch.float64
    softmax = case.softmax(torch.float32, CPU)
    new_R, end_R = (np.array(column) for column in zip(*case.rows, strict=True))
    position_T = torch.cat([torch.arange(end - new, end) for new, end in case.rows])

    def rank(axis: ThreadAxis) -> tuple[Tensor, Tensor]:
        own = Cached(*(cache[:, :, axis.rank :: ranks].to(wide) for cache in caches))
        share = None if way == "together" else Stripes(axis, new_R, end_R, CPU)
        around = Around(axis, OPS, case.num_heads, case.window, own.k_NGPD)
        made = round_of(way, around, case, batch, share)
        mine_t = torch.arange(len(q_THD)) if share is None else share.mine_t
        return mine_t, made.attend(q_THD[mine_t].to(wide), position_T[mine_t], own, softmax)

    found = on_ranks(ranks, rank)
    if way == "together":
        assert all(torch.equal(out, found[0][1]) for _, out in found), "ranks must go on with the same bits"
        return found[0][1]
    out_THD = torch.full_like(q_THD, torch.nan, dtype=wide)
    for mine_t, part in found:
        out_THD[mine_t] = part
    return out_THD


def round_of(way: str, around: Around, case: AttentionCase, batch: RaggedBatch, share: Stripes | None) -> Round:
    rows = DeviceRows(
        slots_R=batch.slots_R,
        start_R1=batch.start_R1,
        kv_len_R=batch.kv_len_R,
        last_R=batch.start_R1[1:] - 1,
        num_tokens=int(batch.start_R1[-1]),
        tokens_each=batch.tokens_each,
    )
    if share is None:
        return Together(around, rows, batch.block_table_SC)
    blocks = Blocks(share, batch.slots_R, batch.block_table_SC, case.block_size // share.ranks, case.window)
    if way == "keys":
        return Keys(around, share, blocks)
    if way == "queries":
        return Queries(around, share, rows, batch.block_table_SC)
    return Heads(around, share, blocks)


@pytest.mark.few(8)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_together_attend_as_one_device(way: str, ranks: int) -> None:
    """In float64 to its last digits, but where heads are exchanged: one device's own kernels run then."""
    tried = 0
    for case in ALL if ranks < 8 else (MANY, SLOPED):
        if way == "heads" and case.num_kv_heads % ranks:
            continue
        tried += 1
        case = replace(case, block_size=4 * ranks)
        error = (attended(way, ranks, case).double() - dense(case, torch.float32)).abs().max().item()
        assert error <= (1e-5 if way == "heads" else 1e-12), case
    assert tried or ranks == 3


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", ["keys", "queries", "heads"])
def test_ranks_receive_the_bytes_by_which_ways_are_chosen(
    way: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []

    class Counting(ThreadAxis):
        def exchanged(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
            got = super().exchanged(parts, shapes)
            received.append(sum(part.nbytes for rank, part in enumerate(got) if rank != self.rank))
            return got

        def passed_on(self, x: Tensor) -> Here:
            got = super().passed_on(x)
            received.append(got.wait().nbytes)
            return got

    monkeypatch.setattr(threads, "ThreadAxis", Counting)
    case = AttentionCase(rows=((64, 128),), num_heads=8, num_kv_heads=4, head_dim=64, block_size=8 * ranks)
    attended(way, ranks, case)
    itemsize = 4 if way == "heads" else 8
    layer = Attended(64, 128, 0, case.num_heads, case.num_kv_heads, case.head_dim, itemsize)
    assert sum(received) / ranks == pytest.approx(moved(way, ranks, layer), rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_hold_what_is_dealt_to_them(ranks: int) -> None:
    for rank in range(ranks):
        for length in range(-12, 23):
            own = [p for p in range(min(length, 0), max(length, 0)) if p % ranks == rank]
            assert held(length, rank, ranks) == (len(own) if length >= 0 else -len(own))
