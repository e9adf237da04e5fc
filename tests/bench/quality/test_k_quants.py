"""Q4_K_M's numbers are those that the gguf package reads from files, and as near the weights as their grid allows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.quality import k_quants


def weights(rows: int = 6, width: int = 512) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3)) * 0.02 + 0.003


def halves(x: Tensor) -> np.ndarray:
    return x.half().numpy().view(np.uint8).reshape(len(x), 2)


def q4_k_bytes(found: k_quants.Q4K) -> np.ndarray:
    """The blocks as ggml lays them out: scale, minimum, 12 bytes of six-bit numbers, 128 of codes."""
    level, depth = (x.numpy().astype(np.uint8) for x in (found.level_NG, found.depth_NG))
    first = level[:, :4] | (level[:, 4:] >> 4) << 6
    second = depth[:, :4] | (depth[:, 4:] >> 4) << 6
    rest = (level[:, 4:] & 15) | (depth[:, 4:] & 15) << 4
    code = found.code_NGV.numpy().astype(np.uint8)
    packed = code[:, 0::2] | code[:, 1::2] << 4  # two groups share 32 bytes
    parts = halves(found.scale_N), halves(found.minimum_N), first, second, rest, packed.reshape(len(code), 128)
    return np.concatenate(parts, axis=1)


def q6_k_bytes(found: k_quants.Q6K) -> np.ndarray:
    """128 bytes of low halves, 64 of upper two bits, 16 scales, the block's scale."""
    code = (found.code_NGV.numpy().astype(np.int32) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = code & 15, code >> 4
    lows = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    level = found.level_NG.numpy().astype(np.int8).view(np.uint8)
    parts = lows.reshape(len(code), 128), highs.reshape(len(code), 64), level, halves(found.scale_N)
    return np.concatenate(parts, axis=1)


def test_the_gguf_package_reads_the_same_numbers_from_blocks_of_these_codes() -> None:
    four, six = k_quants.q4_k(weights()), k_quants.q6_k(weights())
    kinds = gguf.GGMLQuantizationType
    for blocks, kind, found in ((q4_k_bytes(four), kinds.Q4_K, four), (q6_k_bytes(six), kinds.Q6_K, six)):
        read = gguf.quants.dequantize(blocks, kind)
        np.testing.assert_allclose(read.reshape(-1), found.values().reshape(-1).numpy(), rtol=1e-6, atol=1e-9)


def test_no_weight_is_further_away_than_half_a_step_and_what_rounded_scales_add() -> None:
    x = weights()
    four, six = k_quants.q4_k(x), k_quants.q6_k(x)
    step_NG, _ = four.grid()
    # a group's scale is off by half a 63rd of the block's at most, 15 times that at the largest code; so is its minimum
    slack_N1 = 15 * four.scale_N.float()[:, None] / 2 + four.minimum_N.float()[:, None] / 2
    error = (four.values() - x.reshape(four.code_NGV.shape)).abs().amax(-1)
    assert (error <= 1.01 * (step_NG / 2 + slack_N1) + 1e-6).all()
    slack_N1 = 31 * six.scale_N.float()[:, None] / 2
    error = (six.values() - x.reshape(six.code_NGV.shape)).abs().amax(-1)
    assert (error <= 1.01 * (six.grid() / 2 + slack_N1) + 1e-6).all()


def test_six_bits_are_nearer_than_four_and_zeros_stay() -> None:
    x = weights()
    x[0] = 0
    four, six = (k_quants.rounded(x, kind) for kind in ("Q4_K", "Q6_K"))
    assert (six - x).square().mean() < (four - x).square().mean() / 8
    assert four[0].abs().max() == six[0].abs().max() == 0


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="no whole blocks of 256"):
        k_quants.q4_k(torch.zeros(2, 300))


def test_blocks_have_the_bits_that_are_counted() -> None:
    assert 8 * q4_k_bytes(k_quants.q4_k(weights())).shape[1] / 256 == k_quants.BITS["Q4_K"]
    assert 8 * q6_k_bytes(k_quants.q6_k(weights())).shape[1] / 256 == k_quants.BITS["Q6_K"]
