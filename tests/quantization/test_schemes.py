"""Weights prepared for a CPU: the same products from another form of the weight.

Tolerances: packed weights are the same numbers, so 4 epsilons of the dtype and the float32 sum's I · 2**-24, as for any
implementation. An int8 weight is off by at most half its row's scale (rounding that moves the row's largest by less),
so an output is off by at most that times Σ|x|. A rounded activation adds half its token's scale times Σ|w|, of the
rounded weights.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.int8.op import RUN, has_vnni
from ridgeline.kernels.gemm.plain.cases import CASES, NORM_CASES, LinearCase, NormLinearCase
from ridgeline.kernels.gemm.plain.levels import LEVELS
from ridgeline.kernels.gemm.plain.op import LINEAR, NORM_LINEAR, Epilogue, Operand, has_onednn
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.quantization import SCHEMES, layout
from ridgeline.quantization.scheme import Scheme, everywhere, scheme
from ridgeline.quantization.weight import Weight
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.loader import read_model_config

CPU, HERE = torch.device("cpu"), Platform(device_type="cpu")
OPS = Ops(HERE)
ROUNDING = [name for name in ("int8", "w8a8") if SCHEMES[name].supports(HERE)]
needs_vnni = pytest.mark.skipif(not has_vnni(HERE), reason="no VNNI")
needs_packing = pytest.mark.skipif(
    not has_onednn(HERE) or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no oneDNN in bfloat16"
)


@pytest.mark.parametrize(("chosen", "told"), [("torch", True), ("reference", False)])
def test_codes_that_a_cpu_holds_as_plain_numbers_are_told_of_once(
    chosen: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layout._tell_of_plain_numbers.cache_clear()
    ops = Ops(HERE, {"coded_linear": chosen})
    for _ in range(2):
        weight = prepared("w4a16", torch.randn(32, 256), ops)
        assert (weight.stored.dtype is torch.float32) == told
    warnings = [record.getMessage() for record in caplog.records if "plain numbers" in record.getMessage()]
    assert warnings == ["weights in codes are held as plain numbers, which take more memory and are slower."] * told


def prepared(name: str, weight_OI: torch.Tensor, ops: Ops = OPS) -> Weight:
    return scheme(name).prepare(ops, weight_OI)


@needs_packing
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_packed_weight_multiplies_like_the_plain_one(case: LinearCase) -> None:
    x_TI, weight_OI, bias_O = case.inputs(torch.bfloat16, CPU)
    packed = prepared("plain", weight_OI)
    assert packed.stored.is_mkldnn
    assert packed.nbytes >= weight_OI.nbytes
    got, want = packed.linear(x_TI, bias_O), LINEAR.reference(x_TI, weight_OI, bias_O)
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps + case.in_width * 2.0**-24)


@needs_packing
@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_a_packed_weight_behind_a_norm(case: NormLinearCase) -> None:
    inputs = case.inputs(torch.bfloat16, CPU)
    x, weight_OI, epilogue = inputs
    got = prepared("plain", weight_OI).norm_linear(x, epilogue)
    eps = torch.finfo(torch.bfloat16).eps
    for ours, theirs in zip(got, NORM_LINEAR.reference(*inputs), strict=True):
        # x is rounded before the product: errors that average out to a standard deviation of about eps, of the pair's
        # factors (up to about four) too
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=(32 if case.gate else 8) * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_int8_weight_errs_by_less_than_its_step_allows(case: LinearCase, dtype: torch.dtype) -> None:
    x_TI, weight_OI, bias_O = case.inputs(dtype, CPU)
    weight = prepared("int8", weight_OI)
    assert weight.nbytes <= (weight_OI.shape[1] + RUN + 4) * len(weight_OI)
    got = weight.linear(x_TI, bias_O).double()
    want = LINEAR.reference(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    step_O = weight_OI.abs().amax(1).double() / LEVELS * (1 + torch.finfo(dtype).eps / 2)
    bound_TO = x_TI.double().abs().sum(1, keepdim=True) * step_O / 2
    rounding_TO = 4 * torch.finfo(dtype).eps * (want.abs() + 1) + case.in_width * 2.0**-24
    assert ((got - want).abs() <= bound_TO + rounding_TO).all()
    assert (got - want).abs().max() > 0, "nothing was rounded: this is no int8 weight"


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounded_activations_err_by_less_than_both_steps_allow(case: LinearCase, dtype: torch.dtype) -> None:
    x_TI, weight_OI, bias_O = case.inputs(dtype, CPU)
    given, weight = x_TI.clone(), prepared("w8a8", weight_OI)
    got = weight.linear(x_TI, bias_O).double()
    assert torch.equal(x_TI, given), "the input was written to"
    want = LINEAR.reference(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    step_O = weight_OI.abs().amax(1).double() / LEVELS * (1 + torch.finfo(dtype).eps / 2)
    step_T1 = x_TI.abs().amax(1, keepdim=True).double() / LEVELS
    by_weights_TO = x_TI.double().abs().sum(1, keepdim=True) * step_O / 2
    by_activations_TO = step_T1 / 2 * (weight_OI.double().abs() + step_O[:, None] / 2).sum(1)
    rounding_TO = 4 * torch.finfo(dtype).eps * (want.abs() + 1) + case.in_width * 2.0**-24
    assert ((got - want).abs() <= by_weights_TO + by_activations_TO + rounding_TO).all()
    alone = torch.cat([weight.linear(x_1I, bias_O) for x_1I in x_TI.split(1)]).double()
    assert torch.equal(got, alone), "a token's result depends on its neighbours"


@needs_vnni
def test_what_is_no_number_stays_none_in_w8a8() -> None:
    weight = prepared("w8a8", torch.ones(8, 16))
    x_TI = torch.ones(4, 16)
    x_TI[1, 3], x_TI[2, 3] = torch.nan, torch.inf
    y_TO = weight.linear(x_TI, None)
    assert torch.isfinite(y_TO).all(1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("name", ROUNDING)
def test_a_row_of_zeros_stays_zeros(name: str) -> None:
    zeros = torch.zeros(32, 32, dtype=torch.bfloat16)
    for x_TI, weight_OI in ((torch.ones_like(zeros), zeros), (zeros, torch.ones_like(zeros))):
        assert torch.equal(prepared(name, weight_OI).linear(x_TI, None), zeros)


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_a_rounded_weight_behind_a_norm_is_the_norm_the_product_and_the_gate(name: str, gate: str | None) -> None:
    (x_TI, residual_TI, norm_weight_I, eps), weight_OI, (bias_O, *_) = NORM_CASES[3].inputs(torch.float32, CPU)
    weight = prepared(name, weight_OI)
    y_TO, s_TI = weight.norm_linear(Operand(x_TI, residual_TI, norm_weight_I, eps), Epilogue(bias_O, gate))
    assert residual_TI is not None
    assert norm_weight_I is not None
    assert torch.equal(s_TI, x_TI + residual_TI)
    plain_TO = weight.linear(torch.nn.functional.rms_norm(s_TI, norm_weight_I.shape, norm_weight_I, eps), bias_O)
    if gate:
        up, down = plain_TO.chunk(2, dim=-1)
        plain_TO = torch.nn.functional.silu(up) * down
    torch.testing.assert_close(y_TO, plain_TO)


@needs_packing
def test_weights_are_packed_only_if_both_linear_ops_can_read_them() -> None:
    weight_OI = torch.ones(32, 32, dtype=torch.bfloat16)
    for name in ("reference", "torch"):
        assert prepared("plain", weight_OI, Ops(HERE, {"norm_linear": name})).stored is weight_OI
    weight_OI = weight_OI.float()
    assert prepared("plain", weight_OI).stored is weight_OI


def test_nobody_gets_int8_unasked() -> None:
    assert scheme(None) is SCHEMES["plain"]
    for device in ("cpu", "mps"):
        weight_OI = torch.ones(32, 32)
        assert scheme(None).prepare(Ops(Platform(device_type=device)), weight_OI).stored is weight_OI
    with pytest.raises(InvalidConfig, match="int7"):
        scheme("int7")


def test_a_scheme_says_where_it_does_not_run() -> None:
    with pytest.raises(InvalidConfig, match=r"int8 needs a CPU, and the device \(sm_90\) is none; use w8a8"):
        SCHEMES["int8"].check(Platform(device_type="cuda", arch="sm_90"))
    SCHEMES["plain"].check(Platform(device_type="cuda", arch="sm_90"))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    """Two layers of the embedded model, whose output layer is tied."""
    whole = read_model_config(EMBEDDED_MODEL).spec
    assert whole.tie_word_embeddings
    return replace(whole, layers=whole.layers[:2])


def empty(spec: ModelSpec, **options: Any) -> Decoder:
    decoder = Decoder(spec, OPS, dtype=torch.float32, device=CPU, max_positions=64, **options)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return decoder


def test_a_scheme_is_asked_for_by_every_linear_layer_under_its_own_name(spec: ModelSpec) -> None:
    asked: list[str] = []

    def scheme_of(name: str) -> Scheme:
        asked.append(name)
        return scheme("int8" if name.startswith("layers.1.") and name.endswith("qkv") else None)

    decoder = empty(spec, scheme_of=scheme_of)
    linears = {name: module for name, module in decoder.named_modules() if isinstance(module, Linear)}
    assert sorted(asked) == sorted(linears)
    assert "layers.0.mixer.qkv" in linears
    assert "unembed" in linears
    decoder.prepare()
    assert [name for name, module in linears.items() if module.weight is None] == ["layers.1.mixer.qkv"]


def test_preparing_lets_the_parameters_go_but_for_the_tied_table(spec: ModelSpec) -> None:
    decoder = empty(spec, scheme_of=everywhere(scheme("int8")))
    names, before = set(dict(decoder.named_parameters())), decoder.weight_bytes
    matrices = {name for name in names if name.split(".")[-2] in ("qkv", "out", "gate_up", "down", "up")}
    assert matrices
    decoder.prepare()
    left = dict(decoder.named_parameters())
    assert set(left) == {name for name in names - matrices if not (name.endswith("weight") and name in matrices)}
    assert "embed.weight" in left
    table = left["embed.weight"].nbytes
    assert (before - table) / 4 + table < decoder.weight_bytes < before - (before - table) / 2 + table / 2
    decoder.prepare()  # once more changes nothing
    assert set(dict(decoder.named_parameters())) == set(left)


def test_a_loaded_weight_can_be_trained_and_copied(spec: ModelSpec) -> None:
    decoder = empty(spec)
    again = copy.deepcopy(decoder)
    linear = decoder.get_submodule("layers.0.mixer.out")
    assert isinstance(linear, Linear)
    x_TI = torch.ones(2, linear.matrix.stored.shape[1])
    linear(x_TI).sum().backward()
    assert linear.weight is not None
    assert linear.weight.grad is not None
    twin = again.get_submodule("layers.0.mixer.out")
    assert isinstance(twin, Linear)
    before = linear(x_TI)
    with torch.no_grad():
        twin.weight.zero_()  # type: ignore[union-attr]
    assert not twin(x_TI).any(), "a copy multiplies with its own parameter"
    assert torch.equal(linear(x_TI), before)
