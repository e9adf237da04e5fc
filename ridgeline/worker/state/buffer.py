"""The pool of memory of all cache groups, as views that layers read and write.

Legend:
    N  block ids, as `core.specs.cache_layout` counts them
    W  words of a unit, of 8 bytes or of 1 byte
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ridgeline.core.plan.step import CopyBlocks
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.worker.upload import staging

COPIED_AT_ONCE = 32 << 20  # bytes that lie beside the cache between the read and the write of a copy


class StateMemory:
    """The memory of all layers' state.

    Memory that a row does not see may hold anything, NaN included, and must not affect the row's output: every op that
    reads state guarantees this. So blocks pass from one request to the next as they are. The memory is zeroed only
    once, so that equal runs have equal memory.
    """

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        num_bytes = layout.all_pages * layout.page_bytes
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.units = [self._units(group) for group in range(len(layout.groups))]

    def view(self, group: int, index: int, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """Return the units of the group's `index`-th layer by block id, or what lies `offset` bytes behind their
        beginnings: [N, *shape]. An id that is not one of the group's blocks names bytes that overlap those of other
        blocks."""
        layout, size = self.layout, dtype.itemsize
        start = index * layout.all_pages * layout.slab_bytes + offset
        unit, step = prod(shape) * size, layout.step_bytes[group]
        ids = (len(self.bytes) - start - unit) // step + 1
        inner = [prod(shape[i + 1 :]) for i in range(len(shape))]
        return self.bytes.view(dtype).as_strided((ids, *shape), (step // size, *inner), start // size)

    def _units(self, group: int) -> Tensor:
        unit, step = self.layout.unit_bytes[group], self.layout.step_bytes[group]
        words = torch.int64 if unit % 8 == step % 8 == 0 else torch.uint8
        return self.view(group, 0, words, (unit // words.itemsize,))

    def copy(self, copies: Sequence[CopyBlocks]) -> None:
        """Copy blocks onto others, in every layer of their group."""
        for group, sources, targets in copies:
            layers = range(len(self.layout.groups[group].layers))
            if not layers:
                continue
            places = [
                [block + layer * self.layout.layer_step(group) for layer in layers for block in ids]
                for ids in (sources, targets)
            ]
            staged = staging(2 * len(places[0]), self.bytes.device)
            staged.numpy()[:] = [*places[0], *places[1]]
            places_2N = staged.to(self.bytes.device, non_blocking=True).long().view(2, -1)
            units_NW = self.units[group]
            for sources_N, targets_N in places_2N.split(max(1, COPIED_AT_ONCE // self.layout.unit_bytes[group]), dim=1):
                units_NW.index_copy_(0, targets_N, units_NW.index_select(0, sources_N))
