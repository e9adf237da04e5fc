"""Cases of latent attention, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.attention.cases import scattered
from ridgeline.kernels.attention.op import RaggedBatch


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """A case for tests and benchmarks.

    rows: (new tokens, tokens in the cache after them) of each row.
    """

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    rank: int = 32
    rope_dim: int = 16
    key_dim: int = 24
    block_size: int = 16
    interleaved: bool = True


CASES = (
    LatentCase(rows=((1, 1),)),
    LatentCase(rows=((1, 17), (1, 5), (1, 64)), interleaved=False),
    LatentCase(rows=((7, 7), (16, 33), (1, 20))),
    LatentCase(rows=((40, 100), (1, 90), (1, 1)), block_size=4),
    LatentCase(rows=((1, 300), (0, 9), (5, 257)), num_heads=6, rank=64, rope_dim=32, block_size=32),
    LatentCase(rows=((3, 150), (3, 9), (3, 300)), num_heads=16),
    LatentCase(rows=((1, 700), (1, 1300)), num_heads=16, rank=512, rope_dim=64, key_dim=128, block_size=64),
    LatentCase(rows=((70, 130), (1, 33)), num_heads=20, rank=512, rope_dim=64, key_dim=128, block_size=64),
)


def make_case(
    case: LatentCase, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, RaggedBatch]:
    """Return random (q_THL, q_THY, cache, batch). Rows have shuffled slots, and blocks are scattered over the cache,
    whose other cells are NaN."""
    generator, width = torch.Generator().manual_seed(seed), case.rank + case.rope_dim
    batch, num_blocks = scattered(case.rows, case.block_size, device, generator)
    cache_NPW = torch.full((num_blocks, case.block_size, width), torch.nan)
    for slot, (_, kv) in zip(batch.slots_R.tolist(), case.rows, strict=True):
        for index, block in enumerate(batch.block_table_SC[slot, : -(-kv // case.block_size)].tolist()):
            count = min(case.block_size, kv - index * case.block_size)
            cache_NPW[block, :count] = torch.randn(count, width, generator=generator)
    tokens = sum(new for new, _ in case.rows)
    q_THW = torch.randn(tokens, case.num_heads, width, generator=generator).to(device, dtype)
    q_THL, q_THY = (part.contiguous() for part in q_THW.split((case.rank, case.rope_dim), dim=-1))
    return q_THL, q_THY, cache_NPW.to(device, dtype), batch


def make_kv_case(case: LatentCase, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return random arguments of `latent_kv` for a case: views of wider rows, and a cache whose blocks lie apart."""
    tokens, generator = sum(new for new, _ in case.rows), torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q_THX = normal(tokens, case.num_heads, case.key_dim + case.rope_dim + 8).to(device, dtype)[..., 8:]
    latent_TW = normal(tokens, case.rank + case.rope_dim + 24).to(device, dtype)[:, 8:-16]
    angles = normal(64, case.rope_dim // 2)
    cos_sin_ZY = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions_T = torch.randint(64, (tokens,), generator=generator).to(device)
    blocks = -(-tokens // case.block_size) + 2
    place_T = torch.randperm(blocks * case.block_size, generator=generator)[:tokens].to(device)
    weight_L = (1 + 0.1 * normal(case.rank)).to(device, dtype)
    cache = torch.full((blocks, 2, case.block_size, case.rank + case.rope_dim), torch.nan, dtype=dtype, device=device)
    return q_THX, latent_TW, weight_L, 1e-6, cos_sin_ZY, positions_T, case.interleaved, cache[:, 1], place_T
