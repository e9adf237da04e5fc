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

from ridgeline.core.plan.step import Rows
from ridgeline.worker.upload import staging
from ridgeline.worker.vocabulary import Vocabulary


class Guides:
    """The guided pairs of a step with `num_rows` rows, padding included."""

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
        self._giver_R = sent[3 * count :].long()

    def scores(self, logits_RU: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Return the scores that the rows draw from."""
        return vocabulary.guide(logits_RU, self._row_G, self._negative_G, self._scale_G)

    def tokens(self, token_R: Tensor) -> Tensor:
        """Return the drawn tokens, with a pair's token in both of its rows."""
        return token_R[self._giver_R]
