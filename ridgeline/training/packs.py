"""Examples of unlike lengths in packs of about one size, and the order in which packs are trained.

A pack has no padding: its examples stand one behind the other, and masks keep them apart. Which packs a step has is a
function of (seed, step), so resuming needs no other state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from math import ceil

import numpy as np


def packed(lengths: Sequence[int], room: int, seed: int) -> list[list[int]]:
    """Return the indices of the examples of each pack: the longest first, each into the fullest pack that it fits into.
    None may be longer than `room`."""
    shuffled = np.random.default_rng((seed, 0)).permutation(len(lengths))
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # what is left of a pack, and its number, ascending
    for index in sorted((int(each) for each in shuffled), key=lambda each: -lengths[each]):
        at = bisect_left(free, (lengths[index], 0))
        left, pack = free.pop(at) if at < len(free) else (room, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(index)
        insort(free, (left - lengths[index], pack))
    return packs


class Packs:
    """The packs of a data set in a shuffled order, a new one for each epoch. Each step has `per_step` of them."""

    def __init__(self, lengths: Sequence[int], *, room: int, per_step: int, seed: int) -> None:
        self.packs, self.per_step, self.seed = packed(lengths, room, seed), per_step, seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def steps(self, epochs: float) -> int:
        """Return the number of steps in which so many epochs pass, at least 1."""
        return max(1, ceil(epochs * len(self.packs) / self.per_step))

    def of_step(self, step: int) -> list[list[int]]:
        """Return the packs of a step (from 0). Epochs follow each other without a gap."""
        found = []
        for position in range(step * self.per_step, (step + 1) * self.per_step):
            epoch, index = divmod(position, len(self.packs))
            found.append(self.packs[int(self._order(epoch)[index])])
        return found

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, 1, epoch)).permutation(len(self.packs))
