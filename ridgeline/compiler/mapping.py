"""Maps a fused node to blocks, warps and lanes of a GPU, and says it as MLIR: one `gpu.func` of vectors.

A lane holds vectors of 16 bytes. Without reductions the vectors of the whole domain are dealt to the lanes in order.
With reductions some lanes share a row: part of a warp, a warp, or all warps of a block. They read a row once and keep
it in registers, from the first reduction to the last store; only rows that are too long are read again for each
reduction. Lanes of a warp reduce by shuffles, warps of a block by shared memory.

A body is emitted in phases: phase 0 is what takes no reduction, phase n what takes the result of a reduction over
values of phase n - 1. Between two phases is one barrier, however many reductions there are.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ridgeline.compiler.elementary import SHORT, OperationWriter, quotient
from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph
from ridgeline.compiler.linalg import LoopDomain, computation, literal
from ridgeline.compiler.ops import POINTWISE, REDUCTIONS, TAKEN

VECTOR_BYTES = 16
MOST_HELD = 32  # numbers of one value that a lane keeps of its row, at most
FEWEST_THREADS, MOST_THREADS = 128, 1024
MOST_LOADED = 4  # vectors of each input that a lane of a kernel without reductions loads before it computes
WORDS = (8, 16)  # bytes that one instruction can load past L1
SIGNIFICANT = {torch.bfloat16: 8, torch.float16: 11}  # bits of numbers


@dataclass(frozen=True)
class LaneSchedule:
    """width: numbers of a vector. threads: of a block. lanes: how many share a row (0: there are no rows). vectors: of
    a lane, in a row or in all; 0: a loop reads the row once a phase.

    past_l1: what is read once in all does not stay in L1. late: what all rows take (a weight) is loaded in the phase
    that takes it first, not at once.
    """

    width: int
    threads: int
    lanes: int
    vectors: int
    past_l1: bool = False
    late: bool = True

    @property
    def each_block(self) -> int:
        """Rows of a block, or vectors if there are no rows."""
        return self.threads // self.lanes if self.lanes else self.threads * self.vectors

    def __str__(self) -> str:
        held = f"{self.vectors} vectors of {self.width}" if self.vectors else f"a loop of vectors of {self.width}"
        shared = f"{self.lanes} lanes a row" if self.lanes else "no rows"
        loads = f"{' past L1' if self.past_l1 else ''}{', weights late' if self.late else ''}"
        return f"{self.threads} threads a block, {shared}, {held} a lane{loads}"


@dataclass(frozen=True)
class GpuText:
    """A kernel as MLIR: `kernel(inputs…, outputs…, count)` of pointers and of the number of rows, or of vectors where
    there are no rows. counted: numbers of one such unit in the domain. shared: bytes that warps exchange."""

    text: str
    schedule: LaneSchedule
    count: int
    reduces: bool

    @property
    def blocks(self) -> int:
        return -(-self.count // self.schedule.each_block)


def lane_schedule(node: GraphNode, warp: int = 32) -> LaneSchedule:
    """Choose the mapping of a fused node from its shapes and dtypes."""
    domain, columns = domain_of(node)
    body: OpGraph = node.attributes["body"]
    sizes = [domain.sizes[at] for at in columns]
    last = domain.sizes[-1] if domain.sizes else 1
    widest = max(value.tensor.dtype.itemsize for value in (*body.inputs, *body.outputs))
    moved = (value for value in (*body.inputs, *body.outputs) if domain.has(value))
    narrowest = min((value.tensor.dtype.itemsize for value in moved), default=8)
    most = VECTOR_BYTES // max(narrowest, 2) if widest <= 4 else VECTOR_BYTES // 8
    width = math.gcd(last, most)
    if not node.attributes["reduced"]:
        return LaneSchedule(width, 256, 0, MOST_LOADED if width * narrowest >= 8 else 2 * MOST_LOADED)
    vectors = math.prod(sizes) // width
    lanes = 1 << max(0, (vectors - 1).bit_length())
    if lanes <= warp:
        return LaneSchedule(width, 256, lanes, 1)
    if vectors * width <= warp * 16:
        return LaneSchedule(width, 256, warp, -(-vectors // warp))
    threads = min(MOST_THREADS, max(FEWEST_THREADS, warp * -(-vectors * width // (warp * 16))))
    threads = 1 << (threads - 1).bit_length()
    each = -(-vectors // threads)
    return LaneSchedule(width, threads, threads, each if each * width <= MOST_HELD else 0)


def gpu_text(node: GraphNode, warp: int = 32, schedule: LaneSchedule | None = None, machine: str = "nvidia") -> GpuText:
    """Return the text of a fused node's kernel for GPUs with so many lanes a warp.

    machine: what `OperationWriter` knows the GPU by.
    """
    writer = LaneWriter(node, schedule or lane_schedule(node, warp), warp)
    writer.machine = machine
    return writer.whole()


def domain_of(node: GraphNode) -> tuple[LoopDomain, tuple[int, ...]]:
    """Return a fused node's loops, and those that lanes share: the reduced ones, or all."""
    body: OpGraph = node.attributes["body"]
    domain = LoopDomain(node.attributes["domain"], [*body.inputs, *(each.result for each in body.nodes)])
    every = tuple(range(len(domain.sizes)))
    for each in body.nodes:
        if each.op in REDUCTIONS:
            return domain, tuple(at for at in every if at not in domain.has(each.result))
    return domain, every


class LaneWriter:
    """Emits a kernel for GPUs.

    A value of columns has a name for each of a lane's vectors, one of rows a single name. pointer, word: the types of
    addresses and of places. machine: what `OperationWriter` knows it by. by_vectors: places of columns count vectors.
    """

    pointer = "!llvm.ptr<1>"
    word = "i32"
    machine = "nvidia"
    by_vectors = True

    def __init__(self, node: GraphNode, schedule: LaneSchedule, warp: int = 1) -> None:
        self.width = schedule.width
        self.body: OpGraph = node.attributes["body"]
        self.domain, self.columns = domain_of(node)
        self.rows = tuple(at for at in range(len(self.domain.sizes)) if at not in self.columns)
        self.schedule, self.warp = schedule, warp
        self.reduces = bool(node.attributes["reduced"])
        self.bits = max(SIGNIFICANT.get(value.tensor.dtype, 64) for value in self.body.outputs)
        self.makers = {each.result: each for each in self.body.nodes}
        self.phase = _phases(self.body)
        self.lines: list[str] = []
        self.reciprocals: dict[GraphValue, str] = {}
        self.names: dict[tuple[GraphValue, int], str] = {}
        self.counter = 0
        self.indent = "    "
        sizes = [self.domain.sizes[at] for at in self.columns]
        self.per_row = math.prod(sizes) // schedule.width  # vectors
        self.slots = 0

    # words

    def emit(self, made: str) -> str:
        """Emit an operation with one result, and return the result's name."""
        self.counter += 1
        name = f"%t{self.counter}"
        self.lines.append(f"{self.indent}{name} = {made}")
        return name

    def say(self, line: str) -> None:
        self.lines.append(self.indent + line)

    def index(self, number: int) -> str:
        return self.emit(f"arith.constant {number} : {self.word}")

    def is_wide(self, value: GraphValue) -> bool:
        """True if a value has a number for each column, and so a vector in each lane."""
        return any(at in self.columns for at in self.domain.has(value))

    def type(self, value: GraphValue) -> str:
        element = TAKEN[value.tensor.dtype]
        width = self.width
        return f"vector<{width}x{element}>" if width > 1 and self.is_wide(value) else element

    # where a value lies

    def coordinate(self, linear: str, loops: Sequence[int], first: int, last: int, width: int) -> str:
        """Return the place within loops first … last of a place within `loops`, the innermost in vectors."""
        sizes = {at: self.domain.sizes[at] for at in loops}
        if width > 1:
            sizes[loops[-1]] //= width
        behind = math.prod(sizes[at] for at in loops if at > last)
        found = linear if behind == 1 else self.emit(f"arith.divui {linear}, {self.index(behind)} : {self.word}")
        if first == loops[0]:
            return found
        within = math.prod(sizes[at] for at in loops if first <= at <= last)
        return self.emit(f"arith.remui {found}, {self.index(within)} : {self.word}")

    def offset(self, value: GraphValue, row: str, column: str) -> str:
        """Return the offset of a value's numbers, as i64: at a row, and at a vector of columns."""
        shape, has = self.domain.shape(value), self.domain.has(value)
        strides = {at: math.prod(shape[place + 1 :]) for place, at in enumerate(has)}
        total = ""
        for loops, linear in ((self.rows, row), (self.columns, column)):
            for first, last in _runs([at for at in has if at in loops]):
                wide = self.width if loops is self.columns and self.by_vectors else 1
                in_vectors = wide > 1 and last == loops[-1]
                place = self.coordinate(linear, loops, first, last, wide)
                stride = self.width if in_vectors else strides[last]
                if self.word != "i64":
                    place = self.emit(f"arith.extui {place} : {self.word} to i64")
                if stride != 1:
                    by = self.emit(f"arith.constant {stride} : i64")
                    place = self.emit(f"arith.muli {place}, {by} : i64")
                total = self.emit(f"arith.addi {total}, {place} : i64") if total else place
        return total or self.emit("arith.constant 0 : i64")

    def moved(self, value: GraphValue) -> tuple[str, str, int]:
        """Return the type in memory, the type of a vector there, and the bytes by which it is aligned."""
        element = "i8" if value.tensor.dtype == torch.bool else TAKEN[value.tensor.dtype]
        last = self.columns[-1] if self.columns else -1
        width = self.width if last in self.domain.has(value) else 1
        kind = f"vector<{width}x{element}>" if width > 1 else element
        return element, kind, min(width * value.tensor.dtype.itemsize, VECTOR_BYTES)

    def load(self, value: GraphValue, pointer: str, row: str, column: str) -> str:
        element, kind, bytes = self.moved(value)
        at = self.emit(
            f"llvm.getelementptr {pointer}[{self.offset(value, row, column)}]"
            f" : ({self.pointer}, i64) -> {self.pointer}, {element}"
        )
        once = self.schedule.past_l1 and len(self.domain.has(value)) == len(self.domain.sizes)
        if once and self.machine == "nvidia" and bytes in WORDS and kind != element:
            return self.past_l1(at, bytes // 4, kind)
        read = self.emit(f"llvm.load {at} {{alignment = {bytes} : i64}} : {self.pointer} -> {kind}")
        if element == "i8":
            boolean = kind.replace("i8", "i1")
            read, kind = self.emit(f"arith.trunci {read} : {kind} to {boolean}"), boolean
        wanted = self.type(value)
        return read if wanted == kind else self.emit(f"vector.broadcast {read} : {kind} to {wanted}")

    def past_l1(self, at: str, words: int, kind: str) -> str:
        """Load some words of 4 bytes that no other lane reads, and return them as a vector."""
        registers = ", ".join(f"${each}" for each in range(words))
        asm = f"ld.global.nc.L1::no_allocate.v{words}.b32 {{{registers}}}, [${words}];"
        result = f"!llvm.struct<({', '.join(['i32'] * words)})>"
        outputs = ",".join(["=r"] * words)
        read = self.emit(f'llvm.inline_asm "{asm}", "{outputs},l" {at} : ({self.pointer}) -> {result}')
        parts = [self.emit(f"llvm.extractvalue {read}[{each}] : {result}") for each in range(words)]
        vector = self.emit(f"vector.from_elements {', '.join(parts)} : vector<{words}xi32>")
        return self.emit(f"vector.bitcast {vector} : vector<{words}xi32> to {kind}")

    def store(self, value: GraphValue, name: str, row: str, column: str, inside: str) -> None:
        """Store a vector, if `inside` ("": always) holds."""
        element, kind, bytes = self.moved(value)
        pointer = f"%out{self.body.outputs.index(value)}"
        if element == "i8":
            name = self.emit(f"arith.extui {name} : {self.type(value)} to {kind}")
        at = self.emit(
            f"llvm.getelementptr {pointer}[{self.offset(value, row, column)}]"
            f" : ({self.pointer}, i64) -> {self.pointer}, {element}"
        )
        store = f"llvm.store {name}, {at} {{alignment = {bytes} : i64}} : {kind}, {self.pointer}"
        self.say(f"scf.if {inside} {{ {store} }}" if inside else store)

    # the kernel

    def whole(self) -> GpuText:
        pointers = [f"%in{at}" for at in range(len(self.body.inputs))]
        pointers += [f"%out{at}" for at in range(len(self.body.outputs))]
        for name, at, kind in (("tid", "thread_id", "x"), ("block", "block_id", "x")):
            self.say(f"%{name}_index = gpu.{at} {kind}")
            self.say(f"%{name} = arith.index_cast %{name}_index : index to i32")
        self.pointers = dict(zip(self.body.inputs, pointers, strict=False))
        if self.reduces:
            self.reduced()
        else:
            self.flat()
        parameters = ", ".join([*(f"{each}: {self.pointer}" for each in pointers), "%count: i32"])
        shared = ""
        if self.slots:
            shared = f" workgroup(%shared : memref<{self.slots}xi64, #gpu.address_space<workgroup>>)"
        text = "\n".join(
            [
                f"// {self.schedule}",
                "gpu.module @kernels {",
                f"  gpu.func @kernel({parameters}){shared} kernel"
                f" attributes {{known_block_size = array<i32: {self.schedule.threads}, 1, 1>}} {{",
                *self.lines,
                "    gpu.return",
                "  }",
                "}",
            ]
        ).replace("SLOTS", str(self.slots))
        counted = math.prod(self.domain.sizes[at] for at in (self.rows if self.reduces else self.columns))
        count = counted if self.reduces else counted // self.width
        return GpuText(text, self.schedule, count, self.reduces)

    def flat(self) -> None:
        """Without reductions: load all vectors, then compute and store one after the other."""
        schedule = self.schedule
        first = self.emit(f"arith.muli %block, {self.index(schedule.each_block)} : i32")
        one = self.index(1)
        end = self.emit(f"arith.subi %count, {one} : i32")
        places, insides = [], []
        for at in range(schedule.vectors):
            base = self.emit(f"arith.addi {first}, {self.index(at * schedule.threads)} : i32")
            place = self.emit(f"arith.addi {base}, %tid : i32")
            insides.append(self.emit(f"arith.cmpi ult, {place}, %count : i32"))
            places.append(self.emit(f"arith.minui {place}, {end} : i32"))
        self.scalars(0, "")
        for value in self.body.inputs:
            if self.is_wide(value):
                for at, place in enumerate(places):
                    self.names[value, at] = self.load(value, self.pointers[value], "", place)
        for at, place in enumerate(places):
            for node in self.body.nodes:
                if self.is_wide(node.result):
                    self.compute(node, at)
            for value in self.body.outputs:
                self.store(value, self.names[value, at if self.is_wide(value) else 0], "", place, insides[at])

    def reduced(self) -> None:
        lanes, threads = self.schedule.lanes, self.schedule.threads
        lane, row, inside = "%tid", "%block", ""
        if lanes < threads:
            each = self.index(lanes)
            lane = self.emit(f"arith.remui %tid, {each} : i32")
            within = self.emit(f"arith.divui %tid, {each} : i32")
            first = self.emit(f"arith.muli %block, {self.index(threads // lanes)} : i32")
            wanted = self.emit(f"arith.addi {first}, {within} : i32")
            inside = self.emit(f"arith.cmpi ult, {wanted}, %count : i32")
            end = self.emit(f"arith.subi %count, {self.index(1)} : i32")
            row = self.emit(f"arith.minui {wanted}, {end} : i32")
        ends = max(self.phase.values(), default=0)
        held = self.schedule.vectors > 0
        places: list[str] = []
        valid: list[str] = []
        if held:
            places, valid = self.places(lane)
            for value in self.body.inputs:
                if self.is_wide(value) and not self.waits(value):
                    for at, place in enumerate(places):
                        self.names[value, at] = self.load(value, self.pointers[value], row, place)
        for phase in range(ends + 1):
            self.scalars(phase, row)
            reductions = [n for n in self.body.nodes if n.op in REDUCTIONS and self.phase[n.result] == phase + 1]
            stored = [v for v in self.body.outputs if self.is_wide(v) and self.phase[v] == phase]
            if held:
                for value in self.body.inputs:
                    if self.waits(value) and self._first_taken(value) == phase:
                        for at, place in enumerate(places):
                            self.names[value, at] = self.load(value, self.pointers[value], row, place)
                self.held_phase(phase, reductions, valid)
                for value in stored:
                    for at, place in enumerate(places):
                        both = self.both(inside, valid[at])
                        self.store(value, self.names[value, at], row, place, both)
            else:
                self.streamed_phase(reductions, stored, row, lane)
            if reductions:
                self.exchange(reductions, lane)
        narrow = [value for value in self.body.outputs if not self.is_wide(value)]
        if narrow:
            leads = self.emit(f"arith.cmpi eq, {lane}, {self.index(0)} : i32")
            both = self.both(inside, leads)
            for value in narrow:
                self.store(value, self.names[value, 0], row, "", both)

    def waits(self, value: GraphValue) -> bool:
        """True if an input is loaded when it is first taken."""
        return self.schedule.late and self.is_wide(value) and not set(self.rows) & set(self.domain.has(value))

    def _first_taken(self, value: GraphValue) -> int:
        return min(self.phase[n.result] - (n.op in REDUCTIONS) for n in self.body.nodes if value in n.values)

    def both(self, a: str, b: str) -> str:
        return self.emit(f"arith.andi {a}, {b} : i1") if a and b else a or b

    def places(self, lane: str) -> tuple[list[str], list[str]]:
        """Return a lane's places in a row, in vectors, and whether each lies in it ("": all lanes' do)."""
        places, valid = [], []
        lanes = self.schedule.lanes
        for at in range(self.schedule.vectors):
            place = self.emit(f"arith.addi {lane}, {self.index(at * lanes)} : i32") if at else lane
            inside = ""
            if (at + 1) * lanes > self.per_row:
                inside = self.emit(f"arith.cmpi ult, {place}, {self.index(self.per_row)} : i32")
                place = self.emit(f"arith.minui {place}, {self.index(self.per_row - 1)} : i32")
            places.append(place)
            valid.append(inside)
        return places, valid

    def scalars(self, phase: int, row: str) -> None:
        """Load and compute the values of rows that a phase adds."""
        if phase == 0:
            for value in self.body.inputs:
                if not self.is_wide(value):
                    self.names[value, 0] = self.load(value, self.pointers[value], row, "")
        for node in self.body.nodes:
            if node.op not in REDUCTIONS and not self.is_wide(node.result) and self.phase[node.result] == phase:
                self.compute(node, 0)

    def compute(self, node: GraphNode, at: int) -> None:
        operands = []
        for each in node.values:
            name = self.names[each, at if self.is_wide(each) else 0]
            wide = self.type(node.result).startswith("vector")
            if wide and not self.type(each).startswith("vector"):
                element = self.type(each)
                name = self.emit(f"vector.broadcast {name} : {element} to vector<{self.width}x{element}>")
            operands.append(name)
        width = self.width if self.type(node.result).startswith("vector") else 1
        if (reciprocal := self.reciprocal(node)) is not None:
            kind = self.type(node.result)
            if kind.startswith("vector"):
                reciprocal = self.emit(f"vector.broadcast {reciprocal} : f32 to {kind}")
            self.names[node.result, at] = self.emit(f"arith.mulf {operands[0]}, {reciprocal} : {kind}")
            return
        self.names[node.result, at] = computation(
            node, operands, OperationWriter(self.emit, width, self.machine, self.bits)
        )

    def reciprocal(self, node: GraphNode) -> str | None:
        """Return the reciprocal of a row's number by which a node divides columns, if that is precise enough."""
        short = self.machine == "nvidia" and self.bits <= SHORT and self.schedule.vectors
        if node.op != "div" or not short or not self.is_wide(node.result) or len(node.values) < 2:
            return None
        by = node.values[1]
        if self.is_wide(by) or not self.is_wide(node.values[0]) or by.tensor.dtype != torch.float32:
            return None
        if by not in self.reciprocals:
            w = OperationWriter(self.emit, 1, self.machine, self.bits)
            self.reciprocals[by] = quotient(w, w.number(1.0), self.names[by, 0])
        return self.reciprocals[by]

    def held_phase(self, phase: int, reductions: list[GraphNode], valid: list[str]) -> None:
        for at in range(self.schedule.vectors):
            for node in self.body.nodes:
                if self.is_wide(node.result) and self.phase[node.result] == phase:
                    self.compute(node, at)
        for node in reductions:
            (value,) = node.values
            total = ""
            for at in range(self.schedule.vectors):
                part = self.names[value, at]
                if valid[at]:
                    start = self.constant(node, self.type(value))
                    part = self.emit(f"arith.select {valid[at]}, {part}, {start} : {self.type(value)}")
                total = self.combined(node, total, part, self.type(value)) if total else part
            self.names[node.result, 0] = self.folded(node, total)

    def streamed_phase(self, reductions: list[GraphNode], stored: list[GraphValue], row: str, lane: str) -> None:
        """A loop over the row, which makes anew what the phase takes."""
        if not reductions and not stored:
            return
        needed = self.closure([*stored, *(node.values[0] for node in reductions)], set())
        starts = [self.constant(node, self.type(node.values[0])) for node in reductions]
        bounds = lane, self.index(self.per_row), self.index(self.schedule.lanes)
        with self.looped(bounds, reductions, starts) as here:
            for value in self.body.inputs:
                if value in needed:
                    self.names[value, 0] = self.load(value, self.pointers[value], row, here)
            for node in self.body.nodes:
                if node.result in needed:
                    self.compute(node, 0)
            for value in stored:
                self.store(value, self.names[value, 0], row, here, "")
        for node, made in zip(reductions, self.results(here, reductions), strict=True):
            self.names[node.result, 0] = made

    def closure(self, values: Sequence[GraphValue], known: Container[GraphValue]) -> set[GraphValue]:
        """Return the values of columns that these take, themselves too, without what is known."""
        found: set[GraphValue] = set()
        pending = list(values)
        while pending:
            value = pending.pop()
            if value not in found and value not in known and self.is_wide(value):
                found.add(value)
                pending += self.makers[value].values if value in self.makers else ()
        return found

    @contextmanager
    def looped(
        self, bounds: tuple[str, str, str], reductions: Sequence[GraphNode], starts: Sequence[str]
    ) -> Iterator[str]:
        """Write a loop over columns around what is written inside, and give the name of its counter.

        bounds: the first column, the one behind the last, and the step. starts: what reductions start from. Behind the
        loop `results` has them.
        """
        self.counter += 1
        here = f"%c{self.counter}"
        kinds = [self.type(node.values[0]) for node in reductions]
        names = [f"{here}_a{at}" for at in range(len(reductions))]
        carried = results = ""
        if reductions:
            taken = ", ".join(f"{name} = {start}" for name, start in zip(names, starts, strict=True))
            carried = f" iter_args({taken}) -> ({', '.join(kinds)})"
            results = f"{here}_r:{len(reductions)} = "
        self.say(f"{results}scf.for {here} = {bounds[0]} to {bounds[1]} step {bounds[2]}{carried} : {self.word} {{")
        outer, self.indent = self.indent, self.indent + "  "
        yield here
        if reductions:
            made = [
                self.combined(node, name, self.names[node.values[0], 0], kind)
                for node, name, kind in zip(reductions, names, kinds, strict=True)
            ]
            self.say(f"scf.yield {', '.join(made)} : {', '.join(kinds)}")
        self.indent = outer
        self.say("}")

    def results(self, here: str, reductions: Sequence[GraphNode]) -> list[str]:
        """Return the numbers that a loop over columns has reduced. here: its counter."""
        return [self.folded(node, f"{here}_r#{at}") for at, node in enumerate(reductions)]

    # reductions

    def constant(self, node: GraphNode, kind: str) -> str:
        number = literal(REDUCTIONS[node.op].start, node.result.tensor.dtype)
        return self.emit(f"arith.constant {f'dense<{number}>' if kind.startswith('vector') else number} : {kind}")

    def combined(self, node: GraphNode, a: str, b: str, kind: str) -> str:
        return self.emit(f"{POINTWISE[REDUCTIONS[node.op].combine].floating} {a}, {b} : {kind}")

    def folded(self, node: GraphNode, vector: str) -> str:
        """Return the reduction of a lane's vector."""
        kind, element = self.type(node.values[0]), TAKEN[node.result.tensor.dtype]
        if not kind.startswith("vector"):
            return vector
        width, parts = self.width, []
        for at in range(width):
            parts.append(self.emit(f"vector.extract {vector}[{at}] : {element} from {kind}"))
        while len(parts) > 1:
            parts = [self.combined(node, parts[at], parts[at + 1], element) for at in range(0, len(parts), 2)]
        return parts[0]

    def exchange(self, reductions: list[GraphNode], lane: str) -> None:
        """Reduce over the lanes of a row: within warps, and then between them."""
        lanes = self.schedule.lanes
        for node in reductions:
            self.names[node.result, 0] = self.shuffled(node, self.names[node.result, 0], min(lanes, self.warp))
        if lanes <= self.warp:
            return
        warps = lanes // self.warp
        size = self.index(self.warp)
        warp = self.emit(f"arith.divui {lane}, {size} : i32")
        within = self.emit(f"arith.remui {lane}, {size} : i32")
        leads = self.emit(f"arith.cmpi eq, {within}, {self.index(0)} : i32")
        taken = self.emit(f"arith.remui {within}, {self.index(warps)} : i32")
        bases = []
        for node in reductions:
            bases.append(self.index(self.slots))
            self.slots += warps
            self.shared(node, self.emit(f"arith.addi {warp}, {bases[-1]} : i32"), self.names[node.result, 0], leads)
        self.say("gpu.barrier")
        for node, base in zip(reductions, bases, strict=True):
            read = self.shared(node, self.emit(f"arith.addi {taken}, {base} : i32"), "", "")
            self.names[node.result, 0] = self.shuffled(node, read, warps)

    def shared(self, node: GraphNode, slot: str, written: str, leads: str) -> str:
        """Write a number to a slot of shared memory, or read it ("" written). Slots have 8 bytes."""
        element = TAKEN[node.result.tensor.dtype]
        bits = "i32" if element == "f32" else "i64"
        memory = "memref<SLOTSxi64, #gpu.address_space<workgroup>>"
        at = self.emit(f"arith.index_cast {slot} : i32 to index")
        if written:
            as_bits = self.emit(f"arith.bitcast {written} : {element} to {bits}")
            if bits == "i32":
                as_bits = self.emit(f"arith.extui {as_bits} : i32 to i64")
            self.say(f"scf.if {leads} {{ memref.store {as_bits}, %shared[{at}] : {memory} }}")
            return ""
        read = self.emit(f"memref.load %shared[{at}] : {memory}")
        if bits == "i32":
            read = self.emit(f"arith.trunci {read} : i64 to i32")
        return self.emit(f"arith.bitcast {read} : {bits} to {element}")

    def shuffled(self, node: GraphNode, value: str, lanes: int) -> str:
        """Reduce over neighbouring lanes of a warp; all of them get the result."""
        element = TAKEN[node.result.tensor.dtype]
        size, distance = self.index(self.warp), lanes // 2
        while distance:
            self.counter += 1
            other = f"%s{self.counter}"
            self.say(f"{other}, {other}_p = gpu.shuffle xor {value}, {self.index(distance)}, {size} : {element}")
            value = self.combined(node, value, other, element)
            distance //= 2
        return value


def _phases(body: OpGraph) -> dict[GraphValue, int]:
    """Return the number of reductions before each value, one behind the other."""
    found: dict[GraphValue, int] = dict.fromkeys(body.inputs, 0)
    for node in body.nodes:
        found[node.result] = max((found[each] for each in node.values), default=0) + (node.op in REDUCTIONS)
    return found


def _runs(loops: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of neighbouring loops."""
    first = None
    for at in loops:
        if first is None:
            first = at
        if at + 1 not in loops:
            yield first, at
            first = None
