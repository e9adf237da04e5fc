"""The Triton rungs of the GEMM ladder: what they are called, their least times, and how they are launched."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from torch import Tensor

from ridgeline.kernels.cuda.predict import CHIPS, Chip, Prediction

FOLDER = Path(__file__).parent
TILE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64}
SPLITS = 4  # programs that divide the K of a tile


@dataclass(frozen=True, kw_only=True)
class TritonRung:
    """One file of the ladder.

    shares: float32 numbers that are written and read for each output.
    parts: tiles of float32 that each program writes and another reads.
    stays: there are as many programs as multiprocessors.
    """

    name: str
    idea: str
    shares: int = 0
    parts: int = 0
    stays: bool = False

    @property
    def file(self) -> Path:
        """The rung's file."""
        return FOLDER / f"{self.name}.py"


TRITON_RUNGS = (
    TritonRung(name="triton_blocked", idea="a program makes a tile"),
    TritonRung(name="triton_grouped", idea="an order of tiles that L2 likes"),
    TritonRung(name="triton_split_k", idea="several programs divide K", shares=SPLITS),
    TritonRung(name="triton_persistent", idea="programs stay", stays=True),
    TritonRung(name="triton_stream_k", idea="equal stretches of all steps", parts=2, stays=True),
)

GLUON_RUNG = TritonRung(name="gluon_stream", idea="the engine's own, in Gluon (gluon_rung.py)", stays=True)


def call(rung: TritonRung, a_MK: Tensor, b_NK: Tensor, c_MN: Tensor, programs: int) -> None:
    """Write A · Bᵀ to C. All are contiguous. programs: the device's multiprocessors."""
    product = getattr(import_module(f"ridgeline.kernels.gemm.ladder.{rung.name}"), rung.name.removeprefix("triton_"))
    product(a_MK, b_NK, c_MN, *([programs] if rung.stays else []))


def predict_triton(rung: TritonRung, chip: Chip, m: int, n: int, k: int) -> Prediction:
    """Return the least time of C[m, n] = A[m, k] · B[n, k]ᵀ in 16 bits."""
    tile = TILE["ROWS"] * TILE["COLUMNS"]
    besides = 2 * 4 * (rung.shares * m * n + rung.parts * chip.multiprocessors * tile)
    return Prediction({
        "memory": (2 * (m * k + n * k + m * n) + besides) / chip.bandwidth,
        "L2": (2 * m * n * k * (1 / TILE["ROWS"] + 1 / TILE["COLUMNS"]) + besides) / chip.l2,
        "tensor cores": 2 * m * n * k / chip.matrix,
    })  # fmt: skip


def table(size: int = 4096) -> list[str]:
    """Return the lines of the page's table."""
    lines = ["| rung | idea | memory | " + " | ".join(f"{c.name}, least µs" for c in CHIPS) + " | limit |"]
    lines.append("|---|---|---:|" + "---:|" * len(CHIPS) + "---|")
    for rung in TRITON_RUNGS:
        found = [predict_triton(rung, chip, size, size, size) for chip in CHIPS]
        times = " | ".join(f"{1e6 * each.bound:,.0f}" for each in found)
        moved = f"{found[0].seconds['memory'] * CHIPS[0].bandwidth / 1e6:,.0f} MB"
        limits = " / ".join(dict.fromkeys(each.limiter for each in found))
        lines.append(f"| `{rung.name}` | {rung.idea} | {moved} | {times} | {limits} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
