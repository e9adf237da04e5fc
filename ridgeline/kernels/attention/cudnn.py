"""Causal attention of sequences of one length: cuDNN's forward pass, and the gradients of `hopper_gradients.py`, which
need 8 % less time on an H200 than cuDNN's with heads of 64 channels (docs/fine-tuning.md). The legend is that of
`hopper_gradients.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.attention import hopper_gradients
from ridgeline.kernels.attention.triton_sdpa import atomic_gradients, output_products


def supports(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> bool:
    """Return True for operands that both passes take, unless torch is to be deterministic."""
    if torch.are_deterministic_algorithms_enabled() or not hopper_gradients.supports(q_BHQD, k_BGKD, v_BGKD):
        return False
    given = torch.backends.cuda.SDPAParams(q_BHQD, k_BGKD, v_BGKD, None, 0.0, True, q_BHQD.shape[1] != k_BGKD.shape[1])
    return bool(torch.backends.cuda.can_use_cudnn_attention(given))


class CausalAttention(torch.autograd.Function):
    """The attention of `supports`' operands, [B, H, Q, D]. intervals: `KeyMasks().intervals` of a sequence."""

    @staticmethod
    def forward(
        ctx: Any, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, intervals: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        out_BHQD, sums_BHQ1 = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q_BHQD, k_BGKD, v_BGKD, None, True, 0.0, True, False, scale=scale
        )[:2]
        log_BHQ = (sums_BHQ1 * math.log2(math.e)).reshape(q_BHQD.shape[:3])  # theirs are natural logarithms
        ctx.save_for_backward(q_BHQD, k_BGKD, v_BGKD, out_BHQD, log_BHQ)
        ctx.intervals, ctx.scale = intervals, scale
        return out_BHQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHQD: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, out_BHQD, log_BHQ = ctx.saved_tensors
        grad_BHQD = grad_BHQD if grad_BHQD.stride(-1) == 1 else grad_BHQD.contiguous()
        delta_BHQ = output_products(out_BHQD, grad_BHQD)
        found = atomic_gradients(tuple(qkv), grad_BHQD, log_BHQ, delta_BHQ, ctx.intervals, ctx.scale)
        return *found, None, None
