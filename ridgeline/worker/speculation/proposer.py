"""The interface of the proposers of drafts, as the segments of a step call it.

Legend:
    R  rows
    S  slots
    T  tokens of the step
    M  model width
    D  drafts of a slot
    N  nodes of a tree: D + 1; fewer in a step whose rows were cut
    K  tokens that a row emits, at most
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Delta, Feature
from ridgeline.core.specs.model import LayerSpec
from ridgeline.layers.decoder import Hidden
from ridgeline.worker.speculation.backlog import Backlog, Catching
from ridgeline.worker.speculation.passes import Draws
from ridgeline.worker.speculation.trees import TreeDraws
from ridgeline.worker.state.states import States


class Ran(NamedTuple):
    """The tokens of a step, and what the target made of them: those of row r begin at start_R1[r].

    slots_R: the rows' slots.
    hidden: the output of the target's last layer.
    tapped: the outputs of the layers that the proposer taps: [T, M] each.
    live_T: the tokens that belong to a request.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    start_R1: Tensor
    slots_R: Tensor
    hidden: Hidden
    tapped: Sequence[Tensor]
    live_T: Tensor


class Taken(NamedTuple):
    """The values of a step's tokens that drafting needs once it is known which tokens stay.

    feature_TM: what a head reads of the target's hidden states.
    catching: the time at which the proposer runs over these tokens.
    path_RK: int32, behind which of a row's tokens each of those was drawn that it emitted, then -1; None: behind one
        after the other.
    drawn_RN: where rows verify trees, the tokens drawn at all of their nodes; -1 at those that a row did not run.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    start_R1: Tensor
    live_T: Tensor
    feature_TM: Tensor | None
    catching: Catching
    path_RK: Tensor | None = None
    drawn_RN: Tensor | None = None

    @property
    def first_R(self) -> Tensor:
        """The place of each row's first token."""
        return self.start_R1[:-1].long().clamp(max=len(self.token_ids_T) - 1)

    @property
    def ran_R(self) -> Tensor:
        """True for rows with tokens that belong to a request."""
        return (self.start_R1.diff() > 0) & self.live_T[self.first_R]

    def last_R(self, kv_len_R: Tensor) -> Tensor:
        """Return the place of the last token that each slot has kept, of which it now has kv_len_R."""
        first_R = self.first_R
        index_R = kv_len_R - 1 - self.positions_T[first_R]
        if self.path_RK is not None:
            index_R = self.path_RK.gather(1, index_R.clamp(0, self.path_RK.shape[1] - 1)[:, None])[:, 0].long()
        return (first_R + index_R).clamp(0, len(self.token_ids_T) - 1)

    def kept_RK(self, columns: int) -> Tensor:
        """Return the places of the tokens behind which the first tokens that a row emitted were drawn, as many as there
        are columns."""
        index_RK = self.path_RK
        if index_RK is None:
            index_RK = torch.arange(columns, device=self.token_ids_T.device)[None]
        return (self.first_R[:, None] + index_RK).clamp(0, len(self.token_ids_T) - 1)

    def stayed(self, kv_len_R: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens that each row ran, as many as there are columns, and which of them its slot has kept
        that now has kv_len_R tokens: [R, K] each. The step has no chunks."""
        column_K = torch.arange(columns, device=kv_len_R.device)
        kept_R = torch.where(self.ran_R, kv_len_R - self.positions_T[self.first_R], 0)
        place_RK = (self.first_R[:, None] + column_K).clamp(max=len(self.token_ids_T) - 1)
        return self.token_ids_T[place_RK], column_K < kept_R[:, None]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Taken:
        """Return the same with other tensors."""
        return Taken(
            change(self.token_ids_T),
            change(self.positions_T),
            change(self.start_R1),
            change(self.live_T),
            None if self.feature_TM is None else change(self.feature_TM),
            self.catching,
        )  # the path and what is drawn are not known yet


class Proposer(Protocol):
    """A maker of drafts, which lie on the device in a table by slot that the next step reads.

    drafts_SD: int32; drafts that there are not are -1.
    tree_SN: int64, the bits of the nodes of each slot's tree (kernels/base/tree.py); None if drafts are chains.
    depth: how many drafts of a slot can be right, at most.
    layers: those of its own whose states lie behind the target's (`core.specs.model.with_draft`).
    taps: the target's layers whose outputs it reads.
    backlog: the tokens that its network has not run over yet; None: it runs over all of them at once.
    """

    drafts_SD: Tensor
    tree_SN: Tensor | None
    depth: int
    layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...]
    backlog: Backlog | None

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Prepare for requests that take slots over."""

    def settle(self, slots_R: np.ndarray, states: States) -> None:
        """Run over the tokens of these slots that wait."""

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> Taken | None:
        """Take in the tokens that the target has just run, whose step the states have begun. Return the part of
        them that `note` needs."""

    def note(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken | None,
    ) -> None:
        """Take the tokens that rows emitted, whose slots have advanced, and draft what follows them.

        taken: what `catch_up` returned of the same step.

        wanted: how many drafts the next step may verify of a row. It is known on the host, since the work depends on
            it; 0: none.
        features: those of the rows that the drafts' draws must heed.
        """


class CatchesUp:
    """The part of a `Proposer` that has a network whose tokens may wait."""

    _draws: Draws | TreeDraws
    backlog: Backlog | None

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Forget the drafts and the waiting tokens of slots that change hands."""
        self._draws.assign(deltas)
        if self.backlog is not None:
            self.backlog.assign(deltas)


class AtOnce:
    """The part of a `Proposer` that has no network whose tokens could wait."""

    backlog: Backlog | None = None

    def settle(self, slots_R: np.ndarray, states: States) -> None:
        """Do nothing."""
