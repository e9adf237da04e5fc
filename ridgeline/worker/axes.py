"""Positions on three axes (M-RoPE, arXiv 2409.12191): time, and the rows and columns of pictures. Words have one
position on all three, so rows that decode differ from those of other models by a shift alone, and keep their graphs.

Legend:
    T  tokens of the step
    R  rows of the step
    Z  rows of the table of angles, one for each position
    Y  rotated width of a head
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.rotary import Rotary
from ridgeline.worker.slots import Slots
from ridgeline.worker.step import DeviceStep


class Axes:
    """The rotations of a model whose positions have three axes."""

    def __init__(self, rotaries: Sequence[Rotary], slots: Slots) -> None:
        self._rotaries, self._slots = rotaries, slots

    @staticmethod
    def of(decoder: Decoder, slots: Slots) -> Axes | None:
        """Return those of a model, or None if its positions have one axis."""
        found = [each for each in decoder.modules() if isinstance(each, Rotary) and each.spec.axes]
        return Axes(found, slots) if found else None

    @contextmanager
    def turned(self, step: DeviceStep, index_T: Tensor) -> Iterator[Tensor]:
        """Return the positions of a step's tokens, as rows of the tables of angles. If some have three positions, the
        tables are the step's own inside. index_T: the tokens' numbers in their requests."""
        inputs = step.inputs
        if inputs.tokens_each:
            slots_T = inputs.slots_R.repeat_interleave(inputs.tokens_each, output_size=len(index_T))
        else:
            token_T = torch.arange(len(index_T), device=index_T.device)
            row_T = torch.searchsorted(inputs.start_R1[1:].contiguous(), token_T, right=True)
            slots_T = inputs.slots_R[row_T.clamp_(max=len(inputs.slots_R) - 1)]
        # Rows that a graph pads with have no place: theirs are those of a slot without a shift
        positions_T = (index_T + self._slots.shift_S[slots_T]).clamp_(min=0)
        if step.places is None:
            yield positions_T
            return
        places_3T = step.places.placed(positions_T)
        tables = [each.cos_sin_ZY for each in self._rotaries]
        try:
            for each in self._rotaries:
                each.cos_sin_ZY = each.by_axes(places_3T)
            yield torch.arange(len(index_T), device=index_T.device)
        finally:
            for each, table_ZY in zip(self._rotaries, tables, strict=True):
                each.cos_sin_ZY = table_ZY
