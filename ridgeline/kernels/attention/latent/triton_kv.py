"""One launch that fills the cache of latents and rotates queries. The legend is that of op.py, and

    X  K + Y
    E  heads of a program

Of every token one program norms the latent and rotates the part beside it, and others rotate the queries of E heads
each. Numbers that rotate into each other are held in two tensors, so no thread needs another's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.latent.kernel_cache import for_kernels
from ridgeline.kernels.attention.latent.op import LatentCache, tokens_held
from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.triton_levels import levels, magnitude, row_scale

HEADS = 32  # of a program: 2,048 rotated numbers of DeepSeek's queries


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "place_ptr"])
def latent_kv_kernel(
    q_ptr,
    latent_ptr,
    weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    cache_ptr,
    rotated_ptr,
    scale_ptr,
    place_ptr,
    out_ptr,
    eps,
    stride_q_token,
    stride_q_head,
    stride_latent,
    stride_block,
    stride_token,
    stride_rotated,
    stride_scale,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    L: tl.constexpr,
    HALF: tl.constexpr,
    E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `latent_kv`. q begins at the rotated part of the first head.

    RANK, ROPE: L and Y without padding. HALF: half of Y, padded.
    KV: the format of levels, whose rotated parts and scales lie apart, by strides of blocks; None: latents are numbers.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y_1Y = tl.arange(0, HALF)[None, :]
    inside_1Y = y_1Y < ROPE // 2
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE
    cos_1Y = tl.load(angle_ptr + y_1Y, mask=inside_1Y, other=0)
    sin_1Y = tl.load(angle_ptr + ROPE // 2 + y_1Y, mask=inside_1Y, other=0)
    if group == 0:
        l_L = tl.arange(0, L)
        latent_ptr += token * stride_latent
        c_L = tl.load(latent_ptr + l_L, mask=l_L < RANK, other=0)
        weight_L = tl.load(weight_ptr + l_L, mask=l_L < RANK, other=0).to(tl.float32)
        wide_L = c_L.to(tl.float32)
        normed_L = wide_L * tl.rsqrt(tl.sum(wide_L * wide_L, 0) / RANK + eps) * weight_L
        normed_L = normed_L.to(c_L.dtype)  # as if the norm were a layer of its own
        place = tl.load(place_ptr + token).to(tl.int64)
        cache_ptr += place // BLOCK_SIZE * stride_block + place % BLOCK_SIZE * stride_token
        if KV is None:
            tl.store(cache_ptr + l_L, normed_L.to(cache_ptr.dtype.element_ty), mask=l_L < RANK)
            r_ptr = cache_ptr + RANK
        else:
            wide_L = normed_L.to(tl.float32)
            scale = row_scale(tl.max(magnitude(tl.where(l_L < RANK, wide_L, 0)), 0), KV)
            tl.store(cache_ptr + l_L, levels(wide_L / scale, KV), mask=l_L < RANK)
            tl.store(scale_ptr + place // BLOCK_SIZE * stride_scale + place % BLOCK_SIZE, scale.to(tl.bfloat16))
            r_ptr = rotated_ptr + place // BLOCK_SIZE * stride_rotated + place % BLOCK_SIZE * ROPE
        a_1Y, b_1Y = _rotated(latent_ptr + RANK, y_1Y, inside_1Y, cos_1Y, sin_1Y, ROPE, INTERLEAVED)
        tl.store(r_ptr + y_1Y, a_1Y.to(r_ptr.dtype.element_ty), mask=inside_1Y)
        tl.store(r_ptr + ROPE // 2 + y_1Y, b_1Y.to(r_ptr.dtype.element_ty), mask=inside_1Y)
    else:
        head_E1 = (group - 1) * E + tl.arange(0, E)[:, None]
        real_EY = (head_E1 < NUM_HEADS) & inside_1Y
        q_ptr_E1 = q_ptr + token * stride_q_token + head_E1.to(tl.int64) * stride_q_head
        a_EY, b_EY = _rotated(q_ptr_E1, y_1Y, real_EY, cos_1Y, sin_1Y, ROPE, INTERLEAVED)
        out_ptr_EY = out_ptr + (token * NUM_HEADS + head_E1) * ROPE + y_1Y
        tl.store(out_ptr_EY, a_EY, mask=real_EY)
        tl.store(out_ptr_EY + ROPE // 2, b_EY, mask=real_EY)


@triton.jit
def _rotated(ptr, y, inside, cos, sin, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the first and the second halves of rotated vectors, in their dtype."""
    if INTERLEAVED:
        a, b = tl.load(ptr + 2 * y, mask=inside, other=0), tl.load(ptr + 2 * y + 1, mask=inside, other=0)
    else:
        a, b = tl.load(ptr + y, mask=inside, other=0), tl.load(ptr + ROPE // 2 + y, mask=inside, other=0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(a.dtype)


def latent_kv(
    q_THX: Tensor,
    latent_TW: Tensor,
    weight_L: Tensor,
    eps: float,
    cos_sin_ZY: Tensor,
    positions_T: Tensor,
    interleaved: bool,
    cache: LatentCache,
    place_T: Tensor,
) -> Tensor:
    """Compute `op.latent_kv_reference`. The last dimension of every tensor is contiguous, and of levels the tokens of a
    block are too."""
    own = for_kernels(cache, torch.int8)
    if any(x.stride(-1) != 1 for x in (q_THX, latent_TW, weight_L, cos_sin_ZY)):
        raise ValueError("latent_kv: tensors must be contiguous in their last dimension")
    (tokens, heads, width), rank, rope = q_THX.shape, len(weight_L), cos_sin_ZY.shape[1]
    q_THY = torch.empty(tokens, heads, rope, dtype=q_THX.dtype, device=q_THX.device)
    if tokens == 0:
        return q_THY
    together = min(HEADS, triton.next_power_of_2(heads))
    latent_kv_kernel[(tokens, 1 + triton.cdiv(heads, together))](
        q_THX[..., width - rope :],
        latent_TW,
        weight_L,
        cos_sin_ZY,
        positions_T,
        own.latents,
        own.rotated,
        own.scale,
        place_T,
        q_THY,
        eps,
        *q_THX.stride()[:2],
        latent_TW.stride(0),
        own.block,
        own.token,
        own.rotated_block,
        own.scale_block,
        NUM_HEADS=heads,
        RANK=rank,
        ROPE=rope,
        BLOCK_SIZE=tokens_held(cache),
        L=triton.next_power_of_2(rank),
        HALF=triton.next_power_of_2(rope // 2),
        E=together,
        INTERLEAVED=interleaved,
        KV=own.KV,
        num_warps=2,
        **launch_options(q_THX.device),
    )
    return q_THY


def _aot(arch: str, kv: str | None = None) -> AotKernel:
    """Return the entry of DeepSeek-V3's 128 heads."""
    constants: dict[str, Any] = {
        "NUM_HEADS": 128, "RANK": 512, "ROPE": 64, "BLOCK_SIZE": 64, "L": 512, "HALF": 32, "E": HEADS,
        "INTERLEAVED": True, "KV": kv,
    }  # fmt: skip
    if kv is None:
        constants |= dict.fromkeys(("rotated_ptr", "scale_ptr", "stride_rotated", "stride_scale"))
    kinds = {"cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "place_ptr": "*i64", "eps": "fp32"}
    kinds |= {} if kv is None else {"cache_ptr": "*i8"}
    names = [name for name in latent_kv_kernel.arg_names if name not in constants and name != "PDL"]
    signature = {name: kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32:16") for name in names}
    return AotKernel(latent_kv_kernel, signature, constants, num_warps=2, archs=(arch,), hot=True)


AOT = (*(_aot(arch) for arch in ONE_OF_EACH), _aot("sm_90", "e4m3"))
