"""The log-probabilities of a step: those of the tokens that rows draw, and of prompt tokens.

Legend:
    T  tokens of the step whose scores are wanted
    R  rows
    Q  places from which tokens are reported: rows, or the positions of each
    U  tokens of this rank's part of the vocabulary; all of them, if there is one rank
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
from torch import Tensor

from ridgeline.core.plan.step import Feature, StepPlan, reports_apart
from ridgeline.kernels.sampling.scoring import DeviceLogprobs
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.worker.adapters.tables import AdapterTables
from ridgeline.worker.slots import Slots
from ridgeline.worker.step import PlannedStep, StepPart
from ridgeline.worker.upload import upload
from ridgeline.worker.vocabulary import Vocabulary

# Positions of a prompt that are scored at once. Their logits are in memory several times, in float32.
SCORED_AT_ONCE = 256


class TokenLogprobs(StepPart):
    """The log-probabilities of drawn tokens. They are taken from the scores before masks."""

    features = Feature.LOGPROBS

    def __init__(self, slots: Slots, vocabulary: Vocabulary) -> None:
        self._slots, self._vocabulary = slots, vocabulary

    def before_sample(self, step: PlannedStep) -> None:
        reported_RU = step.device.logits_RU
        if step.device.drafts is None:
            reported_RU = reported_RU[: len(step.plan.rows)]
        step.reported_RU = reported_RU.clone() if step.masks else reported_RU

    def after_sample(self, step: PlannedStep) -> None:
        plan, drafts, outcome, reported_RU = step.plan, step.device.drafts, step.device.outcome, step.reported_RU
        assert reported_RU is not None
        token_RK = outcome.token_RK[: len(plan.rows)].long().clamp(min=0)
        places_Q = None if drafts is None else drafts.drawn_at(outcome.path_RK)[: len(plan.rows)].flatten()
        scored_QU = reported_RU if places_Q is None else reported_RU[places_Q]
        step.logprobs = self._vocabulary.score(scored_QU, token_RK.flatten(), plan.rows.num_logprobs)
        if plan.rows.features & Feature.APART:
            step.apart = self._score_apart(plan, reported_RU, token_RK[:, 0])

    def _score_apart(self, plan: StepPlan, scores_RU: Tensor, token_R: Tensor) -> dict[int, DeviceLogprobs]:
        """Score the rows whose logprobs have no place beside those of others, one by one."""
        found = {}
        for row in plan.rows.num_logits_R.nonzero()[0].tolist():
            params = self._slots.forms[int(plan.rows.slots_R[row])].params
            if not reports_apart(params):
                continue
            one_1U, token_1 = scores_RU[row : row + 1], token_R[row : row + 1]
            found[row] = self._vocabulary.score(
                one_1U, token_1, (params.logprobs or 0) if params.logprob_token_ids is None else 0
            )
            if params.logprob_token_ids is not None:
                ids_1L = upload(np.array([params.logprob_token_ids], np.int64), self._slots.device)
                named = self._vocabulary.logprobs_of(one_1U, ids_1L)
                found[row] = replace(found[row], top_ids_RL=ids_1L, top_logprobs_RL=named)
        return found


class PromptLogprobs(StepPart):
    """The log-probabilities of prompt tokens that the positions of a chunk predict. adapters: those that rows may
    have."""

    features = Feature.PROMPT_LOGPROBS
    adapters: AdapterTables | None = None

    def __init__(self, decoder: Decoder, slots: Slots, vocabulary: Vocabulary) -> None:
        self._decoder, self._slots, self._vocabulary = decoder, slots, vocabulary

    def after_forward(self, step: PlannedStep) -> None:
        for span in step.plan.spans:
            if (scores := self._score(step.plan, span.row, step.device.hidden)) is not None:
                step.prompt_logprobs[span.row] = scores

    def _score(self, plan: StepPlan, row: int, hidden: Hidden) -> DeviceLogprobs | None:
        """Score the prompt tokens of a row. The last known token predicts none of them."""
        form = self._slots.forms[int(plan.rows.slots_R[row])]
        count = int(plan.rows.num_tokens_R[row])
        end = int(plan.kv_bound_R[row]) + 1
        first = max(end - count, form.params.scored_from or end)
        next_ids = form.prompt[first:end]
        if form.params.prompt_logprobs is None or not next_ids:
            return None
        start = int(plan.rows.num_tokens_R[:row].sum()) + first - (end - count)
        pieces = []
        for offset in range(0, len(next_ids), SCORED_AT_ONCE):
            ids = next_ids[offset : offset + SCORED_AT_ONCE]
            some = hidden.at(slice(start + offset, start + offset + len(ids)))
            with nullcontext() if self.adapters is None else self.adapters.scoring([form.adapter] * len(ids)):
                logits_TU = self._decoder.own_logits(some)
            token_T = upload(np.array(ids, np.int64), self._slots.device)
            pieces.append(self._vocabulary.score(logits_TU, token_T, form.params.prompt_logprobs))
        return DeviceLogprobs.joined(pieces)
