"""The positions that a step scores if its rows verify drafts.

Legend:
    R  rows
    N  tokens of a row that are scored, at most
    P  positions that are scored
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import RowKind, Rows


class Drafts(NamedTuple):
    """The positions whose scores say which drafts are right: behind each row's last token, and behind its drafts.

    places_RN: int32, the position behind a row's token n; its first one where the row has no such token.
    num_logits_R: int32, how many positions a row has that count.
    row_P: int64, the row of a position. column_P: int64, which of the row's positions it is.
    scored_P: int64, the token in the step behind which a position lies; None if all tokens are scored in their order.
    emits: how many tokens a row may emit, at most.
    known_RN: places_RN on the host.
    """

    places_RN: Tensor
    num_logits_R: Tensor
    row_P: Tensor
    column_P: Tensor
    scored_P: Tensor | None
    emits: int
    known_RN: np.ndarray

    @staticmethod
    def of(rows: Rows, device: torch.device) -> Drafts:
        """Return the positions of these rows. The first one of every row comes first, and then the others."""
        num_logits_R = np.where(rows.kinds_R == RowKind.VERIFY, rows.num_tokens_R, rows.num_logits_R).astype(np.int64)
        last_R = np.maximum(num_logits_R, 1) - 1
        further = [(row, column) for row in last_R.nonzero()[0].tolist() for column in range(1, int(last_R[row]) + 1)]
        row_P = np.array([*range(len(rows)), *(row for row, _ in further)], np.int64)
        column_P = np.array([*[0] * len(rows), *(column for _, column in further)], np.int64)
        first_R = rows.num_tokens_R.cumsum() - 1 - last_R
        places_RN = np.repeat(np.arange(len(rows), dtype=np.int32)[:, None], int(last_R.max()) + 1, axis=1)
        places_RN[row_P, column_P] = np.arange(len(row_P))

        def sent(part: np.ndarray) -> Tensor:
            return torch.from_numpy(part).to(device)

        return Drafts(
            places_RN=sent(places_RN),
            num_logits_R=sent(num_logits_R.astype(np.int32)),
            row_P=sent(row_P),
            column_P=sent(column_P),
            scored_P=sent(first_R[row_P] + column_P),
            emits=int(rows.num_logits_R.max()),
            known_RN=places_RN,
        )

    @staticmethod
    def alike(rows: int, each: int, device: torch.device, emits: int) -> Drafts:
        """Return the positions of rows that verify as many drafts: all of their tokens, in their order. emits: how many
        tokens a row may emit, if it runs so many."""
        place_P = torch.arange(rows * each, device=device)
        column_P = place_P % each
        return Drafts(
            places_RN=place_P.view(rows, each).int(),
            num_logits_R=torch.full((rows,), each, dtype=torch.int32, device=device),
            row_P=place_P // each,
            column_P=column_P,
            scored_P=None,
            emits=min(emits, each),
            known_RN=np.arange(rows * each, dtype=np.int32).reshape(rows, each),
        )

    def drawn_at(self, path_RK: Tensor | None) -> Tensor:
        """Return the positions at which the tokens that rows emit are drawn: [R, K]. path_RK: the row's tokens behind
        which that is, if not behind one after the other."""
        return self.places_RN if path_RK is None else self.places_RN.gather(1, path_RK.clamp(min=0).long())

    def drawn(self, token_P: Tensor) -> Tensor:
        """Return the tokens drawn behind all tokens of a row: [R, N], and -1 behind those that it has not."""
        column_N = torch.arange(self.columns, device=token_P.device)
        return torch.where(column_N < self.num_logits_R[:, None], token_P[self.places_RN.long()], -1)

    @property
    def columns(self) -> int:
        return self.places_RN.shape[1]


def drafts_wanted(rows: Rows, most: int) -> int:
    """Return the number of drafts of a row that the step behind a planned one may verify, as an estimate: as many as
    this one. A row whose prompt ends gets as many as there can be, unless others go on without drafts, since then
    drafts do not pay."""
    verify_R = rows.kinds_R == RowKind.VERIFY
    if verify_R.any():
        return int(rows.num_tokens_R[verify_R].max()) - 1
    begins = (rows.kinds_R == RowKind.CHUNK) & (rows.num_logits_R > 0)
    return most if begins.any() and not (rows.kinds_R == RowKind.TOKEN).any() else 0
