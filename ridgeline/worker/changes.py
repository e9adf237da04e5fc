"""The changes that a plan makes before its rows run: of slots and of blocks. Both sides are checked to agree."""

from __future__ import annotations

import numpy as np

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.step import StepPlan
from ridgeline.worker.slots import Slots
from ridgeline.worker.state.states import States
from ridgeline.worker.step import PlannedStep, StepPart


class SlotChanges(StepPart):
    """Brings the slots and the blocks to the state that a plan starts from. emits: tokens that a row may emit."""

    def __init__(self, slots: Slots, states: States, emits: int) -> None:
        self._slots, self._states, self._emits = slots, states, emits

    def prepare(self, step: PlannedStep) -> None:
        plan, slots = step.plan, self._slots
        if plan.reset:
            slots.reset()
        if plan.deltas:
            slots.apply(plan.deltas)
        if plan.copies:
            self._states.copy(plan.copies)
        if plan.expected is not None:
            slots.check(plan.expected)
        if (slots.generations[plan.rows.slots_R] != plan.rows.generations_R).any():
            self._refuse_generations(plan)
        if self._emits == 1 and plan.rows.num_logits_R.max() > 1:
            raise ContractViolation(
                f"a row may emit {plan.rows.num_logits_R.max()} tokens; this worker verifies no drafts, so a row emits "
                "one."
            )

    def _refuse_generations(self, plan: StepPlan) -> None:
        rows = plan.rows
        held_R = self._slots.generations[rows.slots_R]
        row = int(np.flatnonzero(held_R != rows.generations_R)[0])
        raise ContractViolation(
            f"plan {plan.id} names slot {rows.slots_R[row]} generation {rows.generations_R[row]}; "
            f"the worker holds generation {held_R[row]}."
        )
