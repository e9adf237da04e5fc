"""Routing and experts' products in C++, beside their references.

The references compute in float32. Sums of I products in another order differ by I · 2**-24 times their size, which is
about one. Activations and results differ by some float32 roundings, and in bfloat16 by one rounding of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.core.specs.experts import RoutingSpec
from ridgeline.kernels.base import native
from ridgeline.kernels.base.op import Platform, has_byte_products
from ridgeline.kernels.gemm.experts import cases as grouped_cases
from ridgeline.kernels.gemm.experts import op as grouped
from ridgeline.kernels.gemm.experts import panels
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.route import cases as routing_cases
from ridgeline.kernels.gemm.route import native as implementation
from ridgeline.kernels.gemm.route import op as routing
from ridgeline.kernels.gemm.route import torch_ops
from ridgeline.kernels.gemm.route.cases import RouteCase

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
needs_compiler = pytest.mark.skipif(
    not (has_byte_products(Platform(device_type="cpu")) and native.has_compiler()),
    reason="no C++ compiler, or a CPU without AVX2",
)
EXPERTS = (
    *grouped_cases.CASES,
    ExpertsCase(2, 64, 34, experts=4, used=2, bias=True, gate="gelu"),  # two outputs of a last panel
    ExpertsCase(6, 30, 16, experts=8, used=2, add=True, dead=6),  # no token goes to an expert
    ExpertsCase(40, 64, 50, experts=3, used=3, bias=True, add=True, dead=11),  # more rows than are multiplied at once
)
ROUTED = (
    *routing_cases.CASES,
    RouteCase(1, 64, RoutingSpec(experts=48, top_k=5, groups=6, top_groups=2, scale=1.5, expert_scale=True)),
    RouteCase(5, 72, replace(routing_cases.GROUPED, score="softmax"), dead=5),
    RouteCase(2, 50, RoutingSpec(experts=3, top_k=3, score="sigmoid", correction=True), residual=False),
    RouteCase(0, 64, routing_cases.SOFTMAX),
)


@pytest.fixture(scope="module", params=["native", "haswell"])
def target(request: pytest.FixtureRequest) -> str:
    """This machine, and one with AVX2 alone: it has no products of bfloat16."""
    found: str = request.param
    return found


def laid_out(weight_EOI: Tensor, gated: bool, target: str = "native") -> panels.ExpertPanels:
    packed = panels.pack(weight_EOI, gated, panels.functions(target))
    assert packed is not None
    return packed


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_products_are_those_of_the_reference(case: ExpertsCase, dtype: torch.dtype, target: str) -> None:
    x_TM, weight_EGM, bias_EG, routes, gate = case.gate_up_inputs(dtype, CPU)
    assert isinstance(weight_EGM, Tensor)
    x_TM[case.tokens - case.dead :] = torch.nan  # tokens that go nowhere
    computed = int(routes.start_E1[-1])
    got_PF = laid_out(weight_EGM, gate != "relu2", target).gate_up(x_TM, bias_EG, routes, gate)
    want_PF = grouped.grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate)
    assert got_PF.shape == want_PF.shape
    eps = torch.finfo(dtype).eps
    near = {"rtol": eps + 2.0**-20, "atol": 8 * case.width * 2.0**-24}
    torch.testing.assert_close(got_PF[:computed], want_PF[:computed], **near)
    h_PF, weight_EMF, bias_EM, _, add_TM = case.down_inputs(dtype, CPU)
    assert isinstance(weight_EMF, Tensor)
    h_PF[computed:] = torch.nan
    routes.weight_TK[case.tokens - case.dead :] = torch.nan
    got_TM = laid_out(weight_EMF, False, target).down(h_PF, bias_EM, routes, add_TM)
    want_TM = grouped.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM)
    torch.testing.assert_close(got_TM, want_TM, rtol=eps + 2.0**-20, atol=8 * case.inner * 2.0**-24)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(dtype: torch.dtype, target: str) -> None:
    """The same tokens alone, and among others of the same experts, on one thread and on three."""
    case = ExpertsCase(70, 64, 48, experts=4, used=2, add=True)
    x_TM, up_EGM, *_ = case.gate_up_inputs(dtype, CPU)
    _, down_EMF, _, _, add_TM = case.down_inputs(dtype, CPU)
    assert isinstance(up_EGM, Tensor)
    assert isinstance(down_EMF, Tensor)
    first, second = laid_out(up_EGM, True, target), laid_out(down_EMF, False, target)
    router_EM = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    router = routing.Router(router_EM, None, None, None, RoutingSpec(experts=4, top_k=2))
    norm_weight_M, function = torch.ones(64), implementation.function(target)
    assert add_TM is not None

    def outputs(tokens: int) -> Tensor:
        n_TM, _, routes = implementation.route(
            x_TM[:tokens], None, norm_weight_M, 1e-6, router, None, None, compiled=function
        )
        return second.down(first.gate_up(n_TM, None, routes, "silu"), None, routes, add_TM[:tokens])

    everyone, threads = outputs(case.tokens), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for tokens in (1, 3, 33, 70):
            assert torch.equal(outputs(tokens), everyone[:tokens])
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh", "swiglu_clamped", "relu2"])
def test_activations_of_large_and_small_numbers_are_those_of_the_reference(gate: str, target: str) -> None:
    """One input, and matrices of one number, make any pair of gate and up."""
    value_T = torch.tensor([0.0, -0.0, 1e-30, -1e-4, 0.3, -7.5, 20.0, -60.0, 87.0, -87.3, -104.0, 3e38, torch.nan])
    weight_EGM = torch.ones(1, 2 if gate != "relu2" else 1, 1)
    weight_EGM[:, 1:] = 0.5
    case = ExpertsCase(len(value_T), 1, 1, experts=1, used=1)
    arguments = (value_T[:, None], weight_EGM, None, case.routes(CPU), gate)
    got_PF = laid_out(weight_EGM, gate != "relu2", target).gate_up(arguments[0], None, *arguments[3:])
    want_PF = grouped.grouped_gate_up(*arguments)
    # Where a sigmoid is nearly 0, it is off by a relative error of the exponent's, which is 2**-24 of up to 104
    torch.testing.assert_close(got_PF, want_PF, rtol=1e-5, atol=1e-6, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("gated", [True, False])
def test_many_pairs_of_each_expert_are_left_to_tiles(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that has them: the matrices come out of the panels as they went in."""
    weight_EOI = torch.randn(3, 40, 22).bfloat16()
    packed = laid_out(weight_EOI, gated)
    assert all(torch.equal(packed.matrix(e), weight_EOI[e]) for e in range(3))
    monkeypatch.setattr(panels, "has_tiles", lambda: True)
    monkeypatch.setattr(panels, "MANY", 2)
    monkeypatch.setattr(panels.ExpertPanels, "_run", None)  # which must not be called
    case = ExpertsCase(6, 22, 20, experts=3, used=1)
    if gated:
        packed.gate_up(torch.randn(6, 22).bfloat16(), None, case.routes(CPU), "silu")
    else:
        packed.down(torch.randn(6, 22).bfloat16(), None, case.routes(CPU), None)


def same_routes(got: routing.Routes, want: routing.Routes) -> None:
    for name in ("expert_TK", "token_P", "place_TK", "start_E1"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype == torch.int32, name
        assert torch.equal(mine, theirs), name
    assert got.weight_TK.dtype == torch.float32
    # Two float32 softmaxes and divisions, a few roundings each
    torch.testing.assert_close(got.weight_TK, want.weight_TK, rtol=1e-5, atol=1e-6, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("case", ROUTED, ids=str)
def test_tokens_are_routed_as_by_the_reference(case: RouteCase, dtype: torch.dtype, target: str) -> None:
    """A normalised value may be rounded otherwise, so the routes are compared with those of the n at hand."""
    inputs, tally_E = case.inputs(dtype, CPU), torch.zeros(case.how.experts, dtype=torch.int64)
    n_TM, s_TM, got = implementation.route(*inputs, compiled=implementation.function(target))
    want_n_TM, want_s_TM, _ = routing.route(*inputs[:-1], None)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(n_TM, want_n_TM, rtol=2 * eps, atol=eps)
    assert torch.equal(s_TM, want_s_TM)
    same_routes(got, routing.route(n_TM, None, None, 0.0, inputs[4], inputs[5], tally_E)[2])
    assert torch.equal(inputs[-1], tally_E)


@needs_compiler
@pytest.mark.parametrize(
    "how", [routing_cases.SOFTMAX, routing_cases.GROUPED, replace(routing_cases.GROUPED, score="softmax")], ids=str
)
def test_equal_scores_and_nan_are_routed_as_by_the_reference(how: RoutingSpec, target: str) -> None:
    """A router of zeros gives equal scores to all experts; a NaN in a token makes all of its scores NaN."""
    x_TM = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    x_TM[2, 5] = torch.nan
    router_EM = torch.randn(how.experts, 32, generator=torch.Generator().manual_seed(1))
    router_EM[: how.experts // 2] = 0
    correction_E = torch.zeros(how.experts) if how.correction else None
    arguments = (x_TM, None, None, 0.0, routing.Router(router_EM, None, correction_E, None, how), None, None)
    got = implementation.route(*arguments, compiled=implementation.function(target))[2]
    same_routes(got, routing.route(*arguments)[2])
    assert got.weight_TK[2].isnan().all()
    assert not got.weight_TK[[0, 1, 3, 4, 5]].isnan().any()


@needs_compiler
def test_a_gradient_is_left_to_torch() -> None:
    inputs = RouteCase(3, 32, routing_cases.SOFTMAX).inputs(torch.float32, CPU)
    leaves = [inputs[0].requires_grad_(), inputs[4].weight_EM.requires_grad_()]
    (n_TM, _, routes), tally_E = implementation.route(*inputs), inputs[-1].clone()
    (n_TM.square().sum() + routes.weight_TK.square().sum()).backward()
    assert all(leaf.grad is not None for leaf in leaves)
    with torch.no_grad():
        assert not implementation.route(*inputs)[0].requires_grad
    assert torch.equal(inputs[-1], 2 * tally_E)


@pytest.fixture
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a compiler and without what it compiled before."""
    caches = (native._folder, native.library, panels.functions, implementation.function)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("nothing_compiled")
def test_without_a_compiler_torch_routes_and_nothing_is_laid_out() -> None:
    assert panels.pack(torch.zeros(2, 32, 8), True) is None
    case = routing_cases.CASES[0]
    got, want = (f(*case.inputs(torch.float32, CPU)) for f in (implementation.route, torch_ops.route))
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got[2], want[2], strict=True))


@needs_compiler
def test_what_cpp_could_not_read_is_refused() -> None:
    case = ExpertsCase(3, 32, 16, experts=4, used=2)
    x_TM, weight_EGM, _, routes, gate = case.gate_up_inputs(torch.float32, CPU)
    assert isinstance(weight_EGM, Tensor)
    assert panels.pack(weight_EGM.half(), True) is None
    assert panels.pack(weight_EGM[:, :, :31].bfloat16(), True) is None, "pairs of inputs"
    packed = laid_out(weight_EGM, True)
    with pytest.raises(ValueError, match=r"needs torch.float32 \[3, 32\] on a CPU, got torch.bfloat16"):
        packed.gate_up(x_TM.bfloat16(), None, routes, gate)
    with pytest.raises(ValueError, match="laid out to be gated"):
        packed.gate_up(x_TM, None, routes, "relu2")
    with pytest.raises(ValueError, match="those of 8 experts, not of 4"):
        packed.gate_up(x_TM, None, replace(case, experts=8).routes(CPU), gate)
