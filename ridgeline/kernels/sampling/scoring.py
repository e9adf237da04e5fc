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

    logprob_R: Tensor
    rank_R: Tensor
    top_ids_RL: Tensor
    top_logprobs_RL: Tensor

    @staticmethod
    def joined(pieces: Sequence[DeviceLogprobs]) -> DeviceLogprobs:
        return DeviceLogprobs(*(torch.cat(parts) for parts in zip(*(vars(p).values() for p in pieces), strict=True)))


def score(logits_RV: Tensor, token_R: Tensor, num_top: int) -> DeviceLogprobs:
    """Log-softmax of the chosen tokens, their ranks (1 = likeliest) and the num_top likeliest."""
    vocab = logits_RV.shape[1]
    logprobs_RV = _log_softmax(logits_RV)
    chosen_R1 = logprobs_RV.gather(1, token_R[:, None])
    top = logprobs_RV.topk(min(num_top, vocab), dim=-1)
    return DeviceLogprobs(chosen_R1[:, 0], (logprobs_RV > chosen_R1).sum(-1) + 1, top.indices, top.values)


def guide(logits_RV: Tensor, row_F: Tensor, negative_F: Tensor, scale_F: Tensor) -> Tensor:
    """Scores float32 [N, V] in which those of every row_F lead away from those of its negative_F.

    scale * (c - u) + u, where c and u are the two rows' log-probabilities (Sanchez et al., arXiv 2306.17806). Other
    rows keep their logits.
    """
    c_FV, u_FV = _log_softmax(logits_RV[row_F]), _log_softmax(logits_RV[negative_F])
    guided_FV = torch.lerp(u_FV, c_FV, scale_F[:, None])  # for memory's sake: the formula, in one pass
    return logits_RV.float().index_copy(0, row_F, guided_FV[:, : logits_RV.shape[1]])


def _log_softmax(logits_RV: Tensor) -> Tensor:
    """In float32, a few columns of -inf wider where rows would begin anywhere in memory."""
    logits_RV, rest = logits_RV.float(), -logits_RV.shape[1] % ALIGNED
    if rest:
        logits_RV = functional.pad(logits_RV, (0, rest), value=-torch.inf)
    return logits_RV.log_softmax(-1)
