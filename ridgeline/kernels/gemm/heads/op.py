"""Linear maps of heads, each of which has a matrix of its own.

Legend:
    T  tokens
    H  heads
    I  inputs of a head
    O  outputs of a head
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu


def head_linear(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Return y[t, h] = weight[h] · x[t, h], in the dtype of x: [T, H, O], in which the outputs of a head lie side by
    side.

    x_THI, weight_HOI: views of any strides.
    """
    return torch.bmm(x_THI.transpose(0, 1), weight_HOI.mT).transpose(0, 1)


HEAD_LINEAR = Op(
    "head_linear",
    head_linear,
    (
        Implementation("torch", "ridgeline.kernels.gemm.heads.torch_ops:head_linear"),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.heads.batch_invariant:head_linear", on_gpu),
    ),
)
