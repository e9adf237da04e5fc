"""Cases of attention to expanded latents, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ridgeline.kernels.attention.expanded.cost import expanded_attention_cost
from ridgeline.kernels.attention.expanded.op import LongRows
from ridgeline.kernels.attention.paged.cases import reference_fits, shortened
from ridgeline.kernels.base.case import Cases, OpCase, rows_label
from ridgeline.kernels.base.cost import Cost


@dataclass(frozen=True, kw_only=True)
class ExpandedCase(OpCase):
    """A case for tests and benchmarks.

    rows: (new tokens, tokens in the cache after them) of each row.
    """

    epsilons: ClassVar[int] = 8
    stores: ClassVar[bool] = True

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 3
    key_dim: int = 24
    rope_dim: int = 16
    value_dim: int = 20

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """Return random arguments. Queries are views of wider heads, keys and values of one product, and between the
        rows lie keys and tokens that are NaN."""
        generator = torch.Generator(device).manual_seed(seed)
        tokens_R, length_R = np.array(self.rows, np.int64).T
        bound_R = length_R + 3
        rows = LongRows(
            first_R=2 + np.cumsum(tokens_R + 1) - (tokens_R + 1),
            tokens_R=tokens_R,
            begin_R=np.cumsum(bound_R) - bound_R,
            bound_R=bound_R,
            kv_len_R=torch.from_numpy(length_R).int().to(device),
        )
        tokens, keys = int(2 + (tokens_R + 1).sum()), int(bound_R.sum())
        q_THX = torch.randn(tokens, self.num_heads, self.key_dim + self.rope_dim, generator=generator, device=device)
        kv_JHX = torch.randn(keys, self.num_heads, self.key_dim + self.value_dim, generator=generator, device=device)
        r_JW = torch.randn(keys, self.rope_dim + 32, generator=generator, device=device)
        for begin, length, bound in zip(rows.begin_R, length_R, bound_R, strict=True):
            kv_JHX[begin + length : begin + bound] = r_JW[begin + length : begin + bound] = torch.nan
        q_THX, kv_JHX, r_JW = (x.to(dtype) for x in (q_THX, kv_JHX, r_JW))
        out_THV = torch.zeros(tokens, self.num_heads, self.value_dim, dtype=dtype, device=device)
        q_THK, q_THY = q_THX.split((self.key_dim, self.rope_dim), dim=-1)
        k_JHK, v_JHV = kv_JHX.split((self.key_dim, self.value_dim), dim=-1)
        return out_THV, q_THK, q_THY, k_JHK, v_JHV, r_JW[:, 32:], rows

    @property
    def label(self) -> str:
        widths = f"({self.key_dim}+{self.rope_dim})/{self.value_dim}"
        return f"{rows_label(self.rows)} heads {self.num_heads}x{widths}"

    @property
    def slack(self) -> int:
        return max(kv for _, kv in self.rows)

    @property
    def checked(self) -> bool:
        return reference_fits(self.rows, self.num_heads)

    def reduced(self) -> ExpandedCase:
        return replace(self, rows=shortened(self.rows))

    def options(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return {"scale": (self.key_dim + self.rope_dim) ** -0.5}

    def cost(self, itemsize: int) -> Cost:
        new_R, kv_R = zip(*self.rows, strict=True)
        return expanded_attention_cost(
            new_R, kv_R, num_heads=self.num_heads, key_dim=self.key_dim, rope_dim=self.rope_dim,
            value_dim=self.value_dim, itemsize=itemsize,
        )  # fmt: skip


CASES = (
    ExpandedCase(rows=((5, 5),)),
    ExpandedCase(rows=((130, 130), (1, 40), (70, 200))),
    ExpandedCase(rows=((40, 300), (16, 16)), key_dim=64, rope_dim=32, value_dim=64),
    ExpandedCase(rows=((150, 150), (64, 257)), num_heads=2, key_dim=128, rope_dim=64, value_dim=128),
    ExpandedCase(rows=((33, 70),), num_heads=2, key_dim=192, rope_dim=64, value_dim=256),
)

REAL = [  # DeepSeek-V2-Lite, and all heads of DeepSeek-V3
    ExpandedCase(rows=((new, cached),) * rows, num_heads=h, key_dim=128, rope_dim=64, value_dim=128)
    for h, rows, new, cached in (
        (16, 1, 8192, 8192),
        (16, 1, 1024, 1024),
        (16, 8, 1024, 1024),
        (16, 1, 2048, 32_768),
        (128, 1, 2048, 2048),
    )
]

SWEPT = [
    ExpandedCase(rows=((tokens, tokens),), num_heads=128, key_dim=128, rope_dim=64, value_dim=128)
    for tokens in (8192, 1024)
]

OP_CASES = {"expanded_attention": Cases(CASES, REAL, SWEPT)}
