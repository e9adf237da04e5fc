"""The tokens that a pipeline's last stage draws, on their way into the slots of another stage.

Every stage keeps all slots, and advances them by the same tokens with the same op, so slots are alike everywhere. How
far a row's cache reaches is known without its token, so that is noted when the row has run: a prompt's next part can
follow at once. The token is waited for only before a plan that needs it (`StepPlan.after`). But it is received from the
time on when the row has run: a last stage whose tokens are not received would wait, this stage would soon wait for that
one, and both for ever.

Legend:
    R  rows of the step
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.plan.step import StepPlan
from ridgeline.kernels.ops import Ops
from ridgeline.parallel.pipe import Pipe, Wait
from ridgeline.worker.segments import Outcome
from ridgeline.worker.slots import Slots


class KeptRows(NamedTuple):
    """All that a step's rows need to advance their slots (`kernels.step.op`), kept while later steps run."""

    slots_R: Tensor
    samples_R: Tensor
    kv_len_R: Tensor
    active_R: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.slots_R)

    def copied(self, rows: int) -> KeptRows:
        """Return so many first rows in memory of their own."""
        return KeptRows(*(tensor[:rows].clone() for tensor in self))


class Unheard(NamedTuple):
    """A step whose tokens are on their way.

    plan_id: its plan. token_R: where they arrive. wait: waits until they are there.
    """

    plan_id: int
    rows: KeptRows
    token_R: Tensor
    wait: Wait


class Relay:
    """The steps of a stage whose tokens it has not taken into its slots yet, oldest first."""

    def __init__(self, pipe: Pipe, slots: Slots, ops: Ops) -> None:
        self._pipe, self._slots, self._ops = pipe, slots, ops
        self._unheard: deque[Unheard] = deque()

    def expect(self, plan: StepPlan, rows: KeptRows) -> None:
        """Note a step that has run, and begin to receive its tokens."""
        if plan.rows.num_logits_R.any():
            token_R = torch.empty(rows.num_rows, dtype=torch.int32, device=rows.slots_R.device)
            self._unheard.append(Unheard(plan.id, rows, token_R, self._pipe.hear(token_R)))

    @torch.inference_mode()
    def settle(self, plan_id: int) -> None:
        """Take the tokens of all steps up to this one into the slots."""
        while self._unheard and self._unheard[0].plan_id <= plan_id:
            self._advance(self._unheard.popleft())

    def _advance(self, step: Unheard) -> None:
        rows = step.rows
        slots, outcome = self._slots, Outcome.empty(rows.num_rows, rows.slots_R.device)
        step.wait()
        self._ops.step_advance(
            step.token_R,
            rows.samples_R,
            rows.slots_R,
            rows.kv_len_R,
            rows.active_R & rows.samples_R,  # others may have run on meanwhile
            slots.sampling.stop_ids_SE,
            slots.max_len_S,
            slots.kv_len_S,
            slots.last_token_S,
            slots.stopped_S,
            None,  # only the last stage weighs tokens by how often they came
            outcome.token_R,
            outcome.finish_R,
        )
