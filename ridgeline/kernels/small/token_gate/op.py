"""The gate of an expert that all tokens share: one number a token, which is a product of its own.

Legend:
    T  tokens
    M  model width
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu


def token_gate(y_TM: Tensor, n_TM: Tensor, weight_1M: Tensor) -> Tensor:
    """Return y · sigmoid(n · weight), computed in float32: dense, in the dtype of y. The columns of a token must lie
    side by side in both."""
    gate_T1 = (n_TM.float() * weight_1M.float()).sum(1, keepdim=True)
    return (y_TM.float() * torch.sigmoid(gate_T1)).to(y_TM.dtype)


TOKEN_GATE = Op(
    "token_gate",
    token_gate,
    (
        Implementation("triton", "ridgeline.kernels.small.token_gate.triton:token_gate", on_gpu),
        Implementation("torch", "ridgeline.kernels.small.token_gate.torch_ops:token_gate"),
    ),
)
