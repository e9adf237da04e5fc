"""Rows of a table that learns, in the type of products. The legend is that of op.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight_VM: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.rows, ctx.dtype = len(weight_VM), weight_VM.dtype
        return F.embedding(ids_T, weight_VM).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        (ids_T,) = ctx.saved_tensors
        grad_VM = torch.ops.aten.embedding_dense_backward(grad_TM.to(ctx.dtype), ids_T, ctx.rows, -1, False)
        return None, grad_VM, None


def embedding(ids_T: Tensor, weight_VM: Tensor) -> Tensor:
    """Compute `op.embedding`. Under autocast rows have the type of products, and so the whole residual stream, as where
    the model is served. The table's gradient is summed in its own type."""
    kind = ids_T.device.type
    if not torch.is_autocast_enabled(kind) or weight_VM.itemsize <= 2:
        return F.embedding(ids_T, weight_VM)
    found: Tensor = _Rows.apply(ids_T, weight_VM, torch.get_autocast_dtype(kind))
    return found
