"""The host's inputs of a step: the slots that run, how many tokens each runs, and the tokens that the device cannot
know.

They are one int32 array, which is copied to the device at once. While the set of rows does not change, a decode step
needs no copy at all: its tokens and positions come from the slots.

Rows and tokens may be padded, so that a captured graph serves many steps. A padding row names a slot that is always
stopped. It brings as many tokens as every other row if all rows bring the same number, otherwise none.

Legend:
    R  rows, padding included
    T  tokens of the step, padding included
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.step import PrefixGroup, Rows, StepPlan
from ridgeline.worker.upload import staging


class Shape(NamedTuple):
    """The size of a step, padding included.

    each: how many tokens every row runs; 0 if rows differ (`Rows.tokens_each`).
    """

    rows: int
    tokens: int
    each: int


class DeviceInputs:
    """A step's inputs on the device.

    slots_R: the rows' slots.
    start_R1: the first token of each row, then the number of tokens.
    samples_R: True for rows that emit a token.
    override_T: the span's token, or -1 for the slot's last token.
    marks_R: after how many of its tokens a row's state is stored as well (`Rows.marks_R`).
    prefix_4R: the rows that share their first blocks, in the form of kernels/attention/paged/cascade.py; None without
        `cascade`.

    `plan` is the plan that they hold at first; with None they hold padding only. If `shape` says how many tokens each
    row runs, the rows of every plan must run that many.
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
        self._sizes = (num_rows, num_rows + 1, -(-num_rows // 4), num_tokens, num_rows, 4 * num_rows if cascade else 0)
        self._packed = torch.empty(sum(self._sizes), dtype=torch.int32, device=device)
        parts = self._packed.split(self._sizes)
        self.slots_R, self.start_R1, samples, self.override_T, self.marks_R, prefix = parts
        self.prefix_4R = prefix.view(4, num_rows) if cascade else None
        self.samples_R = samples.view(torch.bool)[:num_rows]
        self._rows: Rows | None = None  # the rows that are loaded, if no spans are
        self._load(plan)

    def holds(self, plan: StepPlan) -> bool:
        """Return True if the inputs are already those of `plan`."""
        return not plan.spans and plan.rows is self._rows

    def load(self, plan: StepPlan) -> None:
        """Load the plan's rows and spans, unless they are here already."""
        if not self.holds(plan):
            self._load(plan)

    def load_padding(self) -> None:
        """Load rows that run nothing."""
        self._load(None)

    def _load(self, plan: StepPlan | None) -> None:
        staged = staging(len(self._packed), self._packed.device)
        self._pack(plan, staged.numpy())
        self._packed.copy_(staged, non_blocking=True)
        self._rows = None if plan is None or plan.spans else plan.rows

    def _pack(self, plan: StepPlan | None, packed: np.ndarray) -> None:
        packed.fill(0)
        starts = (0, *accumulate(self._sizes))
        parts = (packed[start:end] for start, end in pairwise(starts))
        slots_R, start_R1, samples, override_T, marks_R, prefix = parts
        rows = 0 if plan is None else len(plan.rows)
        slots_R[rows:] = self._dummy_slot
        override_T.fill(-1)
        if plan is not None:
            if self.tokens_each not in (0, plan.rows.tokens_each):
                raise ContractViolation(
                    f"a step of {self.tokens_each} tokens a row was given rows of "
                    f"{plan.rows.tokens_each or 'unlike numbers'}."
                )
            slots_R[:rows] = plan.rows.slots_R
            np.cumsum(plan.rows.num_tokens_R, out=start_R1[1 : rows + 1])
            samples.view(np.bool_)[:rows] = plan.rows.num_logits_R > 0
            for row, token_ids, *_ in plan.spans:
                override_T[start_R1[row] : start_R1[row] + len(token_ids)] = token_ids
            if plan.rows.marks_R is not None:
                marks_R[:rows] = plan.rows.marks_R
            if len(prefix):
                _write_prefixes(plan.rows.prefixes, prefix.reshape(4, self.num_rows))
        each = self.tokens_each
        start_R1[rows:] = np.arange(rows * each, self.num_tokens + 1, each) if each else start_R1[rows]


def _write_prefixes(groups: tuple[PrefixGroup, ...], prefix_4R: np.ndarray) -> None:
    """Rank the rows of the groups one after another; see kernels/attention/paged/cascade.py."""
    first = 0
    for rows, tokens in groups:
        end = first + len(rows)
        prefix_4R[0, rows] = np.arange(first, end)
        prefix_4R[1:, rows] = np.array([first, end, tokens])[:, None]
        first = end
