"""Drafts by the model itself without some of its layers (Zhang et al., arXiv 2309.08168).

It needs no weights and no keys of its own: a pass reads the keys that the whole model has left, and writes its own
behind them, where the next step overwrites them. It can draft for the tokens behind the last one alone, so it never
runs over a prompt.

Legend:
    R  rows
    K  tokens that a row emits, at most
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ridgeline.core.plan.step import Feature
from ridgeline.core.specs.model import LayerSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.passes import Draws, Passes
from ridgeline.worker.speculation.proposer import AtOnce, Ran, Taken
from ridgeline.worker.state.states import States


class LayerSkip(AtOnce):
    """A `Proposer` that runs its target. skipped: the layers that it leaves out."""

    layers: tuple[LayerSpec, ...] = ()
    taps: tuple[int, ...] = ()
    tree_SN: Tensor | None = None

    def __init__(
        self, target: Decoder, skipped: Collection[int], draws: Draws, slots: Slots, block_size: int, ops: Ops
    ) -> None:
        self._target, self._slots = target, slots
        self._kept = [index for index in range(len(target.layers)) if index not in skipped]
        self._draws, self.passes = draws, Passes(slots, block_size, ops)
        self.drafts_SD, self.depth, self.assign = draws.drafts_SD, draws.depth, draws.assign

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> None:
        """Do nothing: the target's keys are all that there are."""

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
        kv_len_R = self._slots.kv_len_S[slots_R.long()]

        def scores(place: int, token_R: Tensor, runs_R: Tensor) -> Tensor:
            inputs = self.passes.begin(token_R[:, None], slots_R, states, kv_len_R + place, runs_R)
            hidden = self._target(inputs.token_ids_T, inputs.positions_T, states, only=self._kept)
            return self._target.own_logits(hidden)

        self._draws.draw(out_token_RK, slots_R, features, wanted, scores)
