"""The gate through torch's own kernels. The legend is that of op.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def token_gate(y_TM: Tensor, n_TM: Tensor, weight_1M: Tensor) -> Tensor:
    return y_TM * torch.sigmoid(F.linear(n_TM, weight_1M))
