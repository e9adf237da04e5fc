"""Drafts by a head that goes on from the target's hidden states (EAGLE, multi-token prediction).

The head's position i holds a pair: the feature of token i, which the target found, and token i + 1. So the pair of a
step's first token needs the feature of the token before the step, which is kept for each slot. It does not exist in
front of a prompt, nor behind a prefix that was found in the cache. That token's pair is left out, and nothing is
written to a block that other requests share.

A feature may be a product of several layers' outputs. So these are kept as they are, and the product is made where the
head runs: plain steps do not make it.

Steps with chunks of prompts run the pairs of all their tokens in the step itself. While no drafts are wanted, pairs
wait (`backlog.py`). After other steps the first pass runs the pairs of all tokens that a row emitted, which are known
only then, and that of the token in front of them. The next passes run one pair each: the head's own output takes the
place of the feature, and its draft that of the token.

Legend:
    R  rows
    S  slots
    T  tokens of the step
    M  numbers that are read of a token
    K  tokens that a row emits, at most
    N  pairs that a row runs in the first pass: K + 1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Assign, Delta, Feature
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.wait import KeptFeatures
from ridgeline.layers.decoder import Hidden
from ridgeline.layers.draft_head import DraftHead
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Backlog, Catching
from ridgeline.worker.speculation.passes import Draws, Passes, StatesBehind
from ridgeline.worker.speculation.proposer import CatchesUp, Ran, Taken
from ridgeline.worker.speculation.trees import TreeDraws
from ridgeline.worker.state.states import States


class FeatureHead(CatchesUp):
    """A `Proposer` that runs a `DraftHead`.

    feature_SM: what its feature is made of, for each slot's last token that ran. known_S: whether there is one.
    """

    def __init__(self, head: DraftHead, draws: Draws | TreeDraws, slots: Slots, block_size: int, ops: Ops) -> None:
        self.head, self.layers, self.taps = head, head.spec.layers, head.spec.taps
        self._slots, self._draws, self.passes = slots, draws, Passes(slots, block_size, ops)
        self.drafts_SD, self.tree_SN, self.depth = draws.drafts_SD, draws.tree_SN, draws.depth
        num_slots, device, dtype = slots.dummy + 1, slots.device, head.dtype
        self.feature_SM = torch.zeros(num_slots, head.read_width, dtype=dtype, device=device)
        self.known_S = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.backlog = Backlog.of(slots, self.layers, ops, self.feature_SM)

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Forget what was kept of slots that change hands."""
        super().assign(deltas)
        for delta in deltas:
            if isinstance(delta, Assign):
                self.known_S[delta.slot].fill_(False)

    def settle(self, slots_R: np.ndarray, states: States) -> None:
        """Write the keys of the pairs that wait."""
        assert self.backlog is not None
        waiting = self.backlog.take(slots_R)
        assert waiting.before_TM is not None
        cached_R = self._slots.kv_len_S[waiting.slots_R.long()] - waiting.count_R - 1
        inputs = self.passes.begin_waiting(waiting, states, cached_R.clamp(min=0))
        behind = StatesBehind(states, len(self.layers))
        self.head(inputs.token_ids_T, self.head.features(waiting.before_TM), inputs.positions_T, behind)

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> Taken:
        """Read the target's outputs, and write the keys of the tokens' pairs unless that is done later."""
        feature_TM = self.head.read(ran.hidden, ran.tapped)
        if self.backlog is None and catching is Catching.LATER:
            catching = Catching.NOW
        if catching is Catching.NOW:
            self._run_step(ran, feature_TM, states)
        return Taken(ran.token_ids_T, ran.positions_T, ran.start_R1, ran.live_T, feature_TM, catching)

    def _run_step(self, ran: Ran, feature_TM: Tensor, states: States) -> None:
        """Run the pairs of all tokens, each with the feature of the token before. A row whose feature is not known has
        one token less, and begins a position later than the others."""
        slots, rows = self._slots, ran.slots_R.long()
        tokens = len(ran.token_ids_T)
        start_R, end_R = ran.start_R1[:-1].long(), ran.start_R1[1:].long()
        known_R, there_R = self.known_S[rows], end_R > start_R
        first_R, token_T = start_R.clamp(max=tokens - 1), torch.arange(tokens, device=rows.device)
        row_T = torch.searchsorted(end_R, token_T, right=True).clamp(max=len(rows) - 1)
        is_first_T = token_T == start_R[row_T]
        before_TM = torch.where(is_first_T[:, None], self.feature_SM[rows[row_T]], feature_TM.roll(1, 0))
        left_out_T = is_first_T & ~known_R[row_T]
        order_T = torch.argsort(left_out_T.int(), stable=True)  # those that are left out belong to no row
        counts_R = end_R - start_R - (there_R & ~known_R).long()
        start_R1 = torch.cat((counts_R.new_zeros(1), counts_R.cumsum(0))).int()
        inputs = self.passes.begin_ragged(
            ran.token_ids_T[order_T],
            start_R1,
            ran.slots_R,
            states,
            slots.kv_len_S[rows] - known_R.long(),
            ran.live_T[first_R] & there_R & (counts_R > 0),
        )
        behind = StatesBehind(states, len(self.layers))
        self.head(inputs.token_ids_T, self.head.features(before_TM[order_T]), inputs.positions_T, behind)

    def note(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken | None,
    ) -> None:
        """Keep what was read of the slots' last tokens, and draft what follows."""
        assert taken is not None
        assert taken.feature_TM is not None
        columns, backlog = out_token_RK.shape[1], self.backlog if taken.catching is Catching.LATER else None
        if backlog is not None and columns == 1:  # each row ran one token
            given = taken.token_ids_T, taken.live_T, self.drafts_SD, taken.feature_TM
            backlog.add_one(slots_R, *given, KeptFeatures(self.feature_SM, self.known_S))
            if wanted:
                self.settle(slots_R.numpy(), states)
                self._draft(out_token_RK, slots_R, states, features, wanted, taken, taken.feature_TM)
            return
        rows = slots_R.long()
        kv_len_R, before_RM = self._slots.kv_len_S[rows], self.feature_SM[rows]
        last_RM, ran_R = taken.feature_TM[taken.last_R(kv_len_R)], taken.ran_R
        if backlog is not None:
            self._let_wait(backlog, slots_R, taken, before_RM, taken.stayed(kv_len_R, columns))
            if wanted:
                self.settle(slots_R.numpy(), states)
        self._draft(out_token_RK, slots_R, states, features, wanted, taken, last_RM)
        self.feature_SM[rows] = torch.where(ran_R[:, None], last_RM, before_RM)
        self.known_S[rows] |= ran_R

    def _let_wait(
        self, backlog: Backlog, slots_R: Tensor, taken: Taken, before_RM: Tensor, stayed: tuple[Tensor, Tensor]
    ) -> None:
        """Let the pairs of the tokens that stayed wait: each with the feature of the token before. That of the first
        one may not be known, and its pair is left out."""
        assert taken.feature_TM is not None
        token_RK, there_RK = stayed
        columns, known_R1 = token_RK.shape[1], self.known_S[slots_R.long(), None]
        known_RK = known_R1 | (torch.arange(columns, device=known_R1.device) > 0)
        before_RKM = torch.cat((before_RM[:, None], taken.feature_TM[taken.kept_RK(columns - 1)]), 1)
        backlog.add(slots_R, token_RK, there_RK & known_RK, before_RKM)

    def _draft(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken,
        feature_RM: Tensor,
    ) -> None:
        """Draft what follows. feature_RM: what was read of the slots' last tokens that ran."""
        assert isinstance(self._draws, Draws)

        def scores(place: int, token_R: Tensor, runs_R: Tensor) -> Tensor:
            nonlocal feature_RM
            kv_len_R = self._slots.kv_len_S[slots_R.long()]
            if place == 0 and taken.catching is Catching.BEHIND:
                hidden = self._first_pass(out_token_RK, slots_R, states, runs_R, taken)
            else:
                inputs = self.passes.begin(token_R[:, None], slots_R, states, kv_len_R + place - 1, runs_R)
                behind = StatesBehind(states, len(self.layers))
                feature_RM = feature_RM if place else self.head.features(feature_RM)
                hidden = self.head(inputs.token_ids_T, feature_RM, inputs.positions_T, behind)
            logits_RV, feature_RM = self.head.found(hidden)
            return logits_RV

        self._draws.draw(out_token_RK, slots_R, features, wanted, scores)

    def _first_pass(
        self, out_token_RK: Tensor, slots_R: Tensor, states: States, runs_R: Tensor, taken: Taken
    ) -> Hidden:
        """Run the pairs of all tokens that the rows emitted, and that of the token in front of them. Return the output
        of the last one of each row."""
        assert taken.feature_TM is not None
        rows, first_R, kv_len_R = slots_R.long(), taken.first_R, self._slots.kv_len_S[slots_R.long()]
        (count, columns), at_RK = out_token_RK.shape, taken.kept_RK(out_token_RK.shape[1])
        ids_RN = torch.cat((taken.token_ids_T[first_R, None], out_token_RK.clamp(min=0)), 1)
        features_RNM = torch.cat((self.feature_SM[rows, None], taken.feature_TM[at_RK]), 1)
        begin_R = taken.positions_T[first_R] - 1  # below 0 for rows that do not run, which then begin nowhere
        inputs = self.passes.begin(ids_RN, slots_R, states, begin_R.clamp(min=0), runs_R)
        behind = StatesBehind(states, len(self.layers))
        features_QM = self.head.features(features_RNM.flatten(0, 1))
        hidden = self.head(inputs.token_ids_T, features_QM, inputs.positions_T, behind)
        newest_R = (kv_len_R - 1 - begin_R).clamp(0, columns)
        return hidden.at(torch.arange(count, device=rows.device) * (columns + 1) + newest_R)
