"""Draws from a divided vocabulary on a GPU: the kernels of triton.py find a rank's winner, and one launch the ranks'.

Legend:
    S  slots
    R  rows
    U  tokens of this rank's part of the vocabulary
    N  ranks, padded to a power of two in the kernel
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.launch import compute_capability, launch_options
from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling import parts
from ridgeline.kernels.sampling.draw import LOG2E, bits_per_logit
from ridgeline.kernels.sampling.finish import NOBODY
from ridgeline.kernels.sampling.noise import gumbel_of_tokens
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.triton import sample

TILE = 64  # rows of a program


def draw_part(
    logits_RU: Tensor,
    tables: SamplingTables,
    slots_R: Tensor,
    position_R: Tensor,
    features: Feature,
    first: int,
) -> Tensor:
    """Compute `parts.draw_part`. Where a part begins amid a group of noise, plain torch does."""
    if first % 4:
        return parts.draw_part(logits_RU, tables, slots_R, position_R, features, first)
    return sample(logits_RU, tables, slots_R, position_R, features & ~parts.UNUSED, part=first)


def best_of_parts(
    pairs_RN2: Tensor, tables: SamplingTables, slots_R: Tensor, position_R: Tensor, features: Feature
) -> Tensor:
    """Compute `parts.best_of_parts`."""
    rows, ranks, device = len(pairs_RN2), pairs_RN2.shape[1], pairs_RN2.device
    token_R = torch.empty(rows, dtype=torch.int64, device=device)
    best_kernel[(triton.cdiv(rows, TILE),)](
        pairs_RN2, slots_R, position_R, tables.temperature_S, tables.seed_S, token_R, rows,
        tables.seed_S.stride(0), tables.temperature_S.stride(0), RANKS=ranks, TILE=TILE,
        RANDOM=bool(features & Feature.RANDOM), APPROX=compute_capability(device) != (0, 0), num_warps=1,
        **launch_options(device),
    )  # fmt: skip
    return token_R


@triton.jit(do_not_specialize=["rows"])
def best_kernel(
    pair_ptr, slots_ptr, position_ptr, temperature_ptr, seed_ptr, token_ptr, rows, int_stride, float_stride,
    RANKS: tl.constexpr, TILE: tl.constexpr, RANDOM: tl.constexpr, APPROX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write token_R, TILE rows a program. Ranks are looked at in turn; those of smaller tokens come first."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    kept = row < rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row, mask=kept, other=0).to(tl.int64)
    position = tl.load(position_ptr + row, mask=kept, other=0)
    seed = tl.load(seed_ptr + slot * int_stride)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    scale = bits_per_logit(temperature)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    for rank in tl.static_range(RANKS):
        token, score = _pair(pair_ptr, row * RANKS + rank, kept)
        top = tl.maximum(top, score)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_token = tl.full((TILE,), NOBODY, tl.int32)
    for rank in tl.static_range(RANKS):
        token, score = _pair(pair_ptr, row * RANKS + rank, kept)
        value = tl.where(score > float("-inf"), (score - top) * scale, score)
        if RANDOM:
            noise = gumbel_of_tokens(tl.maximum(token, 0), position, seed, APPROX) * LOG2E
            value = tl.where(temperature > 0, value + noise, value)
        better = (token >= 0) & ((value > best) | ((value == best) & (token < best_token)))
        best, best_token = tl.where(better, value, best), tl.where(better, token, best_token)
    tl.store(token_ptr + row, tl.where(best_token == NOBODY, -1, best_token).to(tl.int64), mask=kept)


@triton.jit
def _pair(pair_ptr, place, kept):
    """Return a rank's token, and its logit: -inf if there is no token."""
    token = tl.load(pair_ptr + 2 * place, mask=kept, other=-1)
    score = tl.load(pair_ptr + 2 * place + 1, mask=kept, other=0).to(tl.float32, bitcast=True)
    return token, tl.where(token >= 0, score, float("-inf"))
