"""The interface of those who make drafts, as the segments of a step call it.

Legend:
    R  rows
    S  slots
    T  tokens of the step
    M  model width
    D  drafts of a slot
    K  tokens that a row emits, at most
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ridgeline.core.model_spec import LayerSpec
from ridgeline.core.plan import Delta, Feature
from ridgeline.layers.decoder import Hidden
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


class Proposer(Protocol):
    """A maker of drafts, which lie on the device in a table by slot that the next step reads.

    drafts_SD: int32; drafts that there are not are -1.
    layers: those of its own whose states lie behind the target's (`core.model_spec.with_draft`).
    taps: the target's layers whose outputs it reads.
    """

    drafts_SD: Tensor
    layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...]

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Prepare for requests that take slots over."""

    def catch_up(self, ran: Ran, states: States, *, drafts: bool) -> None:
        """Take in the tokens that the target has just run, whose step the states have begun.

        drafts: all rows continue what was noted before, and drafts are wanted behind the step.
        """

    def note(self, out_token_RK: Tensor, slots_R: Tensor, states: States, features: Feature, wanted: int) -> None:
        """Take the tokens that rows emitted, whose slots have advanced, and draft what follows them.

        wanted: how many drafts the next step may verify of a row. It is known on the host, since the work depends on
            it; 0: none.
        features: those of the rows that the drafts' draws must heed.
        """
