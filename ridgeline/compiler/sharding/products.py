"""Ops of a traced graph that torch has under several names or none: attention, products of many rows, and marks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("ridgeline::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Return torch's attention of [B, H, S, D] over keys and values of as many heads, or of a divisor: dense.

    mask: of what may be seen, or what is added to the scores. causal: a query sees the keys up to its own.
    """
    grouped = k.shape[1] != q.shape[1]
    made = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return made.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.custom_op("ridgeline::divided", mutates_args=())
def divided(x: Tensor, layout: str) -> Tensor:
    """Return a copy of a tensor. A partitioner reads how it is to be divided: "dp,-,tp" (`layout.layout_of`)."""
    return x.clone()


@divided.register_fake
def _(x: Tensor, layout: str) -> Tensor:
    return torch.empty_like(x)


def _keep_layout(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.layout = inputs[1]


def _divided_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return divided(gradient, ctx.layout), None


divided.register_autograd(_divided_gradient, setup_context=_keep_layout)

ATTENTION, DIVIDED = torch.ops.ridgeline.attention.default, torch.ops.ridgeline.divided.default


def product(x: Tensor, w: Tensor) -> Tensor:
    """Return the product of x [*, K] and w [K, N]: [*, N]."""
    return torch.matmul(x, w)


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of matrices a [*, M, K] and b [*, K, N]: [*, M, N]."""
    return torch.matmul(a, b)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return the same as `attention` by products and a softmax, which have gradients."""
    if k.shape[1] != q.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        mask = seen if mask is None else seen & mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores.float(), -1).to(v.dtype) @ v
