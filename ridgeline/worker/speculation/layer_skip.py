"""Drafts by the model itself without some of its layers (Zhang et al., arXiv 2309.08168).

It needs no weights and no keys of its own: a pass reads the keys that the whole model has left, and writes its own
behind them, where the next step overwrites them. It can draft for the tokens behind the last one alone, so it never
runs over a prompt.

Legend:
    R  rows
    K  tokens that a row emits, at most
    T  tokens of a pass
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ridgeline.core.model_spec import LayerSpec
from ridgeline.core.plan import Feature
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.passes import Draws, Passes
from ridgeline.worker.speculation.proposer import Ran, Taken
from ridgeline.worker.state.states import States
from ridgeline.worker.vocabulary import Vocabulary


class LayerSkip:
    """A `Proposer` that runs its target. skipped: the layers that it leaves out."""

    layers: tuple[LayerSpec, ...] = ()
    taps: tuple[int, ...] = ()
    tree_SN: Tensor | None = None

    def __init__(
        self, target: Decoder, skipped: Collection[int], drafts: int, slots: Slots, block_size: int, ops: Ops
    ) -> None:
        self._target, self._slots = target, slots
        self._kept = [index for index in range(len(target.layers)) if index not in skipped]
        self._draws = Draws(drafts, slots, Vocabulary(target.spec.vocab_size, target.tp, ops))
        self.passes = Passes(slots, block_size, ops)
        self.drafts_SD, self.assign = self._draws.drafts_SD, self._draws.assign
        self.depth = drafts

    def catch_up(self, ran: Ran, states: States, *, drafts: bool) -> None:
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
            return self._target.own_logits(self._run(inputs.token_ids_T, inputs.positions_T, states))

        self._draws.draw(out_token_RK, slots_R, features, wanted, scores)

    def _run(self, token_ids_T: Tensor, positions_T: Tensor, states: States) -> Hidden:
        x_TM, residual_TM = self._target.embedded(token_ids_T, positions_T), None
        embedded_TM = x_TM
        for index in self._kept:
            layer, state = self._target.layers[index], states[index]
            x_TM, residual_TM = layer(x_TM, residual_TM, positions_T, state, states.live_T, embedded_TM)
        return Hidden(x_TM, residual_TM)
