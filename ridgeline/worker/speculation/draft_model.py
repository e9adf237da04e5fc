"""Drafts by a smaller model, whose keys and values lie beside the target's in the same blocks.

Its keys are there wherever the target's are, but for that of the last draft, where all were right: no pass ran it. The
first pass behind a step (`passes.py`) therefore takes two tokens of each row, the last one and that in front of it.
Behind chunks of prompts, and where no drafts are wanted, the draft model runs over the target's tokens in the step
itself, right behind the target.

Legend:
    R  rows
    S  slots
    D  drafts of a slot
    K  tokens that a row emits, at most
    N  tokens that a row runs in a pass
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.core.plan import Assign, Delta, Feature
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.passes import Passes, StatesBehind, last_of
from ridgeline.worker.speculation.proposer import Ran
from ridgeline.worker.state.states import States
from ridgeline.worker.vocabulary import Vocabulary


class DraftModel:
    """A `Proposer` that runs a network. A slot that has no draft to make in a pass does not run in it. Only the first
    pass runs for those too that the step has stopped, whose keys may be found by others."""

    taps: tuple[int, ...] = ()

    def __init__(self, decoder: Decoder, drafts: int, slots: Slots, block_size: int, ops: Ops) -> None:
        self.decoder, self.layers, self._slots = decoder, decoder.spec.layers, slots
        self.passes = Passes(slots, Vocabulary(decoder.spec.vocab_size, decoder.tp, ops), block_size, ops)
        num_slots, device = slots.dummy + 1, slots.device
        self.drafts_SD = torch.full((num_slots, drafts), -1, dtype=torch.int32, device=device)

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Forget the drafts of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                self.drafts_SD[delta.slot].fill_(-1)

    def catch_up(self, ran: Ran, states: States, *, drafts: bool) -> None:
        """Write the keys of the step's tokens, unless the first pass of `note` writes what is missing."""
        self._ran = ran
        if not drafts:
            self.decoder(ran.token_ids_T, ran.positions_T, StatesBehind(states, len(self.layers)))

    def note(self, out_token_RK: Tensor, slots_R: Tensor, states: States, features: Feature, wanted: int) -> None:
        """Draft what follows the slots' last tokens: `wanted` tokens at most, and none behind the last one that a
        request may emit. Rows that emitted nothing, or whose slot has stopped, get none."""
        slots, rows = self._slots, slots_R.long()
        self.drafts_SD[rows] = -1
        if wanted == 0:
            return
        kv_len_R, token_R = slots.kv_len_S[rows], slots.last_token_S[rows]
        runs_R = out_token_RK[:, 0] >= 0
        goes_R = runs_R & (slots.stopped_S[rows] == 0)
        room_R = slots.max_len_S[rows] - kv_len_R - 2
        before_R = self._ran.token_ids_T[last_of(self._ran, kv_len_R)]
        ids_RN = torch.stack((before_R, token_R), 1)
        for place in range(min(wanted, self.drafts_SD.shape[1])):
            cached_R = kv_len_R + place + 1 - ids_RN.shape[1]
            logits_RV = self._pass(ids_RN, slots_R, states, cached_R, runs_R)
            token_R = self.passes.draw(logits_RV, slots_R, kv_len_R + place + 1, features)
            goes_R = goes_R & (room_R > place) & (token_R >= 0)
            self.drafts_SD[rows, place] = torch.where(goes_R, token_R, -1).int()
            runs_R, ids_RN = goes_R & (room_R > place + 1), token_R[:, None].clamp(min=0)

    def _pass(self, ids_RN: Tensor, slots_R: Tensor, states: States, kv_len_R: Tensor, runs_R: Tensor) -> Tensor:
        """Run the next tokens of every row, and return the scores behind the last."""
        inputs = self.passes.begin(ids_RN, slots_R, states, kv_len_R, runs_R)
        behind = StatesBehind(states, len(self.layers))
        hidden = self.decoder(inputs.token_ids_T, inputs.positions_T, behind)
        return self.decoder.own_logits(hidden if ids_RN.shape[1] == 1 else hidden.at(inputs.last_R))
