"""The least work of a linear map whose weight is in FP8."""

from __future__ import annotations

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.weight_format import BLOCK, Fp8Format
from ridgeline.kernels.gemm.plain.cost import linear_cost, norm_linear_cost


def fp8_linear_cost(
    tokens: int, inputs: int, outputs: int, *, itemsize: float, format: Fp8Format, bias: bool = False
) -> Cost:
    """Count a linear map with weights of one byte, and their float32 scales read once. Rounded activations need not
    leave the chip."""
    least = linear_cost(tokens, inputs, outputs, itemsize=itemsize, weight_itemsize=1, bias=bias)
    return Cost(least.bytes + _scales(inputs, outputs, format) * (tokens > 0), least.flops)


def fp8_norm_linear_cost(
    tokens: int,
    inputs: int,
    outputs: int,
    *,
    itemsize: float,
    format: Fp8Format,
    bias: bool = False,
    residual: bool = True,
    gate: str | None = None,
) -> Cost:
    """Count what `norm_linear_cost` counts, with weights as above. outputs: O, or F if gated."""
    least = norm_linear_cost(
        tokens, inputs, outputs, itemsize=itemsize, weight_itemsize=1, bias=bias, residual=residual, gate=gate
    )
    return Cost(least.bytes + _scales(inputs, outputs * (2 if gate else 1), format) * (tokens > 0), least.flops)


def _scales(inputs: int, outputs: int, format: Fp8Format) -> float:
    """Return the bytes of the weight's scales."""
    return 4.0 * (-(-outputs // BLOCK) * -(-inputs // BLOCK) if format.block else outputs)
