"""AdamW with the usual parameter groups, initial weights and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

INIT_STD = 0.02
_RESIDUAL_OUTPUTS = ("mixer.out.weight", "feed_forward.down.weight")
_DRAWN = ("rate.log", "dt_bias", "conv.weight")
_RATES, _STEPS = (1.0, 16.0), (1e-3, 0.1)  # of Mamba-2's heads: how fast they forget, and how large their steps are


@torch.no_grad()
def initialize(decoder: nn.Module, num_layers: int, seed: int) -> None:
    """Fill the weights with normal numbers, those that feed the residual stream narrower by sqrt(2 · layers) (GPT-2);
    set norms to 1, biases and corrections to 0. Rates, steps and convolutions of Mamba-2 begin as its paper's code has
    them (Dao and Gu, arXiv 2405.21060)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if (drawn := _of_mamba(name, parameter, generator)) is not None:
            parameter.copy_(drawn)
        elif parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(("bias", "correction")) else 1.0)
        else:
            std = INIT_STD / math.sqrt(2 * num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else INIT_STD
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _of_mamba(name: str, parameter: nn.Parameter, generator: torch.Generator) -> torch.Tensor | None:
    """Return the initial numbers of a parameter that recurrent mixers alone have, or None for others."""
    share = torch.rand(parameter.shape, generator=generator) if name.endswith(_DRAWN) else torch.empty(0)
    if name.endswith("rate.log"):
        return (_RATES[0] + (_RATES[1] - _RATES[0]) * share).log()
    if name.endswith("dt_bias"):  # a step is softplus of it, spread evenly by its logarithm
        return (_STEPS[0] * (_STEPS[1] / _STEPS[0]) ** share).expm1().log()
    if name.endswith("conv.weight"):
        return (2 * share - 1) / math.sqrt(parameter.shape[-1])
    return None


def adamw(
    decoder: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float], device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices alone, not on norms, biases and embeddings (Loshchilov and Hutter,
    arXiv 1711.05101). Experts' stacked matrices count as matrices."""
    named = [(name, p) for name, p in decoder.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim >= 2 and "embed" not in name]
    plain = [p for name, p in named if p.ndim < 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=device.type == "cuda")


def learning_rate(fraction: float, *, peak: float, warmup: float) -> float:
    """Return the learning rate: it rises linearly during the first `warmup` share of the run, then follows a cosine to
    0.

    `fraction` is the share of the run that is done, 0..1.
    """
    if fraction < warmup:
        return peak * fraction / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (fraction - warmup) / (1 - warmup)))
