"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) of many tensors in one kernel, which also clips.

A number costs 28 bytes: weight, gradient and both moments are read, and all but the gradient written. (torch's kernel
writes clipped gradients back, which nobody reads.) Tensors are found by a table of their addresses, so small ones cost
no launch of their own.

Legend:
    N  tensors
    P  programs, each with `BLOCK` numbers of a tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel

BLOCK, WARPS = 4096, 8


class AdamRates(NamedTuple):
    """The settings of a step. decay: the share of a weight that goes, times lr."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float


@triton.jit
def _adamw(
    places_ptr, addresses_ptr, corrections_ptr, divisor_ptr, broken_ptr, lr, decay, beta1, beta2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """places: tensor, first number and count of each program. addresses: of each tensor's weight, gradient and moments.
    corrections: 1 - beta ** step of each tensor, for both betas. broken: not 0 where nothing is to change."""
    if tl.load(broken_ptr) == 0:
        at = tl.program_id(0) * 3
        tensor, first = tl.load(places_ptr + at), tl.multiple_of(tl.load(places_ptr + at + 1), BLOCK)
        count = tl.load(places_ptr + at + 2)
        divisor = tl.load(divisor_ptr)
        size = lr / tl.load(corrections_ptr + tensor * 2)
        root = tl.sqrt(tl.load(corrections_ptr + tensor * 2 + 1))
        if first + BLOCK <= count:  # without a mask loads are of 16 bytes
            _stepped(addresses_ptr + tensor * 4, first, None, divisor, size, root, lr * decay, beta1, beta2, eps, BLOCK)
        else:
            _stepped(
                addresses_ptr + tensor * 4, first, count, divisor, size, root, lr * decay, beta1, beta2, eps, BLOCK
            )


@triton.jit
def _stepped(found_ptr, first, count, divisor, size, root, decay, beta1, beta2, eps, BLOCK: tl.constexpr):
    """Make a step of a tensor's numbers from the first on. count: of all its numbers, or None: all are there."""
    number = first + tl.arange(0, BLOCK)
    kind: tl.constexpr = tl.pointer_type(tl.float32)
    p_ptr = tl.multiple_of(tl.load(found_ptr).to(kind), 16) + number
    grad_ptr = tl.multiple_of(tl.load(found_ptr + 1).to(kind), 16) + number
    mean_ptr = tl.multiple_of(tl.load(found_ptr + 2).to(kind), 16) + number
    square_ptr = tl.multiple_of(tl.load(found_ptr + 3).to(kind), 16) + number
    there = None
    if count is not None:
        there = number < count
    grad = tl.load(grad_ptr, mask=there) / divisor
    mean, square, p = tl.load(mean_ptr, mask=there), tl.load(square_ptr, mask=there), tl.load(p_ptr, mask=there)
    mean = beta1 * mean + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad * grad
    tl.store(p_ptr, p - decay * p - size * mean / (tl.sqrt(square) / root + eps), mask=there)
    tl.store(mean_ptr, mean, mask=there)
    tl.store(square_ptr, square, mask=there)


def places_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the tensor of each program, its first number and the tensor's size: int64 [P, 3]."""
    blocks = [-(-size // BLOCK) for size in sizes]
    tensor_P = np.repeat(np.arange(len(sizes)), blocks)
    first_P = np.concatenate([np.arange(count) * BLOCK for count in blocks])
    places_P3 = torch.from_numpy(np.stack([tensor_P, first_P, np.asarray(sizes)[tensor_P]], 1))
    return _sent(places_P3, device)


def step(
    tensors: Sequence[Sequence[Tensor]],
    places_P3: Tensor,
    steps: Sequence[Tensor],
    rates: AdamRates,
    divisor_1: Tensor,
    broken_1: Tensor,
) -> None:
    """Make a step of AdamW in place, unless broken_1 is not 0.

    tensors: the weight, gradient and moments of each: float32, contiguous, on one device. steps: how many each has
    behind this one, float32. divisor_1: gradients are divided by it. All of these lie on the device.
    """
    device = divisor_1.device
    addresses_N4 = torch.tensor([[each.data_ptr() for each in some] for some in tensors], dtype=torch.int64)
    steps_N = torch.stack(list(steps)).double()
    corrections_N2 = torch.stack([1 - beta**steps_N for beta in rates.betas], 1).float()
    _adamw[(len(places_P3),)](
        places_P3, _sent(addresses_N4, device), corrections_N2, divisor_1, broken_1, rates.lr, rates.decay,
        *rates.betas, rates.eps, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers on the device, for which the host does not wait."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


AOT = (
    AotKernel(
        _adamw,
        {"places_ptr": "*i64", "addresses_ptr": "*i64"}
        | dict.fromkeys(("corrections_ptr", "divisor_ptr", "broken_ptr"), "*fp32")
        | dict.fromkeys(("lr", "decay", "beta1", "beta2", "eps"), "fp32"),
        {"BLOCK": BLOCK},
        num_warps=WARPS,
        archs=ONE_OF_EACH,
    ),
)
