"""A cache of latents in the form that Triton's kernels take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.attention.latent.op import LatentCache
from ridgeline.kernels.base.kv_cache import LEVELS


class KernelCache(NamedTuple):
    """A cache of latents as kernels take it.

    latents: with the rotated parts behind them, or their levels alone, in the type that kernels read or write.
    rotated, scale: these parts of levels; None: latents are numbers.
    block, token: strides of latents. rotated_block, scale_block: strides of the others' blocks, or None; their tokens
        are dense.
    KV: the name of the levels' format; None: latents are numbers.
    """

    latents: Tensor
    rotated: Tensor | None
    scale: Tensor | None
    block: int
    token: int
    rotated_block: int | None
    scale_block: int | None
    KV: str | None


def for_kernels(cache: LatentCache, levels_as: torch.dtype) -> KernelCache:
    """Return the cache as kernels take it. levels_as: int8, or int16 for pairs of levels. Raises ValueError if a
    dimension is not dense that must be."""
    if isinstance(cache, Tensor):
        block, token, one = cache.stride()
        if one != 1:
            raise ValueError("latent attention: vectors must be contiguous in their last dimension")
        return KernelCache(cache, None, None, block, token, None, None, None)
    latent_NPL, rotated_NPY, scale_NP = cache
    words = latent_NPL.view(levels_as)
    (block, token, _), width = words.stride(), rotated_NPY.shape[2]
    if token != words.shape[2] or rotated_NPY.stride()[1:] != (width, 1) or scale_NP.stride(1) != 1:
        raise ValueError("latent attention: the tokens of a block of levels must be dense")
    return KernelCache(
        words, rotated_NPY, scale_NP, block, token, rotated_NPY.stride(0), scale_NP.stride(0), LEVELS[latent_NPL.dtype]
    )
