"""Drafts by a smaller model, whose keys and values lie beside the target's in the same blocks.

Its keys exist wherever the target's do, with one exception: if all drafts were right, no pass ran the last one. So the
first pass after a step (`passes.py`) takes two tokens of each row, the last one and the one before it. In a step with
chunks of prompts the draft model runs over the same tokens in the step itself, right after the target. While no drafts
are wanted, tokens wait (`backlog.py`).

Legend:
    R  rows
    K  tokens that a row emits, at most
    N  tokens that a row runs in a pass
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Backlog, Catching
from ridgeline.worker.speculation.passes import Draws, Passes, StatesBehind
from ridgeline.worker.speculation.proposer import CatchesUp, Ran, Taken
from ridgeline.worker.state.states import States


class DraftModel(CatchesUp):
    """A `Proposer` that runs a network."""

    _draws: Draws
    taps: tuple[int, ...] = ()
    tree_SN: Tensor | None = None

    def __init__(self, decoder: Decoder, draws: Draws, slots: Slots, block_size: int, ops: Ops) -> None:
        self.decoder, self.layers, self._slots = decoder, decoder.spec.layers, slots
        self._draws, self.passes = draws, Passes(slots, block_size, ops)
        self.drafts_SD, self.depth = draws.drafts_SD, draws.depth
        self.backlog = Backlog.of(slots, self.layers, ops)

    def settle(self, slots_R: np.ndarray, states: States) -> None:
        """Write the keys of the tokens that wait."""
        assert self.backlog is not None
        waiting = self.backlog.take(slots_R)
        cached_R = self._slots.kv_len_S[waiting.slots_R.long()] - waiting.count_R
        inputs = self.passes.begin_waiting(waiting, states, cached_R)
        self.decoder(inputs.token_ids_T, inputs.positions_T, StatesBehind(states, len(self.layers)))

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> Taken:
        """Write the keys of the step's tokens, unless that is done later."""
        if self.backlog is None and catching is Catching.LATER:
            catching = Catching.NOW
        if catching is Catching.NOW:
            self.decoder(ran.token_ids_T, ran.positions_T, StatesBehind(states, len(self.layers)))
        return Taken(ran.token_ids_T, ran.positions_T, ran.start_R1, ran.live_T, None, catching)

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
        behind = StatesBehind(states, len(self.layers))
        if self.backlog is not None and taken.catching is Catching.LATER:
            if (columns := out_token_RK.shape[1]) == 1:
                self.backlog.add_one(slots_R, taken.token_ids_T, taken.live_T, self.drafts_SD)
                if not wanted:
                    return
            else:
                self.backlog.add(slots_R, *taken.stayed(self._slots.kv_len_S[slots_R.long()], columns))
            if wanted:
                self.settle(slots_R.numpy(), states)

        def scores(place: int, token_R: Tensor, runs_R: Tensor) -> Tensor:
            kv_len_R, ids_RN = self._slots.kv_len_S[slots_R.long()], token_R[:, None]
            if place == 0:
                ids_RN = torch.cat((taken.token_ids_T[taken.last_R(kv_len_R), None], ids_RN), 1)
            cached_R = kv_len_R + place + 1 - ids_RN.shape[1]
            inputs = self.passes.begin(ids_RN, slots_R, states, cached_R, runs_R)
            hidden = self.decoder(inputs.token_ids_T, inputs.positions_T, behind)
            return self.decoder.own_logits(hidden if place else hidden.at(inputs.last_R))

        self._draws.draw(out_token_RK, slots_R, features, wanted, scores)
