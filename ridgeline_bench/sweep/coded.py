"""Products of weights in codes on a GPU: check them against float64, then time them beside bfloat16's.

    ridgeline bench sweep coded --chosen --json results.jsonl   all formats, as kernels are chosen
    ridgeline bench sweep coded --form W4 --tokens 1            cuts that are worth a try too, of one format

"linear" is what a model launches, with norm and residual for qkv and gate_up, whatever the cut. The limit is the bytes
of weights and activations over 4.8 TB/s, or FLOPs over 750 TFLOP/s if that is longer. Errors are relative to the
largest result. runs.py says how it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes import cases, op
from ridgeline.kernels.gemm.codes import triton as coded
from ridgeline.kernels.gemm.codes.cases import CodedCase
from ridgeline.kernels.gemm.codes.choose import Cut, Wide, _cycles, choose, wide_cuts
from ridgeline.kernels.gemm.codes.dequantize import dequantize
from ridgeline.kernels.gemm.codes.fragments import Fragments, arranged, span, unit
from ridgeline.kernels.gemm.codes.places import norm_in_places
from ridgeline.kernels.gemm.plain import triton as plain
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.small.activation.op import gated_activation
from ridgeline.kernels.small.activation.triton import gated_activation as gated
from ridgeline.kernels.small.norm.triton import rms_norm
from ridgeline_bench.sweep.sweep import Job, Limit, Sweep, moved

EPS = 1e-6


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix of Llama-3.1-8B: with a norm and a residual, or with neither."""

    rows: int
    inputs: int
    norm: bool = False
    gate: str | None = None


MATRICES = {
    "qkv": CodedMatrix(6144, 4096, norm=True),
    "o": CodedMatrix(4096, 4096),
    "gate_up": CodedMatrix(28_672, 4096, norm=True, gate="silu"),
    "down": CodedMatrix(4096, 14_336),
}
FORMATS = {
    "W4": CodedCase(1, 0, 0, op.W4),
    "W4 zeros": CodedCase(1, 0, 0, op.W4_ZEROS),
    "MXFP4": CodedCase(1, 0, 0, op.MXFP4, scales=torch.uint8),
    "Q4_K": CodedCase(1, 0, 0, op.Q4_K),
    "W8": CodedCase(1, 0, 0, op.W8),
}


@dataclass(frozen=True)
class Library:
    """The weight is dequantized for the library's product."""

    dequantized: bool = True


Try = Cut | Wide | Library


def cuts(matrix: CodedMatrix, tokens: int, how: CodedFormat) -> list[Try]:
    """Return cuts to try: those of fragments_kernel.py up to 16 tokens, of wide.py from 8 on, and the library."""
    size, bits = unit(how), how.bits
    units, parts, processors = matrix.inputs // size, 2 if matrix.gate else 1, 132
    outputs = matrix.rows // parts
    found: list[Try] = []
    if tokens <= 16:
        found.append(choose(tokens, outputs // 16, units, words=size * bits // 64, parts=parts, processors=processors))
    if tokens >= 8:
        ranked = wide_cuts(tokens, outputs, units, unit=size, bits=bits, gated=parts == 2, processors=processors)
        ranked.sort(key=lambda cut: _cycles(cut, tokens, outputs, units, size, parts == 2, processors))
        found.extend(ranked[:4])
    return [*found, Library()] if tokens >= 256 else found


class CodedGiven(NamedTuple):
    x_TI: Tensor
    residual_TI: Tensor
    norm_I: Tensor
    weight: Fragments | Tensor


class CodedSweep(Sweep):
    workload = "products of codes"
    bandwidth = 4.8e12

    def jobs(self) -> list[Job]:
        """Return what is chosen of every format, then the cuts of each."""
        forms, at = ["bf16", *FORMATS], self.options.tokens or (1, 2, 4, 8, 16, 64, 256, 1024)
        chosen = [Job(case, "linear", tokens, form) for case in MATRICES for form in forms for tokens in at]
        return chosen + [
            Job(case, "linear", tokens, form, cut)
            for form in FORMATS
            for case, matrix in MATRICES.items()
            for tokens in self.options.tokens or (1, 8, 64, 256)
            for cut in cuts(matrix, tokens, FORMATS[form].format)
        ]

    def shape(self, job: Job) -> tuple[CodedMatrix, int]:
        matrix = MATRICES[job.case]
        small = replace(matrix, rows=self.small(matrix.rows, 64), inputs=self.small(matrix.inputs, 256))
        return small, self.small(job.tokens, 3)

    def arguments(self, job: Job) -> list[CodedGiven]:
        matrix, tokens = self.shape(job)
        x_TI, residual_TI = self.normal(tokens, matrix.inputs), self.normal(tokens, matrix.inputs)
        norm_I = torch.ones(matrix.inputs, device=self.device, dtype=self.dtype)
        weights = self.kept("weights", (job.case, job.form), lambda: self._weights(matrix, job.form))
        return [CodedGiven(x_TI, residual_TI, norm_I, weight) for weight in weights]

    def _weights(self, matrix: CodedMatrix, form: str) -> list[Any]:
        if form == "bf16":
            weight_OI = self.normal(matrix.rows, matrix.inputs)
            return [weight_OI, *(weight_OI.clone() for _ in range(self.turns(weight_OI.nbytes) - 1))]
        case = replace(FORMATS[form], in_width=matrix.inputs, out_width=matrix.rows)
        generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(1)
        weight = arranged(cases.random_codes(case, self.device, generator))  # type: ignore[arg-type]
        more = range(self.turns(weight.nbytes) - 1)
        return [weight, *(moved(weight, self.device) for _ in more)]

    def launch(self, job: Job, arguments: Any) -> Tensor:
        (x, residual, norm, weight), matrix, cut = arguments, self.shape(job)[0], job.cut
        if isinstance(weight, Fragments):
            if cut is not None:
                return self._with_cut(x, residual, norm, weight, matrix, cut)
            if matrix.norm:
                return coded.coded_norm_linear(Operand(x, residual, norm, EPS), weight, Epilogue(gate=matrix.gate))[0]
            return coded.coded_linear(x, weight, None)
        if matrix.norm:
            return plain.norm_linear(Operand(x, residual, norm, EPS), weight, Epilogue(gate=matrix.gate))[0]
        return plain.linear(x, weight, None)

    @staticmethod
    def _with_cut(
        x: Tensor, residual: Tensor, norm: Tensor, weight: Fragments, matrix: CodedMatrix, cut: Try
    ) -> Tensor:
        """Multiply with a cut, with all that a model launches then."""
        gate, solo = matrix.gate, isinstance(cut, Cut) and cut.solo
        if isinstance(cut, Wide) and matrix.norm:
            x = norm_in_places(x, residual, norm, EPS, span(weight.format))[0]
            return coded._launch_wide(cut, x, weight, None, gate, placed=True)
        if matrix.norm and not solo:
            x = rms_norm(x, residual, norm, EPS)[0]
        if isinstance(cut, Wide):
            return coded._launch_wide(cut, x, weight, None, gate)
        if isinstance(cut, Library):
            y = plain.linear(x, dequantize(weight, x.dtype), None)
            return gated(y, gate) if gate else y
        operand = Operand(x, residual, norm, EPS) if solo and matrix.norm else Operand(x)
        return coded._launch(cut, operand, weight, Epilogue(gate=gate))[0]

    def reference(self, job: Job, arguments: Any) -> Tensor:
        (x, residual, norm, weight), matrix = arguments, self.shape(job)[0]
        if matrix.norm:
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
