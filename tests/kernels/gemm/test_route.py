"""Routing: every cut of both kernels against the reference.

A normalised value may be rounded otherwise than the reference's, which can change the choice between two experts that
are nearly equal. So n and s are compared with the reference's, and the routes with those that the reference finds for
the n at hand. Sums of M products of order one, in another order, then differ by M · 2**-24 at most, and so do weights.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.core.specs.experts import RoutingSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.route.cases import CASES, GROUPED, QWEN3, RouteCase
from ridgeline.kernels.gemm.route.choose import Few, Many, choose
from ridgeline.kernels.gemm.route.cost import route_cost
from ridgeline.kernels.gemm.route.op import ORDER_PAIRS, ROUTE, ROUTE_TO_SOME, Routes, in_order

pytest.importorskip("triton")

from ridgeline.kernels.gemm.route import triton as implementation

CPU = torch.device("cpu")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
DEVICES = [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # the interpreter is slow
BY_MAX = RoutingSpec(experts=48, top_k=5, groups=6, top_groups=2, scale=1.5, expert_scale=True)  # 8 of a group
MORE = (
    RouteCase(1, 64, BY_MAX, residual=False, norm=False),
    RouteCase(5, 72, BY_MAX, dead=5),
    RouteCase(2, 64, RoutingSpec(experts=3, top_k=3, score="sigmoid", correction=True)),
    RouteCase(66, 40, RoutingSpec(experts=72, top_k=9, renormalize=True), norm=False, residual=False, dead=60),
    RouteCase(70, 64, RoutingSpec(experts=160, top_k=6, groups=8, top_groups=3, scale=16.0), residual=False),
    RouteCase(2, 64, RoutingSpec(experts=300, top_k=32, score="sigmoid", renormalize=True), dead=1),
)
GROUPED_256 = replace(GROUPED, experts=256, top_k=8, top_groups=4)
REAL = (
    *(RouteCase(t, 2048, QWEN3, dead=t // 5, exact=True) for t in (1, 8, 64, 65, 128, 200, 256, 8192, 16_384)),
    *(RouteCase(t, 7168, GROUPED_256, exact=True) for t in (1, 20, 3000)),
    *(RouteCase(t, 4096, RoutingSpec(experts=8, top_k=2, renormalize=True), exact=True) for t in (1, 64, 8192)),
    *(RouteCase(t, 2048, RoutingSpec(experts=512, top_k=10), exact=True) for t in (3, 16, 16_384)),
)
WITH_DEVICES = [
    *(pytest.param(case, "cpu", marks=ON_CPU) for case in (*CASES, *MORE)),
    *(pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in (*CASES, *MORE)),
]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds what no result may be: what a kernel leaves unwritten, or reads before writing, shows."""
    empty = torch.empty

    def full(*shape: object, **options: object) -> Tensor:
        fresh = empty(*shape, **options)  # type: ignore[call-overload]
        return fresh.fill_(torch.nan if fresh.is_floating_point() else -1_000_000)

    monkeypatch.setattr(torch, "empty", full)


def assert_routes(got: Routes, want: Routes, width: int) -> None:
    for field in ("expert_TK", "token_P", "place_TK", "start_E1"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    tolerance = 8 * 2.0**-24 + 4 * width * 2.0**-24  # relative: weights are scores, whose logits are sums of M products
    torch.testing.assert_close(got.weight_TK, want.weight_TK, rtol=tolerance, atol=1e-30, equal_nan=True)


def check(name: str, case: RouteCase, dtype: torch.dtype, device: str, **options: object) -> None:
    case = replace(case, exact=case.exact or case.tokens > 64)
    arguments = case.inputs(dtype, torch.device(device))
    tally_E, want_E = arguments[-1], torch.full_like(arguments[-1], 1 << 40)
    tally_E += 1 << 40
    n_TM, s_TM, routes = ROUTE.choose(Platform.of(torch.device(device)), name)(*arguments, **options)
    want_n, want_s, _ = ROUTE.reference(*arguments[:-1], None)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(s_TM, want_s, rtol=eps, atol=eps)
    torch.testing.assert_close(n_TM, want_n, rtol=4 * eps, atol=4 * eps)
    _, _, wanted = ROUTE.reference(n_TM, None, None, 0.0, *arguments[4:-1], want_E)
    assert not wanted.weight_TK.isnan().any()  # else all tokens would go to the first experts
    assert_routes(routes, wanted, case.width)
    assert torch.equal(tally_E, want_E)


@pytest.mark.few(15)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "device"), WITH_DEVICES, ids=str)
@pytest.mark.parametrize("name", ["triton", "batch_invariant"])
def test_routes_are_those_of_the_reference(name: str, case: RouteCase, device: str, dtype: torch.dtype) -> None:
    check(name, case, dtype, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("name", ["triton", "batch_invariant"])
def test_routes_of_real_shapes(name: str, case: RouteCase) -> None:
    check(name, case, torch.bfloat16, "cuda")


EVERY = (*range(1, 71), *range(120, 131), *range(250, 259))
SOME = (1, 5, 17, 64, 65, 129)  # an interpreted launch takes a second


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("device", "sizes"),
    [pytest.param("cpu", SOME, marks=ON_CPU), pytest.param("cuda", EVERY, marks=pytest.mark.gpu)],
    ids=["cpu", "cuda"],
)
def test_launches_of_all_sizes_leave_nothing_behind(sizes: tuple[int, ...], device: str) -> None:
    """Any tokens may be dead. What one launch leaves in the memory that all use, the next would find."""
    how = RoutingSpec(experts=20, top_k=3, renormalize=True)
    generator = torch.Generator().manual_seed(5)
    for tokens in sizes:
        plan = choose(tokens, 64, how.experts)
        cuts = (
            [plan] if isinstance(plan, Many) or plan.group >= tokens else [plan, replace(plan, each=4, rows=8, group=4)]
        )
        for cut in cuts:
            case = RouteCase(tokens, 64, how, residual=False, exact=True)
            arguments = list(case.inputs(_dtype_of(cut), torch.device(device), tokens))
            arguments[5] = (torch.rand(tokens, generator=generator) < 0.7).to(device)
            wanted = ROUTE.reference(*arguments[:-1], None)[2]
            assert_routes(implementation.route(*arguments, plan=cut)[2], wanted, 64)
            assert torch.equal(arguments[-1], wanted.start_E1.diff()), tokens
            assert not any(left.any() for left in implementation.meeting(torch.device(device)))


CUTS = (
    Few(rows=2, each=1, block=256, tokens=8, experts=128, group=1, warps=1),
    Few(rows=4, each=2, block=512, tokens=16, experts=128, group=4, warps=4),
    Few(rows=8, each=4, block=256, tokens=8, experts=256, group=8, warps=8),
    Few(rows=64, each=4, block=256, tokens=128, experts=128, group=16, warps=8),
    Few(rows=16, each=8, block=256, tokens=8, experts=128, group=8, warps=4, matrix=True),
    Few(rows=32, each=8, block=256, tokens=256, experts=128, group=8, warps=8, matrix=True),
    Many(tokens=16, experts=128, block=32, warps=4, stages=2, programs=1),
    Many(tokens=32, experts=256, block=128, warps=8, stages=3),
)


def _dtype_of(cut: Few | Many) -> torch.dtype:
    """Return a type that the units multiply which a cut is for."""
    return torch.bfloat16 if isinstance(cut, Few) and cut.matrix else torch.float32


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", CUTS, ids=str)
def test_every_cut_routes(plan: Few | Many, device: str) -> None:
    check("triton", RouteCase(7, 200, QWEN3, dead=1), _dtype_of(plan), device, plan=plan)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [12, 80])
def test_the_first_of_equal_scores_is_chosen(tokens: int, device: str) -> None:
    """Whatever the order of the scores: every expert occurs four times."""
    case = RouteCase(tokens, 64, RoutingSpec(experts=32, top_k=6, renormalize=True), residual=False, norm=False)
    arguments = list(case.inputs(torch.float32, torch.device(device)))
    weight_EM = arguments[4].weight_EM[torch.arange(32, device=device) // 4].contiguous()
    arguments[4] = arguments[4]._replace(weight_EM=weight_EM)
    expert_TK = implementation.route(*arguments)[2].expert_TK
    assert (expert_TK[:, :4] % 4 == torch.arange(4, device=device)).all()
    assert (expert_TK[:, 4:] % 4 == torch.arange(2, device=device)).all()
    assert (expert_TK[:, 0] // 4 != expert_TK[:, 4] // 4).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [6, 70])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_token_of_nan_goes_to_the_first_experts_with_weights_nan(score: str, tokens: int, device: str) -> None:
    how = RoutingSpec(experts=40, top_k=3, score=score, renormalize=True)  # type: ignore[arg-type]
    arguments = RouteCase(tokens, 64, how, dead=1).inputs(torch.float32, torch.device(device))
    arguments[0][[2, tokens - 1], 5] = torch.nan
    n_TM, _, routes = implementation.route(*arguments)
    assert_routes(routes, ROUTE.reference(n_TM, None, None, 0.0, *arguments[4:-1], None)[2], 64)
    assert routes.expert_TK[2].tolist() == [0, 1, 2]
    assert routes.weight_TK[2].isnan().all()
    assert routes.weight_TK.isnan().any(1).sum() == 2
    assert routes.expert_TK[-1].tolist() == [40, 40, 40]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(4, 8))])
def test_routes_of_random_rules(seed: int) -> None:
    """Both kernels under rules that no case above has."""
    drawn = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=drawn))

    groups, size = pick(1, 6), pick(2, 30)
    top_groups = pick(1, groups)
    how = RoutingSpec(
        experts=groups * size,
        top_k=pick(1, min(32, top_groups * size)),
        score="sigmoid" if pick(0, 1) else "softmax",
        renormalize=bool(pick(0, 1)),
        scale=pick(1, 4) / 2,
        groups=groups,
        top_groups=top_groups,
        group_score="top2" if pick(0, 1) else "max",
        bias=bool(pick(0, 1)),
        correction=bool(pick(0, 1)),
        expert_scale=bool(pick(0, 1)),
    )
    tokens = pick(1, 40)
    case = RouteCase(tokens, 8 * pick(1, 12), how, bool(pick(0, 1)), bool(pick(0, 1)), dead=pick(0, tokens))
    check("triton", case, torch.float32, "cpu" if not torch.cuda.is_available() else "cuda")
    check("batch_invariant", case, torch.float32, "cpu" if not torch.cuda.is_available() else "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(device: str) -> None:
    arguments = RouteCase(90, 200, QWEN3).inputs(torch.float32, torch.device(device))
    all_of_them = implementation.batch_invariant(*arguments)[2]
    for first, end in ((0, 1), (3, 10), (20, 90)):
        part = [a[first:end] for a in arguments[:2]]
        routes = implementation.batch_invariant(*part, *arguments[2:])[2]
        assert torch.equal(routes.expert_TK, all_of_them.expert_TK[first:end])
        assert torch.equal(routes.weight_TK, all_of_them.weight_TK[first:end])


@pytest.mark.parametrize(("fixed", "hopper"), [(False, False), (False, True), (True, True)])
def test_every_cut_chosen_can_be_launched(fixed: bool, hopper: bool) -> None:
    for tokens in (1, 2, 3, 5, 16, 33, 64, 65, 200, 300, 5000, 16_384):
        for width in (64, 1024, 2880, 4096, 7168):
            for experts in (2, 8, 60, 128, 160, 256, 512):
                plan = choose(tokens, width, experts, fixed=fixed, hopper=hopper)
                assert plan.experts >= experts
                assert all(size & (size - 1) == 0 for size in (plan.tokens, plan.experts, plan.block, plan.warps))
                chosen_at_once = plan.group if isinstance(plan, Few) else plan.tokens
                assert chosen_at_once * plan.experts <= 8192
                if isinstance(plan, Few):
                    assert plan.tokens >= tokens
                    assert plan.block >= width
                    kept, times = (256, 1) if plan.matrix else (128, 2)  # operands of 16 bits share a register
                    assert max(plan.rows, times * plan.each) * plan.block <= kept * 32 * plan.warps
                    assert plan.group >= max(plan.each, plan.warps)
                    assert not plan.matrix or plan.rows % 16 == plan.each % 8 == plan.block // plan.slices % 16 == 0
                else:
                    assert tokens > 16 or fixed
                if isinstance(plan, Few) and plan.matrix:
                    assert hopper
                    assert not fixed
                    assert tokens == 200 or (tokens in (64, 65) and experts > 64)
    assert len({choose(tokens, 2048, 128, fixed=True) for tokens in (1, 64, 500, 16_384)}) == 1


def test_a_gradient_is_left_to_torch() -> None:
    arguments = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
                 for a in CASES[0].inputs(torch.float32, CPU)]  # fmt: skip
    arguments[4].weight_EM.requires_grad_()
    n_TM, s_TM, routes = implementation.route(*arguments)
    (n_TM.sum() + s_TM.sum() + routes.weight_TK.square().sum()).backward()
    assert all(a.grad is not None for a in arguments[:3] if isinstance(a, Tensor))
    assert arguments[4].weight_EM.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_a_captured_graph_routes_other_data(tokens: int) -> None:
    case = RouteCase(tokens, 2048, QWEN3, dead=tokens // 4, exact=True)
    arguments = case.inputs(torch.bfloat16, torch.device("cuda"))
    implementation.route(*arguments)  # makes the memory where programs meet
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        n_TM, _, routes = implementation.route(*arguments)
    for seed in range(1, 20):
        other = case.inputs(torch.bfloat16, torch.device("cuda"), seed)
        for mine, theirs in zip((*arguments, *arguments[4]), (*other, *other[4]), strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(theirs)
        graph.replay()
        want_E = torch.zeros_like(arguments[-1])
        wanted = ROUTE.reference(n_TM, None, None, 0.0, *arguments[4:-1], want_E)[2]
        assert_routes(routes, wanted, case.width)
        assert torch.equal(arguments[-1], want_E)


def test_a_route_moves_less_than_a_norm_and_a_product() -> None:
    """x, the residual, their sum and n, the norm's weight, the router, and four numbers for each pair."""
    fused = route_cost(3, 64, 16, 2, itemsize=2)
    assert fused.bytes == 2 * (4 * 3 * 64 + 64 + 16 * 64) + 4 * (4 * 3 * 2 + 17)
    plain = route_cost(3, 64, 16, 2, itemsize=2, norm=False)
    assert plain.bytes == 2 * (3 * 64 + 16 * 64) + 4 * (4 * 3 * 2 + 17)
    assert plain.flops == 2 * 3 * 64 * 16
    assert route_cost(0, 64, 16, 2, itemsize=2).bytes == 0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(("tokens", "used", "ranks"), [(1, 2, 4), (7, 3, 2), (600, 4, 3)])
def test_a_ranks_own_experts_take_their_tokens(tokens: int, used: int, ranks: int, name: str, device: str) -> None:
    """The pairs that a rank computes are those of its experts, in order, whatever becomes of the others."""
    experts, count = 12, 12 // ranks
    generator = torch.Generator().manual_seed(tokens)
    expert_TK = torch.rand(tokens, experts + 1, generator=generator).topk(used).indices  # 12: goes nowhere
    routes = in_order(expert_TK.int(), torch.rand(tokens, used), experts)
    routes = Routes(*(tensor.to(device) for tensor in routes))
    to_some = ROUTE_TO_SOME.choose(Platform.of(torch.device(device)), name)
    for first in range(0, experts, count):
        own = to_some(routes, first, count)
        pairs = [(e - first, t, k) for t, row in enumerate(expert_TK.tolist()) for k, e in enumerate(row)]
        wanted = sorted(pair for pair in pairs if 0 <= pair[0] < count)
        assert own.start_E1.tolist() == [sum(e < edge for e, _, _ in wanted) for edge in range(count + 1)]
        assert own.token_P[: len(wanted)].tolist() == [t for _, t, _ in wanted]
        assert [int(own.place_TK[t, k]) for _, t, k in wanted] == [*range(len(wanted))]
        assert sorted(own.place_TK.flatten().tolist()) == [*range(tokens * used)]
        assert torch.equal(own.weight_TK, routes.weight_TK)
        here = [[e - first if 0 <= e - first < count else count for e in row] for row in expert_TK.tolist()]
        assert own.expert_TK.tolist() == here
        assert {field.dtype for field in own} == {torch.int32, torch.float32}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(
    ("tokens", "used", "count"),
    [(0, 2, 4), (1, 8, 64), (50, 3, 5), (300, 4, 7), (3000, 3, 5), *([(16_384, 8, 64)] * torch.cuda.is_available())],
)
def test_known_experts_take_their_tokens_in_order(tokens: int, used: int, count: int, name: str, device: str) -> None:
    """Some have no tokens, some pairs no expert; the largest do not fit into what a program looks at together."""
    order = ORDER_PAIRS.choose(Platform.of(torch.device(device)), name)
    generator = torch.Generator().manual_seed(tokens)
    expert_TK = torch.randint(1, count + 1, (tokens, used), generator=generator, dtype=torch.int32).to(device)
    weight_TK = torch.rand(tokens, used, generator=generator).to(device)
    got, want = order(expert_TK, weight_TK, count), in_order(expert_TK, weight_TK, count)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
