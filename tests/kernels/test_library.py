"""Registered ops are what torch's compilers take them for, compute what their references say, and break no graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax, paged_attention_reference
from ridgeline.kernels.base.errors import InvalidConfig
from ridgeline.kernels.base.library import REGISTERED
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.fp8.library_ops import norm_fp8
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN, IN_BLOCKS, to_fp8
from ridgeline.kernels.gemm.int8.op import KEPT, int8_linear
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.gemm.plain.op import linear
from ridgeline.kernels.library import CAPTURED, CapturedOps
from ridgeline.kernels.ops import OPS, Ops
from ridgeline.kernels.small.activation.gradient import gated_activation_gradient
from ridgeline.kernels.small.activation.op import activation, gated_activation
from ridgeline.kernels.small.norm.gradient import rms_norm_gradient
from ridgeline.kernels.small.norm.op import layer_norm, rms_norm
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.models import model_config
from ridgeline.training.embedded import llama_config
from ridgeline.training.objective import training_ops
from ridgeline.training.optimizer import initialize

T, M, OUTPUTS, EPS = 6, 64, 32, 1e-6
KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "swiglu_clamped", "silu_clamped_7")
Called = tuple[tuple[Any, ...], Callable[[], Any]]  # arguments, and what the reference makes of them


def drawn(*shape: int, learns: bool = False, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.requires_grad_(learns)


def paged() -> Called:
    q_THD, start_R1 = drawn(3, 4, 16), torch.tensor([0, 1, 3], dtype=torch.int32)
    caches = [drawn(5, 2, 8, 16, seed=n) for n in range(2)]
    table_RC, kv_len_R = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.tensor([11, 9], dtype=torch.int32)

    def reference() -> Tensor:
        slots_R = torch.arange(2, dtype=torch.int32)
        batch = RaggedBatch(
            slots_R=slots_R, block_table_SC=table_RC, start_R1=start_R1, kv_len_R=kv_len_R, tokens_each=0
        )
        return paged_attention_reference(q_THD, *caches, batch, Softmax(0.25, window=6))

    return (q_THD, *caches, table_RC, start_R1, kv_len_R, 0.25, 6), reference


def calls() -> dict[str, Called]:
    """A call of every registered op, with the reference's result."""
    x, r, w = (drawn(T, M, learns=True, seed=n) if n < 2 else drawn(M, learns=True) for n in range(3))
    matrix, bias = drawn(OUTPUTS, M, learns=True), drawn(OUTPUTS, learns=True)
    plain_x, plain_r, plain_w, b = x.detach(), r.detach(), w.detach(), drawn(M, seed=5)
    in_blocks = to_fp8(matrix.detach(), IN_BLOCKS)
    level_OI, scale_O = (matrix.detach() * 40).to(torch.int8), torch.full((OUTPUTS,), 0.025)

    def scaled(residual: Tensor | None, form: Any) -> tuple[Tensor, ...]:
        q_TM, scale, s_TM = norm_fp8(plain_x, residual, plain_w, EPS, form)
        return (q_TM, scale) if residual is None else (q_TM, scale, s_TM)

    return {
        "rms_norm": ((x, w, EPS), lambda: rms_norm(x, None, w, EPS)[0]),
        "add_rms_norm": ((x, r, w, EPS), lambda: rms_norm(x, r, w, EPS)),
        "rms_norm_gradient": (
            (plain_r, b.expand(T, M), plain_x, plain_w, EPS),
            lambda: rms_norm_gradient(plain_r, b.expand(T, M), plain_x, plain_w, EPS),
        ),
        "layer_norm": ((plain_x, plain_w, b, EPS), lambda: layer_norm(plain_x, None, plain_w, b, EPS)[0]),
        "add_layer_norm": ((plain_x, plain_r, plain_w, b, EPS), lambda: layer_norm(plain_x, plain_r, plain_w, b, EPS)),
        "activation": ((plain_x, "gelu"), lambda: activation(plain_x, "gelu")),
        "gated_activation": ((x, "silu"), lambda: gated_activation(x, "silu")),
        "gated_activation_gradient": (
            (plain_x, plain_r[:, : M // 2], "relu"),
            lambda: gated_activation_gradient(plain_x, plain_r[:, : M // 2], "relu"),
        ),
        "linear": ((x, matrix, bias), lambda: linear(x, matrix, bias)),
        "fp8_linear": (
            (plain_x, in_blocks.weight_OI, in_blocks.scale_SC, None, True),
            lambda: plain_x @ in_blocks.dequantized().T,  # CPUs leave activations unrounded
        ),
        "int8_linear": (
            (plain_x, level_OI, scale_O, bias.detach()),
            lambda: int8_linear(plain_x, Levels(level_OI, scale_O, KEPT), bias.detach()),
        ),
        "rms_norm_fp8": ((plain_x, plain_w, EPS, False), lambda: scaled(None, BY_TOKEN)),
        "add_rms_norm_fp8": ((plain_x, plain_r, plain_w, EPS, True), lambda: scaled(plain_r, IN_BLOCKS)),
        "paged_attention": paged(),
    }


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        for mine, plain in zip(found, expected, strict=True):
            close(mine, plain)
        return
    wide = [each.float() for each in (found, expected)]
    # float32: sums of 64 products; E4M3 has 3 bits, and a number between two of them may go either way
    tolerance = 2**-3 if expected.dtype == torch.float8_e4m3fn else 1e-5
    torch.testing.assert_close(*wide, atol=1e-5, rtol=tolerance)


def test_every_registered_op_is_called_here() -> None:
    assert calls().keys() == REGISTERED.keys()
    assert CAPTURED.keys() <= OPS.keys()


@pytest.mark.parametrize("name", sorted(calls()))
def test_a_registered_op_is_what_its_schema_says(name: str) -> None:
    """Schema, fake tensors, gradients and AOTAutograd's graph, by torch's own checks."""
    arguments, reference = calls()[name]
    op = getattr(torch.ops.ridgeline, name).default
    close(op(*arguments), reference())
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    narrow = any(getattr(each, "dtype", None) == torch.float8_e4m3fn for each in arguments)
    torch.library.opcheck(op, arguments, test_utils=checks[narrow:])  # the first cannot compare arguments in FP8


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("rms_norm", (drawn(T, M), drawn(M - 1), EPS)),
        ("add_rms_norm", (drawn(T, M), drawn(T - 1, M), drawn(M), EPS)),
        ("add_rms_norm_fp8", (drawn(T, M), drawn(T, M).double(), drawn(M), EPS, False)),
        ("gated_activation", (drawn(T, 7), "silu")),
        ("gated_activation", (torch.tensor(1.0), "silu")),
        ("paged_attention", (*paged()[0][:4], torch.zeros(9, dtype=torch.int32), *paged()[0][5:])),
        ("paged_attention", (paged()[0][0].bfloat16(), *paged()[0][1:])),
        ("linear", (drawn(T, M), drawn(OUTPUTS, M - 1), None)),
        ("int8_linear", (drawn(T, M), drawn(OUTPUTS, 33).to(torch.int8), drawn(OUTPUTS), None)),
        ("fp8_linear", (drawn(T, M), drawn(OUTPUTS, M).to(torch.float8_e4m3fn), drawn(OUTPUTS), None, False)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, given: tuple[Any, ...]) -> None:
    """A kernel would read beyond their ends."""
    with pytest.raises(ValueError, match=f"ridgeline::{name} takes .*, got "):
        getattr(torch.ops.ridgeline, name)(*given)


@pytest.mark.parametrize("name", sorted(calls()))
def test_tensors_of_several_devices_are_refused(name: str) -> None:
    arguments, _ = calls()[name]
    places = [place for place, each in enumerate(arguments) if isinstance(each, Tensor)]
    if len(places) == 1:
        return
    moved = [each.to("meta") if place == places[-1] else each for place, each in enumerate(arguments)]
    with pytest.raises(ValueError, match=f"ridgeline::{name} takes tensors of one device, got some on cpu and meta"):
        getattr(torch.ops.ridgeline, name)(*moved)


def test_an_override_of_a_registered_op_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="rms_norm takes the implementation of its device"):
        CapturedOps(Platform(device_type="cpu"), {"rms_norm": "reference"})


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_of_norms_are_those_of_the_reference(residual: bool) -> None:
    def gradients(of: Callable[..., Any]) -> tuple[Tensor, ...]:
        x, r, w = drawn(T, M, learns=True), drawn(T, M, learns=True, seed=1), drawn(M, learns=True)
        y, s = of(x, r if residual else None, w, EPS)
        wanted = (x, r, w) if residual else (x, w)
        return torch.autograd.grad((y * drawn(T, M, seed=2)).sum() + s.sin().sum(), wanted)

    for mine, plain in zip(gradients(CAPTURED["rms_norm"]), gradients(rms_norm), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gates_are_those_of_the_reference(kind: str) -> None:
    def gradient(of: Callable[..., Any]) -> Tensor:
        x = (4 * drawn(T, M)).requires_grad_()
        (found,) = torch.autograd.grad((of(x, kind) * drawn(T, M // 2, seed=2)).sum(), x)
        return found

    torch.testing.assert_close(gradient(CAPTURED["gated_activation"]), gradient(gated_activation), atol=1e-5, rtol=1e-5)


def decoder(ops: Ops) -> Decoder:
    tiny = llama_config(hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1)
    spec = model_config(tiny | {"vocab_size": 128, "head_dim": 32}).spec
    made = Decoder(spec, ops, dtype=torch.float32, device=torch.device("cpu"))
    initialize(made, 2, seed=0)
    return made


def network(made: Decoder) -> Callable[[Tensor, Tensor], Tensor]:
    def run(tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        normed: Tensor = made.normed(made(tokens_T, positions_T, DenseCausal(2)))
        return normed

    return run


@pytest.mark.parametrize("backend", ["aot_eager", "ridgeline", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_decoder_is_one_graph(backend: str) -> None:
    """Forward and backward, with our ops as its nodes, and the numbers of the plain one."""
    if backend == "ridgeline":
        pytest.importorskip("llvmlite")
        pytest.importorskip("numba_cuda_mlir")
    here = Platform(device_type="cpu")
    plain, captured = decoder(Ops(here, training_ops(here))), decoder(CapturedOps(here))
    tokens_T, positions_T = torch.arange(34) % 128, torch.arange(17).repeat(2)
    expected = network(plain)(tokens_T, positions_T)
    expected.sin().sum().backward()
    torch._dynamo.reset()
    explained = torch._dynamo.explain(network(captured))(tokens_T, positions_T)
    assert (explained.graph_break_count, explained.graph_count) == (0, 1)
    called = Counter(str(node.target) for node in explained.graphs[0].graph.nodes)
    assert called["ridgeline.linear.default"] == 8, "four products of each of two layers"
    assert called["ridgeline.gated_activation.default"] == 2
    assert called["ridgeline.add_rms_norm.default"] + called["ridgeline.rms_norm.default"] == 5
    torch._dynamo.reset()
    found = torch.compile(network(captured), backend=backend, fullgraph=True)(tokens_T, positions_T)
    found.sin().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for mine, other in zip(captured.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)


def test_kernels_of_training_are_nodes_too() -> None:
    """What the trainer's norm and gate launch themselves ended a graph; registered they do not."""
    pytest.importorskip("triton")
    from ridgeline.kernels.small.activation import triton_training as gates
    from ridgeline.kernels.small.norm import triton_training as norms

    def step(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        y, s = norms.rms_norm(x * 2, r, w, EPS)
        return gates.gated_activation(y, "silu").sum() + s.sum()

    def broken(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        y, s = torch.compiler.disable(norms.rms_norm)(x * 2, r, w, EPS)
        return torch.compiler.disable(gates.gated_activation)(y, "silu").sum() + s.sum()

    given = drawn(T, M, learns=True), drawn(T, M, learns=True, seed=1), drawn(M, learns=True)
    found = []
    for run, breaks in ((step, 0), (broken, 1)):
        torch._dynamo.reset()
        assert torch._dynamo.explain(run)(*given).graph_break_count == breaks
        torch._dynamo.reset()
        loss = torch.compile(run, backend="aot_eager")(*given)
        found.append((loss, *torch.autograd.grad(loss, given)))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)
