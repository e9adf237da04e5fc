"""Log-probabilities and ranks of chosen tokens in plain torch. Legend: N rows, V vocabulary, L likeliest reported."""

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
    vocab, logits_NV = logits_NV.shape[1], logits_NV.float()
    if vocab % ALIGNED:
        logits_NV = functional.pad(logits_NV, (0, -vocab % ALIGNED), value=-torch.inf)
    logprobs_NV = logits_NV.log_softmax(-1)
    chosen_N1 = logprobs_NV.gather(1, token_N[:, None])
    top = logprobs_NV.topk(min(num_top, vocab), dim=-1)
    return DeviceLogprobs(chosen_N1[:, 0], (logprobs_NV > chosen_N1).sum(-1) + 1, top.indices, top.values)
