"""The embedding: rows looked up in a table.

Legend:
    T  tokens
    V  rows of the table
    M  row width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op, on_gpu


def embedding(ids_T: Tensor, weight_VM: Tensor) -> Tensor:
    """Return the rows `ids_T` (int32 or int64, each in 0..V-1) of `weight_VM`: [T, M] in the table's dtype."""
    return weight_VM[ids_T]


def embedding_part(ids_T: Tensor, weight_VM: Tensor, first: int) -> Tensor:
    """Return what `embedding` does, of a table whose rows `first` … first + V - 1 are here: zeros for other ids."""
    own_T = ids_T - first
    held_T = (own_T >= 0) & (own_T < len(weight_VM))
    return weight_VM[own_T.where(held_T, 0)].where(held_T[:, None], 0)


@dataclass(frozen=True)
class Case:
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


CASES = (Case(1, 16, 8), Case(7, 100, 64), Case(256, 50257, 768), Case(64, 128256, 4096))

EMBEDDING = Op(
    "embedding",
    embedding,
    (
        Implementation("triton", "ridgeline.kernels.embedding.triton:embedding", on_gpu),
        Implementation("torch", "torch.nn.functional:embedding"),
    ),
)

EMBEDDING_PART = Op(
    "embedding_part",
    embedding_part,
    (Implementation("triton", "ridgeline.kernels.embedding.triton:embedding_part", on_gpu),),
)
