"""The problems of the memory-bound ops: by size, and softmax and norms by the length of rows, beside a copy of as many
bytes, torch's kernels and those of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.cuda.predict import chip_here
from ridgeline.kernels.memory_bound import reference
from ridgeline.kernels.memory_bound.launches import EPSILON, MatrixShape, item
from ridgeline.kernels.memory_bound.predict import bytes_of, predict
from ridgeline.kernels.memory_bound.run import COLUMNS, LoadedRung, runs_here, takes
from ridgeline.kernels.memory_bound.rungs import BY_ROWS, KERNELS, RUNGS, MemoryRung
from ridgeline_bench.ladders.cross_entropy import LinearLoss
from ridgeline_bench.ladders.runs import COPY, Call

MB = 1 << 20
SIZES = (1, 4, 16, 256)  # MB of the matrix that is read
WIDTH = 4096  # columns, where sizes differ
CACHED = 200 * MB  # what operands have together at least: several times the cache
MOST_SETS = 64
CHECKED = 64  # first rows, and last ones
OWN = "engine's Triton"
TRITON_WIDTHS = (4096, 16384)  # of norms: each width is compiled for itself


@dataclass(frozen=True)
class MemoryOp:
    """An op on one matrix. name: as tables show it; it begins with the op."""

    op: str
    shape: MatrixShape
    name: str
    flops: float = 0.0  # what it does is counted in bytes

    @property
    def bytes(self) -> int:
        """Bytes from and to memory."""
        return bytes_of(self.op, self.shape)

    def rungs(self) -> list[MemoryRung]:
        return [rung for rung in RUNGS if rung.op == self.op and takes(rung, self.shape)]

    def least(self) -> Iterator[tuple[str, float, str]]:
        chip = chip_here(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
        for rung in self.rungs():
            found = predict(rung, chip, self.shape)
            yield rung.title, found.bound, found.limiter

    def operands(self, cubins: Path | None) -> MemoryOperands:
        return MemoryOperands(self, cubins)


@dataclass
class OpCall:
    """A call that keeps its result, so that the next one of another set has memory of its own."""

    name: str
    run: Callable[[], Any]
    rung: MemoryRung | None = None
    written: Tensor | None = None
    result: Any = field(default=None, repr=False)

    def __call__(self) -> None:
        self.result = self.run()

    def output(self) -> Tensor:
        """Run it, and return its result."""
        if self.written is not None:
            self.written.fill_(torch.nan)
        self()
        found = self.result[0] if isinstance(self.result, tuple) else self.result
        out = self.written if self.written is not None else found
        assert isinstance(out, Tensor)
        return out


class MemoryOperands:
    """Operands in turn, each with its output, together several times the cache."""

    def __init__(self, problem: MemoryOp, cubins: Path | None = None, device: str = "cuda") -> None:
        self.problem, self.cubins = problem, cubins
        count = max(2, min(MOST_SETS, math.ceil(CACHED / problem.bytes))) if device == "cuda" else 1
        self.sets = [reference.inputs(problem.op, problem.shape, device) for _ in range(count)]
        self.outputs = [reference.output(problem.op, problem.shape, device) for _ in range(count)]

    @property
    def peers(self) -> Mapping[str, Sequence[Call]]:
        half = self.problem.bytes // 8  # float32 numbers, of which as many are read as written
        sources = [torch.randn(half, device="cuda") for _ in self.sets]
        copies = [OpCall(COPY, partial(torch.neg, x, out=torch.empty_like(x))) for x in sources]
        found: dict[str, Sequence[Call]] = {COPY: copies}
        for name, way in (libraries(self.problem.op) | engine(self.problem)).items():
            found[name] = [OpCall(name, partial(way, x, y)) for x, y in self._pairs()]
        return found

    def rung(self, name: str) -> Sequence[Call] | None:
        rung = next(each for each in RUNGS if each.title == name)
        if not runs_here(rung):
            return None
        loaded = LoadedRung(rung, self.problem.shape, self.cubins)
        return [OpCall(name, loaded.bound({**x, "y": y}), rung, y) for x, y in self._pairs()]

    def fault(self, call: Call, rung: str = "") -> str:
        assert isinstance(call, OpCall)
        if call.name == COPY:
            return ""
        out = call.output()
        shape = self.outputs[0].shape
        return reference.fault(call.rung, self.problem.op, out.reshape(shape), self.sets[0], CHECKED)

    def _pairs(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return zip(self.sets, self.outputs, strict=True)


OpWay = Callable[[Mapping[str, Tensor], Tensor], Any]


def libraries(op: str) -> dict[str, OpWay]:
    """Return torch's kernels of an op: its own one, and what is written in several ops."""

    def gated(x: Mapping[str, Tensor], y: Tensor) -> Tensor:
        gate, up = x["x"].chunk(2, -1)
        return torch.mul(functional.silu(gate), up, out=y)

    norm = functional.layer_norm
    ways: dict[str, dict[str, OpWay]] = {
        "vector_add": {"torch": lambda x, y: torch.add(x["x"], x["other"], out=y)},
        "transpose": {"torch": lambda x, y: y.copy_(x["x"].T)},
        "reduction": {"torch": lambda x, _: x["x"].sum()},
        "silu": {
            "torch": lambda x, _: functional.silu(x["x"]),
            "torch, two ops": lambda x, y: torch.mul(x["x"], torch.sigmoid(x["x"]), out=y),
        },
        "silu_multiply": {"torch, two ops": gated},
        "softmax": {"torch": lambda x, _: torch.softmax(x["x"], -1)},
        "layer_norm": {"torch": lambda x, _: norm(x["x"], x["weight"].shape, x["weight"], x["bias"], EPSILON)},
        "rms_norm": {"torch": lambda x, _: functional.rms_norm(x["x"], x["weight"].shape, x["weight"], EPSILON)},
    }
    return ways[op]


def engine(problem: MemoryOp) -> dict[str, OpWay]:
    """Return the engine's own kernel of an op, where it has one for such rows."""
    from ridgeline.kernels.small.activation import triton as activations  # Triton, which predictions need not
    from ridgeline.kernels.small.norm import triton as norms

    ways: dict[str, OpWay] = {
        "silu": lambda x, _: activations.activation(x["x"], "silu"),
        "silu_multiply": lambda x, _: activations.gated_activation(x["x"], "silu"),
        "layer_norm": lambda x, _: norms.layer_norm(x["x"], None, x["weight"], x["bias"], EPSILON),
        "rms_norm": lambda x, _: norms.rms_norm(x["x"], None, x["weight"], EPSILON),
    }
    fits = problem.op not in BY_ROWS or problem.shape.columns in TRITON_WIDTHS
    return {OWN: ways[problem.op]} if problem.op in ways and fits else {}


def _sized(op: str, megabytes: int) -> MemoryOp:
    numbers = megabytes * MB // item(op)
    side = 1 << (numbers.bit_length() - 1) // 2
    columns = side if op == "transpose" else WIDTH
    return MemoryOp(op, MatrixShape(numbers // columns, columns), f"{op}, {megabytes} MB")


def _long(op: str, columns: int) -> MemoryOp:
    return MemoryOp(op, MatrixShape(256 * MB // item(op) // columns, columns), f"{op}, {columns} columns")


PROBLEMS = (
    *(_sized(op, size) for op in KERNELS for size in SIZES),
    *(_long(op, columns) for op in BY_ROWS for columns in COLUMNS if columns != WIDTH),
    LinearLoss(),
)
