"""From the arrays a worker returns to what a request asked to be told."""

from __future__ import annotations

from ridgeline.core.plan import StepLogprobs
from ridgeline.core.request import TokenLogprobs


def token_entry(logprobs: StepLogprobs, row: int, wanted: int | None) -> TokenLogprobs | None:
    """Entry of one row, cut to the `wanted` likeliest tokens (None: the request asked for none)."""
    if wanted is None:
        return None
    return TokenLogprobs(
        float(logprobs.logprob_R[row]),
        int(logprobs.rank_R[row]),
        logprobs.top_ids_RL[row, :wanted].tolist(),
        logprobs.top_logprobs_RL[row, :wanted].tolist(),
    )


def prompt_entries(logprobs: StepLogprobs, wanted: int | None) -> list[TokenLogprobs]:
    """Entries of the prompt positions a chunk covered."""
    entries = (token_entry(logprobs, i, wanted) for i in range(len(logprobs.logprob_R)))
    return [entry for entry in entries if entry is not None]
