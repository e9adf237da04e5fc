"""Outcomes of steps on their way from the device to the host.

The last kernel of a step writes the outcome to page-locked memory: a copy would stand in the stream much longer than
its few bytes take, and the next step would wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.op import HEADER

KEPT = 8  # outcomes that are not overwritten; the engine keeps fewer steps in flight


class Letter(NamedTuple):
    """An outcome that is on its way."""

    turn: int
    num_bytes: int


class Mailbox:
    """A ring of outcomes of up to `max_bytes`. Device and host count the turns each for itself, so that a captured step
    finds its place alone."""

    def __init__(self, max_bytes: int, ops: Ops, device: torch.device) -> None:
        host = device if device.type == "meta" else torch.device("cpu")
        width = -(-(HEADER + max_bytes) // 16) * 16
        self._ring_KW = torch.zeros(KEPT, width, dtype=torch.uint8, device=host, pin_memory=device.type == "cuda")
        self._turn_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._post = ops.step_post
        self._turn = 0

    def post(self, packed_B: Tensor) -> None:
        """The device's part: the bytes go into the ring."""
        self._post(packed_B, self._ring_KW, self._turn_1)

    def expect(self, packed_B: Tensor) -> Letter:
        """The host's part, once for every post that runs: where to find it."""
        letter = Letter(self._turn, len(packed_B))
        self._turn += 1
        return letter

    def restart(self) -> None:
        """Forget all posts, those that nobody expected too. Nothing may be under way."""
        self._turn_1.zero_()
        self._turn = 0

    def open(self, letter: Letter) -> np.ndarray:
        """A copy of the bytes, once the device has passed the post."""
        row_W = self._ring_KW[letter.turn % KEPT].numpy()
        turn = int(row_W[:HEADER].view(np.int64)[0])
        if turn != letter.turn:
            raise RuntimeError(f"the outcome of step {letter.turn} was due, and that of step {turn} is in its place.")
        return row_W[HEADER : HEADER + letter.num_bytes].copy()
