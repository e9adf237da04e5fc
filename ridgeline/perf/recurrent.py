"""The ops between the matrix products of mixers whose state has a constant size, with their costs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ridgeline.core.specs.conv import ShortConvSpec
from ridgeline.core.specs.delta import GatedDeltaSpec
from ridgeline.kernels.base.cost import Cost, StepShape
from ridgeline.kernels.scans.causal_conv.cost import causal_conv_cost
from ridgeline.kernels.scans.gated_delta.cost import gated_delta_cost
from ridgeline.kernels.small.gated_norm.cost import gated_norm_cost
from ridgeline.perf.parts import Priced
from ridgeline.perf.precision import Precision


def rows_of(shape: StepShape) -> int:
    """Return the number of rows that have tokens: each of them reads its state and writes it."""
    return int(np.count_nonzero(np.asarray(shape.num_tokens_R)))


def short_conv(
    mixer: ShortConvSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between a short convolution's two products. Its gates are two products of numbers."""
    yield "gates", Cost(6 * p.item * tokens * mixer.channels, float(2 * tokens * mixer.channels))
    yield "causal_conv", causal_conv_cost(tokens, rows_of(shape), mixer.channels, mixer.length, itemsize=p.item)


def gated_delta(
    mixer: GatedDeltaSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between the two products of a gated delta rule."""
    yield "causal_conv", causal_conv_cost(tokens, rows_of(shape), mixer.channels, mixer.length, itemsize=p.item)
    yield (
        "gated_delta",
        gated_delta_cost(
            shape.num_tokens_R,
            heads=mixer.key_heads,
            value_heads=mixer.value_heads,
            key_width=mixer.key_dim,
            value_width=mixer.value_dim,
            itemsize=p.item,
        ),
    )
    yield "gated_norm", gated_norm_cost(tokens * mixer.value_heads, mixer.value_dim, itemsize=p.item)
