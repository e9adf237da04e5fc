"""Maps a tiled product to a CPU with vectors: blocks of the left matrix are copied for the second cache, panels of the
right one for the first, and a small tile of sums stays in registers.

The rows of a copied block lie a little further apart than they are long, since rows whose addresses are alike in their
low bits would push each other out of the first cache. Where the last step of K ends, the epilogue runs over the tile,
which the first cache still has. The text has any number of rows, so threads take parts of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ridgeline.compiler.products.cpu_schedule import LANES, CpuSchedule
from ridgeline.compiler.products.tiled import SumEpilogue
from ridgeline.compiler.products.writer import TextWriter

APART = 16  # numbers between the rows of a copied block
VECTOR = f"vector<{LANES}xf32>"


class VectorWriter:
    """The kernel of a product: `kernel(left, right, inputs of the epilogue…, result)` of memory.

    sizes: n and k. by_k: whether K runs along a matrix's rows.
    """

    def __init__(
        self, sizes: tuple[int, int], by_k: tuple[bool, bool], schedule: CpuSchedule, epilogue: SumEpilogue | None
    ) -> None:
        self.w, (self.n, self.k), self.by_k = TextWriter(), sizes, by_k
        self.s, self.e = schedule, epilogue
        self.vectors = schedule.panel // LANES
        self.a_type = f"memref<{schedule.rows}x{schedule.depth + APART}xf32>"
        self.b_type = f"memref<{schedule.depth}x{schedule.panel}xf32>"
        self.t_type = f"memref<{schedule.near}x{schedule.panel}xf32>"
        left = f"?x{self.k}" if by_k[0] else f"{self.k}x?"
        right = (self.n, self.k) if by_k[1] else (self.k, self.n)
        self.types = {"%left": f"memref<{left}xf32, strided<[?, 1]>>", "%right": f"memref<{right[0]}x{right[1]}xf32>"}
        if epilogue is not None:
            for each in epilogue.inputs:
                sizes_of = {0: "?", 1: str(self.n)}
                shape = "x".join([*(sizes_of[axis] for axis in each.axes), each.dtype])
                self.types[f"%e{each.input}"] = f"memref<{shape}>"
        self.types = dict(sorted(self.types.items(), key=lambda pair: (pair[0].startswith("%e"), pair[0])))
        self.types["%out"] = f"memref<?x{self.n}xf32>"

    def text(self) -> str:
        w, s = self.w, self.s
        c = self.index
        w.do(f"%a = memref.alloc() {{alignment = 64 : i64}} : {self.a_type}")
        w.do(f"%b = memref.alloc() {{alignment = 64 : i64}} : {self.b_type}")
        w.do(f"%t = memref.alloc() {{alignment = 64 : i64}} : {self.t_type}")
        rows = w.make(f"memref.dim %out, {c(0)} : {self.types['%out']}")
        with self.loop(c(0), c(self.k), s.depth) as k:
            depth = self.least(c(s.depth), self.sub(c(self.k), k))
            first = w.compare("eq", k, 0, "index")
            last = w.compare("uge", self.add(k, c(s.depth)), self.k, "index")
            with self.loop(c(0), rows, s.rows) as row:
                height = self.least(c(s.rows), self.sub(rows, row))
                self.copy_left(row, k, height, depth)
                with self.loop(c(0), c(self.n), s.panel) as column:
                    width = self.least(c(s.panel), self.sub(c(self.n), column))
                    self.copy_right(column, k, width, depth)
                    with self.loop(c(0), height, s.near) as near:
                        self.tile(row, near, column, (height, width, depth), first, last)
        for name, type in (("%a", self.a_type), ("%b", self.b_type), ("%t", self.t_type)):
            w.do(f"memref.dealloc {name} : {type}")
        w.do("return")
        parameters = ", ".join(f"{name}: {type}" for name, type in self.types.items())
        body = "\n".join(f"  {line}" for line in (*w.constants(), *w.lines))
        return f"func.func @kernel({parameters}) attributes {{llvm.emit_c_interface}} {{\n{body}\n}}"

    # indices

    def index(self, number: int) -> str:
        return self.w.constant(number, "index")

    def add(self, a: str, b: str) -> str:
        return self.w.integer("addi", a, b, "index")

    def sub(self, a: str, b: str) -> str:
        return self.w.integer("subi", a, b, "index")

    def least(self, a: str, b: str) -> str:
        return self.w.integer("minui", a, b, "index")

    @contextmanager
    def loop(self, begin: str, end: str, step: int) -> Iterator[str]:
        at = self.w.name()
        with self.w.inside(f"scf.for {at} = {begin} to {end} step {self.index(step)} {{"):
            yield at

    def load(self, name: str, place: str) -> str:
        return self.w.make(f"memref.load {name}[{place}] : {self.type(name)}")

    def store(self, value: str, name: str, place: str) -> None:
        self.w.do(f"memref.store {value}, {name}[{place}] : {self.type(name)}")

    def type(self, name: str) -> str:
        return {"%a": self.a_type, "%b": self.b_type, "%t": self.t_type, **self.types}[name]

    # copies

    def copy_left(self, row: str, k: str, height: str, depth: str) -> None:
        """Copy a block; rows up to the next whole tile are zeros."""
        w, c, s = self.w, self.index, self.s
        whole = w.integer("muli", w.integer("ceildivui", height, s.near, "index"), s.near, "index")
        zero = w.constant("0.0", "f32")
        with self.loop(height, whole, 1) as i, self.loop(c(0), depth, 1) as j:
            self.store(zero, "%a", f"{i}, {j}")
        outer, inner = (height, depth) if self.by_k[0] else (depth, height)
        with self.loop(c(0), outer, 1) as i, self.loop(c(0), inner, 1) as j:
            y, x = (self.add(row, i), self.add(k, j)) if self.by_k[0] else (self.add(k, i), self.add(row, j))
            self.store(self.load("%left", f"{y}, {x}"), "%a", f"{i}, {j}" if self.by_k[0] else f"{j}, {i}")

    def copy_right(self, column: str, k: str, width: str, depth: str) -> None:
        """Copy a panel; columns that do not exist are zeros."""
        w, c, s = self.w, self.index, self.s
        full = w.compare("eq", width, s.panel, "index")
        if not self.by_k[1]:
            with w.inside(f"scf.if {full} {{"), self.loop(c(0), depth, 1) as i:
                y = self.add(k, i)
                for v in range(self.vectors):
                    x = self.add(column, c(v * LANES)) if v else column
                    read = w.make(f"vector.load %right[{y}, {x}] : {self.type('%right')}, {VECTOR}")
                    w.do(f"vector.store {read}, %b[{i}, {c(v * LANES)}] : {self.b_type}, {VECTOR}")
            w.lines[-1] = w.lines[-1].replace("}", "} else {")
        else:
            w.do(f"scf.if {full} {{")
            squares = w.integer("muli", w.integer("divui", depth, LANES, "index"), LANES, "index")
            with self.loop(c(0), c(s.panel), LANES) as j, self.loop(c(0), squares, LANES) as i:
                self.turned_square(self.add(column, j), self.add(k, i), (i, j))
            with self.loop(c(0), c(s.panel), 1) as j, self.loop(squares, depth, 1) as i:
                read = self.load("%right", f"{self.add(column, j)}, {self.add(k, i)}")
                self.store(read, "%b", f"{i}, {j}")
            w.do("} else {")
        zero = w.constant("0.0", "f32")
        with self.loop(c(0), depth, 1) as i:
            with self.loop(c(0), width, 1) as j:
                y, x = self.add(k, i), self.add(column, j)
                self.store(self.load("%right", f"{x}, {y}" if self.by_k[1] else f"{y}, {x}"), "%b", f"{i}, {j}")
            with self.loop(width, c(s.panel), 1) as j:
                self.store(zero, "%b", f"{i}, {j}")
        w.do("}")

    def turned_square(self, column: str, k: str, to: tuple[str, str]) -> None:
        """Copy a square of the right matrix, whose rows are along K, with its rows as columns."""
        w, c = self.w, self.index
        square = f"vector<{LANES}x{LANES}xf32>"
        whole = w.make(f"ub.poison : {square}")
        for at in range(LANES):
            read = w.make(f"vector.load %right[{self.add(column, c(at))}, {k}] : {self.type('%right')}, {VECTOR}")
            whole = w.make(f"vector.insert {read}, {whole}[{at}] : {VECTOR} into {square}")
        turned = w.make(f"vector.transpose {whole}, [1, 0] : {square} to {square}")
        for at in range(LANES):
            row = w.make(f"vector.extract {turned}[{at}] : {VECTOR} from {square}")
            w.do(f"vector.store {row}, %b[{self.add(to[0], c(at))}, {to[1]}] : {self.b_type}, {VECTOR}")

    # products

    def tile(self, row: str, near: str, column: str, sizes: tuple[str, str, str], first: str, last: str) -> None:
        """Write the products of a tile of sums, and where they go."""
        w, c, s = self.w, self.index, self.s
        height, width, depth = sizes
        places = [(i, v) for i in range(s.near) for v in range(self.vectors)]
        top = self.add(row, near)
        if s.ahead:
            for line, v in places:
                place = f"{self.add(top, c(line))}, {self.add(column, c(v * LANES))}"
                w.do(f"memref.prefetch %out[{place}], write, locality<3>, data : {self.types['%out']}")
        zero = w.make(f"vector.broadcast {w.constant('0.0', 'f32')} : f32 to {VECTOR}")
        turns = w.integer("muli", w.integer("divui", depth, s.unrolled, "index"), s.unrolled, "index")
        sums = self.steps([zero] * len(places), near, c(0), turns, s.unrolled)
        if s.unrolled > 1:
            sums = self.steps(sums, near, turns, depth, 1)
        tall = w.compare("ule", self.add(near, c(s.near)), height, "index")
        wide = w.compare("eq", width, s.panel, "index")
        full = w.make(f"arith.andi {tall}, {wide} : i1")
        w.do(f"scf.if {full} {{")
        for (i, v), each in zip(places, sums, strict=True):
            place = f"{self.add(top, c(i))}, {self.add(column, c(v * LANES))}"
            old = w.make(f"vector.load %out[{place}] : {self.types['%out']}, {VECTOR}")
            both = w.make(f"arith.addf {old}, {each} : {VECTOR}")
            new = w.make(f"arith.select {first}, {each}, {both} : {VECTOR}")
            w.do(f"vector.store {new}, %out[{place}] : {self.types['%out']}, {VECTOR}")
        w.do("} else {")
        for (i, v), each in zip(places, sums, strict=True):
            w.do(f"vector.store {each}, %t[{c(i)}, {c(v * LANES)}] : {self.t_type}, {VECTOR}")
        there = self.least(c(s.near), self.sub(height, near))
        with self.loop(c(0), there, 1) as y, self.loop(c(0), width, 1) as x:
            place = f"{self.add(top, y)}, {self.add(column, x)}"
            made, old = self.load("%t", f"{y}, {x}"), self.load("%out", place)
            both = w.make(f"arith.addf {old}, {made} : f32")
            self.store(w.make(f"arith.select {first}, {made}, {both} : f32"), "%out", place)
        w.do("}")
        if self.e is not None:
            w.do(f"scf.if {last} {{")
            there = self.least(c(s.near), self.sub(height, near))
            with self.loop(c(0), there, 1) as y, self.loop(c(0), width, 1) as x:
                self.epilogue(self.add(top, y), self.add(column, x))
            w.do("}")

    def steps(self, sums: list[str], near: str, begin: str, end: str, unrolled: int) -> list[str]:
        """Write a loop over K, and return what the sums are behind it."""
        w, c = self.w, self.index
        k, result = w.name(), w.name()
        names = [w.name() for _ in sums]
        starts = ", ".join(f"{a} = {b}" for a, b in zip(names, sums, strict=True))
        types = ", ".join([VECTOR] * len(sums))
        carried = f"iter_args({starts}) -> ({types})"
        head = f"{result}:{len(sums)} = scf.for {k} = {begin} to {end} step {c(unrolled)} {carried} {{"
        with w.inside(head):
            for u in range(unrolled):
                at = self.add(k, c(u)) if u else k
                right = [
                    w.make(f"vector.load %b[{at}, {c(v * LANES)}] : {self.b_type}, {VECTOR}")
                    for v in range(self.vectors)
                ]
                for i in range(self.s.near):
                    x = self.load("%a", f"{self.add(near, c(i)) if i else near}, {at}")
                    wide = w.make(f"vector.broadcast {x} : f32 to {VECTOR}")
                    for v in range(self.vectors):
                        place = i * self.vectors + v
                        names[place] = w.make(f"vector.fma {wide}, {right[v]}, {names[place]} : {VECTOR}")
            w.do(f"scf.yield {', '.join(names)} : {types}")
        return [f"{result}#{at}" for at in range(len(sums))]

    def epilogue(self, row: str, column: str) -> None:
        """Write what the graph does to a sum."""
        w, e = self.w, self.e
        assert e is not None
        names = {e.arguments[e.sum]: self.load("%out", f"{row}, {column}")}
        for each in e.inputs:
            place = ", ".join((row, column)[axis] for axis in each.axes)
            names[e.arguments[each.argument]] = self.load(f"%e{each.input}", place)
        for name, (number, type) in e.constants.items():
            names[name] = w.constant(number, type)
        for result, text in e.operations:
            names[result] = w.make(re.sub(r"%[\w#]+", lambda found: names[found[0]], text))
        self.store(names[e.result], "%out", f"{row}, {column}")
