"""The seconds that a cut of a product with few tokens takes, by a model: plain functions of shapes, without torch.

Such a product reads its weights once, so memory limits it. What a cut loses against that limit:

    laps     the last lap of tiles leaves multiprocessors idle
    flight   a multiprocessor has too few bytes on their way to use its share of the memory
    meeting  programs that share a tile's inputs write their sums, wait for each other, and one adds them up
    again    tiles of fewer tokens than there are read the weights again, from the cache

Ranks of cuts are what the model is for. Its factors were fitted to times on an H200
(benchmarks/results/h200-tune.jsonl).
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.kernels.base.tuned import ShapeClass
from ridgeline.kernels.gemm.plain.choose import RowsPlan, Stream, power_of_two


class GpuRates(NamedTuple):
    """The rates of a GPU. memory, cache: bytes a second of all multiprocessors. matrix: FLOPs a second in 16 bits."""

    processors: int = 132
    memory: float = 4.42e12
    cache: float = 21.7e12
    matrix: float = 940e12


H200 = GpuRates()
START = 1.46e-6  # of a launch behind another, with the first bytes of a program
IN_FLIGHT = 36_000.0  # bytes on their way to a multiprocessor that use its share of the memory
ALONE = 2.45  # times its share of the memory that a multiprocessor can use if others are idle
LAP = 0.36e-6  # from the end of a tile to the products of the next one
STEP = 0.037e-6  # of a block of inputs beside its products
PROMOTE = 0.098e-6  # of 128 inputs of 64 x 128 sums that leave the matrix units
MEET, ADDED = 0.83e-6, 14e-12  # of programs that share a tile; of a byte of their sums
FMA = 14e12  # products a second of the vector units, with what makes operands of 16-bit numbers
ROW_START = 0.25e-6  # of a program that prepares x, without the bytes
REGISTERS, WARPS = 65_536, 64  # of a multiprocessor


class ProductShape(NamedTuple):
    """The shape of a product. outputs: of each half if gated. itemsize: bytes of a number of the weight."""

    tokens: int
    inputs: int
    outputs: int
    gated: bool = False
    itemsize: int = 2

    @property
    def parts(self) -> int:
        return 2 if self.gated else 1

    @property
    def weight(self) -> float:
        """The bytes of the weight."""
        return self.parts * self.inputs * self.outputs * self.itemsize


def class_of(of: ProductShape, *, norm: bool) -> ShapeClass:
    """Return the class of shapes for which one cut is kept: from a power of two of the tokens to the next a kernel has
    the same tiles."""
    tokens = power_of_two(of.tokens)
    return ShapeClass(f"{'norm ' if norm else ''}{'gate' if of.gated else ''}".strip(), (tokens, of.inputs, of.outputs))


def stream_seconds(cut: Stream, of: ProductShape, gpu: GpuRates = H200, *, promote: bool = False) -> float:
    """Return the seconds of hopper/stream.py. promote: sums leave the matrix units after each 128 inputs."""
    items, columns = cut.items(of.tokens, of.outputs), -(-of.tokens // cut.tokens)
    stage = (cut.rows * of.parts + cut.tokens) * cut.block * of.itemsize
    steps = -(-of.inputs // (cut.block * cut.split))
    laps, busy = -(-items // gpu.processors), min(items, gpu.processors)
    flight = min(1.0, min(cut.stages, steps) * stage / IN_FLIGHT)
    share = flight * min(
        gpu.memory / busy, ALONE * gpu.memory / gpu.processors
    )  # of the memory, of a busy multiprocessor
    fresh = cut.rows * of.parts * cut.block * of.itemsize / columns
    read = steps * (fresh / share + (stage - fresh) / (gpu.cache / gpu.processors))
    rate = gpu.matrix * 2 / of.itemsize / gpu.processors
    sums = cut.rows * of.parts * cut.tokens
    promoted = PROMOTE * cut.block / 128 * sums / 8192 if promote or cut.promote else 0.0
    multiplied = steps * (2 * cut.rows * of.parts * max(cut.tokens, 16) * cut.block / rate + STEP + promoted)
    meeting = MEET + 4 * sums * (1 + cut.split) * ADDED if cut.split > 1 else 0.0
    return START + laps * (max(read, multiplied) + LAP) + meeting


def rows_seconds(cut: RowsPlan, of: ProductShape, gpu: GpuRates = H200, *, norm: bool = False) -> float:
    """Return the seconds of rows.py. norm: each program adds up squares of x besides."""
    each = of.parts * cut.rows * cut.block  # weights that a program asks for at once
    registers = 40 + (each * cut.depth // 2 + of.tokens * cut.block * 2) // (32 * cut.warps)
    if registers > 255:
        return float("inf")
    resident = min(WARPS // cut.warps, REGISTERS // (registers * 32 * cut.warps), cut.programs or WARPS)
    tiles, steps = -(-of.outputs // cut.rows), -(-of.inputs // cut.block)
    places = max(1, resident) * gpu.processors
    exact = tiles / places
    laps = -(-tiles // places) if cut.programs else max(1.0, exact) + 0.2  # else programs begin when others end
    flight = min(1.0, min(tiles, places) / gpu.processors * each * min(cut.depth, steps) * 2 / IN_FLIGHT)
    read = of.weight / (gpu.memory * flight) * (laps / exact if exact > 1 else 1.0)
    begun = min(tiles, places) if cut.programs else tiles  # each of which reads x
    again = begun * of.tokens * of.inputs * of.itemsize * (2 if norm else 1) / gpu.cache
    starts = ROW_START * (1 if cut.programs else laps)
    multiplied = of.tokens * of.weight / of.itemsize / FMA
    return START + read + 0.5 * multiplied + again + starts
