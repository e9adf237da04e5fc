"""Rungs for other GPUs than the ladder's: matrix instructions of AMD (HIP) and of NVIDIA's Blackwell.

Compilers made their machine code, and the emulator ran the same files; none of them has run on its GPU.
`python -m ridgeline.kernels.gemm.ladder.other_gpus` prints their least times.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.cuda.predict import WARP, Chip, Prediction
from ridgeline.kernels.gemm.ladder.predict import l2_bytes
from ridgeline.kernels.gemm.ladder.rungs import Rung

# Makers' figures, but for the rates of L2: MI300X's is 2 KB a cycle of each of its eight dies (AMD's CDNA 3 white
# paper), the others are assumed. `matrix` of the RTX 5090 is that of dense FP4.
MI300X = Chip("MI300X", 5.3e12, l2=34.4e12, clock=2.1e9, multiprocessors=304, matrix=1307.4e12)
RX_7900_XTX = Chip("RX 7900 XTX", 960e9, l2=3.5e12, clock=2.5e9, multiprocessors=96, matrix=122.8e12)
B200 = Chip("B200", 8e12, clock=1.965e9, multiprocessors=148, matrix=2250e12)
RTX_5090 = Chip("RTX 5090", 1.792e12, l2=8e12, clock=2.407e9, multiprocessors=170, matrix=1676e12)


@dataclass(frozen=True, kw_only=True)
class OtherRung:
    """A rung and the GPU that it is for.

    idea: in a few words.
    shared: cycles of LDS or shared memory for 32 FMAs, at 128 bytes each.
    size: bytes of an operand's number, with its share of a scale.
    """

    rung: Rung
    chip: Chip
    idea: str
    shared: float
    size: float = 2.0

    def predict(self, m: int, n: int, k: int) -> Prediction:
        """Return the least time of C[m, n] = A[m, k] · B[n, k]ᵀ."""
        groups = m * n * k / WARP / self.chip.multiprocessors / self.chip.clock
        return Prediction(
            {
                "memory": (self.size * (m + n) * k + 2 * m * n) / self.chip.bandwidth,
                "L2": self.l2(m, n, k) / self.chip.l2,
                "LDS" if self.rung.arch.startswith("gfx") else "shared memory": self.shared * groups,
                "matrix units": 2 * m * n * k / self.chip.matrix,
            }
        )

    def l2(self, m: int, n: int, k: int) -> float:
        """Return the bytes that blocks fetch from L2."""
        return l2_bytes(self.rung, m, n, k) * self.size / 2


def _amd(name: str, arch: str, depth: int, registers: int, *needs: str, **defines: str) -> Rung:
    lanes = {"gfx942": "64", "gfx1100": "32"}[arch]
    return Rung(
        number=0, name="_".join((name, *defines.values())), tile=(128, 128), depth=depth, block=(256, 1), multiple=8,
        arch=arch, registers=registers, needs=needs, file=f"amd/{name}.hip", defines={"WARP_LANES": lanes, **defines},
    )  # fmt: skip


TILES = 2 * 2 / 128  # cycles to store both operands' numbers of one K and row or column, of a tile of 128 x 128
AMD_RUNGS = (
    OtherRung(
        rung=_amd("mfma", "gfx942", 64, 128, "v_mfma_f32_32x32x8_bf16", "ds_read_b128"),
        chip=MI300X,
        idea="MFMA of waves of 64, padded LDS",
        shared=32 / 2048 + TILES / 4,
    ),
    OtherRung(
        rung=_amd("mfma", "gfx942", 64, 168, "v_mfma_f32_16x16x16_bf16", "ds_read_b128", SIZE="16"),
        chip=MI300X,
        idea="the same by 16 x 16 x 16, whose lanes meet in banks",
        shared=2 * 32 / 2048 + TILES / 4,
    ),
    OtherRung(
        rung=_amd("mfma_buffers", "gfx942", 32, 128, "v_mfma_f32_32x32x8_bf16", "ds_read_b128"),
        chip=MI300X,
        idea="two buffers, exchanged pieces",
        shared=32 / 2048 + TILES / 4,
    ),
    OtherRung(
        rung=_amd("wmma", "gfx1100", 32, 168, "v_wmma_f32_16x16x16_bf16", "ds_load_b128"),
        chip=RX_7900_XTX,
        idea="WMMA of waves of 32, mixed rows, two buffers",
        shared=48 / 1024 + TILES / 4,
    ),
)
PAIRS = Rung(
    number=0, name="pairs", tile=(128, 256), depth=64, stages=6, block=(256, 1), multiple=8, arch="sm_100a",
    shared=6 * (128 + 128) * 128 + 2 * 16 + 20 * 8 + 16, boxes=(128, 64), cluster=4, registers=64,
    needs=(
        "UTCHMMA.2CTA", "LDTM.x32", "UTMALDG.2D.MULTICAST.2CTA", "UTCBAR.2CTA.MULTICAST", "UGETNEXTWORKID.BROADCAST",
    ), file="blackwell/pairs.cu",
)  # fmt: skip
FP4 = Rung(
    number=0, name="fp4", tile=(128, 128), depth=256, stages=2, block=(256, 1), multiple=32, arch="sm_120a",
    shared=2 * 2 * (128 * 128 + 4 * 512), registers=128,
    needs=("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "LDSM.16.M88.4", "LDGSTS.E.BYPASS.128"), file="blackwell/fp4.cu",
)  # fmt: skip
BLACKWELL_RUNGS = (
    OtherRung(
        rung=PAIRS,
        chip=B200,
        idea="pairs of blocks (tcgen05), sums in tensor memory, tiles asked for",
        shared=(128 + 128) * 32 / 128 / (128 * 256 * 16 / WARP),
    ),
    OtherRung(
        rung=FP4,
        chip=RTX_5090,
        idea="numbers of 4 bits with scales for 16",
        shared=(6 * 4 + 4 * 2 + 4) / (64 * 32 * 64 / WARP),  # ldmatrix, and words of scales; rows r and r + 8 meet
        size=9 / 16,
    ),
)
OTHER_RUNGS = (*AMD_RUNGS, *BLACKWELL_RUNGS)


def table(m: int = 4096, n: int = 4096, k: int = 4096) -> list[str]:
    """Return the lines of the page's table."""
    lines = ["| rung | idea | GPU | tile | registers, at most | bytes from L2 | least µs | limit |"]
    lines.append("|---|---|---|---|---:|---:|---:|---|")
    for each in OTHER_RUNGS:
        rung, found = each.rung, each.predict(m, n, k)
        tile = " x ".join(map(str, (*rung.tile, rung.depth)))
        lines.append(
            f"| `{rung.name}` | {each.idea} | {each.chip.name} | {tile} | {rung.registers} | "
            f"{each.l2(m, n, k) / 1e9:,.2f} GB | {1e6 * found.bound:,.0f} | {found.limiter} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
