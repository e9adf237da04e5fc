"""Drafts by a smaller model, whose keys and values lie beside the target's in the same blocks.

At the end of a step the draft model goes on from each slot's last token, one token a pass. The keys of a pass lie
behind the length of the request, where the engine has blocks for them: those of right drafts stay, and the others are
overwritten. So its keys are there wherever the target's are, but for that of the last draft, where all were right: no
pass ran it. The first pass therefore takes two tokens of each row, the last one and that in front of it. Behind chunks
of prompts, and where no drafts are wanted, the draft model runs over the target's tokens in the step itself, right
behind the target.

A draft is drawn as the target will draw the token in its place: with the slot's sampling parameters and the noise of
that position. So the two often agree at any temperature, the more so the more their scores do.

Nothing here is read by the host, and shapes depend on the number of rows and of passes alone.

Legend:
    R  rows
    S  slots
    T  tokens of the step
    D  drafts of a slot
    K  tokens that a row emits, at most
    N  tokens that a row runs in a pass
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.plan import Assign, Delta, Feature
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.proposer import Ran
from ridgeline.worker.state.states import DeviceRows, States
from ridgeline.worker.vocabulary import Vocabulary


class StatesBehind:
    """The states of the draft model's layers, which lie behind those of the target's `first` layers."""

    def __init__(self, states: States, first: int) -> None:
        self._states, self._first = states, first
        self.live_T = states.live_T

    def __getitem__(self, layer: int) -> Any:
        return self._states[self._first + layer]


class DraftModel:
    """A `Proposer` that runs a network.

    The slots' lengths are copied, since passes advance them. A slot that has no draft to make in a pass counts as
    stopped in it: it writes to the null block, whatever its block table says. Only the first pass runs for those too
    that the step has stopped, whose keys may be found by others.
    """

    def __init__(self, decoder: Decoder, drafts: int, slots: Slots, block_size: int, ops: Ops) -> None:
        self.decoder, self.layers = decoder, decoder.spec.layers
        self._slots, self._block_size, self._ops = slots, block_size, ops
        self._vocabulary = Vocabulary(decoder.spec.vocab_size, decoder.tp, ops)
        num_slots, device = slots.dummy + 1, slots.device
        self.drafts_SD = torch.full((num_slots, drafts), -1, dtype=torch.int32, device=device)
        self._kv_len_S = torch.zeros_like(slots.kv_len_S)
        self._stopped_S = torch.ones(num_slots, dtype=torch.int32, device=device)

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Forget the drafts of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                self.drafts_SD[delta.slot].fill_(-1)

    def catch_up(self, ran: Ran, states: States, *, drafts: bool) -> None:
        """Write the keys of the step's tokens, unless the first pass of `note` writes what is missing."""
        self._ran = ran
        if not drafts:
            self.decoder(ran.token_ids_T, ran.positions_T, self._behind(states))

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
        ids_RN = torch.stack((self._before(kv_len_R), token_R), 1)
        for place in range(min(wanted, self.drafts_SD.shape[1])):
            self._kv_len_S[rows], self._stopped_S[rows] = kv_len_R + place + 1 - ids_RN.shape[1], (~runs_R).int()
            token_R = self._pass(ids_RN, slots_R, states, features, kv_len_R + place + 1)
            goes_R = goes_R & (room_R > place) & (token_R >= 0)
            self.drafts_SD[rows, place] = torch.where(goes_R, token_R, -1).int()
            runs_R, ids_RN = goes_R & (room_R > place + 1), token_R[:, None].clamp(min=0)

    def _before(self, kv_len_R: Tensor) -> Tensor:
        """Return the token in front of each slot's last one, which the step has run. [R]"""
        ids_T, positions_T, start_R1 = self._ran
        first_R = start_R1[:-1].long().clamp(max=len(ids_T) - 1)
        return ids_T[(first_R + kv_len_R - 1 - positions_T[first_R]).clamp(0, len(ids_T) - 1)]

    def _pass(self, ids_RN: Tensor, slots_R: Tensor, states: States, features: Feature, index_R: Tensor) -> Tensor:
        """Run the next tokens of every row, and return the tokens drawn behind them. [R]

        index_R: the numbers of known tokens by which they are drawn.
        """
        slots, (count, each) = self._slots, ids_RN.shape
        start_R1 = torch.arange(0, (count + 1) * each, each, dtype=torch.int32, device=slots_R.device)
        inputs = self._ops.step_inputs(
            slots_R,
            start_R1,
            ids_RN.flatten().int(),
            self._kv_len_S,
            slots.last_token_S,
            self._stopped_S,
            slots.block_tables_ASC,
            self._block_size,
            None,
        )
        rows = DeviceRows(
            slots_R=slots_R,
            start_R1=start_R1,
            kv_len_R=inputs.kv_len_R,
            last_R=inputs.last_R,
            num_tokens=count * each,
            tokens_each=each,
        )
        states.begin(rows, slots.block_tables_ASC.unbind(), inputs.places_AT.unbind(), inputs.live_T)
        hidden = self.decoder(inputs.token_ids_T, inputs.positions_T, self._behind(states))
        logits_RU = self.decoder.own_logits(hidden if each == 1 else hidden.at(inputs.last_R))
        return self._vocabulary.sample(logits_RU, slots.sampling, slots_R, index_R, features)

    def _behind(self, states: States) -> StatesBehind:
        return StatesBehind(states, states.num_layers - len(self.layers))
