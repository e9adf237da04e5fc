"""Cached keys and values of 8 bits in plain torch: the levels, their scales, and how numbers become levels.

`kernels/base/kv_format.py` says what the formats are. This is what Triton's kernels are compared with, and what runs on
CPUs.

Legend:
    T  tokens
    N  cache blocks
    G  key/value heads
    P  tokens per block
    D  head width
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ridgeline.kernels.base.kv_format import KVFormat

LARGEST = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0})
LEVELS = MappingProxyType({torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"})  # in kernels
TORCH_TYPES = MappingProxyType(
    {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "bfloat16": torch.bfloat16}
)


@dataclass(frozen=True, kw_only=True)
class KVScales:
    """The scales of one layer's cached keys and values.

    pairs_NGP2: the key's and the value's by block, key head and token. Scales of the rows are bfloat16 and are set when
        rows are written. Those of a model are float32, with strides of 0 over blocks and tokens.
    saturated_1: int64, counts the numbers that were beyond the largest level. A tensor for a model's scales, None for
        those of rows.
    """

    pairs_NGP2: Tensor
    saturated_1: Tensor | None = None

    @property
    def k_NGP(self) -> Tensor:
        return self.pairs_NGP2[..., 0]

    @property
    def v_NGP(self) -> Tensor:
        return self.pairs_NGP2[..., 1]

    @property
    def words_NGP(self) -> Tensor:
        """The pairs as kernels read them: int32 with a key's bfloat16 in the low half, or a model's float32."""
        return (self.pairs_NGP2 if self.saturated_1 is not None else self.pairs_NGP2.view(torch.int32))[..., 0]


def torch_type(form: KVFormat, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a cache's elements. dtype: that of the activations."""
    return TORCH_TYPES[form.dtype] if form.dtype else dtype


def row_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of each row, the last dimension: bfloat16, without that dimension. It is rounded up, so that no
    level is beyond the largest. It is 1 where all is 0, and NaN where a value is infinite or NaN, so that every query
    that attends to that row notices."""
    largest = x.float().abs().amax(-1)
    scale = largest * (1 / LARGEST[dtype])
    up = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(largest.isfinite(), torch.where(scale == 0, 1, up), torch.nan).bfloat16()


def levels(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the levels nearest to x / scale, ties to even. `scale` lacks the last dimension."""
    y = (x.float() / scale.float()[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (y.round() if dtype == torch.int8 else y).to(dtype)


def numbers(levels: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers that levels stand for. Without a scale they are the numbers. The product is rounded once."""
    return levels.to(dtype) if scale is None else (levels.float() * scale.float()[..., None]).to(dtype)


def write(x_TGD: Tensor, cache_NGPD: Tensor, scale_NGP: Tensor, place_T: Tensor, given: bool) -> int:
    """Store each token's heads as levels at place = block * P + offset. given: the scales are set, and else they are
    set here. Returns how many numbers saturated."""
    block_T, offset_T = place_T // cache_NGPD.shape[2], place_T % cache_NGPD.shape[2]
    dtype, saturated = cache_NGPD.dtype, 0
    if given:
        scale_TG = scale_NGP[block_T, :, offset_T]
        saturated = int((x_TGD.float().abs() / scale_TG[..., None] > LARGEST[dtype]).sum())
    else:
        scale_TG = row_scales(x_TGD, dtype)
        scale_NGP[block_T, :, offset_T] = scale_TG
    cache_NGPD.view(torch.uint8)[block_T, :, offset_T] = levels(x_TGD, scale_TG, dtype).view(torch.uint8)
    return saturated


def taken(cache_NGPD: Tensor, blocks: Tensor) -> Tensor:
    """Return these blocks, for types too that torch cannot index."""
    if cache_NGPD.dtype not in LARGEST:
        return cache_NGPD[blocks]
    return cache_NGPD.view(torch.uint8)[blocks].view(cache_NGPD.dtype)


@dataclass(frozen=True)
class KernelCache:
    """One layer's cache in the form that Triton's kernels take it. Two levels are one word.

    tensors: keys, values, and the words of their scales or None.
    strides: from block to block, head to head and token to token, in words.
    scale_strides: the same of the scales, or None.
    KV: the format's name in kernels; None for plain numbers.
    least_dim: the least padded width of heads, so that products are at least 16 words wide.
    """

    tensors: tuple[Tensor, Tensor, Tensor | None]
    strides: tuple[int, ...]
    scale_strides: tuple[int | None, ...]
    KV: str | None
    least_dim: int


def for_kernels(k_cache_NGPD: Tensor, v_cache_NGPD: Tensor, scales: KVScales | None) -> KernelCache:
    """Return the cache as kernels take it. Raises ValueError if its strides are not as they must be."""
    if k_cache_NGPD.stride() != v_cache_NGPD.stride() or k_cache_NGPD.stride(3) != 1:
        raise ValueError("attention: caches of equal strides and contiguous heads expected")
    if scales is None:
        return KernelCache((k_cache_NGPD, v_cache_NGPD, None), k_cache_NGPD.stride()[:3], (None,) * 3, None, 16)
    words_NGP, k_NGPW = scales.words_NGP, k_cache_NGPD.view(torch.int16)
    tensors = k_NGPW, v_cache_NGPD.view(torch.int16), words_NGP
    return KernelCache(tensors, k_NGPW.stride()[:3], words_NGP.stride(), LEVELS[k_cache_NGPD.dtype], 32)
