"""Attention over expanded latents in plain torch. The legend is that of op.py, and

    E  heads that attend at once

Torch's fused attention is for values as wide as keys. Of others it makes all scores of all heads at once, several
times. So rows are cut into tiles of queries, which see no keys behind their last query, and of few heads each, so that
scores do not grow with the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.expanded.op import LongRows, chosen_bits

QUERIES = 256  # of a tile
SCORES = 1 << 22  # numbers of a tile's scores, all of its heads counted


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
    """Compute `op.expanded_attention`."""
    heads = q_THK.shape[1]
    for first, count, begin, length in zip(
        rows.first_R.tolist(), rows.tokens_R.tolist(), rows.begin_R.tolist(), rows.kv_len_R.tolist(), strict=True
    ):
        if length < count:
            continue  # a stopped row
        queries, keys = slice(first, first + count), slice(begin, begin + length)
        step = max(1, min(QUERIES, SCORES // length))
        each = max(1, SCORES // (min(step, count) * length))
        for head in range(0, heads, each):
            some = slice(head, min(head + each, heads))
            r_JEY = r_JY[keys, None].expand(-1, some.stop - some.start, -1)
            k_EJX = torch.cat((k_JHK[keys, some], r_JEY), dim=-1).transpose(0, 1)
            q_EQX = torch.cat((q_THK[queries, some], q_THY[queries, some]), dim=-1).transpose(0, 1) * scale
            v_EJV = v_JHV[keys, some].transpose(0, 1)
            for start in range(0, count, step):
                tile = slice(start, min(start + step, count))
                seen = slice(length - count + tile.stop)
                hidden_QJ = None
                if chosen_TW is not None:
                    hidden_QJ = ~chosen_bits(chosen_TW[first + tile.start : first + tile.stop], seen.stop)
                found_EQV = _attended(q_EQX[:, tile], k_EJX[:, seen], v_EJV[:, seen], hidden_QJ)
                out_THV[first + tile.start : first + tile.stop, some] = found_EQV.transpose(0, 1)


def _attended(q_EQX: Tensor, k_EJX: Tensor, v_EJV: Tensor, hidden_QJ: Tensor | None) -> Tensor:
    """Attend with queries that are the last keys' own, and do not see what is hidden beside: [E, Q, V]."""
    queries = q_EQX.shape[1]
    scores_EQJ = (q_EQX @ k_EJX.mT).to(torch.promote_types(q_EQX.dtype, torch.float32))
    hidden_QQ = torch.ones(queries, queries, dtype=torch.bool, device=q_EQX.device).triu_(1)
    scores_EQJ[..., -queries:].masked_fill_(hidden_QQ, -torch.inf)
    if hidden_QJ is not None:
        scores_EQJ.masked_fill_(hidden_QJ, -torch.inf)
    return scores_EQJ.softmax(-1).to(v_EJV.dtype) @ v_EJV
