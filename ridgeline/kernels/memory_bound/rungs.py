"""The rungs of the memory-bound ops: one short CUDA C++ file each, from plain to fast.

Vector add, transpose and reduction are in float32, the others in bfloat16, computed in float32. Softmax and norms are
of the rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ridgeline.kernels.cuda.carried import RungCode

FOLDER = Path(__file__).parent
KERNELS = {  # op → the kernel, and the folder, that it is made by
    "vector_add": "vector_add", "transpose": "transpose", "reduction": "reduction", "silu": "silu",
    "silu_multiply": "silu", "softmax": "softmax", "layer_norm": "norms", "rms_norm": "norms",
}  # fmt: skip
BY_ROWS = ("softmax", "layer_norm", "rms_norm")
FLOATS = ("vector_add", "transpose", "reduction")  # ops in float32
THREADS = 256  # of a block, where the row does not decide
MOST_THREADS, WARP, VECTOR = 1024, 32, 8  # VECTOR: numbers of 16 bits in 16 bytes
PORTABLE_CLUSTER = 8  # blocks, which each GPU that has clusters takes; an H200 takes twice as many
ONCE = "LDG.E.NA.128.CONSTANT"  # a load of 16 bytes that L1 does not keep


@dataclass(frozen=True)
class RowCut:
    """A division of rows.

    threads: of a block for each row, or for all where it is one of a cluster. rows: of a block, or of a cluster.
    vectors: of 16 bytes, of a thread in a row. cluster: blocks. ahead: rows on their way while one is worked on.
    """

    threads: int
    rows: int = 1
    vectors: int = 4
    cluster: int = 1
    ahead: int = 0

    @property
    def columns(self) -> int:
        """Return the most columns that it can take."""
        return self.threads * self.cluster * self.vectors * VECTOR


@dataclass(frozen=True, kw_only=True)
class MemoryRung:
    """One file of an op, and what is known of it.

    op: a key of KERNELS. number, name: its file, unless `file` names that.
    needs: mnemonics that its machine code must have. arch: the architecture that it needs at least.
    tile: sides of a transpose's tile. own: numbers of a thread in one piece (of SiLU in vectors: its rows).
    multiple: what columns (of a transpose rows too) must be multiples of.
    kind: of rungs of rows "block" (256 threads a row), "registers" (the row in one block's registers), "stays" (blocks
    walk over rows), "cluster" (the row in the registers of several blocks); of reductions "adds" (atomics to a result
    that is zero before), "two" (launches), "grid".
    ahead: rows on their way. clusters: blocks that stay are those of clusters.
    passes: times that a number is read from L1 or L2. launches: of the same kernel.
    registers: the most a thread may have.
    """

    op: str
    number: int
    name: str
    needs: tuple[str, ...]
    file: str = ""
    arch: str = "sm_80"
    tile: int = 0
    own: int = 1
    multiple: int = 1
    kind: str = ""
    ahead: int = 0
    clusters: bool = False
    passes: int = 1
    launches: int = 1
    registers: int = 255
    defines: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name among the rungs of all ops."""
        return f"{self.op}-{self.name}"

    @property
    def clustered(self) -> bool:
        """True if the blocks of a cluster share rows out."""
        return self.kind == "cluster" or self.clusters

    @property
    def kernel(self) -> str:
        """The name of its kernel."""
        return KERNELS[self.op]

    @property
    def source(self) -> Path:
        """The rung's file."""
        return FOLDER / self.kernel / (self.file or f"{self.number}_{self.name}.cu")

    def cut(self, columns: int) -> RowCut | None:
        """Return the division of rows of so many columns, or None where it cannot (or does not divide any)."""
        vectors = -(-columns // VECTOR)
        if self.kind == "registers":
            each = 4 if vectors <= 4 * MOST_THREADS else 8
            cut = _of_warps(vectors, each)
            return cut if cut.threads <= MOST_THREADS else None
        if self.kind == "stays" and not self.clusters:
            cut = _of_warps(vectors, 4, self.ahead)
            most = MOST_THREADS if self.ahead else MOST_THREADS // 2  # rows in registers take more of these
            return cut if cut.threads <= most else None
        if not self.clustered or vectors <= 4 * THREADS:
            return None
        each, least, ahead = self._cluster_block(vectors)
        cluster, most = 2, 2 * PORTABLE_CLUSTER if self.op == "softmax" else PORTABLE_CLUSTER
        while cluster < most and vectors > cluster * each * least:
            cluster *= 2
        cut = _of_warps(-(-vectors // cluster), each, ahead)
        if ahead > 1 and cut.threads > least:
            cut = replace(cut, ahead=1)  # a block of 1,024 threads has no room for four rows
        return replace(cut, rows=1, cluster=cluster) if cut.threads <= MOST_THREADS else None

    def _cluster_block(self, vectors: int) -> tuple[int, int, int]:
        """Return a thread's vectors, a block's threads while more blocks can be had, and rows ahead.

        The fastest of a sweep on an H200, of rows from 16,384 to 262,144 columns.
        """
        if not self.clusters:
            narrow = self.op == "layer_norm" or vectors <= 2 * 4 * THREADS
            return (4 if narrow else 8), THREADS, 0
        if self.op == "layer_norm":
            return 4, MOST_THREADS, self.ahead
        return (2, MOST_THREADS, self.ahead) if vectors <= 4 * MOST_THREADS else (4, MOST_THREADS // 2, 3)

    def code(self, cut: RowCut | None) -> RungCode:
        """Return the file and its definitions."""
        found, name = dict(self.defines), self.title
        if cut:
            found["VECTORS"] = str(cut.vectors)
            name += f"-{cut.vectors}"
        if cut and self.kind in ("stays", "cluster"):
            most = next(n for n in (THREADS, 2 * THREADS, MOST_THREADS) if cut.threads <= n)
            found["THREADS"] = str(most)
            if self.kind == "stays":
                found["AHEAD"] = str(cut.ahead)
                name += f"-{cut.ahead}-{most}"
            else:
                found["ROWS"] = str(cut.rows)
            if self.clustered:
                found["CLUSTER"] = str(cut.cluster)
                name += f"-{cut.cluster}"
            if self.kind == "cluster":
                name += f"-{cut.rows}-{most}"
        return RungCode(name, self.source, self.arch, found)


def _of_warps(vectors: int, each: int, ahead: int = 0) -> RowCut:
    threads = -(-vectors // each // WARP) * WARP
    return RowCut(threads, 4 if threads == WARP else 1, each, ahead=ahead)


def _norms(op: str) -> Iterator[MemoryRung]:
    rms = op == "rms_norm"
    defines = {"RMS": "1"} if rms else {}
    barriers = ("LDS", "STS", "BAR")
    yield MemoryRung(
        op=op, number=1, name="two_pass", kind="block", passes=2 if rms else 3, needs=barriers, defines=defines
    )  # fmt: skip
    if not rms:
        yield MemoryRung(op=op, number=2, name="welford", kind="block", passes=2, needs=barriers)
    for number, name in ((3, "shuffles"), (4, "groups")):
        yield MemoryRung(
            op=op, number=number, name=name, kind="registers", multiple=VECTOR, defines=defines,
            needs=("LDG.E.128", "SHFL.BFLY", "STG.E.128"),
        )  # fmt: skip
    vectors = (ONCE, "SHFL.BFLY", "STG.E.128")
    stays = MemoryRung(
        op=op, number=5, name="synchronous", file="5_cp_async.cu", arch="sm_90", multiple=VECTOR, kind="stays",
        registers=128, needs=vectors, defines=defines,
    )  # fmt: skip
    yield stays
    ahead = ("LDGSTS.E.BYPASS.128", "LDS.128", "SHFL.BFLY", "STG.E.128")
    yield replace(stays, name="cp_async", ahead=1, needs=ahead)
    yield replace(stays, number=6, name="cluster", file="", kind="cluster", needs=(*vectors, "STAS.128"))
    yield replace(stays, number=7, name="cluster_ahead", ahead=1, clusters=True, needs=(*ahead, "STAS.128"))


RUNGS = (
    MemoryRung(op="vector_add", number=1, name="naive", needs=("LDG.E ", "STG.E ")),
    MemoryRung(op="vector_add", number=2, name="vectors", own=16, needs=("LDG.E.128", "STG.E.128")),
    MemoryRung(op="transpose", number=1, name="naive", tile=32, needs=("LDG.E ", "STG.E ")),
    MemoryRung(op="transpose", number=2, name="shared_tile", tile=32, needs=("LDS", "STS")),
    MemoryRung(
        op="transpose", number=3, name="padded", tile=32, file="2_shared_tile.cu", needs=("LDS", "STS"),
        defines={"PITCH": "33"},
    ),
    MemoryRung(op="transpose", number=4, name="swizzled", tile=32, needs=("LDS", "STS")),
    MemoryRung(
        op="transpose", number=5, name="vectors", tile=64, multiple=4,
        needs=("LDG.E.128", "LDS.128", "STS.128", "STG.E.128"),
    ),
    MemoryRung(op="reduction", number=1, name="atomic", kind="adds", needs=("REDG.E.ADD.F32",)),
    MemoryRung(op="reduction", number=2, name="shared_tree", kind="adds", needs=("LDS", "STS", "REDG.E.ADD.F32")),
    MemoryRung(
        op="reduction", number=3, name="shuffles", kind="adds", own=16,
        needs=("LDG.E.128", "SHFL.BFLY", "REDG.E.ADD.F32"),
    ),
    MemoryRung(
        op="reduction", number=4, name="two_pass", kind="two", own=16, launches=2, needs=("LDG.E.128", "SHFL.BFLY")
    ),
    MemoryRung(op="reduction", number=5, name="grid", kind="grid", own=16, needs=("LDG.E.128", "SHFL", "ATOM")),
    *(
        rung
        for op, gated in (("silu", "0"), ("silu_multiply", "1"))
        for rung in (
            MemoryRung(op=op, number=1, name="two_ops", launches=2 + int(gated), needs=("MUFU.EX2", "MUFU.RCP")),
            MemoryRung(op=op, number=2, name="fused", needs=("MUFU.EX2", "MUFU.RCP")),
            MemoryRung(
                op=op, number=3, name="vectors", own=2 if int(gated) else 4, multiple=VECTOR, needs=(ONCE, "STG.E.128"),
                defines={"GATED": gated},
            ),
        )
    ),
    MemoryRung(op="softmax", number=1, name="three_pass", kind="block", passes=3, needs=("LDS", "STS", "BAR")),
    MemoryRung(op="softmax", number=2, name="online", kind="block", passes=2, needs=("LDS", "STS", "BAR")),
    MemoryRung(
        op="softmax", number=3, name="shuffles", kind="registers", multiple=VECTOR,
        needs=("LDG.E.128", "SHFL.BFLY", "STG.E.128"),
    ),
    MemoryRung(
        op="softmax", number=4, name="cluster", arch="sm_90", kind="cluster", multiple=VECTOR, registers=64,
        needs=(ONCE, "SHFL.BFLY", "STAS.128", "STG.E.128"),
    ),
    *_norms("layer_norm"),
    *_norms("rms_norm"),
)  # fmt: skip
