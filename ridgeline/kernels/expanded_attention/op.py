"""Causal attention of a step's long rows over keys and values that were made of latents (DeepSeek-V2, arXiv
2405.04434).

The keys and values of a row's cached tokens lie packed behind those of the row before. A key's rotated part belongs to
all heads.

Legend:
    T  tokens of the step
    R  long rows
    J  cached tokens of all long rows
    H  heads
    K  width of the part of queries and keys that is not rotated
    Y  width of the rotated part
    V  width of a value
    Q  queries of one row
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op, on_cpu, on_gpu


@dataclass(frozen=True, kw_only=True)
class LongRows:
    """The long rows of a step, as the host knows them.

    first_R: the row's first token among those of the step.
    tokens_R: its tokens in the step, which are its last positions.
    begin_R: its first key among those of all long rows.
    bound_R: the memory that its keys have there, which is at least their number.
    kv_len_R: the number of its keys, on the device. It may be smaller than tokens_R if the row was stopped; the row's
        outputs are then undefined.
    derived: what an implementation has made of this for the step's other layers, by a key of its own.
    """

    first_R: np.ndarray
    tokens_R: np.ndarray
    begin_R: np.ndarray
    bound_R: np.ndarray
    kv_len_R: Tensor
    derived: dict[Any, Any] = field(default_factory=dict)


def expanded_attention(
    out_THV: Tensor,
    q_THK: Tensor,
    q_THY: Tensor,
    k_JHK: Tensor,
    v_JHV: Tensor,
    r_JY: Tensor,
    rows: LongRows,
    *,
    scale: float,
) -> None:
    """Store softmax(scale · (q k + q' r) + mask) v of every query of the rows into `out_THV`, computed in float32.
    Outputs of other tokens are left alone.

    A query sees the row's keys up to its own position. A head's numbers lie side by side; tokens and heads may lie
    apart. Keys that no query sees never influence the result, whatever they hold.
    """
    lengths = rows.kv_len_R.tolist()
    for row, (first, count, begin) in enumerate(
        zip(rows.first_R.tolist(), rows.tokens_R.tolist(), rows.begin_R.tolist(), strict=True)
    ):
        queries, keys = slice(first, first + count), slice(begin, begin + lengths[row])
        q_HQX = torch.cat((q_THK[queries], q_THY[queries]), dim=-1).float().transpose(0, 1)
        k_HJK, v_HJV = (x[keys].float().transpose(0, 1) for x in (k_JHK, v_JHV))
        scores_HQJ = q_HQX[..., : k_HJK.shape[2]] @ k_HJK.mT + q_HQX[..., k_HJK.shape[2] :] @ r_JY[keys].float().T
        hidden_QJ = torch.ones(scores_HQJ.shape[1:], dtype=torch.bool, device=q_THK.device)
        hidden_QJ = hidden_QJ.triu(1 + lengths[row] - count)
        weights_HQJ = (scale * scores_HQJ).masked_fill(hidden_QJ, -torch.inf).softmax(-1)
        out_THV[queries] = (weights_HQJ @ v_HJV).transpose(0, 1).to(out_THV.dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case for tests and benchmarks.

    rows: (new tokens, tokens in the cache after them) of each row.
    """

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 3
    key_dim: int = 24
    rope_dim: int = 16
    value_dim: int = 20


CASES = (
    Case(rows=((5, 5),)),
    Case(rows=((130, 130), (1, 40), (70, 200))),
    Case(rows=((40, 300), (16, 16)), key_dim=64, rope_dim=32, value_dim=64),
    Case(rows=((150, 150), (64, 257)), num_heads=2, key_dim=128, rope_dim=64, value_dim=128),
    Case(rows=((33, 70),), num_heads=2, key_dim=192, rope_dim=64, value_dim=256),
)


def make_case(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
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


EXPANDED_ATTENTION = Op(
    "expanded_attention",
    expanded_attention,
    (
        Implementation("triton", "ridgeline.kernels.expanded_attention.triton:expanded_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.expanded_attention.torch_ops:expanded_attention", on_cpu),
    ),
)
