"""Recurrent ops over rows whose tokens ranks divide: one exchange of the pieces' effects on states
(`kernels/scans/transfer.py`).

Every rank finds the transfers of its pieces without knowing any state, and sends them to the others. All then go
through each row's pieces in order, from the state in front of the row. So every rank knows the states in front of its
own pieces, those at marks, and the one behind the row. At last each rank runs the op over its pieces from the states in
front of them. No tokens travel.

    rank 0   tokens 0 … 3    A₀, B₀ ─┐                              S₀              ─► outputs 0 … 3
    rank 1   tokens 4 … 7    A₁, B₁ ─┼─ all ranks: S₁ = A₀ S₀ + B₀, S₁ ─► outputs 4 … 7
    rank 2   tokens 8 … 11   A₂, B₂ ─┘             S₂ = A₁ S₁ + B₁, S₂ ─► outputs 8 … 11
                                                   S₃ = A₂ S₂ + B₂, the row's new state, everywhere

Rows of a few tokens, such as those that decode beside a prompt, are not worth that: a state is larger than the data
from which the op's inputs are made. So ranks exchange the inputs of those rows, and each runs all of them.

Many long rows take several exchanges, so that these take no more memory than was planned.

Legend:
    N  blocks of states
    R  rows
    P  pieces of a rank
    O  bytes
    T  this rank's tokens
    t  tokens of some rows
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.plan.pieces import Piece
from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.specs.cache_layout import CacheGroup
from ridgeline.core.specs.state import RecurrentSpec
from ridgeline.kernels.scans.metadata import Inputs, Pieces, RecurrentOp, ScanMetadata, Tells
from ridgeline.kernels.scans.transfer import Transfer
from ridgeline.parallel.ring import Ring

SHORT = 8  # tokens of a row, up to which all ranks run it
TOLD_BYTES = 64 << 20  # of all ranks in one exchange, beyond which rows take several
TOLD_COPIES = 5  # of them at once: what arrives, lies together, is taken apart, and is chosen from; and a rank's own


class PieceScan:
    """A step's rows as pieces on ranks, a `kernels.scans.metadata.Divided`.

    pieces: those of all ranks, with the pieces of a row in order. A rank may have several pieces of a row, and its
        tokens lie in the order of its pieces.
    short: the tokens of a row, up to which all ranks run it.
    told: the bytes that ranks tell of long rows in one exchange, at most, if these are more than a row.
    """

    def __init__(
        self, ring: Ring, pieces: Sequence[Piece], device: torch.device, short: int = SHORT, told: int = TOLD_BYTES
    ) -> None:
        self._ring, self._pieces, self._device, self._told = ring, pieces, device, told
        tokens_of = Counter[int]()
        for piece in pieces:
            tokens_of[piece.row] += piece.tokens
        self._long = [row for row, tokens in tokens_of.items() if tokens > short]
        self._short = [row for row, tokens in tokens_of.items() if tokens <= short]
        self._long_pieces = sum(tokens_of[piece.row] > short for piece in pieces)
        self._row_of_t = [row for rank, row, tokens, _ in pieces if rank == ring.rank for _ in range(tokens)]
        self._parts: dict[int, list[_Part]] = {}

    def run(self, metadata: ScanMetadata, op: RecurrentOp, tells: Tells, states_N: Tensor, given: Inputs) -> Tensor:
        """Return the op's outputs for this rank's tokens, and replace the states of the rows in `metadata`, with the
        same bits on every rank."""
        told = self._long_pieces * piece_bytes(states_N.shape[1:], states_N.itemsize)
        first, *others = self._in_parts(max(1, min(-(-told // self._told), len(self._long))))
        if not others:
            return first.rows.run(metadata, op, tells, states_N, given)
        out_T: Tensor | None = None
        for index_t, rows in (first, *others):
            out_t = rows.run(metadata, op, tells, states_N, given.at(index_t))
            out_T = out_t.new_empty(len(self._row_of_t), *out_t.shape[1:]) if out_T is None else out_T
            out_T.index_copy_(0, index_t, out_t)
        assert out_T is not None
        return out_T

    def _in_parts(self, count: int) -> list[_Part]:
        """Return the step's rows, the long ones in so many parts, each of which has rows of all ranks."""
        if count not in self._parts:
            dealt = [self._part(_LongRows, self._long[first::count]) for first in range(count)]
            if self._short:
                dealt = [*(dealt if self._long else ()), self._part(_ShortRows, self._short)]
            self._parts[count] = dealt
        return self._parts[count]

    def _part(self, kind: type[_LongRows | _ShortRows], rows: Collection[int]) -> _Part:
        own = set(rows)
        index_t = _index((t for t, row in enumerate(self._row_of_t) if row in own), self._device)
        return _Part(index_t, kind(self._ring, [piece for piece in self._pieces if piece.row in own], self._device))


@dataclass(frozen=True)
class ToldStates:
    """The recurrent states that ranks exchange at once. A row has a piece on every rank at most, and a mark cuts one of
    them."""

    groups: Sequence[CacheGroup]

    def reserve(self, sizes: StepSizes) -> Reserved:
        if sizes.ranks == 1:
            return Reserved()
        specs = [group.spec for group in self.groups if isinstance(group.spec, RecurrentSpec)]
        each = max((piece_bytes(part.shape) for spec in specs for part in spec.parts), default=0)
        rows = min(sizes.max_seqs, sizes.max_tokens // (SHORT + 1))  # that are long enough
        return Reserved(TOLD_COPIES * (min(TOLD_BYTES, 2 * rows * each) + (sizes.ranks + 1) * each))


def piece_bytes(shape: Sequence[int], itemsize: int = 4) -> int:
    """Return the bytes that ranks exchange for a piece: what it leaves of a state of this shape, and what it adds."""
    return 2 * prod(shape) * max(4, itemsize)


class _Part(NamedTuple):
    """Some rows of a step, and which of this rank's tokens are theirs."""

    index_t: Tensor
    rows: _LongRows | _ShortRows


class _Level(NamedTuple):
    """The first pieces of all long rows, or the second ones, and so on.

    row, told: the rows that have such a piece, and the piece's number among those that ranks tell.
    own, block: which of them are this rank's, and their blocks.
    marked, mark: which of them end at their row's mark, and the numbers of these rows among all.
    """

    row: Tensor
    told: Tensor
    own: Tensor
    block: Tensor
    marked: Tensor
    mark: Tensor


class _LongRows:
    """Rows of whose pieces ranks tell each other what they do to states."""

    def __init__(self, ring: Ring, pieces: Sequence[Piece], device: torch.device) -> None:
        self._ring = ring
        self.rows = sorted({piece.row for piece in pieces})
        self._row_R = _index(self.rows, device)
        # A rank without tokens tells of a piece that is in no row, so that all tell alike
        by_rank = [[p for p in pieces if p.rank == rank] or [Piece(rank, 0, 0)] for rank in range(ring.size)]
        self._counts = [len(each) for each in by_rank]
        self._own = Pieces([piece.tokens for piece in by_rank[ring.rank]], device)
        next_of = [0, *accumulate(self._counts)]
        first = next_of[ring.rank]
        levels: defaultdict[int, list[tuple[Piece, int]]] = defaultdict(list)
        seen = Counter[int]()
        for piece in pieces:
            levels[seen[piece.row]].append((piece, next_of[piece.rank]))
            seen[piece.row] += 1
            next_of[piece.rank] += 1
        at_row = {row: at for at, row in enumerate(self.rows)}
        self._levels = []
        for _, found in sorted(levels.items()):
            own = [at for at, (piece, _) in enumerate(found) if piece.rank == ring.rank]
            marked = [at for at, (piece, _) in enumerate(found) if piece.marked]
            numbers = (
                [at_row[piece.row] for piece, _ in found],
                [told for _, told in found],
                own,
                [1 + found[at][1] - first for at in own],
                marked,
                [found[at][0].row for at in marked],
            )
            self._levels.append(_Level(*(_index(each, device) for each in numbers)))

    def run(self, metadata: ScanMetadata, op: RecurrentOp, tells: Tells, states_N: Tensor, given: Inputs) -> Tensor:
        told = self._exchanged(tells(self._own, op, states_N, given))
        reads_R, writes_R, fresh_R = (
            each.index_select(0, self._row_R) for each in (metadata.reads_R, metadata.writes_R, metadata.fresh_R)
        )
        states_R = told.begun(states_N.index_select(0, reads_R), fresh_R)
        own_N = states_N.new_zeros(1 + len(self._own.lengths), *states_N.shape[1:])
        for level in self._levels:
            before = states_R.index_select(0, level.row)
            own_N.index_copy_(0, level.block, before.index_select(0, level.own))
            pieces = replace(told, **{name: x.index_select(0, level.told) for name, x in vars(told).items()})
            after = pieces.after(before).to(states_R.dtype)
            states_R.index_copy_(0, level.row, after)
            if len(level.marked):
                blocks = metadata.marked_R.index_select(0, level.mark)
                states_N.index_copy_(0, blocks, after.index_select(0, level.marked))
        states_N.index_copy_(0, writes_R, states_R)
        return op(given, own_N, self._own.going_on)

    def _exchanged(self, own: Transfer) -> Transfer:
        """Return the transfers of all ranks' pieces."""
        found = _gathered(self._ring, list(vars(own).values()), self._counts)
        return replace(own, **dict(zip(vars(own), found, strict=True)))


class _ShortRows:
    """Rows whose tokens' inputs ranks tell each other, and which each rank runs."""

    def __init__(self, ring: Ring, pieces: Sequence[Piece], device: torch.device) -> None:
        self._ring = ring
        self._counts = [sum(p.tokens for p in pieces if p.rank == rank) for rank in range(ring.size)]
        next_of = [0, *accumulate(self._counts)]
        first = next_of[ring.rank]
        of_row: defaultdict[int, list[int]] = defaultdict(list)
        for piece in pieces:
            begin = next_of[piece.rank]
            of_row[piece.row] += range(begin, begin + piece.tokens)
            next_of[piece.rank] += piece.tokens
        self.rows = sorted(of_row)
        order = [told for row in self.rows for told in of_row[row]]
        back = sorted(range(len(order)), key=order.__getitem__)
        self._row_R, self._order_t = _index(self.rows, device), _index(order, device)
        self._own_t = _index(back[first : first + self._counts[ring.rank]], device)
        lengths = [len(of_row[row]) for row in self.rows]
        self._each = lengths[0] if len(set(lengths)) == 1 else 0
        self._start_R1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self._metadata: tuple[ScanMetadata, ScanMetadata] | None = None

    def run(self, metadata: ScanMetadata, op: RecurrentOp, _: Tells, states_N: Tensor, given: Inputs) -> Tensor:
        all_t = _gathered(self._ring, list(given.by_token.values()), self._counts)
        everything = given.replaced(x_t.index_select(0, self._order_t) for x_t in all_t)
        return op(everything, states_N, self._of(metadata)).index_select(0, self._own_t)

    def _of(self, metadata: ScanMetadata) -> ScanMetadata:
        """Return the metadata of these rows alone. Layers one after another mostly have the same."""
        if self._metadata is None or self._metadata[0] is not metadata:
            names = "reads_R", "writes_R", "fresh_R", "marks_R", "marked_R"
            own = {name: getattr(metadata, name).index_select(0, self._row_R) for name in names}
            count = len(self._order_t)
            self._metadata = metadata, ScanMetadata(self._start_R1, **own, num_tokens=count, tokens_each=self._each)
        return self._metadata[1]


def _gathered(ring: Ring, own: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return all ranks' tensors in the order of ranks, in one exchange. counts: how long those of each rank are."""
    octets = [x.reshape(len(x), x.shape[1:].numel()).contiguous().view(torch.uint8) for x in own]
    own_PO = torch.cat(octets, 1)
    shapes = [(count, own_PO.shape[1]) for count in counts]
    all_PO = torch.cat(ring.exchanged([own_PO] * ring.size, shapes))
    parts = all_PO.split([x.shape[1] for x in octets], 1)
    return [part.contiguous().view(x.dtype).view(-1, *x.shape[1:]) for x, part in zip(own, parts, strict=True)]


def _index(values: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=device)
