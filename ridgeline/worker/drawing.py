"""The end of a step that draws tokens: the network's output is scored, tokens are drawn, and the slots advance.

Legend:
    R  rows
    K  tokens that a row may emit, at most
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ridgeline.core.plan.step import Feature, StepLogprobs, StepResult
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.sampling.scoring import DeviceLogprobs
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.worker.mailbox import Mailbox
from ridgeline.worker.slots import Slots
from ridgeline.worker.step import DeviceStep, Ending, Outcome, PlannedStep
from ridgeline.worker.stopwatch import Stopwatch
from ridgeline.worker.upload import Download, mark
from ridgeline.worker.vocabulary import Vocabulary

SAMPLING = (  # the features that the sampling op handles
    Feature.RANDOM | Feature.FILTER | Feature.TYPICAL | Feature.PENALTY | Feature.BIAS | Feature.MIN_TOKENS
)


class Drawing(Ending):
    """An `Ending` in which every row that emits one draws a token."""

    draws = True

    def __init__(self, decoder: Decoder, ops: Ops, slots: Slots, vocabulary: Vocabulary, mailbox: Mailbox) -> None:
        self.decoder, self.vocabulary = decoder, vocabulary
        self._ops, self._slots, self._mailbox, self._ring = ops, slots, mailbox, decoder.mesh.cp

    def forward(self, step: DeviceStep) -> None:
        index, last = step.last_R if step.inputs.tokens_each != 1 else None, step.last
        if step.drafts is not None:
            index = step.drafts.scored_P
        if last is None:
            last = step.hidden if index is None else self._at(step.hidden, index)
        if self.adapters is not None:
            self.adapters.score(index)
        step.logits_RU = self.decoder.own_logits(last)
        step.last = None  # scored: a graph need not keep it

    def _at(self, hidden: Hidden, index_R: Tensor) -> Hidden:
        """Return rows as `Hidden.at` does, by launches that need not wait for each other."""
        residual_TM, rows_of = hidden.residual_TM, self._ops.embedding
        return Hidden(rows_of(index_R, hidden.x_TM), None if residual_TM is None else rows_of(index_R, residual_TM))

    def sample(self, step: DeviceStep) -> None:
        slots, rows = self._slots, step.kept or step.inputs
        step.outcome = outcome = Outcome.empty(rows.num_rows, rows.slots_R.device)
        token_R = self.vocabulary.sample(
            step.logits_RU, slots.sampling, rows.slots_R, step.kv_len_R, step.features & SAMPLING
        )
        # Ranks of a ring have each scored by themselves; they must never go on with unlike tokens
        if self._ring.size > 1:
            token_R = self._ring.stacked(token_R)[0]
        token_R = token_R if step.giver_R is None else token_R[step.giver_R]
        advancing = slots.advancing(rows.slots_R, step.kv_len_R, step.active_R, step.features)
        self._ops.step_advance(token_R, rows.samples_R, advancing, outcome.token_R, outcome.finish_R)

    def expected(self, step: PlannedStep) -> DrawnTokens:
        return DrawnTokens(step, self._mailbox)


class DrawnTokens:
    """The tokens of a step, on their way to the host."""

    def __init__(self, step: PlannedStep, mailbox: Mailbox) -> None:
        self._step, self._mailbox = step, mailbox
        self._logprobs = None if step.logprobs is None else _download(step.logprobs)
        self._apart = {row: _download(scores) for row, scores in step.apart.items()}
        self._prompts = {row: _download(scores) for row, scores in step.prompt_logprobs.items()}
        self._aligned = {row: Download((sum_TF,)) for row, sum_TF in step.aligned.items()}
        self._done = mark(step.device.outcome.packed.device)

    def result(self, watch: Stopwatch) -> StepResult:
        """Wait for the tokens and return them. Raises whatever error the device reports."""
        if self._done is not None:
            self._done.synchronize()
        step = self._step
        assert step.letter is not None
        packed = self._mailbox.open(step.letter)
        tokens_RK, finish_R, drafted_R = step.device.outcome.read(packed, len(step.plan.rows))
        return StepResult(
            plan_id=step.plan.id,
            tokens_RK=tokens_RK,
            emitted_R=(tokens_RK >= 0).sum(1, dtype=np.int32),
            drafted_R=drafted_R,
            finish_R=finish_R,
            logprobs=None if self._logprobs is None else _arrived(self._logprobs),
            apart={row: _arrived(scores) for row, scores in self._apart.items()},
            pooled={row: found.arrays()[0] for row, found in self._aligned.items()},
            prompt_logprobs={row: _arrived(scores) for row, scores in self._prompts.items()},
            elapsed=watch.seconds(),
            num_tokens=step.ran,
            stamps=watch.notes(),
        )


def _download(scores: DeviceLogprobs) -> Download:
    return Download((scores.rank_R, scores.top_ids_RL, scores.logprob_R, scores.top_logprobs_RL))  # the widest first


def _arrived(download: Download) -> StepLogprobs:
    rank_R, top_ids_RL, logprob_R, top_logprobs_RL = download.arrays()
    return StepLogprobs(logprob_R, rank_R, top_ids_RL, top_logprobs_RL)
