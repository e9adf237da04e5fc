"""Attention over expanded latents on a GPU: FlashAttention-2 (arXiv 2307.08691) over a tile of queries of one row and
one head. Scores are the sum of two products, since the rotated part of the keys belongs to all heads. The host lists
the tiles. The legend is that of op.py, and

    M  queries of a tile
    N  keys of a tile
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.expanded.op import LongRows
from ridgeline.kernels.attention.packed.op import sent
from ridgeline.kernels.attention.packed.triton import tiles_of
from ridgeline.kernels.attention.paged.triton_common import LOG2E, LOWEST, Cut
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import compute_capability, launch_options


@triton.jit
def _add(
    acc_MV, max_M, sum_M, q_MK, q_MY, k_ptr_NK, r_ptr_NY, v_ptr_NV, chosen_ptr_M, stride_kv, stride_r, begin, stop,
    position_M, real_M, scale, KEY_DIM: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr, Y: tl.constexpr,
    VALUE_DIM: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add key tiles begin … stop to the running softmax. chosen_ptr_M: the words of the queries' chosen keys, of which
    a tile needs one; None: all are."""
    n_N = tl.arange(0, TILE)
    for start in range(begin, stop, TILE):
        real_N1 = (start + n_N < stop)[:, None] if MASKED else None
        k_NK = _load(k_ptr_NK + start * stride_kv, real_N1, KEY_DIM, K)
        r_NY = _load(r_ptr_NY + start * stride_r, real_N1, ROPE, Y)
        x_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision="ieee")
        x_MN = tl.dot(q_MY, tl.trans(r_NY), x_MN, input_precision="ieee") * scale
        v_NV = _load(v_ptr_NV + start * stride_kv, real_N1, VALUE_DIM, V)
        if MASKED:
            x_MN = tl.where((start + n_N)[None, :] <= position_M[:, None], x_MN, -float("inf"))
        if chosen_ptr_M is not None:
            word_M = tl.load(chosen_ptr_M + start // 64, mask=real_M, other=0) >> (start % 64)
            x_MN = tl.where(((word_M[:, None] >> n_N[None, :]) & 1) != 0, x_MN, -float("inf"))
        new_max_M = tl.maximum(max_M, tl.max(x_MN, 1))
        p_MN = tl.exp2(x_MN - new_max_M[:, None])
        shrink_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        acc_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, acc_MV * shrink_M[:, None], input_precision="ieee")
        max_M = new_max_M
    return acc_MV, max_M, sum_M


@triton.jit
def _load(ptr, real, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load vectors where they are real, and 0 elsewhere. real: None if all are."""
    if WIDTH == PADDED:
        if real is None:
            return tl.load(ptr)
        else:
            return tl.load(ptr, mask=real, other=0)
    else:
        inside = (tl.arange(0, PADDED) < WIDTH)[None, :]
        return tl.load(ptr, mask=inside if real is None else real & inside, other=0)


@triton.jit(do_not_specialize=["num_tiles"])
def _expanded_attention(
    out_ptr, q_ptr, rotated_ptr, k_ptr, v_ptr, r_ptr, tiles_ptr, kv_len_ptr, chosen_ptr, num_tiles, scale, stride_out,
    head_out, stride_q, head_q, stride_rotated, head_rotated, stride_kv, head_kv, stride_r, stride_chosen,
    KEY_DIM: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr, Y: tl.constexpr, VALUE_DIM: tl.constexpr,
    V: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one tile and one head. A tile is (row, its first token in the step, the row's tokens
    from there on, the row's first key). Tiles of a head lie side by side, so that its keys are read from the cache."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    tiles_ptr += 4 * tile
    row, first, left, first_key = (
        tl.load(tiles_ptr),
        tl.load(tiles_ptr + 1),
        tl.load(tiles_ptr + 2),
        tl.load(tiles_ptr + 3),
    )
    position = tl.load(kv_len_ptr + row).to(tl.int32) - left
    if position < 0:  # a stopped row
        return
    m_M, n_N = tl.arange(0, QUERIES), tl.arange(0, TILE)
    k_K, y_Y, v_V = tl.arange(0, K), tl.arange(0, Y), tl.arange(0, V)
    real_M1 = (m_M < left)[:, None]
    token_M1, key_N1 = (first + m_M).to(tl.int64)[:, None], (first_key + n_N).to(tl.int64)[:, None]
    head = head.to(tl.int64)
    q_MK = _load(q_ptr + head * head_q + token_M1 * stride_q + k_K[None, :], real_M1, KEY_DIM, K)
    rotated_ptr_MY = rotated_ptr + head * head_rotated + token_M1 * stride_rotated + y_Y[None, :]
    q_MY = _load(rotated_ptr_MY, real_M1, ROPE, Y)
    k_ptr_NK = k_ptr + head * head_kv + key_N1 * stride_kv + k_K[None, :]
    v_ptr_NV = v_ptr + head * head_kv + key_N1 * stride_kv + v_V[None, :]
    r_ptr_NY = r_ptr + key_N1 * stride_r + y_Y[None, :]
    acc_MV = tl.zeros((QUERIES, V), tl.float32)
    max_M = tl.full((QUERIES,), LOWEST, tl.float32)
    sum_M = tl.zeros((QUERIES,), tl.float32)
    position_M = position + m_M
    chosen_ptr_M = None
    if chosen_ptr is not None:
        chosen_ptr_M = chosen_ptr + (first + m_M).to(tl.int64) * stride_chosen
    full, stop = (position + 1) // TILE * TILE, position + tl.minimum(left, QUERIES)
    acc_MV, max_M, sum_M = _add(
        acc_MV, max_M, sum_M, q_MK, q_MY, k_ptr_NK, r_ptr_NY, v_ptr_NV, chosen_ptr_M, stride_kv, stride_r,
        full * 0, full, position_M, m_M < left, scale, KEY_DIM, K, ROPE, Y, VALUE_DIM, V, TILE, False,
    )  # fmt: skip
    acc_MV, max_M, sum_M = _add(
        acc_MV, max_M, sum_M, q_MK, q_MY, k_ptr_NK, r_ptr_NY, v_ptr_NV, chosen_ptr_M, stride_kv, stride_r,
        full, stop, position_M, m_M < left, scale, KEY_DIM, K, ROPE, Y, VALUE_DIM, V, TILE, True,
    )  # fmt: skip
    out_ptr_MV = out_ptr + head * head_out + token_M1 * stride_out + v_V[None, :]
    y_MV = (acc_MV / sum_M[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr_MV, y_MV, mask=real_M1 & (v_V < VALUE_DIM)[None, :])


def expanded_attention(
    out_THV: Tensor,
    q_THK: Tensor,
    q_THY: Tensor,
    k_JHK: Tensor,
    v_JHV: Tensor,
    r_JY: Tensor,
    rows: LongRows,
    *,
    scale: float,
    chosen_TW: Tensor | None = None,
    cut: Cut | None = None,
) -> None:
    """Compute `op.expanded_attention`. Keys and values have the same strides, as parts of one product have, and are
    fewer than 2^31 numbers. cut: how it is cut, if that is not to be chosen, and never by Hopper's own kernel."""
    if k_JHK.stride() != v_JHV.stride() or any(x.stride(-1) != 1 for x in (out_THV, q_THK, q_THY, k_JHK, r_JY)):
        raise ValueError("expanded attention: keys and values must be parts of one tensor, and numbers side by side")
    if cut is None and chosen_TW is None and compute_capability(q_THK.device)[0] == 9:
        from ridgeline.kernels.attention.expanded import hopper  # Gluon, which other devices do without

        compiled = q_THK.is_meta  # beforehand, when later rows are not known: both kernels
        if hopper.supports(q_THK, q_THY, k_JHK, v_JHV, r_JY) and (
            compiled or hopper.worth(rows, q_THK.shape[1], q_THK.device)
        ):
            tiles_I4 = _tiles(rows, hopper.QUERIES, q_THK.device)
            hopper.attend(out_THV, (q_THK, q_THY), (k_JHK, v_JHV, r_JY), rows, tiles_I4, scale)
            if not compiled:
                return
    widths = q_THK.shape[2], q_THY.shape[2], v_JHV.shape[2]
    padded = [max(16, triton.next_power_of_2(width)) for width in widths]
    cut = cut or choose(sum(padded), q_THK.element_size(), q_THK.device)
    tiles_I4 = _tiles(rows, cut.queries, q_THK.device)
    _expanded_attention[(len(tiles_I4) * q_THK.shape[1],)](
        out_THV, q_THK, q_THY, k_JHK, v_JHV, r_JY, tiles_I4, rows.kv_len_R, chosen_TW, len(tiles_I4),
        scale * LOG2E.value,
        *out_THV.stride()[:2], *q_THK.stride()[:2], *q_THY.stride()[:2], *k_JHK.stride()[:2], r_JY.stride(0),
        None if chosen_TW is None else chosen_TW.stride(0),
        KEY_DIM=widths[0], K=padded[0], ROPE=widths[1], Y=padded[1], VALUE_DIM=widths[2], V=padded[2],
        QUERIES=cut.queries, TILE=cut.keys, num_warps=cut.warps, num_stages=cut.stages,
        **launch_options(q_THK.device),
    )  # fmt: skip


def choose(width: int, itemsize: int, device: torch.device) -> Cut:
    """Return the cut for heads whose keys and values have so many numbers together, padded."""
    if itemsize > 2:  # no tensor cores
        return Cut(32, 16, warps=4, stages=1)
    if torch.version.hip is not None:
        return Cut(64, 32, warps=4, stages=1)
    if compute_capability(device)[0] != 9:  # less memory to a program, and products of single warps
        return Cut(64, 32, warps=4, stages=2)
    return Cut(128, 64 if width <= 320 else 32, warps=8, stages=3)


def _tiles(rows: LongRows, queries: int, device: torch.device) -> Tensor:
    """Return the tiles of all rows, int32 [I, 4], those that see most first: they take the longest."""
    key = "tiles", queries
    if key not in rows.derived:
        row_I, begun_I = tiles_of(rows.tokens_R, queries)
        left_I = rows.tokens_R[row_I] - begun_I
        order_I = np.argsort(left_I - rows.bound_R[row_I], kind="stable")
        tiles_I4 = np.stack([row_I, rows.first_R[row_I] + begun_I, left_I, rows.begin_R[row_I]], axis=1)
        rows.derived[key] = sent(tiles_I4[order_I], device)
    found: Tensor = rows.derived[key]
    return found


def _aot(arch: str, cut: Cut, *, masked: bool = False) -> AotKernel:
    signature = {f"{name}_ptr": "*bf16" for name in ("out", "q", "rotated", "k", "v", "r")}
    signature |= {"tiles_ptr": "*i32", "kv_len_ptr": "*i32", "num_tiles": "i32", "scale": "fp32", "stride_r": "i32:16"}
    signature |= {f"{kind}_{name}": "i32:16" for name in ("out", "q", "rotated", "kv") for kind in ("stride", "head")}
    constants: dict[str, Any] = {
        "KEY_DIM": 128, "K": 128, "ROPE": 64, "Y": 64, "VALUE_DIM": 128, "V": 128, "QUERIES": cut.queries,
        "TILE": cut.keys,
    }  # fmt: skip
    if masked:
        signature |= {"chosen_ptr": "*i64", "stride_chosen": "i32"}
    else:
        constants |= {"chosen_ptr": None, "stride_chosen": None}
    signature = {name: signature[name] for name in _expanded_attention.arg_names if name in signature}
    return AotKernel(
        _expanded_attention, signature, constants, num_warps=cut.warps, num_stages=cut.stages, archs=(arch,), hot=True,
        tensor_cores="MMA",
    )  # fmt: skip


AOT = (
    _aot("sm_90", Cut(128, 64, warps=8, stages=3)),
    _aot("sm_90", Cut(128, 64, warps=8, stages=3), masked=True),
    _aot("gfx942", Cut(64, 32, warps=4, stages=1)),
)
