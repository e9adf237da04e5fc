"""A cascade: prompt lookup drafts where it finds something, and another proposer where it does not.

Legend:
    R  rows
    K  tokens that a row emits, at most
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.core.plan.step import Assign, Delta, Feature
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.lookup import Lookup
from ridgeline.worker.speculation.proposer import Proposer, Ran, Taken
from ridgeline.worker.state.states import States


class LookupFirst:
    """A `Proposer` of two. The second one has not run over the drafts that rows verify, which lookup may have found.

    On a CPU it makes no pass behind a step in which lookup found something for every row, and the tokens that stay wait
    for one in which it did not. On a GPU the host cannot know that: it runs over all tokens in the step itself, and its
    passes behind the step run always.
    """

    tree_SN: Tensor | None = None

    def __init__(self, lookup: Lookup, other: Proposer, slots: Slots) -> None:
        self._lookup, self._other, self._slots = lookup, other, slots
        self.layers, self.taps = other.layers, other.taps
        self.drafts_SD = torch.full_like(other.drafts_SD, -1)
        self.depth = other.depth
        self.backlog, self.settle = other.backlog, other.settle
        on_cpu, emits = slots.device.type == "cpu", 1 + self.drafts_SD.shape[1]
        if self.backlog is not None and on_cpu and emits <= self.backlog.longest:
            self.backlog.takes = Catching.LATER, Catching.BEHIND

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Prepare both for requests that take slots over."""
        self._lookup.assign(deltas)
        self._other.assign(deltas)
        for delta in deltas:
            if isinstance(delta, Assign):
                self.drafts_SD[delta.slot].fill_(-1)

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> Taken | None:
        """Let the second one take in all tokens of the step, or wait."""
        waits = self.backlog is not None and catching in self.backlog.takes
        return self._other.catch_up(ran, states, Catching.LATER if waits else Catching.NOW)

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
        rows = slots_R.long()
        self._lookup.note(out_token_RK, slots_R, states, features, wanted, None)
        found_R = self._lookup.drafts_SD[rows, 0] >= 0
        if slots_R.device.type == "cpu":
            goes_R = (out_token_RK[:, 0] >= 0) & (self._slots.stopped_S[rows] == 0)
            wanted = wanted if bool((goes_R & ~found_R).any()) else 0
        self._other.note(out_token_RK, slots_R, states, features, wanted, taken)
        others = self._lookup.drafts_SD[rows], self._other.drafts_SD[rows]
        self.drafts_SD[rows] = torch.where(found_R[:, None], *others)
