"""Graphs of torch through the compiler and as torch runs them: functions that people write, and drawn ones."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.compiler import cpu, mlir, targets
from ridgeline.compiler.backend import backend, compile_graph, decompositions
from ridgeline.compiler.cpu_mapping import CpuText
from ridgeline.compiler.targets import CpuTarget

if why := mlir.available():
    pytest.skip(why, allow_module_level=True)
pytest.importorskip("llvmlite")

F = torch.nn.functional


def norm_of_softmax(x: Tensor, w: Tensor) -> Tensor:
    h = torch.softmax(x * w, -1)
    return F.rms_norm(h, (h.shape[-1],), w, 1e-6) * F.silu(x)


def sum_and_norm(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = x + w
    return F.rms_norm(h, (h.shape[-1],), w, 1e-6), h


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, None, 1e-5), approximate="tanh") + x


def masked_softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(x > 1, -torch.inf), -1) * w


def whole_sum(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sum((0, 1), keepdim=True) + w.amax(-1, keepdim=True)


FUNCTIONS = (norm_of_softmax, layer_norm, masked_softmax, whole_sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(3, 7), (1, 33), (40, 64), (5, 1)])
def test_a_function_makes_what_torch_makes(
    function: Callable[..., Tensor], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    compiled = torch.compile(function, backend=backend, dynamic=False)
    torch.testing.assert_close(compiled(x, w), function(x, w), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_with_several_outputs_makes_what_torch_makes(dtype: torch.dtype) -> None:
    x, w = torch.randn(5, 70).to(dtype), torch.randn(70).to(dtype)
    program = compile_graph(traced(sum_and_norm, x, w))
    assert len(program.graph.nodes) == 1
    torch.testing.assert_close(program(x, w), sum_and_norm(x, w))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_vectors_make_what_linalg_makes(function: Callable[..., Tensor]) -> None:
    x, w = torch.randn(5, 70), torch.randn(70)
    made = [compile_graph(traced(function, x, w), target=CpuTarget(each))(x, w) for each in ("vectors", "linalg")]
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS[:2])
def test_gradients_are_those_of_torch(function: Callable[..., Tensor]) -> None:
    def gradients(of: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        x, w = (
            torch.randn(6, 40, dtype=torch.float64, requires_grad=True),
            torch.randn(40, dtype=torch.float64, requires_grad=True),
        )
        return torch.autograd.grad(of(x, w).square().sum(), (x, w))

    made = gradients(torch.compile(function, backend=backend, dynamic=False))
    for ours, theirs in zip(made, gradients(function), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_softmax_with_a_norm_is_one_kernel_and_equal_graphs_are_compiled_once() -> None:
    x, w = torch.randn(8, 64), torch.randn(64)
    first = compile_graph(traced(norm_of_softmax, x, w))
    assert first.num_kernels == 1
    assert [node.op for node in first.graph.nodes] == ["fused"]
    codes = set(cpu._codes)
    again = compile_graph(traced(norm_of_softmax, x, w))
    assert set(cpu._codes) == codes
    assert again.num_kernels == 1


def traced(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    """The functional graph of a function, as AOTAutograd gives it to a back end."""
    from functorch.compile import aot_function, make_boxed_func

    found = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        found.append(graph)
        return make_boxed_func(graph.forward)

    aot_function(function, fw_compiler=keep, decompositions=decompositions())(*inputs)
    return found[0]


@pytest.mark.parametrize("name", ["exp", "tanh"])
def test_elementary_functions_are_right_to_two_units_in_the_last_place(name: str) -> None:
    function = getattr(torch, name)
    bits = torch.arange(-(1 << 31), 1 << 31, 40961, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)  # of every sign and exponent, with infinities and NaN
    x = torch.cat((x, torch.linspace(-110, 100, 60001), torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])))
    made = torch.compile(lambda x: function(x) * 1.0, backend=backend, dynamic=False)(x)
    exact = function(x.double())
    nearest = exact.float()
    assert torch.equal(made.isnan(), nearest.isnan())
    finite = nearest.isfinite() & (nearest.abs() > 2**-126)
    assert torch.equal(made[nearest.isinf()], nearest[nearest.isinf()])
    unit = torch.nextafter(nearest.abs(), torch.tensor(torch.inf)).double() - nearest.abs().double()
    assert ((made.double() - exact).abs() / unit)[finite].max() <= 2
    assert (made.double() - exact)[~finite & ~nearest.isnan() & ~nearest.isinf()].abs().max() <= 2**-126


def test_torch_knows_the_back_end_by_its_name() -> None:
    """By an entry point, so nothing of Ridgeline is imported before."""
    x, w = torch.randn(4, 40), torch.randn(40)
    compiled = torch.compile(layer_norm, backend="ridgeline", dynamic=False)
    torch.testing.assert_close(compiled(x, w), layer_norm(x, w))


def test_other_shapes_get_programs_of_their_own() -> None:
    compiled = torch.compile(norm_of_softmax, backend=backend)
    for rows in (2, 3, 5, 700):
        x, w = torch.randn(rows, 48), torch.randn(48)
        torch.testing.assert_close(compiled(x, w), norm_of_softmax(x, w))


def test_a_module_trains_as_without_the_compiler() -> None:
    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            torch.nn.GELU(),
            torch.nn.LayerNorm(32),
            torch.nn.Dropout(0.0),
            torch.nn.Linear(32, 4),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model, backend=backend, dynamic=False) if compiled else model
        x, y, told = torch.randn(64, 16), torch.randint(4, (64,)), []
        for _ in range(4):
            loss = F.cross_entropy(run(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.append(loss.item())
        return told

    assert losses(True) == pytest.approx(losses(False), rel=1e-4)


UNARY: tuple[Callable[..., Tensor], ...] = (
    torch.neg,
    torch.exp,
    torch.abs,
    torch.tanh,
    torch.sigmoid,
    torch.relu,
    torch.rsqrt,
    torch.square,
    torch.reciprocal,
    F.silu,
    torch.log,
    torch.erf,
    torch.sin,
    torch.cos,
)
BINARY: tuple[Callable[..., Tensor], ...] = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)
COMPARED: tuple[Callable[..., Tensor], ...] = (torch.lt, torch.ge, torch.eq, torch.ne)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """A function of some tensors, drawn op by op, and its inputs, with infinities and NaN among them."""
    rank = draw(st.integers(1, 4))
    domain = [draw(st.sampled_from((1, 2, 3, 5, 17))) for _ in range(rank)]
    seed = draw(st.integers(0, 1 << 20))
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(draw(st.integers(1, 3))):
        cut = draw(st.integers(0, rank - 1))
        shape = [size if draw(st.booleans()) else 1 for size in domain[cut:]]
        x = torch.randn(shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
        special = draw(st.sampled_from((None, None, torch.inf, -torch.inf, torch.nan, 0.0)))
        if special is not None:
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = special
        if x.dim() >= 2 and draw(st.booleans()):
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        inputs.append(x)
    plan = [
        (draw(st.sampled_from(("unary", "binary", "number", "where", "reduce", "cast"))), draw(st.integers(0, 1 << 16)))
        for _ in range(draw(st.integers(1, 9)))
    ]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        values = list(given)
        for kind, pick in plan:
            x, y = values[pick % len(values)], values[pick // 7 % len(values)]
            if kind == "unary":
                values.append(UNARY[pick % len(UNARY)](x))
            elif kind == "binary":
                values.append(BINARY[pick % len(BINARY)](x, y))
            elif kind == "number":
                values.append(BINARY[pick % 4](x, (0.5, -2.0, 3, 1e-3)[pick // 5 % 4]))
            elif kind == "where":
                values.append(torch.where(COMPARED[pick % 4](x, 0.25), x, y))
            elif kind == "cast":
                values.append(x.to(DTYPES[pick % 4]))
            else:
                dims = tuple(range(-1 - pick % max(1, x.dim()), 0)) if x.dim() else ()
                reduce = (torch.sum, torch.mean, torch.amax, torch.amin)[pick // 3 % 4]
                values.append(reduce(x, dim=dims, keepdim=True) if dims else x)
        return tuple(values[len(given) :][-2:])

    return function, inputs


BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_drawn_graphs_make_what_torch_makes(drawn: tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]) -> None:
    function, inputs = drawn
    module = traced(function, *inputs)
    program = compile_graph(module)
    values = [node.meta.get("val") for node in module.graph.nodes]
    bound = max(BOUNDS.get(each.dtype, 0.0) for each in values if isinstance(each, torch.Tensor))
    for ours, theirs in zip(program(*inputs), function(*inputs), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound, equal_nan=True)


def cloned_and_written(x: Tensor) -> Tensor:
    y = x.clone()
    x.add_(1)
    return y


def read_by_strides(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.t().sin() * 2 + 1
    return y, y.t().reshape(-1).as_strided((5,), (2,))


X = torch.linspace(-2, 2, 24).view(4, 6)
FEW = torch.tensor([0.1, 0.2, -0.1, 2.0])
HARD: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a clone is another tensor": (cloned_and_written, (X,)),
    "a clone has strides of its own": (lambda x: x.t().contiguous().view(-1) * 2 + 1, (X,)),
    "views of a kernel's result": (lambda x: (x.t() * 2 + 1).t().view(-1), (X,)),
    "strides of a kernel's result": (read_by_strides, (X,)),
    "lists of tensors": (lambda x: torch.cat([x * 2 + 1, x[torch.tensor([1, 0])]]), (X,)),
    "truth and a number": (lambda x: ((x > 0) + 1) * 2, (X,)),
    "integers of two sizes": (lambda x: (x.int() + x.long()) * torch.tensor(3), (X * 9,)),
    "a number no float of 16 bits is": (lambda x: torch.where(x == 0.1, x * 2, x + 1), (FEW.bfloat16(),)),
    "an integer no float of 16 bits is": (lambda i, x: i * x + 0, (torch.tensor([100000, 2049, 7, 1]), FEW.half())),
    "a variance of 16 bits": (lambda x: torch.var_mean(x, -1), ((X + 100).bfloat16(),)),
    "a variance of too few": (lambda x: torch.var_mean(x, [], correction=30), (X,)),
    "a variance of complex numbers": (lambda x: torch.var_mean(x, -1), (X + 1j,)),
    "one number": (lambda x: torch.softmax(x * 2, -1), (torch.tensor(2.0),)),
    "a negative zero": (lambda x: torch.relu(x) * 2 + torch.relu(-x), (FEW * 0,)),
    "a view that negates": (lambda x: x * 2 + 1, (torch._neg_view(FEW),)),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.filterwarnings("ignore:var_mean")
def test_what_is_hard_is_as_torch_has_it(name: str) -> None:
    function, inputs = HARD[name]
    torch._dynamo.reset()
    ours, theirs = [each.clone() for each in inputs], [each.clone() for each in inputs]
    made = torch.compile(function, backend=backend, dynamic=False)(*ours)
    torch.testing.assert_close(made, function(*theirs), equal_nan=True)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("twice", [lambda x: (x.clone(), x.clone()), lambda x: (x.sin() * 2, x.sin() * 2)])
def test_a_caller_may_write_to_one_output(twice: Callable[..., tuple[Tensor, Tensor]]) -> None:
    x = X.clone()
    first, second = torch.compile(twice, backend=backend, dynamic=False)(x)
    first.zero_()
    assert torch.equal(x, X)
    assert torch.equal(second, twice(X)[1])


def test_machine_code_is_shared_by_numbers_of_rows_and_goes_with_its_programs() -> None:
    few = compile_graph(traced(layer_norm, torch.randn(40, 31), torch.randn(31)))
    before = set(cpu._codes)
    many = compile_graph(traced(layer_norm, torch.randn(90, 31), torch.randn(31)))
    assert set(cpu._codes) == before
    del few, many
    gc.collect()
    assert len(set(cpu._codes) & before) < len(before)


@pytest.mark.parametrize("refused", ["cpu_text", "lower_vectors"])
def test_groups_whose_text_is_refused_run_op_by_op(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By MLIR, or by LLVM."""
    if refused == "cpu_text":
        monkeypatch.setattr(targets, refused, lambda *_: CpuText("func.func @kernel(", 4, 9))
    else:
        monkeypatch.setattr(cpu, refused, lambda *_: "define void @kernel(")
    program = compile_graph(make_fx(lambda x: x.tanh() + 2.5)(x := torch.randn(4, 9)))
    [why] = program.fallbacks
    assert "refused the text of a kernel" in why
    (made,) = program(x)
    torch.testing.assert_close(made, x.tanh() + 2.5)


def test_without_llvmlite_groups_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    for each in (cpu._llvm, cpu.machine_name):
        each.cache_clear()
    try:
        program = compile_graph(make_fx(lambda x: x.tanh() + 1)(x := torch.randn(4, 8)))
    finally:
        for each in (cpu._llvm, cpu.machine_name):
            each.cache_clear()
    assert program.fallbacks == [f"the compiler needs llvmlite; install it: {mlir.EXTRA}."]
    (made,) = program(x)
    torch.testing.assert_close(made, x.tanh() + 1)


def test_kernels_are_of_the_cpu_whatever_the_default_device_is() -> None:
    compiled = torch.compile(norm_of_softmax, backend=backend, dynamic=False)
    x, w = torch.randn(3, 9), torch.randn(9)
    expected = compiled(x, w)
    with torch.device("meta"):
        assert torch.equal(compiled(x, w), expected)
