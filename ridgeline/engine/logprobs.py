"""The log-probabilities that each request asked for, from the arrays that a worker returns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import numpy as np

from ridgeline.core.plan.request import PromptLogprobs, TokenLogprobs
from ridgeline.core.plan.step import StepLogprobs, StepResult
from ridgeline.engine.plan_builder import LOGPROBS, SCORED, InFlight

Entries = tuple[TokenLogprobs | None, PromptLogprobs | None]
NO_ENTRIES: Entries = (None, None)


def row_entries(record: InFlight, result: StepResult, k: int) -> Iterable[Entries]:
    """Per row (its token k's entry, entries of prompt tokens, which come with token 0). NO_ENTRIES without end
    if no row asked."""
    if not record.plan.rows.features & (LOGPROBS | SCORED):
        return repeat(NO_ENTRIES)
    width, prompts = result.tokens_RK.shape[1], result.prompt_logprobs if k == 0 else {}
    return [
        (
            _entry(result.apart[row] if k == 0 else None, 0, seq.request.params.num_logprobs)
            if row in result.apart
            else _entry(result.logprobs, row * width + k, seq.request.params.num_logprobs),
            _prompt_entries(record, prompts[row], row) if row in prompts else None,
        )
        for row, seq in enumerate(record.seqs)
    ]


def _entry(logprobs: StepLogprobs | None, row: int, wanted: int | None) -> TokenLogprobs | None:
    """Entry of one row, cut to the `wanted` tokens that it reports."""
    if logprobs is None or wanted is None:
        return None
    return TokenLogprobs(
        float(logprobs.logprob_R[row]),
        int(logprobs.rank_R[row]),
        logprobs.top_ids_RL[row, :wanted].tolist(),
        logprobs.top_logprobs_RL[row, :wanted].tolist(),
    )


def _prompt_entries(record: InFlight, logprobs: StepLogprobs, row: int) -> PromptLogprobs | None:
    """Entries of the chunk's prompt tokens not sent before (a preempted request computes its prompt again)."""
    seq, plan = record.seqs[row], record.plan
    wanted_from = seq.request.params.scored_from or 1
    first = max(wanted_from, int(plan.kv_bound_R[row] - plan.rows.num_tokens_R[row]) + 1)  # prompt token of entry 0
    begin, most = max(0, wanted_from + seq.prompt_logprobs_sent - first), seq.request.params.prompt_logprobs
    count = max(0, len(logprobs.logprob_R) - begin)
    if most is None or not count:
        return None
    seq.prompt_logprobs_sent += count
    return PromptLogprobs(
        _bytes(logprobs.logprob_R[begin:], np.float32),
        _bytes(logprobs.rank_R[begin:], np.int32),
        _bytes(logprobs.top_ids_RL[begin:, :most], np.int32),
        _bytes(logprobs.top_logprobs_RL[begin:, :most], np.float32),
    )


def _bytes(values: np.ndarray, dtype: type[np.generic]) -> bytes:
    return values.astype(dtype, copy=False).tobytes()
