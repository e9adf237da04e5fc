"""Results of the ops in float64, and the bounds that rungs must keep.

The numbers of reductions are multiples of 1/64, so float32 sums of them are exact in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ridgeline.kernels.memory_bound.launches import EPSILON, MatrixShape, item
from ridgeline.kernels.memory_bound.rungs import BY_ROWS, MemoryRung

UNIT = 1 / 64
ROUNDING = 2**-8  # of bfloat16
NEAR = 2**-12  # of a result, and of a norm's size: ex2, rcp and rsqrt are approximate, sums are in float32


def inputs(op: str, shape: MatrixShape, device: str = "cpu") -> dict[str, Tensor]:
    """Return random inputs of an op by the names that launches have."""
    rows, columns = shape.rows, shape.columns * (2 if op == "silu_multiply" else 1)
    x = torch.randn(rows, columns, device=device)
    if op == "reduction":
        return {"x": x.mul_(1 / UNIT).round_().mul_(UNIT)}
    if op == "vector_add":
        return {"x": x, "other": torch.randn(rows, columns, device=device)}
    if op == "transpose":
        return {"x": x}
    found = {"x": (3 * x).bfloat16()}
    if op in ("layer_norm", "rms_norm"):
        found |= {name: torch.randn(columns, device=device).bfloat16() for name in ("weight", "bias")}
    return found


def output(op: str, shape: MatrixShape, device: str = "cpu") -> Tensor:
    """Return memory for a result, which is NaN."""
    sizes = {"transpose": (shape.columns, shape.rows), "reduction": (1, 1)}.get(op, (shape.rows, shape.columns))
    return torch.full(sizes, torch.nan, device=device, dtype=torch.float32 if item(op) == 4 else torch.bfloat16)


def exact(op: str, given: Mapping[str, Tensor]) -> Tensor:
    """Return the result in float64, of vector add in float32."""
    x = given["x"]
    if op == "vector_add":
        return x + given["other"]
    if op == "transpose":
        return x.T
    wide = x.double()
    if op == "reduction":
        return wide.sum().reshape(1, 1)
    if op == "softmax":
        return wide.softmax(-1)
    if op == "silu":
        return wide * wide.sigmoid()
    if op == "silu_multiply":
        gate, up = wide.chunk(2, -1)
        return gate * gate.sigmoid() * up
    weight, bias = (given[name].double() for name in ("weight", "bias"))
    if op == "rms_norm":
        return wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight
    return torch.nn.functional.layer_norm(wide, wide.shape[-1:], weight, bias, EPSILON)


def fault(rung: MemoryRung | None, op: str, found: Tensor, given: Mapping[str, Tensor], rows: int = 1 << 30) -> str:
    """Return the fault of a result in words, or "". rung: None for a library.

    rows: only so many first and last rows are compared, of ops whose rows are apart from each other.
    """
    if op in BY_ROWS and len(found) > 2 * rows:
        parts = slice(None, rows), slice(-rows, None)
        tensors = [{**given, "x": given["x"][part]} for part in parts]
        faults = (fault(rung, op, found[part], own) for part, own in zip(parts, tensors, strict=True))
        finite = "" if bool(torch.isfinite(found).all()) else "outputs are not finite"
        return next(filter(None, faults), finite)
    wanted = exact(op, given)
    if item(op) == 4:
        wrong = found != wanted
    else:
        roundings = rung.launches if rung else 3
        size = wanted.abs()
        floor = NEAR if op.endswith("norm") else 2**-126
        wrong = ~((found.double() - wanted).abs() <= (roundings * ROUNDING * 1.01 + NEAR) * size + floor)
    if not bool(wrong.any()):
        return ""
    row, column = wrong.nonzero()[0].tolist()
    told = f"{int(wrong.sum())} of {wrong.numel()} are wrong, first [{row}, {column}]"
    return f"{told}: {found[row, column].item()} in place of {wanted[row, column].item()}"
