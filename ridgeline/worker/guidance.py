"""Rows that take their token together (`Rows.guided`), as the device wants them.

Legend: R rows of the step, V vocabulary, G guided rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan import Rows
from ridgeline.kernels.sampling.scoring import guide
from ridgeline.worker.upload import staging


class Guides:
    """The guided pairs of a step with `num_rows` rows, padding included."""

    def __init__(self, rows: Rows, num_rows: int, device: torch.device) -> None:
        count = len(rows.guided)
        row_G, negative_G, scale_G = zip(*rows.guided, strict=True)
        staged = staging(3 * count + num_rows, device)
        packed = staged.numpy()
        packed[:count], packed[count : 2 * count] = row_G, negative_G
        packed[2 * count : 3 * count] = np.array(scale_G, np.float32).view(np.int32)
        packed[3 * count :] = np.arange(num_rows)
        packed[3 * count :][list(negative_G)] = row_G
        sent = staged.to(device, non_blocking=True)
        self._row_G, self._negative_G = sent[:count].long(), sent[count : 2 * count].long()
        self._scale_G = sent[2 * count : 3 * count].view(torch.float32)
        self._giver_R = sent[3 * count :].long()

    def scores(self, logits_RV: Tensor) -> Tensor:
        """What the rows draw from."""
        return guide(logits_RV, self._row_G, self._negative_G, self._scale_G)

    def tokens(self, token_R: Tensor) -> Tensor:
        """What was drawn, a pair's token in both its rows."""
        return token_R[self._giver_R]
