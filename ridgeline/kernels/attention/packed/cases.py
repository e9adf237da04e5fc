"""Cases of attention without a cache, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.attention.packed.op import PackedRows


@dataclass(frozen=True)
class PackedCase:
    """A case for tests and benchmarks.

    lengths: the tokens of each row.
    """

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    biased: bool = False

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, PackedRows, float, int | None, Tensor | None]:
        """Return random inputs. Heads are strided views of one fused projection, as in a model."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = sum(self.lengths), self.heads + 2 * self.kv_heads, self.head_dim
        qkv = torch.randn(shape, generator=generator, device=device).to(dtype)
        q_THD, k_TGD, v_TGD = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        distances = 2 * max(self.lengths) + 7  # of more than the rows have
        bias_HL = torch.randn(self.heads, distances, generator=generator, device=device).to(dtype)
        rows, bias = PackedRows.of(np.array(self.lengths)), bias_HL if self.biased else None
        return q_THD, k_TGD, v_TGD, rows, self.head_dim**-0.5, self.window, bias


CASES = (
    PackedCase((1,), 2, 2, 16),
    PackedCase((5, 5, 5, 1, 0, 7), 4, 2, 16),
    PackedCase((17, 64, 130), 2, 2, 32),
    PackedCase((3, 150, 64), 2, 1, 24, window=9),
    PackedCase((200,), 2, 2, 64, window=65),
    PackedCase((3, 130), 3, 3, 72),
    PackedCase((5, 70), 1, 1, 192),
    PackedCase((70, 9), 2, 1, 40, window=9),
    PackedCase((3, 300, 41), 3, 3, 24, biased=True),
    PackedCase((33, 290), 4, 2, 16, window=7, biased=True),
)
