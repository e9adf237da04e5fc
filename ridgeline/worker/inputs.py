"""What the host says about a step: which slots run, how many tokens each, and the tokens the device cannot know.

It is one int32 array and one copy. While the set of rows does not change a decode step needs none at all: inputs and
positions come from the slots.

Legend: T tokens of the step, R rows. Both may be padded, so that a captured graph serves many steps: a padding row
belongs to a slot that is always stopped. It brings as many tokens as every other row where all bring the same, else
none.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan import PrefixGroup, Rows, StepPlan
from ridgeline.worker.upload import staging


class Shape(NamedTuple):
    """Size of a step, padding included. each: tokens that every row brings, or 0: rows differ (`Rows.tokens_each`)."""

    rows: int
    tokens: int
    each: int


class StepInputs:
    """slots_R; start_R1 (first token of each row, then their number); samples_R (whether the row emits a
    token); override_T (the span's token, or -1: the slot's last token). prefix_4R: which rows share their first blocks,
    as kernels/attention/cascade.py has it; None without `cascade`.

    plan: what it holds at first; None: padding only. Where `shape` says how many tokens each row brings, every plan's
    rows must.
    """

    def __init__(
        self,
        shape: Shape,
        dummy_slot: int,
        device: torch.device,
        plan: StepPlan | None = None,
        *,
        cascade: bool = False,
    ) -> None:
        num_rows, num_tokens, self.tokens_each = shape
        self.num_rows, self.num_tokens, self._dummy_slot = num_rows, num_tokens, dummy_slot
        self._sizes = (num_rows, num_rows + 1, -(-num_rows // 4), num_tokens, 4 * num_rows if cascade else 0)
        self._packed = torch.empty(sum(self._sizes), dtype=torch.int32, device=device)
        self.slots_R, self.start_R1, samples, self.override_T, prefix = self._packed.split(self._sizes)
        self.prefix_4R = prefix.view(4, num_rows) if cascade else None
        self.samples_R = samples.view(torch.bool)[:num_rows]
        self._rows: Rows | None = None  # those it holds, if it holds no spans
        self._load(plan)

    def holds(self, plan: StepPlan) -> bool:
        """Whether it already says what the plan says."""
        return not plan.spans and plan.rows is self._rows

    def load(self, plan: StepPlan) -> None:
        """Take the plan's rows and spans over, unless they are here already."""
        if not self.holds(plan):
            self._load(plan)

    def _load(self, plan: StepPlan | None) -> None:
        staged = staging(len(self._packed), self._packed.device)
        self._pack(plan, staged.numpy())
        self._packed.copy_(staged, non_blocking=True)
        self._rows = None if plan is None or plan.spans else plan.rows

    def _pack(self, plan: StepPlan | None, packed: np.ndarray) -> None:
        packed.fill(0)
        starts = (0, *accumulate(self._sizes))
        slots_R, start_R1, samples, override_T, prefix = (packed[start:end] for start, end in pairwise(starts))
        rows = 0 if plan is None else len(plan.rows)
        slots_R[rows:] = self._dummy_slot
        override_T.fill(-1)
        if plan is not None:
            self._check(plan.rows)
            slots_R[:rows] = plan.rows.slots_R
            np.cumsum(plan.rows.num_tokens_R, out=start_R1[1 : rows + 1])
            samples.view(np.bool_)[:rows] = plan.rows.num_logits_R > 0
            for row, token_ids in plan.spans:
                override_T[start_R1[row] : start_R1[row] + len(token_ids)] = token_ids
            if len(prefix):
                _write_prefixes(plan.rows.prefixes, prefix.reshape(4, self.num_rows))
        each = self.tokens_each
        start_R1[rows:] = np.arange(rows * each, self.num_tokens + 1, each) if each else start_R1[rows]

    def _check(self, rows: Rows) -> None:
        if self.tokens_each not in (0, rows.tokens_each):
            raise ContractViolation(
                f"a step of {self.tokens_each} tokens a row was given rows of {rows.tokens_each or 'unlike numbers'}."
            )
        if rows.tokens_each != 1 and rows.num_logits_R.max() > 1:
            raise ContractViolation(
                f"a row may emit {rows.num_logits_R.max()} tokens; this worker verifies no drafts, so a row emits one."
            )


def _write_prefixes(groups: tuple[PrefixGroup, ...], prefix_4R: np.ndarray) -> None:
    """Rank the rows of groups one after another; see kernels/attention/cascade.py."""
    first = 0
    for rows, tokens in groups:
        end = first + len(rows)
        prefix_4R[0, rows] = np.arange(first, end)
        prefix_4R[1:, rows] = np.array([first, end, tokens])[:, None]
        first = end
