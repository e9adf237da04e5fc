"""Drafts by Medusa's heads, each of which guesses one of the next tokens from the same hidden state.

Legend:
    R  rows
    S  slots
    D  drafts of a slot
    K  tokens that a row emits, at most
    M  model width
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.core.model_spec import LayerSpec
from ridgeline.core.plan import Assign, Delta, Feature
from ridgeline.kernels.ops import Ops
from ridgeline.layers.medusa import Medusa
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.passes import last_of
from ridgeline.worker.speculation.proposer import Ran
from ridgeline.worker.state.states import States
from ridgeline.worker.vocabulary import Vocabulary


class MedusaHeads:
    """A `Proposer` that keeps nothing between steps."""

    layers: tuple[LayerSpec, ...] = ()
    taps: tuple[int, ...] = ()

    def __init__(self, heads: Medusa, drafts: int, slots: Slots, ops: Ops) -> None:
        self.heads, self._slots = heads, slots
        self._vocabulary = Vocabulary(heads.target.spec.vocab_size, heads.target.tp, ops)
        shape = (slots.dummy + 1, drafts)
        self.drafts_SD = torch.full(shape, -1, dtype=torch.int32, device=slots.device)

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Forget the drafts of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                self.drafts_SD[delta.slot].fill_(-1)

    def catch_up(self, ran: Ran, states: States, *, drafts: bool) -> None:
        """Remember the step's hidden states until it is known which of them are the newest."""
        self._ran = ran

    def note(self, out_token_RK: Tensor, slots_R: Tensor, states: States, features: Feature, wanted: int) -> None:
        """Draft `wanted` tokens at most behind those that the rows emitted, and none behind the last one that a request
        may emit."""
        slots, rows = self._slots, slots_R.long()
        self.drafts_SD[rows] = -1
        if wanted == 0:
            return
        kv_len_R = slots.kv_len_S[rows]
        goes_R = (out_token_RK[:, 0] >= 0) & (slots.stopped_S[rows] == 0)
        room_R = slots.max_len_S[rows] - kv_len_R - 2
        x_RM = self.heads.target.normed(self._ran.hidden.at(last_of(self._ran, kv_len_R)))
        for place in range(min(wanted, self.drafts_SD.shape[1])):
            logits_RV = self.heads.scores(place, x_RM)
            token_R = self._vocabulary.sample(logits_RV, slots.sampling, slots_R, kv_len_R + place + 1, features)
            goes_R = goes_R & (room_R > place) & (token_R >= 0)
            self.drafts_SD[rows, place] = torch.where(goes_R, token_R, -1).int()
