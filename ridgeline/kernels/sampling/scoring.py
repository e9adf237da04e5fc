"""Log-probabilities and ranks of chosen tokens, and what guidance makes of log-probabilities, in plain torch.

Legend: N rows, V vocabulary, L likeliest reported, G guided rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ALIGNED = 4  # float32 values at whose multiples rows begin, or torch's order of summation varies from row to row


@dataclass(frozen=True)
class DeviceLogprobs:
    """As `StepLogprobs`, still on the device. Rows are a plan's rows, or a prompt's positions."""

    logprob_N: Tensor
    rank_N: Tensor
    top_ids_NL: Tensor
    top_logprobs_NL: Tensor

    @staticmethod
    def joined(pieces: Sequence[DeviceLogprobs]) -> DeviceLogprobs:
        return DeviceLogprobs(*(torch.cat(parts) for parts in zip(*(vars(p).values() for p in pieces), strict=True)))


def score(logits_NV: Tensor, token_N: Tensor, num_top: int) -> DeviceLogprobs:
    """Log-softmax of the chosen tokens, their ranks (1 = likeliest) and the num_top likeliest."""
    vocab = logits_NV.shape[1]
    logprobs_NV = _log_softmax(logits_NV)
    chosen_N1 = logprobs_NV.gather(1, token_N[:, None])
    top = logprobs_NV.topk(min(num_top, vocab), dim=-1)
    return DeviceLogprobs(chosen_N1[:, 0], (logprobs_NV > chosen_N1).sum(-1) + 1, top.indices, top.values)


def guide(logits_NV: Tensor, row_G: Tensor, negative_G: Tensor, scale_G: Tensor) -> Tensor:
    """Scores float32 [N, V] in which those of every row_G lead away from those of its negative_G.

    scale * (c - u) + u, where c and u are the two rows' log-probabilities (Sanchez et al., arXiv 2306.17806). Other
    rows keep their logits.
    """
    c_GV, u_GV = _log_softmax(logits_NV[row_G]), _log_softmax(logits_NV[negative_G])
    guided_GV = torch.lerp(u_GV, c_GV, scale_G[:, None])  # for memory's sake: the formula, in one pass
    return logits_NV.float().index_copy(0, row_G, guided_GV[:, : logits_NV.shape[1]])


def _log_softmax(logits_NV: Tensor) -> Tensor:
    """In float32, a few columns of -inf wider where rows would begin anywhere in memory."""
    logits_NV, rest = logits_NV.float(), -logits_NV.shape[1] % ALIGNED
    if rest:
        logits_NV = functional.pad(logits_NV, (0, rest), value=-torch.inf)
    return logits_NV.log_softmax(-1)
