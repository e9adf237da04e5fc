"""Maps a tiled product to Hopper: blocks to clusters of multiprocessors, the steps of K to a ring of shared memory that
TMA fills, and 64 rows at a time to a warpgroup, whose sums stay in registers through the epilogue.

One warpgroup copies and the others multiply. A step of K is 64 numbers of 16 bits, one row of a 128-byte swizzle, so
that neither TMA nor wgmma meet a bank twice. A stage of the ring has two barriers: `full` counts bytes that TMA wrote,
`empty` the warpgroups that read them, of every block of the cluster that the copy reached. A block takes tiles one
after the other until there is none; while it writes one tile, the copies of the next are on their way.

The text that comes out has operations of `nvvm`, `scf`, `arith` and `llvm` and no tensor. Everything that is chosen is
in the schedule (schedule.py); nothing is chosen here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from ridgeline.compiler.graph import InvalidGraph
from ridgeline.compiler.products.schedule import STEP, HopperSchedule
from ridgeline.compiler.products.tiled import EpilogueValue, TiledProduct
from ridgeline.compiler.products.writer import TextWriter

ROWS = 64  # rows of a wgmma
ATOM = 8192  # bytes of 64 rows of 128 bytes
STAGED = 8192  # bytes in which a warpgroup puts 64 x 64 results together for TMA
Bits = dict[int, tuple[str, str]]  # of an epilogue's arguments: bits of two neighbours, and their dtype
TileWriter = Callable[[str, str, str, str], tuple[str, str]]  # of row, column and the ring's stage and parity
BARRIER_ID = 1  # of a warpgroup's own barrier: this plus its number
TURN_ID = 5  # of the barrier at which a warpgroup waits for its turn: this plus its number


@dataclass(frozen=True)
class HopperKernel:
    """The text of a kernel and how to launch it.

    grid, threads, shared (bytes), cluster: of the launch. boxes: rows and columns of a box of the left matrix, of the
    right one and, if TMA copies the result, of that.
    """

    text: str
    grid: int
    threads: int
    shared: int
    cluster: int
    boxes: tuple[tuple[int, int], ...]


def mapped(product: TiledProduct[HopperSchedule]) -> HopperKernel:
    """Return the kernel of a tiled product. Raises InvalidGraph if it has no epilogue, which rounds the sums."""
    if product.epilogue is None:
        raise InvalidGraph("sums in float32 have no kernel for Hopper; round them.")
    return _HopperWriter(product).kernel()


class _HopperWriter:
    def __init__(self, product: TiledProduct[HopperSchedule]) -> None:
        self.p, self.s, self.w = product, product.schedule, TextWriter()
        assert product.epilogue is not None
        self.e = product.epilogue
        s = self.s
        self.cluster = s.cluster[0] * s.cluster[1]
        self.atoms = s.rows // (ROWS * s.sharing)  # wgmma's of 64 rows for each warpgroup
        self.a_bytes, self.b_bytes = s.rows * 2 * STEP, s.columns * 2 * STEP
        self.staged_at = s.stages * (self.a_bytes + self.b_bytes)
        self.barriers_at = self.staged_at + (STAGED * s.warpgroups * s.staging)
        self.shared = self.barriers_at + 16 * s.stages
        self.threads = 128 * (s.warpgroups + 1)
        self.sums = s.columns // 2
        self.struct = f"!llvm.struct<({', '.join(['f32'] * self.sums)})>"
        self.tiles = (ceil(product.m / (s.rows * s.cluster[0])), ceil(product.n / (s.columns * s.cluster[1])))
        self.steps = ceil(product.k / STEP)

    # the kernel

    def kernel(self) -> HopperKernel:
        w, s = self.w, self.s
        tid = w.make("nvvm.read.ptx.sreg.tid.x : i32")
        self.base = w.make("llvm.mlir.addressof @shared : !llvm.ptr<3>")
        self.lane = w.integer("remui", tid, 128)
        group = w.integer("divui", tid, 128)
        self.rank = w.make("nvvm.read.ptx.sreg.cluster.ctaid.x : i32") if self.cluster > 1 else w.constant(0)
        first = w.compare("eq", tid, 0)
        with w.inside(f"scf.if {first} {{"):
            for stage in range(s.stages):
                at = w.constant(stage)
                w.do(f"nvvm.mbarrier.init {self.full(at)}, {w.constant(1)} : !llvm.ptr<3>, i32")
                arrivals = w.constant(s.sharing * self.cluster)
                w.do(f"nvvm.mbarrier.init {self.empty(at)}, {arrivals} : !llvm.ptr<3>, i32")
            w.do("nvvm.fence.mbarrier.init")
            for name in ("%left", "%right", *(("%result",) if s.staging else ())):
                w.do(f"nvvm.prefetch tensormap, {name} : !llvm.ptr")
        self.meet()
        producer = w.compare("eq", group, s.warpgroups)
        with w.inside(f"scf.if {producer} {{", "} else {"):
            w.do(f"nvvm.setmaxregister decrease {s.registers[0]}")
            leader = w.compare("eq", self.lane, 0)
            with w.inside(f"scf.if {leader} {{"):
                self.tiles_loop(self.copies)
        with w.inside(""):
            w.do(f"nvvm.setmaxregister increase {s.registers[1]}")
            self.group = group
            self.prepare_epilogue()
            if s.turns:  # the first one need not wait
                with w.inside(f"scf.if {w.compare('eq', group, s.warpgroups - 1)} {{"):
                    self.turn_to(w.constant(0))
            self.tiles_loop(self.products, turn=group if s.turns else "")
            if s.staging:
                w.do("nvvm.cp.async.bulk.wait_group 0")
        if self.cluster > 1:  # nobody leaves while others may still arrive at its barriers
            self.meet()
        w.do("llvm.return")
        grid = min(s.blocks, self.tiles[0] * self.tiles[1] * self.cluster)
        boxes = [self.box(s.rows, s.cluster[1], self.p.left_by_k), self.box(s.columns, s.cluster[0], self.p.right_by_k)]
        if s.staging:
            boxes.append((ROWS, 64))
        return HopperKernel(self.text(), grid, self.threads, self.shared, self.cluster, tuple(boxes))

    def text(self) -> str:
        byval = "!llvm.ptr {llvm.byval = !llvm.array<128 x i8>, llvm.align = 64 : i64, nvvm.grid_constant}"
        maps = [f"%left: {byval}", f"%right: {byval}"]
        maps.append(f"%result: {byval if self.s.staging else '!llvm.ptr<1>'}")
        others = [f"%e{at}: !llvm.ptr<1>" for at in range(len(self.e.inputs))]
        attributes = [
            "gpu.kernel", "nvvm.kernel", f"nvvm.maxntid = array<i32: {self.threads}>", "nvvm.minctasm = 1 : i32"
        ]  # fmt: skip
        if self.cluster > 1:
            attributes.append(f"nvvm.cluster_dim = array<i32: {self.cluster}, 1, 1>")
        lines = [
            'gpu.module @kernels [#nvvm.target<chip = "sm_90a", features = "+ptx84", O = 3>] {',
            "llvm.mlir.global external @shared() {addr_space = 3 : i32, alignment = 1024 : i64} : !llvm.array<0 x i8>",
            f"llvm.func @product({', '.join([*maps, *others])}) attributes {{{', '.join(attributes)}}} {{",
            *(f"  {line}" for line in (*self.w.constants(), *self.w.lines)),
            "}",
            "}",
        ]
        return "\n".join(lines)

    # shared memory

    def at(self, offset: str | int) -> str:
        """Return the address of a byte of shared memory."""
        place = offset if isinstance(offset, str) else self.w.constant(offset)
        return self.w.make(f"llvm.getelementptr {self.base}[{place}] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8")

    def full(self, stage: str) -> str:
        return self.at(self.w.integer("addi", self.w.integer("muli", stage, 8), self.barriers_at))

    def empty(self, stage: str) -> str:
        return self.at(self.w.integer("addi", self.w.integer("muli", stage, 8), self.barriers_at + 8 * self.s.stages))

    def wait(self, barrier: str, phase: str) -> None:
        ticks = self.w.constant(0x989680)
        self.w.do(f"nvvm.mbarrier.try_wait.parity {barrier}, {phase}, {ticks} : !llvm.ptr<3>, i32, i32")

    def meet(self) -> None:
        """All threads of the cluster wait for each other."""
        if self.cluster > 1:
            self.w.do("nvvm.cluster.arrive")
            self.w.do("nvvm.cluster.wait")
        else:
            self.w.do("nvvm.barrier")

    def next(self, stage: str, phase: str) -> tuple[str, str]:
        """Return the stage behind a stage, and the parity of its barriers."""
        w = self.w
        after = w.integer("addi", stage, 1)
        wraps = w.compare("eq", after, self.s.stages)
        return w.choose(wraps, w.constant(0), after), w.integer(
            "xori", phase, w.make(f"arith.extui {wraps} : i1 to i32")
        )

    def behind(self, stage: str, phase: str, count: int) -> tuple[str, str]:
        """Return the stage that is so many behind a stage, and the parity of its barriers."""
        w = self.w
        rounds, more = divmod(count, self.s.stages)
        after = w.integer("addi", stage, more)
        wraps = w.compare("uge", after, self.s.stages)
        inside = w.choose(wraps, w.integer("subi", after, self.s.stages), after)
        turned = w.integer("xori", phase, w.make(f"arith.extui {wraps} : i1 to i32"))
        return inside, w.integer("xori", turned, 1) if rounds % 2 else turned

    # tiles

    def tiles_loop(self, body: TileWriter, turn: str = "") -> None:
        """Write the loop over the tiles of this block, with the ring's place carried from one to the next.

        turn: the number of a warpgroup that takes some of the tiles, each behind those of the warpgroups before it."""
        w, s = self.w, self.s
        count = self.tiles[0] * self.tiles[1]
        block = w.make("nvvm.read.ptx.sreg.ctaid.x : i32")
        first = w.integer("divui", block, self.cluster)
        at, stage, phase = w.name(), w.name(), w.name()
        grid = min(s.blocks, count * self.cluster) // self.cluster
        begin = begin_phase = w.constant(0)
        if turn:
            first = w.integer("addi", first, w.integer("muli", turn, grid))
            ahead = w.integer("muli", turn, self.steps)
            begin = w.integer("remui", ahead, s.stages)
            begin_phase = w.integer("andi", w.integer("divui", ahead, s.stages), 1)
        result, step = w.name(), w.constant(grid * s.warpgroups if turn else grid)
        head = (
            f"{result}:2 = scf.for {at} = {first} to {w.constant(count)} step {step} "
            f"iter_args({stage} = {begin}, {phase} = {begin_phase}) -> (i32, i32) : i32 {{"
        )
        with w.inside(head):
            row, column = self.place(at)
            stage, phase = body(row, column, stage, phase)
            if turn:
                stage, phase = self.behind(stage, phase, self.steps * (s.warpgroups - 1))
            w.do(f"scf.yield {stage}, {phase} : i32, i32")

    def place(self, tile: str) -> tuple[str, str]:
        """Return the first row and column of this block's part of a cluster's tile.

        Tiles go down `raster` rows of tiles, then to the next column: what runs at the same time shares rows and
        columns in the second cache.
        """
        w, s = self.w, self.s
        down, across = self.tiles
        deep = min(s.raster, down)
        band = w.integer("divui", tile, deep * across)
        inside = w.integer("remui", tile, deep * across)
        begin = w.integer("muli", band, deep)
        if down % deep:
            left = w.integer("subi", w.constant(down), begin)
            height = w.make(f"arith.minui {left}, {w.constant(deep)} : i32")
        else:
            height = w.constant(deep)
        row = w.integer("addi", begin, w.integer("remui", inside, height))
        column = w.integer("divui", inside, height)
        across_cluster = s.cluster[1]
        rank_row = w.integer("divui", self.rank, across_cluster) if s.cluster[0] > 1 else w.constant(0)
        rank_column = w.integer("remui", self.rank, across_cluster) if across_cluster > 1 else w.constant(0)
        self.rank_row, self.rank_column = rank_row, rank_column
        row = w.integer("addi", w.integer("muli", row, s.cluster[0]), rank_row)
        column = w.integer("addi", w.integer("muli", column, s.cluster[1]), rank_column)
        return w.integer("muli", row, s.rows), w.integer("muli", column, s.columns)

    # copies

    def box(self, rows: int, shared_by: int, by_k: bool) -> tuple[int, int]:
        """Return the rows and columns of a box: of a matrix with K along its rows up to 256 rows, else 64 columns."""
        return (min(rows // shared_by, 256), STEP) if by_k else (STEP, 64)

    def copies(self, row: str, column: str, stage: str, phase: str) -> tuple[str, str]:
        """Write the copies of a tile: the producer's part."""
        w, s = self.w, self.s
        k, at, ph, result = w.name(), w.name(), w.name(), w.name()
        head = (
            f"{result}:2 = scf.for {k} = {w.constant(0)} to {w.constant(self.steps * STEP)} step {w.constant(STEP)} "
            f"iter_args({at} = {stage}, {ph} = {phase}) -> (i32, i32) : i32 {{"
        )
        with w.inside(head):
            self.wait(self.empty(at), w.integer("xori", ph, 1))
            full = self.full(at)
            size = w.constant(self.a_bytes + self.b_bytes)
            w.do(f"nvvm.mbarrier.arrive.expect_tx {full}, {size} : !llvm.ptr<3>, i32 -> i64")
            a = w.integer("muli", at, self.a_bytes)
            b = w.integer("addi", w.integer("muli", at, self.b_bytes), s.stages * self.a_bytes)
            mask_a = self.mask(along=1) if s.cluster[1] > 1 else ""
            mask_b = self.mask(along=0) if s.cluster[0] > 1 else ""
            self.copy("%left", full, a, (row, k), self.p.left_by_k, (s.rows, s.cluster[1], self.rank_column, mask_a))
            self.copy(
                "%right", full, b, (column, k), self.p.right_by_k, (s.columns, s.cluster[0], self.rank_row, mask_b)
            )
            after = self.next(at, ph)
            w.do(f"scf.yield {after[0]}, {after[1]} : i32, i32")
        return f"{result}#0", f"{result}#1"

    def mask(self, along: int) -> str:
        """Return the blocks of the cluster that share what this one copies: its row of them or its column."""
        w, (down, across) = self.w, self.s.cluster
        if along == 1:
            bits = w.integer("shli", w.constant((1 << across) - 1), w.integer("muli", self.rank_row, across))
        else:
            column = sum(1 << (each * across) for each in range(down))
            bits = w.integer("shli", w.constant(column), self.rank_column)
        return w.make(f"arith.trunci {bits} : i32 to i16")

    def copy(
        self,
        name: str,
        full: str,
        to: str,
        place: tuple[str, str],
        by_k: bool,
        shared: tuple[int, int, str, str],
    ) -> None:
        """Write the copies of a step of a matrix: this block's part of it, to all blocks that need it."""
        w = self.w
        (rows, parts, part, mask), (row, k) = shared, place
        mine = rows // parts
        first = w.integer("muli", part, mine) if parts > 1 else w.constant(0)
        size = self.box(rows, parts, by_k)[0] if by_k else 64
        for at in range(0, mine, size):
            offset = w.integer("addi", first, at)
            target = self.at(w.integer("addi", to, w.integer("muli", offset, 2 * STEP)))
            cast = w.make(f"llvm.addrspacecast {target} : !llvm.ptr<3> to !llvm.ptr<7>")
            where = w.integer("addi", row, offset)
            x, y = (k, where) if by_k else (where, k)
            sent = f" multicast_mask = {mask}" if mask else ""
            w.do(
                f"nvvm.cp.async.bulk.tensor.shared.cluster.global {cast}, {name}, {full}, box [{x}, {y}]{sent} : "
                "!llvm.ptr<7>, !llvm.ptr"
            )

    # products

    def descriptor(self, offset: str, by_k: bool) -> str:
        """Return wgmma's description of shared memory from a byte on."""
        w = self.w
        address = w.make(f"llvm.ptrtoint {self.at(offset)} : !llvm.ptr<3> to i32")
        low = w.integer("shrui", w.integer("andi", address, 0x3FFFF), 4)
        wide = w.make(f"arith.extui {low} : i32 to i64")
        leading = 1 if by_k else ATOM >> 4
        return w.integer("ori", wide, (1 << 62) | (64 << 32) | (leading << 16), "i64")

    def products(self, row: str, column: str, stage: str, phase: str) -> tuple[str, str]:
        """Write the products of a tile and its epilogue: a consumer's part."""
        w, s = self.w, self.s
        by_column = self.column_loads(column)
        if s.turns:
            mine = w.integer("addi", self.group, TURN_ID)
            w.do(f"nvvm.barrier id = {mine} number_of_threads = {w.constant(256)}")
        undefined = w.make(f"llvm.mlir.undef : {self.struct}")
        sums = self.step([undefined] * self.atoms, stage, phase, adds=False)
        if s.running == 0:
            w.do("nvvm.wgmma.wait.group.sync.aligned 0")
            self.free(stage)
        before = stage
        at, ph = self.next(stage, phase)
        k, result = w.name(), w.name()
        names = [w.name() for _ in range(self.atoms)]
        a, b, old = w.name(), w.name(), w.name()
        starts = [*zip(names, sums, strict=True), (a, at), (b, ph), (old, before)]
        types = [*[self.struct] * self.atoms, "i32", "i32", "i32"]
        head = (
            f"{result}:{len(types)} = scf.for {k} = {w.constant(1)} to {w.constant(self.steps)} step {w.constant(1)} "
            f"iter_args({', '.join(f'{x} = {y}' for x, y in starts)}) -> ({', '.join(types)}) : i32 {{"
        )
        with w.inside(head):
            made = self.step(names, a, b, adds=True)
            w.do(f"nvvm.wgmma.wait.group.sync.aligned {s.running}")
            self.free(old if s.running else a)
            after = self.next(a, b)
            w.do(f"scf.yield {', '.join([*made, *after, a])} : {', '.join(types)}")
        if s.turns:
            self.turn_to(w.integer("remui", w.integer("addi", self.group, 1), s.warpgroups))
        done = [f"{result}#{at}" for at in range(self.atoms)]
        ahead = self.whole_loads(row, column, (0, 0))
        done = [self.finished(each) for each in done]
        if s.running:
            self.free(f"{result}#{self.atoms + 2}")
        self.epilogue(done, (row, column), by_column, ahead)
        return f"{result}#{self.atoms}", f"{result}#{self.atoms + 1}"

    def step(self, sums: Sequence[str], stage: str, phase: str, *, adds: bool) -> list[str]:
        """Write the products of one stage, which run on when this ends."""
        w, s, p = self.w, self.s, self.p
        self.wait(self.full(stage), phase)
        rows = w.constant(0) if s.turns else w.integer("muli", self.group, self.atoms * ATOM)
        left = self.descriptor(w.integer("addi", w.integer("muli", stage, self.a_bytes), rows), p.left_by_k)
        at = w.integer("addi", w.integer("muli", stage, self.b_bytes), s.stages * self.a_bytes)
        right = self.descriptor(at, p.right_by_k)
        w.do("nvvm.wgmma.fence.aligned")
        made = list(sums)
        a_major, b_major = "row" if p.left_by_k else "col", "col" if p.right_by_k else "row"
        for k in range(STEP // 16):
            b = w.integer("addi", right, k * (2 if p.right_by_k else 128), "i64")
            for atom in range(self.atoms):
                a = w.integer("addi", left, atom * (ATOM >> 4) + k * (2 if p.left_by_k else 128), "i64")
                made[atom] = w.make(
                    f"nvvm.wgmma.mma_async {a}, {b}, {made[atom]}, #nvvm.shape<m = 64, n = {s.columns}, k = 16>, "
                    f"D [<f32>, <{'one' if adds or k else 'zero'}>], A [<bf16>, <one>, <{a_major}>], "
                    f"B [<bf16>, <one>, <{b_major}>] : {self.struct} -> {self.struct}"
                )
        w.do("nvvm.wgmma.commit.group.sync.aligned")
        return made

    def turn_to(self, group: str) -> None:
        """Let another warpgroup wait for stages. Before that it must not: the parity of a barrier says of a stage only
        whether its last use has begun, and uses before that are this warpgroup's."""
        w = self.w
        theirs = w.integer("addi", group, TURN_ID)
        w.do(f"nvvm.barrier.arrive id = {theirs} number_of_threads = {w.constant(256)}")

    def free(self, stage: str) -> None:
        """Tell the producers of all blocks whose copies reach this one that a stage was read."""
        w = self.w
        barrier = w.make(f"llvm.ptrtoint {self.empty(stage)} : !llvm.ptr<3> to i32")
        leader = w.compare("ult", self.lane, self.cluster)
        if self.cluster == 1:
            self.asm("@$1 mbarrier.arrive.shared.b64 _, [$0];", "r,b", (barrier, leader), "i32, i1")
            return
        there = w.make(
            'llvm.inline_asm asm_dialect = att "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r" '
            f"{barrier}, {self.lane} : (i32, i32) -> i32"
        )
        self.asm("@$1 mbarrier.arrive.shared::cluster.b64 _, [$0];", "r,b", (there, leader), "i32, i1")

    def asm(self, text: str, constraints: str, operands: Sequence[str], types: str) -> None:
        """Write an instruction that makes nothing. Where one thread does something there is no branch: a branch among
        products hides the sums from ptxas, which then makes each product wait for the one before."""
        self.w.do(
            f'llvm.inline_asm has_side_effects asm_dialect = att "{text}", "{constraints}" {", ".join(operands)} : '
            f"({types}) -> ()"
        )

    def finished(self, sums: str) -> str:
        """Return the sums behind a wait for all products; what takes them cannot be moved before it."""
        n = self.sums
        each = [self.w.make(f"llvm.extractvalue {sums}[{at}] : {self.struct}") for at in range(n)]
        constraint = ",".join([*["=f"] * n, *map(str, range(n))])
        return self.w.make(
            f'llvm.inline_asm has_side_effects asm_dialect = att "wgmma.wait_group.sync.aligned 0;", "{constraint}" '
            f"{', '.join(each)} : ({', '.join(['f32'] * n)}) -> {self.struct}"
        )

    # epilogue

    def prepare_epilogue(self) -> None:
        """Write what a thread needs of its place: its row and column in the 64 rows of its warpgroup."""
        w = self.w
        self.warp, lane = w.integer("divui", self.lane, 32), w.integer("remui", self.lane, 32)
        self.lane32 = lane
        self.my_row = w.integer("addi", w.integer("muli", self.warp, 16), w.integer("divui", lane, 4))
        self.my_column = w.integer("muli", w.integer("remui", lane, 4), 2)
        if self.s.staging:
            inside = w.integer("remui", lane, 16)
            line = w.integer("addi", w.integer("muli", self.warp, 16), inside)
            self.line = w.integer("muli", line, 128)
            self.high = w.integer("divui", lane, 16)
            self.turn = w.integer("remui", inside, 8)

    def epilogue(
        self, sums: Sequence[str], place: tuple[str, str], columns: Sequence[Bits], first: Sequence[Bits]
    ) -> None:
        """Write the results of a tile: what the graph does to each sum, and where it goes, 64 x 64 of them at a time.

        sums: of each 64 rows. place: the row and column where the tile begins. columns: for each 8 columns what was
        read for them. first: what was read for the first piece; the next one's inputs are read before each is made."""
        w, s, (row, column) = self.w, self.s, place
        pieces = [(atom, piece) for atom in range(self.atoms) for piece in range(s.columns // 64)]
        by_row: dict[int, list[dict[int, str]]] = {}
        ahead = first
        for number, (atom, piece) in enumerate(pieces):
            whole = ahead
            if number + 1 < len(pieces):
                ahead = self.whole_loads(row, column, pieces[number + 1])
            rows = self.rows_of(row, atom)
            if atom not in by_row:
                by_row[atom] = [self.row_values(each) for each in rows]
            packed = []
            for at in range(16):
                j, half = divmod(at, 2)
                index = 4 * (8 * piece + j) + 2 * half
                xs = [w.make(f"llvm.extractvalue {sums[atom]}[{index + e}] : {self.struct}") for e in (0, 1)]
                taken = {name: self.two(*each) for name, each in (columns[8 * piece + j] | whole[at]).items()}
                pair = self.pair(xs, by_row[atom][half], taken)
                if s.staging:
                    packed.append(pair)
                else:
                    self.store(pair, rows[half], self.column_of(column, 8 * piece + j))
            if s.staging:
                running = 0 if number == 0 and len(pieces) % s.staging else s.staging - 1
                top = self.top_of(row, atom)
                self.staged(packed, top, w.integer("addi", column, 64 * piece), (number % s.staging, running))

    def top_of(self, row: str, atom: int) -> str:
        """Return the first of 64 rows."""
        w = self.w
        mine = w.constant(0) if self.s.turns else w.integer("muli", self.group, self.atoms * ROWS)
        return w.integer("addi", w.integer("addi", row, mine), atom * ROWS)

    def rows_of(self, row: str, atom: int) -> list[str]:
        """Return the two rows of 64 of which a thread has sums."""
        w = self.w
        top = w.integer("addi", self.top_of(row, atom), self.my_row)
        return [w.integer("addi", top, 8 * half) for half in (0, 1)]

    def column_of(self, column: str, eighth: int) -> str:
        """Return the first of a thread's two columns of eight."""
        w = self.w
        return w.integer("addi", w.integer("addi", column, self.my_column), 8 * eighth)

    def inside(self, rows: str | None, columns: str | None) -> str:
        """Return the condition that a row and a pair of columns exist, or "" where those of all tiles do."""
        w, p, s = self.w, self.p, self.s
        conditions = []
        if rows is not None and p.m % (s.rows * s.cluster[0]):
            conditions.append(w.compare("ult", rows, p.m))
        if columns is not None and p.n % (s.columns * s.cluster[1]):
            conditions.append(w.compare("ult", columns, p.n))
        if len(conditions) == 2:
            return w.integer("andi", conditions[0], conditions[1], "i1")
        return conditions[0] if conditions else ""

    def read(self, value: EpilogueValue, index: str, exists: str, count: int, *, early: bool = False) -> str:
        """Return the bits of one or two neighbours of an input; those of what does not exist are zeros.

        early: where it is written, not where it is needed."""
        w, size = self.w, (32 if value.dtype == "f32" else 16) * count
        wide = w.make(f"arith.extui {index} : i32 to i64")
        pointer = f"(!llvm.ptr<1>, i64) -> !llvm.ptr<1>, {value.dtype}"
        place = w.make(f"llvm.getelementptr %e{value.input}[{wide}] : {pointer}")
        letter = {16: "h", 32: "r", 64: "l"}[size]
        text, constraints, operands, types = f"ld.global.nc.b{size} $0, [$1];", f"={letter},l", place, "!llvm.ptr<1>"
        if exists:
            text, constraints = f"mov.b{size} $0, 0;\\0A@$2 {text}", f"=&{letter},l,b"
            operands, types = f"{place}, {exists}", f"{types}, i1"
        effects = "has_side_effects " if early else ""
        asm = f'llvm.inline_asm {effects}asm_dialect = att "{text}", "{constraints}"'
        return w.make(f"{asm} {operands} : ({types}) -> i{size}")

    def one(self, bits: str, dtype: str) -> str:
        return self.w.make(f"llvm.bitcast {bits} : i{32 if dtype == 'f32' else 16} to {dtype}")

    def two(self, bits: str, dtype: str) -> list[str]:
        w, pair = self.w, f"vector<2x{dtype}>"
        both = w.make(f"llvm.bitcast {bits} : i{64 if dtype == 'f32' else 32} to {pair}")
        return [w.make(f"llvm.extractelement {both}[{w.constant(e)} : i32] : {pair}") for e in (0, 1)]

    def row_values(self, row: str) -> dict[int, str]:
        """Return the inputs of the epilogue that have one number for each row."""
        found = {}
        for value in self.e.inputs:
            if value.axes == (0,):
                bits = self.read(value, row, self.inside(row, None), 1)
                found[value.argument] = self.one(bits, value.dtype)
            elif value.axes == ():
                found[value.argument] = self.one(self.read(value, self.w.constant(0), "", 1), value.dtype)
        return found

    def column_loads(self, column: str) -> list[Bits]:
        """Return, for each 8 columns of a tile, what is read of inputs that have one number for each column: it comes
        while the products run."""
        inputs, found = [value for value in self.e.inputs if value.axes == (1,)], list[Bits]()
        for at in range(0, self.s.columns, 8) if inputs else ():
            place = self.column_of(column, at // 8)
            exists = self.inside(None, place)
            found.append({v.argument: (self.read(v, place, exists, 2, early=True), v.dtype) for v in inputs})
        return found or [{} for _ in range(self.s.columns // 8)]

    def whole_loads(self, row: str, column: str, piece: tuple[int, int]) -> list[Bits]:
        """Return, for the 16 pairs of numbers that a thread has of 64 x 64, what is read of inputs that have one number
        for each result."""
        w, inputs = self.w, [value for value in self.e.inputs if value.axes == (0, 1)]
        if not inputs:
            return [{} for _ in range(16)]
        rows, found = self.rows_of(row, piece[0]), list[Bits]()
        for at in range(16):
            place = rows[at % 2], self.column_of(column, 8 * piece[1] + at // 2)
            index = w.integer("addi", w.integer("muli", place[0], self.p.n), place[1])
            exists = self.inside(*place)
            found.append({v.argument: (self.read(v, index, exists, 2, early=True), v.dtype) for v in inputs})
        return found

    def pair(self, sums: Sequence[str], by_row: dict[int, str], others: dict[int, list[str]]) -> list[str]:
        """Return two neighbours of the result."""
        return [
            self.computed(x, by_row | {argument: each[e] for argument, each in others.items()})
            for e, x in enumerate(sums)
        ]

    def computed(self, x: str, taken: dict[int, str]) -> str:
        """Write the epilogue of one number."""
        w, body = self.w, self.e
        names = {body.arguments[body.sum]: x} | {body.arguments[at]: value for at, value in taken.items()}
        for name, (number, type) in body.constants.items():
            names[name] = w.constant(number, type)
        for result, text in body.operations:
            text = re.sub(r"%[\w#]+", lambda found: names[found[0]], text)
            names[result] = self.operation(text)
        return names[body.result]

    def operation(self, text: str) -> str:
        """Write an operation of the epilogue: exponentials and quotients by the instructions that the GPU has."""
        w = self.w
        name, rest = text.split(" ", 1)
        operands = re.findall(r"%\w+", rest)
        if name == "arith.extf" and text.endswith("bf16 to f32"):
            # by its bits: else LLVM adds in 16 bits, and ptxas moves what rounds the sums before the wait for them
            bits = w.make(f"arith.extui {w.make(f'arith.bitcast {operands[0]} : bf16 to i16')} : i16 to i32")
            return w.make(f"arith.bitcast {w.integer('shli', bits, 16)} : i32 to f32")
        if name == "math.exp" and text.endswith(": f32"):
            (x,) = operands
            scaled = w.make(f"arith.mulf {x}, {w.constant('1.44269502 ', 'f32')} : f32")
            return self.instruction("ex2.approx.ftz.f32", scaled)
        if name == "math.tanh" and text.endswith(": f32"):
            e = self.instruction(
                "ex2.approx.ftz.f32", w.make(f"arith.mulf {operands[0]}, {w.constant('2.88539004', 'f32')} : f32")
            )
            one = w.constant("1.0", "f32")
            below = self.instruction("rcp.approx.ftz.f32", w.make(f"arith.addf {e}, {one} : f32"))
            twice = w.make(f"arith.mulf {below}, {w.constant('2.0', 'f32')} : f32")
            return w.make(f"arith.subf {one}, {twice} : f32")
        if name == "arith.divf" and text.endswith(": f32"):
            return w.make(f"arith.mulf {operands[0]}, {self.instruction('rcp.approx.ftz.f32', operands[1])} : f32")
        return w.make(text)

    def instruction(self, name: str, x: str) -> str:
        return self.w.make(f'llvm.inline_asm asm_dialect = att "{name} $0, $1;", "=f,f" {x} : (f32) -> f32')

    def packed(self, pair: Sequence[str]) -> str:
        """Return two numbers of 16 bits in one of 32."""
        w, dtype = self.w, self.p.dtype
        empty = w.make(f"llvm.mlir.undef : vector<2x{dtype}>")
        for e, each in enumerate(pair):
            empty = w.make(f"llvm.insertelement {each}, {empty}[{w.constant(e)} : i32] : vector<2x{dtype}>")
        return w.make(f"llvm.bitcast {empty} : vector<2x{dtype}> to i{64 if dtype == 'f32' else 32}")

    def store(self, pair: Sequence[str], row: str, column: str) -> None:
        """Write two neighbours to memory if they exist; there is no branch, which would hide the sums from ptxas."""
        w, p = self.w, self.p
        size = 64 if p.dtype == "f32" else 32
        value = self.packed(pair)
        start = w.make(f"arith.extui {row} : i32 to i64")
        index = w.integer(
            "addi", w.integer("muli", start, p.n, "i64"), w.make(f"arith.extui {column} : i32 to i64"), "i64"
        )
        place = w.make(f"llvm.getelementptr %result[{index}] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, {p.dtype}")
        exists, letter = self.inside(row, column), "l" if size == 64 else "r"
        guard, more, types = ("@$2 ", f", {exists}", ", i1") if exists else ("", "", "")
        w.do(
            f'llvm.inline_asm has_side_effects asm_dialect = att "{guard}st.global.b{size} [$0], $1;", '
            f'"l,{letter}{",b" if exists else ""}" {place}, {value}{more} : (!llvm.ptr<1>, i{size}{types}) -> ()'
        )

    def staged(self, pairs: Sequence[Sequence[str]], row: str, column: str, turn: tuple[int, int]) -> None:
        """Write 64 x 64 results by way of shared memory: TMA writes whole lines, and leaves out what does not exist.

        turn: the buffer, and how many copies before may still read theirs."""
        w, s = self.w, self.s
        buffer = w.integer("muli", self.group, s.staging * STAGED)
        at = w.integer("addi", buffer, self.staged_at + turn[0] * STAGED)
        barrier = w.integer("addi", self.group, BARRIER_ID)
        leader = w.compare("eq", self.lane, 0)
        w.do(f"nvvm.cp.async.bulk.wait_group {turn[1]} {{read}}")
        w.do(f"nvvm.barrier id = {barrier} number_of_threads = {w.constant(128)}")
        line = w.integer("addi", at, self.line)
        for c in range(4):
            chunk = w.integer("addi", self.high, 2 * c)
            place = self.at(w.integer("addi", line, w.integer("muli", w.integer("xori", chunk, self.turn), 16)))
            four = [self.packed(pairs[4 * c + i]) for i in range(4)]
            w.do(
                f"nvvm.stmatrix {place}, {', '.join(four)} {{eltType = #nvvm.ld_st_matrix_elt_type<b16>, layout = "
                "#nvvm.mma_layout<row>, shape = #nvvm.ld_st_matrix_shape<m = 8, n = 8>} : "
                "!llvm.ptr<3>, i32, i32, i32, i32"
            )
        w.do("nvvm.fence.proxy {kind = #nvvm.proxy_kind<async.shared>, space = #nvvm.shared_space<cta>}")
        w.do(f"nvvm.barrier id = {barrier} number_of_threads = {w.constant(128)}")
        w.do(
            f"nvvm.cp.async.bulk.tensor.global.shared.cta %result, {self.at(at)}, box [{column}, {row}], "
            f"predicate = {leader} : !llvm.ptr, !llvm.ptr<3>"
        )
        w.do("nvvm.cp.async.bulk.commit.group")
