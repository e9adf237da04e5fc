"""Cases of embeddings, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EmbeddingCase:
    """A case for tests and benchmarks."""

    tokens: int
    rows: int
    width: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        ids_T = torch.randint(self.rows, (self.tokens,), generator=generator, device=device, dtype=torch.int32)
        return ids_T, torch.randn(self.rows, self.width, generator=generator, device=device).to(dtype)

    def part_inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, int]:
        """Return the second of three parts of the table, the last of which may be short."""
        ids_T, weight_VM = self.inputs(dtype, device, seed)
        rows = -(-self.rows // 3)
        return ids_T, weight_VM[rows : 2 * rows], rows


CASES = (
    EmbeddingCase(1, 16, 8),
    EmbeddingCase(7, 100, 64),
    EmbeddingCase(256, 50257, 768),
    EmbeddingCase(64, 128256, 4096),
)
