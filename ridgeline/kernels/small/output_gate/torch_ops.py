"""The gate through torch's own kernels. The legend is that of op.py."""

from __future__ import annotations

import torch
from torch import Tensor


def output_gate(x_TX: Tensor, gate_TX: Tensor) -> Tensor:
    return x_TX * torch.sigmoid(gate_TX)
