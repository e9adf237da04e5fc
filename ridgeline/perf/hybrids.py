"""The ops between the matrix products of mixers that are made of several, with their costs."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.core.specs.shared import SharedBlockSpec
from ridgeline.core.specs.side import SideBySideSpec
from ridgeline.kernels.base.cost import Cost, StepShape
from ridgeline.kernels.small.activation.cost import activation_cost
from ridgeline.kernels.small.norm.cost import norm_cost
from ridgeline.perf.parts import Priced, attention
from ridgeline.perf.precision import Precision
from ridgeline.perf.scans import mamba2


def side_by_side(
    mixer: SideBySideSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops of attention, then those of the mixer beside it. The sum of both is that of the residual's."""
    yield from attention(mixer.attention, shape, tokens, p, kv_dtype)
    yield from mamba2(mixer.mamba, shape, tokens, p, kv_dtype)


def shared_block(
    mixer: SharedBlockSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops of a block that layers share, then those of the mixer behind it. Every use reads the block's
    weights, which no cache of a device holds between layers."""
    width, size = mixer.width, mixer.mlp.intermediate_size
    yield "attention_norm", norm_cost(tokens, 2 * width, itemsize=p.item)
    yield from attention(mixer.attention, shape, tokens, p, kv_dtype)
    if mixer.adapts_attention:
        yield "qkv_adapter.sum", _sum_cost(tokens, sum(mixer.attention.projected), p)
    yield "mlp_norm", norm_cost(tokens, width, itemsize=p.item)
    yield "mlp_adapter.sum", _sum_cost(tokens, 2 * size, p)
    yield "gated_activation", activation_cost(tokens, size, kind=mixer.mlp.activation, itemsize=p.item, gated=True)
    yield from mamba2(mixer.mamba, shape, tokens, p, kv_dtype)


def _sum_cost(tokens: int, width: int, p: Precision) -> Cost:
    """Return the cost of adding an adapter's outputs to those of the block."""
    return Cost(3 * p.item * tokens * width, float(tokens * width))
