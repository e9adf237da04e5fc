"""Documents packed into full training sequences, in one memory-mapped file of uint16 token ids.

    file       sep d0 d0 d0 sep d1 sep d2 d2 …
    sequence i covers tokens i*S … i*S + S (S + 1 of them: inputs and, one later, targets), so every token after the
    first is a target exactly once per epoch; only a tail shorter than S is left over.

The batch of a step is a pure function of (seed, step), so resuming needs no loader state.

Legend:
    B  sequences
    S  tokens per sequence
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

from ridgeline.core.errors import InvalidConfig


def write_tokens(path: Path, documents: Iterable[np.ndarray], separator: int) -> int:
    """Write every document behind a separator, and one separator at the end. Return the number of tokens written."""
    mark = np.array([separator], dtype=np.uint16)
    total = 0
    with path.open("wb") as file:
        for ids in documents:
            file.write(mark.tobytes())
            file.write(ids.astype(np.uint16, copy=False).tobytes())
            total += 1 + len(ids)
        file.write(mark.tobytes())
    return total + 1


class PackedTokens:
    """The sequences of a token file in a shuffled order, a new one for each epoch.

    Raise InvalidConfig if the file holds less than one sequence.
    """

    def __init__(self, path: Path, *, seq_len: int, batch_size: int, seed: int) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.num_sequences = (len(self.tokens) - 1) // seq_len
        if self.num_sequences < 1:
            raise InvalidConfig(
                f"the training text has {len(self.tokens)} tokens, below one sequence of {seq_len}; add text."
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> np.ndarray:
        """Return the int64 [B, S + 1] tokens of step `step` (from 0). Epochs follow each other without a gap."""
        first = step * self.batch_size
        rows = [self.sequence(first + row) for row in range(self.batch_size)]
        return np.stack(rows).astype(np.int64)

    def sequence(self, position: int) -> np.ndarray:
        """Return the uint16 [S + 1] tokens of the `position`-th sequence in the endless shuffled stream."""
        epoch, index = divmod(position, self.num_sequences)
        start = int(self._order(epoch)[index]) * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_sequences)
