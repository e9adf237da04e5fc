"""Groups of decoding rows that share their first cache blocks, so that attention can read these once for all of them.

The prefix cache makes requests with a common beginning hold the same blocks, so equal block ids show the groups. The
ids are stored once, when a request begins to decode: blocks that are full then do not change while it keeps its slot.
Groups are looked for when the set of rows changes, by comparing columns of ids.

Only full attention counts, because blocks that a window has released cannot be shared.

Tables are compared a tile of columns at a time, and only rows that agree so far go on to the next: the cost of the
search follows from the shared part, and not from the longest row.

Legend:
    F  cache groups of full attention
    S  slots
    C  blocks from position 0
    R  rows
    A  rows that agree so far
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.core.plan.step import PrefixGroup
from ridgeline.core.specs.cache_layout import CacheLayout

MIN_SAVED = 128  # reads of keys that a group must save, in tokens: its rows' partial results cost something too
MAX_GROUPS = 4  # each costs a search over all rows
TILE = 64  # columns compared at once
MOST_COLUMNS = 4096  # blocks of a row that are looked at: 262,144 tokens on a GPU. What is shared beyond is read apart


class PrefixGroups:
    """The full blocks of decoding requests by slot."""

    def __init__(self, layout: CacheLayout, num_slots: int, *, min_saved: int = MIN_SAVED) -> None:
        self._block_size, self._min_saved = layout.block_size, min_saved
        self._full = [g for g, group in enumerate(layout.groups) if group.spec.span is None and not group.spec.encoded]
        self._ids_FSC = np.zeros((len(self._full), num_slots, 64), np.int32)
        self._count_S = np.zeros(num_slots, np.int32)

    def note(self, slot: int, blocks: Sequence[Sequence[int]], kv_len: int) -> None:
        """A request begins to decode in this slot. blocks: per cache group, ids from position 0. kv_len: tokens that
        will have been written before its first row as a decoding request."""
        count = min(kv_len // self._block_size, MOST_COLUMNS)
        while count > self._ids_FSC.shape[2]:
            self._ids_FSC = np.concatenate((self._ids_FSC, np.zeros_like(self._ids_FSC)), 2)
        for f, g in enumerate(self._full):
            self._ids_FSC[f, slot, :count] = blocks[g][:count]
        self._count_S[slot] = count

    def find(self, slots_R: np.ndarray) -> tuple[PrefixGroup, ...]:
        """Return disjoint groups, roughly in the order of what they save: the most first. The slots' requests
        decode."""
        if not self._full:
            return ()
        count_R, groups = self._count_S[slots_R], list[PrefixGroup]()
        left_R = np.flatnonzero(count_R > 0)
        while len(left_R) > 1 and len(groups) < MAX_GROUPS:
            group = self._largest(slots_R[left_R], count_R[left_R])
            if group is None:
                break
            groups.append(PrefixGroup(left_R[group.rows], group.tokens))
            left_R = np.delete(left_R, group.rows)
        return tuple(groups)

    def _largest(self, slots_R: np.ndarray, count_R: np.ndarray) -> PrefixGroup | None:
        """Return the group around one row that saves most reads; None if that is too little."""
        common_R = self._common(slots_R, count_R, self._typical(slots_R, count_R))
        order_R = np.argsort(-common_R, kind="stable")
        saved_R = np.arange(len(order_R)) * common_R[order_R] * self._block_size
        last = int(saved_R.argmax())
        if saved_R[last] < self._min_saved:
            return None
        return PrefixGroup(np.sort(order_R[: last + 1]), int(common_R[order_R[last]]) * self._block_size)

    def _common(self, slots_R: np.ndarray, count_R: np.ndarray, row: int) -> np.ndarray:
        """Return the number of first blocks that each row has in common with `row`."""
        common_R = np.minimum(count_R, count_R[row])
        agree_A = np.arange(len(slots_R))
        for start in range(0, int(count_R[row]), TILE):
            tile_FSC = self._ids_FSC[:, :, start : start + TILE]
            differs_AC = (tile_FSC[:, slots_R[agree_A]] != tile_FSC[:, slots_R[row], None]).any(0)
            parts_A = differs_AC.any(1)
            where_A = start + differs_AC.argmax(1)
            common_R[agree_A[parts_A]] = np.minimum(common_R[agree_A[parts_A]], where_A[parts_A])
            agree_A = agree_A[~parts_A & (count_R[agree_A] > start + TILE)]
            if len(agree_A) < 2:  # none but the row itself
                break
        return common_R

    def _typical(self, slots_R: np.ndarray, count_R: np.ndarray) -> int:
        """A row of those that hold the most frequent block: halfway along the usual length if some share one there, or
        else at the beginning."""
        middle = int(np.sort(count_R)[len(count_R) // 2]) // 2
        for column in (middle, 0):
            rows = np.flatnonzero(count_R > column)
            ids, first, counts = np.unique(
                self._ids_FSC[0, slots_R[rows], column], return_index=True, return_counts=True
            )
            if len(ids) < len(rows):
                break
        return int(rows[first[counts.argmax()]])
