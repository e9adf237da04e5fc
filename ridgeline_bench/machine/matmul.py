"""Probes of matrix products: the attainable rate by dtype and shape, with weights stored [N, K].

Legend:
    M  tokens
    N  outputs
    K  inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import linear

from ridgeline_bench.machine.probes import Bench, Probe

SQUARES = {"cuda": (4096, 8192), "cpu": (1024, 2048)}
DTYPES = {"cuda": ("bfloat16", "float16", "tf32", "float32", "fp8"), "cpu": ("float32", "bfloat16", "int8")}

# tokens; with more, the weights are reused so often that it does not matter where they come from
MEMORY_BOUND_BELOW = 512
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# (outputs, inputs) of real projections: gate_up, down and qkv of an 8B model, gate_up of a 1B model.
PROJECTIONS = {
    "cuda": ((28672, 4096), (4096, 14336), (6144, 4096), (16384, 2048)),
    "cpu": ((16384, 2048),),
}


def matmul_probes(bench: Bench, *, quick: bool) -> list[Probe]:
    """Return probes of squares in every dtype the device runs, and of projections over few tokens in bfloat16 (and fp8
    if it runs)."""
    kind = bench.device.type
    probes = []
    for dtype in (d for d in DTYPES[kind] if runs(d, bench.device)):
        for size in SQUARES[kind][:1] if quick else SQUARES[kind]:
            probes.append(_probe(bench, dtype, size, size, size))
    skinny = [d for d in ("bfloat16", "fp8") if d in DTYPES[kind] and runs(d, bench.device)]
    for dtype in skinny:
        for outputs, inputs in PROJECTIONS[kind][:1] if quick else PROJECTIONS[kind]:
            for tokens in (1, 16, 256) if quick or kind == "cpu" else TOKENS:
                if runs(dtype, bench.device, tokens):
                    probes.append(_probe(bench, dtype, tokens, outputs, inputs))
    return probes


def runs(dtype: str, device: torch.device, tokens: int = 16) -> bool:
    """Return True if this device multiplies so many rows of this dtype, which is found out by doing it."""
    try:
        with precision(dtype):
            product(dtype, *operands(dtype, tokens, 32, 64, device))()
        return True
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def product(dtype: str, x_MK: Tensor, w_NK: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes x · wᵀ as the device's library does it fastest: [M, N]."""
    if dtype == "int8":
        return lambda: torch._int_mm(x_MK, w_NK.T)
    if dtype == "fp8":
        one = torch.ones((), device=x_MK.device)
        return lambda: torch._scaled_mm(x_MK, w_NK.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return lambda: linear(x_MK, w_NK)


def operands(dtype: str, m: int, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random x [M, K] and w [N, K]."""
    return _random(dtype, (m, k), device), _random(dtype, (n, k), device)


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Let float32 products round their inputs to TF32 or forbid it, as the dtype says; restore the setting
    afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _probe(bench: Bench, dtype: str, m: int, n: int, k: int) -> Probe:
    def run() -> float:
        x_MK, w_NK = operands(dtype, m, n, k, bench.device)
        copies = 1 if m >= MEMORY_BOUND_BELOW else bench.copies(w_NK.nbytes)
        weights = [w_NK, *(w_NK.clone() for _ in range(copies - 1))]
        with precision(dtype) if dtype in ("tf32", "float32") else nullcontext():
            return 2.0 * m * n * k / bench.seconds(*(product(dtype, x_MK, weight) for weight in weights))

    return Probe(f"gemm {dtype} {m}x{n}x{k}", "FLOP/s", run)


def _random(dtype: str, shape: tuple[int, int], device: torch.device) -> Tensor:
    if dtype == "int8":
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    stored = {"tf32": "float32", "fp8": "float8_e4m3fn"}.get(dtype, dtype)
    return torch.randn(shape, device=device).to(getattr(torch, stored))
