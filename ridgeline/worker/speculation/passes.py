"""Drafts that are drawn behind a step for its rows, and passes of networks that score them.

At the end of a step such a network continues each slot's text from its last token, one token a pass. The keys of a pass
lie beyond the request's length, in blocks that the engine has reserved. Those of right drafts stay, and the others are
overwritten.

A draft is drawn as the target will draw the token in its place: with the slot's sampling parameters and the noise of
that position. So draft and target often agree at any temperature, and more often the more similar their scores are.

Nothing here is read by the host, and shapes depend on the number of rows and of passes alone.

Legend:
    R  rows
    S  slots
    D  drafts of a slot
    K  tokens that a row emits, at most
    N  tokens that a row runs in a pass; nodes of a slot: D + 1
    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.core.plan.step import Assign, Delta, Feature
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.op import NO_DRAFTS, SlotDrafts, SlotTables, StepInputs, StepRows
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Waiting
from ridgeline.worker.state.states import DeviceRows, States
from ridgeline.worker.vocabulary import Vocabulary

Scores = Callable[[int, Tensor, Tensor], Tensor]


class StatesBehind:
    """The states of layers that lie behind those of the target."""

    def __init__(self, states: States, layers: int) -> None:
        self._states, self._first = states, states.num_layers - layers

    @property
    def live_T(self) -> Tensor | None:
        return self._states.live_T

    def __getitem__(self, layer: int) -> Any:
        return self._states[self._first + layer]


class Draws:
    """Draws drafts into a table by slot. drafts: of a slot, at most. depth, tree_SN: as in `Proposer`."""

    tree_SN: Tensor | None = None

    def __init__(self, drafts: int, slots: Slots, vocabulary: Vocabulary) -> None:
        self._slots, self._vocabulary, self.depth = slots, vocabulary, drafts
        self.drafts_SD = torch.full((slots.dummy + 1, drafts), -1, dtype=torch.int32, device=slots.device)

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Forget the drafts of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                self.drafts_SD[delta.slot].fill_(-1)

    def draw(self, out_token_RK: Tensor, slots_R: Tensor, features: Feature, wanted: int, scores: Scores) -> None:
        """Draft what follows the slots' last tokens: `wanted` tokens at most, and none behind the last one that a
        request may emit. Rows that emitted nothing, or whose slot has stopped, get none.

        scores: gives the scores behind the token that was drawn last. Its arguments are the number of drafts before,
            these tokens, and the rows for which it matters; before the first draft these are all that emitted a token,
            since the keys of those that have stopped may be found by others.
        """
        slots, rows = self._slots, slots_R.long()
        self.drafts_SD.index_fill_(0, rows, -1)  # a number on the host could not be captured
        if wanted == 0:
            return
        kv_len_R, token_R = slots.kv_len_S[rows], slots.last_token_S[rows]
        runs_R = out_token_RK[:, 0] >= 0
        goes_R = runs_R & (slots.stopped_S[rows] == 0)
        room_R = slots.max_len_S[rows] - kv_len_R - 2
        for place in range(min(wanted, self.drafts_SD.shape[1])):
            logits_RV = scores(place, token_R, runs_R)
            known_R = kv_len_R + place + 1
            token_R = self._vocabulary.sample(logits_RV, slots.sampling, slots_R, known_R, features)
            goes_R = goes_R & (room_R > place) & (token_R >= 0)
            self.drafts_SD[rows, place] = torch.where(goes_R, token_R, -1).int()
            token_R, runs_R = token_R.clamp(min=0), goes_R & (room_R > place + 1)


class Passes:
    """Prepares the states for passes.

    The slots' lengths are copied, since passes advance them. A row that does not run in a pass counts as stopped in it:
    it writes to the null block, whatever its block table says.
    """

    def __init__(self, slots: Slots, block_size: int, ops: Ops) -> None:
        self._slots, self._block_size, self._ops = slots, block_size, ops
        self._kv_len_S = torch.zeros_like(slots.kv_len_S)
        self._stopped_S = torch.ones_like(slots.stopped_S)

    def begin(self, ids_RN: Tensor, slots_R: Tensor, states: States, kv_len_R: Tensor, runs_R: Tensor) -> StepInputs:
        """Prepare for a pass in which the rows that run have these tokens behind their first kv_len_R ones."""
        start_R1 = _alike(len(ids_RN), ids_RN.shape[1], slots_R.device)
        return self.begin_ragged(ids_RN.flatten(), start_R1, slots_R, states, kv_len_R, runs_R, ids_RN.shape[1])

    def begin_nodes(
        self,
        nodes: Nodes,
        each: int,
        slots_R: Tensor,
        states: States,
        runs_R: Tensor,
        *,
        windows_causal: bool = False,
    ) -> StepInputs:
        """Prepare for a pass in which the rows that run have the same number of nodes of their trees. windows_causal:
        as in `DeviceRows`."""
        start_R1 = _alike(len(slots_R), each, slots_R.device)
        none_T = torch.full((len(slots_R) * each,), -1, dtype=torch.int32, device=slots_R.device)
        row = none_T, start_R1, slots_R
        return self.begin_ragged(*row, states, nodes.first_R, runs_R, each, nodes, windows_causal=windows_causal)

    def begin_waiting(self, waiting: Waiting, states: States, kv_len_R: Tensor) -> StepInputs:
        """Prepare for a pass over tokens that waited, in rows whose first kv_len_R ones were run over."""
        row = waiting.token_T, waiting.start_R1, waiting.slots_R
        return self.begin_ragged(*row, states, kv_len_R, waiting.count_R > 0)

    def begin_ragged(
        self,
        ids_T: Tensor,
        start_R1: Tensor,
        slots_R: Tensor,
        states: States,
        kv_len_R: Tensor,
        runs_R: Tensor,
        each: int = 0,
        nodes: Nodes | None = None,
        *,
        windows_causal: bool = False,
    ) -> StepInputs:
        """Prepare for a pass of rows that begin at start_R1. each: how many tokens they all have; 0: they differ.
        nodes: those that the tokens without an id are. windows_causal: as in `DeviceRows`."""
        rows = slots_R.long()
        self._kv_len_S[rows], self._stopped_S[rows] = kv_len_R, (~runs_R).int()
        tables_ASC = self._slots.block_tables_ASC
        slots = SlotTables(self._kv_len_S, self._slots.last_token_S, self._stopped_S, tables_ASC, self._block_size)
        drafts = NO_DRAFTS if nodes is None else SlotDrafts(nodes.token_SD, nodes.sight_SN, nodes.base_S)
        inputs = self._ops.step_inputs(StepRows(slots_R, start_R1, ids_T.int()), slots, drafts)
        running = DeviceRows(
            slots_R=slots_R,
            start_R1=start_R1,
            kv_len_R=inputs.kv_len_R,
            last_R=inputs.last_R,
            num_tokens=len(ids_T),
            tokens_each=each,
            tree=inputs.tree,
            windows_causal=windows_causal,
        )
        states.begin(running, tables_ASC.unbind(), inputs.places_AT.unbind(), inputs.live_T)
        return inputs


class Nodes(NamedTuple):
    """Nodes of trees, as `step_inputs` takes them.

    token_SD: int32, the tokens of each slot's nodes but the first. sight_SN: int64, the bits of all.
    base_S: int64, the place of the first one.
    first_R: the place of the first one of a pass.
    """

    token_SD: Tensor
    sight_SN: Tensor
    base_S: Tensor
    first_R: Tensor


def _alike(rows: int, each: int, device: torch.device) -> Tensor:
    """Return the places at which rows of as many tokens begin, and that at which the last one ends."""
    return torch.arange(0, (rows + 1) * each, each, dtype=torch.int32, device=device)
