"""The ops between the two matrix products of each kind of mixer, and all ops of each kind of feed-forward, with their
costs. A new kind is one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from ridgeline.core.registry import Registry
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import AttentionSpec, CrossAttentionSpec, MLPSpec, ModelSpec, Product
from ridgeline.core.specs.stem import STRIDE, TAPS, SoundStem
from ridgeline.kernels.attention.packed.cost import packed_attention_cost
from ridgeline.kernels.attention.paged.cost import attention_cost
from ridgeline.kernels.base.cost import Cost, StepShape
from ridgeline.kernels.gemm.experts.cost import grouped_down_cost, grouped_gate_up_cost, touched
from ridgeline.kernels.gemm.plain.cost import linear_cost
from ridgeline.kernels.gemm.route.cost import route_cost
from ridgeline.kernels.small.activation.cost import activation_cost
from ridgeline.kernels.small.embedding.cost import embedding_cost
from ridgeline.kernels.small.log_mel.cost import log_mel_cost
from ridgeline.kernels.small.norm.cost import norm_cost
from ridgeline.kernels.small.output_gate.cost import output_gate_cost
from ridgeline.kernels.small.rotary.cost import rope_cost, write_kv_cost
from ridgeline.kernels.small.token_gate.cost import token_gate_cost
from ridgeline.perf.precision import Precision, kv_itemsize

Priced = tuple[str, Cost]


class NormBefore(NamedTuple):
    """The norm in front of a feed-forward. residual: it adds the residual first."""

    kind: Literal["rms", "layer"]
    residual: bool

    def cost(self, tokens: int, width: int, p: Precision) -> Cost:
        return norm_cost(tokens, width, itemsize=p.item, kind=self.kind, residual=self.residual)


class Reach(NamedTuple):
    """The reach of a step's tokens: it tells how many of a device's experts have some.

    share: `StepShape.reach`.
    devices: so many devices, or groups of them that act as one, bring as many tokens each. They have equal parts of the
        experts, unless the spec says how many a device holds.
    """

    share: float = 1.0
    devices: int = 1

    def experts(self, tokens: float, spec: ExpertsSpec) -> float:
        """Return the number of a device's experts that have tokens, if each device brings so many."""
        how = spec.routing
        return touched(self.devices * tokens, how.experts, how.top_k, self.share) * self._held(spec)

    def used(self, spec: ExpertsSpec) -> float:
        """Return the number of pairs that a device computes for each token that it brings."""
        return spec.routing.top_k * self.devices * self._held(spec)

    def _held(self, spec: ExpertsSpec) -> float:
        return 1 / self.devices if spec.held is None else spec.held / spec.routing.experts


# Each is called with (spec, step, its tokens, precision, the cache's dtype if it is not the layer's own)
MIXERS = Registry(
    "mixer with a known cost",
    {
        "attention": "ridgeline.perf.parts:attention",
        "foreign": "ridgeline.perf.parts:attention",
        "cross_attention": "ridgeline.perf.parts:cross_attention",
        "latent_attention": "ridgeline.perf.latent:latent_attention",
        "mamba": "ridgeline.perf.scans:mamba",
        "mamba2": "ridgeline.perf.scans:mamba2",
        "short_conv": "ridgeline.perf.recurrent:short_conv",
        "gated_delta": "ridgeline.perf.recurrent:gated_delta",
        "linear_attention": "ridgeline.perf.linear:linear_attention",
        "lightning_attention": "ridgeline.perf.linear:lightning_attention",
        "delta_attention": "ridgeline.perf.linear:delta_attention",
        "time_mix": "ridgeline.perf.linear:time_mix",
        "channel_mix": "ridgeline.perf.linear:channel_mix",
        "side_by_side": "ridgeline.perf.hybrids:side_by_side",
        "shared_block": "ridgeline.perf.hybrids:shared_block",
    },
)

# Each is called with (spec, model width, norm before it or None, tokens, precision, `Reach`)
FEED_FORWARDS = Registry(
    "feed-forward with a known cost",
    {"mlp": "ridgeline.perf.parts:mlp", "experts": "ridgeline.perf.parts:experts"},
)


def product_cost(name: str, product: Product, tokens: int, p: Precision) -> Cost:
    """Return the cost of a matrix product of all tokens."""
    stored = p.weight_of(name)
    return linear_cost(
        tokens, product.inputs, product.outputs, itemsize=p.item, weight_itemsize=stored, bias=product.bias
    )


def cached_itemsize(mixer: AttentionSpec, p: Precision, kv_dtype: str | None) -> float:
    """Return the bytes of a number in a layer's cache. kv_dtype: the type if it is not the layer's own."""
    name = kv_dtype or mixer.kv_format.dtype
    return kv_itemsize(name, mixer.head_dim) if name else p.item


def attention(
    mixer: AttentionSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the ops between an attention layer's two products."""
    heads, kv_heads, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    kv_item = cached_itemsize(mixer, p, kv_dtype)
    if mixer.qk_norm is not None:
        for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
            rows, size = (tokens, count * dim) if mixer.qk_norm_whole else (tokens * count, dim)
            yield name, norm_cost(rows, size, itemsize=p.item, kind=mixer.qk_norm.kind)
    if mixer.v_norm:
        yield "v_norm", norm_cost(tokens * kv_heads, dim, itemsize=p.item, kind="rms")
    if mixer.rope is not None:
        yield "rope", rope_cost(tokens, heads, kv_heads, dim, mixer.rope.rotary_dim, itemsize=p.item)
    if mixer.bidirectional:
        yield (
            "packed_attention",
            packed_attention_cost(
                shape.num_tokens_R,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                itemsize=p.item,
                window=mixer.window,
            ),
        )
        return
    yield "write_kv", write_kv_cost(tokens, kv_heads, dim, itemsize=p.item, kv_itemsize=kv_item)
    yield (
        "attention",
        attention_cost(
            shape.num_tokens_R,
            shape.kv_len_R,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            itemsize=p.item,
            kv_itemsize=kv_item,
            window=mixer.window or mixer.chunk,  # of a chunk half as many keys are seen on average
            shared=shape.shared,
        ),
    )
    if mixer.output_gate:
        yield "output_gate", output_gate_cost(tokens, heads * dim, itemsize=p.item)


def cross_attention(
    mixer: CrossAttentionSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None
) -> Iterator[Priced]:
    """Yield the attention of a step's tokens to encoder inputs."""
    own, new_R = mixer.attention, np.asarray(shape.num_tokens_R, np.float64)
    keys_R = np.asarray(shape.crossed_R if len(shape.crossed_R) else shape.kv_len_R, np.float64)
    if mixer.pictures:  # every row is taken to see one large picture
        keys_R = np.full(len(new_R), mixer.pictures, np.float64)
    keys, stored = float(keys_R[new_R > 0].sum()), cached_itemsize(own, p, kv_dtype)
    moved = 2 * tokens * own.q_size * p.item + 2 * keys * own.kv_size * stored
    yield "cross_attention", Cost(moved, 4.0 * own.q_size * float(new_R @ keys_R))


def stem(spec: SoundStem, width: int, tokens: int, p: Precision) -> Iterator[Priced]:
    """Yield what makes the input of an encoder's first layer of sounds."""
    yield "log_mel", log_mel_cost(tokens / spec.positions, spec.samples, spec.bands)
    for name, inputs, outputs in (("conv1", spec.bands, STRIDE * tokens), ("conv2", width, tokens)):
        yield name, product_cost(name, Product(TAPS * inputs, width, True), outputs, p)
        yield f"{name}_activation", activation_cost(outputs, width, kind="gelu", itemsize=p.item)
    yield "position_embed", embedding_cost(tokens, width, itemsize=p.item)


def crossing(model: ModelSpec, tokens: int, p: Precision, kv_dtype: str | None) -> Iterator[tuple[str, Cost, int]]:
    """Yield the ops that make keys and values of an encoder's output, once for each request, with their numbers."""
    mixers = Counter(layer.mixer for layer in model.layers if isinstance(layer.mixer, CrossAttentionSpec))
    for mixer, times in mixers.items():
        own = mixer.attention
        yield "kv", product_cost("kv", mixer.products(model.hidden_size)["kv"], tokens, p), times
        stored = cached_itemsize(own, p, kv_dtype)
        cost = write_kv_cost(tokens, own.num_kv_heads, own.head_dim, itemsize=p.item, kv_itemsize=stored)
        yield "write_kv", cost, times


def mlp(
    spec: MLPSpec, width: int, norm: NormBefore | None, tokens: int, p: Precision, reach: Reach = Reach(), of: str = ""
) -> Iterator[Priced]:
    """Yield a feed-forward's norm, its two products, and the activation between them. of: what products' names begin
    with."""
    if norm is not None:
        yield "feed_forward_norm", norm.cost(tokens, width, p)
    first, last = (
        (f"{of}{name}", product_cost(f"{of}{name}", product, tokens, p))
        for name, product in spec.products(width).items()
    )
    yield first
    size, kind = spec.intermediate_size, spec.activation
    name = "gated_activation" if spec.gated else "activation"
    yield name, activation_cost(tokens, size, kind=kind, itemsize=p.item, gated=spec.gated)
    yield last


def experts(
    spec: ExpertsSpec, width: int, norm: NormBefore | None, tokens: int, p: Precision, reach: Reach = Reach()
) -> Iterator[Priced]:
    """Yield the ops of a mixture: the choice of experts with the norm before it, the shared expert, and the experts'
    two products. Where several devices share the experts, each takes as many pairs as its tokens make."""
    how, products = spec.routing, spec.products(width)
    fused = norm is not None and norm.kind == "rms"
    if norm is not None and not fused:
        yield "feed_forward_norm", norm.cost(tokens, width, p)
    residual = norm is not None and norm.residual
    yield (
        "route",
        route_cost(tokens, width, how.experts, how.top_k, itemsize=p.item, residual=residual, norm=fused),
    )
    if spec.shared is not None:
        yield from mlp(spec.shared, width, None, tokens, p, of="shared.")
    if spec.shared_gate:
        yield "shared_gate", token_gate_cost(tokens, width, itemsize=p.item)
    for name in ("latent_in", "latent_out"):
        if name in products:
            yield name, product_cost(name, products[name], tokens, p)
    yield from grouped(spec, width, tokens, p, reach.experts(tokens, spec), reach.used(spec))


def grouped(spec: ExpertsSpec, width: int, tokens: int, p: Precision, reached: float, used: float) -> Iterator[Priced]:
    """Yield the experts' two products, if so many experts have tokens, and each token so many pairs."""
    size, width = spec.intermediate_size, spec.latent or width
    yield (
        "grouped_gate_up",
        grouped_gate_up_cost(
            tokens,
            width,
            size,
            used=used,
            reached=reached,
            kind=spec.activation,
            itemsize=p.item,
            weight_itemsize=p.weight_of("grouped_gate_up"),
            bias=spec.bias,
        ),
    )
    yield (
        "grouped_down",
        grouped_down_cost(
            tokens,
            size,
            width,
            used=used,
            reached=reached,
            itemsize=p.item,
            weight_itemsize=p.weight_of("grouped_down"),
            bias=spec.bias,
            add=spec.shared is not None and spec.latent is None,
        ),
    )
