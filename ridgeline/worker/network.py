"""The network of a step: positions, tokens and places are derived on the device, and the layers run.

Legend:
    T  tokens of the step
    M  model width
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.op import SlotDrafts, SlotTables, StepInputs, StepRows
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.axes import Axes
from ridgeline.worker.slots import Slots
from ridgeline.worker.state.states import DeviceRows, States
from ridgeline.worker.step import DeviceStep, PlannedStep, StepPart


class ModelNetwork(StepPart):
    """A network on one device. Its subclasses are those of a later stage of a pipeline, of ranks that divide a
    context (`worker/divided.py`), and of a model for which drafts are made (`worker/speculation/drafted.py`).

    axes: of a model whose positions have three; None: they have one.
    drafts_SD, tree_SN: those of the proposer, if there is one.
    """

    drafts_SD: Tensor | None = None
    tree_SN: Tensor | None = None

    def __init__(self, decoder: Decoder, ops: Ops, slots: Slots, states: States) -> None:
        self.decoder, self.states = decoder, states
        self._ops, self._slots = ops, slots
        self.axes = Axes.of(decoder, slots)
        tables = slots.kv_len_S, slots.last_token_S, slots.stopped_S, slots.block_tables_ASC
        self._tables = SlotTables(*tables, states.memory.layout.block_size)

    def forward(self, step: DeviceStep) -> None:
        inputs, lengths, slots = step.inputs, step.lengths, self._slots
        found = self._ops.step_inputs(
            StepRows(inputs.slots_R, inputs.start_R1, inputs.override_T),
            self._tables,
            SlotDrafts(self.drafts_SD, None if step.drafts is None else self.tree_SN),
        )
        step.active_R, step.kv_len_R, step.last_R = found.active_R, found.kv_len_R, found.last_R
        rows = DeviceRows(
            slots_R=inputs.slots_R,
            start_R1=inputs.start_R1,
            kv_len_R=found.kv_len_R,
            last_R=found.last_R,
            num_tokens=inputs.num_tokens,
            tokens_each=inputs.tokens_each,
            marks_R=inputs.marks_R,
            prefix_4R=inputs.prefix_4R,
            num_tokens_R=lengths.num_tokens_R if lengths else None,
            kv_bound_R=lengths.kv_bound_R if lengths else None,
            verifies=step.drafts is not None,
            verify_R=lengths.verify_R if lengths and inputs.tokens_each == 0 else None,
            share=step.share,
            tree=found.tree,
            ahead_T=step.ahead_T,
        )
        self.states.begin(rows, slots.block_tables_ASC.unbind(), found.places_AT.unbind(), found.live_T)
        self.run(step, found)

    def run(self, step: DeviceStep, found: StepInputs) -> None:
        """Run the layers, whose states have begun the step."""
        if self.axes is None:
            step.hidden = self.decoder(found.token_ids_T, found.positions_T, self.states, None, step.given)
            return
        with self.axes.turned(step, found.positions_T) as positions_T:
            step.hidden = self.decoder(found.token_ids_T, positions_T, self.states, None, step.given)

    def rehearse(self) -> None:
        """Run what runs between steps, for all sizes for which kernels are compiled."""


class StageNetwork(ModelNetwork):
    """A stage of a pipeline that is not the first: its input is what the stage before hands on."""

    def __init__(self, decoder: Decoder, ops: Ops, slots: Slots, states: States) -> None:
        super().__init__(decoder, ops, slots, states)
        self._pipe = decoder.mesh.pp
        device = next(decoder.parameters()).device
        self._before_TM = torch.zeros(0, decoder.spec.handed_width, dtype=decoder.dtype, device=device)

    def prepare(self, step: PlannedStep) -> None:
        """Receive the input. All that may be wrong with a plan was found by now, on all stages."""
        self._pipe.receive(self.before(step.plan.num_tokens))

    def run(self, step: DeviceStep, found: StepInputs) -> None:
        before_TM = self.before(step.inputs.num_tokens)
        turned = nullcontext(found.positions_T) if self.axes is None else self.axes.turned(step, found.positions_T)
        with turned as positions_T:
            step.hidden = self.decoder(found.token_ids_T, positions_T, self.states, before_TM)

    def before(self, tokens: int) -> Tensor:
        """Return the memory for what the stage before hands on of so many tokens: always the same, once it has been
        asked for the most. [T, M], or [T, 2 M] with the tokens as they were embedded"""
        if tokens > len(self._before_TM):
            self._before_TM = self._before_TM.new_zeros(tokens, self._before_TM.shape[1])
        return self._before_TM[:tokens]
