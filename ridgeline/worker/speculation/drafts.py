"""The drafts that a step verifies.

Legend:
    R  rows
    K  tokens that a row may emit, at most
    P  positions that are scored: the first one of every row, then the others
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan import Rows


class Drafts(NamedTuple):
    """The drafts of a step's rows, and the positions whose scores say which of them are right.

    token_RK: int64; column k holds the draft behind which a row's token k is drawn, for k from 1 on.
    num_logits_R: how many of its positions a row has scored, int64. Behind the last token, and behind each draft.
    row_P, column_P: the row of a position, and which of the row's scored positions it is, int64.
    scored_P: its token in the step, int64.
    """

    token_RK: Tensor
    num_logits_R: Tensor
    row_P: Tensor
    column_P: Tensor
    scored_P: Tensor

    @staticmethod
    def of(rows: Rows, drafts: Mapping[int, np.ndarray]) -> Drafts:
        """Return the drafts of rows on a CPU. drafts: row → its drafts."""
        num_logits_R = rows.num_logits_R.astype(np.int64)
        token_RK = np.full((len(rows), int(num_logits_R.max())), -1, np.int64)
        for row, tokens in drafts.items():
            token_RK[row, 1 : 1 + len(tokens)] = tokens
        further = [(row, column) for row in drafts for column in range(1, int(num_logits_R[row]))]
        row_P = np.array([*range(len(rows)), *(row for row, _ in further)], np.int64)
        column_P = np.array([*[0] * len(rows), *(column for _, column in further)], np.int64)
        end_R = rows.num_tokens_R.cumsum()
        first_R = end_R - np.maximum(num_logits_R, 1)
        scored_P = first_R[row_P] + column_P
        return Drafts(*(torch.from_numpy(x) for x in (token_RK, num_logits_R, row_P, column_P, scored_P)))

    @property
    def places_RK(self) -> Tensor:
        """Return which position a row's token k was drawn at; its first one where it has no such token."""
        first_R1 = torch.arange(len(self.token_RK))[:, None]
        places_RK = first_R1.repeat(1, self.columns)
        places_RK[self.row_P, self.column_P] = torch.arange(len(self.row_P))
        return places_RK

    @property
    def columns(self) -> int:
        return self.token_RK.shape[1]
