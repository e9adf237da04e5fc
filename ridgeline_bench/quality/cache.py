"""The cost of fewer bits for cached keys and values, by position in a long context, for keys and values apart.

It is a simulation. The model runs in float32 on whole windows, and each layer's keys (after their rotation) and values
are replaced by the numbers that a cache would hold, with one scale for each token and key head. So nothing but the
rounding is measured, for the formats that the engine has (`kernels/base/kv_cache.py`), for others, and for keys and
values apart. `eval compare` with `kv_cache_dtype` measures what the engine itself does.

Legend:
    T  tokens of a window
    G  key heads
    D  head width
    V  vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ridgeline.compression.predictions import TokenCosts, logprobs
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base import kv_cache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal

Rounding = Callable[[Tensor], Tensor]
FEW = {"int4": 7.0, "int3": 3.0, "int2": 1.0}  # formats that no kernel has, by their largest level
FORMATS = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", *FEW)
SIDES = ("both", "keys", "values")
SCALE_BITS = 16  # of the scale of a token's key, or value, of one head
MIN_EDGE = 128  # positions of the first bucket; each further one ends at twice the position


def rounding(name: str) -> Rounding:
    """Return the function that rounds [T, G, D] to numbers of a format. Levels have a bfloat16 scale, with which a
    row's largest magnitude becomes the largest level. Raise InvalidConfig for an unknown format."""
    if name not in FORMATS:
        raise InvalidConfig(f"unknown cache format {name!r}; use {', '.join(FORMATS)}.")
    if name == "bfloat16":
        return lambda x_TGD: x_TGD.bfloat16().to(x_TGD.dtype)
    return partial(_few_levels, largest=FEW[name]) if name in FEW else partial(_cached, kind=kv_cache.TORCH_TYPES[name])


def _cached(x_TGD: Tensor, kind: torch.dtype) -> Tensor:
    """Return the values as the engine's cache keeps them."""
    scale_TG = kv_cache.row_scales(x_TGD, kind)
    return kv_cache.numbers(kv_cache.levels(x_TGD, scale_TG, kind), scale_TG, x_TGD.dtype)


def _few_levels(x_TGD: Tensor, largest: float) -> Tensor:
    scale_TG1 = (x_TGD.float().abs().amax(-1, keepdim=True) / largest).bfloat16().float()
    scale_TG1 = torch.where(scale_TG1 == 0, 1.0, scale_TG1)
    return (x_TGD / scale_TG1).clamp(-largest, largest).round() * scale_TG1


def bits(name: str, head_dim: int) -> float:
    """Return the bits of one cached number, with its part of the scale."""
    if name == "bfloat16":
        return 16.0
    return (int(name.removeprefix("int")) if name in FEW else 8) + SCALE_BITS / head_dim


class RoundedCache(DenseCausal):
    """One sequence, whose keys and values are rounded."""

    def __init__(self, keys: Rounding | None, values: Rounding | None) -> None:
        super().__init__(1)
        self.keys, self.values = keys, values

    def cached(self, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        return (self.keys(k_TGD) if self.keys else k_TGD), (self.values(v_TGD) if self.values else v_TGD)


@dataclass(frozen=True)
class CacheCost:
    """The cost of one format on one side of the cache, in each bucket of positions.

    nats: mean negative log-likelihood of a token. kl: KL(without rounding ‖ with it) over the whole vocabulary.
    """

    format: str
    side: str
    bits: float
    nats: list[float]
    kl: list[float]

    @property
    def perplexity(self) -> list[float]:
        return [math.exp(each) for each in self.nats]


@dataclass(frozen=True)
class CacheCosts:
    """The costs of all formats. edges: the positions at which buckets end. baseline: nats without rounding."""

    windows: int
    edges: list[int]
    baseline: list[float]
    costs: list[CacheCost]

    @property
    def perplexity(self) -> list[float]:
        return [math.exp(each) for each in self.baseline]


def measure(
    decoder: Decoder, tokens_WT1: Tensor, formats: Sequence[str], seen: Callable[[int], object] = lambda tokens: None
) -> CacheCosts:
    """Return the cost of each format on each side. After each pass of a window `seen` gets its tokens."""
    context = tokens_WT1.shape[1] - 1
    edges = [MIN_EDGE << step for step in range(64) if MIN_EDGE << step < context] + [context]
    cases = [(name, side) for name in formats for side in SIDES]
    caches = [_cache(name, side) for name, side in cases]
    found: list[list[TokenCosts]] = [[] for _ in range(1 + len(cases))]
    for tokens_T1 in tokens_WT1:
        exact_TV = logprobs(decoder, tokens_T1)
        for index, cache in enumerate([None, *caches]):
            found_TV = exact_TV if cache is None else logprobs(decoder, tokens_T1, cache)
            found[index].append(TokenCosts.between(exact_TV, found_TV, tokens_T1))
            seen(context)
    head_dim = decoder.spec.layers[0].attention.head_dim
    costs = [
        CacheCost(name, side, bits(name, head_dim), _means(parts, edges, "nats_T"), _means(parts, edges, "kl_T"))
        for (name, side), parts in zip(cases, found[1:], strict=True)
    ]
    return CacheCosts(len(tokens_WT1), edges, _means(found[0], edges, "nats_T"), costs)


def _cache(name: str, side: str) -> RoundedCache:
    change = rounding(name)
    return RoundedCache(None if side == "values" else change, None if side == "keys" else change)


def _means(windows: Sequence[TokenCosts], edges: Sequence[int], of: str) -> list[float]:
    """Return the mean over all windows in each bucket."""
    mean_T = torch.stack([getattr(each, of) for each in windows]).double().mean(0)
    return [float(mean_T[start:end].mean()) for start, end in zip([0, *edges[:-1]], edges, strict=True)]
