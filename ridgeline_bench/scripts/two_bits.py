"""Two bits a weight: the error of normal numbers beside the least possible one, and what making and decoding cost.

    python -m ridgeline_bench.scripts.two_bits        # prints the table of docs/quantization.md

Times are CPU time of one thread and of the references in plain torch. What counts is their ratio: that of codes by a
scale, which kernels multiply with, against that of points and codewords.

Legend:
    O  outputs
    I  inputs
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.quantization.make import aqlm, quip
from ridgeline.quantization.make.grids import LevelGrid
from ridgeline.quantization.make.rtn import round_to_nearest
from ridgeline_bench.scripts.float8 import table

SHAPE = (2048, 1024)
REPEATS = 5


class Codes:
    """Whole numbers in groups of 64, with zeros."""

    def __init__(self, weight_OI: Tensor, bits: int) -> None:
        grid = LevelGrid(bits, 64, False, torch.bfloat16)
        self.form = grid.form(round_to_nearest(weight_OI, grid))
        self.bits_per_weight = 8 * self.form.nbytes / weight_OI.numel()

    def dequantized(self) -> Tensor:
        return self.form.dequantized()


def seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    torch.set_num_threads(1)
    weight_OI = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    ways: dict[str, Callable[[], Codes | quip.Quip | aqlm.Aqlm]] = {
        "4-bit codes, groups of 64": lambda: Codes(weight_OI, 4),
        "2-bit codes, groups of 64": lambda: Codes(weight_OI, 2),
        "QuIP#": lambda: quip.quantize(weight_OI),
        "AQLM, 2 codebooks of 256": lambda: aqlm.quantize(weight_OI),
    }
    rows = []
    for name, make in ways.items():
        making = seconds(make)
        made = make()
        decoding = min(seconds(made.dequantized) for _ in range(REPEATS))
        error = float((made.dequantized() - weight_OI).square().mean())
        least = 2 ** (-2 * made.bits_per_weight)
        each = 1e9 / weight_OI.numel()
        rows.append(
            (
                name,
                f"{made.bits_per_weight:.2f}",
                f"{error:.4f}",
                f"{least:.4f}",
                f"{making * each:,.0f}",
                f"{decoding * each:.1f}",
            )
        )
    print(table(("unit normal numbers", "bits", "squared error", "least possible", "ns to make", "ns to decode"), rows))


if __name__ == "__main__":
    main()
