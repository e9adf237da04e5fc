"""One launch from the fused projection to rotated queries and a filled cache. The legend is that of op.py.

A program takes HEADS heads of one kind (queries, keys or values) of TOKENS tokens. A head is held as three pieces: the
two halves that rotate into each other, and the rest. So every access is contiguous, and no thread needs another's
value. Between the norm and the rotation values are rounded to the activations' dtype, as if by separate ops.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ARCHS, ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.kv_cache import LEVELS
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.triton_levels import largest_level, levels, magnitude, row_scale
from ridgeline.kernels.small.rotary.op import Projected

MAX_TOKENS = 4  # tokens of a program


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions_ptr", "place_ptr"])
def _rope_kv(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, place_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
    scale_ptr, saturated_ptr,
    num_tokens, eps, qkv_stride, k_stride_N, k_stride_G, k_stride_P, v_stride_N, v_stride_G, v_stride_P,
    scale_stride_N, scale_stride_G, scale_stride_P,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, Y: tl.constexpr, P: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NORM: tl.constexpr, V_NORM: tl.constexpr, V: tl.constexpr, ROTATE: tl.constexpr,
    KV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `rope_kv`.

    TOKENS, HEADS, HALF and REST are powers of two. HALF covers Y / 2; REST covers D - Y, and is 0 if that is 0.
    V: the first head of the values in the projection.
    KV: the format of the cache's levels, None for a cache of plain numbers.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // HEADS
    group = tl.program_id(1)
    q_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    k_groups: tl.constexpr = (G + HEADS - 1) // HEADS
    y: tl.constexpr = Y // 2
    is_q = group < q_groups
    is_v = group >= q_groups + k_groups
    first = tl.where(is_q, group, tl.where(is_v, group - q_groups - k_groups, group - q_groups)) * HEADS
    head = first + row % HEADS
    in_batch = token < num_tokens
    inside = in_batch & (head < tl.where(is_q, H, G))
    column = head + tl.where(is_q, 0, tl.where(is_v, V, H))
    # Offsets have the full shape even where all heads load the same values (angles, weights). Every load then gets the
    # same layout, and nothing moves between threads. The repeated loads hit the first-level cache.
    half = tl.broadcast_to(tl.arange(0, HALF)[None, :], (TOKENS * HEADS, HALF))
    in_half = inside & (half < y)
    x_ptr = qkv_ptr + token * qkv_stride + column * D
    a = tl.load(x_ptr + half, mask=in_half, other=0)
    b = tl.load(x_ptr + y + half, mask=in_half, other=0)
    if REST > 0:
        rest = Y + tl.broadcast_to(tl.arange(0, REST)[None, :], (TOKENS * HEADS, REST))
        in_rest = inside & (rest < D)
        c = tl.load(x_ptr + rest, mask=in_rest, other=0)
    else:
        c = a
    if is_v:
        if V_NORM:
            a32 = a.to(tl.float32)
            b32 = b.to(tl.float32)
            total = tl.sum(a32 * a32 + b32 * b32, 1)
            if REST > 0:
                total += tl.sum(c.to(tl.float32) * c.to(tl.float32), 1)
            scale = tl.rsqrt(total / D + eps)[:, None]
            a = (a32 * scale).to(a.dtype)
            b = (b32 * scale).to(a.dtype)
            if REST > 0:
                c = (c.to(tl.float32) * scale).to(a.dtype)
        place = tl.load(place_ptr + token, mask=in_batch, other=0)
        kept_ptr = v_cache_ptr + (place // P) * v_stride_N + (place % P) * v_stride_P + head * v_stride_G
        kept_a, kept_b, kept_c = _kept(
            a, b, c, scale_ptr, 1, saturated_ptr, place, head, inside,
            scale_stride_N, scale_stride_G, scale_stride_P, P, REST, KV,
        )  # fmt: skip
        tl.store(kept_ptr + half, kept_a, mask=in_half)
        tl.store(kept_ptr + y + half, kept_b, mask=in_half)
        if REST > 0:
            tl.store(kept_ptr + rest, kept_c, mask=in_rest)
    else:
        dtype: tl.constexpr = a.dtype
        if ROTATE:
            angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token, mask=in_batch, other=0).to(tl.int64) * Y
            cos = tl.load(angle_ptr + half, mask=half < y, other=0)
            sin = tl.load(angle_ptr + y + half, mask=half < y, other=0)
        if NORM:
            a32 = a.to(tl.float32)
            b32 = b.to(tl.float32)
            total = tl.sum(a32 * a32 + b32 * b32, 1)
            if REST > 0:
                c32 = c.to(tl.float32)
                total += tl.sum(c32 * c32, 1)
            scale = tl.rsqrt(total / D + eps)[:, None]
            weight_ptr = q_norm_ptr if is_q else k_norm_ptr
            a = (a32 * scale * tl.load(weight_ptr + half, mask=half < y, other=0)).to(dtype)
            b = (b32 * scale * tl.load(weight_ptr + y + half, mask=half < y, other=0)).to(dtype)
            if REST > 0:
                c = (c32 * scale * tl.load(weight_ptr + rest, mask=rest < D, other=0)).to(dtype)
        if ROTATE:
            a32 = a.to(tl.float32)
            b32 = b.to(tl.float32)
            a = (a32 * cos - b32 * sin).to(dtype)
            b = (b32 * cos + a32 * sin).to(dtype)
        if is_q:
            out_ptr = q_ptr + token * (H * D) + head * D
            tl.store(out_ptr + half, a, mask=in_half)
            tl.store(out_ptr + y + half, b, mask=in_half)
            if REST > 0:
                tl.store(out_ptr + rest, c, mask=in_rest)
        else:
            place = tl.load(place_ptr + token, mask=in_batch, other=0)
            kept_ptr = k_cache_ptr + (place // P) * k_stride_N + (place % P) * k_stride_P + head * k_stride_G
            kept_a, kept_b, kept_c = _kept(
                a, b, c, scale_ptr, 0, saturated_ptr, place, head, inside,
                scale_stride_N, scale_stride_G, scale_stride_P, P, REST, KV,
            )  # fmt: skip
            tl.store(kept_ptr + half, kept_a, mask=in_half)
            tl.store(kept_ptr + y + half, kept_b, mask=in_half)
            if REST > 0:
                tl.store(kept_ptr + rest, kept_c, mask=in_rest)


@triton.jit
def _kept(
    a, b, c, scale_ptr, of_pair, saturated_ptr, place, head, real, stride_N, stride_G, stride_P,
    P: tl.constexpr, REST: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Return the pieces of heads as the cache keeps them. With levels see to the scales too: a row's own are stored,
    given ones are read, and the numbers beyond their largest level counted. Without a rest `c` may be anything."""
    if REST == 0:
        c = a
    if KV is None:
        return a, b, c
    else:
        scale_ptr += (place // P) * stride_N + (place % P) * stride_P + head * stride_G + of_pair
        return _levels(a, b, c, scale_ptr, saturated_ptr, real, REST, KV)


@triton.jit
def _levels(a, b, c, scale_ptr, saturated_ptr, real, REST: tl.constexpr, KV: tl.constexpr):
    a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
    if saturated_ptr is None:
        largest = tl.maximum(tl.max(magnitude(a), 1), tl.max(magnitude(b), 1))
        largest = tl.maximum(largest, tl.max(magnitude(c), 1))
        scale = row_scale(largest, KV)[:, None]
        tl.store(scale_ptr, scale.to(tl.bfloat16), mask=real)
        return levels(a / scale, KV), levels(b / scale, KV), levels(c / scale, KV)
    else:
        scale = tl.load(scale_ptr, mask=real, other=1)
        most: tl.constexpr = largest_level(KV)
        a, b, c = a / scale, b / scale, c / scale
        beyond = tl.sum((tl.abs(a) > most).to(tl.int64)) + tl.sum((tl.abs(b) > most).to(tl.int64))
        if REST > 0:
            beyond += tl.sum((tl.abs(c) > most).to(tl.int64))
        if beyond > 0:
            tl.atomic_add(saturated_ptr, beyond, sem="relaxed")
        return levels(_within(a, most), KV), levels(_within(b, most), KV), levels(_within(c, most), KV)


@triton.jit
def _within(x, most: tl.constexpr):
    return tl.clamp(x, -most, most, propagate_nan=tl.PropagateNan.ALL)


def config(tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return (TOKENS, HEADS, warps). About one program starts per nanosecond, so with many tokens each program takes
    several."""
    heads = min(8, triton.next_power_of_2(num_heads))
    programs = tokens * (num_heads + 2 * num_kv_heads) // heads
    together = max(1, min(MAX_TOKENS, triton.next_power_of_2(programs // 512 + 1) // 2))
    return together, heads, min(4, triton.next_power_of_2(max(1, together * heads * head_dim // 128)))


def rope_kv(projected: Projected, *, fixed: bool = False) -> Tensor:
    """Compute `op.rope_kv`. fixed: the work is cut in the same way, however many tokens there are."""
    (
        qkv_TX, q_norm_D, k_norm_D, eps, cos_sin_ZY, positions_T, k_cache_NGPD, v_cache_NGPD, place_T, num_heads,
        num_kv_heads, v_norm, scales,
    ) = projected  # fmt: skip
    tokens, head_dim = qkv_TX.shape[0], k_cache_NGPD.shape[-1]
    q_THD = torch.empty(tokens, num_heads, head_dim, dtype=qkv_TX.dtype, device=qkv_TX.device)
    rotated = head_dim if cos_sin_ZY is None else cos_sin_ZY.shape[-1]
    together, heads, warps = config(1 if fixed else tokens, num_heads, num_kv_heads, head_dim)
    groups = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    kv: str | None = None
    scale_arguments: list[Tensor | int | None] = [None] * 5
    if scales is not None:
        kv, pairs_NGP2 = LEVELS[k_cache_NGPD.dtype], scales.pairs_NGP2
        scale_arguments = [pairs_NGP2, scales.saturated_1, *pairs_NGP2.stride()[:3]]
        k_cache_NGPD, v_cache_NGPD = k_cache_NGPD.view(torch.int8), v_cache_NGPD.view(torch.int8)
    _rope_kv[(triton.cdiv(tokens, together), groups)](
        qkv_TX, q_norm_D, k_norm_D, cos_sin_ZY, positions_T, place_T, q_THD, k_cache_NGPD, v_cache_NGPD,
        *scale_arguments[:2],
        tokens, eps, qkv_TX.stride(0), *k_cache_NGPD.stride()[:3], *v_cache_NGPD.stride()[:3], *scale_arguments[2:],
        H=num_heads, G=num_kv_heads, D=head_dim, Y=rotated, P=k_cache_NGPD.shape[2],
        TOKENS=together, HEADS=heads, HALF=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(head_dim - rotated) if rotated < head_dim else 0,
        NORM=q_norm_D is not None, V_NORM=v_norm, V=qkv_TX.shape[1] // head_dim - num_kv_heads,
        ROTATE=cos_sin_ZY is not None, KV=kv,
        num_warps=warps, **launch_options(qkv_TX.device),
    )  # fmt: skip
    return q_THD


rope_kv_batch_invariant = partial(rope_kv, fixed=True)


def _aot(
    tokens: int, heads: int, kv_heads: int, head_dim: int, rotated: int, *, norm: bool, rotate: bool = True,
    v_norm: bool = False, kv: str | None = None, given: bool = False, archs: tuple[str, ...] = ARCHS,
) -> AotKernel:  # fmt: skip
    pointers = ("qkv", "q_norm", "k_norm", "cos_sin", "positions", "place", "q", "k_cache", "v_cache")
    kinds = {"positions": "*i64", "place": "*i64", "cos_sin": "*fp32"}
    signature = {f"{name}_ptr": kinds.get(name, "*bf16") for name in pointers}
    strides = ["qkv_stride", *(f"{cache}_stride_{axis}" for cache in "kv" for axis in "NGP")]
    signature |= {"num_tokens": "i32", "eps": "fp32"} | dict.fromkeys(strides, "i32:16")
    if kv:
        signature |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*i8")
        signature |= {"scale_ptr": "*fp32" if given else "*bf16"}
        signature |= dict.fromkeys(("scale_stride_N", "scale_stride_G", "scale_stride_P"), "i32")
        signature |= {"saturated_ptr": "*i64"} if given else {}
    together, group, warps = config(tokens, heads, kv_heads, head_dim)
    constants = {
        "H": heads, "G": kv_heads, "D": head_dim, "Y": rotated, "P": 16, "TOKENS": together, "HEADS": group,
        "HALF": triton.next_power_of_2(rotated // 2),
        "REST": triton.next_power_of_2(head_dim - rotated) if rotated < head_dim else 0,
        "NORM": norm, "V_NORM": v_norm, "V": heads + (0 if v_norm else kv_heads), "ROTATE": rotate, "KV": kv,
    }  # fmt: skip
    absent = (() if norm else ("q_norm_ptr", "k_norm_ptr")) + (() if rotate else ("cos_sin_ptr",))
    for name in absent:
        del signature[name]
    for name in _rope_kv.arg_names:
        if name not in signature and name not in constants and name != "PDL":
            constants[name] = None
    return AotKernel(_rope_kv, signature, constants, num_warps=warps, hot=True, archs=archs)


AOT = (
    _aot(1, 32, 8, 64, 64, norm=False),
    _aot(8192, 32, 8, 64, 64, norm=False),
    _aot(1, 16, 8, 128, 128, norm=True),
    _aot(8192, 16, 8, 128, 128, norm=True),
    _aot(256, 32, 32, 80, 32, norm=False),
    _aot(1, 12, 12, 64, 64, norm=False, rotate=False),
    _aot(8192, 16, 2, 512, 512, norm=True, v_norm=True, archs=("sm_90", "gfx942")),
    _aot(8192, 32, 8, 128, 128, norm=False, kv="e4m3", archs=ONE_OF_EACH),
    _aot(256, 32, 32, 80, 32, norm=True, kv="int8", archs=ONE_OF_EACH),
    _aot(8192, 32, 8, 128, 128, norm=False, kv="e5m2", given=True, archs=ONE_OF_EACH),
)
