"""One rank's share of a step whose tokens ranks divide.

It is made on the host from the plan's lengths, which all ranks have, so ranks need not ask each other for their shares.
Positions of rows that the device has stopped are then wrong, but not read: such rows write to the null block, and their
tokens are dropped.

For attention, tokens go to the ranks in turn, as the cache is divided (`Stripes`). Recurrent states need consecutive
tokens (`Stretches`). A model that has both runs stretches, and its attention exchanges them for stripes and back.

Legend:
    T  tokens of the step
    t  this rank's tokens
    N  ranks
    R  rows
    M  model width
    X  columns
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.pieces import bounds_of, pieces_of
from ridgeline.core.plan.stripes import held
from ridgeline.layers.decoder import Hidden
from ridgeline.parallel.ring import Ring
from ridgeline.parallel.scan import PieceScan
from ridgeline.worker.upload import upload


class Share:
    """The tokens of a step that one rank runs, given the rank of each.

    num_tokens_R, end_R: each row's tokens in the step, and its cached tokens after it.
    owner_T: the rank that runs a token.
    order_T: the step's tokens by rank, and for each rank in the order of the step.
    count_N: how many tokens each rank runs.
    mine_t: this rank's.
    """

    def __init__(
        self, ring: Ring, num_tokens_R: np.ndarray, end_R: np.ndarray, owner_T: np.ndarray, device: torch.device
    ) -> None:
        self.rank, self.ranks, self._ring = ring.rank, ring.size, ring
        self.num_tokens_R, self.end_R, self.owner_T = num_tokens_R, end_R, owner_T
        self.order_T = np.argsort(owner_T, kind="stable")
        self.count_N = np.bincount(owner_T, minlength=self.ranks)
        first = int(self.count_N[: self.rank].sum())
        self._own_t = self.order_T[first : first + self.num_tokens]
        self.mine_t = upload(self._own_t, device)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that this rank runs."""
        return int(self.count_N[self.rank])

    @cached_property
    def _last(self) -> tuple[Tensor, Tensor]:
        """The rows' last tokens among this rank's, and whether they are there."""
        last_R = np.maximum(np.cumsum(self.num_tokens_R) - 1, 0)
        own_R = self.owner_T[last_R] == self.rank
        index_R = np.where(own_R, np.searchsorted(self._own_t, last_R), 0)
        return upload(index_R, self.mine_t.device), upload(own_R, self.mine_t.device)

    @contextmanager
    def counting(self, tallies: Sequence[Tensor]) -> Iterator[None]:
        """Let experts' tallies count the tokens of all ranks, as they do in steps that are not divided."""
        before = [tally_E.clone() for tally_E in tallies]
        yield
        if tallies:
            own = torch.cat([after_E - before_E for after_E, before_E in zip(tallies, before, strict=True)])
            others = self._ring.stacked(own).sum(0) - own
            for tally_E, added_E in zip(tallies, others.split([len(tally_E) for tally_E in tallies]), strict=True):
                tally_E += added_E

    def last(self, hidden: Hidden, rows: int) -> Hidden:
        """Return the layers' output for every row's last token, from the rank that ran it. There may be more rows
        than these, which get zeros."""
        index_R, own_R = self._last
        parts = [part for part in hidden if part is not None]
        found = torch.stack([torch.where(own_R[:, None], part[index_R], 0) for part in parts])
        filled = found.new_zeros(len(parts), rows, found.shape[2])
        filled[:, : len(index_R)] = found
        x_RM, *residual = self._ring.all_reduce(filled)  # all but one rank add zeros
        return Hidden(x_RM, residual[0] if residual else None)


class Stripes(Share):
    """Tokens dealt out like cards (`core.plan.stripes`): a rank runs those whose keys and values it caches.

    first_NR: by rank, how many of a row's earlier tokens it holds, which is the number there of the first in the step.
    count_NR: by rank, how many of the row's tokens it runs.
    position_T: where each token stands in its row.
    """

    def __init__(self, ring: Ring, num_tokens_R: np.ndarray, end_R: np.ndarray, device: torch.device) -> None:
        num_tokens_R, end_R = num_tokens_R.astype(np.int64), end_R.astype(np.int64)
        start_R, ranks = end_R - num_tokens_R, range(ring.size)
        self.first_NR = np.stack([held(start_R, rank, ring.size) for rank in ranks])
        self.count_NR = np.stack([held(end_R, rank, ring.size) for rank in ranks]) - self.first_NR
        before_R = np.cumsum(num_tokens_R) - num_tokens_R
        self.position_T = np.arange(num_tokens_R.sum()) + np.repeat(start_R - before_R, num_tokens_R)
        super().__init__(ring, num_tokens_R, end_R, self.position_T % ring.size, device)

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key before it, on all ranks, without windows."""
        return int((self.num_tokens_R * (2 * self.end_R - self.num_tokens_R + 1)).sum()) // 2


class Stretches(Share):
    """Consecutive tokens of the step (`core.plan.pieces`), as recurrent states need them.

    stripes: the same step as attention needs it. marks_R: the number of a row's tokens in front of its mark, 0: it has
        none; None: no row has one.
    """

    def __init__(self, ring: Ring, stripes: Stripes, marks_R: np.ndarray | None) -> None:
        self.stripes, self._marks_R = stripes, marks_R
        self._bounds = bounds_of(len(stripes.owner_T), ring.size)
        owner_T = np.repeat(np.arange(ring.size), np.diff(self._bounds))
        super().__init__(ring, stripes.num_tokens_R, stripes.end_R, owner_T, stripes.mine_t.device)

    @cached_property
    def scan(self) -> PieceScan:
        """The ranks' pieces of the rows, over which recurrent ops run."""
        rows, marks = self.num_tokens_R.tolist(), self._marks_R
        pieces = pieces_of(rows, [0] * len(rows) if marks is None else marks.tolist(), self._bounds)
        return PieceScan(self._ring, list(pieces), self.mine_t.device)

    @cached_property
    def to_stripes(self) -> Resharding:
        return Resharding(self._ring, self, self.stripes)

    @cached_property
    def from_stripes(self) -> Resharding:
        return Resharding(self._ring, self.stripes, self)

    @cached_property
    def striped_positions_t(self) -> Tensor:
        """The positions of the tokens that this rank has of the stripes."""
        return upload(self.stripes.position_T, self.mine_t.device)[self.stripes.mine_t]


class Resharding:
    """Tokens sent from the ranks that have them in one division to those that have them in another. All lie
    in the order of the step."""

    def __init__(self, ring: Ring, source: Share, target: Share) -> None:
        self._ring, device = ring, source.mine_t.device
        wanted_by_t = target.owner_T[source._own_t]
        held_by_t = source.owner_T[target._own_t]
        self._sent_t = upload(np.argsort(wanted_by_t, kind="stable"), device)
        self._sent_N = np.bincount(wanted_by_t, minlength=ring.size).tolist()
        self._received_N = np.bincount(held_by_t, minlength=ring.size).tolist()
        self._place_t = upload(np.argsort(np.argsort(held_by_t, kind="stable")), device)

    def __call__(self, x_TX: Tensor) -> Tensor:
        parts = x_TX.index_select(0, self._sent_t).split(self._sent_N)
        received = self._ring.exchanged(parts, [(count, *x_TX.shape[1:]) for count in self._received_N])
        return torch.cat(received).index_select(0, self._place_t)
