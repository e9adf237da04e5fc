"""The random stream: the published bits, and no pattern across tokens, positions or seeds."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from ridgeline.kernels.sampling.noise import gumbel_of_groups, log2_below_groups
from ridgeline.kernels.sampling.philox import gumbel, philox_4x32, uniform

F = 0xFFFFFFFF

# Random123's kat_vectors, philox4x32 10: counter, key, output
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((F, F, F, F), (F, F), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations above its mean (a chi-square of k cells has mean k - 1 and variance 2 (k - 1))."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter, key, expected) -> None:
    words = philox_4x32(
        tuple(torch.tensor(c) for c in counter),  # type: ignore[arg-type]
        tuple(torch.tensor(k) for k in key),  # type: ignore[arg-type]
    )
    assert tuple(int(word) for word in words) == expected


def test_a_number_is_a_function_of_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([5, -3, 5]), torch.tensor([9, 9, 10])
    together = uniform(seeds, positions, 101)
    for n in range(3):
        assert torch.equal(together[n : n + 1], uniform(seeds[n : n + 1], positions[n : n + 1], 101))
    assert torch.equal(together[:, :50], uniform(seeds, positions, 50)), "the vocabulary's size must not matter"
    assert len(torch.unique(together)) > 0.99 * together.numel()


def test_both_halves_of_the_seed_count() -> None:
    position = torch.tensor([1])
    draws = [uniform(torch.tensor([seed]), position, 8) for seed in (7, 7 + (1 << 32), 7 - (1 << 63), 8)]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_numbers_are_strictly_inside_0_and_1_and_their_noise_is_finite() -> None:
    seeds = torch.arange(2000)
    numbers = uniform(seeds, seeds * 7, 512)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert gumbel(seeds, seeds * 7, 512).isfinite().all()


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_numbers_are_uniform_along_every_axis_and_pairs_are_independent(axis: str) -> None:
    n, steps = 1 << 18, torch.arange(1 << 18)
    one = torch.ones(1, dtype=torch.int64)
    numbers = {
        "tokens": lambda: uniform(one, one, n)[0],
        "positions": lambda: uniform(one.expand(n), steps, 1)[:, 0],
        "seeds": lambda: uniform(steps, one.expand(n), 1)[:, 0],
    }[axis]()
    cells = (numbers * 32).long()
    assert chi_square(torch.bincount(cells, minlength=32), torch.full((32,), n / 32)) < 5
    pairs = cells[:-1:2] * 32 + cells[1::2]
    assert chi_square(torch.bincount(pairs, minlength=1024), torch.full((1024,), n / 2 / 1024)) < 5


def test_gumbel_max_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, 1.5])
    seeds = torch.arange(100_000)
    drawn = (logits + gumbel(seeds, torch.full_like(seeds, 3), 6)).argmax(-1)
    assert chi_square(torch.bincount(drawn, minlength=6), logits.softmax(0) * len(seeds)) < 4
    same_request = (logits + gumbel(torch.full_like(seeds, 3), seeds, 6)).argmax(-1)
    joint = same_request[:-1:2] * 6 + same_request[1::2]
    expected = torch.outer(logits.softmax(0), logits.softmax(0)).flatten() * (len(seeds) // 2)
    assert chi_square(torch.bincount(joint, minlength=36), expected) < 4, "successive tokens depend on each other"


@triton.jit
def _noise_kernel(noise_ptr, bound_ptr, seed, position, Q: tl.constexpr, APPROX: tl.constexpr):
    group_Q = tl.arange(0, Q)
    place = group_Q[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(noise_ptr + place, gumbel_of_groups(group_Q, position, tl.load(seed), Q, APPROX))
    tl.store(bound_ptr + place, -log2_below_groups(group_Q, position, tl.load(seed), Q, APPROX))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", [0, -3, 7 + (1 << 32), 2**63 - 1])
def test_noise_on_the_device_is_the_same_noise(seed: int, device: str) -> None:
    """Up to its two logarithms: 1e-6 relative of the inner one and, on NVIDIA, 2**-22 of the outer one."""
    noise, bound = torch.full((2, 4096), torch.nan, device=device)
    seeds = torch.tensor([seed], device=device)
    _noise_kernel[(1,)](noise, bound, seeds, 123_456, Q=1024, APPROX=device == "cuda")
    expected = gumbel(seeds.cpu(), torch.tensor([123_456]), 4096)[0]
    assert torch.allclose(noise.cpu(), expected, atol=1e-5, rtol=0)
    gap = bound.cpu() * math.log(2) - expected
    assert gap.min() > -1e-6, "a bound that is none loses the token that should win"
    assert gap[expected > 4].max() < 0.01, "large noise is bounded closely"
