"""Tables with a row per slot, as parts of one array: everything that a plan changes in them is one scatter.

Legend:
    S  slots
    n  some of the slots
    W  words of 32 bits
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4  # words; tables begin at multiples of 16 bytes, as compiled kernels expect


class Words:
    """The array of all tables.

    array_W: int32, zero at first; an int64 takes two words.
    widths: how many words a slot has in each table.
    """

    def __init__(self, num_slots: int, widths: Sequence[int], device: torch.device) -> None:
        self.num_slots, self.widths = num_slots, widths
        self.starts = [0, *accumulate(-(-num_slots * width // ALIGNMENT) * ALIGNMENT for width in widths)]
        self.array_W = torch.zeros(self.starts[-1], dtype=torch.int32, device=device)

    def column(self, table: int, dtype: torch.dtype) -> Tensor:
        """Return a table of one number per slot, [S]."""
        return self._part(table).view(dtype)

    def rows(self, table: int, dtype: torch.dtype) -> Tensor:
        """Return a table of several numbers per slot, [S, …]."""
        return self._part(table).view(dtype).view(self.num_slots, -1)

    def int32_tables(self, first: int, count: int) -> Tensor:
        """Return tables of equal widths that follow each other as one tensor, [count, S, …]."""
        apart, width = self.starts[first + 1] - self.starts[first], self.widths[first]
        assert self.widths[first : first + count] == [width] * count
        return self.array_W.as_strided((count, self.num_slots, width), (apart, width, 1), self.starts[first])

    def place(self, table: int, slot: int, word: int = 0) -> int:
        """Return the index of a word in `array_W`."""
        return self.starts[table] + slot * self.widths[table] + word

    def write(self, change_3W: Tensor) -> None:
        """Write words to `array_W`. `change_3W` holds W places, int64 as two words each, then the W words. No place may
        come twice."""
        count = len(change_3W) // 3
        self.array_W.index_copy_(0, change_3W[: 2 * count].view(torch.int64), change_3W[2 * count :])

    def _part(self, table: int) -> Tensor:
        start = self.starts[table]
        return self.array_W[start : start + self.num_slots * self.widths[table]]


class Record:
    """The words of a slot in the first `num_tables` tables, one table after the other."""

    def __init__(self, words: Words, num_tables: int) -> None:
        widths = np.array(words.widths[:num_tables])
        self._slot_0 = np.concatenate([words.place(table, 0) + np.arange(width) for table, width in enumerate(widths)])
        self._to_next_slot = np.repeat(widths, widths)

    def places(self, slots_n: Sequence[int]) -> np.ndarray:
        """Return the index in `array_W` of each word of these slots, [n, W]."""
        return self._slot_0 + np.array(slots_n)[:, None] * self._to_next_slot
