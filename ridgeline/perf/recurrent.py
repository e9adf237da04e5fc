"""The ops between the matrix products of mixers whose state has a constant size, with their costs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ridgeline.core.conv_spec import ShortConvSpec
from ridgeline.core.cost import StepShape
from ridgeline.core.delta_spec import GatedDeltaSpec
from ridgeline.kernels.causal_conv.cost import causal_conv_cost
from ridgeline.kernels.gated_delta.cost import gated_delta_cost
from ridgeline.kernels.gated_norm.cost import gated_norm_cost
from ridgeline.perf.parts import Priced
from ridgeline.perf.precision import Precision


def rows_of(shape: StepShape) -> int:
    """Return how many rows have tokens: each of them reads its state and writes it."""
    return int(np.count_nonzero(np.asarray(shape.num_tokens_R)))


def short_conv(
    mixer: ShortConvSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between a short convolution's two products."""
    channels, length = mixer.channels, mixer.length
    yield (
        "causal_conv",
        causal_conv_cost(tokens, rows_of(shape), channels, length, itemsize=p.item, bias=mixer.bias),
    )


def gated_delta(
    mixer: GatedDeltaSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between the two products of a gated delta rule."""
    rows = rows_of(shape)
    yield "causal_conv", causal_conv_cost(tokens, rows, mixer.channels, mixer.length, itemsize=p.item)
    heads, widths = (mixer.key_heads, mixer.value_heads), (mixer.key_dim, mixer.value_dim)
    yield "gated_delta", gated_delta_cost(tokens, rows, *heads, *widths, itemsize=p.item)
    yield "gated_norm", gated_norm_cost(tokens * mixer.value_heads, mixer.value_dim, itemsize=p.item)
