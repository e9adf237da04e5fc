"""Experts held by every scheme on a CPU: the same function from another form of the weights, in the memory it says.

Tolerances: a level is off by at most half a scale, which is a 127th of its row's largest weight, some 3 standard
deviations of it. So a product is off by about 3 / 127 / sqrt(12) = 0.7 % of its norm, and three of them in a row by
1.2 %; rounded activations double the variance. Twice that is allowed. Plain weights keep their numbers: each of two
products is rounded to bfloat16 once, here and there.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.specs.experts import ExpertsSpec, RoutingSpec
from ridgeline.core.specs.model import MLPSpec, NormSpec
from ridgeline.kernels.base import onednn
from ridgeline.kernels.base.onednn import LARGE_PAGE
from ridgeline.kernels.base.op import Platform, has_byte_products
from ridgeline.kernels.base.weight_format import CodedFormat, Held, HeldMatrix
from ridgeline.kernels.gemm.codes.op import MXFP4, MXFP8, NF4, W4, Coded
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.panels import ExpertPanels, functions
from ridgeline.kernels.ops import OPS, Ops
from ridgeline.layers.build import Build
from ridgeline.layers.experts import Experts, ExpertStack
from ridgeline.layers.norm import Norm
from ridgeline.quantization import SCHEMES
from ridgeline.quantization.experts import ListedWeights, StackedWeights, prepare_experts
from ridgeline.quantization.held import runs_well
from ridgeline.quantization.scheme import everywhere, scheme

CPU, HERE = torch.device("cpu"), Platform(device_type="cpu")
WIDTH, EXPERTS = 64, 8
SPEC = ExpertsSpec(routing=RoutingSpec(experts=EXPERTS, top_k=2, renormalize=True), intermediate_size=96)
ERRORS = {"plain": 4 * 2.0**-8, "int8": 0.024, "w8a8": 0.035}
SCHEMES_HERE = [name for name in ERRORS if SCHEMES[name].supports(HERE)]


def layer(spec: ExpertsSpec, name: str, ops: Ops | None = None, dtype: torch.dtype = torch.bfloat16) -> Experts:
    made = Experts(spec, WIDTH, Build(ops or Ops(HERE), dtype, CPU, everywhere(scheme(name))))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * WIDTH**-0.5)
    return made.requires_grad_(False)


def prepare(made: Experts) -> Experts:
    for module in made.modules():
        if isinstance(module, ExpertStack):
            module.prepare()
    return made


def norm(dtype: torch.dtype = torch.bfloat16) -> Norm:
    made = Norm(NormSpec(kind="rms", eps=1e-6), WIDTH, Build(Ops(HERE), dtype, CPU, everywhere(scheme(None))))
    torch.nn.init.ones_(made.weight)
    return made.requires_grad_(False)


@pytest.mark.parametrize("name", SCHEMES_HERE)
@pytest.mark.parametrize("tokens", [1, 8, 50])
@pytest.mark.parametrize("kind", ["bare", "biased", "shared"])
def test_prepared_experts_compute_what_the_reference_does(name: str, tokens: int, kind: str) -> None:
    shared = MLPSpec(intermediate_size=32, activation="silu")
    spec = {"bare": SPEC, "biased": replace(SPEC, bias=True), "shared": replace(SPEC, shared=shared)}[kind]
    references = Ops(HERE, dict.fromkeys(OPS, "reference"))
    x_TM = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(6)).bfloat16()
    live_T = torch.arange(tokens) != tokens - 1 if tokens > 1 else None  # the last belongs to no request
    want, _ = layer(spec, "plain", references)(norm(), x_TM, None, live_T)
    got, _ = prepare(layer(spec, name))(norm(), x_TM, None, live_T)
    assert got.dtype == torch.bfloat16
    assert got.shape == want.shape
    assert (got.float() - want.float()).norm() < ERRORS[name] * want.float().norm()
    if live_T is not None and kind != "shared":
        assert not got[-1].any()


@pytest.mark.parametrize("name", SCHEMES_HERE)
def test_what_experts_take_is_counted(name: str) -> None:
    numbers = EXPERTS * 3 * WIDTH * SPEC.intermediate_size
    rows = EXPERTS * (2 * SPEC.intermediate_size + WIDTH)
    made = prepare(layer(SPEC, name))
    held = sum(p.nbytes for p in (made.gate_up.weight, made.down.weight) if p is not None)
    taken = held + made.gate_up.prepared_bytes + made.down.prepared_bytes
    scale_bytes = {"plain": 0, "int8": 2, "w8a8": 4}[name]
    least = numbers * (SCHEMES[name].weight_bytes or 2) + rows * scale_bytes
    # Blocks are filled up: oneDNN's to 64 columns and 64 rows at most, panels to 32 rows
    assert least <= taken <= 1.5 * least


@pytest.mark.parametrize("name", SCHEMES_HERE)
def test_a_token_does_not_depend_on_those_beside_it(name: str) -> None:
    """Up to the rounding of products with more rows, which may add up in another order."""
    made = prepare(layer(SPEC, name))
    x_TM = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(7)).bfloat16()
    together, _ = made(norm(), x_TM, None)
    for token in range(9):
        alone, _ = made(norm(), x_TM[token : token + 1], None)
        torch.testing.assert_close(alone[0], together[token], rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_experts_are_laid_out_in_panels_where_cpp_multiplies_them(dtype: torch.dtype) -> None:
    """In the two dtypes that it takes. The torch implementation gets float32 as it was loaded."""
    made = prepare(layer(SPEC, "plain", dtype=dtype))
    compiled = has_byte_products(HERE) and functions() is not None
    for stack in (made.gate_up, made.down):
        assert isinstance(stack.matrices, ExpertPanels) == (compiled and dtype != torch.float16)
    asked = prepare(layer(SPEC, "plain", Ops(HERE, {"grouped_gate_up": "torch", "grouped_down": "torch"}), dtype))
    assert not isinstance(asked.gate_up.matrices, ExpertPanels)
    assert (asked.gate_up.weight is not None) == (asked.gate_up.prepared_bytes == 0)
    assert asked.gate_up.weight is not None or dtype != torch.float32


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what the process holds")
@pytest.mark.parametrize("name", [name for name in SCHEMES_HERE if name != "plain"])
def test_stacks_in_another_form_take_no_more_memory_than_they_say(name: str) -> None:
    """Packed matrix by matrix, and each matrix has temporaries, whose memory must not stay between them."""
    build = Build(Ops(HERE), torch.bfloat16, CPU, everywhere(scheme(name)))
    stacks = [ExpertStack(64, 1024, (384, 384), False, build).requires_grad_(False) for _ in range(3)]
    for stack in stacks:
        assert stack.weight is not None
        stack.weight.zero_()
    before, loaded = resident(), sum(stack.weight.nbytes for stack in stacks if stack.weight is not None)
    for stack in stacks:
        stack.prepare()
    held = sum(stack.prepared_bytes for stack in stacks)
    assert 0.49 * loaded < held < 0.52 * loaded
    # glibc may keep 32 MB of what earlier tests and these temporaries let go
    assert resident() - before < held - loaded + 0.1 * loaded + (32 << 20)


def test_only_full_pages_become_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are (address, bytes) here, in units of a quarter of a page."""
    part, asked = LARGE_PAGE // 4, list[int]()
    monkeypatch.setattr(onednn, "address", lambda matrix: matrix[0] * part)
    monkeypatch.setattr(onednn, "num_bytes", lambda matrix: matrix[1] * part)
    monkeypatch.setattr(onednn, "_ask_for_large_pages", lambda first, end: asked.extend((first, end)))
    close = [(2, 3), (5, 3), (8, 6)]  # from the middle of page 0 to the middle of page 3
    apart = [(40, 1), (42, 1), (44, 3), (48, 4)]  # half of page 10, three quarters of page 11, all of page 12
    onednn.together_in_large_pages([*apart, *close])  # type: ignore[list-item]
    assert asked == [n * LARGE_PAGE for n in (1, 2, 2, 3, 12, 13)]


@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
def test_kernels_multiply_a_stack_in_fp8_and_torch_its_matrices(name: str) -> None:
    """E4M3 has a step of an eighth at most, so its error is 2^-4 / sqrt(3) = 3.6 % of a weight or less, and 2.6 % on
    average over a binade. Three products and two rounded activations come to 5 %."""
    pytest.importorskip("triton")
    exact = {"fp8_linear": "reference"}  # or a CPU would hold plain numbers
    kernels = Ops(HERE, {"grouped_gate_up": "triton", "grouped_down": "triton", **exact})
    x_TM = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    want_TM, _ = layer(SPEC, "plain", dtype=torch.float32)(norm(torch.float32), x_TM, None)
    for ops, form in ((kernels, StackedWeights), (Ops(HERE, exact), ListedWeights)):
        made = layer(SPEC, name, ops, torch.float32)
        plain = made.gate_up.weight.nbytes
        prepare(made)
        assert isinstance(made.gate_up.matrices, form)
        assert isinstance(made.down.matrices, form)
        assert plain / 4 < made.gate_up.prepared_bytes < plain / 3
        got_TM, _ = made(norm(torch.float32), x_TM, None)
        assert (got_TM - want_TM).norm() / want_TM.norm() < 0.08


@pytest.mark.parametrize(
    ("how", "kept"), [(MXFP4, True), (NF4, True), (W4, True), (MXFP8, False), (replace(NF4, values="fp4"), False)]
)
def test_a_cpu_keeps_codes_that_its_panels_hold(how: CodedFormat, kept: bool) -> None:
    """Others would become plain numbers one by one behind the loader, which no plan of the memory knows."""
    ops, held = Ops(HERE), Held(format=how, scales="uint8")
    ops.chosen["coded_linear"] = "panels"
    form = HeldMatrix(helds=(held, held), rows=(96, 96), inputs=64, copies=EXPERTS)
    assert runs_well(form, ops) == kept


def test_codes_of_a_stack_are_in_the_order_in_which_kernels_of_stacks_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a single matrix is put in another order, which kernels of stacks would take for this one."""
    pytest.importorskip("triton")
    monkeypatch.setattr("ridgeline.kernels.gemm.codes.triton.compute_capability", lambda device: (9, 0))
    ops = Ops(Platform(device_type="cuda", arch="sm_90"))
    weight_EOI = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = prepare_experts(StackedWeights(ops, weight_EOI), scheme("w4a16"))
    assert isinstance(made, StackedWeights)
    assert type(made.weight) is Coded
    error = made.weight.dequantized() - weight_EOI.float()
    assert error.norm() / weight_EOI.float().norm() < 0.12


def test_a_stack_in_codes_is_listed_where_no_kernel_multiplies_it() -> None:
    pytest.importorskip("triton")
    case = ExpertsCase(6, 64, 64, experts=4, used=2, format=MXFP4, scales=torch.uint8)
    x_TM, weight, bias_EG, routes, gate = case.gate_up_inputs(torch.float32, CPU)
    kernels = Ops(HERE, {"grouped_gate_up": "triton", "grouped_down": "triton"})
    stack = StackedWeights(kernels, weight)
    assert prepare_experts(stack, scheme(None)) == stack
    one_by_one = Ops(HERE, {"coded_linear": "reference"})  # others may round activations
    listed = prepare_experts(StackedWeights(one_by_one, weight), scheme(None))
    assert isinstance(listed, ListedWeights)
    assert listed.nbytes == stack.nbytes
    want_PF = stack.gate_up(x_TM, bias_EG, routes, gate)
    torch.testing.assert_close(listed.gate_up(x_TM, bias_EG, routes, gate), want_PF, rtol=1e-4, atol=1e-4)
