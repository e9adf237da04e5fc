"""Experts' products whose every row has the same bits, however many tokens stand beside it: one tile for all sizes, in
which an output is one chain of products in the order of the inputs.

Legend: see op.py
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gemm.experts import triton
from ridgeline.kernels.gemm.experts.choose import FIXED
from ridgeline.kernels.gemm.experts.matrices import Matrices
from ridgeline.kernels.gemm.route.op import Routes


def grouped_gate_up(x_TM: Tensor, weight_EGM: Matrices, bias_EG: Tensor | None, routes: Routes, gate: str) -> Tensor:
    """Compute `op.grouped_gate_up`."""
    return triton.grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate, FIXED)


def grouped_down(
    h_PF: Tensor, weight_EMF: Matrices, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None
) -> Tensor:
    """Compute `op.grouped_down`."""
    return triton.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM, FIXED)
