"""Log-probabilities and ranks of chosen tokens, and guided scores, in plain torch.

Legend:
    R  rows, or positions of a prompt
    V  vocabulary
    L  likeliest tokens reported
    F  guided rows, each with its negative row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ALIGNED = 4  # rows begin at multiples of so many float32 values, or torch's order of summation would vary by row


@dataclass(frozen=True)
class DeviceLogprobs:
    """A `StepLogprobs` that is still on the device. Rows are a plan's rows, or a prompt's positions.

    total_R: the logarithm of Σ exp(logit) over the row; -inf where all logits are.
    """

    logprob_R: Tensor
    rank_R: Tensor
    top_ids_RL: Tensor
    top_logprobs_RL: Tensor
    total_R: Tensor

    @staticmethod
    def joined(pieces: Sequence[DeviceLogprobs]) -> DeviceLogprobs:
        return DeviceLogprobs(*(torch.cat(parts) for parts in zip(*(vars(p).values() for p in pieces), strict=True)))


def score(logits_RV: Tensor, token_R: Tensor, num_top: int) -> DeviceLogprobs:
    """Return the log-softmax of the chosen tokens, their ranks (1 = likeliest), and the num_top likeliest tokens."""
    vocab = logits_RV.shape[1]
    logprobs_RV = _log_softmax(logits_RV)
    chosen_R1 = logprobs_RV.gather(1, token_R[:, None])
    top = logprobs_RV[:, :vocab].topk(min(num_top, vocab), dim=-1)  # not of what fills rows up
    largest_R = logits_RV.amax(-1).float()
    # From the likeliest token, whose logit and log-probability lose the fewest digits
    total_R = torch.where(largest_R == -torch.inf, -torch.inf, largest_R - logprobs_RV.amax(-1))
    rank_R = (logprobs_RV > chosen_R1).sum(-1) + 1
    return DeviceLogprobs(chosen_R1[:, 0], rank_R, top.indices, top.values, total_R)


def guide(logits_RV: Tensor, row_F: Tensor, negative_F: Tensor, scale_F: Tensor) -> Tensor:
    """Return scores, float32 [R, V], in which those of every row_F lead away from those of its negative_F.

    They are scale * (c - u) + u, where c and u are the two rows' log-probabilities (Sanchez et al., arXiv 2306.17806).
    Other rows keep their logits.
    """
    c_FV, u_FV = _log_softmax(logits_RV[row_F]), _log_softmax(logits_RV[negative_F])
    guided_FV = torch.lerp(u_FV, c_FV, scale_F[:, None])  # the formula in one pass, which takes less memory
    return logits_RV.float().index_copy(0, row_F, guided_FV[:, : logits_RV.shape[1]])


def _log_softmax(logits_RV: Tensor) -> Tensor:
    """Return the log-softmax in float32. It has a few more columns, of -inf, if rows would otherwise begin anywhere in
    memory."""
    logits_RV, rest = logits_RV.float(), -logits_RV.shape[1] % ALIGNED
    if rest:
        logits_RV = functional.pad(logits_RV, (0, rest), value=-torch.inf)
    return logits_RV.log_softmax(-1)
