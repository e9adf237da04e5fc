"""Activations on a CPU that give a token the same bits, however many stand beside it. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.fixed_tiles import in_tiles
from ridgeline.kernels.small.activation import torch_ops


def activation(x_TF: Tensor, kind: str) -> Tensor:
    return in_tiles(lambda x: [torch_ops.activation(x, kind)], x_TF)[0]


def gated_activation(x_T2F: Tensor, kind: str) -> Tensor:
    return in_tiles(lambda x: [torch_ops.gated_activation(x, kind)], x_T2F)[0]
