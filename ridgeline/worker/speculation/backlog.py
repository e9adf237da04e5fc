"""Tokens that a draft network has not processed yet.

While no drafts are wanted, running the draft network over every token would only make steps longer. So the tokens of
plain steps wait here, with the features that a head needs. Before drafts are wanted again the network processes all
waiting tokens in one pass. Many tokens cost little more than one, since the weights are read once.

The buffer of a slot is a ring: where it is full, a token takes the place of the oldest one. So a network whose drafts
do not pay costs only what the trials of them cost, which are bounded, however long drafts stay off.

The draft network's keys of waiting and dropped tokens are missing. Later drafts of the request may be worse for this
gap, and so may those of another request that finds its cached blocks. Tokens are the same.

Legend:
    S  slots
    R  rows
    B  tokens of a slot that wait, at most, and behind them a place for what does not
    K  tokens that a row runs in a step, at most
    T  tokens that wait, of all rows
    M  width of a feature
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Assign, Delta
from ridgeline.core.settings.speculation import MOST_WAITING
from ridgeline.core.specs.model import LayerSpec
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.wait import KeptFeatures, WaitingTokens
from ridgeline.worker.slots import Slots
from ridgeline.worker.upload import upload

LONGEST, SHORTEST = 64, 8  # tokens of a slot: more would not make a pass cheaper a token, and fewer hardly so
SMALLEST = 64  # tokens of a padded pass: so many, or twice as many, and so on


class Catching(Enum):
    """The time at which a network that drafts runs over the tokens of a step."""

    NOW = auto()  # in the step itself, right behind the target
    BEHIND = (
        auto()
    )  # in its first pass behind the step: drafts are wanted, and all rows continue what it ran over before
    LATER = auto()  # once drafts are wanted again


class Waiting(NamedTuple):
    """The tokens that waited in some rows, one row's behind the other's: row r has start_R1[r] … start_R1[r + 1] - 1,
    which are the last count_R[r] that its slot has cached. Tokens behind the last row's belong to no row.

    before_TM: a feature for each; None if none are kept.
    """

    slots_R: Tensor
    token_T: Tensor
    before_TM: Tensor | None
    start_R1: Tensor
    count_R: Tensor


class Backlog:
    """The tokens of all slots that wait.

    feature: [slots, M], of which one is kept for each token; None: none is.
    takes: the times for whose steps tokens wait here.
    padded: passes have as many rows each time, and one of a few numbers of tokens, as a GPU's kernels want it.
    """

    takes: tuple[Catching, ...] = (Catching.LATER,)

    def __init__(self, slots: Slots, longest: int, ops: Ops, feature: Tensor | None = None) -> None:
        self.longest, self._slots, self._ops, device = longest, slots, ops, slots.device
        count = slots.dummy + 1
        self._token_SB = torch.zeros(count, longest + 1, dtype=torch.int32, device=device)
        self._before_SBM = None if feature is None else feature.new_zeros(count, longest + 1, feature.shape[1])
        self._count_S = torch.zeros(count, dtype=torch.int64, device=device)  # that came; the last of them wait
        self._most_S = np.zeros(count, np.int64)  # the same on the host, which does not know which rows have stopped
        self.padded = device.type != "cpu"

    @staticmethod
    def of(slots: Slots, layers: Sequence[LayerSpec], ops: Ops, feature: Tensor | None = None) -> Backlog | None:
        """Return a backlog for a network of these layers, or None if its tokens cannot wait: with a window the keys
        that they see may be gone by then. Nor do they if there are so many slots that few tokens of each would."""
        longest = min(LONGEST, MOST_WAITING // slots.dummy)
        windows = any(state.span is not None for layer in layers for state in layer.mixer.states)
        return None if windows or longest < SHORTEST else Backlog(slots, longest, ops, feature)

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Forget the tokens of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                self._count_S[delta.slot].fill_(0)
                self._most_S[delta.slot] = 0

    def due(self, slots_R: np.ndarray, more_R: np.ndarray | None) -> bool:
        """Return True if what waits in these slots must be run over before a step behind which drafts are wanted.
        more_R: how many tokens of each it adds, at most; None: nothing may wait in it."""
        most_R = self._most_S[slots_R]
        return bool(most_R.any() if more_R is None else (most_R + more_R > self.longest).any())

    def expect(self, slots_R: np.ndarray, more_R: np.ndarray) -> None:
        """Count the tokens that a step adds, at most. The oldest ones of a full slot go."""
        self._most_S[slots_R] = np.minimum(self._most_S[slots_R] + more_R, self.longest)

    def pretend(self, tokens: int) -> np.ndarray:
        """Return an unused slot, in which so many tokens seem to wait, so that kernels are compiled early."""
        self._most_S[self._slots.dummy] = tokens
        return np.array([self._slots.dummy], np.int32)

    def add(self, slots_R: Tensor, token_RK: Tensor, there_RK: Tensor, before_RKM: Tensor | None = None) -> None:
        """Let the tokens that are there wait. The others are written to a place that is not read."""
        rows = slots_R.long()
        count_R = self._count_S[rows]
        place_RK = count_R[:, None] + there_RK.cumsum(1)
        place_RK = torch.where(there_RK, (place_RK - 1) % self.longest, self.longest)
        self._token_SB[rows[:, None], place_RK] = token_RK.int()
        if self._before_SBM is not None and before_RKM is not None:
            self._before_SBM[rows[:, None], place_RK] = before_RKM
        self._count_S[rows] = count_R + there_RK.sum(1)

    def add_one(
        self,
        slots_R: Tensor,
        token_R: Tensor,
        live_R: Tensor,
        drafts_SD: Tensor,
        feature_RM: Tensor | None = None,
        kept: KeptFeatures | None = None,
    ) -> None:
        """Let the one token of each row that ran it wait, and leave no drafts, as `step_wait` says. It should cost a
        step next to nothing."""
        if self._before_SBM is None and not self.padded:  # numpy takes a tenth of the time of torch for so little work
            there_R, count_S = live_R.numpy(), self._count_S.numpy()
            own = slots_R.numpy()[there_R]
            drafts_SD.numpy()[slots_R.numpy()] = -1
            self._token_SB.numpy()[own, count_S[own] % self.longest] = token_R.numpy()[there_R]
            count_S[own] += 1
            return
        tables = WaitingTokens(self._token_SB, self._before_SBM, self._count_S, drafts_SD)
        self._ops.step_wait(slots_R, token_R, live_R, feature_RM, tables, kept)

    def take(self, slots_R: np.ndarray) -> Waiting:
        """Return the tokens that wait in these slots, and empty these."""
        most = int(self._most_S[slots_R].sum())
        self._most_S[slots_R] = 0
        if not self.padded:
            own_R = torch.from_numpy(slots_R)
            return self._taken(own_R, int(self._count_S[own_R.long()].clamp(max=self.longest).sum()))
        padded_R = np.full(self._slots.dummy, self._slots.dummy, np.int32)
        padded_R[: len(slots_R)] = slots_R
        return self._taken(upload(padded_R, self._slots.device), next(size for size in self.sizes if size >= most))

    def _taken(self, slots_R: Tensor, tokens: int) -> Waiting:
        rows = slots_R.long()
        came_R = self._count_S[rows]
        count_R = came_R.clamp(max=self.longest)
        end_R = count_R.cumsum(0)
        start_R1 = torch.cat((end_R.new_zeros(1), end_R))
        token_T = torch.arange(tokens, device=rows.device)
        row_T = torch.searchsorted(end_R, token_T, right=True).clamp(max=len(rows) - 1)
        place_T = (token_T - start_R1[row_T] + (came_R - count_R)[row_T]) % self.longest
        places = rows[row_T], place_T
        before_TM = None if self._before_SBM is None else self._before_SBM[places]
        self._count_S.index_fill_(0, rows, 0)
        return Waiting(slots_R, self._token_SB[places], before_TM, start_R1.int(), count_R)

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens that passes have, if they are padded."""
        most, sizes = self._slots.dummy * self.longest, [SMALLEST]
        while sizes[-1] < most:
            sizes.append(2 * sizes[-1])
        return sizes
