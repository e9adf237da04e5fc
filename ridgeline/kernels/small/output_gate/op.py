"""The gate behind attention, as wide as what was attended.

Legend:
    T  tokens
    X  columns of all query heads
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu


def output_gate(x_TX: Tensor, gate_TX: Tensor) -> Tensor:
    """Return x · sigmoid(gate), computed in float32: dense, in the dtype of x. The columns of a token must lie side by
    side in both."""
    return (x_TX.float() * torch.sigmoid(gate_TX.float())).to(x_TX.dtype)


OUTPUT_GATE = Op(
    "output_gate",
    output_gate,
    (
        Implementation("triton", "ridgeline.kernels.small.output_gate.triton:output_gate", on_gpu),
        Implementation("torch", "ridgeline.kernels.small.output_gate.torch_ops:output_gate"),
    ),
)
