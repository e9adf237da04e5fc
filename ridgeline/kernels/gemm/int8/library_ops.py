"""Linear maps of int8 weights in graphs of torch's compilers. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.library import chosen, dense_like, expect, library_op
from ridgeline.kernels.gemm.int8.op import INT8_LINEAR, KEPT, RUN
from ridgeline.kernels.gemm.plain.levels import Levels


def _fake(x_TI: Tensor, level_OJ: Tensor, *_: object) -> Tensor:
    return dense_like(x_TI, x_TI.shape[0], level_OJ.shape[0])


@library_op(fake=_fake)
def int8_linear(x_TI: Tensor, level_OJ: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return `op.int8_linear`. Levels are int8, with zeros behind the inputs to a multiple of RUN."""
    inputs, columns = x_TI.shape[-1], level_OJ.shape[-1]
    fits = columns % RUN == 0 and 0 <= columns - inputs < RUN and scale_O.shape == level_OJ.shape[:1]
    expect(fits, "int8_linear", f"levels [O, I], I filled up to a multiple of {RUN}, and scales [O]", x_TI, level_OJ)
    return chosen(INT8_LINEAR, x_TI)(x_TI, Levels(level_OJ, scale_O, KEPT), bias_O).contiguous()
