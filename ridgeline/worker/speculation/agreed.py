"""Drafts that are equal on all ranks.

Each rank runs the whole draft network on the same inputs. Equal devices compute the same bits. But if ranks ever
verified different drafts for a row, their parts of its keys would belong to different tokens, and the row would stay
wrong. So all ranks use the first rank's drafts, which costs one small message a step.

Legend:
    R  rows
    K  tokens that a row emits, at most
    X  numbers of a row
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.core.plan.step import Delta, Feature
from ridgeline.parallel.axis import Axis
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.proposer import Proposer, Ran, Taken
from ridgeline.worker.state.states import States


class Agreed:
    """A `Proposer` that makes another one's drafts those of the first rank of an axis."""

    def __init__(self, own: Proposer, axis: Axis) -> None:
        self._own, self._axis = own, axis
        self.drafts_SD, self.tree_SN, self.depth = own.drafts_SD, own.tree_SN, own.depth
        self.layers, self.taps = own.layers, own.taps
        self.backlog, self.settle = own.backlog, own.settle

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Prepare for requests that take slots over."""
        self._own.assign(deltas)

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> Taken | None:
        """Take in the tokens of the step."""
        return self._own.catch_up(ran, states, catching)

    def note(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken | None,
    ) -> None:
        """Draft what follows the slots' last tokens, and take the first rank's drafts."""
        self._own.note(out_token_RK, slots_R, states, features, wanted, taken)
        if wanted == 0:
            return
        rows = slots_R.long()
        own_RX = self.drafts_SD[rows]
        if self.tree_SN is not None:
            own_RX = torch.cat((own_RX, self.tree_SN[rows].view(torch.int32)), 1)
        first_RX = self._axis.all_gather(own_RX)[:, : own_RX.shape[1]]
        drafts = self.drafts_SD.shape[1]
        self.drafts_SD[rows] = first_RX[:, :drafts]
        if self.tree_SN is not None:
            self.tree_SN[rows] = first_RX[:, drafts:].clone().view(torch.int64)  # from where 8 bytes may begin
