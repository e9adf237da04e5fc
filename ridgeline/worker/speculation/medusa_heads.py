"""Drafts by Medusa's heads, each of which guesses one of the next tokens from the same hidden state.

Legend:
    R  rows
    K  tokens that a row emits, at most
    M  model width
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.core.plan.step import Feature
from ridgeline.core.specs.model import LayerSpec
from ridgeline.layers.medusa import Medusa
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.passes import Draws
from ridgeline.worker.speculation.proposer import AtOnce, Ran, Taken
from ridgeline.worker.speculation.trees import TreeDraws
from ridgeline.worker.state.states import States


class MedusaHeads(AtOnce):
    """A `Proposer` that keeps nothing between steps."""

    layers: tuple[LayerSpec, ...] = ()
    taps: tuple[int, ...] = ()

    def __init__(self, heads: Medusa, draws: Draws | TreeDraws, slots: Slots) -> None:
        self.heads, self._slots, self._draws, self.assign = heads, slots, draws, draws.assign
        self.drafts_SD, self.tree_SN, self.depth = draws.drafts_SD, draws.tree_SN, draws.depth

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> Taken:
        """Return the step's hidden states, until it is known which of them are the newest."""
        x_TM = self.heads.target.normed(ran.hidden)
        return Taken(ran.token_ids_T, ran.positions_T, ran.start_R1, ran.live_T, x_TM, catching)

    def note(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken | None,
    ) -> None:
        """Draft what follows the slots' last tokens: one token by each head, or the likeliest ones in every order."""
        assert taken is not None
        assert taken.feature_TM is not None
        x_RM = taken.feature_TM[taken.last_R(self._slots.kv_len_S[slots_R.long()])]
        emitted, heads = (out_token_RK, slots_R, features, wanted), self.heads
        if isinstance(self._draws, TreeDraws):
            self._draws.draw(*emitted, lambda expanded: heads.scores(expanded.depth, x_RM)[:, None])
        else:
            self._draws.draw(*emitted, lambda place, *_: heads.scores(place, x_RM))
