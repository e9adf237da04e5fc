"""Every plain op: its reference against float64 torch, its implementations against the reference.

Tolerances, in units of the output dtype's epsilon: 2 where the result is rounded once from float32, 4 where an
implementation rounds an intermediate as well. To that comes `slack`, in units of 2**-24, what float32 arithmetic may
lose: n for a dot product of n terms of order one; for activations the largest |x| (times |up| where gated), because
1 + erf(x) cancels for negative x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.base.case import as_cases
from ridgeline.kernels.base.op import Op
from ridgeline.kernels.gemm.plain import cases as gemm_cases
from ridgeline.kernels.gemm.plain import op as gemm
from ridgeline.kernels.ops import OPS
from ridgeline.kernels.small.activation import cases as activation_cases
from ridgeline.kernels.small.activation import op as activation
from ridgeline.kernels.small.embedding import cases as embedding_cases
from ridgeline.kernels.small.embedding import op as embedding
from ridgeline.kernels.small.embedding.cases import EmbeddingCase, EmbeddingPartCase
from ridgeline.kernels.small.norm import cases as norm_cases
from ridgeline.kernels.small.norm import op as norm
from ridgeline.kernels.small.output_gate import cases as output_gate_cases
from ridgeline.kernels.small.output_gate import op as output_gate
from ridgeline.kernels.small.rotary import cases as rotary_cases
from ridgeline.kernels.small.rotary import op as rotary
from ridgeline.kernels.small.token_gate import cases as token_gate_cases
from ridgeline.kernels.small.token_gate import op as token_gate
from tests.covering import by_pairs

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exact_embedding(ids_T: Tensor, weight_VM: Tensor) -> Tensor:
    return torch.stack([weight_VM[row] for row in ids_T.tolist()])


def exact_part(ids_T: Tensor, weight_VM: Tensor, first: int) -> Tensor:
    """By a whole table that is zero elsewhere."""
    before = torch.zeros(first, weight_VM.shape[1], dtype=weight_VM.dtype)
    after = torch.zeros(int(ids_T.max()) + 1, weight_VM.shape[1], dtype=weight_VM.dtype)
    return torch.cat((before, weight_VM, after))[ids_T.long()]


def exact_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    y_TO = torch.einsum("ti,oi->to", x_TI, weight_OI)
    return y_TO if bias_O is None else y_TO + bias_O


def exact_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def exact_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def exact_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A rotated pair (first half, second half) is one complex number, turned by cos + i sin."""
    turn = torch.complex(*cos_sin.chunk(2, dim=-1))[positions][:, None]

    def turned(x: Tensor) -> Tensor:
        half = turn.shape[-1]
        z = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous()) * turn
        return torch.cat((z.real, z.imag, x[..., 2 * half :]), dim=-1)

    return turned(q), turned(k)


def exact_activation(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return F.relu(x) ** 2
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def exact_gated_activation(x: Tensor, kind: str) -> Tensor:
    gate, up = x.tensor_split(2, dim=-1)
    if kind.startswith("silu_clamped_"):
        limit = float(kind.removeprefix("silu_clamped_"))
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    return exact_activation(gate, kind) * up


def exact_output_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x / (1 + torch.exp(-gate))


def exact_token_gate(y: Tensor, n: Tensor, weight: Tensor) -> Tensor:
    return y / (1 + torch.exp(-(n @ weight.T)))


class Subject(NamedTuple):
    op: Op
    case: Any
    inputs: Callable[..., tuple[Any, ...]]
    exact: Callable[..., Any]
    slack: int = 0

    def __str__(self) -> str:
        return f"{self.op.name}-{self.case}"


TABLES = (*embedding_cases.CASES[:2], EmbeddingCase(256, 503, 768))  # a row costs the same wherever it lies
PRODUCTS = (*gemm_cases.CASES[:-1], gemm_cases.LinearCase(70, 1024, 200))  # as a tile does

SUBJECTS = [
    *(Subject(embedding.EMBEDDING, case, case.inputs, exact_embedding) for case in TABLES),
    *(Subject(embedding.EMBEDDING_PART, c, c.inputs, exact_part) for c in as_cases(EmbeddingPartCase, TABLES)),
    *(Subject(gemm.LINEAR, case, case.inputs, exact_linear, case.in_width) for case in PRODUCTS),
    *(Subject(norm.RMS_NORM, case, case.inputs, exact_rms_norm) for case in norm_cases.CASES),
    *(Subject(norm.LAYER_NORM, case, case.inputs, exact_layer_norm) for case in norm_cases.LAYER_CASES),
    *(Subject(rotary.ROPE, case, case.inputs, exact_rope) for case in rotary_cases.CASES),
    *(Subject(activation.ACTIVATION, case, case.inputs, exact_activation, 16) for case in activation_cases.CASES),
    *(
        Subject(activation.GATED_ACTIVATION, case, case.inputs, exact_gated_activation, 16 * 16)
        for case in activation_cases.GATED_CASES
    ),
    *(
        Subject(output_gate.OUTPUT_GATE, case, case.inputs, exact_output_gate, 16 * 16)
        for case in output_gate_cases.CASES
    ),
    *(Subject(token_gate.TOKEN_GATE, case, case.inputs, exact_token_gate, 16 * 16) for case in token_gate_cases.CASES),
]

IMPLEMENTED = [
    pytest.param(subject, implementation, id=f"{subject}-{implementation.name}")
    for subject in SUBJECTS
    for implementation in subject.op.implementations
]
OPS_OF_SUBJECTS = {subject.op.name: subject.op for subject in SUBJECTS}.values()
IN_TYPES = [
    case for op in OPS_OF_SUBJECTS for case in by_pairs([s for s in SUBJECTS if s.op is op], op.implementations, DTYPES)
]


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_close(got: Any, want: Any, dtype: torch.dtype, epsilons: float, slack: int) -> None:
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        assert ours.dtype == dtype
        tolerance = epsilons * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance + slack * 2.0**-24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_reference_is_exact_arithmetic_rounded_once(subject: Subject, dtype: torch.dtype) -> None:
    inputs = subject.inputs(dtype, CPU)
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    if subject.exact in (exact_rms_norm, exact_layer_norm) and wide[1] is not None:
        wide[:2] = [(inputs[0] + inputs[1]).double(), None]  # the contract rounds the sum before the norm
    epsilons = 4 if dtype == torch.float32 else 2  # in float32 the steps between round as much as the last one
    assert_close(subject.op.reference(*inputs), subject.exact(*wide), dtype, epsilons, subject.slack)


@pytest.mark.few(80)
@pytest.mark.parametrize(("subject", "implementation", "dtype"), IN_TYPES, ids=lambda x: getattr(x, "name", str(x)))
def test_implementation_matches_the_reference(subject: Subject, implementation: Any, dtype: torch.dtype) -> None:
    inputs = subject.inputs(dtype, CPU)
    got = implementation.load()(*inputs)
    assert_close(got, subject.op.reference(*inputs), dtype, 4, subject.slack)


@pytest.mark.few(60)
@pytest.mark.parametrize(("subject", "implementation"), IMPLEMENTED)
def test_implementation_has_the_reference_gradient(subject: Subject, implementation: Any) -> None:
    fixed = {2} if subject.op.name == "rope" else set[int]()  # the table of angles

    def gradients(run: Callable[..., Any]) -> list[Tensor]:
        inputs = [
            x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() and at not in fixed else x
            for at, x in enumerate(subject.inputs(torch.float32, CPU))
        ]
        outputs = tensors(run(*inputs))
        weights = [torch.linspace(-1, 1, y.numel()).view_as(y) for y in outputs]
        sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()
        return [x.grad for x in inputs if isinstance(x, Tensor) and x.grad is not None]

    got, want = gradients(implementation.load()), gradients(subject.op.reference)
    assert got
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_ops_leave_their_inputs_alone(subject: Subject) -> None:
    inputs = subject.inputs(torch.float32, CPU)
    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    for run in (subject.op.reference, *(i.load() for i in subject.op.implementations)):
        run(*inputs)
    for now, before in zip(inputs, copies, strict=True):
        assert torch.equal(now, before) if isinstance(now, Tensor) else now == before


def test_rope_at_position_zero_changes_nothing_and_keeps_every_pair_length() -> None:
    q, k, _, positions = rotary_cases.CASES[2].inputs(torch.float32, CPU)
    angles = torch.arange(128.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    still, _ = rotary.rope(q, k, table, torch.zeros_like(positions))
    assert torch.equal(still, q)
    moved, _ = rotary.rope(q, k, table, positions + 1)
    assert not torch.allclose(moved[..., :6], q[..., :6])
    assert torch.equal(moved[..., 6:], q[..., 6:])
    torch.testing.assert_close(moved[..., :3].hypot(moved[..., 3:6]), q[..., :3].hypot(q[..., 3:6]))


@pytest.mark.parametrize("name", sorted({subject.op.name for subject in SUBJECTS}))
def test_every_op_is_listed_under_its_own_name(name: str) -> None:
    assert OPS[name].name == name


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="swoosh"):
        activation.activation(torch.ones(1, 2), "swoosh")
