"""The rows of a step that take their token together (`Rows.guided`), as index tensors on the device.

Legend:
    R  rows of the step
    U  tokens of this rank's part of the vocabulary
    F  guided rows, each with its negative row
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature, Rows
from ridgeline.worker.step import PlannedStep, StepPart
from ridgeline.worker.upload import staging
from ridgeline.worker.vocabulary import Vocabulary


class Guidance(StepPart):
    """Lets guided rows draw from the scores of both rows of their pairs, and both take the token."""

    features = Feature.GUIDANCE

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._newest: tuple[Rows, int, Guides] | None = None  # with the arguments they were made of

    def before_sample(self, step: PlannedStep) -> None:
        rows, device = step.plan.rows, step.device
        if not rows.guided:
            return
        num_rows = (device.kept or device.inputs).num_rows
        if self._newest is None or self._newest[0] is not rows or self._newest[1] != num_rows:
            self._newest = rows, num_rows, Guides(rows, num_rows, self._device)
        guides = self._newest[2]
        device.logits_RU, device.giver_R = guides.scores(device.logits_RU, self._vocabulary), guides.giver_R


class Guides:
    """The guided pairs of a step with `num_rows` rows, padding included.

    giver_R: the row whose token each row takes.
    """

    def __init__(self, rows: Rows, num_rows: int, device: torch.device) -> None:
        count = len(rows.guided)
        row_F, negative_F, scale_F = zip(*rows.guided, strict=True)
        staged = staging(3 * count + num_rows, device)
        packed = staged.numpy()
        packed[:count], packed[count : 2 * count] = row_F, negative_F
        packed[2 * count : 3 * count] = np.array(scale_F, np.float32).view(np.int32)
        packed[3 * count :] = np.arange(num_rows)
        packed[3 * count :][list(negative_F)] = row_F
        sent = staged.to(device, non_blocking=True)
        self._row_G, self._negative_G = sent[:count].long(), sent[count : 2 * count].long()
        self._scale_G = sent[2 * count : 3 * count].view(torch.float32)
        self.giver_R = sent[3 * count :].long()

    def scores(self, logits_RU: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Return the scores that the rows draw from."""
        return vocabulary.guide(logits_RU, self._row_G, self._negative_G, self._scale_G)
