"""Passes of a network that drafts, behind a step and for the step's rows.

At the end of a step such a network goes on from each slot's last token, one token a pass. The keys of a pass lie behind
the length of the request, where the engine has blocks for them: those of right drafts stay, and the others are
overwritten.

A draft is drawn as the target will draw the token in its place: with the slot's sampling parameters and the noise of
that position. So the two often agree at any temperature, the more so the more their scores do.

Nothing here is read by the host, and shapes depend on the number of rows and of passes alone.

Legend:
    R  rows
    S  slots
    N  tokens that a row runs in a pass
    V  vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.core.plan import Feature
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.op import StepInputs
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.proposer import Ran
from ridgeline.worker.state.states import DeviceRows, States
from ridgeline.worker.vocabulary import Vocabulary


class StatesBehind:
    """The states of layers that lie behind those of the target."""

    def __init__(self, states: States, layers: int) -> None:
        self._states, self._first = states, states.num_layers - layers
        self.live_T = states.live_T

    def __getitem__(self, layer: int) -> Any:
        return self._states[self._first + layer]


class Passes:
    """Prepares the states for passes, and draws.

    The slots' lengths are copied, since passes advance them. A row that does not run in a pass counts as stopped in it:
    it writes to the null block, whatever its block table says.
    """

    def __init__(self, slots: Slots, vocabulary: Vocabulary, block_size: int, ops: Ops) -> None:
        self._slots, self._vocabulary, self._block_size, self._ops = slots, vocabulary, block_size, ops
        self._kv_len_S = torch.zeros_like(slots.kv_len_S)
        self._stopped_S = torch.ones_like(slots.stopped_S)

    def begin(self, ids_RN: Tensor, slots_R: Tensor, states: States, kv_len_R: Tensor, runs_R: Tensor) -> StepInputs:
        """Prepare for a pass in which the rows that run have these tokens behind their first kv_len_R ones."""
        (count, each), device = ids_RN.shape, slots_R.device
        start_R1 = torch.arange(0, (count + 1) * each, each, dtype=torch.int32, device=device)
        return self.begin_ragged(ids_RN.flatten(), start_R1, slots_R, states, kv_len_R, runs_R, each)

    def begin_ragged(
        self,
        ids_T: Tensor,
        start_R1: Tensor,
        slots_R: Tensor,
        states: States,
        kv_len_R: Tensor,
        runs_R: Tensor,
        each: int = 0,
    ) -> StepInputs:
        """Prepare for a pass of rows that begin at start_R1. each: how many tokens they all have; 0: they differ."""
        rows = slots_R.long()
        self._kv_len_S[rows], self._stopped_S[rows] = kv_len_R, (~runs_R).int()
        tables_ASC = self._slots.block_tables_ASC
        inputs = self._ops.step_inputs(
            slots_R,
            start_R1,
            ids_T.int(),
            self._kv_len_S,
            self._slots.last_token_S,
            self._stopped_S,
            tables_ASC,
            self._block_size,
            None,
        )
        running = DeviceRows(
            slots_R=slots_R,
            start_R1=start_R1,
            kv_len_R=inputs.kv_len_R,
            last_R=inputs.last_R,
            num_tokens=len(ids_T),
            tokens_each=each,
        )
        states.begin(running, tables_ASC.unbind(), inputs.places_AT.unbind(), inputs.live_T)
        return inputs

    def draw(self, logits_RV: Tensor, slots_R: Tensor, known_R: Tensor, features: Feature) -> Tensor:
        """Return the tokens drawn behind so many known ones. [R]"""
        return self._vocabulary.sample(logits_RV, self._slots.sampling, slots_R, known_R, features)


def last_of(ran: Ran, kv_len_R: Tensor) -> Tensor:
    """Return the place, among the step's tokens, of the last one that each slot has kept. [R]"""
    first_R = ran.start_R1[:-1].long().clamp(max=len(ran.token_ids_T) - 1)
    return (first_R + kv_len_R - 1 - ran.positions_T[first_R]).clamp(0, len(ran.token_ids_T) - 1)
