"""Causal attention of a step's long rows over keys and values that were made of latents (DeepSeek-V2, arXiv
2405.04434).

The keys and values of a row's cached tokens lie packed behind those of the row before. A key's rotated part belongs to
all heads.

Legend:
    T  tokens of the step
    R  long rows
    J  cached tokens of all long rows, or of one
    W  words of 64 bits
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

from ridgeline.kernels.base.op import Implementation, Op, on_cpu, on_gpu


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
    chosen_TW: Tensor | None = None,
) -> None:
    """Store softmax(scale · (q k + q' r) + mask) v of every query of the rows into `out_THV`, computed in float32.
    Outputs of other tokens are left alone.

    A query sees the row's keys up to its own position. A head's numbers lie side by side; tokens and heads may lie
    apart. Keys that no query sees never influence the result, whatever they hold.

    chosen_TW: of these keys it attends to those whose bits are set, at least one: 64 of the row's keys a word, int64;
        None: to all.
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
        if chosen_TW is not None:
            hidden_QJ |= ~chosen_bits(chosen_TW[queries], lengths[row])
        weights_HQJ = (scale * scores_HQJ).masked_fill(hidden_QJ, -torch.inf).softmax(-1)
        out_THV[queries] = (weights_HQJ @ v_HJV).transpose(0, 1).to(out_THV.dtype)


def chosen_bits(chosen_TW: Tensor, keys: int) -> Tensor:
    """Return the bits of words of 64, for the first keys of a row: bool [T, J]."""
    key_J = torch.arange(keys, device=chosen_TW.device)
    return (chosen_TW[:, key_J // 64] >> (key_J % 64)) & 1 != 0


EXPANDED_ATTENTION = Op(
    "expanded_attention",
    expanded_attention,
    (
        Implementation("triton", "ridgeline.kernels.attention.expanded.triton:expanded_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.attention.expanded.torch_ops:expanded_attention", on_cpu),
    ),
    matrix=True,
)
