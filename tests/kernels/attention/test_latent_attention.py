"""Latent attention and the launch that fills its cache: the Triton kernels against the references."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.kernels.attention.latent import torch_ops
from ridgeline.kernels.attention.latent.cases import CASES, LatentCase, LatentKVCase
from ridgeline.kernels.attention.latent.cost import latent_attention_cost, latent_kv_cost
from ridgeline.kernels.attention.latent.op import (
    LATENT_ATTENTION,
    LATENT_KV,
    LatentCache,
    LatentLevels,
    kept,
    latent_attention_reference,
    latent_kv_reference,
)
from ridgeline.kernels.attention.latent.op import partial_latent_attention as partial_of_reference
from ridgeline.kernels.attention.paged import schedule as schedules
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch, Schedule
from ridgeline.kernels.attention.paged.partial import merge_attention
from ridgeline.kernels.base.case import as_cases
from ridgeline.kernels.base.tree import Tree
from tests.covering import by_pairs
from tests.kernels.trees import bits_of, drawn_parents, signed

pytest.importorskip("triton")
from ridgeline.kernels.attention.latent.choose import MOST_QUERIES, choose
from ridgeline.kernels.attention.latent.triton import latent_attention, partial_latent_attention
from ridgeline.kernels.attention.latent.triton_kv import latent_kv
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.attention.paged.triton_common import Cut
from ridgeline.kernels.base.launch import INTERPRETED

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)]
EXACT = 8e-6  # in float32, as in test_attention.py

SMALL, WIDE = [case for case in CASES if case.rank < 512], [case for case in CASES if case.rank >= 512]
MORE = (  # widths that are no powers of two, a row of many parts, more heads than a program takes, tiny blocks
    LatentCase(rows=((1, 200), (4, 300), (50, 70)), num_heads=20, rank=48, rope_dim=16),
    LatentCase(rows=((1, 3000),), num_heads=16),
    LatentCase(rows=((1, 3000), (1, 9), (1, 640)), num_heads=128, block_size=64),
    LatentCase(rows=((2, 900), (2, 70)), num_heads=128, rope_dim=48),
    LatentCase(rows=((9, 400), (1, 600), (0, 5), (70, 70)), num_heads=3, block_size=2),
)


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bfloat16: of itself it multiplies the bits."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def numbers(x: Any) -> Any:
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.data.dtype == np.uint16 else x.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype != np.uint16:
            return multiply(self, a, b, d, *options)
        product = np.matmul(numbers(a), numbers(b), dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def scale_of(case: LatentCase) -> float:
    return (case.key_dim + case.rope_dim) ** -0.5


def tolerance(dtype: torch.dtype) -> float:
    """A score is a sum of up to 576 products, added in any order."""
    return max(8 * torch.finfo(dtype).eps, 2 * EXACT)


def worst(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def schedule_of(case: LatentCase, batch: RaggedBatch, tokens: int, **options: Any) -> Schedule:
    of_layers = AttentionShape(
        num_tokens=tokens,
        tokens_each=batch.tokens_each,
        num_heads=case.num_heads,
        num_kv_heads=1,
        head_bytes=4 * (case.rank + case.rope_dim),
        **options,
    )
    return make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, of_layers)


def apart(cache: LatentCache) -> LatentCache:
    """Return the same cache with blocks that have a stride of their own, and NaN between them where that exists."""
    if not isinstance(cache, Tensor):
        return LatentLevels(*map(apart, cache))
    empty = torch.zeros(len(cache), 3, *cache.shape[1:], device=cache.device)
    if cache.itemsize > 1:
        empty.fill_(torch.nan)
    wide = empty.to(cache.dtype)
    wide.view(torch.uint8)[:, 1] = cache.contiguous().view(torch.uint8)
    return wide[:, 1]


def check(case: LatentCase, dtype: torch.dtype, device: str, cut: Cut | None = None) -> None:
    """Views of wider queries with rows to spare, blocks with a stride of their own, NaN around, no lengths."""
    q_THL, q_THY, cache, batch = case.inputs(dtype, torch.device(device))
    expected = latent_attention_reference(q_THL, q_THY, cache, batch, scale=scale_of(case))
    tokens, spare = len(q_THL), 0 if batch.tokens_each else 3
    wide = torch.full((case.num_heads, tokens + spare, case.rank + case.rope_dim + 16), torch.nan, dtype=dtype)
    wide_THX = wide.to(device).transpose(0, 1)  # heads come first, as from a product of each head
    wide_THX[:tokens, :, : case.rank] = q_THL
    wide_THX[:tokens, :, case.rank : case.rank + case.rope_dim] = q_THY
    given = wide_THX[..., : case.rank], wide_THX[..., case.rank : case.rank + case.rope_dim]
    batch = replace(batch, kv_len_R=batch.kv_len_R.int(), num_tokens_R=None, kv_bound_R=None)
    out = latent_attention(*given, apart(cache), batch, scale=scale_of(case), cut=cut)
    assert out.is_contiguous()
    assert out.dtype == dtype
    assert worst(out[:tokens], expected) <= tolerance(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "items"), [([8192] * 64, 128), ([32768] * 8, 128), ([1024] * 64, 128), ([8192], 128)], ids=str
)
def test_rows_of_one_length_have_items_that_run_at_once(
    lengths: list[int], items: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 132 multiprocessors. (A row of 8,192 keys would have 128 of one tile each; a little longer, it has half.)"""
    monkeypatch.setattr(schedules, "num_multiprocessors", lambda device: 132)
    rows = len(lengths)
    of_layers = AttentionShape(
        num_tokens=rows, tokens_each=1, num_heads=16, num_kv_heads=1, head_bytes=1152, item_queries=64
    )
    made = make_schedule(
        torch.arange(rows + 1, device=device),
        torch.tensor(lengths, device=device),
        torch.arange(rows, device=device),
        of_layers,
    )
    count = int(made.counts_2[0])
    assert items / 2 <= count <= items
    assert (made.items_I8[:count, 5] - made.items_I8[:count, 4]).sum() == sum(lengths)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [*SMALL, *(pytest.param(case, marks=pytest.mark.thorough) for case in (*WIDE, *MORE))],
    ids=str,
)
def test_the_kernel_equals_the_reference_and_reads_nothing_unseen(
    case: LatentCase, dtype: torch.dtype, device: str
) -> None:
    check(case, dtype, device)


CUTS = tuple(Cut(queries, keys, 4, 1) for queries, keys in ((16, 64), (32, 16), (64, 32)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(
    "case", [CASES[3], CASES[5], *(pytest.param(case, marks=pytest.mark.thorough) for case in MORE)], ids=str
)
def test_every_cut_computes_the_same(case: LatentCase, cut: Cut, device: str) -> None:
    check(case, torch.float32 if device == "cpu" else torch.float16, device, cut)


LATENTS = {"rank": 512, "rope_dim": 64, "key_dim": 128}
OF_HOPPER = (  # rows of items and of tiles, several parts, blocks shorter and longer than a tile of keys
    LatentCase(rows=((1, 1), (1, 63), (1, 700), (1, 5000)), num_heads=128, block_size=64, **LATENTS),
    LatentCase(rows=((1, 3000),), num_heads=64, block_size=16, **LATENTS),
    LatentCase(rows=((4, 900), (4, 70), (4, 4)), num_heads=16, block_size=128, **LATENTS),
    LatentCase(rows=((70, 130), (1, 33), (200, 777)), num_heads=20, block_size=8, **LATENTS),
    LatentCase(rows=((300, 300), (0, 9), (2, 2)), num_heads=40, block_size=32, **LATENTS),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", OF_HOPPER, ids=str)
def test_hoppers_kernel_equals_the_reference_and_reads_nothing_unseen(
    case: LatentCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for Hopper")
    from ridgeline.kernels.attention.latent import hopper

    used, attend = [], hopper.attend
    monkeypatch.setattr(hopper, "TILES", True)
    monkeypatch.setattr(hopper, "attend", lambda *given: (used.append(given[0]), attend(*given)))
    check(case, dtype, "cuda")
    assert used


@pytest.mark.parametrize("device", DEVICES)
def test_deepseeks_heads_are_attended_to(device: str) -> None:
    """A decode step and a chunk of a prompt, at the true width, with an item of few heads."""
    check(
        LatentCase(rows=((1, 70), (1, 400)), num_heads=16, rank=512, rope_dim=64, block_size=64), torch.bfloat16, device
    )
    check(LatentCase(rows=((5, 70),), num_heads=16, rank=512, rope_dim=64, block_size=64), torch.bfloat16, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "known"), [(CASES[3], False), (CASES[4], True), (CASES[5], False)], ids=str)
def test_layers_share_a_schedule_however_it_was_cut(case: LatentCase, known: bool, device: str) -> None:
    q_THL, q_THY, cache_NPW, batch = case.inputs(torch.float32, torch.device(device))
    expected = latent_attention_reference(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))
    if not known:
        batch = replace(batch, num_tokens_R=None, kv_bound_R=None)
    ways: tuple[dict[str, Any], ...] = ({}, {"item_queries": MOST_QUERIES}, {"item_queries": 16}, {"fixed": True})
    for options in ways:
        given = replace(batch, schedule=schedule_of(case, batch, len(q_THL), **options))
        for _ in range(2 if device == "cuda" or not options else 1):
            out = latent_attention(q_THL, q_THY, cache_NPW, given, scale=scale_of(case))
            assert worst(out, expected) <= EXACT


def test_items_of_many_queries_are_cut_for_several_programs() -> None:
    """Programs of latents fill a multiprocessor each, and 128 heads are two programs of an item; and rows that verify
    drafts are items."""

    def made(heads: int, each: int, **options: Any) -> Schedule:
        start = each * torch.arange(3)
        shape = AttentionShape(
            num_tokens=2 * each, tokens_each=each, num_heads=heads, num_kv_heads=1, head_bytes=1152, **options
        )
        return make_schedule(start, torch.tensor([5000, 5000]), torch.arange(2), shape)

    whole = made(128, 1)
    assert (whole.few, len(whole.items_I8), whole.tile_tokens) == (1, 8 + 2, 1)
    halves = made(128, 1, item_queries=64)
    assert (halves.few, len(halves.items_I8), len(halves.tiles_J4)) == (1, 2 + 2, 0)
    assert len(made(16, 1, item_queries=64).items_I8) == 4 + 2
    drafts = made(128, 4, item_queries=64)
    assert (drafts.few, len(drafts.items_I8), len(drafts.tiles_J4)) == (4, 2 + 2, 0)
    assert made(128, 4).few == 1
    chunks = made(16, 40, item_queries=64)
    assert (chunks.few, chunks.tile_tokens) == (1, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("each", [1, 6, 40])
def test_a_stopped_row_stays_finite_and_disturbs_nobody(each: int, device: str) -> None:
    """It has one key, in the null block, and may have more tokens than that."""
    case = LatentCase(rows=((each, 90), (each, 340), (each, 300)), num_heads=4)
    q_THL, q_THY, cache_NPW, batch = case.inputs(torch.float32, torch.device(device))
    expected = latent_attention(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))
    lengths, table_SC = batch.kv_len_R.clone(), batch.block_table_SC.clone()
    lengths[1] = 1
    table_SC[batch.slots_R[1]] = 0
    cache_NPW[0, 0] = 1.0
    stopped = replace(batch, kv_len_R=lengths, block_table_SC=table_SC, num_tokens_R=None, kv_bound_R=None)
    out = latent_attention(q_THL, q_THY, cache_NPW, stopped, scale=scale_of(case))
    assert out.isfinite().all()
    others = torch.tensor([*range(each), *range(2 * each, 3 * each)], device=device)
    assert worst(out[others], expected[others]) <= EXACT


# Parts of a row's keys


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [CASES[3], CASES[4], CASES[6], LatentCase(rows=((1, 3000), (2, 1800)))], ids=str)
def test_parts_of_the_keys_add_up_to_all_of_them(case: LatentCase, device: str) -> None:
    """Every row's keys in two parts, of which the first query may see nothing, and a row has none of the second."""
    q_THL, q_THY, cache, batch = case.inputs(torch.float32, torch.device(device))
    expected = latent_attention_reference(q_THL, q_THY, cache, batch, scale=scale_of(case))
    lengths = [length for _, length in case.rows]
    cut_R = torch.tensor(
        [(length - new + 2) // case.block_size * case.block_size for new, length in case.rows], device=device
    ).int()
    cut_R[0] = lengths[0]
    found = []
    for first in (True, False):
        # A query's last key in the second part is its own, and in the first part the last one or its own
        table_SC, rows = batch.block_table_SC.clone(), []
        for row, (slot, (new, length)) in enumerate(zip(batch.slots_R.tolist(), case.rows, strict=True)):
            cut = int(cut_R[row])
            rows.append((new, min(cut, length) if first else length - cut))
            if not first:
                table_SC[slot] = table_SC[slot].roll(-(cut // case.block_size))
        kv_len_R = torch.tensor([length for _, length in rows], device=device, dtype=torch.int32)
        part = replace(
            batch, block_table_SC=table_SC, kv_len_R=kv_len_R, schedule=None,
            num_tokens_R=None, kv_bound_R=None,
        )  # fmt: skip
        for function in (partial_latent_attention, partial_of_reference):
            out_THL, lse_TH = function(q_THL, q_THY, cache, part, scale=scale_of(case))
            found.append((torch.where(lse_TH[..., None] == -torch.inf, 0, out_THL), lse_TH))
    for (out, lse), (own_out, own_lse) in (found[:2], found[2:]):
        torch.testing.assert_close(out, own_out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, own_lse, rtol=1e-5, atol=1e-5)
    assert (found[2][1] == -torch.inf).any()
    alone = [row for row, (new, _) in enumerate(case.rows) if new == 1]  # whose query sees all of both parts
    merged = merge_attention(torch.stack([found[0][0], found[2][0]]), torch.stack([found[0][1], found[2][1]]))
    tokens = torch.tensor([int(batch.start_R1[row]) for row in alone], device=device, dtype=torch.long)
    assert len(tokens) > 0 or case is CASES[4]
    torch.testing.assert_close(merged[tokens], expected[tokens], rtol=1e-4, atol=2 * EXACT)


# Trees


def trees_of(
    rows: tuple[tuple[int, int, int], ...], case: LatentCase, device: str
) -> tuple[Tensor, Tensor, Tensor, RaggedBatch]:
    """Rows of (nodes, queries, keys before the root), whose queries are the last nodes. Nodes that no query sees are
    not numbers."""
    q_THL, q_THY, cache_NPW, batch = case.inputs(torch.float32, torch.device(device))
    draw, bits, bases = random.Random(3), list[int](), list[int]()
    for index, (nodes, queries, before) in enumerate(rows):
        own = bits_of(drawn_parents(draw, nodes))[-queries:]
        bits, bases = bits + own, bases + [before] * queries
        seen = {bit for each in own for bit in range(nodes) if each >> bit & 1}
        for node in set(range(nodes)) - seen:
            block, offset = divmod(before + node, case.block_size)
            cache_NPW[batch.block_table_SC[batch.slots_R[index], block].long(), offset] = torch.nan
    tree = Tree(torch.tensor([signed(each) for each in bits], device=device), torch.tensor(bases, device=device))
    return q_THL, q_THY, cache_NPW, replace(batch, tree=tree)


STEPS = (
    ((8, 8, 90), (8, 8, 0), (8, 8, 640)),
    ((3, 1, 70), (64, 1, 200), (64, 1, 0)),
    ((64, 64, 75), (64, 64, 0)),
    ((20, 20, 33), (5, 5, 1), (64, 30, 90), (1, 1, 90)),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [4, pytest.param(20, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("rows", "fixed", "cut"), by_pairs(STEPS, [False, True], [None, Cut(16, 16, 4, 1)]), ids=str)
def test_queries_see_the_nodes_of_their_tree_and_read_no_other(
    rows: tuple[tuple[int, int, int], ...], fixed: bool, cut: Cut | None, heads: int, device: str
) -> None:
    case = LatentCase(rows=tuple((queries, before + nodes) for nodes, queries, before in rows), num_heads=heads)
    q_THL, q_THY, cache_NPW, batch = trees_of(rows, case, device)
    expected = latent_attention_reference(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))
    assert expected.isfinite().all()
    schedule = schedule_of(case, batch, len(q_THL), trees=True, fixed=fixed) if fixed else None
    given = replace(batch, schedule=schedule, num_tokens_R=None, kv_bound_R=None)
    out = latent_attention(q_THL, q_THY, cache_NPW, given, scale=scale_of(case), cut=cut)
    assert worst(out, expected) <= EXACT


@pytest.mark.parametrize("device", DEVICES)
def test_a_chain_is_a_causal_row(device: str) -> None:
    case = LatentCase(rows=((8, 90), (8, 8)))
    q_THL, q_THY, cache_NPW, batch = case.inputs(torch.float32, torch.device(device))
    expected = latent_attention(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))
    base_T = torch.tensor([82] * 8 + [0] * 8, device=device)
    tree = Tree((2 << torch.arange(8, device=device).repeat(2)) - 1, base_T)
    out = latent_attention(q_THL, q_THY, cache_NPW, replace(batch, tree=tree), scale=scale_of(case))
    assert worst(out, expected) <= EXACT


# Plain torch


SMALL = {"QUERIES": 24, "SCORES": 600, "GATHERED_BYTES": 1 << 12}  # so that short rows have tiles and stretches


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_torch_form_equals_the_reference(case: LatentCase, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items() if small else ():
        monkeypatch.setattr(torch_ops, name, value)
    q_THL, q_THY, cache_NPW, batch = case.inputs(torch.float32, torch.device("cpu"))
    expected = latent_attention_reference(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))
    for _ in range(2):  # the second layer finds what the first one has made
        found = torch_ops.latent_attention(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))
        assert worst(found, expected) <= EXACT


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("rows", STEPS, ids=str)
def test_the_torch_form_knows_trees(
    rows: tuple[tuple[int, int, int], ...], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SMALL.items() if small else ():
        monkeypatch.setattr(torch_ops, name, value)
    case = LatentCase(rows=tuple((queries, before + nodes) for nodes, queries, before in rows))
    q_THL, q_THY, cache_NPW, batch = trees_of(rows, case, "cpu")
    expected = latent_attention_reference(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))
    found = torch_ops.latent_attention(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))
    assert worst(found, expected) <= EXACT


@pytest.mark.dealt
def test_the_torch_form_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys, heads and queries there are: what it gathers and scores at once is bounded."""
    made, product = list[int](), Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: (made.append(len(a) * b.shape[-1]), product(a, b))[1])
    case = LatentCase(rows=((64, 30_000),), num_heads=128, rank=32, rope_dim=16, block_size=64)
    q_THL, q_THY, cache_NPW, batch = case.inputs(torch.float32, torch.device("cpu"))
    torch_ops.latent_attention(q_THL, q_THY, cache_NPW, batch, scale=1.0)
    assert max(made) <= torch_ops.SCORES
    assert sum(made) > 64 * 128 * 30_000


# Deterministic results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (4, torch.float32),
        (20, torch.bfloat16),
        pytest.param(4, torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param(20, torch.float32, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_no_bit_depends_on_what_runs_beside_it(heads: int, dtype: torch.dtype, device: str) -> None:
    """A row beside others and alone, a token in a chunk of a prompt and by itself."""
    case = LatentCase(rows=((30, 130), (1, 300), (1, 3), (7, 70)), num_heads=heads)
    q_THL, q_THY, cache_NPW, batch = case.inputs(dtype, torch.device(device))

    def run(batch: RaggedBatch, first: int, last: int) -> Tensor:
        schedule = schedule_of(case, batch, last - first, fixed=True, item_queries=MOST_QUERIES)
        batch = replace(batch, schedule=schedule)
        return latent_attention(q_THL[first:last], q_THY[first:last], cache_NPW, batch, scale=scale_of(case))

    together, start = run(batch, 0, 39), 0
    assert worst(together, latent_attention_reference(q_THL, q_THY, cache_NPW, batch, scale=scale_of(case))) <= (
        tolerance(dtype)
    )
    for row, (count, length) in enumerate(case.rows):
        for first, last in ((0, count), *((i, i + 1) for i in range(0, count, 7)), (count // 2, count)):
            alone = replace(
                batch,
                slots_R=batch.slots_R[row : row + 1],
                start_R1=torch.tensor([0, last - first], device=device),
                kv_len_R=torch.tensor([length - count + last], device=device),
                tokens_each=last - first,
                num_tokens_R=np.array([last - first]),
                kv_bound_R=np.array([length]),
            )
            assert torch.equal(run(alone, start + first, start + last), together[start + first : start + last])
        start += count


def test_mistakes_are_named() -> None:
    case = CASES[2]
    q_THL, q_THY, cache_NPW, batch = case.inputs(torch.float32, CPU)
    windowed = replace(batch, schedule=schedule_of(case, batch, len(q_THL), window=9))
    with pytest.raises(ValueError, match="without a window"):
        latent_attention(q_THL, q_THY, cache_NPW, windowed, scale=1.0)
    ones = torch.ones(len(q_THL), dtype=torch.int64)
    plain = replace(batch, tree=Tree(ones, ones), schedule=schedule_of(case, batch, len(q_THL)))
    with pytest.raises(ValueError, match="schedules with trees"):
        latent_attention(q_THL, q_THY, cache_NPW, plain, scale=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        latent_attention(q_THL[..., ::2], q_THY, cache_NPW, batch, scale=1.0)


def test_hoppers_kernel_takes_items_of_many_queries_in_deepseeks_widths() -> None:
    from ridgeline.kernels.attention.latent.hopper import supports

    def asked(queries: int = 64, rank: int = 512, dtype: torch.dtype = torch.bfloat16, size: int = 64, apart: int = 1,
              items: bool = True) -> bool:  # fmt: skip
        q_THL, q_THY = torch.empty(1, 64, rank, dtype=dtype), torch.empty(1, 64, 64, dtype=dtype)
        cache_NPW = torch.empty(4, apart, size, rank + 64, dtype=dtype)[:, 0]
        return supports(queries, q_THL, q_THY, cache_NPW, items=items)

    assert asked()
    assert asked(128, size=8, apart=3)
    assert asked(33, dtype=torch.float16, size=256)
    assert not any((asked(32), asked(rank=256), asked(dtype=torch.float32), asked(size=4), asked(size=48)))
    assert not asked(items=False)


def test_a_cut_depends_on_shapes_alone_and_fits() -> None:
    for queries in (1, 16, 20, 48, 64, 128, 512):
        for rank, width in ((32, 48), (512, 576)):
            for itemsize in (2, 4):
                cut = choose(queries, rank, width, itemsize, CPU)
                assert 16 <= cut.queries <= MOST_QUERIES
                assert cut.keys in (16, 32, 64)


# The cache's launch


# From one level to the next: relative for E4M3, and of the largest number (about 4) for int8
LEVEL_STEP = {"fp8": (0.126, 0.02), "int8": (0.0, 0.05)}


def kv_inputs(case: LatentCase, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    (kept,) = as_cases(LatentKVCase, [case])
    return kept.inputs(dtype, torch.device(device))


def both(inputs: tuple[Any, ...]) -> list[list[Tensor]]:
    """Return (rotated queries, cache) of the reference, then of the kernel."""
    results = []
    functions: tuple[Callable[..., Tensor], ...] = (latent_kv_reference, latent_kv)
    for function in functions:
        *given, cache, place_T = inputs
        if isinstance(cache, Tensor):
            whole = torch.full_like(cache.new_empty(len(cache), 2, *cache.shape[1:]), torch.nan)
            results.append([function(*given, whole[:, 1], place_T), whole])
            continue
        own = apart(cache)
        q_THY = function(*given, own, place_T)
        every = (torch.arange(len(own.rotated_NPY), device=q_THY.device),)
        results.append([q_THY, torch.cat(kept(own, every, own.latent_NPL.shape[2], torch.float32), -1)])
    return results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cache_is_filled_and_queries_rotated_in_one_launch(
    case: LatentCase, dtype: torch.dtype, device: str
) -> None:
    """In bfloat16 the interpreter cuts digits off, where the reference rounds."""
    for interleaved in (False, True):
        (expected, wanted), (got, cache) = both(kv_inputs(replace(case, interleaved=interleaved), dtype, device))
        assert got.is_contiguous()
        eps = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=eps, atol=eps)
        if case.levels:  # where a sum ends otherwise, a number may become the next level
            far = (cache - wanted).abs() > eps * (1 + wanted.abs())
            assert far.float().mean() <= (0.05 if dtype == torch.bfloat16 else 1e-3)
            rtol, atol = LEVEL_STEP[case.latents]
        else:
            rtol, atol = eps, eps
        torch.testing.assert_close(cache, wanted, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(1, 48, 48), (40, 512, 64), (128, 80, 16)], ids=str)
def test_heads_and_widths_may_be_no_powers_of_two(sizes: tuple[int, int, int], device: str) -> None:
    heads, rank, rope = sizes
    case = LatentCase(rows=((5, 5),), num_heads=heads, rank=rank, rope_dim=rope)
    inputs = list(kv_inputs(case, torch.float32, device))
    inputs[5], inputs[8] = inputs[5].int(), inputs[8].int()
    (expected, wanted), (got, cache) = both(tuple(inputs))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_step_without_tokens_launches_nothing() -> None:
    q_THX, latent_TW, weight_L, eps, table, positions_T, interleaved, cache, place_T = kv_inputs(
        CASES[0], torch.float32, "cpu"
    )
    q_THY = latent_kv(q_THX[:0], latent_TW[:0], weight_L, eps, table, positions_T[:0], interleaved, cache, place_T[:0])
    assert q_THY.shape == (0, CASES[0].num_heads, CASES[0].rope_dim)


@pytest.mark.parametrize(
    ("op", "function"), [(LATENT_KV, latent_kv), (LATENT_ATTENTION, latent_attention)], ids=["kv", "attention"]
)
def test_the_ops_name_these_kernels(op: Any, function: Callable[..., Any]) -> None:
    assert next(one for one in op.implementations if one.name == "triton").load() is function


# Costs


def test_every_visible_vector_is_counted_once_and_serves_all_heads() -> None:
    cost = latent_attention_cost([1, 3, 0], [5, 4, 9], num_heads=2, rank=8, rope_dim=4, itemsize=2)
    pairs = 5 + (2 + 3 + 4)
    assert cost.flops == 2 * pairs * 2 * (12 + 8)
    assert cost.bytes == 2 * ((5 + 4) * 12 + 4 * 2 * (12 + 8))
    assert latent_kv_cost(3, num_heads=2, rank=8, rope_dim=4, itemsize=2).bytes == 3 * (2 * 2 * (12 + 8) + 4)


def test_decode_is_bound_by_bytes_for_16_heads_and_by_flops_for_128() -> None:
    """64 requests of 8k tokens on an H100, by 3.35 TB/s and 750 TFLOP/s."""
    for heads, bytes_, flops in ((16, 606e6, 18.3e9), (128, 622e6, 146e9)):
        cost = latent_attention_cost([1] * 64, [8192] * 64, num_heads=heads, rank=512, rope_dim=64, itemsize=2)
        assert cost.bytes == pytest.approx(bytes_, rel=0.01)
        assert cost.flops == pytest.approx(flops, rel=0.01)
        assert (cost.bytes / 3.35e12 > cost.flops / 750e12) == (heads == 16)
