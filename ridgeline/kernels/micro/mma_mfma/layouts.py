"""The fragments of matrix instructions of NVIDIA and AMD: which lane has which numbers of a matrix.

    python -m ridgeline.kernels.micro.mma_mfma.layouts              # the instructions
    python -m ridgeline.kernels.micro.mma_mfma.layouts m16n8k16     # the lanes of its operands

NVIDIA's are in the PTX ISA (matrix multiply-accumulate instructions). AMD's are in the ISA documents of MI300 and RDNA
3, and in ROCm/amd_matrix_instruction_calculator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

Place = tuple[int, int]  # row, column


@dataclass(frozen=True)
class MatrixFragment:
    """One operand of an instruction: A is [M, K], B [K, N], and D, the sums, [M, N].

    places: numbers that a lane has. at: from a lane and one of its numbers to the row and column in the matrix.
    copies: lanes that have a number of the matrix.
    """

    operand: str
    rows: int
    columns: int
    lanes: int
    places: int
    at: Callable[[int, int], Place]
    copies: int = 1

    def owners(self, row: int, column: int) -> list[tuple[int, int]]:
        """Return the lanes that have a number, and where."""
        places = ((lane, place) for lane in range(self.lanes) for place in range(self.places))
        return [(lane, place) for lane, place in places if self.at(lane, place) == (row, column)]

    def table(self) -> str:
        """Return the matrix with `lane.place` in the place of each number, of the first lane that has it."""
        places = ((lane, place) for lane in reversed(range(self.lanes)) for place in range(self.places))
        cells = {self.at(*each): "{}.{}".format(*each) for each in places}
        wide = max(map(len, cells.values()))
        lines = [" ".join(cells[row, column].rjust(wide) for column in range(self.columns)) for row in range(self.rows)]
        return "\n".join(lines)


@dataclass(frozen=True)
class MatrixInstruction:
    """A matrix instruction. arch: the first architecture that has it. number: the format of its operands."""

    name: str
    arch: str
    number: str
    fragments: tuple[MatrixFragment, ...]

    def __getitem__(self, operand: str) -> MatrixFragment:
        return next(each for each in self.fragments if each.operand == operand)


def _a(rows: int, wide: int, step: int) -> Callable[[int, int], Place]:
    """Lanes of mma.sync's A: four lanes share a row, with `wide` numbers beside each other; places go down 8 rows, then
    on by `step` numbers of K."""
    return lambda lane, i: (lane // 4 + 8 * (i // wide % 2) % rows, lane % 4 * wide + i % wide + i // (2 * wide) * step)


def _b(wide: int, step: int) -> Callable[[int, int], Place]:
    return lambda lane, i: (lane % 4 * wide + i % wide + i // wide * step, lane // 4)


def _d(lane: int, i: int) -> Place:
    return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2


def _mma(name: str, number: str, k: int, wide: int) -> MatrixInstruction:
    """mma.sync of 16 x 8 x k, whose lanes have `wide` neighbouring numbers, one register, at a time."""
    a = MatrixFragment("A", 16, k, 32, 4 * wide, _a(16, wide, 4 * wide))
    b = MatrixFragment("B", k, 8, 32, 2 * wide, _b(wide, 4 * wide))
    return MatrixInstruction(name, "sm_80", number, (a, b, MatrixFragment("D", 16, 8, 32, 4, _d)))


def _wgmma(columns: int) -> MatrixInstruction:
    """A warpgroup's: each warp has 16 rows. B comes from shared memory alone, and A may."""

    def rows_of_warp(inner: Callable[[int, int], Place]) -> Callable[[int, int], Place]:
        def at(lane: int, i: int) -> Place:
            row, column = inner(lane % 32, i)
            return row + lane // 32 * 16, column

        return at

    def sums(lane: int, i: int) -> Place:
        row, column = _d(lane, i % 4)
        return row, column + i // 4 * 8

    a = MatrixFragment("A", 64, 16, 128, 8, rows_of_warp(_a(16, 2, 8)))
    d = MatrixFragment("D", 64, columns, 128, columns // 2, rows_of_warp(sums))
    return MatrixInstruction(f"wgmma.m64n{columns}k16", "sm_90a", "bfloat16", (a, d))


def _ldmatrix(transposed: bool) -> MatrixInstruction:
    """Four matrices of 8 x 8 below each other, as lanes receive them. Lane 8 i + j gives the address of row j of matrix
    i."""

    def at(lane: int, i: int) -> Place:
        row, column = lane // 4, lane % 4 * 2 + i % 2
        return (column, row) if transposed else (row, column)

    def below(lane: int, i: int) -> Place:
        row, column = at(lane, i)
        return row + i // 2 * 8, column

    name = "ldmatrix.x4.trans" if transposed else "ldmatrix.x4"
    return MatrixInstruction(name, "sm_75", "16 bits", (MatrixFragment("D", 32, 8, 32, 8, below),))


def _mfma(size: int) -> MatrixInstruction:
    """MFMA of a wave of 64: size x size x 256 / size."""
    k = 256 // size
    a = MatrixFragment("A", size, k, 64, 4, lambda lane, i: (lane % size, 4 * (lane // size) + i))
    b = MatrixFragment("B", k, size, 64, 4, lambda lane, i: (4 * (lane // size) + i, lane % size))
    step = 4 * (64 // size)
    d = MatrixFragment(
        "D", size, size, 64, size * size // 64,
        lambda lane, i: (step * (i // 4) + 4 * (lane // size) + i % 4, lane % size),
    )  # fmt: skip
    return MatrixInstruction(f"v_mfma_f32_{size}x{size}x{k}_bf16", "gfx942", "bfloat16", (a, b, d))


def _wmma(lanes: int) -> MatrixInstruction:
    """WMMA of RDNA 3: every 16 lanes have all of A and of B; sums go to the lanes in turn, row by row."""
    turns = lanes // 16
    a = MatrixFragment("A", 16, 16, lanes, 16, lambda lane, i: (lane % 16, i), copies=turns)
    b = MatrixFragment("B", 16, 16, lanes, 16, lambda lane, i: (i, lane % 16), copies=turns)
    d = MatrixFragment("D", 16, 16, lanes, 256 // lanes, lambda lane, i: (turns * i + lane // 16, lane % 16))
    return MatrixInstruction(f"v_wmma_f32_16x16x16_bf16 (wave{lanes})", "gfx1100", "bfloat16", (a, b, d))


INSTRUCTIONS = (
    _mma("mma.m16n8k16", "bfloat16", 16, 2),
    _mma("mma.m16n8k8", "tf32", 8, 1),
    _mma("mma.m16n8k32", "int8", 32, 4),
    _ldmatrix(transposed=False),
    _ldmatrix(transposed=True),
    *(_wgmma(columns) for columns in (8, 64, 256)),
    _mfma(32),
    _mfma(16),
    _wmma(32),
    _wmma(64),
)


def find(part: str) -> list[MatrixInstruction]:
    """Return the instructions whose names contain a word."""
    return [each for each in INSTRUCTIONS if part in each.name]


def described(instruction: MatrixInstruction) -> str:
    """Return the fragments of an instruction as text: `lane.place` of each number of each operand."""
    lines = [f"{instruction.name}, {instruction.number}, since {instruction.arch}"]
    for each in instruction.fragments:
        shape = f"{each.operand} [{each.rows}, {each.columns}]: {each.places} numbers in each of {each.lanes} lanes"
        lines += ["", shape + (f", of which {each.copies} have the same" if each.copies > 1 else ""), each.table()]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("\n".join(each.name for each in INSTRUCTIONS))
    for each in find(sys.argv[1]) if len(sys.argv) > 1 else ():
        print(described(each), end="\n\n")
