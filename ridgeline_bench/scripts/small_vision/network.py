"""Layers of a small transformer whose tokens see each other both ways, and its training."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

HEAD = 32


class Block(nn.Module):
    """Attention and a network of four times the width, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width]."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def blocks(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(layers)), nn.LayerNorm(width))


def block_flops(width: int, layers: int, tokens: int) -> float:
    """Return the operations of so many tokens that see each other."""
    return layers * tokens * (2 * 12 * width**2 + 4 * tokens * width)


def trained(
    parts: nn.Module, loss_of: Callable[[], Tensor], steps: int, rate: float, tell: Callable[[int, float], None]
) -> None:
    """Train by AdamW with warmup and a cosine's decay. loss_of: draws a batch."""
    decayed = [each for each in parts.parameters() if each.dim() > 1]
    plain = [each for each in parts.parameters() if each.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], rate, (0.9, 0.98))
    for step in range(steps):
        warm = min(1.0, (step + 1) / (0.05 * steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        loss = loss_of()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 8) == 0:
            tell(step, float(loss.detach()))
