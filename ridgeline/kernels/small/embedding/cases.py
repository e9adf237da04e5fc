"""Cases of embeddings, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.kernels.base.case import Cases, OpCase, as_cases
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.small.embedding.cost import embedding_cost


@dataclass(frozen=True)
class EmbeddingCase(OpCase):
    """A case for tests and benchmarks."""

    tokens: int
    rows: int
    width: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        ids_T = torch.randint(self.rows, (self.tokens,), generator=generator, device=device, dtype=torch.int32)
        return ids_T, torch.randn(self.rows, self.width, generator=generator, device=device).to(dtype)

    @property
    def label(self) -> str:
        return f"{self.tokens} of {self.rows}x{self.width}"

    def cost(self, itemsize: int) -> Cost:
        return embedding_cost(self.tokens, self.width, itemsize=itemsize)


class EmbeddingPartCase(EmbeddingCase):
    """The same of the second of three parts of the table, the last of which may be short."""

    @property
    def label(self) -> str:
        return f"{self.tokens} of a third of {self.rows}x{self.width}"

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        ids_T, weight_VM = super().inputs(dtype, device, seed)
        rows = -(-self.rows // 3)
        return ids_T, weight_VM[rows : 2 * rows], rows

    def cost(self, itemsize: int) -> Cost:
        return embedding_cost(self.tokens, self.width, itemsize=itemsize, held=1 / 3)


CASES = (
    EmbeddingCase(1, 16, 8),
    EmbeddingCase(7, 100, 64),
    EmbeddingCase(256, 50257, 768),
    EmbeddingCase(64, 128256, 4096),
)

REAL = (EmbeddingCase(8192, 128_256, 4096),)

OP_CASES = {
    "embedding": Cases(CASES[:3], REAL),
    "embedding_part": Cases(as_cases(EmbeddingPartCase, CASES[:3]), as_cases(EmbeddingPartCase, REAL)),
}
