"""Attention over expanded latents in plain torch: a row at a time, by torch's fused attention. The legend is that of
op.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from ridgeline.kernels.expanded_attention.op import LongRows


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
    """Compute `op.expanded_attention`."""
    heads = q_THK.shape[1]
    for first, count, begin, length in zip(
        rows.first_R.tolist(), rows.tokens_R.tolist(), rows.begin_R.tolist(), rows.kv_len_R.tolist(), strict=True
    ):
        if length < count:
            continue  # a stopped row
        queries, keys = slice(first, first + count), slice(begin, begin + length)
        q_HQX = torch.cat((q_THK[queries], q_THY[queries]), dim=-1).transpose(0, 1)
        r_JHY = r_JY[keys, None].expand(-1, heads, -1)
        k_HJX = torch.cat((k_JHK[keys], r_JHY), dim=-1).transpose(0, 1)
        bias = causal_lower_right(count, length)
        found_HQV = F.scaled_dot_product_attention(
            q_HQX[None], k_HJX[None], v_JHV[keys].transpose(0, 1)[None], attn_mask=bias, scale=scale
        )
        out_THV[queries] = found_HQV[0].transpose(0, 1)
