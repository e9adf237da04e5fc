"""Recurrent ops over rows whose tokens ranks divide: one exchange of what pieces do to states
(`kernels/transfer.py`).

Every rank finds the transfers of its pieces without knowing any state, and tells them to the others. All then go
through each row's pieces in order, from the state in front of the row. So every rank knows the states in front of its
own pieces, those at marks, and the one behind the row. At last each rank runs the op over its pieces from the states in
front of them. No tokens travel.

    rank 0   tokens 0 … 3    A₀, B₀ ─┐                              S₀              ─► outputs 0 … 3
    rank 1   tokens 4 … 7    A₁, B₁ ─┼─ all ranks: S₁ = A₀ S₀ + B₀, S₁ ─► outputs 4 … 7
    rank 2   tokens 8 … 11   A₂, B₂ ─┘             S₂ = A₁ S₁ + B₁, S₂ ─► outputs 8 … 11
                                                   S₃ = A₂ S₂ + B₂, the row's new state, everywhere

Legend:
    N  blocks of states
    R  rows
    P  pieces of a rank
    O  bytes
    T  this rank's tokens
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.pieces import Piece
from ridgeline.kernels.transfer import Transfer
from ridgeline.kernels.turns import Pieces, RecurrentOp, Tells, Turns
from ridgeline.parallel.ring import Ring


class _Level(NamedTuple):
    """The first pieces of all rows, or the second ones, and so on.

    row, told: the rows that have such a piece, and the piece's number among those that ranks tell.
    own, block: which of them are this rank's, and their blocks.
    marked: which of them end at their row's mark.
    """

    row: Tensor
    told: Tensor
    own: Tensor
    block: Tensor
    marked: Tensor


class PieceScan:
    """A step's rows as pieces on ranks, a `kernels.turns.Divided`.

    pieces: those of all ranks, with the pieces of a row in order. A rank may have several pieces of a row, and its
        tokens lie in the order of its pieces.
    """

    def __init__(self, ring: Ring, pieces: Sequence[Piece], device: torch.device) -> None:
        self._ring = ring
        # A rank without tokens tells of a piece that is in no row, so that all tell alike
        by_rank = [[p for p in pieces if p.rank == rank] or [Piece(rank, 0, 0)] for rank in range(ring.size)]
        self._counts = [len(each) for each in by_rank]
        self._own = Pieces([piece.tokens for piece in by_rank[ring.rank]], device)
        next_of = [sum(self._counts[:rank]) for rank in range(ring.size)]
        first = next_of[ring.rank]
        levels: defaultdict[int, list[tuple[Piece, int]]] = defaultdict(list)
        seen: defaultdict[int, int] = defaultdict(int)
        for piece in pieces:
            levels[seen[piece.row]].append((piece, next_of[piece.rank]))
            seen[piece.row] += 1
            next_of[piece.rank] += 1

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._levels = []
        for _, found in sorted(levels.items()):
            own = [at for at, (piece, _) in enumerate(found) if piece.rank == ring.rank]
            self._levels.append(
                _Level(
                    index([piece.row for piece, _ in found]),
                    index([told for _, told in found]),
                    index(own),
                    index([1 + found[at][1] - first for at in own]),
                    index([at for at, (piece, _) in enumerate(found) if piece.marked]),
                )
            )

    def run(self, turns: Turns, op: RecurrentOp, tells: Tells, states_N: Tensor, *inputs_T: Tensor) -> Tensor:
        """Return what the op makes of this rank's tokens, and replace the states of the rows in `turns`, with the same
        bits on every rank."""
        told = self._exchanged(tells(self._own, *inputs_T))
        states_R = told.begun(states_N.index_select(0, turns.reads_R), turns.fresh_R)
        own_N = states_N.new_zeros(1 + len(self._own.lengths), *states_N.shape[1:])
        for level in self._levels:
            before = states_R.index_select(0, level.row)
            own_N.index_copy_(0, level.block, before.index_select(0, level.own))
            pieces = replace(told, **{name: x.index_select(0, level.told) for name, x in vars(told).items()})
            after = pieces.after(before).to(states_R.dtype)
            states_R.index_copy_(0, level.row, after)
            if len(level.marked):
                blocks = turns.marked_R.index_select(0, level.row.index_select(0, level.marked))
                states_N.index_copy_(0, blocks, after.index_select(0, level.marked))
        states_N.index_copy_(0, turns.writes_R, states_R)
        return op(self._own.going_on, own_N, *inputs_T)

    def _exchanged(self, own: Transfer) -> Transfer:
        """Return the transfers of all ranks' pieces."""
        octets = {name: _octets(x) for name, x in vars(own).items()}
        sizes = [x_PO.shape[1] for x_PO in octets.values()]
        own_PO = torch.cat(list(octets.values()), 1)
        shapes = [(count, own_PO.shape[1]) for count in self._counts]
        parts = torch.cat(self._ring.exchanged([own_PO] * self._ring.size, shapes)).split(sizes, 1)
        found = {}
        for (name, x), part_PO in zip(vars(own).items(), parts, strict=True):
            found[name] = part_PO.contiguous().view(x.dtype).view(-1, *x.shape[1:])
        return replace(own, **found)


def _octets(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1).contiguous().view(torch.uint8)
