"""Weights prepared for a CPU: the same products from another form of the weight.

Tolerances: packed weights are the same numbers, so 4 epsilons of the dtype and the float32 sum's I · 2**-24, as for any
implementation. An int8 weight is off by at most half its row's scale (rounding that moves the row's largest by less),
so an output is off by at most that times Σ|x|. A rounded activation adds half its token's scale times Σ|w|, of the
rounded weights.
"""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.gemm import prepared
from ridgeline.kernels.gemm.op import CASES, LINEAR, NORM_CASES, NORM_LINEAR, Case, NormCase
from ridgeline.kernels.op import Platform
from ridgeline.kernels.ops import Ops

CPU, HERE = torch.device("cpu"), Platform(device_type="cpu")
needs_vnni = pytest.mark.skipif(not prepared.has_vnni(), reason="no VNNI")
needs_packing = pytest.mark.skipif(
    not prepared.has_onednn(HERE) or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no oneDNN in bfloat16"
)


@needs_packing
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_packed_weight_multiplies_like_the_plain_one(case: Case) -> None:
    x_TI, weight_OI, bias_O = case.inputs(torch.bfloat16, CPU)
    packed = prepared.pack(weight_OI)
    assert isinstance(packed, prepared.Packed)
    assert packed.nbytes >= weight_OI.nbytes
    got, want = prepared.linear(x_TI, packed, bias_O), LINEAR.reference(x_TI, weight_OI, bias_O)
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps + case.in_width * 2.0**-24)


@needs_packing
@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_a_packed_weight_behind_a_norm(case: NormCase) -> None:
    inputs = case.inputs(torch.bfloat16, CPU)
    got = prepared.norm_linear(*inputs[:4], prepared.pack(inputs[4]), *inputs[5:])
    eps = torch.finfo(torch.bfloat16).eps
    for ours, theirs in zip(got, NORM_LINEAR.reference(*inputs), strict=True):
        # x is rounded before the product: errors that average out to a standard deviation of about eps, of the pair's
        # factors (up to about four) too
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=(32 if case.gate else 8) * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_int8_weight_errs_by_less_than_its_step_allows(case: Case, dtype: torch.dtype) -> None:
    x_TI, weight_OI, bias_O = case.inputs(dtype, CPU)
    weight = prepared.quantize(weight_OI)
    assert weight.nbytes <= (weight_OI.shape[1] + prepared.RUN + 4) * len(weight_OI)
    got = prepared.linear(x_TI, weight, bias_O).double()
    want = LINEAR.reference(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    step_O = weight_OI.abs().amax(1).double() / prepared.LEVELS * (1 + torch.finfo(dtype).eps / 2)
    bound_TO = x_TI.double().abs().sum(1, keepdim=True) * step_O / 2
    rounding_TO = 4 * torch.finfo(dtype).eps * (want.abs() + 1) + case.in_width * 2.0**-24
    assert ((got - want).abs() <= bound_TO + rounding_TO).all()
    assert (got - want).abs().max() > 0, "nothing was rounded: this is no int8 weight"


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounded_activations_err_by_less_than_both_steps_allow(case: Case, dtype: torch.dtype) -> None:
    x_TI, weight_OI, bias_O = case.inputs(dtype, CPU)
    given, weight = x_TI.clone(), prepared.quantize_both(weight_OI)
    got = prepared.linear(x_TI, weight, bias_O).double()
    assert torch.equal(x_TI, given), "the input was written to"
    want = LINEAR.reference(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    step_O = weight_OI.abs().amax(1).double() / prepared.LEVELS * (1 + torch.finfo(dtype).eps / 2)
    step_T1 = x_TI.abs().amax(1, keepdim=True).double() / prepared.LEVELS
    by_weights_TO = x_TI.double().abs().sum(1, keepdim=True) * step_O / 2
    by_activations_TO = step_T1 / 2 * (weight_OI.double().abs() + step_O[:, None] / 2).sum(1)
    rounding_TO = 4 * torch.finfo(dtype).eps * (want.abs() + 1) + case.in_width * 2.0**-24
    assert ((got - want).abs() <= by_weights_TO + by_activations_TO + rounding_TO).all()
    alone = torch.cat([prepared.linear(x_1I, weight, bias_O) for x_1I in x_TI.split(1)]).double()
    assert torch.equal(got, alone), "a token's result depends on its neighbours"


@needs_vnni
def test_what_is_no_number_stays_none_in_w8a8() -> None:
    weight = prepared.quantize_both(torch.ones(8, 16))
    x_TI = torch.ones(4, 16)
    x_TI[1, 3], x_TI[2, 3] = torch.nan, torch.inf
    y_TO = weight.times(x_TI, None)
    assert torch.isfinite(y_TO).all(1).tolist() == [True, False, False, True]


def test_a_row_of_zeros_stays_zeros_in_int8() -> None:
    zeros = torch.zeros(32, 32, dtype=torch.bfloat16)
    for quantize in (prepared.quantize, *([prepared.quantize_both] if prepared.has_vnni() else [])):
        for x_TI, weight_OI in ((torch.ones_like(zeros), zeros), (zeros, torch.ones_like(zeros))):
            assert torch.equal(prepared.linear(x_TI, quantize(weight_OI), None), zeros)


@needs_packing
def test_weights_are_prepared_only_if_both_linear_ops_can_read_them() -> None:
    weight_OI = torch.ones(32, 32, dtype=torch.bfloat16)
    assert isinstance(Ops(HERE).prepare_weight(weight_OI), prepared.Packed)
    assert isinstance(Ops(HERE, {"linear": "int8", "norm_linear": "int8"}).prepare_weight(weight_OI), prepared.Int8)
    for name in ("reference", "torch", "int8"):
        assert Ops(HERE, {"norm_linear": name}).prepare_weight(weight_OI) is weight_OI
    assert prepared.pack(weight_OI.float()).dtype == torch.float32


def test_nobody_gets_int8_unasked() -> None:
    for device in ("cpu", "mps"):
        assert Ops(Platform(device_type=device)).prepare_weight is not prepared.quantize
    with pytest.raises(InvalidConfig, match="int7"):
        LINEAR.choose(HERE, "int7")
