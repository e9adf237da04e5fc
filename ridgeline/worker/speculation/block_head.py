"""Drafts by a head that guesses a block of tokens in one pass (DFlash, DSpark).

The head's layers keep keys and values of every token that the target has run: projections of its context, which is what
the target found of it. They need no other token, so they are written in the step itself, right behind the target. Those
of wrong drafts lie behind the length of their request and are overwritten. While no drafts are wanted, tokens wait
(`backlog.py`), with what the target found of them: the context is a product, which would make plain steps longer.

A head of DSpark may tell how probably each draft is right. On a CPU, where rows are cut to the drafts that there are,
the first one that is less sure than a user asks for ends the drafts.

Behind a step one pass runs the block of each row, the last token and a mask for each draft, at the places behind the
row's contexts. Its tokens see each other in both directions: they are the nodes of a tree in which each node sees all.
Node 0 is the token in front of the block, since rows do not run that one. Their keys are overwritten by the contexts of
the next step.

Legend:
    R  rows
    S  slots
    T  tokens of the step
    M  model width
    N  nodes: B + 1; of what is tapped, taps times M
    K  tokens that a row emits, at most
    D  drafts of a row
    B  places of a block
    V  vocabulary, or this rank's part of it
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature
from ridgeline.kernels.ops import Ops
from ridgeline.layers.draft_block import DraftBlock
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Backlog, Catching
from ridgeline.worker.speculation.passes import Draws, Nodes, Passes, StatesBehind
from ridgeline.worker.speculation.proposer import CatchesUp, Ran, Taken
from ridgeline.worker.state.states import States


class BlockHead(CatchesUp):
    """A `Proposer` that runs a `DraftBlock`."""

    _draws: Draws
    tree_SN: Tensor | None = None

    def __init__(
        self, head: DraftBlock, draws: Draws, slots: Slots, block_size: int, ops: Ops, least: float = 0.0
    ) -> None:
        """least: the probability of being right below which a draft ends those of its row."""
        self.head, self.layers, self.taps = head, head.spec.layers, head.spec.taps
        self._slots, self._draws, self.passes = slots, draws, Passes(slots, block_size, ops)
        self.drafts_SD, self.depth = draws.drafts_SD, draws.depth
        count, device, spec = slots.dummy + 1, slots.device, head.spec
        self._least = least if device.type == "cpu" else 0.0
        places = draws.depth + (0 if spec.shifted else 1)
        node_N = torch.arange(places + 1, device=device)
        sight_N = (2 << node_N if spec.causal == "all" else torch.full_like(node_N, 2 << places)) - 1
        self._token_SB = torch.full((count, places), spec.mask, dtype=torch.int32, device=device)
        self._sight_SN, self._base_S = sight_N.repeat(count, 1), torch.zeros_like(slots.kv_len_S)
        tapped = torch.zeros(1, len(spec.taps) * spec.width, dtype=head.dtype, device=device)
        self.backlog = Backlog.of(slots, self.layers, ops, tapped)

    def settle(self, slots_R: np.ndarray, states: States) -> None:
        """Write the keys of the tokens that wait."""
        assert self.backlog is not None
        waiting = self.backlog.take(slots_R)
        assert waiting.before_TM is not None
        cached_R = self._slots.kv_len_S[waiting.slots_R.long()] - waiting.count_R
        inputs = self.passes.begin_waiting(waiting, states, cached_R.clamp(min=0))
        self._keep(waiting.before_TM, inputs.positions_T, states)

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> Taken:
        """Write the keys of the step's tokens, or keep what the target found of them until that is done."""
        tapped_TN = torch.cat(list(ran.tapped), dim=-1)
        if self.backlog is None or catching is not Catching.LATER:
            catching = Catching.NOW
            self._keep(tapped_TN, ran.positions_T, states)
        return Taken(ran.token_ids_T, ran.positions_T, ran.start_R1, ran.live_T, tapped_TN, catching)

    def _keep(self, tapped_TN: Tensor, positions_T: Tensor, states: States) -> None:
        self.head.keep(self.head.contexts(tapped_TN), positions_T, StatesBehind(states, len(self.layers)))

    def note(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken | None,
    ) -> None:
        """Draft what follows the slots' last tokens."""
        assert taken is not None
        assert taken.feature_TM is not None
        if self.backlog is not None and taken.catching is Catching.LATER:
            if (columns := out_token_RK.shape[1]) == 1:
                given = taken.token_ids_T, taken.live_T, self.drafts_SD, taken.feature_TM
                self.backlog.add_one(slots_R, *given)
                if not wanted:
                    return
            else:
                stayed = taken.stayed(self._slots.kv_len_S[slots_R.long()], columns)
                self.backlog.add(slots_R, *stayed, taken.feature_TM[taken.kept_RK(columns)])
            if wanted:
                self.settle(slots_R.numpy(), states)
        self._draft(out_token_RK, slots_R, states, features, wanted)

    def _draft(self, out_token_RK: Tensor, slots_R: Tensor, states: States, features: Feature, wanted: int) -> None:
        markov, first = self.head.markov, 0 if self.head.spec.shifted else 1
        count, sure_DR = min(wanted, self.depth), list[Tensor]()
        found_DRM = state_RK = logits_DRV = torch.empty(0)

        def scores(place: int, token_R: Tensor, runs_R: Tensor) -> Tensor:
            nonlocal found_DRM, state_RK, logits_DRV
            if place == 0:
                found_RBM = self._run_block(token_R, slots_R, states, runs_R)
                found_DRM = found_RBM[:, first : first + count].transpose(0, 1).contiguous()
                logits_DRV = self.head.scores(found_DRM.flatten(0, 1)).unflatten(0, (count, -1))
                state_RK = state_RK if markov is None else markov.begin(len(token_R))
            if self._least:
                sure_DR.append(self.head.sure_of(token_R, found_DRM[place]))
            if markov is None:
                return logits_DRV[place]
            added_RV, state_RK = markov(token_R, found_DRM[place], state_RK)
            return logits_DRV[place] + self._own(added_RV)

        self._draws.draw(out_token_RK, slots_R, features, wanted, scores)
        if sure_DR:
            goes_RD = (torch.stack(sure_DR, 1) >= self._least).cumprod(1) > 0
            rows = slots_R.long()
            self.drafts_SD[rows, :count] = torch.where(goes_RD, self.drafts_SD[rows, :count], -1)

    def _run_block(self, token_R: Tensor, slots_R: Tensor, states: States, runs_R: Tensor) -> Tensor:
        """Return the head's outputs for the blocks behind these tokens: [R, B, M]."""
        rows, spec, places = slots_R.long(), self.head.spec, self._token_SB.shape[1]
        kv_len_R = self._slots.kv_len_S[rows]
        runs_R = runs_R & (self._slots.stopped_S[rows] == 0)
        base_R = (kv_len_R - 1).clamp(min=0)
        self._token_SB[rows, 0], self._base_S[rows] = token_R.int(), base_R
        nodes = Nodes(self._token_SB, self._sight_SN, self._base_S, base_R + 1)
        causal = spec.causal == "windows"
        inputs = self.passes.begin_nodes(nodes, places, slots_R, states, runs_R, windows_causal=causal)
        place_B = torch.arange(places, device=rows.device)
        positions_T = torch.where(runs_R[:, None], base_R[:, None] + 1 + place_B, 0).flatten()
        found_TM = self.head(inputs.token_ids_T, positions_T, StatesBehind(states, len(self.layers)))
        return found_TM.unflatten(0, (-1, places))

    def _own(self, logits_RV: Tensor) -> Tensor:
        """Return this rank's part of scores of the whole vocabulary."""
        tp = self.head.tp
        if tp.size == 1:
            return logits_RV
        each = -(-logits_RV.shape[1] // tp.size)
        padded_RV = torch.nn.functional.pad(logits_RV, (0, each * tp.size - logits_RV.shape[1]))
        return padded_RV[:, each * tp.rank : each * (tp.rank + 1)]
