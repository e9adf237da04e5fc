"""Paged attention: the reference against dense attention, every implementation against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.kernels.attention.paged import torch_ops
from ridgeline.kernels.attention.paged.cases import CASES, WIDE_CASES, AttentionCase
from ridgeline.kernels.attention.paged.op import PAGED_ATTENTION, AttentionShape, Softmax
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.plain.rounded import buffer
from tests.covering import by_pairs
from tests.kernels.unseen import cleared, forgotten, spoiled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPES_IN_TURN = [torch.float32, torch.float16, torch.bfloat16]  # of which the interpreter multiplies two
IMPLEMENTATIONS = [implementation.name for implementation in PAGED_ATTENTION.implementations]
EXACT = 1e-6
THOROUGH = pytest.mark.thorough


def skip_what_the_interpreter_gets_wrong(name: str, dtype: torch.dtype, device: str) -> None:
    if name == "triton" and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")


def tolerance(dtype: torch.dtype) -> float:
    """Values are of order one (|v| < 5) and weights sum to 1, so the roundings of L terms average out whatever L is;
    8 roundings cover both products and the output."""
    return 8 * max(torch.finfo(dtype).eps, EXACT)


def scale_of(case: AttentionCase) -> float:
    return case.head_dim**-0.5


def dense(case: AttentionCase, dtype: torch.dtype) -> torch.Tensor:
    """Each row by itself with an explicit mask, in float64, from keys gathered one by one."""
    q_THD, k_cache, v_cache, batch = case.inputs(dtype, torch.device("cpu"))
    softmax = case.softmax(dtype, torch.device("cpu"))
    none, nothing = torch.zeros(case.num_heads), torch.full((case.num_heads,), -torch.inf)
    slopes = (none if softmax.slopes_H is None else softmax.slopes_H).double()
    sinks = (nothing if softmax.sinks_H is None else softmax.sinks_H).double()
    outputs, start = [], 0
    for row, (new, length) in enumerate(case.rows):
        table = batch.block_table_SC[batch.slots_R[row]].tolist()
        places = [(table[p // case.block_size], p % case.block_size) for p in range(length)]
        k, v = (torch.stack([cache[b, :, o] for b, o in places]).double() for cache in (k_cache, v_cache))  # [L, G, D]
        for i in range(new):
            position = length - new + i
            first = 0 if case.window is None else max(0, position - case.window + 1)
            last = position + int(case.ahead[start + i])
            heads = []
            for head in range(case.num_heads):
                g = head // (case.num_heads // case.num_kv_heads)
                scores = scale_of(case) * k[first : last + 1, g] @ q_THD[start + i, head].double()
                if case.softcap is not None:
                    scores = case.softcap * (scores / case.softcap).tanh()
                distances = position - torch.arange(first, last + 1)
                scores -= slopes[head] * distances
                if softmax.bias_HL is not None:
                    scores += softmax.bias_HL[head, distances.clamp(max=case.distances - 1)]
                weights = scores.exp() / (scores.exp().sum() + sinks[head].exp())
                heads.append(weights @ v[first : last + 1, g])
            outputs.append(torch.stack(heads))
        start += new
    return torch.stack(outputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_dense_attention(case: AttentionCase) -> None:
    arguments = case.inputs(torch.float32, torch.device("cpu"))
    out = PAGED_ATTENTION.reference(*arguments, **case.options(torch.float32, torch.device("cpu")))
    assert torch.allclose(out.double(), dense(case, torch.float32), atol=8 * EXACT, rtol=0)


@pytest.mark.few(32)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    by_pairs(
        IMPLEMENTATIONS, CASES, DTYPES, drawn=lambda name, case, dtype: name != "triton" or dtype != torch.bfloat16
    ),
    ids=str,
)
def test_implementations_equal_the_reference(name: str, case: AttentionCase, dtype: torch.dtype, device: str) -> None:
    skip_what_the_interpreter_gets_wrong(name, dtype, device)
    arguments = case.inputs(dtype, torch.device(device))
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), name)
    options = case.options(dtype, torch.device(device))
    out = attend(*arguments, **options)
    expected = PAGED_ATTENTION.reference(*arguments, **options)
    assert out.dtype == dtype
    worst = (out.double() - expected.double()).abs().max().item()
    assert worst <= tolerance(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("triton", case) for case in CASES),  # the others against the reference, below
        *(("sdpa", case) for case in (*CASES, *WIDE_CASES)),
        *(("reference", case) for case in (*CASES, *WIDE_CASES)),
    ],
    ids=str,
)
def test_cells_that_no_row_sees_change_no_bit(name: str, case: AttentionCase, device: str) -> None:
    """Places behind a row's last, before its window, in free blocks and in the null block: whatever lies there."""
    q_THD, *caches, batch = case.inputs(torch.float32, torch.device(device))
    batch, options = forgotten(case, batch), case.options(torch.float32, torch.device(device))
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), name)
    clean = attend(q_THD, *cleared(case, caches, batch), batch, **options)
    assert clean.isfinite().all()
    assert torch.equal(attend(q_THD, *spoiled(case, caches, batch), batch, **options), clean)


@pytest.mark.parametrize("window", [None, 200])
def test_rows_in_few_stretches_of_the_cache_are_read_where_they_are(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one query, in a step with others, with blocks in any order; what lies behind their last keys is nothing
    to them."""
    monkeypatch.setattr(torch_ops, "HELD_BYTES", 1)
    monkeypatch.setattr(torch_ops, "HELD_STRETCHES", 2)
    own, seen = torch_ops._flash, list[int]()
    monkeypatch.setattr(torch_ops, "_flash", lambda *given: (seen.append(len(given[0])), own(*given))[1])
    rows = (1, 100), (1, 16), (1, 35), (1, 9), (1, 300), (3, 70), (1, 120)
    case = replace(CASES[0], rows=rows, window=window)
    q_THD, *caches, batch = case.inputs(torch.float32, torch.device("cpu"))
    size, table_SC, softmax = case.block_size, batch.block_table_SC.clone(), Softmax(scale_of(case), window=window)
    k_cache, v_cache = (torch.cat((each, torch.randn(60, *each.shape[1:]))) for each in caches)
    blocks = {0: [*range(7)], 1: [8], 2: [38, 36, 9], 4: [*range(39, 48), *range(18, 9, -1), 19]}
    blocks[6] = [49, 50, 52, 53, 55, 56, 57, 58]  # three stretches, too many
    for row, own_C in blocks.items():
        table_SC[batch.slots_R[row], : len(own_C)] = case.num_blocks + torch.tensor(own_C, dtype=table_SC.dtype)
    batch = replace(batch, block_table_SC=table_SC)
    expected = PAGED_ATTENTION.reference(q_THD, k_cache, v_cache, batch, softmax)
    for row, own_C in blocks.items():
        for each in (k_cache, v_cache):
            if rest := rows[row][1] % size:
                each[case.num_blocks + own_C[-1], :, rest:] = torch.nan
    out = torch_ops.paged_attention(q_THD, k_cache, v_cache, batch, softmax)
    assert seen == ([6, 1, 1, 1, 1, 1] if window else [6, 1, 1, 1, 1, 1, 9, 9, 1])
    assert (out.double() - expected.double()).abs().max().item() <= tolerance(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "reference"])
@pytest.mark.parametrize("window", [None, 12])
def test_a_stopped_row_beside_others_stays_finite_and_disturbs_nobody(
    name: str, window: int | None, device: str
) -> None:
    """A stopped row has kv_len 1 on the device while the host's bound runs on."""
    case = AttentionCase(rows=((1, 90), (1, 64), (1, 77)), window=window)
    q_THD, k_cache, v_cache, batch = case.inputs(torch.float32, torch.device(device))
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), name)
    expected = attend(q_THD, k_cache, v_cache, batch, Softmax(scale_of(case), window=window))
    lengths = batch.kv_len_R.clone()
    lengths[1] = 1
    batch = replace(batch, kv_len_R=lengths)
    out = attend(q_THD, k_cache, v_cache, batch, Softmax(scale_of(case), window=window))
    assert out.isfinite().all()
    assert torch.allclose(out[[0, 2]], expected[[0, 2]], atol=8 * EXACT, rtol=0)
    own = batch.block_table_SC[batch.slots_R[1]].long()
    k_cache[own], v_cache[own] = torch.nan, torch.nan
    beside_nan = attend(q_THD, k_cache, v_cache, batch, Softmax(scale_of(case), window=window))
    assert torch.equal(beside_nan[[0, 2]], out[[0, 2]])


@pytest.mark.parametrize("window", [None, 100])
def test_short_rows_do_not_pay_for_a_long_one(window: int | None) -> None:
    """sdpa runs rows of equal lengths together: what it gathers is little more than what they see, in few passes."""
    lengths = [33] * 7 + [1024] + [40] * 8
    case = AttentionCase(rows=tuple((1, length) for length in lengths), head_dim=32, window=window)
    *arguments, batch = case.inputs(torch.float32, torch.device("cpu"))
    options = case.options(torch.float32, torch.device("cpu"))
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device("cpu")), "sdpa")
    worst = attend(*arguments, batch, **options) - PAGED_ATTENTION.reference(*arguments, batch, **options)
    assert worst.abs().max().item() <= 8 * EXACT
    (work,) = batch.derived.values()
    seen = sum(min(length, window or length) for length in lengths)
    assert sum(each.blocks_BC.numel() for each in work.passes) * case.block_size <= 1.5 * seen
    assert len(work.passes) <= 2


@pytest.mark.few(26)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if case in WIDE_CASES or n % 2 == DTYPES_IN_TURN.index(dtype) else THOROUGH)
        for n, case in enumerate((*CASES, *WIDE_CASES))
        for dtype in DTYPES_IN_TURN
    ],
    ids=str,
)
def test_triton_does_all_the_op_says_and_reads_nothing_unseen(
    case: AttentionCase, dtype: torch.dtype, device: str
) -> None:
    """Queries as a strided view with rows to spare, caches as halves of one buffer, NaN or inf around, no lengths."""
    skip_what_the_interpreter_gets_wrong("triton", dtype, device)
    q_THD, *caches, batch = case.inputs(dtype, torch.device(device))
    options = case.options(dtype, torch.device(device))
    expected = PAGED_ATTENTION.reference(q_THD, *caches, batch, **options)
    tokens = len(q_THD)
    spare = 0 if batch.tokens_each else 3
    wide_THD = torch.full((tokens + spare, case.num_heads + 2, case.head_dim), torch.nan, dtype=dtype, device=device)
    wide_THD[:tokens, 1:-1] = q_THD
    batch = replace(batch, kv_len_R=batch.kv_len_R.int(), num_tokens_R=None, kv_bound_R=None)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    out = attend(wide_THD[:, 1:-1], *spoiled(case, caches, batch), batch, **options)[:tokens]
    worst = (out.double() - expected.double()).abs().max().item()
    assert worst <= tolerance(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 300])
def test_layers_share_a_schedule(window: int | None, device: str) -> None:
    """Twice the same: a schedule is as good as new after a layer has used it."""
    case = AttentionCase(rows=((1, 900), (2, 700), (40, 300), (1, 1)), window=window)
    q_THD, k_cache, v_cache, batch = case.inputs(torch.float32, torch.device(device))
    shape = AttentionShape(
        num_tokens=len(q_THD),
        tokens_each=0,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        window=window,
    )
    schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    options = case.options(torch.float32, torch.device(device))
    expected = attend(q_THD, k_cache, v_cache, batch, **options)
    for _ in range(2):
        assert torch.equal(attend(q_THD, k_cache, v_cache, replace(batch, schedule=schedule), **options), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("rows", [((1, 3000), (1, 700), (1, 90), (1, 1)), ((1, 3000), (90, 700), (2, 90), (0, 1))])
def test_a_captured_graph_serves_other_lengths(rows: tuple[tuple[int, int], ...], window: int | None) -> None:
    """Captured with every row at its longest, replayed as the lengths (and, if rows differ, who has tokens) change."""
    case = AttentionCase(rows=rows, num_heads=8, head_dim=64, window=window)
    q_THD, k_cache, v_cache, batch = case.inputs(torch.bfloat16, torch.device("cuda"))
    batch = replace(batch, num_tokens_R=None, kv_bound_R=None)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device("cuda")), "triton")
    options = case.options(torch.bfloat16, torch.device("cuda"))
    attend(q_THD, k_cache, v_cache, batch, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THD = attend(q_THD, k_cache, v_cache, batch, **options)
    for shorter in (0, 1, 40, 80):
        batch.kv_len_R.copy_(torch.tensor([max(length - shorter, new, 1) for new, length in rows]))
        if len(q_THD) != len(rows):
            batch.start_R1.copy_(torch.tensor([0, 1, 90 - shorter, 90 - shorter, 90 - shorter]))
        out_THD.fill_(torch.nan)
        graph.replay()
        expected = PAGED_ATTENTION.reference(q_THD, k_cache, v_cache, batch, **options)
        tokens = int(batch.start_R1[-1])
        worst = (out_THD - expected)[:tokens].abs().max().item()
        assert worst <= tolerance(torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("each", "head_bytes", "few", "tiles"),
    [
        (1, 0, 1, 0),
        (4, 0, 4, 0),
        (5, 0, 5, 0),
        (16, 256, 16, 0),
        (17, 0, 4, 10),
        (8, 512, 8, 0),
        (9, 512, 4, 5),
        (0, 0, 4, 0),
    ],
)
def test_rows_that_bring_few_tokens_each_are_items_and_nothing_else(
    each: int, head_bytes: int, few: int, tiles: int, device: str
) -> None:
    """Heads in groups of four: four tokens of a row fill the smallest product, and sixteen the largest of an item."""
    counts = torch.full((5,), each or 1)  # 0: a mixed step of as many tokens as rows, which is no decode step
    start, lengths = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))), counts + 90
    shape = AttentionShape(
        num_tokens=int(start[-1]), tokens_each=each, num_heads=8, num_kv_heads=2, head_bytes=head_bytes
    )
    schedule = make_schedule(start.to(device), lengths.to(device), torch.arange(5, device=device), shape)
    assert schedule.few == few
    assert schedule.counts_2.tolist() == [0 if tiles else 5, tiles]
    assert bool(len(schedule.tiles_J4)) == (tiles > 0 or not each)


def verifying(tokens: int, group: int, **options) -> AttentionCase:
    """Rows that verify drafts: of few keys and of several items, the shortest with none but its own."""
    lengths = (tokens, 300, tokens + 63, 700)
    return AttentionCase(
        rows=tuple((tokens, length) for length in lengths), num_heads=2 * group, head_dim=32, **options
    )


COUNTS, GROUPS = (5, 6, 9, 17), (1, 2, 4, 8)  # of tokens, and of the heads that share a key
VERIFYING = (
    *(verifying(tokens, group) for i, tokens in enumerate(COUNTS) for group in GROUPS[i % 2 :: 2]),
    verifying(6, 4, window=40),
    verifying(6, 3, window=290, sinks=True),
    verifying(17, 1, sinks=True),
    verifying(5, 8, window=100, sinks=True, softcap=5.0),
    verifying(9, 2, alibi=True),
    verifying(9, 6, window=3, block_size=4),
    AttentionCase(rows=((6, 400), (6, 70)), num_heads=4, num_kv_heads=1, head_dim=256, block_size=64),
)
MORE = [
    pytest.param(verifying(tokens, group), marks=THOROUGH)
    for i, tokens in enumerate(COUNTS)
    for group in GROUPS[1 - i % 2 :: 2]
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("case", [*VERIFYING, *MORE], ids=str)
def test_rows_that_verify_drafts_are_cut_by_their_keys(case: AttentionCase, dtype: torch.dtype, device: str) -> None:
    q_THD, *caches, batch = case.inputs(dtype, torch.device(device))
    options = case.options(dtype, torch.device(device))
    group, tokens = case.num_heads // case.num_kv_heads, batch.tokens_each
    expected = PAGED_ATTENTION.reference(q_THD, *caches, batch, **options)
    of_layers = AttentionShape(
        num_tokens=len(q_THD),
        tokens_each=tokens,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        window=case.window,
        head_bytes=case.head_dim * dtype.itemsize,
    )
    schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, of_layers)
    assert schedule.few == (tokens if tokens * group <= 64 else 16 // group)
    captured = replace(batch, schedule=schedule, num_tokens_R=None, kv_bound_R=None)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    for _ in range(2):  # a schedule is as good as new after a layer has used it
        out = attend(q_THD, *spoiled(case, caches, batch), captured, **options)
        worst = (out.double() - expected.double()).abs().max().item()
        assert worst <= tolerance(dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_verify_drafts_are_rounded_where_there_is_room(device: str) -> None:
    """A row in several parts, whose queries are added up together, and one in one part."""
    case, dtype = AttentionCase(rows=((6, 700), (6, 90)), num_heads=6, head_dim=128, block_size=64), torch.float16
    *arguments, batch = case.inputs(dtype, torch.device(device))
    expected = PAGED_ATTENTION.reference(*arguments, batch, Softmax(scale_of(case))).flatten(1).float()
    given = buffer(*expected.shape, dtype, torch.device(device))
    given.scale.fill_(torch.nan)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    out = attend(*arguments, batch, Softmax(scale_of(case)), buffer=given)
    assert out.data_ptr() == given.q_TI.data_ptr()
    largest_CT = expected.unflatten(1, (-1, 128)).abs().amax(-1).T
    torch.testing.assert_close(given.scale, largest_CT / 448, rtol=0.02, atol=1e-6)
    step_TI = expected.abs() / 16 + (given.scale.T * 2.0**-10).repeat_interleave(128, 1)
    assert ((given.wide() - expected).abs() <= 1.01 * step_TI + 16 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 12])
def test_a_stopped_row_that_verifies_drafts_stays_finite_and_disturbs_nobody(window: int | None, device: str) -> None:
    """It has more tokens than keys: kv_len is 1."""
    case = AttentionCase(rows=((6, 90), (6, 640), (6, 500)), window=window, num_heads=8)
    q_THD, *caches, batch = case.inputs(torch.float32, torch.device(device))
    options = case.options(torch.float32, torch.device(device))
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    expected = attend(q_THD, *caches, batch, **options)
    lengths = batch.kv_len_R.clone()
    lengths[1] = 1
    out = attend(q_THD, *caches, replace(batch, kv_len_R=lengths, num_tokens_R=None, kv_bound_R=None), **options)
    assert out.isfinite().all()
    others = torch.tensor([*range(6), *range(12, 18)], device=device)
    assert torch.allclose(out[others], expected[others], atol=8 * EXACT, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_items_and_tiles_cover_every_row_once(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([1, 0, 300, 3, 1, 64, 0, 4, 5, 1])
    lengths = counts + torch.randint(0, 3000, counts.shape, generator=generator)
    start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    slots = torch.randperm(len(counts), generator=generator)
    of_layers = AttentionShape(num_tokens=int(start[-1]) + 7, tokens_each=0, num_heads=8, num_kv_heads=2)
    schedule = make_schedule(start.to(device), lengths.to(device), slots.to(device), of_layers)
    num_items, num_tiles = schedule.counts_2.tolist()
    items, tiles = schedule.items_I8[:num_items].tolist(), schedule.tiles_J4[:num_tiles].tolist()
    for row, slot in enumerate(slots.tolist()):
        first, count, length = int(start[row]), int(counts[row]), int(lengths[row])
        own = [(index, item) for index, item in enumerate(items) if item[0] == slot]
        keys = [key for _, item in own for key in range(item[4], item[5])]
        assert keys == (list(range(length)) if 0 < count <= schedule.few else [])
        assert all(item[1:4] == [first, count, length] and item[6:] == [own[0][0], len(own)] for _, item in own)
        tokens = sorted(t + i for s, t, n, _ in tiles if s == slot for i in range(n))
        assert tokens == (list(range(first, first + count)) if count > schedule.few else [])
        assert all(position - token == length - count - first for s, token, _, position in tiles if s == slot)


class Noted:
    """A kernel that is not run: launches' options are noted."""

    def __init__(self) -> None:
        self.options = list[dict[str, Any]]()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **options: self.options.append(options)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "capability", "warps"),
    [
        *((dim, torch.bfloat16, (9, 0), 4) for dim in (16, 48, 64, 128)),
        *((dim, torch.bfloat16, (9, 0), 2) for dim in (20, 36, 40, 72, 120)),
        (40, torch.float32, (9, 0), 4),
        (40, torch.bfloat16, (8, 0), 4),
    ],
    ids=str,
)
def test_keys_at_odd_places_are_multiplied_without_descriptors(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ptxas 12.8 loses the descriptor of a warpgroup's second product if the keys are not copied ahead: an illegal
    access, with heads of 40. Fewer warps than a warpgroup have no descriptors."""
    pytest.importorskip("triton")
    from ridgeline.kernels.attention.paged import schedule, triton

    noted = Noted()
    monkeypatch.setattr(schedule, "_schedule_kernel", Noted())
    monkeypatch.setattr(triton, "decode_kernel", noted)
    monkeypatch.setattr(triton, "compute_capability", lambda device: capability)
    case = AttentionCase(rows=((1, 17), (1, 5)), head_dim=head_dim)
    q_THD, k, v, batch = case.inputs(dtype, torch.device("cpu"))
    triton.paged_attention(q_THD, k, v, batch, **case.options(dtype, torch.device("cpu")))
    assert [options["num_warps"] for options in noted.options] == [warps]
