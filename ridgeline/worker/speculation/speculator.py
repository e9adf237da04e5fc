"""Drafts for the rows of a plan, on a device whose memory the host reads: a CPU.

A plan says how many drafts a row may verify. Which ones there are is known only here, since the tokens before them are
drawn by the plan before. A row that has fewer drafts runs fewer tokens.

Legend:
    R  rows
    S  slots
    N  tokens of the longest request
    K  tokens that a row emits, at most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from ridgeline.core.plan import Assign, Delta, Release, RowKind, Rows, Span, StepPlan
from ridgeline.core.speculation import Speculation
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.drafts import Drafts
from ridgeline.worker.speculation.ngram import NGram


class Proposer(Protocol):
    def propose(self, known_N: np.ndarray, count: int) -> np.ndarray:
        """Return up to `count` drafts of what follows the known tokens. int32 [K]"""


class Speculator:
    """Keeps the tokens of all slots, and the drafts that follow them."""

    def __init__(self, speculation: Speculation, slots: Slots, max_model_len: int) -> None:
        self.num_drafts = speculation.num_speculative_tokens
        self.proposer: Proposer = NGram(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
        self._known_SN = np.empty((slots.dummy, max_model_len), np.int32)
        self._drafts: dict[int, np.ndarray] = {}  # slot → what may follow its last token
        self._kv_len_S, self._max_len_S = slots.kv_len_S.numpy(), slots.max_len_S.numpy()
        self._stopped_S = slots.stopped_S.numpy()
        self._plain: tuple[Rows, Rows] | None = None  # rows that came last without a draft, and what they became

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Take the known tokens of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                known = (*delta.prompt, *delta.output)
                self._known_SN[delta.slot, : len(known)] = known
            if isinstance(delta, Assign | Release):
                self._drafts.pop(delta.slot, None)

    def drafted(self, plan: StepPlan) -> tuple[StepPlan, Drafts | None]:
        """Return the plan with the drafts that there are, and these; None if there are none."""
        rows = plan.rows
        verify_R = (rows.kinds_R == RowKind.VERIFY).nonzero()[0]
        if not len(verify_R):
            return plan, None
        drafts = {row: found for row in verify_R.tolist() if len(found := self._of_row(rows, row))}
        if not drafts and self._plain is not None and self._plain[0] is rows:
            return replace(plan, rows=self._plain[1]), None
        num_tokens_R, kinds_R = rows.num_tokens_R.copy(), rows.kinds_R.copy()
        num_tokens_R[verify_R], kinds_R[verify_R] = 1, RowKind.TOKEN
        for row, tokens in drafts.items():
            num_tokens_R[row], kinds_R[row] = 1 + len(tokens), RowKind.VERIFY
        alike = bool((num_tokens_R == num_tokens_R[0]).all())
        each = int(num_tokens_R[0]) if alike and (num_tokens_R[0] == 1 or (kinds_R == RowKind.VERIFY).all()) else 0
        made = replace(
            rows,
            kinds_R=kinds_R,
            num_tokens_R=num_tokens_R,
            num_logits_R=np.minimum(rows.num_logits_R, num_tokens_R),
            tokens_each=each,
        )
        if not drafts:
            self._plain = rows, made
            return replace(plan, rows=made), None
        spans = [Span(row, np.array([-1, *tokens], np.int32)) for row, tokens in drafts.items()]
        return replace(plan, rows=made, spans=(*plan.spans, *spans)), Drafts.of(made, drafts)

    def _of_row(self, rows: Rows, row: int) -> np.ndarray:
        """Return the drafts that a row verifies: no more than it may, and none behind the request's last token."""
        slot = int(rows.slots_R[row])
        drafts = self._drafts.get(slot)
        if drafts is None or self._stopped_S[slot]:
            return self._known_SN[0, :0]
        room = int(self._max_len_S[slot]) - int(self._kv_len_S[slot]) - 2
        return drafts[: max(0, min(room, int(rows.num_tokens_R[row]) - 1))]

    def note(self, plan: StepPlan, token_RK: Tensor) -> None:
        """Take the tokens that rows emitted, and look for drafts of what follows them."""
        emitted_RK = token_RK.numpy()
        for row in plan.rows.num_logits_R.nonzero()[0].tolist():
            slot, count = int(plan.rows.slots_R[row]), int((emitted_RK[row] >= 0).sum())
            known = int(self._kv_len_S[slot]) + 1
            self._known_SN[slot, known - count : known] = emitted_RK[row, :count]
            if self._stopped_S[slot]:
                self._drafts.pop(slot, None)
            else:
                self._drafts[slot] = self.proposer.propose(self._known_SN[slot, :known], self.num_drafts)
