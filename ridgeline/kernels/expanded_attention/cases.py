"""Cases of attention to expanded latents, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ridgeline.kernels.expanded_attention.op import LongRows


@dataclass(frozen=True, kw_only=True)
class ExpandedCase:
    """A case for tests and benchmarks.

    rows: (new tokens, tokens in the cache after them) of each row.
    """

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 3
    key_dim: int = 24
    rope_dim: int = 16
    value_dim: int = 20


CASES = (
    ExpandedCase(rows=((5, 5),)),
    ExpandedCase(rows=((130, 130), (1, 40), (70, 200))),
    ExpandedCase(rows=((40, 300), (16, 16)), key_dim=64, rope_dim=32, value_dim=64),
    ExpandedCase(rows=((150, 150), (64, 257)), num_heads=2, key_dim=128, rope_dim=64, value_dim=128),
    ExpandedCase(rows=((33, 70),), num_heads=2, key_dim=192, rope_dim=64, value_dim=256),
)


def make_case(case: ExpandedCase, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
    """Return random arguments. Queries are views of wider heads, keys and values of one product, and between the rows
    lie keys and tokens that are NaN."""
    generator = torch.Generator().manual_seed(seed)
    tokens_R, length_R = np.array(case.rows, np.int64).T
    bound_R = length_R + 3
    rows = LongRows(
        first_R=2 + np.cumsum(tokens_R + 1) - (tokens_R + 1),
        tokens_R=tokens_R,
        begin_R=np.cumsum(bound_R) - bound_R,
        bound_R=bound_R,
        kv_len_R=torch.from_numpy(length_R).int().to(device),
    )
    tokens, keys = int(2 + (tokens_R + 1).sum()), int(bound_R.sum())
    q_THX = torch.randn(tokens, case.num_heads, case.key_dim + case.rope_dim, generator=generator)
    kv_JHX = torch.randn(keys, case.num_heads, case.key_dim + case.value_dim, generator=generator)
    r_JW = torch.randn(keys, case.rope_dim + 32, generator=generator)
    for begin, length, bound in zip(rows.begin_R, length_R, bound_R, strict=True):
        kv_JHX[begin + length : begin + bound] = r_JW[begin + length : begin + bound] = torch.nan
    q_THX, kv_JHX, r_JW = (x.to(device, dtype) for x in (q_THX, kv_JHX, r_JW))
    out_THV = torch.zeros(tokens, case.num_heads, case.value_dim, dtype=dtype, device=device)
    q_THK, q_THY = q_THX.split((case.key_dim, case.rope_dim), dim=-1)
    k_JHK, v_JHV = kv_JHX.split((case.key_dim, case.value_dim), dim=-1)
    return out_THV, q_THK, q_THY, k_JHK, v_JHV, r_JW[:, 32:], rows
