"""Cases of adapters' products, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase, generator
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.gemm.lora.cost import lora_cost
from ridgeline.kernels.gemm.lora.op import AdapterFactors, TokensByAdapter, by_adapter, tiles


@dataclass(frozen=True)
class LoraCase(OpCase):
    """A case for tests and benchmarks.

    rows: (adapter, tokens) of each row; adapter 0 is none.
    ranks: of each adapter. parts: the outputs of each fused projection. most: the most that a rank may be.
    padding: tokens behind the last row.
    beside: what lies behind an adapter's rank is finite, and the second matrices lie as panels do, so that the op of
        the linear map may add the products.
    """

    rows: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    in_width: int
    parts: tuple[int, ...]
    most: int = 16
    padding: int = 0
    beside: bool = False

    stores = True

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.rows) + self.padding

    @property
    def label(self) -> str:
        return f"{self.tokens}x{self.in_width} to {'+'.join(map(str, self.parts))} of {len(self.ranks)} adapters"

    @property
    def slack(self) -> int:
        return 8 * self.in_width

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, AdapterFactors, TokensByAdapter]:
        """Return random inputs. What lies behind an adapter's rank is no number, and must not be looked at."""
        made, most, outputs = generator(device, seed), self.most, sum(self.parts)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made, device=device)

        adapters, tokens = len(self.ranks), self.tokens
        down_APRI = normal(adapters, len(self.parts), most, self.in_width) * self.in_width**-0.5
        up_AOR = normal(adapters, outputs, most)
        for adapter, rank in enumerate(self.ranks):
            up_AOR[adapter] *= max(rank, 1) ** -0.5
            up_AOR[adapter, :, rank:] = 9 if self.beside else torch.nan
            down_APRI[adapter, :, rank:] = 9 if self.beside else torch.nan
        slots = torch.arange(len(self.rows), device=device, dtype=torch.int32)
        counts = torch.tensor([0, *(count for _, count in self.rows)], device=device)
        adapter_S = torch.tensor([adapter for adapter, _ in self.rows], device=device, dtype=torch.int32)
        if self.beside:
            up_AOR = up_AOR.new_empty(outputs, adapters, most).transpose(0, 1).copy_(up_AOR)
        factors = AdapterFactors(
            down_APRI.flatten(1, 2).to(dtype),
            up_AOR.to(dtype, memory_format=torch.preserve_format),
            torch.tensor(self.ranks, device=device, dtype=torch.int32),
            torch.tensor(tiles(self.parts), device=device, dtype=torch.int32),
            self.parts,
        )
        step = by_adapter(slots, counts.cumsum(0).int(), adapter_S, tokens, adapters, most if self.beside else 0)
        return normal(tokens, outputs).to(dtype), normal(tokens, self.in_width).to(dtype), factors, step

    def cost(self, itemsize: int) -> Cost:
        tokens = [sum(count for own, count in self.rows if own == adapter + 1) for adapter in range(len(self.ranks))]
        return lora_cost(tokens, self.ranks, self.in_width, self.parts, itemsize=itemsize)


CASES = (
    LoraCase(((1, 1),), (4,), 64, (48,)),
    LoraCase(((0, 3), (0, 1)), (8, 2), 64, (32,)),
    LoraCase(((2, 1), (0, 1), (1, 1), (2, 1)), (16, 3), 96, (64, 32, 32), padding=2),
    LoraCase(((1, 20), (0, 5), (3, 17), (2, 4), (1, 2)), (5, 0, 24), 200, (130, 20), most=32),
    LoraCase(((2, 3), (1, 90)), (70, 1), 1100, (40,), most=128),
)

LLAMA = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14_336, 14_336)), (14_336, (4096,)))  # of 8B
REAL = [
    LoraCase(rows, (16,) * adapters, inputs, parts)
    for inputs, parts in LLAMA
    for rows, adapters in (
        (((1, 1),), 1),
        (tuple((1 + row, 1) for row in range(64)), 64),
        (((1, 8192),), 1),
    )
]

OP_CASES = {"lora": Cases(CASES, REAL)}
