"""Rows cut to the drafts that there are, where the host reads the device's memory: on a CPU an unneeded token
costs as much as any other.

A plan says how many drafts a row may verify. How many there are is known only on the device, since the tokens before
them are drawn by the plan before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from ridgeline.core.plan.step import RowKind, Rows, StepPlan


class Cut:
    """Cuts the rows of plans. drafts_SD: int32 [slots, drafts], -1 where there are none; those of a tree come before
    what follows them."""

    def __init__(self, drafts_SD: Tensor) -> None:
        self._drafts_SD = drafts_SD.numpy()
        self._plain: tuple[Rows, Rows] | None = None  # rows that came last without a draft, and what they became

    def plan(self, plan: StepPlan) -> StepPlan:
        """Return the plan with as many tokens in each row as there are drafts for. It must have rows that verify."""
        rows = plan.rows
        verify_R = (rows.kinds_R == RowKind.VERIFY).nonzero()[0]
        is_there_RD = self._drafts_SD[rows.slots_R[verify_R]] >= 0
        there_R = (is_there_RD * np.arange(1, is_there_RD.shape[1] + 1)).max(1)
        drafts_R = np.minimum(there_R, rows.num_tokens_R[verify_R] - 1)
        if not drafts_R.any() and self._plain is not None and self._plain[0] is rows:
            return replace(plan, rows=self._plain[1])
        num_tokens_R, kinds_R = rows.num_tokens_R.copy(), rows.kinds_R.copy()
        num_tokens_R[verify_R] = 1 + drafts_R
        kinds_R[verify_R] = np.where(drafts_R > 0, RowKind.VERIFY, RowKind.TOKEN)
        alike = bool((num_tokens_R == num_tokens_R[0]).all())
        each = int(num_tokens_R[0]) if alike and (num_tokens_R[0] == 1 or (kinds_R == RowKind.VERIFY).all()) else 0
        made = replace(
            rows,
            kinds_R=kinds_R,
            num_tokens_R=num_tokens_R,
            num_logits_R=np.minimum(rows.num_logits_R, num_tokens_R),
            tokens_each=each,
        )
        if not drafts_R.any():
            self._plain = rows, made
        return replace(plan, rows=made)
