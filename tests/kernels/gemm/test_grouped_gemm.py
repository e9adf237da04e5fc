"""Experts' products: every cut of the kernels against the reference.

Tolerances are those of test_gemm.py: 4 epsilons of the dtype, to which a product of I terms of order one adds
I · 2**-24 for float32 sums. A gated pair multiplies two values of up to about four. In tiles each expert's output of a
token is rounded before the sum, whose weights add up to one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.experts.cases import CASES, ExpertsCase
from ridgeline.kernels.gemm.experts.choose import (
    Rows,
    SharedRows,
    Tiles,
    choose_down,
    choose_gate_up,
    choose_shared,
    row_tiles,
)
from ridgeline.kernels.gemm.experts.op import GROUPED_DOWN, GROUPED_GATE_UP
from ridgeline.kernels.gemm.route.op import in_order

pytest.importorskip("triton")

from ridgeline.kernels.gemm.experts import combine
from ridgeline.kernels.gemm.experts import triton as implementation

CPU = torch.device("cpu")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
DEVICES = [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # the interpreter is slow
SMALL = (
    *(replace(case, experts=min(case.experts, 24), inner=min(case.inner, 64)) for case in CASES[:5]),
    ExpertsCase(3, 40, 24, experts=5, used=3, bias=True, add=True, dead=1),
    ExpertsCase(40, 64, 40, experts=12, used=3, bias=True, add=True, skew=2.0, dead=11, gate="gelu"),
    ExpertsCase(70, 32, 32, experts=6, used=1, skew=9.0),  # one expert gets all tokens, the others none
    ExpertsCase(6, 64, 32, experts=8, used=2, add=True, dead=6),
    *(case for case in CASES if case.gate == "relu2"),
)
REAL = (
    *(ExpertsCase(t, 2048, 768, experts=128, used=8, add=t == 8) for t in (1, 2, 4, 8, 64, 256)),
    ExpertsCase(300, 2048, 768, experts=128, used=8, skew=4.0, dead=100),
    ExpertsCase(8192, 2048, 768, experts=128, used=8),
    *(ExpertsCase(t, 4096, 14_336, experts=8, used=2) for t in (1, 3, 17, 600)),
    ExpertsCase(4, 2880, 2880, experts=32, used=4, bias=True, gate="swiglu_clamped", dead=1),
    ExpertsCase(40, 2880, 2880, experts=32, used=4, bias=True, gate="swiglu_clamped", skew=8.0),
    ExpertsCase(2000, 1000, 520, experts=7, used=1, skew=20.0),
    *(ExpertsCase(t, 2688, 1856, experts=128, used=6, gate="relu2", add=True) for t in (1, 8, 700)),
)
WITH_DEVICES = [
    *(pytest.param(case, "cpu", marks=ON_CPU) for case in SMALL),
    *(pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in (*SMALL, *REAL)),
]
NAMES = ["triton", "batch_invariant"]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN: what a kernel leaves unwritten, or reads before writing, shows."""
    empty = torch.empty

    def nan(*shape: int, **options: object) -> Tensor:
        fresh = empty(*shape, **options)  # type: ignore[call-overload]
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", nan)


def assert_close(got: Tensor, want: Tensor, inputs: int, epsilons: int) -> None:
    assert got.dtype == want.dtype
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), want.float(), rtol=4 * eps, atol=epsilons * eps + 4 * inputs * 2.0**-24)


def check_gate_up(name: str, case: ExpertsCase, dtype: torch.dtype, device: str, **options: object) -> None:
    arguments = case.gate_up_inputs(dtype, torch.device(device))
    arguments[0][case.tokens - case.dead :] = torch.nan  # tokens that go nowhere, so this must not matter
    computed = int(arguments[3].start_E1[-1])
    assert computed == (case.tokens - case.dead) * case.used
    y_PF = GROUPED_GATE_UP.choose(Platform.of(torch.device(device)), name)(*arguments, **options)
    assert len(y_PF) == case.tokens * case.used
    assert_close(y_PF[:computed], GROUPED_GATE_UP.reference(*arguments)[:computed], case.width, epsilons=32)


def check_down(name: str, case: ExpertsCase, dtype: torch.dtype, device: str, **options: object) -> None:
    arguments = case.down_inputs(dtype, torch.device(device))
    routes = arguments[3]
    arguments[0][int(routes.start_E1[-1]) :] = torch.nan  # rows of pairs that no kernel computed
    routes.weight_TK[case.tokens - case.dead :] = torch.nan
    y_TM = GROUPED_DOWN.choose(Platform.of(torch.device(device)), name)(*arguments, **options)
    assert_close(y_TM, GROUPED_DOWN.reference(*arguments), case.inner, epsilons=8)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "device"), WITH_DEVICES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gate_up_equals_the_reference(name: str, case: ExpertsCase, device: str, dtype: torch.dtype) -> None:
    check_gate_up(name, case, dtype, device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "device"), WITH_DEVICES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_down_equals_the_reference(name: str, case: ExpertsCase, device: str, dtype: torch.dtype) -> None:
    check_down(name, case, dtype, device)


def test_few_tokens_take_rows_through_shared_memory_where_that_was_timed() -> None:
    """Of narrow experts of whole parts, in 16 bits, that warps can share; a thread then holds few of the inputs."""
    assert choose_shared(4, 768, 8, itemsize=2) == SharedRows(1)
    assert choose_shared(1, 1024, 6, itemsize=2) == SharedRows(1)
    for tokens, inner, used, itemsize in (
        (5, 768, 8, 2), (1, 768, 8, 4), (1, 776, 8, 2), (1, 14_336, 2, 2), (1, 2880, 4, 2), (1, 768, 2, 2),
    ):  # fmt: skip
        assert choose_shared(tokens, inner, used, itemsize) is None


CUTS = (
    Rows(rows=4, block=256, warps=1),
    Rows(rows=8, block=128, warps=4),
    Tiles(rows=32, tokens=16, block=32, warps=2, stages=2),
    Tiles(rows=128, tokens=32, block=64, warps=8, stages=3),
)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", CUTS, ids=str)
def test_every_cut_multiplies(plan: Rows | Tiles, device: str) -> None:
    case = ExpertsCase(7, 100, 72, experts=9, used=3, bias=True, add=True, skew=2.0, dead=2)
    check_gate_up("triton", case, torch.float32, device, plan=plan)
    check_down("triton", case, torch.float32, device, plan=plan)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(device: str) -> None:
    """The same tokens alone, and among others that fill tiles of the same experts."""
    case = ExpertsCase(70, 64, 48, experts=4, used=2, add=True)
    ops = [op.choose(Platform.of(torch.device(device)), "batch_invariant") for op in (GROUPED_GATE_UP, GROUPED_DOWN)]

    def outputs(tokens: int) -> Tensor:
        x_TM, weight_EGM, _, _, gate = case.gate_up_inputs(torch.float32, torch.device(device))
        _, weight_EMF, _, _, add_TM = case.down_inputs(torch.float32, torch.device(device))
        whole = case.routes(torch.device(device))
        routes = in_order(whole.expert_TK[:tokens], whole.weight_TK[:tokens], case.experts)
        h_PF = ops[0](x_TM[:tokens], weight_EGM, None, routes, gate)
        return ops[1](h_PF, weight_EMF, None, routes, add_TM[:tokens])

    everyone = outputs(case.tokens)
    for tokens in (1, 3, 33):
        assert torch.equal(outputs(tokens), everyone[:tokens])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared", [65_536, 101_376, 232_448])
def test_every_cut_chosen_can_be_launched(shared: int, itemsize: int) -> None:
    for tokens in (1, 2, 3, 4, 5, 16, 17, 256, 8192):
        for width in (64, 200, 2048, 2880, 4096, 7168, 20_000):
            for inner in (40, 512, 768, 2880, 14_336, 40_000):
                for experts, used in ((2, 1), (8, 2), (60, 6), (128, 8), (256, 8), (512, 10)):
                    shape: dict = {"experts": experts, "used": used, "itemsize": itemsize, "shared": shared}
                    first = choose_gate_up(tokens, width, inner, **shape)
                    second = choose_down(tokens, inner, width, **shape)
                    for plan, inputs, together in ((first, width, 2), (second, inner, 1 << (used - 1).bit_length())):
                        assert all(size & (size - 1) == 0 for size in (plan.rows, plan.block, plan.warps))
                        if isinstance(plan, Rows):
                            assert tokens <= 4
                            assert plan.block >= inputs
                            assert together * plan.rows * plan.block <= 128 * 32 * plan.warps
                        else:
                            assert plan.tokens >= 16
                            assert (plan.rows + plan.tokens) * plan.block * itemsize * plan.stages <= shared


def test_the_grid_has_a_program_for_every_tile_that_counts_can_need() -> None:
    """Over all ways to share out up to 9 pairs among 3 experts, none needs more, and one needs as many."""
    for pairs in range(1, 10):
        ways = [(a, b, pairs - a - b) for a in range(pairs + 1) for b in range(pairs + 1 - a)]
        for tile in (1, 2, 3, 4):
            needed = [sum(-(-count // tile) for count in way) for way in ways]
            assert max(needed) == row_tiles(pairs, 3, tile)


class NotLaunched:
    """A kernel that notes its grid and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return lambda *_, **__: None


def test_grids_of_the_largest_steps_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's grids end at 65,535 in all dimensions but the first."""
    tokens, kernels = 70_000, (NotLaunched(), NotLaunched())
    monkeypatch.setattr(implementation, "grouped_tiles_kernel", kernels[0])
    monkeypatch.setattr(combine, "combine_kernel", kernels[1])
    case = ExpertsCase(tokens, 16, 8, experts=4, used=2)
    implementation.grouped_down(*case.down_inputs(torch.float16, CPU))
    for kernel in kernels:
        assert prod(kernel.grid) >= tokens // 64
        assert kernel.grid[0] < 2**31
        assert all(programs < 2**16 for programs in kernel.grid[1:])


@pytest.mark.dealt
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_may_use_many_experts(device: str) -> None:
    check_down("triton", ExpertsCase(9, 1100, 16, experts=40, used=33, add=True), torch.float32, device)


def test_a_gradient_is_left_to_torch() -> None:
    case = ExpertsCase(3, 32, 16, experts=4, used=2, bias=True, add=True)
    calls = (
        (implementation.grouped_gate_up, case.gate_up_inputs(torch.float32, CPU)),
        (implementation.grouped_down, case.down_inputs(torch.float32, CPU)),
    )
    for op, arguments in calls:
        leaves = [a.requires_grad_() for a in arguments if isinstance(a, Tensor)]
        op(*arguments).square().sum().backward()
        assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8, 300])
def test_a_captured_graph_multiplies_for_other_routes(tokens: int) -> None:
    case = ExpertsCase(tokens, 2048, 768, experts=128, used=8, add=True, dead=tokens // 4)
    device = torch.device("cuda")
    up, down = case.gate_up_inputs(torch.bfloat16, device), case.down_inputs(torch.bfloat16, device)
    routes = up[3]

    def both() -> Tensor:
        h_PF = implementation.grouped_gate_up(*up)
        return implementation.grouped_down(h_PF, *down[1:3], routes, down[4])

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TM = both()
    for seed in range(1, 8):
        for mine, other in zip(routes, case.routes(device, seed), strict=True):
            mine.copy_(other)
        graph.replay()
        h_PF = GROUPED_GATE_UP.reference(*up)
        want_TM = GROUPED_DOWN.reference(h_PF, *down[1:3], routes, down[4])
        assert_close(y_TM, want_TM, 2048, epsilons=32)
