"""Prefill attention whose keys are cut into pieces: the list of work, the sums of pieces, and on a GPU the results."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.cost import pieces_bytes
from ridgeline.kernels.attention.paged.op import (
    AttentionShape,
    PrefillItems,
    RaggedBatch,
    Softmax,
    paged_attention_reference,
)
from ridgeline.kernels.base.op import Platform
from tests.kernels.unseen import forgotten, spoiled

pytest.importorskip("triton")
from ridgeline.kernels.attention.paged import hopper, hopper_pieces, schedule
from ridgeline.kernels.attention.paged.schedule import fixed_schedule, make_schedule
from ridgeline.kernels.attention.paged.triton import paged_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
H200 = 132  # multiprocessors
DECODING = ((1, 1000),) * 32


@pytest.fixture(autouse=True)
def _multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(hopper_pieces, "num_multiprocessors", lambda device: H200)


def listed(
    rows: tuple[tuple[int, int], ...], *, units: int = 8, pack: int = 4, deep: int = 0, key_tile: int = 128
) -> tuple[PrefillItems, list[list[int]], list[list[int]], torch.Tensor]:
    """Return the work of rows in slots 7, 8, …: all, its entries, its merges, and the schedule's counts."""
    new_R, length_R = torch.tensor(rows, dtype=torch.int32).unbind(1)
    start_R1 = torch.cat((torch.zeros(1, dtype=torch.int32), new_R.cumsum(0).to(torch.int32)))
    counts_2 = torch.tensor([3, 4], dtype=torch.int32)
    items = hopper_pieces.prefill_pieces(
        start_R1, length_R.contiguous(), torch.arange(7, 7 + len(rows), dtype=torch.int32), counts_2, int(new_R.sum()),
        kv_row_bytes=4096, few=4, pack=pack, units=units, key_tile=key_tile, deep=deep,
    )  # fmt: skip
    assert items.merges_I4 is not None
    assert items.merge_count_1 is not None
    count, merges = int(items.count_1), int(items.merge_count_1)
    assert count <= items.limit
    assert merges <= len(items.merges_I4)
    return items, items.table_I4[:count].tolist(), items.merges_I4[:merges].tolist(), counts_2


LOADS = {
    "few": ((196, 100_000), *DECODING),
    "alone": ((64, 32_768),),
    "a wave and a little": ((515, 100_000), *DECODING),
    "waves": ((1024, 30_000), *DECODING),
    "short": ((300, 700), (17, 17), (2, 9), (129, 1290)),
    "whole prompts": ((700, 700), (1200, 1200)),
    "mixed": ((512, 512), (512, 9000), (300, 50_000), (700, 100_000), *DECODING),
    "a long one beside many": ((33, 90_000), *((40, 3000),) * 30),
    "many": ((16, 5000),) * 40,
}


@pytest.mark.parametrize(("units", "pack", "key_tile"), [(8, 4, 128), (32, 1, 64), (4, 8, 128)])
@pytest.mark.parametrize("name", LOADS)
def test_every_tile_of_keys_is_in_one_piece_and_no_program_ends_late(
    name: str, units: int, pack: int, key_tile: int
) -> None:
    rows = LOADS[name]
    items, entries, merges, _ = listed(rows, units=units, pack=pack, key_tile=key_tile)
    size, expected, found, parts = 128 // pack, {}, dict[tuple[int, ...], list[tuple[int, ...]]](), set[int]()
    start = 0
    for row, (new, length) in enumerate(rows):
        for first in range(0, new if new > 4 else 0, size):
            tokens, position = min(size, new - first), length - new + first
            expected[7 + row, start + first, tokens, position] = -(-(position + tokens) // key_tile)
        start += new
    for slot, token, tokens, position, begin, end, code, _ in entries:
        found.setdefault((slot, token, tokens, position), []).append((begin, end, code))
    assert found.keys() == expected.keys()
    sums = {(token, tokens): (first, number) for token, tokens, first, number in merges}
    for item, pieces in found.items():
        tiles = [tile for begin, end, _ in pieces for tile in range(begin, end)]
        assert tiles == list(range(expected[item])), "from the oldest to the newest, each once"
        if len(pieces) == 1:
            assert pieces[0][2] == 1
            assert item[1:3] not in sums
            continue
        assert min(end - begin for begin, end, _ in pieces) >= 3, "each query sees a key of every piece"
        first, number = sums.pop(item[1:3])
        codes = [(code // 64**2 + code // 64 % 64, code % 64) for *_, code in pieces]
        assert codes == [(first + piece, number) for piece in range(len(pieces))]
        assert number == len(pieces)
        assert not parts & {part for part, _ in codes}
        parts |= {part for part, _ in codes}
    assert not sums
    assert all(0 <= part < items.parts for part in parts)
    assert items.parts * units <= hopper_pieces.PIECES_EACH * H200 or torch.cuda.is_available()
    if not torch.cuda.is_available():
        ends, whole = makespan(entries, units), makespan([[0] * 4 + [0, t, 1, 0] for t in expected.values()], units)
        assert ends <= 1.05 * whole + 4, "never much longer than without pieces"
        least = sum(expected.values()) * units / H200
        if units == 8 and "short" not in name and name not in ("whole prompts", "many"):
            assert ends <= 1.25 * least + 4


def makespan(entries: list[list[int]], units: int) -> int:
    """Return when the last program ends, in tiles, if each draws the next entry as soon as it is ready."""
    ready = [0] * H200
    for entry in entries:
        for _ in range(units):
            heapq.heapreplace(ready, ready[0] + entry[5] - entry[4])
    return max(ready)


def test_the_device_chooses_one_of_two_kernels_for_small_steps() -> None:
    """Exactly one has work: tiles of the schedule, or items of these."""
    for deep, length, runs in ((4096, 8000, True), (4096, 3000, False), (0, 3000, True)):
        _, entries, merges, counts_2 = listed(((128, length), *DECODING), deep=deep)
        assert bool(entries) == runs
        assert runs or not merges
        assert counts_2.tolist() == [3, 0 if deep and runs else 4]


def test_items_that_see_no_key_have_a_tile_all_the_same() -> None:
    """A row may have fewer keys than queries (`partial_attention`). The kernel would wait for a tile that never
    comes."""
    _, entries, _, _ = listed(((300, 200), (40, 1), (129, 129)))
    assert len(entries) == 10 + 2 + 5
    assert all(
        begin == 0 and end == max(1, -(-(first + tokens) // 128)) for _, _, tokens, first, begin, end, *_ in entries
    )


@pytest.mark.parametrize("length", [1900, 1920, 1921, 2000, 2048, 2100])
def test_the_host_knows_when_nothing_can_be_cut(length: int) -> None:
    _, _, merges, _ = listed(((64, length), *DECODING))
    assert bool(merges) == hopper_pieces.may_be_cut(length, 128) == (length > 15 * 128)
    assert hopper_pieces.may_be_cut(None, 128)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sums", [False, True])
def test_pieces_add_up_to_the_attention_to_all_keys(device: str, sums: bool) -> None:
    """Pieces as the kernel leaves them, computed in plain torch."""
    rows = ((40, 5000), (1, 100), (9, 6100))
    heads, dim, pack, units = 4, 64, 2, 2
    case = AttentionCase(rows=rows, num_heads=heads, num_kv_heads=2, head_dim=dim, block_size=16)
    q_THD, k, v, batch = case.inputs(torch.float32, torch.device("cpu"))
    expected = paged_attention_reference(q_THD, k, v, batch, Softmax(0.1))
    items = hopper_pieces.prefill_pieces(
        batch.start_R1.to(device), batch.kv_len_R.to(device), batch.slots_R.to(device),
        torch.zeros(2, dtype=torch.int32, device=device), len(q_THD), kv_row_bytes=1024, few=4, pack=pack, units=units,
        key_tile=128,
    )  # fmt: skip
    parts, part_lse = hopper_pieces.parts_of(items, heads, dim, torch.device("cpu"))
    assert parts.nbytes + part_lse.nbytes <= pieces_bytes(dim)
    parts.fill_(torch.nan)
    part_lse.fill_(torch.nan)
    parts, part_lse = parts.view(-1, units, 128, dim), part_lse.view(-1, units, 128)
    out, lse = torch.full_like(q_THD, torch.nan), torch.full(q_THD.shape[:2], torch.nan)
    cut = set[int]()
    for slot, token, tokens, position, begin, end, code, _ in items.table_I4[: int(items.count_1)].tolist():
        if (pieces := code % 64) == 1:
            continue
        assert pieces > 1
        row = batch.slots_R.tolist().index(slot)
        kv_len = min(end * 128, int(batch.kv_len_R[row]))
        keys = torch.arange(begin * 128, kv_len)
        at = batch.block_table_SC[slot].long()[keys // 16]
        k_KGD, v_KGD = k[at, :, keys % 16], v[at, :, keys % 16]
        sees_QK = keys <= position + torch.arange(tokens)[:, None]
        for head in range(heads):
            x_QK = 0.1 * q_THD[token : token + tokens, head] @ k_KGD[:, head // pack].T
            x_QK = x_QK.masked_fill(~sees_QK, -torch.inf)
            part = parts[code // 64**2 + code // 64 % 64, head // pack].view(-1, pack, dim)[:tokens, head % pack]
            part.copy_(x_QK.softmax(-1) @ v_KGD[:, head // pack])
            logs = part_lse[code // 64**2 + code // 64 % 64, head // pack].view(-1, pack)[:tokens, head % pack]
            logs.copy_(x_QK.logsumexp(-1) * hopper.LOG2E)
        cut |= set(range(token, token + tokens))
    assert {*range(40)} <= cut
    moved = (parts.view(-1, dim).to(device), part_lse.flatten().to(device))
    out, lse = out.to(device), lse.to(device)
    hopper_pieces.add_pieces(items, moved, out, lse if sums else None)
    tokens = sorted(cut)
    assert (out.cpu()[tokens] - expected[tokens]).abs().max() <= 1e-5
    others = [token for token in range(len(q_THD)) if token not in cut]
    assert out.cpu()[others].isnan().all()
    assert lse.cpu()[others].isnan().all()
    if sums:
        from ridgeline.kernels.attention.paged.partial import partial_attention

        _, expected_lse = partial_attention(q_THD, k, v, batch, Softmax(0.1))
        assert (lse.cpu()[tokens] - expected_lse[tokens]).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("given", "pieces", "certain", "tiles"),  # tiles: of the other kernel
    [
        ({}, True, True, False),
        ({"num_tokens": 256}, True, True, False),
        ({"num_tokens": 255}, True, False, True),
        ({"num_tokens": 64}, True, False, True),
        ({"num_tokens": 255, "num_heads": 512, "multiprocessors": 16}, True, False, True),
        ({"num_tokens": 63}, None, None, True),
        ({"num_tokens": 255, "window": 500}, None, None, True),
        ({"num_tokens": 255, "widened": True}, None, None, True),
        ({"num_tokens": 255, "most_keys": 4095}, None, None, True),
        ({"num_tokens": 255, "most_keys": 4096}, True, False, True),
        ({"most_keys": 1920}, False, True, False),
        ({"most_keys": 1921}, True, True, False),
        ({"window": 500}, False, True, False),
        ({"widened": True}, True, True, True),
        ({"num_tokens": 2048}, True, True, False),
        ({"num_tokens": 2049}, False, True, False),
        ({"num_tokens": 2048, "num_heads": 128}, False, True, False),
        ({"trees": True}, None, None, True),
        ({"fixed": True}, None, None, True),
    ],
    ids=str,
)
def test_which_steps_may_have_pieces(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], pieces: bool | None, certain: bool | None, tiles: bool
) -> None:
    """None: the kernel for Hopper takes no part."""
    monkeypatch.setattr(schedule, "_hopper_can", lambda cache: True)
    monkeypatch.setattr(schedule, "num_multiprocessors", lambda device: given.get("multiprocessors", H200))
    cache = torch.empty(1, 8, 64, 128, dtype=torch.bfloat16)
    own = {name: value for name, value in given.items() if name != "multiprocessors"}
    usual = {"num_tokens": 515, "tokens_each": 0, "num_heads": 32, "num_kv_heads": 8, "cache_NGPD": cache}
    shape = AttentionShape(**{**usual, **own})
    new_R, length_R = torch.tensor([shape.num_tokens - 1, 1]), torch.tensor([9000, 50])
    start_R1 = torch.cat((torch.zeros(1, dtype=torch.int64), new_R.cumsum(0)))
    made = make_schedule(start_R1, length_R, torch.arange(2), shape)
    assert bool(len(made.tiles_J4)) == tiles
    if pieces is None:
        assert made.hopper is None
    else:
        assert made.hopper is not None
        assert (made.hopper.merges_I4 is not None) == pieces
        assert made.hopper.certain == certain


def test_schedules_whose_results_must_not_depend_on_the_batch_have_no_pieces() -> None:
    """Nor any work for this kernel. What makes the others is told apart by the GPU alone."""
    rows = ((196, 100_000), *DECODING)
    new_R, length_R = torch.tensor(rows, dtype=torch.int32).unbind(1)
    start_R1 = torch.cat((torch.zeros(1, dtype=torch.int32), new_R.cumsum(0).to(torch.int32)))
    cache = torch.empty(1, 8, 64, 128, dtype=torch.bfloat16)
    shape = AttentionShape(num_tokens=228, tokens_each=0, num_heads=32, num_kv_heads=8, cache_NGPD=cache)
    made = fixed_schedule(start_R1, length_R.contiguous(), torch.arange(33, dtype=torch.int32), shape)
    assert made.fixed
    assert made.hopper is None


GPU_CASES = (
    AttentionCase(rows=((196, 20_000), *((1, 300),) * 8), num_heads=32, num_kv_heads=8, head_dim=128, block_size=64),
    AttentionCase(rows=((100, 9_999), (3, 50)), num_heads=8, num_kv_heads=2, head_dim=128, block_size=16),
    AttentionCase(rows=((515, 12_345), (40, 90)), num_heads=32, num_kv_heads=8, head_dim=128, block_size=64),
    AttentionCase(rows=((300, 8_192), (1, 9)), num_heads=8, num_kv_heads=1, head_dim=64, block_size=32, sinks=True),
    AttentionCase(rows=((260, 6_000), (70, 20_000)), num_heads=4, num_kv_heads=2, head_dim=256, block_size=64),
    AttentionCase(rows=((128, 3_000), (1, 9)), num_heads=8, num_kv_heads=2, head_dim=128, block_size=64),
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype", "sums"),
    [*((case, torch.bfloat16, False) for case in GPU_CASES), (GPU_CASES[1], torch.float16, True)],
    ids=str,
)
def test_pieces_equal_the_reference_and_give_the_same_bits_each_time(
    case: AttentionCase, dtype: torch.dtype, sums: bool
) -> None:
    """With NaN and inf in every cell that no row sees."""
    device = torch.device("cuda")
    if not hopper.supports(Platform.of(device).arch, dtype, case.head_dim, case.block_size):
        pytest.skip("not a Hopper GPU")
    q_THD, k, v, batch = case.inputs(dtype, device)
    batch = forgotten(case, batch)
    k, v = spoiled(case, [k, v], batch)
    options = case.options(dtype, device)
    expected = paged_attention_reference(q_THD, k, v, batch, **options)
    shape = AttentionShape(
        num_tokens=len(q_THD), tokens_each=0, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, cache_NGPD=k
    )

    def attend(rows: RaggedBatch) -> torch.Tensor:
        made = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
        assert made.hopper is not None
        assert made.hopper.merge_count_1 is not None
        assert (int(made.hopper.merge_count_1) > 0) == (max(length for _, length in case.rows) > 4096)
        lse_TH = torch.full(q_THD.shape[:2], torch.nan, device=device) if sums else None
        out = paged_attention(q_THD, k, v, replace(rows, schedule=made), lse_TH=lse_TH, **options)
        assert lse_TH is None or lse_TH.isfinite().all()
        return out

    first = attend(batch)
    assert (first.double() - expected.double()).abs().max() <= 8 * torch.finfo(dtype).eps
    captured = replace(batch, num_tokens_R=None, kv_bound_R=None, tokens_each=0)
    for _ in range(3):
        assert torch.equal(attend(captured), first)
