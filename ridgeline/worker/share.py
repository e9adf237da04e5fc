"""One rank's share of a step whose tokens are dealt out to ranks (`core.stripes`).

It is made on the host from the plan's lengths, which all ranks have, so nobody asks another what it holds. Positions of
rows that the device has stopped are then wrong, which nobody looks at: such rows write to the null block, and their
tokens are dropped.

Legend:
    T  tokens of the step
    t  this rank's tokens
    N  ranks
    R  rows
    M  model width
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.stripes import held
from ridgeline.layers.decoder import Hidden
from ridgeline.parallel.ring import Ring
from ridgeline.worker.upload import upload


class Share:
    """The tokens of a step that one rank runs.

    num_tokens_R, end_R: each row's tokens in the step, and its cached tokens after it.
    first_NR: by rank, how many of a row's earlier tokens it holds, which is the number there of the first in the step.
    count_NR: by rank, how many of the row's tokens it runs.
    order_T: the step's tokens by rank, and for each rank in the order of the step.
    mine_t: this rank's.
    """

    def __init__(self, ring: Ring, num_tokens_R: np.ndarray, end_R: np.ndarray, device: torch.device) -> None:
        self.rank, self.ranks, self._ring = ring.rank, ring.size, ring
        self.num_tokens_R, self.end_R = num_tokens_R.astype(np.int64), end_R.astype(np.int64)
        start_R = self.end_R - self.num_tokens_R
        self.first_NR = np.stack([held(start_R, rank, self.ranks) for rank in range(self.ranks)])
        self.count_NR = np.stack([held(self.end_R, rank, self.ranks) for rank in range(self.ranks)]) - self.first_NR
        before_R = np.cumsum(self.num_tokens_R) - self.num_tokens_R
        position_T = np.arange(self.num_tokens_R.sum()) + np.repeat(start_R - before_R, self.num_tokens_R)
        self.order_T = np.argsort(position_T % self.ranks, kind="stable")
        self.count_N = self.count_NR.sum(1)
        first = int(self.count_N[: self.rank].sum())
        self.mine_t = upload(self.order_T[first : first + int(self.count_N[self.rank])], device)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that this rank runs."""
        return int(self.count_N[self.rank])

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key before it, on all ranks, without windows."""
        return int((self.num_tokens_R * (2 * self.end_R - self.num_tokens_R + 1)).sum()) // 2

    @cached_property
    def _last(self) -> tuple[Tensor, Tensor]:
        """The rows' last tokens among this rank's, and whether they are there."""
        own_R = (self.end_R - 1) % self.ranks == self.rank
        index_R = np.where(own_R, np.cumsum(self.count_NR[self.rank]) - 1, 0)
        return upload(index_R, self.mine_t.device), upload(own_R, self.mine_t.device)

    @contextmanager
    def counting(self, tallies: Sequence[Tensor]) -> Iterator[None]:
        """Let experts' tallies count the tokens of all ranks, as they do in steps that nobody divides."""
        before = [tally_E.clone() for tally_E in tallies]
        yield
        if tallies:
            own = torch.cat([after_E - before_E for after_E, before_E in zip(tallies, before, strict=True)])
            others = self._ring.stacked(own).sum(0) - own
            for tally_E, added_E in zip(tallies, others.split([len(tally_E) for tally_E in tallies]), strict=True):
                tally_E += added_E

    def last(self, hidden: Hidden, rows: int) -> Hidden:
        """Return what the layers made of every row's last token, from whichever rank ran it. There may be more rows
        than these, which get zeros."""
        index_R, own_R = self._last
        parts = [part for part in hidden if part is not None]
        found = torch.stack([torch.where(own_R[:, None], part[index_R], 0) for part in parts])
        filled = found.new_zeros(len(parts), rows, found.shape[2])
        filled[:, : len(index_R)] = found
        x_RM, *residual = self._ring.all_reduce(filled)  # all but one rank add zeros
        return Hidden(x_RM, residual[0] if residual else None)
