"""The cuts of products with weights in codes that a sweep tries, and the library's product of dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernels.base.case import Cuts
from ridgeline.kernels.gemm.codes.cases import CodedCase
from ridgeline.kernels.gemm.codes.choose import Cut, Wide, choose, cycles, wide_cuts
from ridgeline.kernels.gemm.codes.dequantize import dequantize
from ridgeline.kernels.gemm.codes.fragments import TILE, span, unit
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.codes.places import norm_in_places
from ridgeline.kernels.gemm.codes.triton import launch_cut, launch_wide, prepared
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.small.activation.triton import gated_activation
from ridgeline.kernels.small.norm.triton import rms_norm

PROCESSORS = 132  # of an H200, for whose numbers of tiles these are worth a try
FEW_TOKENS, SEVERAL, MANY_TOKENS = 16, 8, 256  # up to which fragments, and from which warpgroups and the library win
BEST = 4  # so many cuts of wide.py are tried, those of the fewest cycles by the model


@dataclass(frozen=True)
class Library:
    """The weight is dequantized for the library's product."""

    dequantized: bool = True


Try = Cut | Wide | Library


def candidates(case: CodedCase) -> list[Try]:
    """Return cuts to try for matrices that lie in fragments: those of fragments_kernel.py for few tokens, of wide.py
    for more, and the library."""
    size, bits, parts = unit(case.format), case.format.bits, 2 if case.gated else 1
    units, outputs, tokens = case.in_width // size, case.out_width // parts, case.tokens
    if case.out_width % (TILE * parts) or case.in_width % size or not case.ordered or not case.form:
        return []
    found: list[Try] = []
    if tokens <= FEW_TOKENS:
        words = size * bits // 64
        found.append(choose(tokens, outputs // TILE, units, words=words, parts=parts, processors=PROCESSORS))
    if tokens >= SEVERAL:
        gated = parts == 2
        ranked = wide_cuts(tokens, outputs, units, unit=size, bits=bits, gated=gated, processors=PROCESSORS)
        ranked.sort(key=lambda cut: cycles(cut, tokens, outputs, units, size, gated, PROCESSORS))
        found.extend(ranked[:BEST])
    return [*found, Library()] if tokens >= MANY_TOKENS else found


def _norm_linear(x: Operand, weight: Coded, epilogue: Epilogue, *, cut: Try) -> tuple[Tensor, Tensor]:
    """Multiply with a cut, with all that a model launches then."""
    x_TI, residual_TI, norm_I, eps = x
    bias_O, gate, *_ = epilogue
    if isinstance(cut, Cut) and cut.solo:
        return launch_cut(cut, x, weight, epilogue)
    if isinstance(cut, Wide) and norm_I is not None:
        n_TI, s_TI = norm_in_places(x_TI, residual_TI, norm_I, eps, span(weight.format))
        return launch_wide(cut, n_TI, weight, bias_O, gate, placed=True), s_TI
    n_TI, s_TI = (x_TI, x_TI) if norm_I is None else rms_norm(x_TI, residual_TI, norm_I, eps)
    if isinstance(cut, Wide):
        return launch_wide(cut, n_TI, weight, bias_O, gate), s_TI
    if isinstance(cut, Cut):
        return launch_cut(cut, Operand(n_TI), weight, epilogue)[0], s_TI
    y_TO = F.linear(n_TI, dequantize(weight, n_TI.dtype), bias_O)  # as `triton.coded_linear`
    return gated_activation(y_TO, gate) if gate else y_TO, s_TI


def _linear(x_TI: Tensor, weight: Coded, bias_O: Tensor | None, *, cut: Try) -> Tensor:
    return _norm_linear(Operand(x_TI), weight, Epilogue(bias_O), cut=cut)[0]


def with_cut(function: Callable[..., Any], cut: Try) -> Callable[..., Any]:
    return partial(function, cut=cut)


def as_held(case: CodedCase, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the weight in the order that an engine holds it in."""
    x, weight, *rest = given
    return x, prepared(weight, (x if isinstance(x, Tensor) else x.x_TI).dtype), *rest


OP_CUTS = {
    "coded_linear": Cuts(candidates, partial(with_cut, _linear), prepared=as_held),
    "coded_norm_linear": Cuts(candidates, partial(with_cut, _norm_linear), prepared=as_held),
}
