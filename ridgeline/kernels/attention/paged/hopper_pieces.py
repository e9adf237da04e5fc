"""The work list of a step's few long items for hopper.py, whose keys are cut into pieces, and the sum of these pieces.

A prompt's 200 tokens behind 100,000 keys are 7 items of 32 tokens and 4 heads, for each of 8 key heads: 56 programs on
132 multiprocessors, each of which reads all keys. So the keys of items that would end last are cut into pieces, as
those of decoding rows are. Items that fill the device whole, and those that end early anyway, keep all of their keys.

The device decides, since only it knows the lengths in a captured graph. It compares up to `CHOICES` lengths of pieces
by the time that the last program ends, in key tiles. All items of a row are cut alike and follow each other, piece by
piece, so programs that run at a time read the same keys.

Legend, beside that of op.py:
    R  rows
    I  work items
    C  choices
    E  queries of a program
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.cost import PIECE_QUERIES as QUERIES
from ridgeline.kernels.attention.paged.cost import PIECES_EACH
from ridgeline.kernels.attention.paged.hopper_items import CACHED_BYTES, items_before
from ridgeline.kernels.attention.paged.op import PrefillItems
from ridgeline.kernels.attention.paged.triton_common import LOG2E, LOWEST
from ridgeline.kernels.attention.paged.triton_decode import add_parts
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors

CHOICES = 16  # the most pieces of the longest item that are tried
LEAST_TILES = 8  # key tiles of a piece, at least
# What a piece costs beside its tiles, in fortieths of one, which takes 1.9 us with heads of 128: start and end in each
# wave, the launch that adds up, and bytes of each piece that are written and read.
PER_WAVE, PER_SUM, PER_PIECE = 80, 80, 1
TOGETHER, AT_ONCE = 16, 4  # queries of a program that adds up, and the pieces that it reads at a time
CODE = 64  # more than the pieces of an item


def prefill_pieces(
    start_R1: Tensor, kv_len_R: Tensor, slots_R: Tensor, counts_2: Tensor, num_tokens: int, *, kv_row_bytes: int,
    few: int, pack: int, units: int, key_tile: int, deep: int = 0,
) -> PrefillItems:  # fmt: skip
    """Make work items of the rows with more than `few` tokens, and cut the keys of the last ones.

    counts_2: those of the schedule. With `deep`, either its tiles run or these items: these where a row has so many
        keys. The other's count becomes 0.
    num_tokens, kv_row_bytes: as in `hopper_items.prefill_items`.
    pack, units: heads of an item, and how many times so many there are.
    key_tile: keys of a tile.
    """
    num_rows, device = len(slots_R), slots_R.device
    programs = num_multiprocessors(device)
    most = PIECES_EACH * programs // units
    whole = num_tokens // (QUERIES // pack) + num_rows
    limit = whole + most
    table_I8 = torch.empty(limit, 8, dtype=torch.int32, device=device)
    merges_I4 = torch.empty(max(1, most // 2), 4, dtype=torch.int32, device=device)
    count_1, ticket_1, merge_count_1 = torch.empty(3, 1, dtype=torch.int32, device=device)
    at_once, rows = 16, 16  # 16, 64, 256, …: few sizes, since each is one more compilation
    while rows < num_rows:
        rows *= 4
    _pieces_kernel[(triton.cdiv(whole, at_once),)](
        start_R1, kv_len_R, slots_R, counts_2, table_I8, merges_I4, count_1, ticket_1, merge_count_1, num_rows,
        max(1, CACHED_BYTES // kv_row_bytes), few, programs, most, deep,
        ROWS=rows, ITEMS=at_once, QUERIES=QUERIES // pack, KEYS=key_tile, UNITS=units,
        LEAST=LEAST_TILES, CHOICES=CHOICES, PER_WAVE=PER_WAVE, PER_SUM=PER_SUM, PER_PIECE=PER_PIECE, CODE=CODE,
    )  # fmt: skip
    return PrefillItems(
        table_I4=table_I8, count_1=count_1, ticket_1=ticket_1, limit=limit, queries=QUERIES, pack=pack,
        merges_I4=merges_I4, merge_count_1=merge_count_1, parts=most, certain=not deep,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "section_tokens", "few", "programs", "most", "deep"])
def _pieces_kernel(
    start_ptr, kv_len_ptr, slots_ptr, counts_ptr, table_ptr, merges_ptr, count_ptr, ticket_ptr, merge_count_ptr,
    num_rows, section_tokens, few, programs, most, deep,
    ROWS: tl.constexpr, ITEMS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, UNITS: tl.constexpr,
    LEAST: tl.constexpr, CHOICES: tl.constexpr, PER_WAVE: tl.constexpr, PER_SUM: tl.constexpr,
    PER_PIECE: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Place the pieces of a few items in each program; each decides for itself how long pieces are.

    An entry is (slot, first token, tokens, position of the first, first key tile, end tile, code). The code is
    (first part · CODE + number of the piece) · CODE + pieces. First come whole items of rows with many keys, then
    pieces of the others of these rows, then all other items. A merge is (first token, tokens, first part, pieces).
    """
    row_R = tl.arange(0, ROWS)
    real_R = row_R < num_rows
    start_R = tl.load(start_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    new_R = tl.load(start_ptr + row_R + 1, mask=real_R, other=0).to(tl.int32) - start_R
    length_R = tl.load(kv_len_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    slot_R = tl.load(slots_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    items_R = tl.where(real_R & (new_R > few), tl.cdiv(new_R, QUERIES), 0)
    base_R = length_R - new_R
    tiles_R = tl.where(items_R > 0, tl.cdiv(length_R, KEYS), 0)
    work = tl.sum(items_R.to(tl.int64) * (tl.where(items_R > 0, base_R + new_R // 2, 0) // KEYS + 1)) * UNITS
    share = work // programs  # tiles of a program
    longest = tl.maximum(tl.max(tiles_R, 0), 1)

    # Rows whose items are long beside that share, and nearly equally long
    long_R = (tiles_R >= 2 * LEAST) & (2 * tiles_R > share) & (4 * base_R > 3 * length_R)
    long_items_R = tl.where(long_R, items_R, 0)
    waves = tl.minimum(tl.sum(long_items_R) * UNITS // programs, share // longest)
    whole = (waves * programs // UNITS).to(tl.int32)
    whole_R = tl.minimum(tl.maximum(whole - (tl.cumsum(long_items_R, 0) - long_items_R), 0), long_items_R)
    left_R = long_items_R - whole_R

    choice_C = tl.arange(0, CHOICES) + 1
    size_C = tl.cdiv(longest, choice_C)
    pieces_RC = tl.cdiv(tiles_R[:, None], size_C[None, :])
    number_C = tl.sum(left_R[:, None] * pieces_RC, 0)
    cut_C = tl.sum(tl.where(pieces_RC > 1, left_R[:, None] * pieces_RC, 0), 0)
    waves_C = tl.cdiv(number_C * UNITS, programs).to(tl.int64)
    cost_C = tl.maximum(40 * waves_C * size_C, 40 * (share - waves * longest))
    cost_C += tl.where(cut_C > 0, waves_C * PER_WAVE + cut_C * (UNITS * PER_PIECE) + PER_SUM, 0)
    allowed_C = (choice_C == 1) | ((cut_C <= most) & (size_C >= LEAST))
    best = tl.min(tl.where(allowed_C, cost_C * (2 * CHOICES) + choice_C, 1 << 60), 0)
    size = tl.cdiv(longest, (best % (2 * CHOICES)).to(tl.int32))
    pieces_R = tl.where(left_R > 0, tl.cdiv(tiles_R, size), 1)
    cut_R = tl.where(pieces_R > 1, left_R, 0)
    parts_R = cut_R * pieces_R
    entries_R = items_R + parts_R - cut_R
    others_R = items_R - long_items_R
    chosen = longest * KEYS >= deep
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.where(chosen, tl.sum(entries_R), 0))
        tl.store(merge_count_ptr, tl.where(chosen, tl.sum(cut_R), 0))
        tl.store(ticket_ptr, 0)
        if chosen & (deep > 0):
            tl.store(counts_ptr + 1, 0)

    item_I = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    upto_R = tl.cumsum(items_R, 0)
    row_I = tl.sum((upto_R[None, :] <= item_I[:, None]).to(tl.int32), 1)
    mine_IR = row_I[:, None] == row_R[None, :]
    lower_IR = row_R[None, :] < row_I[:, None]
    tile_I = item_I - tl.sum(tl.where(mine_IR, (upto_R - items_R)[None, :], 0), 1)
    filled_I = item_I < tl.sum(items_R)
    slot_I = tl.sum(tl.where(mine_IR, slot_R[None, :], 0), 1)
    first_I = tl.sum(tl.where(mine_IR, start_R[None, :], 0), 1) + tile_I * QUERIES
    tokens_I = tl.minimum(tl.sum(tl.where(mine_IR, new_R[None, :], 0), 1) - tile_I * QUERIES, QUERIES)
    position_I = tl.sum(tl.where(mine_IR, base_R[None, :], 0), 1) + tile_I * QUERIES
    own_tiles_I = tl.maximum(tl.cdiv(position_I + tokens_I, KEYS), 1)  # one, all masked, where a row has too few keys
    long_I = tl.sum(tl.where(mine_IR, long_R[None, :].to(tl.int32), 0), 1) > 0
    left_I = tl.sum(tl.where(mine_IR, left_R[None, :], 0), 1)
    pieces_I = tl.where(tile_I < left_I, tl.sum(tl.where(mine_IR, pieces_R[None, :], 0), 1), 1)

    # Places: the newest items of a row are its whole ones
    whole_before_I = tl.sum(tl.where(lower_IR, whole_R[None, :], 0), 1)
    items_I = tl.sum(tl.where(mine_IR, items_R[None, :], 0), 1)
    rank_I = left_I - 1 - tile_I  # among the row's items that are not whole
    all_whole, all_left = tl.sum(whole_R), tl.sum(left_R * pieces_R)
    others_I = items_before(row_R, others_R, length_R, base_R, section_tokens, row_I, position_I, mine_IR, QUERIES)
    part_I = tl.sum(tl.where(lower_IR, parts_R[None, :], 0), 1) + rank_I * pieces_I
    sum_I = tl.sum(tl.where(lower_IR, cut_R[None, :], 0), 1) + rank_I
    for piece in range(tl.max(tl.where(filled_I, pieces_I, 0), 0)):
        earlier_R = left_R * tl.minimum(pieces_R, piece)
        beside_IR = lower_IR & (pieces_R > piece)[None, :]
        cut_place_I = all_whole + tl.sum(earlier_R) + tl.sum(tl.where(beside_IR, left_R[None, :], 0), 1) + rank_I
        place_I = tl.where(
            long_I,
            tl.where(tile_I < left_I, cut_place_I, whole_before_I + items_I - 1 - tile_I),
            all_whole + all_left + others_I,
        )
        at_I = table_ptr + 8 * place_I
        there_I = filled_I & (piece < pieces_I)
        tl.store(at_I, slot_I, mask=there_I)
        tl.store(at_I + 1, first_I, mask=there_I)
        tl.store(at_I + 2, tokens_I, mask=there_I)
        tl.store(at_I + 3, position_I, mask=there_I)
        tl.store(at_I + 4, piece * own_tiles_I // pieces_I, mask=there_I)
        tl.store(at_I + 5, (piece + 1) * own_tiles_I // pieces_I, mask=there_I)
        code_I = tl.where(pieces_I > 1, (part_I * CODE + piece) * CODE + pieces_I, 1)
        tl.store(at_I + 6, code_I, mask=there_I)
    merged_I = filled_I & (pieces_I > 1)
    at_I = merges_ptr + 4 * sum_I
    tl.store(at_I, first_I, mask=merged_I)
    tl.store(at_I + 1, tokens_I, mask=merged_I)
    tl.store(at_I + 2, part_I, mask=merged_I)
    tl.store(at_I + 3, pieces_I, mask=merged_I)


def may_be_cut(longest: int | None, key_tile: int) -> bool:
    """Return False if no row of a step can be cut. longest: a bound on the rows' keys; None: not known."""
    return longest is None or -(-longest // key_tile) >= 2 * LEAST_TILES


def parts_of(items: PrefillItems, num_heads: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for the pieces' outputs, and for the logarithms to base 2 of their sums."""
    rows = items.parts * (num_heads // items.pack) * items.queries
    parts = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
    return parts, torch.empty(rows, dtype=torch.float32, device=device)


def add_pieces(items: PrefillItems, parts: tuple[Tensor, Tensor], out_THD: Tensor, lse_TH: Tensor | None) -> None:
    """Write the sums of pieces to the outputs, from the oldest keys to the newest, so that bits are always the same.

    lse_TH: where the natural logarithms of the softmax's sums are written, if they are wanted.
    """
    assert items.merges_I4 is not None
    _, num_heads, head_dim = out_THD.shape
    units, device = num_heads // items.pack, out_THD.device
    most = len(items.merges_I4) * units * (items.queries // TOGETHER)
    _add_kernel[(min(most, 4 * num_multiprocessors(device)),)](
        *parts, items.merges_I4, items.merge_count_1, out_THD, lse_TH, out_THD.stride(0),
        UNITS=units, PACK=items.pack, QUERIES=items.queries, HEAD_DIM=head_dim, TOGETHER=TOGETHER, AT_ONCE=AT_ONCE,
        num_warps=4, **launch_options(device),
    )  # fmt: skip


@triton.jit
def _add_kernel(
    parts_ptr, part_lse_ptr, merges_ptr, count_ptr, out_ptr, lse_ptr, out_stride,
    UNITS: tl.constexpr, PACK: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, TOGETHER: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the pieces of TOGETHER queries of an item at a time."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    EACH: tl.constexpr = QUERIES // TOGETHER
    for work in range(tl.program_id(0), tl.load(count_ptr) * (UNITS * EACH), tl.num_programs(0)):
        merge_ptr, unit = merges_ptr + work // (UNITS * EACH) * 4, work // EACH % UNITS
        token, tokens = tl.load(merge_ptr), tl.load(merge_ptr + 1)
        part, pieces = tl.load(merge_ptr + 2), tl.load(merge_ptr + 3)
        query = work % EACH * TOGETHER
        left = tokens * PACK - query
        max_E1 = tl.full((TOGETHER, 1), LOWEST, tl.float32)
        sum_E1 = tl.zeros((TOGETHER, 1), tl.float32)
        acc_ED = tl.zeros((TOGETHER, HEAD_DIM), tl.float32)
        max_E1, sum_E1, acc_ED = add_parts(
            max_E1, sum_E1, acc_ED, parts_ptr, part_lse_ptr,
            (part.to(tl.int64) * UNITS + unit) * QUERIES + query, UNITS * QUERIES, pieces, left,
            HEAD_DIM, TOGETHER, HEAD_DIM, AT_ONCE,
        )  # fmt: skip
        query_E1, d_1D = query + tl.arange(0, TOGETHER)[:, None], tl.arange(0, HEAD_DIM)[None, :]
        real_E1 = query_E1 < tokens * PACK
        acc_ED = acc_ED / tl.where(real_E1, sum_E1, 1)
        token_E1 = (token + query_E1 // PACK).to(tl.int64)
        head_E1 = unit * PACK + query_E1 % PACK
        out_ED = out_ptr + token_E1 * out_stride + head_E1 * HEAD_DIM + d_1D
        tl.store(out_ED, acc_ED.to(out_ptr.dtype.element_ty), mask=real_E1)
        if lse_ptr is not None:
            lse_E1 = lse_ptr + token_E1 * (out_stride // HEAD_DIM) + head_E1
            tl.store(lse_E1, (max_E1 + tl.log2(sum_E1)) / LOG2E, mask=real_E1)


AOT = (
    AotKernel(
        _pieces_kernel,
        {
            **dict.fromkeys(("start_ptr", "kv_len_ptr", "slots_ptr", "counts_ptr", "table_ptr", "merges_ptr"), "*i32"),
            **dict.fromkeys(("count_ptr", "ticket_ptr", "merge_count_ptr"), "*i32"),
            **dict.fromkeys(("num_rows", "section_tokens", "few", "programs", "most", "deep"), "i32"),
        },
        {
            "ROWS": 64, "ITEMS": 16, "QUERIES": 32, "KEYS": 128, "UNITS": 8, "LEAST": LEAST_TILES, "CHOICES": CHOICES,
            "PER_WAVE": PER_WAVE, "PER_SUM": PER_SUM, "PER_PIECE": PER_PIECE, "CODE": CODE,
        },
        num_warps=4,
        archs=("sm_90",),
    ),
    AotKernel(
        _add_kernel,
        {
            "parts_ptr": "*fp32", "part_lse_ptr": "*fp32", "merges_ptr": "*i32", "count_ptr": "*i32",
            "out_ptr": "*bf16", "out_stride": "i32:16",
        },
        {
            "lse_ptr": None, "UNITS": 8, "PACK": 4, "QUERIES": QUERIES, "HEAD_DIM": 128, "TOGETHER": TOGETHER,
            "AT_ONCE": AT_ONCE,
        },
        num_warps=4,
        archs=("sm_90",),
    ),
)  # fmt: skip
