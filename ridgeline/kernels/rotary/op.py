"""Rotary position embedding, halves rotated (NeoX order). Su et al., arXiv 2104.09864.

Legend: T tokens, H query heads, G key/value heads, D head width, P rows of the table, R rotated width (R <= D).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Op


def rope(q_THD: Tensor, k_TGD: Tensor, cos_sin_PR: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R of each head by its token's position; new tensors of the same shapes and dtypes.

    cos_sin_PR: float32, row p = cos of the R/2 angles at position p, then their sines. positions_T: integers in 0..P-1.
    """
    cos_T1r, sin_T1r = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q_THD, cos_T1r, sin_T1r), _rotate(k_TGD, cos_T1r, sin_T1r)


def _rotate(x_THD: Tensor, cos_T1r: Tensor, sin_T1r: Tensor) -> Tensor:
    half = cos_T1r.shape[-1]
    first, second, rest = x_THD.split((half, half, x_THD.shape[-1] - 2 * half), dim=-1)
    a, b = first.float(), second.float()
    rotated = (a * cos_T1r - b * sin_T1r, b * cos_T1r + a * sin_T1r)
    return torch.cat((*(part.to(x_THD.dtype) for part in rotated), rest), dim=-1)


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    table_rows: int = 128

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys are strided views of one fused projection, as in the decoder."""
        generator = torch.Generator(device).manual_seed(seed)
        all_heads = self.heads + 2 * self.kv_heads
        qkv = torch.randn(self.tokens, all_heads, self.head_dim, generator=generator, device=device).to(dtype)
        q_THD, k_TGD, _ = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        positions_T = torch.randint(self.table_rows, (self.tokens,), generator=generator, device=device)
        angles = torch.rand(self.table_rows, self.rotary_dim // 2, generator=generator, device=device) * 6.3
        return q_THD, k_TGD, torch.cat((angles.cos(), angles.sin()), dim=-1), positions_T


CASES = (
    Case(1, 4, 4, 16, 16),
    Case(7, 8, 2, 64, 64),
    Case(5, 4, 2, 64, 32),
    Case(64, 32, 8, 128, 128, table_rows=4096),
)

ROPE = Op("rope", rope)
