"""The ideas of rungs 7 to 10 in NumPy, to be read and to be compared with: a GPU alone runs the kernels.

    exp2_polynomial    a power of 2 by 9 instructions of the FMA units (FlashAttention-4)
    attend_tiles       maxima are replaced only where one has grown by more than a threshold (FlashAttention-4)
    makespan           the time of programs of unequal length on few multiprocessors, by the order in which they begin
    rotation           a Hadamard matrix with random signs: it spreads a large channel over all (FlashAttention-3)
    rounded_blocks     numbers in fp8 with a scale for each block of tokens

Powers are computed as an instruction would, in float32, all else in the dtype given.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST = -125.0  # a polynomial of 0.9999 times the next power would be no normal number
MAGIC = 12582912.0  # 1.5 · 2**23: a sum with it has the nearest whole number in its last bits
COEFFICIENTS = (0.999928057, 0.693260968, 0.24261117, 0.0551716909)  # of 2**f, |f| <= 1/2: least relative error
EXP2_ERROR = 7.6e-5  # relative: that of the polynomial, and of float32
THRESHOLD = 8.0  # of exponents of 2: weights stay below 2**8, and bfloat16 has them with the same relative error


def exp2_polynomial(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 2**x for x <= 127, by sums, products and one shift: x = n + f, and 2**f is a polynomial."""
    x = np.maximum(x, np.float32(LEAST))
    shifted = x + np.float32(MAGIC)
    f = x - (shifted - np.float32(MAGIC))
    c0, c1, c2, c3 = (np.float32(each) for each in COEFFICIENTS)
    power = ((c3 * f + c2) * f + c1) * f + c0
    bits: NDArray[np.uint32] = power.view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))
    return bits.view(np.float32)


def attend_tiles(
    scores_QK: NDArray[np.float64], v_KD: NDArray[np.float64], columns: int, threshold: float = 0.0
) -> tuple[NDArray[np.float64], int]:
    """Return softmax(scores) @ v with scores as exponents of 2, and the number of tiles that rescaled the output.

    What was summed is rescaled where some query's maximum has grown by more than the threshold. Else weights are
    relative to the old maximum, and may be above 1; the division by their sum makes up for it exactly.
    """
    top = scores_QK[:, :columns].max(1)
    out, total, rescaled = np.zeros((len(scores_QK), v_KD.shape[1])), np.zeros(len(scores_QK)), 0
    for start in range(0, len(v_KD), columns):
        tile = scores_QK[:, start : start + columns]
        higher = np.maximum(top, tile.max(1))
        if (higher - top).max() > threshold:
            kept = np.exp2(top - higher)
            out, total, top, rescaled = out * kept[:, None], total * kept, higher, rescaled + 1
        weights = np.exp2(tile - top[:, None])
        out, total = out + weights @ v_KD[start : start + columns], total + weights.sum(1)
    return out / total[:, None], rescaled


def tile_order(tiles: int, heads: int, at_once: int, longest_first: bool) -> list[tuple[int, int]]:
    """Return (tile, head) of each program, as `pingpong.py` numbers them. `at_once` heads are worked on together."""
    if not longest_first:
        return [(n % tiles, n // tiles) for n in range(tiles * heads)]
    found = []
    for n in range(tiles * heads):
        section, rest = divmod(n, tiles * at_once)
        here = min(at_once, heads - section * at_once)
        found.append((tiles - 1 - rest // here, section * at_once + rest % here))
    return found


def makespan(lengths: Iterable[float], multiprocessors: int) -> float:
    """Return when the last program ends, if each begins where a multiprocessor is free first, in the order given."""
    free = [0.0] * multiprocessors
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def rotation(size: int, seed: int = 0) -> Tensor:
    """Return an orthogonal matrix [D, D], float64, for a power of 2: a Hadamard matrix, its rows with random signs.

    Queries and keys that are both rotated have the same products. A channel that is large in many tokens, as models
    have them, is spread over all channels, so that a block's scale is not that channel's alone.
    """
    if size & (size - 1):
        raise ValueError(f"a Hadamard matrix has 2, 4, 8, … rows, got {size}.")
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    return found * signs * size**-0.5


def rounded_blocks(x_BHTD: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return numbers in E4M3 and the scales that they are to be multiplied by, one for each block of `rows` tokens of a
    head: [B, H, T, D], and float32 [B, H, blocks]."""
    length = x_BHTD.shape[2]
    blocks = -(-length // rows)
    filled = torch.nn.functional.pad(x_BHTD.float(), (0, 0, 0, blocks * rows - length))
    largest = filled.unflatten(2, (blocks, rows)).abs().amax((3, 4))
    scales = (largest / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
    divided = x_BHTD.float() / scales.repeat_interleave(rows, 2)[:, :, :length, None]
    return divided.to(torch.float8_e4m3fn), scales


def read_blocks(rounded: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Return the numbers that `rounded_blocks` stands for, float64."""
    return rounded.double() * scales.double().repeat_interleave(rows, 2)[:, :, : rounded.shape[2], None]


def attend_fp8(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, rows: int, columns: int, turned: Tensor | None = None
) -> Tensor:
    """Return causal attention as rung 10 rounds it, float64: operands in blocks of so many queries and keys, and
    weights in E4M3, relative to each query's maximum and 2**8 times as large. turned: a rotation of q and k."""
    if turned is not None:
        q_BHTD, k_BHTD = (x.double() @ turned for x in (q_BHTD, k_BHTD))
    q, k, v = (
        read_blocks(*rounded_blocks(x, size), size)
        for x, size in ((q_BHTD, rows), (k_BHTD, columns), (v_BHTD, columns))
    )
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = (weights.float() * 2**8).to(torch.float8_e4m3fn).double() / 2**8
    return rounded @ v / weights.sum(-1, keepdim=True)
