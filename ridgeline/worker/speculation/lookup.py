"""Prompt lookup for all slots: their texts so far, and drafts of the tokens that follow.

The tables lie on the device and the device fills them, so a captured step finds its drafts without the host.

Legend:
    R  rows
    S  slots
    N  tokens of the longest request
    D  drafts of a slot
    K  tokens that a row emits, at most
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import Assign, Delta, Feature
from ridgeline.core.settings.speculation import Speculation
from ridgeline.core.specs.model import LayerSpec
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.lookup.op import NotedTexts, find_drafts
from ridgeline.kernels.step.lookup.suffix import continued_by_share
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.backlog import Catching
from ridgeline.worker.speculation.proposer import AtOnce, Ran, Taken
from ridgeline.worker.speculation.recent import Recent
from ridgeline.worker.state.states import States
from ridgeline.worker.upload import upload


class Lookup(AtOnce):
    """A `Proposer` that needs no model. text_SN: int32. recent: what others wrote, if it is looked up too.

    The rule of suffix decoding is for CPUs. On a GPU the latest of the longest matches is taken, as without it.
    """

    layers: tuple[LayerSpec, ...] = ()
    taps: tuple[int, ...] = ()
    tree_SN: Tensor | None = None

    def __init__(self, speculation: Speculation, slots: Slots, max_model_len: int, ops: Ops) -> None:
        self._slots, self._ops = slots, ops
        self._lengths, self._suffix = speculation.looked_up, speculation.suffix
        num_slots, device = slots.dummy + 1, slots.device
        self.text_SN = torch.zeros(num_slots, max_model_len, dtype=torch.int32, device=device)
        self.depth = speculation.num_speculative_tokens
        self.drafts_SD = torch.full((num_slots, self.depth), -1, device=device).int()
        self._shared_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.recent = Recent(speculation, slots) if speculation.lookup_recent_tokens else None

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Take the known tokens of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                known = np.array((*delta.prompt, *delta.output), np.int32)
                self.text_SN[delta.slot, : len(known)] = upload(known, self._slots.device)
                self.drafts_SD[delta.slot].fill_(-1)
        if self.recent is not None:
            self.recent.assign(deltas)

    def _likeliest(self, known_N: np.ndarray, count: int) -> tuple[np.ndarray, int]:
        assert self._suffix is not None
        return continued_by_share(known_N, count, self._lengths[1], *self._suffix)

    def catch_up(self, ran: Ran, states: States, catching: Catching) -> None:
        """Do nothing: tokens are noted as they are emitted."""

    def note(
        self,
        out_token_RK: Tensor,
        slots_R: Tensor,
        states: States,
        features: Feature,
        wanted: int,
        taken: Taken | None,
    ) -> None:
        """Take the tokens that rows emitted, and look for drafts of what follows them, however many are wanted: the
        text must be noted anyway."""
        slots = self._slots
        noted = NotedTexts(out_token_RK, slots_R, slots.kv_len_S, slots.max_len_S, slots.stopped_S, self.text_SN)
        if self._suffix is not None and self.drafts_SD.device.type == "cpu":
            find_drafts(noted, self.drafts_SD, self._shared_S, self._likeliest)
        else:
            self._ops.lookup_drafts(noted, self.drafts_SD, self._shared_S, *self._lengths)
        if self.recent is not None:
            found = self._shared_S, self.recent.salt_S, self.recent.next_H, self.drafts_SD
            self._ops.recent_drafts(noted, *found, self.recent.length)
