"""The parts of a step whose rows verify drafts: the rows, the network with a proposer behind it, and the draws.

Legend:
    R  rows
    S  slots
    D  drafts of a slot
    K  tokens that a row may emit, at most
    P  positions that are scored
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature, MaskedDrafts, RowKind, Rows
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.op import StepInputs
from ridgeline.kernels.step.verify import DraftNodes, EmittedTokens
from ridgeline.layers.decoder import Decoder, Taps
from ridgeline.worker.drawing import SAMPLING, Drawing
from ridgeline.worker.mailbox import Mailbox
from ridgeline.worker.network import ModelNetwork
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.cut import Cut
from ridgeline.worker.speculation.drafts import Drafts, drafts_wanted
from ridgeline.worker.speculation.proposer import Proposer, Ran
from ridgeline.worker.state.states import States, Verified
from ridgeline.worker.step import DeviceStep, Outcome, PlannedStep, StepPart
from ridgeline.worker.upload import upload
from ridgeline.worker.vocabulary import Vocabulary


class DraftedRows(StepPart):
    """The drafts that a plan's rows verify. most: as many as a row verifies at most.

    cut: shortens rows to the drafts that there are, on a CPU; else None.
    """

    def __init__(self, proposer: Proposer, most: int, device: torch.device) -> None:
        self._proposer, self._most = proposer, most
        self.cut = Cut(proposer.drafts_SD) if device.type == "cpu" else None

    def prepare(self, step: PlannedStep) -> None:
        plan = step.plan
        self._proposer.assign(plan.deltas)
        if step.given_drafts:
            self._take(plan.rows, step.given_drafts)
        step.wanted = drafts_wanted(plan.rows, self._most) if plan.drafts else 0
        step.verifies = bool((plan.rows.kinds_R == RowKind.VERIFY).any())
        if self.cut is None:
            return
        if step.verifies:
            step.plan = plan = self.cut.plan(plan)
            step.verifies = bool((plan.rows.kinds_R == RowKind.VERIFY).any())
        step.ran = plan.num_tokens

    def _take(self, rows: Rows, given: Mapping[int, MaskedDrafts]) -> None:
        """Let rows verify the drafts that are given, in the place of those that were made on the device."""
        table_SD = self._proposer.drafts_SD
        packed = np.full((len(given), 1 + table_SD.shape[1]), -1, np.int32)  # slot, drafts
        for own, (row, (token_ids_D, _)) in zip(packed, given.items(), strict=True):
            own[0], own[1 : 1 + len(token_ids_D)] = rows.slots_R[row], token_ids_D
        sent = upload(packed, table_SD.device)
        table_SD.index_copy_(0, sent[:, 0].long(), sent[:, 1:])


class DraftedNetwork(ModelNetwork):
    """A network behind which a network that drafts may run over the same tokens.

    aside: the context in which that one runs.
    """

    def __init__(self, decoder: Decoder, ops: Ops, slots: Slots, states: States, proposer: Proposer) -> None:
        super().__init__(decoder, ops, slots, states)
        self._proposer, self.drafts_SD, self.tree_SN = proposer, proposer.drafts_SD, proposer.tree_SN
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext

    def prepare(self, step: PlannedStep) -> None:
        rows, device = step.plan.rows, step.device
        device.catching = catching = self._catching(step)
        if (backlog := self._proposer.backlog) is not None:
            more_R = rows.num_tokens_R if catching in backlog.takes else None
            drops = catching is Catching.LATER and more_R is not None
            if not drops and backlog.due(rows.slots_R, more_R):
                self._proposer.settle(rows.slots_R, self.states)
            if more_R is not None:
                backlog.expect(rows.slots_R, more_R)
        if step.graph is None and step.verifies:
            device.drafts = Drafts.of(rows, device.inputs.slots_R.device)
        elif step.graph is not None and catching is Catching.LATER:
            device.wanted = 0  # tokens that wait in a graph can catch up between steps alone

    def _catching(self, step: PlannedStep) -> Catching:
        """Return the moment at which a network that drafts runs over the tokens of a step."""
        rows = step.plan.rows
        if step.graph is not None:
            return catching_of(step.device.inputs.tokens_each)
        if step.wanted == 0 and rows.tokens_each == 1:
            return Catching.LATER
        if step.wanted == 0 or step.given_drafts or (rows.kinds_R == RowKind.CHUNK).any():
            return Catching.NOW  # drafts that are given are not those whose keys a draft model has written
        return Catching.BEHIND

    def run(self, step: DeviceStep, found: StepInputs) -> None:
        inputs, taps = step.inputs, Taps(self._proposer.taps, [])
        if self.axes is None:
            step.hidden = self.decoder(found.token_ids_T, found.positions_T, self.states, None, step.given, taps)
        else:
            with self.axes.turned(step, found.positions_T) as positions_T:
                step.hidden = self.decoder(found.token_ids_T, positions_T, self.states, None, step.given, taps)
        catching = catching_of(inputs.tokens_each) if step.catching is None else step.catching
        given = inputs.start_R1, inputs.slots_R, step.hidden, taps.found, found.live_T
        ran = Ran(found.token_ids_T, found.positions_T, *given)
        with self.aside():
            step.taken = self._proposer.catch_up(ran, self.states, catching)
        if (drafts := step.drafts) is not None:
            scored_P = drafts.scored_P
            step.index_P = 1 + (found.positions_T if scored_P is None else found.positions_T[scored_P])

    def rehearse(self) -> None:
        if (backlog := self._proposer.backlog) is not None:
            for tokens in backlog.sizes:
                self._proposer.settle(backlog.pretend(tokens), self.states)


def catching_of(tokens_each: int) -> Catching:
    """Return the moment at which a network that drafts runs over the tokens of a step in a graph, whose rows have so
    many each. Behind a step whose rows verify drafts more of them are wanted."""
    return {0: Catching.NOW, 1: Catching.LATER}.get(tokens_each, Catching.BEHIND)


class VerifiedDraws(Drawing):
    """Draws behind the drafts that rows verify, or plain ones, and the drafts of what follows."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        slots: Slots,
        vocabulary: Vocabulary,
        mailbox: Mailbox,
        proposer: Proposer,
        states: States,
    ) -> None:
        super().__init__(decoder, ops, slots, vocabulary, mailbox)
        self.proposer, self._states, self._drafts_SD = proposer, states, proposer.drafts_SD

    def sample(self, step: DeviceStep) -> None:
        taken, drafts = step.taken, step.drafts
        if drafts is None:
            super().sample(step)
        else:
            token_P = self._verify(step, drafts)
            if step.outcome.path_RK is not None and taken is not None:
                taken = taken._replace(path_RK=step.outcome.path_RK, drawn_RN=drafts.drawn(token_P))
        wanted = step.wanted
        if wanted is None:
            wanted = 0 if drafts is None else drafts.columns - 1
        emitted = step.outcome.token_RK, (step.kept or step.inputs).slots_R
        self.proposer.note(*emitted, self._states, step.features & SAMPLING, wanted, taken)

    def _verify(self, step: DeviceStep, drafts: Drafts) -> Tensor:
        """Draw a token for every position, and let the slots advance by those that rows emit. Return all. [P]"""
        slots, rows, trees_SN, path_RK = self._slots, step.kept or step.inputs, self.proposer.tree_SN, None
        outcome = Outcome.empty(rows.num_rows, rows.slots_R.device, drafts.emits)
        token_P = self._draw_behind(rows.slots_R, step, drafts, step.features & SAMPLING)
        if step.giver_R is not None:
            token_P = torch.cat((token_P[: rows.num_rows][step.giver_R], token_P[rows.num_rows :]))
        if trees_SN is not None:
            path_RK = torch.empty_like(outcome.token_RK)
        num_logits_R = drafts.num_logits_R
        advancing = slots.advancing(rows.slots_R, step.kv_len_R, step.active_R, step.features)
        nodes = DraftNodes(drafts.places_RN, num_logits_R, self._drafts_SD, trees_SN)
        emitted = EmittedTokens(outcome.token_RK, outcome.finish_R, outcome.drafted_R, path_RK)
        self._ops.step_verify(token_P, nodes, advancing, emitted)
        come = rows.slots_R, step.kv_len_R, step.active_R, num_logits_R, slots.kv_len_S
        self._states.keep(Verified(*come, drafts.columns, path_RK), slots.block_tables_ASC.unbind())
        step.outcome = replace(outcome, path_RK=path_RK)
        return token_P

    def _draw_behind(self, slots_R: Tensor, step: DeviceStep, drafts: Drafts, features: Feature) -> Tensor:
        """Return the tokens drawn at all positions. [P]

        Penalties count the drafts before a position as if they had been emitted: where they are not, the tokens
        drawn behind them are not used.
        """
        slots_P, index_P = slots_R[drafts.row_P], step.index_P
        assert index_P is not None
        if not features & Feature.PENALTY:
            return self.vocabulary.sample(step.logits_RU, self._slots.sampling, slots_P, index_P, features)
        count_SV = self._slots.sampling.output_count_SV
        token_P = torch.empty_like(drafts.row_P)
        counted = []
        for column in range(drafts.columns):
            at = (drafts.column_P == column).nonzero()[:, 0]
            if column > 0:
                draft_P = self._drafts_SD[slots_P[at].long(), column - 1].long()
                there = draft_P >= 0
                counted.append((slots_P[at].long()[there], draft_P[there]))
                count_SV.index_put_(counted[-1], count_SV.new_ones(()), accumulate=True)
            token_P[at] = self.vocabulary.sample(
                step.logits_RU[at], self._slots.sampling, slots_P[at], index_P[at], features
            )
        for places in counted:
            count_SV.index_put_(places, -count_SV.new_ones(()), accumulate=True)
        return token_P
