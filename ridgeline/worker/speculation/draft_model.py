"""Drafts by a smaller model, whose keys and values lie beside the target's in the same blocks.

Its keys are there wherever the target's are, but for that of the last draft, where all were right: no pass ran it. The
first pass behind a step (`passes.py`) therefore takes two tokens of each row, the last one and that in front of it.
Behind chunks of prompts, and where no drafts are wanted, the draft model runs over the target's tokens in the step
itself, right behind the target.

Legend:
    R  rows
    K  tokens that a row emits, at most
    N  tokens that a row runs in a pass
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.core.plan import Feature
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.passes import Draws, Passes, StatesBehind
from ridgeline.worker.speculation.proposer import Ran, Taken
from ridgeline.worker.state.states import States


class DraftModel:
    """A `Proposer` that runs a network."""

    taps: tuple[int, ...] = ()
    tree_SN: Tensor | None = None

    def __init__(self, decoder: Decoder, draws: Draws, slots: Slots, block_size: int, ops: Ops) -> None:
        self.decoder, self.layers, self._slots = decoder, decoder.spec.layers, slots
        self._draws, self.passes = draws, Passes(slots, block_size, ops)
        self.drafts_SD, self.depth, self.assign = draws.drafts_SD, draws.depth, draws.assign

    def catch_up(self, ran: Ran, states: States, *, drafts: bool) -> Taken:
        """Write the keys of the step's tokens, unless the first pass of `note` writes what is missing."""
        if not drafts:
            self.decoder(ran.token_ids_T, ran.positions_T, StatesBehind(states, len(self.layers)))
        return Taken(ran.token_ids_T, ran.positions_T, ran.start_R1, ran.live_T, None, not drafts)

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
        kv_len_R, behind = self._slots.kv_len_S[slots_R.long()], StatesBehind(states, len(self.layers))

        def scores(place: int, token_R: Tensor, runs_R: Tensor) -> Tensor:
            ids_RN = token_R[:, None]
            if place == 0:
                ids_RN = torch.cat((taken.token_ids_T[taken.last_R(kv_len_R), None], ids_RN), 1)
            cached_R = kv_len_R + place + 1 - ids_RN.shape[1]
            inputs = self.passes.begin(ids_RN, slots_R, states, cached_R, runs_R)
            hidden = self.decoder(inputs.token_ids_T, inputs.positions_T, behind)
            return self.decoder.own_logits(hidden if place else hidden.at(inputs.last_R))

        self._draws.draw(out_token_RK, slots_R, features, wanted, scores)
