"""Launches of rungs: grids, blocks, shared memory and arguments, for a GPU and for the emulator alike."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.kernels.memory_bound.rungs import FLOATS, THREADS, VECTOR, MemoryRung, RowCut

EPSILON = 1e-5
RESIDENT = 8  # blocks of 256 threads that a multiprocessor runs at the same time
STATISTIC = {"softmax": 8, "norms": 12}  # bytes that the blocks of a cluster merge


@dataclass(frozen=True)
class MatrixShape:
    """A matrix. An op of numbers takes it as so many numbers; a gated one reads twice the columns."""

    rows: int
    columns: int

    @property
    def numbers(self) -> int:
        """Rows times columns."""
        return self.rows * self.columns


TensorPlaces = Mapping[str, Any]  # name of a tensor → ctypes' void pointer


@dataclass(frozen=True)
class RungLaunch:
    """One launch of a kernel.

    cluster: blocks of a cluster. shared: bytes. together: all blocks run at the same time.
    arguments: ctypes objects, or names of tensors; "up" is where the second half of the first row of x begins.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Any, ...]
    cluster: int = 1
    shared: int = 0
    together: bool = False

    def bound(self, tensors: TensorPlaces) -> Sequence[Any]:
        """Return the arguments with pointers in place of names."""
        return [tensors[each] if isinstance(each, str) else each for each in self.arguments]


def launches(rung: MemoryRung, shape: MatrixShape, cut: RowCut | None, blocks: int) -> list[RungLaunch]:
    """Return the launches of a rung in their order.

    cut: as `rung.cut` gives it, or another one. blocks: how many of them run at the same time on the device.
    """
    if rung.kernel == "transpose":
        across, down = -(-shape.columns // rung.tile), -(-shape.rows // rung.tile)
        block = (rung.tile, 8, 1) if rung.tile == 32 else (THREADS, 1, 1)
        return [RungLaunch((across, down, 1), block, ("x", "y", *map(ctypes.c_int, (shape.rows, shape.columns))))]
    if rung.kernel == "reduction":
        return _sums(rung, shape.numbers, blocks)
    if rung.kernel == "vector_add":
        return [_of_numbers(rung, shape.numbers, ("x", "other", "y", ctypes.c_size_t(shape.numbers)))]
    if rung.kernel == "silu" and rung.own > 1:
        [arguments] = _silu(rung, shape)
        grid = (-(-shape.rows // rung.own), -(-shape.columns // (THREADS * VECTOR)), 1)
        return [RungLaunch(grid, (THREADS, 1, 1), arguments)]
    if rung.kernel == "silu":
        return [_of_numbers(rung, shape.numbers, each) for each in _silu(rung, shape)]
    return [_of_rows(rung, shape, cut, blocks)]


def item(op: str) -> int:
    """Return the bytes of a number."""
    return 4 if op in FLOATS else 2


def scratch(rung: MemoryRung, shape: MatrixShape, blocks: int) -> int:
    """Return the numbers of scratch memory: of a reduction's blocks, or of the middle result of two ops."""
    if rung.kernel == "reduction":
        return blocks
    return shape.numbers if rung.launches > 1 else 0


def _of_numbers(rung: MemoryRung, numbers: int, arguments: tuple[Any, ...]) -> RungLaunch:
    return RungLaunch((max(1, -(-numbers // (THREADS * rung.own))), 1, 1), (THREADS, 1, 1), arguments)


def _sums(rung: MemoryRung, numbers: int, blocks: int) -> list[RungLaunch]:
    count = ctypes.c_size_t(numbers)
    if rung.kind == "adds":
        return [_of_numbers(rung, numbers, ("x", "y", count))]
    grid = min(blocks, max(1, -(-numbers // (THREADS * rung.own))))
    block = (THREADS, 1, 1)
    if rung.kind == "grid":
        arguments = ("x", "y", count, "scratch")
        return [RungLaunch((grid, 1, 1), block, arguments, shared=32 * 4, together=True)]
    return [
        RungLaunch((grid, 1, 1), block, ("x", "scratch", count)),
        RungLaunch((1, 1, 1), block, ("scratch", "y", ctypes.c_size_t(grid))),
    ]


def _silu(rung: MemoryRung, shape: MatrixShape) -> list[tuple[Any, ...]]:
    gated = rung.op == "silu_multiply"
    width, pitch = shape.columns, shape.columns * (2 if gated else 1)
    none, count = ctypes.c_void_p(None), ctypes.c_size_t(shape.numbers)

    def call(a: Any, b: Any, y: str, a_pitch: int, b_pitch: int) -> tuple[Any, ...]:
        return (a, b, y, count, *map(ctypes.c_int, (width, a_pitch, b_pitch)))

    if rung.launches == 1:
        return [call("x", "up" if gated else none, "y", pitch, pitch)]
    last = "scratch" if gated else "y"
    calls = [call("x", none, "scratch", pitch, 0), call("x", "scratch", last, pitch, width)]
    return [*calls, call("scratch", "up", "y", width, pitch)] if gated else calls


def _of_rows(rung: MemoryRung, shape: MatrixShape, cut: RowCut | None, blocks: int) -> RungLaunch:
    sizes = [ctypes.c_int(shape.rows), ctypes.c_int(shape.columns)]
    arguments: tuple[Any, ...] = ("x", "y", *sizes)
    if rung.kernel == "norms":
        arguments = ("x", "weight", "bias", "y", *sizes, ctypes.c_float(EPSILON))
    if rung.kind == "block":
        return RungLaunch((shape.rows, 1, 1), (THREADS, 1, 1), arguments)
    assert cut, f"{rung.title} cannot take rows of {shape.columns}"
    block, groups = (cut.threads, cut.rows, 1), -(-shape.rows // cut.rows)
    if rung.kind == "registers":
        return RungLaunch((groups, 1, 1), block, arguments)
    shared = shared_bytes(rung, cut)
    if rung.kind == "cluster":
        return RungLaunch((groups * cut.cluster, 1, 1), (cut.threads, 1, 1), arguments, cut.cluster, shared)
    grid = min(groups, max(1, blocks // cut.cluster)) * cut.cluster
    return RungLaunch((grid, 1, 1), block, arguments, cut.cluster, shared)


def shared_bytes(rung: MemoryRung, cut: RowCut) -> int:
    """Return the bytes of dynamic shared memory of a block: what a cluster's blocks send and merge, or rows ahead."""
    mail = cut.rows * 32 * 16 + 16
    if rung.kind == "cluster":
        return mail + cut.rows * 32 * STATISTIC[rung.kernel]
    stages = cut.ahead + 1 if cut.ahead else 0
    return stages * cut.vectors * cut.threads * cut.rows * 16 + (2 * mail if rung.clusters else 0)
