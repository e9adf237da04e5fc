"""Layers whose matrices wait in the host's memory, for a model that is larger than its device (Sheng et al., "FlexGen",
2023, from which the order of the copies is).

The device has two buffers, and a layer is copied into one of them while another is computed from the other. A copy
serves all rows of a step, however many they are. Behind the last of these layers the first ones are copied for the
next step. So the bus never rests, and a step takes as long as the slower of copies and computing.

    compute   | layer 0        | layer 2 waits for its copy | ...
    side      | layer 2 → B    | layer 4 → A, once layer 0 has been computed | ...
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.layers.linear import Linear
from ridgeline.quantization.weight import weight_of

ALIGNMENT = 256  # bytes, of a matrix in a buffer
BUFFERS = 2


class StreamedMatrix(NamedTuple):
    """A matrix in the host's memory, and its place in a buffer of the device."""

    host: Tensor
    here: Tensor


class StreamedLayers:
    """The copies of a decoder's layers, which is prepared.

    below: the layers that wait in the host's memory, an even number of them in their order, so that each always has
        the same buffer.
    """

    def __init__(self, layers: Sequence[nn.Module], below: Sequence[int], device: torch.device) -> None:
        maps = [[each for each in layers[n].modules() if isinstance(each, Linear) and each.below] for n in below]
        sizes = [sum(_room(each) for each in own) for own in maps]
        self._at, self._device = {n: place for place, n in enumerate(below)}, device
        self._buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._matrices = [self._placed(own, self._buffers[place % BUFFERS]) for place, own in enumerate(maps)]
        self.num_bytes = sum(matrix.host.nbytes for own in self._matrices for matrix in own)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: list[torch.cuda.Event | None] = [None] * len(below)
        for place in range(BUFFERS):
            self._copy(place)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the device's memory that layers pass through."""
        return sum(map(len, self._buffers))

    def _placed(self, maps: Sequence[Linear], buffer: Tensor) -> list[StreamedMatrix]:
        """Let these linear maps multiply with what is in a buffer."""
        found, start = list[StreamedMatrix](), 0
        for each in maps:
            assert each.weight is not None
            host = each.weight.data
            here = buffer[start : start + host.nbytes].view(host.dtype).view(host.shape)
            each.matrix = weight_of(each.ops, here)
            found.append(StreamedMatrix(host, here))
            start += _room(each)
        return found

    def before(self, layer: int) -> None:
        """Let the compute stream wait for a layer's copy."""
        place = self._at.get(layer)
        if place is not None and (copied := self._copied[place]) is not None:
            copied.wait()

    def after(self, layer: int) -> None:
        """Copy another layer into the buffer of one that has been queued."""
        place = self._at.get(layer)
        if place is not None:
            self._copy((place + BUFFERS) % len(self._at))

    def _copy(self, place: int) -> None:
        if self._side is None:
            for host, here in self._matrices[place]:
                here.copy_(host)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for host, here in self._matrices[place]:
                here.copy_(host, non_blocking=True)
            self._copied[place] = copied = torch.cuda.Event()
            copied.record()

    def bytes_per_second(self) -> float:
        """Return the rate at which layers come, by copies of the first two."""
        best, size = 0.0, sum(matrix.host.nbytes for own in self._matrices[:BUFFERS] for matrix in own)
        for _ in range(3):
            self._synchronize()
            start = time.perf_counter()
            for place in range(BUFFERS):
                self._copy(place)
            self._synchronize()
            best = max(best, size / max(time.perf_counter() - start, 1e-9))
        return best

    def _synchronize(self) -> None:
        if self._side is not None:
            torch.cuda.synchronize(self._device)


def _room(linear: Linear) -> int:
    """Return the bytes that a map's matrix takes in a buffer."""
    assert linear.weight is not None
    return -(-linear.weight.nbytes // ALIGNMENT) * ALIGNMENT
