"""Cases of rotations, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.rotary.cost import rope_cost, write_kv_cost
from ridgeline.kernels.small.rotary.op import Projected


@dataclass(frozen=True)
class RopeCase(OpCase):
    """A case of `rope` for tests and benchmarks."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    table_rows: int = 128

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random inputs. Queries and keys are strided views of one fused projection, as in the decoder."""
        generator = torch.Generator(device).manual_seed(seed)
        all_heads = self.heads + 2 * self.kv_heads
        qkv = torch.randn(self.tokens, all_heads, self.head_dim, generator=generator, device=device).to(dtype)
        q_THD, k_TGD, _ = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        positions_T = torch.randint(self.table_rows, (self.tokens,), generator=generator, device=device)
        angles = torch.rand(self.table_rows, self.rotary_dim // 2, generator=generator, device=device) * 6.3
        return q_THD, k_TGD, torch.cat((angles.cos(), angles.sin()), dim=-1), positions_T

    @property
    def label(self) -> str:
        return f"{self.tokens}x({self.heads}+{self.kv_heads})x{self.head_dim}"

    def cost(self, itemsize: int) -> Cost:
        return rope_cost(self.tokens, self.heads, self.kv_heads, self.head_dim, self.rotary_dim, itemsize=itemsize)


CASES = (
    RopeCase(1, 4, 4, 16, 16),
    RopeCase(7, 8, 2, 64, 64),
    RopeCase(5, 4, 2, 64, 32),
    RopeCase(64, 32, 8, 128, 128, table_rows=4096),
    RopeCase(33, 3, 3, 72, 72),
)


@dataclass(frozen=True, kw_only=True)
class RopeKVCase(OpCase):
    """A case of `rope_kv` for tests and benchmarks. The caches are strided views of one allocation, as the worker keeps
    them.

    rotary_dim: None for no rotation.
    norm_float32: the norms' weights are float32, whatever the activations are.
    """

    epsilons: ClassVar[int] = 8

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int | None
    norm: bool = False
    norm_float32: bool = False
    v_norm: bool = False
    values_are_keys: bool = False
    block_size: int = 16
    table_rows: int = 128

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Projected]:
        """Return random inputs. Caches are full of NaN, and the first token of every four is padding that points into
        the null block."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        norm_dtype = torch.float32 if self.norm_float32 else dtype
        num_blocks = 2 + -(-self.tokens // self.block_size)
        cache = torch.full(
            (num_blocks, 2, self.kv_heads, self.block_size, self.head_dim), torch.nan, dtype=dtype, device=device
        )
        order = torch.randperm((num_blocks - 1) * self.block_size, generator=generator, device=device)
        place_T = self.block_size + order[: self.tokens]
        padding_T = torch.arange(self.tokens, device=device) % 4 == 0
        place_T = torch.where(padding_T & (self.tokens > 1), torch.zeros_like(place_T), place_T)
        table = None
        if self.rotary_dim is not None:
            angles = torch.rand(self.table_rows, self.rotary_dim // 2, generator=generator, device=device) * 6.3
            table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        projected = Projected(
            normal(self.tokens, (self.heads + (1 if self.values_are_keys else 2) * self.kv_heads) * self.head_dim),
            normal(self.head_dim, dtype=norm_dtype) if self.norm else None,
            normal(self.head_dim, dtype=norm_dtype) if self.norm else None,
            1e-6,
            table,
            torch.randint(self.table_rows, (self.tokens,), generator=generator, device=device),
            cache[:, 0],
            cache[:, 1],
            place_T,
            self.heads,
            self.kv_heads,
            self.v_norm,
        )
        return (projected,)

    @property
    def label(self) -> str:
        return f"{self.tokens}x({self.heads}+{self.kv_heads})x{self.head_dim}" + (" norm" if self.norm else "")

    def cost(self, itemsize: int) -> Cost:
        """Return the cost of reading the projection and of writing queries and cache entries. Rope alone would read
        some of them again, which is not counted."""
        queries = 2.0 * self.tokens * self.heads * self.head_dim * itemsize
        kept = write_kv_cost(self.tokens, self.kv_heads, self.head_dim, itemsize=itemsize, kv_itemsize=itemsize)
        return Cost(queries + kept.bytes + 8.0 * self.tokens, 0.0)


FUSED_CASES = (
    RopeKVCase(tokens=1, heads=4, kv_heads=4, head_dim=16, rotary_dim=16),
    RopeKVCase(tokens=5, heads=12, kv_heads=12, head_dim=64, rotary_dim=None),
    RopeKVCase(tokens=7, heads=14, kv_heads=2, head_dim=64, rotary_dim=64, block_size=4),
    RopeKVCase(tokens=5, heads=4, kv_heads=2, head_dim=80, rotary_dim=32),
    RopeKVCase(tokens=6, heads=6, kv_heads=1, head_dim=96, rotary_dim=96),
    RopeKVCase(tokens=9, heads=16, kv_heads=8, head_dim=128, rotary_dim=128, norm=True),
    RopeKVCase(tokens=3, heads=5, kv_heads=3, head_dim=48, rotary_dim=24, norm=True),
    RopeKVCase(tokens=7, heads=6, kv_heads=2, head_dim=64, rotary_dim=32, norm=True, norm_float32=True),
    RopeKVCase(tokens=7, heads=6, kv_heads=2, head_dim=32, rotary_dim=16, norm=True, v_norm=True),
    RopeKVCase(
        tokens=5, heads=8, kv_heads=1, head_dim=512, rotary_dim=512, norm=True, v_norm=True, values_are_keys=True
    ),
    RopeKVCase(tokens=301, heads=14, kv_heads=2, head_dim=16, rotary_dim=8),
    RopeKVCase(tokens=33, heads=32, kv_heads=8, head_dim=64, rotary_dim=64, table_rows=4096),
)

OP_CASES = {
    "rope": Cases(CASES, [RopeCase(t, 32, 8, 128, 128, table_rows=32_768) for t in (1, 64, 256, 8192)]),
    "rope_kv": Cases(
        FUSED_CASES,
        [
            RopeKVCase(tokens=t, heads=h, kv_heads=8, head_dim=128, rotary_dim=128, norm=h == 16, table_rows=32_768)
            for h in (32, 16)
            for t in (1, 64, 256, 8192)
        ],
    ),
}
