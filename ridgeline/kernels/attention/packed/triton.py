"""Packed attention on a GPU: FlashAttention-2 (arXiv 2307.08691) over a tile of queries of one row and one head. The
host lists the tiles, since it knows all lengths; no program is idle. The legend is that of op.py, and

    M  queries of a tile
    K  keys of a tile
"""

from __future__ import annotations

from math import gcd

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.packed import torch_ops
from ridgeline.kernels.attention.packed.op import LoadedRows, PackedRows
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import compute_capability, launch_options

LOG2E = 1.4426950408889634
WIDEST = 128  # numbers of a head in float32


@triton.jit
def _rows(
    ptr, place_K1, length_K, FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr
):
    """Load DIM numbers of a head's rows from the number FIRST on: [K, DIM]. What lies behind the head is 0, and so are
    rows that are not real, if MASKED."""
    d_D = FIRST + tl.arange(0, DIM)
    if MASKED:
        return tl.load(ptr + place_K1 + d_D[None, :], mask=length_K[:, None] & (d_D < HEAD_DIM)[None, :], other=0)
    elif FIRST + DIM <= HEAD_DIM:
        return tl.load(ptr + place_K1 + d_D[None, :])
    else:
        return tl.load(ptr + place_K1 + d_D[None, :], mask=(d_D < HEAD_DIM)[None, :], other=0)


@triton.jit
def _attend(
    acc_MD, rest_MD, max_M, sum_M, q_MD, tail_MD, k_ptr, v_ptr, stride_k, stride_v, begin, stop, length, m_M, scale,
    window, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Add key tiles begin … stop to the running softmax."""
    n_K = tl.arange(0, TILE)
    k_ptr, v_ptr = k_ptr + begin.to(tl.int64) * stride_k, v_ptr + begin.to(tl.int64) * stride_v
    k_K1, v_K1 = n_K[:, None] * stride_k, n_K[:, None] * stride_v  # a tile's own offsets stay the same
    for start in range(begin, stop, TILE):
        key_K = start + n_K
        real_K = key_K < length
        k_KD = _rows(k_ptr, k_K1, real_K, 0, HEAD_DIM, DIM, MASKED)
        v_KD = _rows(v_ptr, v_K1, real_K, 0, HEAD_DIM, DIM, MASKED)
        x_MK = tl.dot(q_MD, tl.trans(k_KD), input_precision="ieee")
        if REST:
            x_MK = tl.dot(tail_MD, tl.trans(_rows(k_ptr, k_K1, real_K, DIM, HEAD_DIM, REST, MASKED)), x_MK,
                          input_precision="ieee")  # fmt: skip
        if MASKED:
            seen_MK = real_K[None, :] & (m_M >= 0)[:, None]
            if WINDOW:
                apart_MK = key_K[None, :] - m_M[:, None]
                seen_MK = seen_MK & (apart_MK < window) & (apart_MK > -window)
            x_MK = tl.where(seen_MK, x_MK, -1e30)
        new_max_M = tl.maximum(max_M, tl.max(x_MK, 1) * scale)
        p_MK = tl.exp2(x_MK * scale - new_max_M[:, None])  # one operation of a score before its power
        if MASKED:  # a tile of which a query sees nothing would count as if it saw all
            p_MK = tl.where(seen_MK, p_MK, 0.0)
        shrink_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MK, 1)
        p_MK = p_MK.to(v_KD.dtype)
        acc_MD = tl.dot(p_MK, v_KD, acc_MD * shrink_M[:, None], input_precision="ieee")
        if REST:
            tail_KD = _rows(v_ptr, v_K1, real_K, DIM, HEAD_DIM, REST, MASKED)
            rest_MD = tl.dot(p_MK, tail_KD, rest_MD * shrink_M[:, None], input_precision="ieee")
        max_M = new_max_M
        k_ptr += TILE * stride_k
        v_ptr += TILE * stride_v
    return acc_MD, rest_MD, max_M, sum_M


@triton.jit
def _packed_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, tiles_ptr, scale, window, stride_q, stride_k, stride_v, head_q, head_k, head_v,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    APART: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one tile and one head. A tile is (first token of the row, tokens of the row, its first
    query in the row). One whose row has no tokens stores nothing.

    REST: a head has DIM numbers and up to so many more, which are loaded and multiplied apart; 0: none.
    APART: strides count so many numbers. Otherwise Triton would know of a stride of 72 only that 16 does not divide it,
    and load number by number.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    tiles_ptr += 3 * tile
    row, length, first = tl.load(tiles_ptr), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2)
    stride_q, stride_k, stride_v = stride_q * APART, stride_k * APART, stride_v * APART
    head_q, head_k, head_v = head_q * APART, head_k * APART, head_v * APART
    m_M = first + tl.arange(0, QUERIES)
    real_M = m_M < length
    token_M = (row + m_M).to(tl.int64)
    q_ptr += head * head_q
    q_MD = _rows(q_ptr, token_M[:, None] * stride_q, real_M, 0, HEAD_DIM, DIM, True)
    max_M = tl.full((QUERIES,), -1e30, tl.float32)
    sum_M = tl.zeros((QUERIES,), tl.float32)
    tail_MD, rest_MD = q_MD, sum_M
    if REST:
        tail_MD = _rows(q_ptr, token_M[:, None] * stride_q, real_M, DIM, HEAD_DIM, REST, True)
        rest_MD = tl.zeros((QUERIES, REST), tl.float32)
    k_ptr += head // GROUP * head_k + row.to(tl.int64) * stride_k
    v_ptr += head // GROUP * head_v + row.to(tl.int64) * stride_v
    acc_MD = tl.zeros((QUERIES, DIM), tl.float32)
    begin, full, stop = 0 * length, length // TILE * TILE, length
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // TILE * TILE
        full, stop = begin, tl.minimum(length, first + QUERIES + window - 1)
    else:
        acc_MD, rest_MD, max_M, sum_M = _attend(
            acc_MD, rest_MD, max_M, sum_M, q_MD, tail_MD, k_ptr, v_ptr, stride_k, stride_v, begin, full, length, m_M,
            scale, window, HEAD_DIM, DIM, REST, TILE, False, WINDOW,
        )  # fmt: skip
    acc_MD, rest_MD, max_M, sum_M = _attend(
        acc_MD, rest_MD, max_M, sum_M, q_MD, tail_MD, k_ptr, v_ptr, stride_k, stride_v, full, stop, length, m_M,
        scale, window, HEAD_DIM, DIM, REST, TILE, True, WINDOW,
    )  # fmt: skip
    out_ptr_M1 = out_ptr + ((token_M * NUM_HEADS + head) * HEAD_DIM)[:, None]
    d_D = tl.arange(0, DIM)
    sum_M1 = tl.maximum(sum_M, 1e-30)[:, None]  # of queries behind the row's end nothing is stored
    real_MD = real_M[:, None] & (d_D < HEAD_DIM)[None, :]
    tl.store(out_ptr_M1 + d_D[None, :], (acc_MD / sum_M1).to(out_ptr.dtype.element_ty), mask=real_MD)
    if REST:
        d_D = DIM + tl.arange(0, REST)
        real_MD = real_M[:, None] & (d_D < HEAD_DIM)[None, :]
        tl.store(out_ptr_M1 + d_D[None, :], (rest_MD / sum_M1).to(out_ptr.dtype.element_ty), mask=real_MD)


def packed_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    rows: PackedRows,
    scale: float,
    window: int | None = None,
    bias_HL: Tensor | None = None,
) -> Tensor:
    """Compute `op.packed_attention`. With a bias torch's fused attention does, and in float32 with heads that are wider
    than 128: a program of ours would spill some 8 kB a thread, and take half a minute to compile."""
    spills = q_THD.dtype.itemsize == 4 and q_THD.shape[2] > WIDEST and not isinstance(rows, LoadedRows)
    if bias_HL is not None or spills:
        return torch_ops.packed_attention(q_THD, k_TGD, v_TGD, rows, scale, window, bias_HL)
    tokens, heads, width = q_THD.shape
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    queries, tile = cut(rows.longest, q_THD.dtype.itemsize)
    tiles_J3 = rows.table(("tiles", queries), lambda tokens_R: _tiles(tokens_R, queries), q_THD.device)
    if not tokens:
        return out_THD
    strides = [x.stride(dim) for dim in (0, 1) for x in (q_THD, k_TGD, v_TGD)]
    apart, (dim, rest) = gcd(16, *strides), parts_of(width)
    _packed_attention[(len(tiles_J3) * heads,)](
        q_THD, k_TGD, v_TGD, out_THD, tiles_J3, scale * LOG2E, window or 0, *(stride // apart for stride in strides),
        NUM_HEADS=heads, GROUP=heads // k_TGD.shape[1], HEAD_DIM=width, DIM=dim, REST=rest,
        APART=apart, QUERIES=queries, TILE=tile, WINDOW=window is not None,
        num_warps=queries // 16, num_stages=3 if q_THD.dtype.itemsize < 4 else 2,
        **_registers(dim, rest, queries, q_THD.device), **launch_options(q_THD.device),
    )  # fmt: skip
    return out_THD


def cut(longest: int, itemsize: int) -> tuple[int, int]:
    """Return the queries and keys of a tile, for rows of up to so many tokens. A warp has 16 queries. Larger tiles read
    keys less often, and those of float32 would not fit into a program's memory."""
    if itemsize == 4:
        return 32, 32
    return (128 if longest > 64 else 64), 64


def _registers(dim: int, rest: int, queries: int, device: torch.device) -> dict[str, int]:
    """Return the most registers of a thread, if they are bounded: so two programs fit a multiprocessor, and one's
    products run beside the other's powers. For 72-wide heads on an H200 that saves a fifth of the time, 258 for 330 µs
    among 4,096 patches, and 48 bytes are spilled. Wider ones need more: of 192 numbers 664 bytes would be."""
    return {"maxnreg": 128} if rest and dim <= 64 and queries == 128 and compute_capability(device)[0] == 9 else {}


def parts_of(width: int) -> tuple[int, int]:
    """Return (the numbers of a head that a product takes at once, those of a second product for the rest; 0: one
    product takes all). Both are powers of two: for 72 wide heads 64 + 16 is less work than 128."""
    whole = max(16, triton.next_power_of_2(width))
    half = whole // 2
    rest = max(16, triton.next_power_of_2(width - half))
    return (half, rest) if half >= 16 and half + rest < whole else (whole, 0)


def tiles_of(tokens_R: np.ndarray, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of each tile of so many tokens of a row, and the tokens of its row before it, in order: [J]
    each."""
    count_R = -(-tokens_R // queries)
    row_J = np.repeat(np.arange(len(count_R)), count_R)
    return row_J, queries * (np.arange(len(row_J)) - np.repeat(np.cumsum(count_R) - count_R, count_R))


def _tiles(tokens_R: np.ndarray, queries: int) -> np.ndarray:
    """Return the tiles of all rows, [J, 3], long rows' first: they take the longest."""
    row_J, begun_J = tiles_of(tokens_R, queries)
    tiles_J3 = np.stack([(np.cumsum(tokens_R) - tokens_R)[row_J], tokens_R[row_J], begun_J], axis=1)
    return tiles_J3[np.argsort(-tokens_R[row_J], kind="stable")]


def _aot(width: int, window: bool, group: int = 1) -> AotKernel:
    signature = {f"{name}_ptr": "*bf16" for name in ("q", "k", "v", "out")}
    signature |= {"tiles_ptr": "*i32", "scale": "fp32", "window": "i32"}
    signature |= {f"{what}_{name}": "i32" for what in ("stride", "head") for name in "qkv"}
    (queries, tile), (dim, rest) = cut(512, 2), parts_of(width)
    constants = {
        "NUM_HEADS": 16, "GROUP": group, "HEAD_DIM": width, "DIM": dim, "REST": rest, "APART": gcd(16, width),
        "QUERIES": queries, "TILE": tile, "WINDOW": window,
    }  # fmt: skip
    options = {"registers": 128, "archs": ("sm_90",)} if rest else {"hot": True}
    return AotKernel(
        _packed_attention, signature, constants, num_warps=queries // 16, num_stages=3, tensor_cores="MMA", **options
    )


AOT = (_aot(64, False), _aot(64, True), _aot(72, False))
