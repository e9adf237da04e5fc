"""Cases of attention, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ridgeline.kernels.attention.paged.cost import attention_cost
from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.kernels.base.case import Cases, OpCase, rows_label
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.kv_cache import KVScales

MOST_SCORES = 1 << 31  # 8 GB in float32
SHORT = 1024  # tokens, of whole tiles and blocks
Rows = tuple[tuple[int, int], ...]
FORMS = {None: "", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
LEVEL, LARGEST = 32, 120  # of an 8-bit cache: the number that stands for one, and the largest


@dataclass(frozen=True, kw_only=True)
class AttentionCase(OpCase):
    """A case for tests and benchmarks.

    rows: (new tokens, tokens in the cache after them) of each row.
    cache: the dtype of a cache of 8 bits, with random numbers and scales; None: that of the activations.
    captured: the host does not know the rows, as in a captured graph.
    distances: of a bias by distance; 0: there is none.
    pictures: (row, first, number) of tokens that see each other both ways, counted from the row's first new one.
    """

    epsilons: ClassVar[int] = 8  # two products and the output; the weights sum to one, so the length does not matter

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    cache: torch.dtype | None = None
    captured: bool = False
    distances: int = 0
    pictures: tuple[tuple[int, int, int], ...] = ()

    def options(self, dtype: torch.dtype, device: torch.device, seed: int = 1) -> dict:
        """Return the keyword arguments of a self."""
        scales = {} if self.cache is None else {"scales": self.scales(device)}
        return {"softmax": self.softmax(dtype, device, seed), **scales}

    def softmax(self, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Softmax:
        """Return the treatment of scores, with random sinks."""
        slopes_H = (2.0 ** -torch.arange(1, self.num_heads + 1)).to(device) if self.alibi else None
        sinks_H = torch.randn(self.num_heads, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
        sinks = sinks_H if self.sinks else None
        bias_HL = None
        if self.distances:
            generator = torch.Generator().manual_seed(seed + 1)
            bias_HL = torch.randn(self.num_heads, self.distances, generator=generator).to(device)
        return Softmax(self.head_dim**-0.5, self.softcap, sinks, slopes_H, self.window, bias_HL)

    def scales(self, device: torch.device) -> KVScales:
        """Return random scales, such that numbers are of order one."""
        shape = (self.num_blocks, self.num_kv_heads, self.block_size, 2)
        pairs = torch.rand(shape, generator=torch.Generator(device).manual_seed(2), device=device)
        return KVScales(pairs_NGP2=((0.5 + pairs) / LEVEL).to(torch.bfloat16))

    @property
    def num_blocks(self) -> int:
        return 1 + len(self.rows) * max(-(-kv // self.block_size) for _, kv in self.rows)

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple:
        """Return random (q_THD, k_cache, v_cache, batch) for a self. Rows have shuffled slots, and blocks are scattered
        over the cache."""
        generator = torch.Generator().manual_seed(seed)
        batch, num_blocks = scattered(self.rows, self.block_size, device, generator)
        if self.captured:
            batch = replace(batch, num_tokens_R=None, kv_bound_R=None, tokens_each=0)
        if self.pictures:
            batch = replace(batch, ahead_T=torch.from_numpy(self.ahead).to(device))
        made = generator if device.type == "cpu" else torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made, device=device)

        q_THD = normal(sum(new for new, _ in self.rows), self.num_heads, self.head_dim).to(dtype)
        shape = (num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        k, v = (self._cached(normal(*shape), dtype) for _ in "kv")
        return q_THD, k, v, batch

    def _cached(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype) if self.cache is None else x.mul_(LEVEL).clamp_(-LARGEST, LARGEST).to(self.cache)

    @property
    def ahead(self) -> np.ndarray:
        """The number of keys behind its own that each query sees, int32 [T]."""
        counts = [new for new, _ in self.rows]
        ahead_T = np.zeros(sum(counts), np.int32)
        for row, first, number in self.pictures:
            start = sum(counts[:row]) + first
            ahead_T[start : start + number] = np.arange(number)[::-1]
        return ahead_T

    @property
    def form(self) -> str:
        return FORMS[self.cache]

    @property
    def label(self) -> str:
        window = f" window {self.window}" if self.window else ""
        shape = f"heads {self.num_heads}/{self.num_kv_heads}x{self.head_dim}{window}"
        return f"{rows_label(self.rows)} {shape} {self.form}".rstrip()

    @property
    def slack(self) -> int:
        return max(kv for _, kv in self.rows)

    @property
    def checked(self) -> bool:
        return reference_fits(self.rows, self.num_heads)

    def reduced(self) -> AttentionCase:
        return replace(self, rows=shortened(self.rows))

    def kv_itemsize(self, itemsize: float) -> float:
        """Return the bytes of a cached number, with its share of the scales."""
        return itemsize if self.cache is None else 1 + 2 / self.head_dim

    def cost(self, itemsize: int) -> Cost:
        new_R, kv_R = zip(*self.rows, strict=True)
        return attention_cost(
            new_R, kv_R, itemsize=itemsize, kv_itemsize=self.kv_itemsize(itemsize), num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, window=self.window,
        )  # fmt: skip


CASES = (
    AttentionCase(rows=((1, 1),)),
    AttentionCase(rows=((1, 17), (1, 5), (1, 64))),
    AttentionCase(rows=((7, 7), (16, 33), (1, 20))),
    AttentionCase(rows=((40, 100), (1, 90), (1, 1)), block_size=4),
    AttentionCase(rows=((40, 100), (1, 90), (33, 33)), window=12),
    AttentionCase(rows=((1, 70), (1, 13), (1, 200)), window=16, num_heads=8, num_kv_heads=8),
    AttentionCase(rows=((5, 300), (1, 257)), num_heads=8, num_kv_heads=1, head_dim=64, block_size=32),
    AttentionCase(rows=((20, 90), (1, 33), (5, 5)), softcap=3.0, window=30),
    AttentionCase(rows=((1, 130), (40, 75), (1, 1), (3, 200)), num_heads=6, num_kv_heads=6, alibi=True),
    AttentionCase(rows=((1, 150), (33, 90), (3, 200)), num_heads=6, alibi=True, window=40),
    AttentionCase(rows=((1, 150), (33, 90), (3, 200)), num_heads=6, head_dim=20, distances=21),
    AttentionCase(rows=((1, 150), (1, 9)), num_heads=3, num_kv_heads=3, distances=2),
    AttentionCase(rows=((3, 150), (3, 9), (3, 300)), num_heads=8),
    AttentionCase(rows=((4, 100), (4, 4)), window=30),
    AttentionCase(rows=((1, 70), (40, 75), (1, 300), (3, 9)), window=20, num_heads=8, sinks=True),
    AttentionCase(rows=((40, 100), (1, 90), (5, 30)), block_size=4, pictures=((0, 3, 20), (0, 24, 9), (2, 1, 3))),
    AttentionCase(rows=((1, 150), (33, 90), (6, 6), (5, 40)), window=12, pictures=((1, 0, 33), (2, 1, 4), (3, 0, 5))),
    AttentionCase(rows=((16, 33), (16, 16)), num_heads=8, pictures=((0, 0, 16), (1, 4, 9))),
)


WIDE_CASES = (  # cases that the plain implementation need not support, and more shapes of heads and blocks
    AttentionCase(rows=((1, 700), (1, 1), (1, 1300)), num_heads=6, head_dim=80),
    AttentionCase(rows=((1, 2000),), num_heads=3, num_kv_heads=1, head_dim=96, block_size=1, window=900, sinks=True),
    AttentionCase(rows=((3, 600), (0, 9), (4, 4), (1, 300)), num_heads=8, head_dim=32, softcap=5.0, sinks=True),
    AttentionCase(rows=((150, 290), (0, 1), (2, 515), (33, 700)), num_heads=8, window=70, sinks=True, block_size=2),
    AttentionCase(rows=((70, 70), (200, 401)), num_heads=2, head_dim=128, softcap=20.0, block_size=256),
    AttentionCase(rows=((1, 520), (17, 300)), num_heads=2, num_kv_heads=1, head_dim=256, block_size=64, window=300),
    AttentionCase(rows=((1, 900), (70, 401), (0, 3)), num_heads=8, num_kv_heads=1, alibi=True, softcap=5.0, sinks=True),
    AttentionCase(rows=((1, 520), (17, 90)), num_heads=8, num_kv_heads=1, head_dim=512, block_size=64),
    AttentionCase(rows=((150, 290), (1, 70)), num_heads=8, window=70, sinks=True, softcap=9.0, pictures=((0, 9, 140),)),
    AttentionCase(rows=((1, 1300), (1, 700)), num_heads=3, num_kv_heads=1, head_dim=80, alibi=True, block_size=256),
)


def reference_fits(rows: Sequence[tuple[int, int]], num_heads: int) -> bool:
    """Return True if a GPU has the memory for all scores of the longest row, which the reference holds some times."""
    return max(new * kv for new, kv in rows) * num_heads <= MOST_SCORES


def shortened(rows: Rows) -> Rows:
    """Return rows for which kernels are compiled alike, and that need less memory."""
    return tuple((min(new, SHORT), min(kv, SHORT)) for new, kv in rows) if max(rows)[1] > 2 * SHORT else rows


def scattered(
    rows: Sequence[tuple[int, int]], block_size: int, device: torch.device, generator: torch.Generator
) -> tuple[RaggedBatch, int]:
    """Return a batch of rows of (new tokens, tokens in the cache after them) with shuffled slots, whose blocks are
    scattered over a cache, and the blocks of this cache."""
    num_rows, columns = len(rows), max(-(-kv // block_size) for _, kv in rows)
    table_SC = torch.zeros(num_rows, columns, dtype=torch.int32)
    order = 1 + torch.randperm(num_rows * columns, generator=generator).to(torch.int32)
    slots = torch.randperm(num_rows, generator=generator)
    for row, (_, kv) in enumerate(rows):
        used = -(-kv // block_size)
        table_SC[slots[row], :used] = order[row * columns : row * columns + used]
    counts, lengths = [new for new, _ in rows], [kv for _, kv in rows]
    batch = RaggedBatch(
        slots_R=slots.to(device),
        block_table_SC=table_SC.to(device),
        start_R1=torch.tensor([0, *np.cumsum(counts).tolist()], device=device),
        kv_len_R=torch.tensor(lengths, device=device),
        tokens_each=counts[0] if len(set(counts)) == 1 else 0,
        num_tokens_R=np.array(counts, np.int32),
        kv_bound_R=np.array(lengths, np.int32),
    )
    return batch, 1 + num_rows * columns


REAL = [
    AttentionCase(rows=((new, cached),) * rows, num_heads=32, num_kv_heads=8, head_dim=128)
    for rows, new, cached in ((1, 1, 8192), (8, 1, 8192), (64, 1, 1024), (256, 1, 1088), (1, 2048, 2048))
]

CACHES = (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
LLAMA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 64}
SWEPT = [
    *(AttentionCase(rows=((8192, 8192),), cache=cache, **LLAMA) for cache in CACHES),
    *(AttentionCase(rows=((n, 32_768),), cache=cache, captured=True, **LLAMA) for cache in CACHES for n in (2048, 256)),
    *(AttentionCase(rows=((300, 700), (1, 90), (60, 60)), cache=cache, **LLAMA) for cache in CACHES[1:]),
]

OP_CASES = {"paged_attention": Cases(CASES, REAL, SWEPT)}
