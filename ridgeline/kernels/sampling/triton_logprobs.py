"""Log-probabilities and ranks of chosen tokens, by one read of the logits in two launches; a third finds the likeliest
tokens.

Legend:
    R  rows, or positions of a prompt
    V  vocabulary
    J  tiles of a row
    L  likeliest tokens reported
    I  tokens of a tile
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.sampling.draw import LEAST, LOG2E
from ridgeline.kernels.sampling.noise import LN2
from ridgeline.kernels.sampling.scoring import DeviceLogprobs


def score(logits_RV: Tensor, token_R: Tensor, num_top: int) -> DeviceLogprobs:
    """Compute `scoring.score`. Rows of logits must be contiguous; token_R is int64."""
    return _score(logits_RV, token_R, num_top, 1024 if logits_RV.numel() < 2**20 else 4096)


def score_batch_invariant(logits_RV: Tensor, token_R: Tensor, num_top: int) -> DeviceLogprobs:
    """Compute `score` so that a row's sums are made in one way, whatever lies beside it.

    Threads divide a tile of float32 otherwise than a tile of bfloat16, and a guided row makes the logits of other rows
    float32 too. So they are always made float32, with nothing between rows, since the distance of rows counts as well.
    """
    return _score(logits_RV.float().contiguous(), token_R, num_top, 4096)


def _score(logits_RV: Tensor, token_R: Tensor, num_top: int, tile: int) -> DeviceLogprobs:
    rows, vocab = logits_RV.shape
    device = logits_RV.device
    tiles = triton.cdiv(vocab, tile)
    stats_RJ = torch.empty(2, rows, tiles, dtype=torch.float32, device=device)
    count_RJ = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    logprob_R, total_R = torch.empty(2, rows, dtype=torch.float32, device=device)
    rank_R = torch.empty(rows, dtype=torch.int64, device=device)
    options = launch_options(device)
    score_kernel[(tiles, rows)](
        logits_RV, token_R, stats_RJ[0], stats_RJ[1], count_RJ, vocab, logits_RV.stride(0),
        TILE=tile, num_warps=8 if tile > 1024 else 4, **options,
    )  # fmt: skip
    combine_kernel[(rows,)](
        logits_RV, token_R, stats_RJ[0], stats_RJ[1], count_RJ, logprob_R, total_R, rank_R, tiles, logits_RV.stride(0),
        TILES=triton.next_power_of_2(tiles), num_warps=1, **options,
    )  # fmt: skip
    top_ids_RL = torch.empty(rows, min(num_top, vocab), dtype=torch.int64, device=device)
    top_logprobs_RL = torch.empty(top_ids_RL.shape, dtype=torch.float32, device=device)
    if num_top > 0:
        top_kernel[(rows,)](
            logits_RV, stats_RJ[0], total_R, top_ids_RL, top_logprobs_RL, vocab, tiles, top_ids_RL.shape[1],
            logits_RV.stride(0), TILE=tile, TILES=triton.next_power_of_2(tiles), num_warps=8 if tile > 1024 else 4,
            **options,
        )  # fmt: skip
    return DeviceLogprobs(logprob_R, rank_R, top_ids_RL, top_logprobs_RL, total_R)


@triton.jit
def score_kernel(
    logits_ptr, token_ptr, tile_max_ptr, tile_sum_ptr, tile_count_ptr, V, logits_stride, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Find each tile's largest logit, Σ exp(x - largest), and how many logits lie above the chosen token's. Grid (J,
    R)."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tile * TILE + tl.arange(0, TILE)
    if PDL:
        gdc_wait()
    row_ptr = logits_ptr + row * logits_stride
    x = tl.load(row_ptr + i, mask=i < V, other=float("-inf")).to(tl.float32)
    chosen = tl.load(row_ptr + tl.load(token_ptr + row)).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    largest = tl.maximum(tl.max(x, axis=0), LEAST)
    place = row * tl.num_programs(0) + tile
    tl.store(tile_max_ptr + place, largest)
    tl.store(tile_sum_ptr + place, tl.sum(tl.exp2((x - largest) * LOG2E), axis=0))
    tl.store(tile_count_ptr + place, tl.sum((x > chosen).to(tl.int32), axis=0))


@triton.jit
def combine_kernel(
    logits_ptr, token_ptr, tile_max_ptr, tile_sum_ptr, tile_count_ptr, logprob_ptr, total_ptr, rank_ptr, J,
    logits_stride, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write logprob_R, rank_R, and total_R, the logarithm of Σ exp(x). Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, TILES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    max_J = tl.load(tile_max_ptr + row * J + j, mask=j < J, other=LEAST)
    sum_J = tl.load(tile_sum_ptr + row * J + j, mask=j < J, other=0.0)
    count_J = tl.load(tile_count_ptr + row * J + j, mask=j < J, other=0)
    chosen = tl.load(logits_ptr + row * logits_stride + tl.load(token_ptr + row)).to(tl.float32)
    largest = tl.max(max_J, axis=0)
    log_sum = tl.log2(tl.sum(sum_J * tl.exp2((max_J - largest) * LOG2E), axis=0)) * LN2
    tl.store(logprob_ptr + row, chosen - largest - log_sum)
    tl.store(total_ptr + row, largest + log_sum)
    tl.store(rank_ptr + row, tl.sum(count_J, axis=0).to(tl.int64) + 1)


@triton.jit
def top_kernel(
    logits_ptr, tile_max_ptr, total_ptr, top_id_ptr, top_logprob_ptr, V, J, L, logits_stride, TILE: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ids and logprobs of the row's L likeliest tokens, the smaller id first where they tie. Grid (R,).

    They are found one after the other: the largest of the tiles' maxima, then a second look at its tile for what is
    left.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, TILES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    left_J = tl.load(tile_max_ptr + row * J + j, mask=j < J, other=float("-inf"))  # -inf: nothing is left
    total = tl.load(total_ptr + row)
    before, before_id = float("inf"), V
    for n in range(L):
        x = tl.max(left_J, axis=0)
        tile = tl.min(tl.where(left_J == x, j, TILES - 1), axis=0)
        i = tile * TILE + tl.arange(0, TILE)
        x_I = tl.load(logits_ptr + row * logits_stride + i, mask=i < V, other=float("-inf")).to(tl.float32)
        x_I = tl.where(i < V, tl.maximum(x_I, LEAST), float("-inf"))
        before_id = tl.where(x == before, before_id, -1)
        token = tl.min(tl.where((x_I == x) & (i > before_id), i, V - 1), axis=0)
        after_I = (x_I < x) | ((x_I == x) & (i > token))
        left_J = tl.where(j == tile, tl.max(tl.where(after_I, x_I, float("-inf")), axis=0), left_J)
        before, before_id = x, token
        tl.store(top_id_ptr + row * L + n, token.to(tl.int64))
        tl.store(top_logprob_ptr + row * L + n, tl.where(x > LEAST, x - total, float("-inf")))
