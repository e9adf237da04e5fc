"""The rungs of the GEMM ladder: one short CUDA C++ file each, from plain to fast.

C[M, N] = A[M, K] · B[N, K]ᵀ, all row-major, as the engine's linear maps are: A is the tokens, B the weight. Sums are in
float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

FOLDER = Path(__file__).parent


def stages_of(rows: int) -> int:
    """Return the bytes of four stages with so many rows of 64 numbers of 16 bits."""
    return 4 * rows * 64 * 2


class Extras(ctypes.Structure):
    """The pointers that an epilogue reads, as `epilogue.cuh` has them. Those that no step of the chain needs are null.

    row_scales: [M] float32. column_scales: [N] float32. bias: [N] bfloat16. residual: [M, N] bfloat16.
    row_largest: [M] float32, which is written: the largest size in each row. The caller has set it to zeros.
    """

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("row_scales", "column_scales", "bias", "residual", "row_largest")
    )


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One file of the ladder, and how it is launched.

    tile: rows and columns of the output that a block makes.
    depth: numbers of K that a block has in shared memory in one stage (0: none).
    stages: tiles of each operand that shared memory holds.
    block: threads of a block, as (x, y).
    shared: bytes of dynamic shared memory.
    multiple: what N and K must be multiples of.
    boxes: rows of the boxes in which TMA reads A and B, and writes C if there are three, for rungs that use it; boxes
    are 64 numbers wide.
    cluster: blocks of a cluster. These lie below each other, so rows of tiles are the first dimension of the grid.
    divides: the blocks of a cluster make one tile, and divide K.
    persistent: blocks stay and walk over tiles; there are as many as multiprocessors.
    extras: the kernel takes pointers for an epilogue behind K.
    file: its file, if that is not named by number and name.
    arch: the architecture that it is compiled for.
    needs: mnemonics that its machine code must have.
    registers: the most registers a thread may have for the blocks that shall share a multiprocessor.
    """

    number: int
    name: str
    tile: tuple[int, int]
    block: tuple[int, int]
    depth: int = 0
    stages: int = 1
    shared: int = 0
    multiple: int = 1
    arch: str = "sm_80"
    needs: tuple[str, ...] = ()
    registers: int = 255
    boxes: tuple[int, ...] = ()
    cluster: int = 1
    divides: bool = False
    persistent: bool = False
    extras: bool = False
    file: str = ""
    defines: Mapping[str, str] = field(default_factory=dict)

    @property
    def fetched(self) -> tuple[int, int]:
        """Rows and columns of the output for which an operand is fetched from L2 once."""
        return self.tile[0] * (1 if self.divides else self.cluster), self.tile[1]

    @property
    def source(self) -> Path:
        """The rung's file."""
        return FOLDER / (self.file or f"{self.number:02}_{self.name}.cu")

    def grid(self, m: int, n: int, multiprocessors: int) -> tuple[int, int, int]:
        """Return the blocks of a launch: columns of tiles, rows of tiles; with clusters the other way round."""
        rows, columns = self.fetched
        across, down = -(-n // columns), -(-m // rows) * self.cluster
        if self.persistent:
            return min(multiprocessors // self.cluster * self.cluster, down * across), 1, 1
        return (down, across, 1) if self.cluster > 1 else (across, down, 1)


RUNGS = (
    Rung(number=1, name="naive", tile=(8, 32), block=(32, 8), needs=("FFMA",)),
    Rung(number=2, name="coalesced", tile=(1, 8), block=(32, 8), needs=("FFMA", "SHFL.BFLY")),
    Rung(number=3, name="shared_tiles", tile=(32, 32), depth=32, block=(32, 32), needs=("FFMA", "LDS", "STS", "BAR")),
    Rung(
        number=4, name="register_tiles", tile=(128, 128), depth=16, block=(256, 1), registers=128,
        needs=("FFMA", "LDS.128"),
    ),
    Rung(
        number=5, name="vector_loads", tile=(128, 128), depth=16, block=(256, 1), multiple=8, registers=128,
        needs=("FFMA", "LDG.E.128", "LDS.128", "STG.E.128"),
    ),
    Rung(
        number=6, name="conflict_free", tile=(128, 128), depth=16, block=(256, 1), multiple=8, registers=128,
        needs=("FFMA", "LDG.E.128", "LDS.128", "STG.E.64"),
    ),
    Rung(
        number=7, name="cp_async", tile=(128, 128), depth=32, stages=2, block=(256, 1), multiple=8,
        needs=("FFMA", "LDGSTS.E.BYPASS.128", "LDS.128"),
    ),
    Rung(
        number=8, name="wmma", tile=(256, 128), depth=64, stages=3, block=(256, 1), multiple=8,
        shared=3 * (256 + 128) * (128 + 16),
        needs=("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.LTC128B.128", "LDSM.16.M88.4"),
    ),
    Rung(
        number=9, name="mma_sync", tile=(256, 128), depth=64, stages=4, block=(256, 1), multiple=8,
        shared=stages_of(256 + 128),
        needs=("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.LTC128B.128", "LDSM.16.M88.4"),
    ),
    Rung(
        number=10, name="wgmma_tma", tile=(128, 128), depth=64, stages=4, block=(256, 1), multiple=8, arch="sm_90a",
        shared=stages_of(128 + 128) + 4 * 8, boxes=(128, 128),
        needs=("HGMMA.64x128x16.F32.BF16", "UTMALDG.2D", "SYNCS.PHASECHK"),
    ),
    Rung(
        number=11, name="warp_roles", tile=(128, 256), depth=64, stages=4, block=(384, 1), multiple=8, arch="sm_90a",
        shared=stages_of(128 + 256) + 8 * 8, boxes=(128, 256), registers=168,
        needs=("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D", "USETMAXREG"),
    ),
    Rung(
        number=12, name="multicast", tile=(128, 256), depth=64, stages=4, block=(384, 1), multiple=8, arch="sm_90a",
        shared=stages_of(128 + 256) + 8 * 8, boxes=(128, 128), cluster=2, registers=168,
        needs=("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D.MULTICAST", "UCGABAR_ARV"),
    ),
    Rung(
        number=13, name="persistent", tile=(128, 256), depth=64, stages=4, block=(384, 1), multiple=8, arch="sm_90a",
        shared=stages_of(128 + 256) + 8 * 8, boxes=(128, 128), cluster=2, registers=168, persistent=True,
        needs=("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D.MULTICAST", "UCGABAR_ARV"),
    ),
    Rung(
        number=14, name="ping_pong", tile=(64, 256), depth=64, stages=5, block=(384, 1), multiple=8, arch="sm_90a",
        shared=5 * (64 + 256) * 128 + 12 * 8, boxes=(64, 128), cluster=2, registers=168, persistent=True,
        needs=("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D.MULTICAST", "UCGABAR_ARV"),
    ),
    Rung(
        number=15, name="async_stores", tile=(128, 256), depth=64, stages=4, block=(384, 1), multiple=8, arch="sm_90a",
        shared=stages_of(128 + 256) + 8 * 2 * 2048 + 8 * 8, boxes=(128, 128, 16), cluster=2, registers=168,
        persistent=True, extras=True,
        needs=("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D.MULTICAST", "UCGABAR_ARV", "STSM.16.M88.4", "UTMASTG.2D"),
    ),
    Rung(
        number=16, name="shared_sums", tile=(128, 256), depth=64, stages=4, block=(384, 1), multiple=8, arch="sm_90a",
        shared=stages_of(128 + 256) + 10 * 8, boxes=(128, 256), cluster=2, divides=True, registers=168,
        needs=("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D", "STAS.128", "UCGABAR_ARV"),
    ),
)  # fmt: skip

# The shapes and formats of rung 8, as that rung's file with other definitions. `dtype` is torch's name of the operands,
# `result` of the outputs.


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Rung 8 in another shape or format."""

    shape: tuple[int, int, int]
    dtype: str
    result: str
    needs: str
    multiple: int = 8

    @property
    def name(self) -> str:
        """The shape and the format, in one word."""
        return "x".join(map(str, self.shape)) + f"-{self.dtype}"

    @property
    def defines(self) -> dict[str, str]:
        """The definitions that make rung 8 this variant."""
        words = {"bfloat16": "bf16", "float16": "fp16", "float32": "float", "int8": "signed char", "int32": "int"}
        tf32 = self.dtype == "float32"
        return {
            "ELEMENT": words[self.dtype], "OUTPUT": words[self.result],
            **{f"SHAPE_{axis}": str(size) for axis, size in zip("MNK", self.shape, strict=True)},
            "FRAGMENT": "nvcuda::wmma::precision::tf32" if tf32 else "Element",
            "SUM": "int" if self.result == "int32" else "float", **({"TF32": "1"} if tf32 else {}),
        }  # fmt: skip

    @property
    def product(self) -> Rung:
        """Rung 8, so defined."""
        rung = next(rung for rung in RUNGS if rung.number == 8)
        named = f"{rung.name}-{self.name}"
        return replace(rung, name=named, multiple=self.multiple, defines=self.defines, file=rung.source.name)

    @property
    def ceiling(self) -> Rung:
        """The kernel that multiplies so in registers alone."""
        return Rung(
            number=8,
            name=f"ceiling-{self.name}",
            tile=(0, 0),
            block=(256, 1),
            file="ceiling/wmma.cu",
            needs=(self.needs,),
            defines=self.defines,
        )

    @property
    def speed(self) -> float:
        """The format's rate on the tensor cores, of bfloat16's."""
        return {"int8": 2.0, "float32": 0.5}.get(self.dtype, 1.0)

    def rounds(self, flops: float, blocks: int) -> int:
        """Return the rounds of the ceiling's loop in which so many blocks do these FLOPs, or few more.

        In a round each of a block's eight warps multiplies 64 x K numbers by as many.
        """
        return max(1, round(flops / (2 * 64 * 64 * self.shape[2] * 8 * blocks)))


SHAPES = ((16, 16, 16), (32, 8, 16), (8, 32, 16))
VARIANTS = (
    *(Variant(shape=each, dtype="bfloat16", result="bfloat16", needs="HMMA.16816.F32.BF16") for each in SHAPES),
    *(Variant(shape=each, dtype="float16", result="float16", needs="HMMA.16816.F32") for each in SHAPES),
    *(Variant(shape=each, dtype="int8", result="int32", needs="IMMA.16816.S8.S8", multiple=16) for each in SHAPES),
    Variant(shape=(16, 16, 8), dtype="float32", result="float32", needs="HMMA.1684.F32.TF32", multiple=4),
)
