"""The rules of recognisers' outputs on the device, before log-probabilities are taken: these are of what may come, as
in Whisper's own decoding.

Legend:
    R  rows of the step
    U  tokens of the vocabulary
    K  rows with times
"""

from __future__ import annotations

import torch

from ridgeline.core.plan.step import Feature
from ridgeline.kernels.ops import Ops
from ridgeline.worker.masks import Masks
from ridgeline.worker.slots import Slots
from ridgeline.worker.step import PlannedStep, StepPart
from ridgeline.worker.vocabulary import Vocabulary


class SpeechScores(StepPart):
    """Applies the masks of recognisers' rows, and then the rule that needs their scores: where all times together are
    likelier than each token of text, a time comes."""

    features = Feature.SPEECH

    def __init__(self, ops: Ops, slots: Slots, vocabulary: Vocabulary) -> None:
        self._ops, self._slots, self._vocabulary = ops, slots, vocabulary

    def before_sample(self, step: PlannedStep) -> None:
        rows = step.plan.rows
        rules = {row: self._slots.forms[int(rows.slots_R[row])].speech for row in step.masks}
        bits = {row: step.masks[row] for row, each in rules.items() if each is not None}
        if not bits:
            return
        logits_RU, device = step.device.logits_RU, self._slots.device
        masks = Masks.of(self._vocabulary.own_bits(bits), self._vocabulary.each, device)
        self._ops.mask_logits(logits_RU, masks.bits_UW, masks.row_U)
        begins = {each.timestamps for each in rules.values() if each is not None and each.timestamps}
        for begin in begins:
            timed = [row for row, each in rules.items() if each is not None and each.timestamps == begin]
            rows_K = torch.tensor(timed, device=device)
            times_K = logits_RU[rows_K, begin : self._vocabulary.size].float().logsumexp(1)
            text_K = logits_RU[rows_K, :begin].float().amax(1)
            added_K = torch.zeros_like(text_K).masked_fill_(times_K > text_K, float("-inf"))
            logits_RU[:, :begin].index_add_(0, rows_K, added_K[:, None].expand(-1, begin).to(logits_RU.dtype))
