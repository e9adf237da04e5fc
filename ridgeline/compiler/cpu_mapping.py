"""Says a fused node as MLIR for a processor: rows one after the other, each in loops over vectors of its columns.

A loop is a phase of the body (mapping.py). What a later phase takes again is computed again if that is cheap, and else
kept in a buffer of one row, which stays in the first cache. So memory is read once and written once. Columns behind the
last whole vector are computed one by one.

Threads are torch's own: `worker` is what OpenMP calls in each of them, with the address of the arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.compiler.graph import GraphNode, GraphValue
from ridgeline.compiler.mapping import LaneSchedule, LaneWriter, domain_of
from ridgeline.compiler.ops import REDUCTIONS, TAKEN

WIDTH = 32  # numbers of a vector: two registers of 512 bits of float32, so that two chains of operations are under way
COSTS = {"exp": 12, "tanh": 20, "div": 4, "sqrt": 4, "log": 40, "erf": 40, "sin": 40, "cos": 40}  # others are 1
WORTH_KEEPING = 6  # operations that a load and a store replace
MOST_KEPT = 256 << 10  # bytes of buffers on a thread's stack


@dataclass(frozen=True)
class CpuText:
    """A kernel as MLIR: `kernel(inputs…, outputs…, begin, end)` of pointers and of a range of rows, or of numbers where
    there are no rows. count: how many there are. grain: numbers of the domain in each."""

    text: str
    count: int
    grain: int


def cpu_text(node: GraphNode, machine: str = "", threads: bool = True) -> CpuText:
    """Return the text of a fused node's kernel. machine: "avx512" for instructions of its own, or "". threads: with
    `worker`, which needs OpenMP."""
    domain, columns = domain_of(node)
    if not node.attributes["reduced"]:
        columns = columns[-1:]
    width = WIDTH if len(columns) == 1 else math.gcd(domain.sizes[-1] if domain.sizes else 1, WIDTH)
    if all(not domain.has(value) for value in node.attributes["body"].outputs) and not columns:
        width = 1
    return CpuWriter(node, width, columns, machine).text(threads)


class CpuWriter(LaneWriter):
    """Emits a kernel for processors. A value of columns has a name while a vector is computed."""

    pointer = "!llvm.ptr"
    word = "i64"
    by_vectors = False

    def __init__(self, node: GraphNode, width: int, columns: tuple[int, ...], machine: str) -> None:
        super().__init__(node, LaneSchedule(width, 1, 1, 0))
        self.machine = machine
        self.bits = 64
        self.whole_width = width
        self.columns = columns
        self.rows = tuple(at for at in range(len(self.domain.sizes)) if at not in columns)
        self.number = math.prod(self.domain.sizes[at] for at in columns)
        self.has_rows = bool(self.rows) or self.reduces or not columns
        self.targets = self._targets()
        self.needed = {phase: self.closure(values, set()) for phase, values in self.targets.items()}
        self.kept = self._kept()
        self.buffers: dict[GraphValue, str] = {}

    def moved(self, value: GraphValue) -> tuple[str, str, int]:
        element, kind, _ = super().moved(value)
        return element, kind, value.tensor.dtype.itemsize

    # what is computed in which phase

    def _targets(self) -> dict[int, list[GraphValue]]:
        """Return the values of columns that each phase must make: those reduced behind it, and those written."""
        last = max(self.phase.values(), default=0)
        return {
            phase: [
                *(n.values[0] for n in self.body.nodes if n.op in REDUCTIONS and self.phase[n.result] == phase + 1),
                *(v for v in self.body.outputs if self.is_wide(v) and self.phase[v] == phase),
            ]
            for phase in range(last + 1)
        }

    def _kept(self) -> dict[GraphValue, None]:
        """Return the values that a phase keeps for a later one."""
        first = {
            value: min(phase for phase, values in self.needed.items() if value in values)
            for value in set().union(*self.needed.values())
        }
        kept: dict[GraphValue, None] = {}
        for node in self.body.nodes:
            taken = [v for v in node.values if v in first]
            if node.op in REDUCTIONS:
                continue
            for value in taken:
                later = node.result in first and first[node.result] > first[value]
                if later and value in self.makers and self._cost(value) >= WORTH_KEEPING:
                    kept[value] = None
        size = sum(self.number * value.tensor.dtype.itemsize for value in kept)
        return kept if size <= MOST_KEPT else {}

    def _cost(self, value: GraphValue) -> int:
        return sum(
            COSTS.get(self.makers[each].op, 1) if each in self.makers else 1 for each in self.closure([value], set())
        )

    # the kernel

    def text(self, threads: bool) -> CpuText:
        inputs, outputs = len(self.body.inputs), len(self.body.outputs)
        pointers = [*(f"%in{at}" for at in range(inputs)), *(f"%out{at}" for at in range(outputs))]
        self.pointers = dict(zip(self.body.inputs, pointers, strict=False))
        for value in self.kept:
            size = self.emit(f"arith.constant {self.number} : i64")
            element = TAKEN[value.tensor.dtype]
            made = f"llvm.alloca {size} x {element} {{alignment = 64 : i64}} : (i64) -> {self.pointer}"
            self.buffers[value] = self.emit(made)
        if self.has_rows:
            self.say(f"scf.for %row = %begin to %end step {self.index(1)} : i64 {{")
            self.indent += "  "
            self.phases("%row", self.index(0), self.index(self.number), self.number)
            self.indent = self.indent[:-2]
            self.say("}")
        else:
            self.phases("", "%begin", "%end", -1)
        count = math.prod(self.domain.sizes[at] for at in self.rows) if self.has_rows else self.number
        parameters = ", ".join([*(f"{each}: {self.pointer}" for each in pointers), "%begin: i64", "%end: i64"])
        lines = [f"llvm.func @kernel({parameters}) {{", *self.lines, "    llvm.return", "}"]
        lines += _worker(len(pointers)) if threads else []
        return CpuText("\n".join(lines), count, self.number if self.has_rows else 1)

    def phases(self, row: str, begin: str, end: str, number: int) -> None:
        """Emit the phases of one row, for columns from begin to end. number: how many there are (-1: not known)."""
        done: set[GraphValue] = set()
        for phase, targets in self.targets.items():
            self.scalars(phase, row)
            reductions = [n for n in self.body.nodes if n.op in REDUCTIONS and self.phase[n.result] == phase + 1]
            if not targets:
                continue
            needed = self.closure(targets, done)
            loaded = {v for v in done if any(v in self.makers[n].values for n in needed if n in self.makers)}
            loaded |= {v for v in targets if v in done}
            whole = self.whole_width
            middle, starts = end, [""] * len(reductions)
            if number < 0 and whole > 1:
                length = self.emit(f"arith.subi {end}, {begin} : i64")
                rest = self.emit(f"arith.remsi {length}, {self.index(whole)} : i64")
                middle = self.emit(f"arith.subi {end}, {rest} : i64")
            elif number % whole:
                middle = self.index(number - number % whole)
            if number < 0 or number >= whole:
                starts = self.loop((needed, loaded, targets), reductions, row, (begin, middle), starts)
            if middle != end:
                self.width = 1
                starts = self.loop((needed, loaded, targets), reductions, row, (middle, end), starts)
                self.width = whole
            for node, made in zip(reductions, starts, strict=True):
                self.names[node.result, 0] = made
            done |= needed & self.kept.keys()
        for value in self.body.outputs:
            if not self.is_wide(value):
                self.store(value, self.names[value, 0], row, "", "")

    def loop(
        self,
        values: tuple[set[GraphValue], set[GraphValue], list[GraphValue]],
        reductions: list[GraphNode],
        row: str,
        columns: tuple[str, str],
        starts: list[str],
    ) -> list[str]:
        """Emit a loop over vectors, and return what it reduced. values: what is computed, what is loaded from buffers,
        and what is written or reduced. starts: single numbers that reductions start from ("": of nothing)."""
        needed, loaded, targets = values
        kinds = [self.type(node.values[0]) for node in reductions]
        firsts = [
            start if start and self.width == 1 else self.constant(node, kind)
            for node, kind, start in zip(reductions, kinds, starts, strict=True)
        ]
        bounds = *columns, self.index(self.width)
        with self.looped(bounds, reductions, firsts) as here:
            for value in (*self.body.inputs, *(each for each in self.kept if each in loaded)):
                if value in needed and value not in self.makers:
                    self.names[value, 0] = self.load(value, self.pointers[value], row, here)
                elif value in loaded:
                    self.names[value, 0] = self.buffer(value, here, "")
            for node in self.body.nodes:
                if node.result in needed:
                    self.compute(node, 0)
                    if node.result in self.kept:
                        self.buffer(node.result, here, self.names[node.result, 0])
            for value in dict.fromkeys(targets):
                if value in self.body.outputs:
                    self.store(value, self.names[value, 0], row, here, "")
        return self.results(here, reductions)

    def buffer(self, value: GraphValue, column: str, written: str) -> str:
        """Write a vector of a kept value, or read it ("" written)."""
        element, kind = TAKEN[value.tensor.dtype], self.type(value)
        at = self.emit(
            f"llvm.getelementptr {self.buffers[value]}[{column}] : ({self.pointer}, i64) -> {self.pointer}, {element}"
        )
        alignment = f"{{alignment = {value.tensor.dtype.itemsize} : i64}}"
        if written:
            self.say(f"llvm.store {written}, {at} {alignment} : {kind}, {self.pointer}")
            return ""
        return self.emit(f"llvm.load {at} {alignment} : {self.pointer} -> {kind}")

    def folded(self, node: GraphNode, vector: str) -> str:
        """Return the reduction of a vector, by halves."""
        element, width = TAKEN[node.result.tensor.dtype], self.width
        kind = self.type(node.values[0])
        if not kind.startswith("vector"):
            return vector
        while width > 1:
            half = width // 2
            parts = [
                self.emit(
                    f"vector.extract_strided_slice {vector} {{offsets = [{at}], sizes = [{half}], strides = [1]}}"
                    f" : vector<{width}x{element}> to vector<{half}x{element}>"
                )
                for at in (0, half)
            ]
            vector = self.combined(node, parts[0], parts[1], f"vector<{half}x{element}>")
            width = half
        return self.emit(f"vector.extract {vector}[0] : {element} from vector<1x{element}>")


def _worker(pointers: int) -> list[str]:
    """Return `worker(arguments)`: the kernel on a thread's part of the range. The arguments are the pointers and the
    number of rows, 8 bytes each."""
    lines = [
        "llvm.func @omp_get_thread_num() -> i32",
        "llvm.func @omp_get_num_threads() -> i32",
        "llvm.func @worker(%arguments: !llvm.ptr) {",
        "  %me32 = llvm.call @omp_get_thread_num() : () -> i32",
        "  %all32 = llvm.call @omp_get_num_threads() : () -> i32",
        "  %me = arith.extsi %me32 : i32 to i64",
        "  %all = arith.extsi %all32 : i32 to i64",
        "  %one = arith.constant 1 : i64",
        "  %next = arith.addi %me, %one : i64",
    ]
    for at in range(pointers + 1):
        kind = "i64" if at == pointers else "!llvm.ptr"
        lines.append(f"  %p{at} = llvm.getelementptr %arguments[{at}] : (!llvm.ptr) -> !llvm.ptr, i64")
        lines.append(f"  %a{at} = llvm.load %p{at} : !llvm.ptr -> {kind}")
    lines += [
        f"  %first = arith.muli %a{pointers}, %me : i64",
        "  %begin = arith.divsi %first, %all : i64",
        f"  %last = arith.muli %a{pointers}, %next : i64",
        "  %end = arith.divsi %last, %all : i64",
    ]
    names = ", ".join([*(f"%a{at}" for at in range(pointers)), "%begin", "%end"])
    kinds = ", ".join([*["!llvm.ptr"] * pointers, "i64", "i64"])
    return [*lines, f"  llvm.call @kernel({names}) : ({kinds}) -> ()", "  llvm.return", "}"]
