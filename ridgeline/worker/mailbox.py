"""Outcomes of steps on their way from the device to the host.

The last kernel of a step writes the outcome to page-locked memory. A copy would stand in the stream much longer than
its few bytes take, and the next step would wait for it.

Legend:
    Q  outcomes that the ring keeps
    O  octets (bytes) of an outcome, or of a row of the ring
"""

from __future__ import annotations

import numpy as np
import torch

from ridgeline.kernels.ops import Ops
from ridgeline.kernels.step.op import HEADER
from ridgeline.worker.step import DeviceStep, Letter, PlannedStep, StepPart

# The outcomes of so many steps are kept before one is overwritten. Fewer are in flight at once: two of the engine's
# plans, each of up to four parts for every stage of a pipeline (`ranks/parts.py`)
KEPT = 128


class Mailbox(StepPart):
    """A ring of outcomes of up to `max_bytes`. Device and host each count the turns, so that a captured step finds its
    place in the ring without the host."""

    def __init__(self, max_bytes: int, ops: Ops, device: torch.device) -> None:
        host = device if device.type == "meta" else torch.device("cpu")
        width = -(-(HEADER + max_bytes) // 16) * 16
        self._ring_QO = torch.zeros(KEPT, width, dtype=torch.uint8, device=host, pin_memory=device.type == "cuda")
        self._turn_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._post = ops.step_post
        self._turn = 0

    def sample(self, step: DeviceStep) -> None:
        """Write the outcome to the ring."""
        self._post(step.outcome.packed, self._ring_QO, self._turn_1)

    def after_sample(self, step: PlannedStep) -> None:
        """Count the post."""
        step.letter = Letter(self._turn, len(step.device.outcome.packed))
        self._turn += 1

    def restart(self) -> None:
        """Forget all posts, including those that were not expected. No step may be in flight."""
        self._turn_1.zero_()
        self._turn = 0

    def go_on(self) -> None:
        """Forget the posts that were not expected, behind all that was launched."""
        self._turn_1.fill_(self._turn)

    def open(self, letter: Letter) -> np.ndarray:
        """Return a copy of the outcome's bytes. The device must have passed the post."""
        row_O = self._ring_QO[letter.turn % KEPT].numpy()
        turn = int(row_O[:HEADER].view(np.int64)[0])
        if turn != letter.turn:
            raise RuntimeError(f"the outcome of step {letter.turn} was due, and that of step {turn} is in its place.")
        return row_O[HEADER : HEADER + letter.num_bytes].copy()
