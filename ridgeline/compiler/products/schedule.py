"""The schedule of a product on Hopper: a record that a search writes, and the script of the transform dialect that it
stands for.

The script tiles the linalg operations and annotates the product with what tiling cannot say: how deep the ring of
shared memory is, how many blocks are a cluster. The passes behind it read the loops and the annotations, so a person
may write the script as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.compiler.products.tiled import NeededTile
from ridgeline.core.errors import InvalidConfig

SHARED_BYTES = 227 << 10  # that a block may have
ATOM_ROWS, STEP = 64, 64  # rows of a wgmma; numbers of K in a step, which are 128 bytes
STAGED_BYTES = 8192  # in which a warpgroup puts 64 x 64 results of 16 bits together
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class HopperSchedule:
    """rows, columns: of a tile. warpgroups: that multiply. turns: each takes a tile of its own in turn, so one
    multiplies while another writes; else they share the tile's rows. stages: of the ring. cluster: blocks down and
    across that share what they copy. raster: rows of tiles that are taken before the next column of tiles. blocks: that
    run, each tile after tile. staging: buffers of a warpgroup through which results go to TMA; 0: registers are stored.
    running: groups of wgmma that may run while the next is waited for."""

    rows: int = 128
    columns: int = 256
    warpgroups: int = 2
    stages: int = 4
    cluster: tuple[int, int] = (1, 1)
    raster: int = 8
    blocks: int = 132
    staging: int = 0
    running: int = 1
    turns: bool = False

    @property
    def sharing(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.turns else self.warpgroups

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: the ring, what is staged, and two barriers for each stage."""
        ring = self.stages * (self.rows + self.columns) * 2 * STEP
        return ring + self.staging * self.warpgroups * STAGED_BYTES + 16 * self.stages

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that copies, and of one that multiplies, after they are shared out anew."""
        return (40, 232) if self.warpgroups == 2 else (32, 160) if self.warpgroups == 3 else (40, 216)

    def fault(self) -> str:
        """Return "", or why no kernel can have this schedule."""
        atoms, left = divmod(self.rows, ATOM_ROWS * self.sharing)
        parts = self.cluster[0] * self.cluster[1]
        if left or not atoms:
            return f"{self.rows} rows are not a multiple of {ATOM_ROWS} for each of {self.sharing} warpgroups."
        if self.columns % 64 or not 64 <= self.columns <= 256:
            return f"a tile has 64, 128, 192 or 256 columns, not {self.columns}."
        if atoms * self.columns // 2 + 24 > self.registers[1]:
            return f"{atoms} x {self.columns // 2} sums do not fit into {self.registers[1]} registers."
        at_start = REGISTERS // (128 * (self.warpgroups + 1)) // 8 * 8
        if self.columns // 2 + 26 > min(at_start, 255):
            return f"a product of {self.columns} columns does not fit into the {at_start} registers of a start."
        if self.shared > SHARED_BYTES:
            return f"{self.shared} bytes of shared memory are more than the {SHARED_BYTES} that there are."
        if not 1 <= self.warpgroups <= 3 or parts not in (1, 2, 4) or self.blocks % parts:
            return f"{self.warpgroups} warpgroups, {self.cluster} blocks of a cluster, {self.blocks} blocks do not fit."
        if self.rows // self.cluster[1] % 64 or self.columns // self.cluster[0] % 64:
            return "each block of a cluster copies a multiple of 64 rows or columns of what they share."
        if self.stages < 2 or self.running not in (0, 1) or self.raster < 1 or self.staging not in (0, 1, 2):
            return "a ring has 2 stages or more, 0 or 1 groups run on, and 0 to 2 buffers stage results."
        return ""

    def checked(self) -> HopperSchedule:
        """Return the schedule. Raises InvalidConfig."""
        if why := self.fault():
            raise InvalidConfig(f"no kernel can have this schedule: {why}")
        return self

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_annotations(cls, numbers: dict[str, list[int]]) -> tuple[HopperSchedule, NeededTile]:
        """Return the schedule that annotated a product, and what it leaves. Raises InvalidConfig."""
        (rows, columns), (down, across) = numbers["block"], numbers["cluster"]
        rest = {name: numbers[name][0] for name in ("warpgroups", "stages", "raster", "blocks", "staging", "running")}
        turns = bool(numbers["turns"][0])
        made = cls(rows=rows, columns=columns, cluster=(down, across), turns=turns, **rest).checked()
        blocks, near = "#gpu.block<y>, #gpu.block<x>", rows // made.sharing
        maps = ((blocks, "m", rows), (blocks, "n", columns), ("#gpu.warpgroup<x>", "m", near))
        return made, NeededTile((near, columns, STEP), (rows, columns, STEP), maps)

    def script(self) -> str:
        """Return the script of the transform dialect that tiles a product so."""
        kept = {
            "ridgeline.block": f"array<i64: {self.rows}, {self.columns}>",
            "ridgeline.cluster": f"array<i64: {self.cluster[0]}, {self.cluster[1]}>",
            "ridgeline.raster": f"{self.raster} : i64",
            "ridgeline.blocks": f"{self.blocks} : i64",
            "ridgeline.staging": f"{self.staging} : i64",
            "ridgeline.stages": f"{self.stages} : i64",
            "ridgeline.running": f"{self.running} : i64",
            "ridgeline.warpgroups": f"{self.warpgroups} : i64",
            "ridgeline.turns": f"{int(self.turns)} : i64",
        }
        lines = [
            *matched("last", "linalg.generic"),
            *matched("product", "linalg.matmul"),
            *matched("start", "linalg.fill"),
            "%block, %blocks = transform.structured.tile_using_forall %last",
            f"    tile_sizes [{self.rows}, {self.columns}] (mapping = [#gpu.block<y>, #gpu.block<x>]) : {TWO}",
            "%near, %blocks1 = transform.structured.fuse_into_containing_op %product into %blocks",
            f"    : {FUSED}",
            "%zeros, %blocks2 = transform.structured.fuse_into_containing_op %start into %blocks1",
            f"    : {FUSED}",
            f"%step, %steps = transform.structured.tile_using_for %near tile_sizes [0, 0, {STEP}] : {TWO}",
            "%mine, %warpgroups = transform.structured.tile_using_forall %step",
            f"    tile_sizes [{self.rows // self.sharing}, 0, 0] (mapping = [#gpu.warpgroup<x>]) : {TWO}",
            *annotated("%mine", kept),
            "transform.yield",
        ]
        return script_of(lines)


def script_of(lines: list[str]) -> str:
    """Return a script of the transform dialect with these operations on `%module`."""
    body = "\n".join(f"    {line}" for line in lines)
    return (
        "module attributes {transform.with_named_sequence} {\n"
        "  transform.named_sequence @__transform_main(%module: !transform.any_op) {\n"
        f"{body}\n  }}\n}}\n"
    )


ANY = "!transform.any_op"
TWO = f"({ANY}) -> ({ANY}, {ANY})"
FUSED = f"({ANY}, {ANY}) -> ({ANY}, {ANY})"


def matched(name: str, op: str) -> list[str]:
    return [f'%{name} = transform.structured.match ops{{["{op}"]}} in %module : ({ANY}) -> {ANY}']


def annotated(loop: str, attributes: dict[str, str]) -> list[str]:
    lines = []
    for at, (name, value) in enumerate(attributes.items()):
        param = f"{loop}_{at}"
        lines.append(f"{param} = transform.param.constant {value} -> !transform.any_param")
        lines.append(f'transform.annotate {loop} "{name}" = {param} : {ANY}, !transform.any_param')
    return lines
