"""The schedule of a product on a CPU: a record that a search writes, and the script of the transform dialect that it
stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product as combined
from typing import Any

from ridgeline.compiler.products.schedule import FUSED, TWO, annotated, matched, script_of
from ridgeline.compiler.products.tiled import NeededTile
from ridgeline.core.errors import InvalidConfig

LANES = 16  # numbers of float32 in a vector
REGISTERS = 32  # vectors
FIRST_CACHE, SECOND_CACHE = 48 << 10, 2 << 20  # bytes


@dataclass(frozen=True)
class CpuSchedule:
    """rows, depth: of a block of the left matrix, which is copied for the second cache. panel: columns of the right one
    that are copied for the first cache. near: rows of sums in registers. unrolled: steps of K in a turn of the loop.
    ahead: whether a tile of the result is fetched while its products are computed."""

    rows: int = 480
    depth: int = 256
    panel: int = 32
    near: int = 12
    unrolled: int = 1
    ahead: bool = True

    def fault(self) -> str:
        """Return "", or why no kernel can have this schedule."""
        vectors = self.panel // LANES
        if self.panel % LANES or self.near * vectors + vectors + 1 > REGISTERS:
            return f"{self.near} x {self.panel} sums do not fit into {REGISTERS} vectors of {LANES}."
        if self.rows % self.near or self.depth % self.unrolled:
            return f"{self.near} does not divide {self.rows}, or {self.unrolled} {self.depth}."
        if 4 * self.depth * (self.panel + self.near) > FIRST_CACHE:
            return f"panels of {self.depth} do not fit into the first cache."
        if 4 * self.depth * self.rows > SECOND_CACHE * 3 // 4:
            return f"a block of {self.rows} x {self.depth} does not fit into the second cache."
        return ""

    def checked(self) -> CpuSchedule:
        """Return the schedule. Raises InvalidConfig."""
        if why := self.fault():
            raise InvalidConfig(f"no kernel can have this schedule: {why}")
        return self

    @classmethod
    def of_annotations(cls, numbers: dict[str, list[int]]) -> tuple[CpuSchedule, NeededTile]:
        """Return the schedule that annotated a product, and what it leaves. Raises InvalidConfig."""
        (rows, depth), (near, panel) = numbers["block"], numbers["tile"]
        made = cls(rows, depth, panel, near, numbers["unrolled"][0], bool(numbers["ahead"][0])).checked()
        return made, NeededTile((near, panel, depth), (rows, panel, depth))

    def script(self, *, epilogue: bool) -> str:
        """Return the script of the transform dialect that tiles a product so, with its epilogue if it has one."""
        kept = {
            "ridgeline.block": f"array<i64: {self.rows}, {self.depth}>",
            "ridgeline.tile": f"array<i64: {self.near}, {self.panel}>",
            "ridgeline.unrolled": f"{self.unrolled} : i64",
            "ridgeline.ahead": f"{int(self.ahead)} : i64",
        }
        last = "last" if epilogue else "product"
        lines = [
            *(matched("last", "linalg.generic") if epilogue else []),
            *matched("product", "linalg.matmul"),
            *matched("start", "linalg.fill"),
            f"%block, %blocks0 = transform.structured.tile_using_forall %{last} tile_sizes [{self.rows}, 0] : {TWO}",
        ]
        if epilogue:
            lines.append(
                f"%mine, %blocks = transform.structured.fuse_into_containing_op %product into %blocks0 : {FUSED}"
            )
        mine, blocks = ("mine", "blocks") if epilogue else ("block", "blocks0")
        lines += [
            f"%zeros, %blocks1 = transform.structured.fuse_into_containing_op %start into %{blocks} : {FUSED}",
            f"%deep, %steps = transform.structured.tile_using_for %{mine} tile_sizes [0, 0, {self.depth}] : {TWO}",
            f"%wide, %panels = transform.structured.tile_using_for %deep tile_sizes [0, {self.panel}, 0] : {TWO}",
            f"%tile, %tiles = transform.structured.tile_using_for %wide tile_sizes [{self.near}, 0, 0] : {TWO}",
            *annotated("%tile", kept),
            "transform.yield",
        ]
        return script_of(lines)

    def record(self) -> dict[str, Any]:
        return asdict(self)


def cpu_space() -> Iterator[CpuSchedule]:
    """Yield every schedule that a kernel can have."""
    nears = ((32, 8), (32, 12), (32, 14), (48, 8), (48, 9), (64, 4), (64, 6), (16, 24), (16, 28))
    for (panel, near), blocks, depth, unrolled, ahead in combined(
        nears, (8, 16, 24, 40, 64), (128, 192, 256, 384), (1, 2, 4), (False, True)
    ):
        each = CpuSchedule(near * blocks, depth, panel, near, unrolled, ahead)
        if not each.fault():
            yield each


def predicted_cycles(schedule: CpuSchedule, sizes: tuple[int, int, int]) -> float:
    """Return the cycles of a product of m, n, k by counting: two products or two loads of vectors in a cycle, four
    cycles until a sum may be added to again, what is copied, and sums that are written and read again."""
    (m, n, k), s = sizes, schedule
    vectors = s.panel // LANES
    tiles, steps, blocks = -(-m // s.near) * -(-n // s.panel), -(-k // s.depth), -(-m // s.rows)
    step = max(s.near * vectors / 2, (s.near + vectors) / 2, 4.0)
    tile = k * step + steps * s.near * vectors * (4 if s.ahead else 8)
    copied = 0.15 * m * k + 0.15 * k * n * blocks
    return tiles * tile + copied
