"""The coarse limit, by hand on one line: all matrix products as one op, all attention as another.

A lower bound on `roofline.step_limit`: it leaves out activations between ops, norms, rotary, sampling, and lets the
products of a step overlap freely.
"""

from __future__ import annotations

import numpy as np

from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.attention.paged.cost import visible
from ridgeline.kernels.base.cost import Cost, StepShape
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.precision import ITEM_BYTES, dtype_name, precision
from ridgeline.perf.roofline import seconds


def products_cost(model: ModelSpec, shape: StepShape, dtype: str) -> Cost:
    """All weights multiplied with, read once; two FLOPs per weight and token, in the output layer per sampled row. Of
    experts those that a uniform choice reaches."""
    p, tokens, table = precision(dtype), float(np.sum(shape.num_tokens_R)), model.vocab_size * model.hidden_size
    moved, flops = table * p.item, 2.0 * table * shape.num_sampled
    for product in (product for layer in model.layers for product in layer.products(model.hidden_size).values()):
        matrix, idle = product.inputs * product.outputs, (1 - product.used / product.copies) ** tokens
        moved += matrix * p.weight * product.copies * (1 - idle)
        flops += 2.0 * matrix * product.used * tokens
    return Cost(moved, flops)


def attention_cost(model: ModelSpec, shape: StepShape, kv_dtype: str) -> Cost:
    """All cached keys and values a row can see, read once; four FLOPs per visible pair and query dimension."""
    total = Cost(0.0, 0.0)
    for mixer in (layer.attention for layer in model.layers):
        pairs, keys = visible(shape.num_tokens_R, shape.kv_len_R, mixer.window, shape.shared)
        total += Cost(2 * keys * mixer.kv_size * ITEM_BYTES[dtype_name(kv_dtype)], 4.0 * mixer.q_size * pairs)
    return total


def coarse_limit(
    model: ModelSpec, shape: StepShape, hardware: Hardware, dtype: str, kv_dtype: str | None = None
) -> float:
    """Seconds: limit of the products plus limit of attention."""
    p = precision(dtype)
    kv_dtype = kv_dtype or p.other_rate
    products = seconds(products_cost(model, shape, dtype), hardware, hardware.rate(p.product_rate))
    return products + seconds(attention_cost(model, shape, kv_dtype), hardware, hardware.rate(p.other_rate))
