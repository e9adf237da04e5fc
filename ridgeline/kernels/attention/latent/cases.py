"""Cases of latent attention, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.kernels.attention.latent.cost import latent_attention_cost, latent_kv_cost
from ridgeline.kernels.attention.latent.op import LatentCache, LatentLevels
from ridgeline.kernels.attention.paged.cases import reference_fits, scattered, shortened
from ridgeline.kernels.base.case import Cases, OpCase, as_cases, rows_label
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.kv_cache import levels, row_scales, torch_type
from ridgeline.kernels.base.kv_format import kv_format


@dataclass(frozen=True, kw_only=True)
class LatentCase(OpCase):
    """A case for tests and benchmarks.

    rows: (new tokens, tokens in the cache after them) of each row.
    latents: how latents are cached, as `kv_cache_dtype` names it.
    """

    epsilons: ClassVar[int] = 8

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    rank: int = 32
    rope_dim: int = 16
    key_dim: int = 24
    block_size: int = 16
    interleaved: bool = True
    latents: str = "auto"

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Return random (q_THL, q_THY, cache, batch). Rows have shuffled slots, and blocks are scattered over the
        cache, whose other cells are NaN."""
        width, made = self.rank + self.rope_dim, torch.Generator(device).manual_seed(seed)
        batch, num_blocks = scattered(self.rows, self.block_size, device, torch.Generator().manual_seed(seed))
        seen_NP = torch.zeros(num_blocks, self.block_size, dtype=torch.bool, device=device)
        for slot, (_, kv) in zip(batch.slots_R.tolist(), self.rows, strict=True):
            position = torch.arange(kv, device=device)
            block = batch.block_table_SC[slot, position // self.block_size].long()
            seen_NP[block, position % self.block_size] = True
        cache_NPW = torch.randn(*seen_NP.shape, width, generator=made, device=device, dtype=dtype)
        cache_NPW[~seen_NP] = torch.nan
        tokens = sum(new for new, _ in self.rows)
        q_THW = torch.randn(tokens, self.num_heads, width, generator=made, device=device).to(dtype)
        q_THL, q_THY = (part.contiguous() for part in q_THW.split((self.rank, self.rope_dim), dim=-1))
        form = kv_format(self.latents)
        cache = as_levels(cache_NPW, self.rank, torch_type(form, dtype)) if form.quantized else cache_NPW
        return q_THL, q_THY, cache, batch

    @property
    def label(self) -> str:
        form = "" if self.latents == "auto" else f" {self.latents}"
        return f"{rows_label(self.rows)} heads {self.num_heads}x({self.rank}+{self.rope_dim}){form}"

    @property
    def levels(self) -> bool:
        return kv_format(self.latents).quantized

    @property
    def slack(self) -> int:
        return max(kv for _, kv in self.rows)

    @property
    def checked(self) -> bool:
        return reference_fits(self.rows, self.num_heads)

    def reduced(self) -> LatentCase:
        return replace(self, rows=shortened(self.rows))

    @property
    def sizes(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "rank": self.rank, "rope_dim": self.rope_dim}

    def options(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return {"scale": (self.key_dim + self.rope_dim) ** -0.5}

    def cost(self, itemsize: int) -> Cost:
        new_R, kv_R = zip(*self.rows, strict=True)
        return latent_attention_cost(new_R, kv_R, **self.sizes, itemsize=itemsize, levels=self.levels)


def as_levels(cache_NPW: Tensor, rank: int, kind: torch.dtype) -> LatentLevels:
    """Return a cache of vectors with latents of 8 bits. What is no number has a scale that is none."""
    latent_NPL, scale_NP = cache_NPW[..., :rank], row_scales(cache_NPW[..., :rank], kind)
    return LatentLevels(levels(latent_NPL, scale_NP, kind), cache_NPW[..., rank:].contiguous(), scale_NP)


class LatentKVCase(LatentCase):
    """The launch before it, which fills the cache and rotates queries."""

    epsilons: ClassVar[int] = 4
    checked = True

    @property
    def slack(self) -> int:
        return 16

    def options(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return {}

    def cost(self, itemsize: int) -> Cost:
        return latent_kv_cost(sum(new for new, _ in self.rows), **self.sizes, itemsize=itemsize, levels=self.levels)

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 1) -> tuple[Any, ...]:
        """Return random arguments: views of wider rows, and a cache whose blocks lie apart."""
        tokens, generator = sum(new for new, _ in self.rows), torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        q_THX = normal(tokens, self.num_heads, self.key_dim + self.rope_dim + 8).to(device, dtype)[..., 8:]
        latent_TW = normal(tokens, self.rank + self.rope_dim + 24).to(device, dtype)[:, 8:-16]
        angles = normal(64, self.rope_dim // 2)
        cos_sin_ZY = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
        positions_T = torch.randint(64, (tokens,), generator=generator).to(device)
        blocks = -(-tokens // self.block_size) + 2
        place_T = torch.randperm(blocks * self.block_size, generator=generator)[:tokens].to(device)
        weight_L = (1 + 0.1 * normal(self.rank)).to(device, dtype)
        cache = torch.full(
            (blocks, 2, self.block_size, self.rank + self.rope_dim), torch.nan, dtype=dtype, device=device
        )
        form = kv_format(self.latents)
        own: LatentCache = cache[:, 1]
        if form.quantized:
            parts = as_levels(cache, self.rank, torch_type(form, dtype))
            own = LatentLevels(*(part[:, 1] for part in parts))
        return q_THX, latent_TW, weight_L, 1e-6, cos_sin_ZY, positions_T, self.interleaved, own, place_T


CASES = (
    LatentCase(rows=((1, 1),)),
    LatentCase(rows=((1, 17), (1, 5), (1, 64)), interleaved=False),
    LatentCase(rows=((7, 7), (16, 33), (1, 20))),
    LatentCase(rows=((40, 100), (1, 90), (1, 1)), block_size=4),
    LatentCase(rows=((1, 300), (0, 9), (5, 257)), num_heads=6, rank=64, rope_dim=32, block_size=32),
    LatentCase(rows=((3, 150), (3, 9), (3, 300)), num_heads=16),
    LatentCase(rows=((7, 7), (16, 33), (1, 20)), latents="fp8"),
    LatentCase(rows=((1, 300), (0, 9), (5, 257)), num_heads=6, rank=48, block_size=4, latents="int8"),
    LatentCase(rows=((1, 700), (1, 1300)), num_heads=16, rank=512, rope_dim=64, key_dim=128, block_size=64),
    LatentCase(rows=((70, 130), (1, 33)), num_heads=20, rank=512, rope_dim=64, key_dim=128, block_size=64),
)


def _deepseek(heads: int, *rows: tuple[int, int], latents: str = "auto") -> LatentCase:
    return LatentCase(rows=rows, num_heads=heads, rank=512, rope_dim=64, key_dim=128, block_size=64, latents=latents)


HEADS = (16, 128)  # of DeepSeek-V3 on eight devices, and all of its heads on one
REAL = [
    _deepseek(heads, *[row] * rows)
    for heads in HEADS
    for rows, row in ((1, (1, 8192)), (64, (1, 8192)), (256, (1, 1088)), (1, (2048, 2048)))
] + [_deepseek(heads, *[(1, 8192)] * 64, latents="fp8") for heads in HEADS]
SWEPT = [
    *(_deepseek(h, *[(1, kv)] * rows) for h in HEADS for kv in (8192, 1024, 32_768) for rows in (64, 8, 1, 256)),
    *(_deepseek(h, (tokens, tokens)) for h in HEADS for tokens in (8192, 1024)),
]
KEPT = [_deepseek(h, *rows) for h in HEADS for rows in (((1, 1),) * 64, ((8192, 8192),), ((1, 1),))]

OP_CASES = {
    "latent_kv": Cases(as_cases(LatentKVCase, CASES), as_cases(LatentKVCase, REAL), as_cases(LatentKVCase, KEPT)),
    "latent_attention": Cases(CASES, REAL, SWEPT),
}
