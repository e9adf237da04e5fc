"""1. naive: three launches, with every score in memory.

Idea      The definition, with a library's products: scores = q kᵀ, their softmax, and the product with values. It is
          part 1 of the NumPy notes. Scores and weights are matrices in memory, so each goes there and comes back.
FLOPs     4 T² D for each head. Libraries multiply whole matrices, so causal order saves nothing.
Bytes     8 T² for each head: scores in 16 bits are written and read, and so are weights.
Limit     Memory. An H200 computes 206 FLOPs in the time of one byte; heads of 128 have 512 for each score's 8 bytes.
Next      A softmax in one pass, so that no score has to wait in memory for its row's maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BHTD: Tensor) -> None:
    """Write the causal attention of whole sequences. All inputs are contiguous; H is a multiple of G."""
    (batch, heads, length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
    unseen_TT = torch.full((length, length), -torch.inf, dtype=q_BHTD.dtype, device=q_BHTD.device).triu(1)
    k, v = (x.repeat_interleave(heads // groups, 1).flatten(0, 1) for x in (k_BGTD, v_BGTD))
    scores = torch.baddbmm(unseen_TT, q_BHTD.flatten(0, 1), k.mT, alpha=size**-0.5)
    torch.bmm(scores.softmax(-1), v, out=out_BHTD.view(batch * heads, length, size))
