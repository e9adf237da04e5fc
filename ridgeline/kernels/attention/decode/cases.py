"""Cases of attention of one token, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.cases import CACHES, LLAMA, AttentionCase
from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.base.case import Cases, OpCase, rows_label
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.rotary.cost import write_kv_cost
from ridgeline.kernels.small.rotary.op import Projected

REDUCED = 80  # rows, for which kernels are compiled as for more
MOST_TOKENS = 1 << 21  # of a cache that is made, masked and copied in a GPU's memory


@dataclass(frozen=True, kw_only=True)
class DecodeCase(OpCase):
    """A case for tests and benchmarks. Fields that are not listed mean the same as those of attention/paged/op.py.

    lengths: cached tokens by row, the new one included.
    rotary_dim: None for no rotation.
    norm_float32: the norms' weights are float32, whatever the activations are.
    behind: the most by which a token's position is below the number of its keys (pictures take few positions).
    """

    epsilons: ClassVar[int] = 16  # for the heads and for the attention

    lengths: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int | None = 16
    norm: bool = False
    norm_float32: bool = False
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    v_norm: bool = False
    values_are_keys: bool = False
    cache: torch.dtype | None = None
    distances: int = 0
    behind: int = 0

    @property
    def attention(self) -> AttentionCase:
        """The case of `paged_attention` that is a part of this one."""
        return AttentionCase(
            rows=tuple((1, length) for length in self.lengths),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            window=self.window,
            sinks=self.sinks,
            softcap=self.softcap,
            alibi=self.alibi,
            cache=self.cache,
            distances=self.distances,
        )

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0, unseen: float = 0.0
    ) -> tuple[Projected, RaggedBatch]:
        """Return the op's positional arguments. The caches are views of one allocation, and hold `unseen` wherever no
        row may look. That includes a newest key's place, since it has not been written."""
        q_THD, k_cache, v_cache, batch = self.attention.inputs(dtype, device, seed)
        generator = torch.Generator().manual_seed(seed + 1)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        norm_dtype = torch.float32 if self.norm_float32 else dtype
        positions_T = torch.tensor(self.lengths) - 1
        seen = torch.zeros(k_cache.shape[0], self.block_size, dtype=torch.bool)
        places = []
        for slot, position in zip(batch.slots_R.tolist(), positions_T.tolist(), strict=True):
            p = torch.arange(max(0, position + 1 - (self.window or position + 1)), position)
            seen[batch.block_table_SC[slot].cpu()[p // self.block_size].long(), p % self.block_size] = True
            places.append(int(batch.block_table_SC[slot, position // self.block_size]) * self.block_size)
        kind = dtype if self.cache is None else torch.uint8  # in which 0 is the level 0 of all
        units = torch.stack((k_cache.view(kind), v_cache.view(kind)), 1)
        units = units.masked_fill_(~seen.to(device)[:, None, None, :, None], unseen).view(k_cache.dtype)
        table = None
        if self.rotary_dim is not None:
            angles = torch.rand(max(self.lengths), self.rotary_dim // 2, generator=generator) * 6.3
            table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
        projected = Projected(
            normal(
                len(q_THD), (self.num_heads + (1 if self.values_are_keys else 2) * self.num_kv_heads) * self.head_dim
            ),
            normal(self.head_dim, dtype=norm_dtype) if self.norm else None,
            normal(self.head_dim, dtype=norm_dtype) if self.norm else None,
            1e-6,
            table,
            (positions_T - self.behind).clamp(min=0).to(device),
            units[:, 0],
            units[:, 1],
            torch.tensor(places, device=device) + (positions_T % self.block_size).to(device),
            self.num_heads,
            self.num_kv_heads,
            self.v_norm,
            None if self.cache is None else self.attention.scales(device),
        )
        return projected, replace(batch, kv_len_R=batch.kv_len_R.int())

    def options(self, dtype: torch.dtype, device: torch.device) -> dict:
        """Return the op's keyword arguments."""
        return replace(self.attention, cache=None).options(dtype, device)

    @property
    def form(self) -> str:
        return self.attention.form

    def reduced(self) -> DecodeCase:
        return replace(self, lengths=tuple(kv for _, kv in self.attention.reduced().rows)[:REDUCED])

    @property
    def label(self) -> str:
        window = f" window {self.window}" if self.window else ""
        shape = f"heads {self.num_heads}/{self.num_kv_heads}x{self.head_dim}{window}" + (" norm" if self.norm else "")
        return f"{rows_label(self.lengths)} {shape} {self.form}".rstrip()

    @property
    def slack(self) -> int:
        return max(self.lengths)

    def cost(self, itemsize: int) -> Cost:
        """Return the cost of reading the projection, of keeping keys and values, and of the attention. Angles and
        weights are left out."""
        rows, heads, dim = len(self.lengths), self.num_kv_heads, self.head_dim
        kept = write_kv_cost(rows, heads, dim, itemsize=itemsize, kv_itemsize=self.attention.kv_itemsize(itemsize))
        read = self.attention.cost(itemsize)
        return Cost(kept.bytes + read.bytes, read.flops)


CASES = (
    DecodeCase(lengths=(1,)),
    DecodeCase(lengths=(17, 5, 64, 65), norm=True),
    DecodeCase(lengths=(300, 1, 129, 200), num_heads=6, head_dim=64, rotary_dim=32),
    DecodeCase(lengths=(2, 70, 200), num_heads=3, num_kv_heads=1, head_dim=80, rotary_dim=None, block_size=4),
    DecodeCase(lengths=(700, 33), num_heads=2, num_kv_heads=1, head_dim=96, rotary_dim=48, norm=True, block_size=256),
    DecodeCase(lengths=(300, 17, 90), window=16, num_heads=8, num_kv_heads=8),
    DecodeCase(lengths=(1000, 450), window=300, num_heads=4, head_dim=128, rotary_dim=128, block_size=64),
    DecodeCase(lengths=(200, 33, 1), norm=True, norm_float32=True, head_dim=32, rotary_dim=16),
    DecodeCase(lengths=(300, 1, 77), num_heads=6, num_kv_heads=6, rotary_dim=None, alibi=True),
    DecodeCase(lengths=(400, 17), num_heads=6, head_dim=48, window=90, alibi=True),
    DecodeCase(lengths=(300, 1, 77), num_heads=6, head_dim=20, rotary_dim=None, distances=33),
    DecodeCase(lengths=(300, 1, 77), window=20, num_heads=8, sinks=True),
    DecodeCase(lengths=(300, 1, 77, 64), norm=True, behind=60),
    DecodeCase(lengths=(600, 33), num_heads=8, norm=True, v_norm=True, values_are_keys=True),
)


WIDE_CASES = (  # cases that the plain implementation need not support
    DecodeCase(lengths=(257, 1, 900), num_heads=8, num_kv_heads=1, softcap=5.0, sinks=True, norm=True),
    DecodeCase(lengths=(2000,), num_heads=3, num_kv_heads=1, window=900, sinks=True, block_size=1),
    DecodeCase(lengths=(90, 520), num_heads=2, num_kv_heads=1, head_dim=256, rotary_dim=256, block_size=64),
    DecodeCase(lengths=(900, 64), num_heads=8, num_kv_heads=1, softcap=5.0, sinks=True, alibi=True, block_size=64),
    DecodeCase(
        lengths=(400, 33), num_heads=16, head_dim=512, rotary_dim=512, norm=True, v_norm=True, values_are_keys=True
    ),
    DecodeCase(lengths=(400, 33), window=90, head_dim=256, rotary_dim=256, norm=True, v_norm=True),
)

REAL = [
    DecodeCase(lengths=(cached,) * rows, num_heads=h, num_kv_heads=8, head_dim=128, rotary_dim=128, norm=h == 16)
    for h, rows, cached in (
        (32, 1, 192),
        (32, 1, 8192),
        (32, 8, 1024),
        (32, 64, 1024),
        (16, 1, 192),
        (16, 64, 1024),
    )
]

SWEPT = [
    *(
        DecodeCase(lengths=(length,) * rows, rotary_dim=128, cache=cache, **LLAMA)
        for cache in CACHES
        for length in (1088, 8192, 32_768)
        for rows in (1, 8, 64, 256)
        if rows * length <= MOST_TOKENS
    ),
    *(DecodeCase(lengths=(700, 90, 1), rotary_dim=128, cache=cache, **LLAMA) for cache in CACHES[1:]),
]

OP_CASES = {"decode_attention": Cases(CASES, REAL, SWEPT)}
