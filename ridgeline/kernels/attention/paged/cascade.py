"""The shared part of attention's work list: rows that read the keys of their common first blocks together.

A group is rows whose block tables begin with the same blocks. Its rows are taken a gang at a time: as many rows as the
queries of one matrix product hold. A gang's common keys are cut into stretches, as a row's own keys are cut into items:
just enough of them to fill the GPU. A part is one row's result for one stretch. A row's parts are added to those of its
own keys (triton_decode.py).

`prefix_4R` says where every row stands: its rank in an order that keeps groups together, the rank of its group's first
row, the rank behind the group's last row, and how many tokens the group shares (0: the row belongs to no group). A row
takes part while it runs one token and has more keys than it shares. A row that the device has stopped keeps its rank
and does nothing.

Legend:
    R  rows
    I  stretches
    W  rows that one program describes
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.op import AttentionShape, Cascade
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors

# Rows of a gang's matrix products, whose sums and scores must stay in registers. 128 of them gained at heads of 64 and
# lost at heads of 128 (docs/log.md).
QUERIES = 64
FILLED = 2  # programs per multiprocessor that stretches should give


def make_cascade(
    start_R1: Tensor,
    kv_len_R: Tensor,
    slots_R: Tensor,
    shape: AttentionShape,
    key_tile: int,
    whole: int,
    max_items: int,
) -> Cascade | None:
    """Cut the shared keys into stretches, by one small kernel. Returns None if a gang would be a single row.

    key_tile, whole: as in schedule.py, whose kernel fills `items_I3` afterwards.
    """
    device, num_rows, group = kv_len_R.device, len(slots_R), shape.num_heads // shape.num_kv_heads
    queries = max(16, min(QUERIES, triton.next_power_of_2(num_rows * group)))
    gang = queries // group
    if min(gang, num_rows) < 2:
        return None
    target = max(1, FILLED * num_multiprocessors(device) // shape.num_kv_heads)
    max_stretches = target + num_rows * 2 // 3  # most gangs come from groups of three rows of which a gang holds two
    rows = triton.next_power_of_2(num_rows)
    entries = max(1, min(16, 16384 // rows))
    cascade = Cascade(
        stretches_I6=torch.empty(max_stretches, 6, dtype=torch.int32, device=device),
        count_1=torch.empty(1, dtype=torch.int32, device=device),
        members_R=torch.empty(num_rows, dtype=torch.int32, device=device),
        positions_R=torch.empty(num_rows, dtype=torch.int32, device=device) if shape.alibi else None,
        rows_R4=torch.empty(num_rows, 4, dtype=torch.int32, device=device),
        items_I3=torch.empty(max_items, 3, dtype=torch.int32, device=device),
        queries=queries,
        max_parts=gang * target + num_rows,
    )
    _cascade_kernel[(triton.cdiv(max(max_stretches, num_rows), entries),)](
        start_R1,
        kv_len_R,
        slots_R,
        shape.prefix_4R,
        cascade.stretches_I6,
        cascade.count_1,
        cascade.members_R,
        cascade.positions_R,
        cascade.rows_R4,
        num_rows,
        target,
        GANG=gang,
        KEY_TILE=key_tile,
        WHOLE=whole,
        ROWS=rows,
        ENTRIES=entries,
        POSITIONS=shape.alibi,
        **launch_options(device),
    )
    return cascade


@triton.jit(do_not_specialize=["num_rows", "target"])
def _cascade_kernel(
    start_ptr,
    kv_len_ptr,
    slots_ptr,
    prefix_ptr,
    stretches_ptr,
    count_ptr,
    members_ptr,
    positions_ptr,
    rows_ptr,
    num_rows,
    target,
    GANG: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    POSITIONS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ENTRIES stretches, and the descriptions of ENTRIES rows. Every program counts the pieces of all gangs for
    itself."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    row_R = tl.arange(0, ROWS)
    real_R = row_R < num_rows
    rank_R = tl.load(prefix_ptr + row_R, mask=real_R, other=0)
    first_R = tl.load(prefix_ptr + num_rows + row_R, mask=real_R, other=0)
    end_R = tl.load(prefix_ptr + 2 * num_rows + row_R, mask=real_R, other=0)
    shared_R = tl.load(prefix_ptr + 3 * num_rows + row_R, mask=real_R, other=0)
    leads_R = (shared_R > 0) & ((rank_R - first_R) % GANG == 0)
    size_R = tl.minimum(end_R - rank_R, GANG)
    total = tl.sum(tl.where(leads_R, shared_R, 0))
    chunk = tl.maximum(tl.cdiv(tl.cdiv(total, target), KEY_TILE), 1) * KEY_TILE
    pieces_R = tl.where(leads_R, pieces_of(shared_R, chunk, WHOLE), 0)
    end_piece_R = tl.cumsum(pieces_R, 0)
    parts_R = pieces_R * size_R
    first_part_R = tl.cumsum(parts_R, 0) - parts_R
    count = tl.sum(pieces_R)
    if program == 0:
        tl.store(count_ptr, count)

    entry_I = program * ENTRIES + tl.arange(0, ENTRIES)
    real_I = entry_I < count
    before_IR = end_piece_R[None, :] <= entry_I[:, None]
    leader_I = tl.sum(before_IR.to(tl.int32), 1)
    piece_I = entry_I - tl.max(tl.where(before_IR, end_piece_R[None, :], 0), 1)
    is_leader_IR = row_R[None, :] == leader_I[:, None]
    first_part_I = tl.sum(tl.where(is_leader_IR, first_part_R[None, :], 0), 1)
    pieces_I = tl.sum(tl.where(is_leader_IR, pieces_R[None, :], 0), 1)
    slot_I = tl.load(slots_ptr + leader_I, mask=real_I, other=0).to(tl.int32)
    rank_I = tl.load(prefix_ptr + leader_I, mask=real_I, other=0)
    end_I = tl.load(prefix_ptr + 2 * num_rows + leader_I, mask=real_I, other=0)
    shared_I = tl.load(prefix_ptr + 3 * num_rows + leader_I, mask=real_I, other=0)
    size_I = tl.minimum(end_I - rank_I, GANG)
    even_I = tl.cdiv(tl.cdiv(shared_I, tl.maximum(pieces_I, 1)), KEY_TILE) * KEY_TILE
    begin_I = piece_I * even_I
    stretch_I = stretches_ptr + entry_I * 6
    tl.store(stretch_I, slot_I, mask=real_I)
    tl.store(stretch_I + 1, rank_I, mask=real_I)
    tl.store(stretch_I + 2, size_I, mask=real_I)
    tl.store(stretch_I + 3, begin_I, mask=real_I)
    tl.store(stretch_I + 4, tl.minimum(begin_I + even_I, shared_I), mask=real_I)
    tl.store(stretch_I + 5, first_part_I + piece_I * size_I, mask=real_I)

    # The same programs describe ENTRIES rows.
    row_W = entry_I
    real_W = row_W < num_rows
    rank_W = tl.load(prefix_ptr + row_W, mask=real_W, other=0)
    first_W = tl.load(prefix_ptr + num_rows + row_W, mask=real_W, other=0)
    shared_W = tl.load(prefix_ptr + 3 * num_rows + row_W, mask=real_W, other=0)
    token_W = tl.load(start_ptr + row_W, mask=real_W, other=0).to(tl.int32)
    tokens_W = tl.load(start_ptr + row_W + 1, mask=real_W, other=0).to(tl.int32) - token_W
    kv_len_W = tl.load(kv_len_ptr + row_W, mask=real_W, other=0).to(tl.int32)
    takes_part_W = (shared_W > 0) & (tokens_W == 1) & (kv_len_W > shared_W)
    member_W = (rank_W - first_W) % GANG
    leads_WR = leads_R[None, :] & (rank_R[None, :] == (rank_W - member_W)[:, None])
    first_part_W = tl.sum(tl.where(leads_WR, first_part_R[None, :], 0), 1)
    size_W = tl.sum(tl.where(leads_WR, size_R[None, :], 0), 1)
    pieces_W = tl.sum(tl.where(leads_WR, pieces_R[None, :], 0), 1)
    tl.store(members_ptr + rank_W, tl.where(takes_part_W, token_W, -1), mask=real_W & (shared_W > 0))
    if POSITIONS:
        tl.store(positions_ptr + rank_W, kv_len_W - 1, mask=real_W & (shared_W > 0))
    out_W = rows_ptr + row_W * 4
    tl.store(out_W, tl.where(takes_part_W, shared_W, 0), mask=real_W)
    tl.store(out_W + 1, first_part_W + member_W, mask=real_W)
    tl.store(out_W + 2, size_W, mask=real_W)
    tl.store(out_W + 3, tl.where(takes_part_W, pieces_W, 0), mask=real_W)


@triton.jit
def pieces_of(span, chunk, WHOLE: tl.constexpr):
    """Return the number of pieces that so many keys are cut into."""
    return tl.where(span <= WHOLE, 1, tl.cdiv(span, chunk))
