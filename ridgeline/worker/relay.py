"""The tokens that a pipeline's last stage draws, on their way into the slots of another stage.

Every stage keeps all slots, and advances them by the same tokens with the same op, so slots are equal on all stages.
The length of a row's cache is known without its token. It is noted when the row has run, so a prompt's next part can
follow at once. Only a plan that needs the token waits for it (`StepPlan.after`). But the receive is posted as soon as
the row has run. Otherwise the last stage would wait until its tokens are received, this stage would soon wait for the
last one, and both would wait for ever.

Legend:
    R  rows of the step
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.plan.step import StepPlan, StepResult
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.parallel.pipe import Pipe, Wait
from ridgeline.worker.slots import Slots
from ridgeline.worker.step import DeviceStep, Ending, KeptRows, Outcome, PlannedStep, StepPart
from ridgeline.worker.stopwatch import Stopwatch
from ridgeline.worker.upload import mark


class Unheard(NamedTuple):
    """A step whose tokens are on their way.

    plan_id: its plan. token_R: where they arrive. wait: waits until they are there.
    """

    plan_id: int
    rows: KeptRows
    token_R: Tensor
    wait: Wait


class Relay(StepPart):
    """The steps of a stage whose tokens it has not taken into its slots yet, oldest first."""

    def __init__(self, pipe: Pipe, slots: Slots, ops: Ops) -> None:
        self._pipe, self._slots, self._ops = pipe, slots, ops
        self._unheard: deque[Unheard] = deque()

    def prepare(self, step: PlannedStep) -> None:
        self.settle(step.plan.after)

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
        outcome = Outcome.empty(rows.num_rows, rows.slots_R.device)
        step.wait()
        # Others may have run on meanwhile; and only the last stage weighs tokens by how often they came
        advancing = self._slots.advancing(rows.slots_R, rows.kv_len_R, rows.active_R & rows.samples_R)
        self._ops.step_advance(step.token_R, rows.samples_R, advancing, outcome.token_R, outcome.finish_R)


class HandingOn(Ending):
    """The `Ending` on a stage of a pipeline that is not the last: the next one gets the hidden states."""

    def __init__(self, decoder: Decoder, ops: Ops, slots: Slots, relay: Relay) -> None:
        self.decoder, self._ops, self._slots, self._relay, self._pipe = decoder, ops, slots, relay, decoder.mesh.pp

    def forward(self, step: DeviceStep) -> None:
        self._slots.lengthen(step.inputs.slots_R, step.kv_len_R, step.active_R, self._ops)
        x_TM = self.decoder.handed_on(step.hidden)
        step.logits_RU, step.hidden = x_TM.new_empty(0), Hidden(x_TM, None)

    def after_forward(self, step: PlannedStep) -> None:
        plan, x_TM = step.plan, step.device.hidden.x_TM[: step.plan.num_tokens]
        self._pipe.send(x_TM if step.graph is None else x_TM.clone())  # first: a send waits for what is queued
        self._relay.expect(plan, step.device.keep(len(plan.rows)))

    def expected(self, step: PlannedStep) -> HandedOn:
        return HandedOn(step)


class HandedOn:
    """The end of a step that has no tokens to tell."""

    def __init__(self, step: PlannedStep) -> None:
        self._plan_id, self._done = step.plan.id, mark(step.device.inputs.slots_R.device)

    def result(self, watch: Stopwatch) -> StepResult:
        """Wait for the step and return what there is to know. Raises whatever error the device reports."""
        if self._done is not None:
            self._done.synchronize()
        return StepResult(self._plan_id, elapsed=watch.seconds())


class SentTokens(StepPart):
    """The tokens that the last stage draws, on their way to the others."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def after_sample(self, step: PlannedStep) -> None:
        if step.plan.rows.num_logits_R.any():
            self._pipe.tell(step.device.outcome.token_R[: len(step.plan.rows)].clone())
