"""The rows of a step as recurrent ops take them: where each row's state lies before the step, and where it goes.

Rows of all kinds come together: prompts, chunks of them, and single tokens. A row may have a *mark*, a number of its
tokens after which its state is stored as well, so that another request can begin there.

A kernel that runs over tokens in parallel cuts rows into chunks. A mark always ends a chunk, so the state that belongs
there is one that the kernel has anyway.

Rows that verify drafts need the state behind each of their tokens. So a step that has such rows makes several *passes*,
each of which is a step of its own for the ops: one for the first token of every such row, one for the second, and so
on, and one in front of them for all other rows.

Ranks may divide the tokens of rows. Then each has pieces of them, and what ranks exchange is decided above
(`Divided`).

Legend:
    N  block ids
    R  rows
    T  tokens of the step
    C  chunks
    P  tokens in the order of passes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ridgeline.kernels.scans.transfer import Transfer

# Takes (an op's inputs, its states by block, metadata), replaces the rows' states, and returns a tensor by token
RecurrentOp = Callable[[Any, Tensor, "ScanMetadata"], Tensor]
# Takes (pieces, the op, states like those of the pieces, the op's inputs), and returns what the op does to the pieces'
Tells = Callable[["Pieces", RecurrentOp, Tensor, Any], Transfer]

# The types of `ScanMetadata.of_rows` and `Chunks.of_chunks`, as lists of kernels to compile have them
ROW_TYPES = {"start_ptr": "*i32", "reads_ptr": "*i64", "writes_ptr": "*i64", "fresh_ptr": "*u8"}
ROW_TYPES |= {"marks_ptr": "*i32", "marked_ptr": "*i64"}
CHUNK_TYPES = dict.fromkeys(("first_ptr", "length_ptr", "row_ptr"), "*i32")


@dataclass(frozen=True)
class Inputs:
    """The inputs of a recurrent op beside states and metadata. Each op has a subclass.

    of_tokens: the names of those that have an entry for every token of the step, if they are not None.
    """

    of_tokens: ClassVar[tuple[str, ...]]

    @property
    def by_token(self) -> dict[str, Tensor]:
        """The inputs that have an entry for every token, by name."""
        return {name: x_T for name in self.of_tokens if (x_T := getattr(self, name)) is not None}

    def replaced(self, inputs_T: Iterable[Tensor]) -> Self:
        """Return a record with other inputs by token, in the order of `by_token`."""
        return replace(self, **dict(zip(self.by_token, inputs_T, strict=True)))

    def at(self, tokens: slice | Tensor) -> Self:
        """Return the record of some of the tokens."""
        return self.replaced(x_T[tokens] for x_T in self.by_token.values())


@dataclass(frozen=True)
class Chunks:
    """The chunks of all rows, in the order of their tokens. There are as many entries as there could be chunks; those
    behind the last chunk have no tokens.

    first_C: the chunk's first token, int32.
    length_C: its tokens, int32; 0 behind the last chunk.
    row_C: its row, int32; behind the last chunk, R.
    of_R1: the first chunk of each row, then the number of chunks, int32.
    """

    first_C: Tensor
    length_C: Tensor
    row_C: Tensor
    of_R1: Tensor

    @property
    def of_chunks(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of kernels by chunk: first_C, length_C and row_C."""
        return self.first_C, self.length_C, self.row_C


class Row(NamedTuple):
    """One row with tokens, as numbers of the host. Tokens `start` to `end` - 1 are its own; the other fields are as in
    `ScanMetadata`."""

    start: int
    end: int
    reads: int
    writes: int
    fresh: bool
    mark: int
    marked: int


class Pass(NamedTuple):
    """A part of a step: its tokens among those of the step, and the blocks of their rows."""

    tokens: slice | Tensor
    metadata: ScanMetadata


@dataclass(frozen=True)
class Passes:
    """The passes of a step, in their order.

    place_T: where a token comes in the order of passes; None: all rows run one token in every pass.
    """

    parts: tuple[Pass, ...]
    place_T: Tensor | None = None

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs of all passes as one tensor, in the order of the step's tokens."""
        if self.place_T is None:
            return torch.stack(list(outputs), dim=1).flatten(0, 1)
        out_P = torch.cat(list(outputs))
        return out_P.index_select(0, self.place_T)


class Divided(Protocol):
    """The ranks that divide the tokens of a step's rows."""

    def run(self, metadata: ScanMetadata, op: RecurrentOp, tells: Tells, states_N: Tensor, given: Inputs) -> Tensor:
        """Return the op's output for this rank's tokens, and replace the rows' states, on every rank alike."""


@dataclass(frozen=True)
class ScanMetadata:
    """The blocks that the step's rows read and write. Everything is on the device.

    A row that reads a block and a row that writes it are never two rows of one step, so a kernel may write a row's
    state as soon as it has read it. Many rows may write the null block, and what lies there means nothing.

    start_R1: the first token of each row, then the number of tokens, int32.
    reads_R: block ids of the states before the step, int64.
    writes_R: block ids of the states after the rows' last tokens, int64. Rows that the device has stopped, and rows
        without tokens, write to the null block.
    fresh_R: bool, rows whose state begins with zeros. What lies at `reads_R` then is not to be read: it may be NaN.
    marks_R: how many of the row's tokens come before its mark, int32; 0: it has none.
    marked_R: block ids of the states at the marks, int64; the null block where there is none.
    num_tokens: the tokens of the step, padding included.
    tokens_each: how many tokens every row runs; 0 if rows differ.
    passes: those of a step whose rows verify drafts; the other fields do not count then. None: the step is one.
    divided: the ranks that divide the rows' tokens. The inputs of ops are then this rank's tokens, and all other fields
        are those of the whole step. None: no tokens are divided.
    """

    start_R1: Tensor
    reads_R: Tensor
    writes_R: Tensor
    fresh_R: Tensor
    marks_R: Tensor
    marked_R: Tensor
    num_tokens: int
    tokens_each: int
    passes: Passes | None = None
    divided: Divided | None = None
    _chunks: dict[tuple[int, bool], Chunks] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.reads_R)

    @property
    def of_rows(self) -> tuple[Tensor, ...]:
        """The arguments of kernels by row: start_R1, reads_R, writes_R, fresh_R in bytes, marks_R and marked_R."""
        fresh_R = self.fresh_R.view(torch.uint8)
        return self.start_R1, self.reads_R, self.writes_R, fresh_R, self.marks_R, self.marked_R

    def run(self, op: RecurrentOp, tells: Tells, states_N: Tensor, given: Inputs) -> Tensor:
        """Return op(given, states, metadata), a tensor by token: at once, pass by pass, or with other ranks."""
        if self.divided is not None:
            return self.divided.run(self, op, tells, states_N, given)
        if self.passes is None:
            return op(given, states_N, self)
        return self.passes.joined([op(given.at(tokens), states_N, metadata) for tokens, metadata in self.passes.parts])

    def rows(self) -> Iterator[Row]:
        """Yield the rows that have tokens. The host waits for them, so this is for references and CPUs."""
        start = self.start_R1.tolist()
        columns = (self.reads_R, self.writes_R, self.fresh_R, self.marks_R, self.marked_R)
        for row in zip(start[:-1], start[1:], *(column.tolist() for column in columns), strict=True):
            if row[0] < row[1]:
                yield Row(*row)

    def chunks(self, size: int, at_marks: bool = True) -> Chunks:
        """Return the rows cut into chunks of `size` tokens, the last one of a row and of those up to its mark being
        shorter. It is computed once for all layers, and the host does not wait for it.

        at_marks: False: a mark does not end a chunk.
        """
        if (size, at_marks) not in self._chunks:
            self._chunks[size, at_marks] = self._cut(size, at_marks)
        return self._chunks[size, at_marks]

    def _cut(self, size: int, at_marks: bool) -> Chunks:
        # Each row is two pieces, before its mark and behind it
        lengths_R = self.start_R1.diff()
        marks_R = self.marks_R if at_marks else torch.zeros_like(self.marks_R)
        piece_P = torch.stack((marks_R, lengths_R - marks_R), dim=1).flatten()
        counts_P = (piece_P + size - 1) // size
        before_P = counts_P.cumsum(0) - counts_P
        most = -(-self.num_tokens // size) + (2 if at_marks else 1) * self.num_rows
        index_C = torch.arange(most, device=piece_P.device)
        piece_C = torch.searchsorted(before_P + counts_P, index_C, right=True)
        exists_C = piece_C < len(piece_P)
        piece_C = piece_C.clamp(max=len(piece_P) - 1)
        ahead_C = (index_C - before_P[piece_C]) * size
        row_C = piece_C // 2
        first_C = self.start_R1[row_C] + torch.where(piece_C % 2 == 1, marks_R[row_C], 0) + ahead_C
        length_C = torch.where(exists_C, (piece_P[piece_C] - ahead_C).clamp(max=size), 0)
        total = counts_P.sum().reshape(1)
        return Chunks(
            torch.where(exists_C, first_C, 0).int(),
            length_C.int(),
            torch.where(exists_C, row_C, self.num_rows).int(),
            torch.cat((before_P[::2], total)).int(),
        )


def rows_of(lengths: list[int], block_of: list[int], device: torch.device, fresh: bool = False) -> ScanMetadata:
    """Return metadata in which each row of so many tokens reads and writes one block, for tests and benchmarks."""
    blocks_R = torch.tensor(block_of, dtype=torch.int64, device=device)
    every = tuple(range(len(lengths))) if fresh else ()
    return replace(metadata_of(lengths, device, fresh=every), reads_R=blocks_R, writes_R=blocks_R)


def metadata_of(
    lengths: Sequence[int],
    device: torch.device,
    marks: Sequence[int] = (),
    fresh: Sequence[int] = (),
    padding: int = 0,
) -> ScanMetadata:
    """Return metadata for tests and benchmarks: rows of so many tokens, which read and write blocks of their own. Of
    two neighbours one writes the block that it reads and one another. Rows without tokens write to the null block. The
    ids are below 3 · rows + 2, and the largest of these is in no row.

    marks: of each row; (): no row has one.
    fresh: the rows whose state begins with zeros.
    padding: tokens behind those of the last row.
    """
    rows = len(lengths)
    marks = marks or [0] * rows

    def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ScanMetadata(
        tensor([0, *accumulate(lengths)], torch.int32),
        tensor([1 + 3 * row for row in range(rows)]),
        tensor([1 + 3 * row + row % 2 if lengths[row] else 0 for row in range(rows)]),
        tensor([row in fresh for row in range(rows)], torch.bool),
        tensor(marks, torch.int32),
        tensor([3 + 3 * row if marks[row] else 0 for row in range(rows)]),
        sum(lengths) + padding,
        lengths[0] if len(set(lengths)) == 1 and not padding else 0,
    )


class Pieces:
    """Pieces of rows, whose tokens lie one behind another. Their states are blocks of a tensor of their own: that of
    the first piece is block 1, and block 0 is the null block.

    lengths: the tokens of each.
    from_zeros: metadata in which the pieces begin with zeros.
    going_on: metadata in which they begin with the states in their blocks.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        every = range(1, len(self.lengths) + 1)
        self.going_on = metadata_of(lengths, device)
        blocks_R = torch.tensor(every, dtype=torch.int64, device=device)
        writes_R = torch.tensor([block if n else 0 for block, n in zip(every, lengths, strict=True)], device=device)
        self.going_on = replace(self.going_on, reads_R=blocks_R, writes_R=writes_R)
        self.from_zeros = replace(self.going_on, fresh_R=torch.ones_like(self.going_on.fresh_R), _chunks={})

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first token of each piece, and the first one behind it."""
        return list(pairwise((0, *accumulate(self.lengths))))

    def ran(self, op: RecurrentOp, states_N: Tensor, given: Inputs) -> Tensor:
        """Return the states behind pieces that begin with zeros, which are like `states_N`."""
        own_N = states_N.new_zeros(1 + len(self.lengths), *states_N.shape[1:])
        op(given, own_N, self.from_zeros)
        return own_N[1:]
