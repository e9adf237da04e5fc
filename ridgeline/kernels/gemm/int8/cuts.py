"""The cuts of products of int8 levels on Hopper that a sweep tries: those of FP8's kernels."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ridgeline.kernels.base.case import Cuts
from ridgeline.kernels.gemm.fp8.cuts import Plan, candidates, product, rounded, with_cut
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand


def _linear(x_TI: Tensor, weight: Levels, bias_O: Tensor | None, *, cut: Plan) -> Tensor:
    ours = Eight(weight.level_OI, weight.scale_O)
    return product(cut, rounded(Operand(x_TI), ours)[0], ours, Epilogue(bias_O))


OP_CUTS = {"w8a8_linear": Cuts(candidates, partial(with_cut, _linear))}
