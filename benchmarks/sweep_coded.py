"""Products of weights in codes on a GPU: check them against float64, then time them beside bfloat16's.

    python benchmarks/sweep_coded.py --json results.jsonl           all formats, as kernels are chosen
    python benchmarks/sweep_coded.py --cuts W4 [--tokens 16 64]     other cuts too, of some formats

"linear" is what a model launches, with norm and residual for qkv and gate_up; "product" is the product alone. The limit
is the bytes of weights and activations over 4.8 TB/s, or FLOPs over 750 TFLOP/s if that is longer. Errors are relative
to the largest result. sweeping_runs.py says how it is done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import Tensor

from benchmarks.sweeping import Job, Limit, Sweep
from benchmarks.sweeping_runs import run
from ridgeline.core.weight_format import CodedFormat
from ridgeline.kernels.activation.op import gated_activation
from ridgeline.kernels.activation.triton import gated_activation as gated
from ridgeline.kernels.coded_gemm import op
from ridgeline.kernels.coded_gemm import triton as coded
from ridgeline.kernels.coded_gemm.choose import SHARED, Cut, Wide
from ridgeline.kernels.coded_gemm.fragments import Fragments, arranged
from ridgeline.kernels.gemm import triton as plain

EPS = 1e-6


@dataclass(frozen=True)
class Matrix:
    """A matrix of Llama-3.1-8B: with a norm and a residual, or with neither."""

    rows: int
    inputs: int
    norm: bool = False
    gate: str | None = None


MATRICES = {
    "qkv": Matrix(6144, 4096, norm=True),
    "o": Matrix(4096, 4096),
    "gate_up": Matrix(28_672, 4096, norm=True, gate="silu"),
    "down": Matrix(4096, 14_336),
}
FORMATS = {
    "W4": op.Case(1, 0, 0, op.W4),
    "W4 zeros": op.Case(1, 0, 0, op.W4_ZEROS),
    "MXFP4": op.Case(1, 0, 0, op.MXFP4, scales=torch.uint8),
    "Q4_K": op.Case(1, 0, 0, op.Q4_K),
    "W8": op.Case(1, 0, 0, op.W8),
}


def cuts(matrix: Matrix, tokens: int, how: CodedFormat) -> list[Cut | Wide]:
    """Return cuts to try beside the chosen one: of `mma.sync` up to 16 tokens, of warpgroups from 16 on."""
    bits, wide = how.bits, tokens >= 16 and not how.nested and how.zeros != "minimum"
    units, parts = matrix.inputs // 128, 2 if matrix.gate else 1
    found: list[Cut | Wide] = []
    size = 32 if tokens <= 32 else 64
    for tile in (size,) if tokens <= 64 else (64, 128):
        for many in ((1, 2) if tile <= 64 else (1,)) if wide else ():
            pairs = matrix.rows // (128 * many) * -(-tokens // tile)
            for split in (1,) if matrix.gate else (1, 2, 4):
                for depth, stages in ((8, 6), (8, 3), (6, 5)):
                    cut = Wide(many, tile, depth, stages, split)
                    fits = cut.shared(128, bits, matrix.gate is not None) <= SHARED
                    if fits and pairs * split >= 60 and (split == 1 or pairs * split <= 132):
                        found.append(cut)
    for warps in (2, 4, 8) if tokens < 16 else ():
        steps = -(-units // warps)
        for many in (1, 2):
            for depth in (1, 2, 4, 7, 8):
                registers = depth * 2 * bits * parts * many
                if steps % depth == 0 and steps >= depth and 8 <= registers <= 64 and units >= warps:
                    found.append(Cut(many, 8 if tokens <= 8 else 16, depth, warps, solo=tokens == 1))
    return found


class Given(NamedTuple):
    x_TI: Tensor
    residual_TI: Tensor
    norm_I: Tensor
    weight: Fragments | Tensor


class CodedSweep(Sweep):
    workload = "products of codes"
    bandwidth = 4.8e12

    @classmethod
    def flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cuts", nargs="*", choices=list(FORMATS), help="try other cuts, of these formats (W4)")

    def jobs(self) -> list[Job]:
        some = self.options.cuts
        if some is None:
            forms, at = ["bf16", *FORMATS], (1, 2, 4, 8, 16, 64, 256, 1024)
            return [Job(case, "linear", tokens, form) for case in MATRICES for form in forms for tokens in at]
        return [
            Job(case, "product", tokens, form, cut)
            for case, matrix in MATRICES.items()
            for form in some or ["W4"]
            for tokens in self.options.tokens or (16, 64, 256)
            for cut in (None, *cuts(matrix, tokens, FORMATS[form].format))
        ]

    def shape(self, job: Job) -> tuple[Matrix, int]:
        matrix = MATRICES[job.case]
        small = replace(matrix, rows=self.small(matrix.rows, 64), inputs=self.small(matrix.inputs, 256))
        return small, self.small(job.tokens, 3)

    def arguments(self, job: Job) -> list[Given]:
        matrix, tokens = self.shape(job)
        x_TI, residual_TI = self.normal(tokens, matrix.inputs), self.normal(tokens, matrix.inputs)
        norm_I = torch.ones(matrix.inputs, device=self.device, dtype=self.dtype)
        weights = self.kept("weights", (job.case, job.form), lambda: self._weights(matrix, job.form))
        return [Given(x_TI, residual_TI, norm_I, weight) for weight in weights]

    def _weights(self, matrix: Matrix, form: str) -> list[Any]:
        if form == "bf16":
            weight_OI = self.normal(matrix.rows, matrix.inputs)
            return [weight_OI, *(weight_OI.clone() for _ in range(self.turns(weight_OI.nbytes) - 1))]
        case = replace(FORMATS[form], in_width=matrix.inputs, out_width=matrix.rows)
        generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(1)
        weight = arranged(op.random_codes(case, self.device, generator))  # type: ignore[arg-type]
        more = range(self.turns(weight.nbytes) - 1)
        return [weight, *(Fragments(*(x.clone() if isinstance(x, Tensor) else x for x in weight)) for _ in more)]

    def launch(self, job: Job, arguments: Any) -> Tensor:
        (x, residual, norm, weight), matrix, cut = arguments, self.shape(job)[0], job.cut
        if isinstance(weight, Fragments):
            if job.op == "product":
                return self._product(x, weight, matrix.gate, cut)
            if matrix.norm:
                return coded.coded_norm_linear(x, residual, norm, EPS, weight, None, matrix.gate)[0]
            return coded.coded_linear(x, weight, None)
        if matrix.norm:
            return plain.norm_linear(x, residual, norm, EPS, weight, None, matrix.gate)[0]
        return plain.linear(x, weight, None)

    @staticmethod
    def _product(x: Tensor, weight: Fragments, gate: str | None, cut: Cut | Wide | None) -> Tensor:
        """Multiply with a cut, or as it is chosen."""
        if isinstance(cut, Wide):
            return coded._launch_wide(cut, x, weight, None, gate)
        if cut is not None:
            return coded._launch(cut, x, None, None, EPS, weight, None, gate)[0]
        y = coded.from_fragments(x, weight, None, gate)
        if y is None:
            y = coded.coded_linear(x, weight, None)
            y = gated(y, gate) if gate else y
        return y

    def reference(self, job: Job, arguments: Any) -> Tensor:
        (x, residual, norm, weight), matrix = arguments, self.shape(job)[0]
        if job.op == "linear" and matrix.norm:
            s = (x.float() + residual.float()).to(x.dtype).double()
            x = s * torch.rsqrt(s.square().mean(1, keepdim=True) + EPS) * norm.double()
        exact_OI = self.kept("exact", (job.case, job.form), lambda: self._exact(weight))
        wanted = x.double() @ exact_OI.T
        return gated_activation(wanted, matrix.gate) if matrix.gate else wanted

    @staticmethod
    def _exact(weight: Fragments | Tensor) -> Tensor:
        return (weight.dequantized() if isinstance(weight, Fragments) else weight).double()

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        return float((got[0].double() - want[0]).abs().max() / want[0].abs().max())

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        matrix, tokens = self.shape(job)
        rows = matrix.inputs * (3 if matrix.norm else 1) + matrix.rows // (2 if matrix.gate else 1)
        return self.least(calls[0].weight.nbytes + 2 * tokens * rows, 2.0 * tokens * matrix.rows * matrix.inputs)


if __name__ == "__main__":
    run(CodedSweep)
