"""Kernels with gradients, by Triton's interpreter, beside torch's autograd in float64.

Float32 on sums of up to a few hundred products: 2e-5 of the largest number. The interpreter truncates to bfloat16:
2^-7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ridgeline.kernels.gemm.plain import triton_training
from ridgeline.kernels.small.activation import op as activation
from ridgeline.kernels.small.activation import triton_training as activation_training
from ridgeline.kernels.small.embedding import training as embedding_training
from ridgeline.kernels.small.norm import op as norm
from ridgeline.kernels.small.norm import triton_training as norm_training
from ridgeline.kernels.small.rotary import op as rotary
from ridgeline.kernels.small.rotary import triton_training as rotary_training
from ridgeline.kernels.small.triton_cross_entropy import nats_with_gradient

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def results(run: Callable[..., Any], given: list[Tensor], dtypes: list[torch.dtype], device: str) -> list[Tensor]:
    """Return the outputs of a function, and the gradients of its inputs from fixed ones of its outputs."""
    own = [x.to(device, dtype, copy=True).requires_grad_() for x, dtype in zip(given, dtypes, strict=True)]
    found = run(*own)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    total = sum((out.double() * drawn(*out.shape, seed=9 + i).to(device)).sum() for i, out in enumerate(outputs))
    assert isinstance(total, Tensor)
    total.backward()
    gradients = [x.grad for x in own]
    return [x.detach().double().cpu() for x in (*outputs, *gradients) if x is not None]


def close(ours: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    assert len(ours) == len(wanted)
    for one, other in zip(ours, wanted, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-3)


WIDE, NARROW = torch.float32, torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "residual", "dtype"),
    [((5, 48), False, WIDE), ((37, 96), True, WIDE), ((3, 4, 32), False, WIDE), ((9, 160), True, NARROW)],
)
def test_a_norm_has_the_gradients_of_its_definition(
    shape: tuple[int, ...], residual: bool, dtype: torch.dtype, device: str
) -> None:
    given = [drawn(*shape), *([drawn(*shape, seed=1)] if residual else []), drawn(shape[-1], seed=2)]

    def ours(x: Tensor, *others: Tensor) -> Any:
        return norm_training.rms_norm(x, others[0] if residual else None, others[-1], 1e-5)

    def reference(x: Tensor, *others: Tensor) -> Any:
        total = x + others[0] if residual else x
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * others[-1], total

    tolerance = 2e-5 if dtype == WIDE else 3 * 2.0**-8  # the sum and the result are rounded
    close(
        results(ours, given, [dtype] * len(given), device),
        results(reference, given, [torch.float64] * len(given), device),
        tolerance,
    )


def test_a_norm_of_a_wide_residual_keeps_it_wide_and_gives_products_their_type() -> None:
    x, residual, weight = drawn(4, 32).bfloat16(), drawn(4, 32, seed=1).float(), torch.ones(32)
    with torch.autocast("cpu", torch.bfloat16):
        y, total = norm_training.rms_norm(x, residual, weight, 1e-5)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual)
    wanted, _ = norm.rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(y, wanted, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_table_that_learns_have_the_type_of_products_and_its_gradient_its_own(device: str) -> None:
    ids = torch.tensor([3, 0, 3, 5, 3]).to(device)
    table, grad = drawn(6, 32).float().to(device).requires_grad_(), drawn(5, 32, seed=1).bfloat16().to(device)
    with torch.autocast(device, torch.bfloat16):
        rows = embedding_training.embedding(ids, table)
    assert torch.equal(rows, table.detach()[ids].bfloat16())
    rows.backward(grad)
    wanted = torch.zeros(6, 32, dtype=torch.float64).index_add_(0, ids.cpu(), grad.cpu().double())
    assert table.grad is not None
    assert table.grad.dtype == torch.float32
    torch.testing.assert_close(table.grad.cpu().double(), wanted, rtol=1e-6, atol=1e-6)  # float32 of three numbers
    assert embedding_training.embedding(ids, table).dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "silu_clamped_7"])
def test_gated_activations_have_the_gradients_of_their_definition(kind: str, device: str) -> None:
    def reference(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        if kind == "silu_clamped_7":
            return activation._activate(gate, "silu").clamp(max=7.0) * up.clamp(-7.0, 7.0)
        return activation._activate(gate, kind) * up

    def ours(x: Tensor) -> Tensor:
        return activation_training.gated_activation(x, kind)

    given = [3 * drawn(7, 80)]
    close(results(ours, given, [WIDE], device), results(reference, given, [torch.float64], device), 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotated", [32, 20])
def test_rotations_have_the_gradients_of_their_definition(rotated: int, device: str) -> None:
    angles = drawn(50, rotated // 2)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    positions = torch.randint(50, (11,), generator=torch.Generator().manual_seed(0)).to(device)

    def of(rope: Any, table: Tensor) -> Any:
        def run(qkv: Tensor) -> Any:
            q, k, _ = qkv.split((4, 2, 2), 1)  # views of one projection
            return rope(q, k, table, positions)

        return run

    def exact(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> Any:
        cos, sin = table[positions][:, None].chunk(2, -1)
        half = rotated // 2

        def turned(x: Tensor) -> Tensor:
            a, b, rest = x.split((half, half, 32 - rotated), -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

        return turned(q), turned(k)

    given = [drawn(11, 8, 32)]
    wanted = results(of(exact, table), given, [torch.float64], device)
    close(results(of(rotary_training.rope, table.float()), given, [WIDE], device), wanted, 2e-5)
    close(results(of(rotary.rope, table.float()), given, [WIDE], device), wanted, 2e-5)

    def at_once(qkv: Tensor) -> Any:
        return rotary_training.rotated_heads(qkv.flatten(1), table.float(), positions, 4, 2, 32)

    def exactly(qkv: Tensor) -> Any:
        q, k, v = qkv.split((4, 2, 2), 1)
        return *exact(q, k, table, positions), v

    close(
        results(at_once, given, [WIDE], device),
        results(exactly, given, [torch.float64], device),
        2e-5,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "vocabulary", "dtype"), [(5, 300, WIDE), (3, 5000, WIDE), (4, 700, NARROW)])
def test_cross_entropy_and_its_gradient_are_torchs(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    logits = 4 * drawn(rows, vocabulary).to(device, dtype)
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(0)).to(device)
    exact = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    wanted.sum().backward()
    nats, gradient = nats_with_gradient(logits, targets)
    torch.testing.assert_close(nats.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    assert exact.grad is not None
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=2e-5 if dtype == WIDE else 2**-7, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_learns_under_autocast_has_a_gradient_of_its_own_type(device: str) -> None:
    given = [drawn(40, 24), drawn(32, 24, seed=1), drawn(32, seed=2)]

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(device, NARROW):
            return triton_training.linear(x, weight, bias)

    found = results(ours, given, [WIDE] * 3, device)
    wanted = results(torch.nn.functional.linear, given, [torch.float64] * 3, device)
    close(found, wanted, 2.0**-6)
    learns = given[1].float().to(device).requires_grad_()
    with torch.autocast(device, NARROW):
        triton_training.linear(given[0].to(device), learns, None).sum().backward()
    assert learns.grad is not None
    assert learns.grad.dtype == WIDE
    narrow = learns.grad.bfloat16().float()
    assert device == "cpu" or not torch.equal(narrow, learns.grad)  # the sums were not rounded
