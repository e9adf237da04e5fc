"""The references of two bits: the lattice's points and their search, the transforms, the codebooks, and the error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.quantization.make import aqlm, quip

Method = Callable[..., quip.Quip | aqlm.Aqlm]

SMALL = aqlm.AqlmConfig(codebooks=2, bits=3, width=4, rounds=2, means=4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uneven_hessian(size: int) -> Tensor:
    """Return the Hessian of inputs that are correlated and of very different sizes."""
    x = normal(4 * size, size, seed=1) @ normal(size, size, seed=2) * torch.logspace(-1.5, 0, size)
    return x.T @ x


def relative(made: Tensor, weight: Tensor, hessian: Tensor | None = None) -> float:
    hessian = torch.eye(weight.shape[1]) if hessian is None else hessian
    error = made - weight
    return float((error @ hessian * error).sum() / (weight @ hessian * weight).sum())


def nearest_levels(weight: Tensor, group: int) -> Tensor:
    """Return a weight rounded to four even levels between each group's least and largest number."""
    pieces = weight.unflatten(1, (-1, group))
    least = pieces.amin(-1, keepdim=True)
    step = (pieces.amax(-1, keepdim=True) - least) / 3
    return (((pieces - least) / step).round() * step + least).flatten(1)


# ---- the lattice -------------------------------------------------------------------------------------------------


def test_the_codebook_has_all_signs_of_256_points_of_the_lattice_moved_up_and_down() -> None:
    points = quip.codebook()
    assert len({tuple(row) for row in points.tolist()}) == 65536
    for shift in (0.25, -0.25):
        halves = points - shift
        inside = ((halves * 2) % 2 == 1).all(1) & (halves.sum(1) % 2 == 0)  # E8's coset of halves
        assert int(inside.sum()) == 32768
    magnitudes = [row for row in product((0.5, 1.5, 2.5, 3.5), repeat=8) if sum(x * x for x in row) <= 10]
    kept = {tuple(row) for row in quip.positive_points().tolist()}
    assert len(magnitudes) == 227
    assert kept.issuperset(magnitudes)


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_the_point_found_is_the_nearest_of_all(spread: float) -> None:
    x, points = normal(300, 8) * spread, quip.codebook().double()
    distances = torch.cdist(x.double(), points)
    found = distances.gather(1, quip.nearest(x)[:, None])[:, 0]
    torch.testing.assert_close(found, distances.min(1).values, rtol=1e-6, atol=1e-6)


def test_a_point_of_the_codebook_is_its_own_nearest() -> None:
    numbers = torch.arange(0, 65536, 7)
    assert torch.equal(quip.nearest(quip.codebook()[numbers]), numbers)


# ---- the transforms ----------------------------------------------------------------------------------------------


def test_the_transform_is_sylvesters_matrix_and_orthogonal() -> None:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    matrix = torch.ones(1, 1)
    for _ in range(5):
        matrix = torch.kron(matrix, two)
    torch.testing.assert_close(quip.hadamard(torch.eye(32)), matrix)
    blocks = quip.hadamard(torch.eye(24))  # three blocks of eight
    torch.testing.assert_close(blocks @ blocks.T, torch.eye(24))
    assert int((blocks != 0).sum()) == 3 * 64


def test_the_transform_spreads_an_outlier_over_all_weights() -> None:
    weight = torch.zeros(64, 128)
    weight[3, 5] = 1.0
    signs = torch.ones(64), torch.ones(128)
    turned = quip._turned(weight, *signs)
    torch.testing.assert_close(turned.abs(), torch.full((64, 128), (64 * 128) ** -0.5))
    torch.testing.assert_close(quip._turned(turned, *signs, back=True), weight, atol=1e-6, rtol=0)


def test_feedback_is_the_factor_of_the_damped_hessian() -> None:
    hessian = uneven_hessian(32).double()
    damped = hessian + quip.DAMPING * hessian.diagonal().mean() * torch.eye(32, dtype=torch.float64)
    factor = quip.feedback(hessian) + torch.eye(32, dtype=torch.float64)
    inverse = torch.linalg.inv(factor)
    middle = inverse @ damped @ inverse.T
    same_block = torch.arange(32)[:, None] // 8 == torch.arange(32) // 8
    assert float(middle[~same_block].abs().max()) < 1e-9 * float(middle.abs().max())
    ones = torch.eye(8, dtype=torch.float64).repeat(4, 1).flatten()
    torch.testing.assert_close(factor[same_block], ones)


# ---- whole weights -----------------------------------------------------------------------------------------------


def test_quip_rounds_normal_weights_as_well_as_the_lattice_can() -> None:
    """The paper's table 1 has a mean squared error of 0.089 for unit normals; a uniform grid of four levels 0.119."""
    made = quip.quantize(normal(256, 256))
    assert 0.085 < relative(made.dequantized(), normal(256, 256)) < 0.096
    assert made.bits_per_weight == 2 + (256 + 256 + 32) / 65536


@pytest.mark.parametrize("heavy", [False, True])
def test_two_bits_lose_less_than_the_nearest_of_four_levels(heavy: bool) -> None:
    weight, hessian = normal(128, 128) ** (3 if heavy else 1), uneven_hessian(128)
    plain = relative(nearest_levels(weight, 128), weight, hessian)
    one, other = quip.quantize(weight, hessian), aqlm.quantize(weight, hessian, aqlm.AqlmConfig(rounds=1, bits=6))
    assert relative(one.dequantized(), weight, hessian) < 0.3 * plain
    assert relative(other.dequantized(), weight, hessian) < 0.3 * plain


@pytest.mark.parametrize("method", [quip.quantize, aqlm.quantize])
def test_what_is_known_of_inputs_lowers_the_error_of_outputs(method: Method) -> None:
    weight, hessian = normal(64, 64), uneven_hessian(64)
    blind, seeing = method(weight).dequantized(), method(weight, hessian).dequantized()
    assert relative(seeing, weight, hessian) < 0.8 * relative(blind, weight, hessian)


@pytest.mark.parametrize("method", [quip.quantize, aqlm.quantize])
def test_zeros_stay_finite_and_odd_widths_are_refused(method: Method) -> None:
    assert float(method(torch.zeros(16, 32), torch.zeros(32, 32)).dequantized().abs().max()) < 1e-6
    with pytest.raises(InvalidConfig, match=r"eight|8"):
        method(normal(4, 12))


# ---- additive codebooks ------------------------------------------------------------------------------------------


def test_every_step_lowers_the_error() -> None:
    weight, hessian = normal(48, 32), uneven_hessian(32) / 100
    made = aqlm._started(weight, SMALL)
    errors = [float(aqlm.error(made, weight, hessian))]
    for _ in range(2):
        made = aqlm.better_scales(made, weight, hessian)
        errors.append(float(aqlm.error(made, weight, hessian)))
        made = aqlm.better_codebooks(made, weight, hessian, 12)
        errors.append(float(aqlm.error(made, weight, hessian)))
        made = aqlm.better_codes(made, weight, hessian, 4)
        errors.append(float(aqlm.error(made, weight, hessian)))
    assert all(after < before for before, after in pairwise(errors)), errors


def test_a_search_in_all_beams_finds_the_best_codes_of_all() -> None:
    aim, books, root = normal(20, 4), normal(2, 8, 4, seed=3), normal(4, 4, seed=4)
    metric = root @ root.T
    found = aqlm._searched(torch.zeros(20, 2, dtype=torch.int64), aim, books, metric, 8)
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    # eight beams hold all words of the first codebook, so the second codebook's search tries all pairs
    error = books[0][pairs[:, 0]] + books[1][pairs[:, 1]] - aim[:, None]
    best = (error @ metric * error).sum(-1).argmin(1)
    assert torch.equal(found, pairs[best])


def test_codebooks_converge_to_the_least_squares_solution() -> None:
    weight, hessian = normal(24, 16), uneven_hessian(16) / 100 + torch.eye(16)
    made = replace(aqlm._started(weight, SMALL), scale_O=normal(24, seed=5).abs() + 0.5)
    solved = aqlm.better_codebooks(made, weight, hessian, 400)
    root = torch.linalg.cholesky(hessian.double())
    columns = []
    for index in range(made.book_CKW.numel()):  # the answer is linear in each number of the codebooks
        unit = torch.zeros(made.book_CKW.numel())
        unit[index] = 1.0
        columns.append((replace(made, book_CKW=unit.view_as(made.book_CKW)).dequantized().double() @ root).flatten())
    matrix, target = torch.stack(columns, 1), (weight.double() @ root).flatten()
    best = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
    least = float((matrix @ best - target).square().sum())
    assert float(aqlm.error(solved, weight, hessian)) == pytest.approx(least, rel=1e-3)


def test_the_scales_are_the_best_ones() -> None:
    weight, hessian = normal(24, 16), uneven_hessian(16) / 100
    made = aqlm.better_scales(aqlm._started(weight, SMALL), weight, hessian)
    least = float(aqlm.error(made, weight, hessian))
    for factor in (0.99, 1.01):
        assert float(aqlm.error(replace(made, scale_O=made.scale_O * factor), weight, hessian)) > least


def test_bits_count_codes_codebooks_and_scales() -> None:
    made = aqlm.quantize(normal(48, 32), None, SMALL)
    stored = 48 * 8 * 2 * 3 + 16 * (2 * 8 * 4) + 16 * 48
    assert made.bits_per_weight == stored / (48 * 32)
    assert torch.equal(made.book_CKW, made.book_CKW.bfloat16().float())
    assert torch.equal(made.scale_O, made.scale_O.bfloat16().float())
