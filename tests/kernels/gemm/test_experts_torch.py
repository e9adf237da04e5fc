"""Routing and experts' products in plain torch, beside their references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.core.specs.experts import RoutingSpec
from ridgeline.kernels.gemm.experts import cases as grouped_cases
from ridgeline.kernels.gemm.experts import op as grouped
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.torch_ops import grouped_down, grouped_gate_up
from ridgeline.kernels.gemm.route import cases as routing_cases
from ridgeline.kernels.gemm.route import op as routing
from ridgeline.kernels.gemm.route.cases import RouteCase
from ridgeline.kernels.gemm.route.torch_ops import route

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def same_routes(got: routing.Routes, want: routing.Routes) -> None:
    for name in ("expert_TK", "token_P", "place_TK", "start_E1"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype == torch.int32, name
        assert torch.equal(mine, theirs), name
    assert got.weight_TK.dtype == torch.float32
    # Two float32 softmaxes and divisions, a few roundings each
    torch.testing.assert_close(got.weight_TK, want.weight_TK, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("case", routing_cases.CASES, ids=str)
def test_tokens_are_routed_as_by_the_reference(case: RouteCase) -> None:
    got_inputs, want_inputs = case.inputs(torch.float32, CPU), case.inputs(torch.float32, CPU)
    got, want = route(*got_inputs), routing.route(*want_inputs)
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(got[1], want[1])
    same_routes(got[2], want[2])
    assert torch.equal(got_inputs[-1], want_inputs[-1])
    assert got_inputs[-1].sum() == (case.tokens - case.dead) * case.how.top_k


@pytest.mark.parametrize(
    "how", [routing_cases.SOFTMAX, routing_cases.GROUPED, replace(routing_cases.GROUPED, score="softmax")], ids=str
)
def test_equal_scores_and_nan_are_routed_as_by_the_reference(how: RoutingSpec) -> None:
    """A router of zeros gives equal scores to all experts; a NaN in a token makes all of its scores NaN."""
    x_TM = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    x_TM[2, 5] = torch.nan
    router_EM = torch.randn(how.experts, 32, generator=torch.Generator().manual_seed(1))
    router_EM[: how.experts // 2] = 0
    correction_E = torch.zeros(how.experts) if how.correction else None
    arguments = (x_TM, None, None, 0.0, routing.Router(router_EM, None, correction_E, None, how), None, None)
    (*_, got), (*_, want) = route(*arguments), routing.route(*arguments)
    same_routes(got, want)
    assert got.expert_TK[2].tolist() == list(range(how.top_k))
    assert got.weight_TK[2].isnan().all()
    assert not got.weight_TK[[0, 1, 3, 4, 5]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", grouped_cases.CASES, ids=str)
def test_experts_products_are_those_of_the_reference(case: ExpertsCase, dtype: torch.dtype) -> None:
    """Products are rounded to the dtype once before the activation and once before the sum over experts."""
    eps = torch.finfo(dtype).eps
    first = case.gate_up_inputs(dtype, CPU)
    got, want = grouped_gate_up(*first), grouped.grouped_gate_up(*first)
    computed = int(first[3].start_E1[-1])
    near = {"rtol": 8 * eps, "atol": 8 * eps + case.width * 2.0**-24}
    torch.testing.assert_close(got[:computed], want[:computed], **near)
    second = case.down_inputs(dtype, CPU)
    near = {"rtol": 8 * eps, "atol": 8 * eps + case.inner * 2.0**-24}
    torch.testing.assert_close(grouped_down(*second), grouped.grouped_down(*second), **near)


def test_tokens_without_experts_get_the_addend_alone() -> None:
    case = next(case for case in grouped_cases.CASES if case.add)
    case = replace(case, dead=case.tokens)
    x_TM, weight_EGM, bias_EG, routes, gate = case.gate_up_inputs(torch.float32, CPU)
    h_PF = grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate)
    _, weight_EMF, _, _, add_TM = case.down_inputs(torch.float32, CPU)
    assert torch.equal(grouped_down(h_PF, weight_EMF, None, routes, add_TM), add_TM)
    assert not grouped_down(h_PF, weight_EMF, None, routes, None).any()
