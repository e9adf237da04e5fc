"""Attention of several rows to the keys that they share: each program reads a stretch of them once for a gang of rows.

The queries of up to a gang of rows are the rows of the matrix products, so probabilities go from one product into the
next in registers. All of them see all keys of the stretch. Every row also has keys of its own, so each row's result is
a part, which `decode_kernel`, launched next, adds up.

Legend:
    M  queries (rows of the gang times heads that share a key head), padded
    K  keys of a tile
    D  head width, padded
    W  words of a head: its elements, or pairs of levels
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.triton_common import (
    LOWEST,
    load_blocks,
    load_scales,
    load_slopes,
    logits,
    nearer,
    place_in_blocks,
    place_of_blocks,
)
from ridgeline.kernels.base.aot import ARCHS, ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.triton_levels import columns_apart, columns_joined, multiplier, scores_of, with_values


def shared_options(queries: int, head_dim: int) -> dict[str, int]:
    """Return the compiler's options. The queries of wide heads take as much room as a stage, and two programs should
    fit. The sums of the widest need the registers of more warps."""
    return {"num_warps": 8 if queries > 64 or head_dim > 256 else 4, "num_stages": 3 if head_dim <= 64 else 2}


@triton.jit
def shared_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scale_ptr,
    table_ptr,
    stretches_ptr,
    count_ptr,
    members_ptr,
    positions_ptr,
    slopes_ptr,
    parts_ptr,
    part_lse_ptr,
    scale,
    softcap,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    stride_scale_block,
    stride_scale_head,
    stride_scale_token,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one stretch. Writes parts [parts, G, GROUP, HEAD_DIM] and part_lse [parts, G, GROUP], float32.

    KV: as in `decode_kernel`.
    """
    entry, g = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    m_M = tl.arange(0, QUERIES)
    d_D = tl.arange(0, DIM)
    n_K = tl.arange(0, TILE)
    member_M, head_M = m_M // GROUP, g * GROUP + m_M % GROUP
    slope_M = load_slopes(slopes_ptr, head_M, ALIBI)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.load(count_ptr)
    if entry >= count:
        return
    stretch_ptr = stretches_ptr + entry * 6
    slot, rank, size = tl.load(stretch_ptr), tl.load(stretch_ptr + 1), tl.load(stretch_ptr + 2)
    begin, end, part = tl.load(stretch_ptr + 3), tl.load(stretch_ptr + 4), tl.load(stretch_ptr + 5)

    token_M = tl.load(members_ptr + rank + member_M, mask=member_M < size, other=-1)
    real_M = token_M >= 0
    position_M = token_M
    if ALIBI:
        position_M = tl.load(positions_ptr + rank + member_M, mask=real_M, other=0)
    inside_D = d_D < HEAD_DIM
    q_M = token_M.to(tl.int64) * stride_q_token + head_M * stride_q_head
    stored_MD = real_M[:, None] & inside_D[None, :]
    q_MD = tl.load(q_ptr + q_M[:, None] + d_D[None, :], mask=stored_MD, other=0)
    table_ptr += slot.to(tl.int64) * stride_table
    PAIR: tl.constexpr = 1 if KV is None else 2
    w_W = tl.arange(0, DIM // PAIR)
    inside_W = w_W < HEAD_DIM // PAIR
    place_KW = place_in_blocks(stride_token, TILE, BLOCK_SIZE)[:, None] + w_W[None, :]
    k_ptr_KW = k_ptr + g * stride_head + place_KW
    v_ptr_KW = v_ptr + g * stride_head + place_KW
    if KV is not None:
        scale_ptr += g * stride_scale_head
    q = columns_apart(multiplier(q_MD, KV), QUERIES, DIM, KV)

    max_M = tl.full((QUERIES,), LOWEST, tl.float32)
    sum_M = tl.zeros((QUERIES,), tl.float32)
    acc = columns_apart(tl.zeros((QUERIES, DIM), tl.float32), QUERIES, DIM, KV)
    blocks = load_blocks(table_ptr, begin, end, TILE, BLOCK_SIZE)
    for start in range(begin, end, TILE):
        readable_K = start + n_K < end
        place_K1 = place_of_blocks(blocks, start, stride_block, stride_token, TILE, BLOCK_SIZE)[:, None]
        readable_KW = readable_K[:, None] & inside_W[None, :]
        k_KW = tl.load(k_ptr_KW + place_K1, mask=readable_KW, other=0)
        v_KW = tl.load(v_ptr_KW + place_K1, mask=readable_KW, other=0)
        k_scale_K, v_scale_K = load_scales(
            scale_ptr, blocks, start, readable_K, stride_scale_block, stride_scale_token,
            TILE, BLOCK_SIZE, KV,
        )  # fmt: skip
        blocks = load_blocks(table_ptr, start + TILE, end, TILE, BLOCK_SIZE)  # before they are needed
        x_MK = logits(scores_of(q, k_KW, k_scale_K, KV, PDL), scale, softcap, SOFTCAP)
        x_MK = nearer(x_MK, slope_M[:, None], (start + n_K)[None, :] - position_M[:, None], ALIBI)
        x_MK = tl.where(readable_K[None, :], x_MK, -float("inf"))
        new_max_M = tl.maximum(max_M, tl.max(x_MK, 1))
        p_MK = tl.exp2(x_MK - new_max_M[:, None])
        shrink_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MK, 1)
        acc = with_values(acc, shrink_M, p_MK, v_KW, v_scale_K, q, KV, PDL)
        max_M = new_max_M

    acc_MD = columns_joined(acc, QUERIES, DIM, KV) / sum_M[:, None]
    part_M = ((part + member_M).to(tl.int64) * NUM_KV_HEADS + g) * GROUP + m_M % GROUP
    tl.store(parts_ptr + part_M[:, None] * HEAD_DIM + d_D[None, :], acc_MD, mask=stored_MD)
    tl.store(part_lse_ptr + part_M, max_M + tl.log2(sum_M), mask=real_M)


def _aot(group: int, head_dim: int, tile: int, archs: tuple[str, ...] = ARCHS, kv: str | None = None) -> AotKernel:
    scales = ("scale_ptr", "stride_scale_block", "stride_scale_head")
    return AotKernel(
        shared_kernel,
        {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16"),
            **dict.fromkeys(("table_ptr", "stretches_ptr", "count_ptr", "members_ptr"), "*i32"),
            **dict.fromkeys(("parts_ptr", "part_lse_ptr"), "*fp32"),
            **dict.fromkeys(("scale", "softcap"), "fp32"),
            **dict.fromkeys(
                ("stride_q_token", "stride_q_head", "stride_block", "stride_head", "stride_token"), "i32:16"
            ),
            "stride_table": "i32",
            **({"k_ptr": "*i16", "v_ptr": "*i16", "scale_ptr": "*i32"} if kv else {}),
            **(dict.fromkeys(scales[1:], "i32:16") if kv else {}),
        },
        {
            "NUM_KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "DIM": head_dim,
            "BLOCK_SIZE": 64,
            "QUERIES": 64,
            "TILE": tile,
            "SOFTCAP": False,
            "ALIBI": False,
            "positions_ptr": None,
            "slopes_ptr": None,
            "KV": kv,
            "stride_scale_token": 1 if kv else None,
            **({} if kv else dict.fromkeys(scales)),
        },
        **shared_options(64, head_dim),
        hot=True,
        tensor_cores="HGMMA",
        archs=archs,
    )


AOT = (
    _aot(4, 128, 64),
    _aot(8, 512, 16, ONE_OF_EACH),
    _aot(4, 128, 64, ONE_OF_EACH, "e4m3"),
    _aot(8, 64, 64, ONE_OF_EACH, "int8"),
)
