"""Methods that round a matrix, beside what they are defined to be.

GPTQ's reference solves for each column anew, in float64, what its Cholesky factor has all at once.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.compression.budget import knapsack
from ridgeline.compression.writers.packing import words
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.weight_format import Fp8Format
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.make.factors import searched_factors, smoothing_factors
from ridgeline.quantization.make.gptq import Gptq, gptq
from ridgeline.quantization.make.grids import Fp8Grid, Int8Grid, LevelGrid, NumberGrid, Scales, TableGrid, dequantized
from ridgeline.quantization.make.hqq import POWER, half_quadratic
from ridgeline.quantization.make.rtn import round_to_nearest
from ridgeline.quantization.make.statistics import InputStatistics, ObservedWeight
from ridgeline.quantization.outliers import OutlierWeight
from ridgeline.quantization.weight import weight_of

OPS = Ops(Platform(device_type="cpu"))
W4 = LevelGrid(4, 16, True, torch.bfloat16)
GRIDS: dict[str, tuple[NumberGrid, int]] = {  # with the number of codes
    "4 bits": (W4, 16),
    "4 bits with zeros": (replace(W4, symmetric=False), 16),
    "3 bits": (replace(W4, bits=3), 8),
    "8 bits": (replace(W4, bits=8, group=0), 256),
    "nf4": (TableGrid("nf4", 16, torch.float32), 16),
    "mxfp4": (TableGrid("e2m1", 16, torch.uint8), 16),
    "nvfp4": (TableGrid("e2m1", 16, torch.float8_e4m3fn), 16),
    "int8": (Int8Grid(), 0),
    "fp8": (Fp8Grid(Fp8Format()), 0),
}


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def seen_of(x_TI: Tensor) -> InputStatistics:
    seen = InputStatistics(x_TI.shape[1], x_TI.device)
    seen.add(x_TI)
    return seen


def correlated(tokens: int, inputs: int) -> Tensor:
    """Inputs that predict one another, some far larger than others."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5 + torch.eye(inputs)
    size = torch.exp(torch.randn(inputs, generator=generator))
    return torch.randn(tokens, inputs, generator=generator) @ mix * size


@pytest.mark.parametrize("name", GRIDS)
def test_a_weight_becomes_the_nearest_number_of_its_grid(name: str) -> None:
    weight_OI = matrix(6, 32)
    grid, count = GRIDS[name][0].fitted(weight_OI), GRIDS[name][1]
    made = round_to_nearest(weight_OI, grid)
    got_OI = dequantized(grid, made)
    width = grid.group or 32
    if name == "fp8":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        codes = codes[codes.isfinite()]
    else:
        codes = torch.arange(-127.0, 128) if name == "int8" else torch.arange(float(count))
    for row, column in itertools.product(range(6), range(32)):
        slab = column // width
        zero = None if made.zero_OG is None else made.zero_OG[row, slab]
        values = grid.values(codes, Scales(made.scale_OG[row, slab], zero))
        least = (values - weight_OI[row, column]).abs().min()
        assert (got_OI[row, column] - weight_OI[row, column]).abs() <= least * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize("name", GRIDS)
def test_the_form_that_multiplies_stands_for_the_rounded_numbers(name: str) -> None:
    weight_OI = matrix(6, 32)
    grid = GRIDS[name][0].fitted(weight_OI)
    made = round_to_nearest(weight_OI, grid)
    torch.testing.assert_close(grid.form(made).dequantized(), dequantized(grid, made), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", GRIDS)
def test_rows_of_zeros_stay_zeros(name: str) -> None:
    grid = GRIDS[name][0].fitted(torch.zeros(4, 32))
    assert not grid.form(round_to_nearest(torch.zeros(4, 32), grid)).dequantized().any()


def test_a_searched_range_errs_less() -> None:
    weight_OI = matrix(16, 64)
    weight_OI[:, 3] *= 6
    grid = LevelGrid(3, 0, True, torch.float16)
    plain, searched = (
        dequantized(grid, round_to_nearest(weight_OI, grid, importance_I)) - weight_OI
        for importance_I in (None, torch.ones(64))
    )
    assert (searched.square().sum(1) <= plain.square().sum(1)).all()
    assert searched.square().sum() < 0.9 * plain.square().sum()


def column_by_column(weight_OI: Tensor, hessian_II: Tensor, grid: NumberGrid, order: list[int], static: bool) -> Tensor:
    """GPTQ by its definition: after a column is rounded, the others are the least-squares answer to its error."""
    weight, hessian = weight_OI.double(), hessian_II.double()
    hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    width, left = grid.group or len(order), list(order)
    fixed = [grid.fit(slab.float()) for slab in weight_OI.split(width, 1)]
    result, scales = torch.empty_like(weight_OI), fixed[0]
    for place, column in enumerate(order):
        if static:
            scales = fixed[column // width]
        elif place % width == 0:
            scales = grid.fit(weight[:, left[:width]].float())
        now_O1 = weight[:, column : column + 1].float()
        rounded_O1 = grid.values(grid.codes(now_O1, scales), scales)
        result[:, column : column + 1] = rounded_O1
        inverse = torch.linalg.inv(hessian[left][:, left])
        weight[:, left] -= (weight[:, column : column + 1] - rounded_O1.double()) * inverse[0] / inverse[0, 0]
        left.pop(0)
    return result


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", ["4 bits", "4 bits with zeros", "nf4", "8 bits"])
def test_gptq_is_the_least_squares_answer_to_every_error(name: str, act_order: bool, static: bool) -> None:
    grid, weight_OI = GRIDS[name][0], matrix(5, 160)
    hessian_II = seen_of(correlated(400, 160)).hessian_II
    order = hessian_II.diagonal().argsort(descending=True).tolist() if act_order else list(range(160))
    made = gptq(weight_OI, hessian_II, grid, Gptq(act_order=act_order, static_groups=static))
    want_OI = column_by_column(weight_OI, hessian_II, grid, order, static)
    got_OI = dequantized(grid, made)
    # float32 may tip a weight that lies between two numbers, which then moves later columns of its row
    same = (got_OI - want_OI).abs() <= 1e-6
    assert same.float().mean() > 0.97
    form = grid.form(made)
    torch.testing.assert_close(form.dequantized(), got_OI, rtol=1e-5, atol=1e-8)


def test_gptq_errs_less_than_rounding_where_inputs_predict_one_another() -> None:
    weight_OI, seen = matrix(24, 64), seen_of(correlated(300, 64))
    plain = seen.squared_error(dequantized(W4, round_to_nearest(weight_OI, W4)) - weight_OI)
    better = seen.squared_error(dequantized(W4, gptq(weight_OI, seen.hessian_II, W4, Gptq())) - weight_OI)
    assert better < 0.75 * plain


def test_inputs_that_were_never_seen_are_no_obstacle() -> None:
    x_TI = correlated(100, 32)
    x_TI[:, 5] = 0
    made = gptq(matrix(4, 32), seen_of(x_TI).hessian_II, W4, Gptq())
    assert dequantized(W4, made).isfinite().all()


def test_a_hessian_that_is_no_number_is_said() -> None:
    with pytest.raises(InvalidConfig, match="32 inputs cannot be inverted"):
        gptq(matrix(4, 32), torch.full((32, 32), torch.nan), W4, Gptq())


def test_the_hessian_gives_the_squared_error_of_the_outputs() -> None:
    x_TI, change_OI = correlated(50, 16), matrix(3, 16)
    want = (x_TI @ change_OI.T).square().sum()
    torch.testing.assert_close(seen_of(x_TI).squared_error(change_OI), want)


def test_statistics_of_divided_inputs() -> None:
    x_TI, factor_I = correlated(50, 16), torch.linspace(0.5, 1.5, 16)
    divided, want = seen_of(x_TI), seen_of(x_TI / factor_I)
    divided.divide(factor_I)
    for name in ("hessian_II", "largest_I", "mean_I"):
        expected = getattr(want, name)
        rounding = 1e-6 * expected.abs().max().item()  # sums over tokens may cancel, in an order that CPUs choose
        torch.testing.assert_close(getattr(divided, name), expected, rtol=1e-5, atol=rounding)


def test_an_observed_weight_sees_normalized_inputs() -> None:
    observed = ObservedWeight.of(OPS, matrix(4, 16))
    x_TI, residual_TI, norm_I = torch.randn(3, 5, 16).unbind()[0], torch.randn(5, 16), torch.rand(16)
    y_TO, s_TI = observed.norm_linear(Operand(x_TI, residual_TI, norm_I, 1e-5), Epilogue())
    n_TI = torch.nn.functional.rms_norm(x_TI + residual_TI, (16,), norm_I, 1e-5)
    torch.testing.assert_close(observed.seen.hessian_II, n_TI.T @ n_TI)
    torch.testing.assert_close(y_TO, n_TI @ observed.stored.T)
    assert torch.equal(s_TI, x_TI + residual_TI)


@pytest.mark.parametrize("symmetric", [True, False])
def test_hqq_errs_less_in_its_norm(symmetric: bool) -> None:
    weight_OI = matrix(32, 64)
    weight_OI[torch.rand(32, 64, generator=torch.Generator().manual_seed(2)) > 0.97] *= 8  # heavy tails
    grid = LevelGrid(4, 0, symmetric, torch.float16)
    errors = [
        (dequantized(grid, made) - weight_OI).abs().pow(POWER).sum()
        for made in (half_quadratic(weight_OI, grid), round_to_nearest(weight_OI, grid))
    ]
    assert errors[0] < 0.985 * errors[1]


def test_smoothing_shares_the_range() -> None:
    x_TI, weight_OI = correlated(50, 16), matrix(4, 16)
    factor_I = smoothing_factors([weight_OI[:2], weight_OI[2:]], [seen_of(x_TI)] * 2, 0.5)
    largest_I, weights_I = x_TI.abs().amax(0), weight_OI.abs().amax(0)
    torch.testing.assert_close(factor_I, (largest_I / weights_I).sqrt())
    torch.testing.assert_close((x_TI / factor_I).abs().amax(0), (weight_OI * factor_I).abs().amax(0))


def test_searched_factors_lessen_the_error_of_the_outputs() -> None:
    x_TI, weight_OI = correlated(200, 64), matrix(24, 64)
    seen = seen_of(x_TI)
    factor_I, ratio = searched_factors([weight_OI], [seen], W4, lambda f: f)
    assert ratio > 0

    def error(scaled_OI: Tensor, by_I: Tensor) -> Tensor:
        rounded_OI = dequantized(W4, round_to_nearest(scaled_OI, W4)) / by_I
        return (x_TI @ (rounded_OI - weight_OI).T).square().sum()

    assert error(weight_OI * factor_I, factor_I) < 0.9 * error(weight_OI, torch.ones(64))


def test_outliers_are_multiplied_apart() -> None:
    x_TI, weight_OI = torch.randn(20, 32), matrix(8, 32)
    x_TI[:, 7] *= 50
    form = Int8Grid().form(round_to_nearest(weight_OI, Int8Grid()))
    column_C = torch.tensor([7])
    ops = Ops(OPS.platform, {"w8a8_linear": "reference"})
    weight = OutlierWeight(ops, weight_of(ops, form), column_C, weight_OI[:, column_C])
    want_TO = x_TI @ weight_OI.T
    apart = (weight.linear(x_TI, None) - want_TO).abs().max()
    together = (weight_of(ops, form).linear(x_TI, None) - want_TO).abs().max()
    assert apart < 0.1 * together
    bias_O = torch.randn(8)
    torch.testing.assert_close(weight.linear(x_TI, bias_O), weight.linear(x_TI, None) + bias_O)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_hold_codes_from_the_lowest_bit_on(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (64, 3), generator=torch.Generator().manual_seed(0))
    got = words(codes, bits, "a module")
    for column in range(3):
        stream = sum(int(code) << index * bits for index, code in enumerate(codes[:, column]))
        want = [stream >> 32 * word & 0xFFFFFFFF for word in range(64 * bits // 32)]
        assert [int(word) & 0xFFFFFFFF for word in got[:, column]] == want


def test_codes_that_fill_no_word_are_said() -> None:
    with pytest.raises(InvalidConfig, match=r"layer has 12 codes of 4 bits to a row, no multiple of 8"):
        words(torch.zeros(12, 1), 4, "layer")


def test_no_choice_of_as_many_bytes_costs_less() -> None:
    """The greedy choice is the best of its own size; brute force looks for a better one."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        options = {
            name: [
                (size, float(cost))
                for size, cost in zip(
                    (2, 4, 5, 8), torch.rand(4, generator=generator).sort(descending=True)[0], strict=True
                )
            ]
            for name in "abcd"
        }
        for budget in range(8, 33):
            picked = knapsack(options, budget)
            assert picked is not None
            size = sum(options[name][index][0] for name, index in picked.items())
            cost = sum(options[name][index][1] for name, index in picked.items())
            assert size <= budget
            for indices in itertools.product(range(4), repeat=4):
                chosen = [options[name][index] for name, index in zip("abcd", indices, strict=True)]
                if sum(each for each, _ in chosen) <= size:
                    assert sum(each for _, each in chosen) >= cost - 1e-9
        assert knapsack(options, 7) is None
