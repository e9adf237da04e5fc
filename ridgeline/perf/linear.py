"""The ops between the matrix products of linear attention and of RWKV's mixers, with their costs."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.core.specs.linear import DeltaAttentionSpec, LightningAttentionSpec, LinearAttentionSpec
from ridgeline.core.specs.rwkv import ChannelMixSpec, TimeMixSpec
from ridgeline.kernels.base.cost import Cost, StepShape
from ridgeline.kernels.scans.causal_conv.cost import causal_conv_cost
from ridgeline.kernels.scans.linear_attention.cost import linear_attention_cost
from ridgeline.kernels.scans.wkv.cost import wkv_cost
from ridgeline.kernels.small.gated_norm.cost import gated_norm_cost
from ridgeline.kernels.small.norm.cost import norm_cost
from ridgeline.kernels.small.output_gate.cost import output_gate_cost
from ridgeline.kernels.small.rotary.cost import rope_cost
from ridgeline.perf.parts import Priced
from ridgeline.perf.precision import Precision
from ridgeline.perf.recurrent import rows_of


def linear_attention(
    mixer: LinearAttentionSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between the products of linear attention."""
    if mixer.rope is not None:
        yield "rope", rope_cost(tokens, mixer.heads, mixer.heads, mixer.key_dim, mixer.rope.rotary_dim, itemsize=p.item)
    yield (
        "linear_attention",
        linear_attention_cost(
            shape.num_tokens_R,
            heads=mixer.heads,
            key_width=mixer.key_dim,
            value_width=mixer.value_dim,
            itemsize=p.item,
            decay_bytes=p.item * mixer.key_size if mixer.rank else 0.0,
        ),
    )
    yield "gated_norm", gated_norm_cost(tokens * mixer.heads, mixer.value_dim, itemsize=p.item)


def lightning_attention(
    mixer: LightningAttentionSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between the products of lightning attention."""
    yield "activation", Cost(2 * p.item * tokens * 3 * mixer.size, 5.0 * tokens * 3 * mixer.size)
    yield (
        "linear_attention",
        linear_attention_cost(
            shape.num_tokens_R,
            heads=mixer.heads,
            key_width=mixer.head_dim,
            value_width=mixer.head_dim,
            itemsize=p.item,
            decay_bytes=0.0,
        ),
    )
    yield "norm", norm_cost(tokens, mixer.size, itemsize=p.item, kind="rms")
    yield "output_gate", output_gate_cost(tokens, mixer.size, itemsize=p.item)


def delta_attention(
    mixer: DeltaAttentionSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between the products of a delta rule that decays channel by channel."""
    yield "causal_conv", causal_conv_cost(tokens, rows_of(shape), 3 * mixer.size, mixer.length, itemsize=p.item)
    yield (
        "delta_attention",
        linear_attention_cost(
            shape.num_tokens_R,
            heads=mixer.heads,
            key_width=mixer.head_dim,
            value_width=mixer.head_dim,
            itemsize=p.item,
            decay_bytes=p.item * (mixer.size + mixer.heads),
            delta=True,
        ),
    )
    yield "gated_norm", gated_norm_cost(tokens * mixer.heads, mixer.head_dim, itemsize=p.item)


def time_mix(mixer: TimeMixSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None) -> Iterator[Priced]:
    """Yield the ops around the products of RWKV's mixer over time."""
    yield "token_shift", _shift(tokens, rows_of(shape), mixer.width, 3, p.item)
    yield "wkv", wkv_cost(tokens, rows_of(shape), mixer.channels, itemsize=p.item)
    yield "receptance_gate", Cost(3 * p.item * tokens * mixer.channels, 5.0 * tokens * mixer.channels)


def channel_mix(
    mixer: ChannelMixSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops around the products of RWKV's mixer over channels."""
    yield "token_shift", _shift(tokens, rows_of(shape), mixer.width, 2, p.item)
    yield "squared_relu", Cost(2 * p.item * tokens * mixer.channels, 2.0 * tokens * mixer.channels)
    yield "receptance_gate", Cost(3 * p.item * tokens * mixer.width, 5.0 * tokens * mixer.width)


def _shift(tokens: int, rows: int, width: int, mixtures: int, item: float) -> Cost:
    """Count the tokens as read, their mixtures as written, and each row's last token as read and written."""
    return Cost(item * width * (tokens * (1 + mixtures) + 2 * rows + mixtures), 3.0 * tokens * width * mixtures)
