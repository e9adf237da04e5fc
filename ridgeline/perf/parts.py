"""The ops between the matrix products of each kind of mixer and feed-forward, with their costs. A new kind
is one line."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.core.cost import Cost, StepShape
from ridgeline.core.expert_spec import ExpertsSpec
from ridgeline.core.model_spec import AttentionSpec, MLPSpec
from ridgeline.core.registry import Registry
from ridgeline.kernels.activation.cost import activation_cost
from ridgeline.kernels.attention.cost import attention_cost, write_kv_cost
from ridgeline.kernels.norm.cost import norm_cost
from ridgeline.kernels.rotary.cost import rope_cost
from ridgeline.perf.precision import Precision

Priced = tuple[str, Cost]

# Each is called with (spec, step, its tokens, precision, bytes of a number in the cache)
MIXERS = Registry("mixer with a known cost", {"attention": "ridgeline.perf.parts:attention"})

# Each is called with (spec, tokens, precision)
FEED_FORWARDS = Registry(
    "feed-forward with a known cost",
    {"mlp": "ridgeline.perf.parts:mlp", "experts": "ridgeline.perf.parts:experts"},
)


def attention(mixer: AttentionSpec, shape: StepShape, tokens: int, p: Precision, kv_item: float) -> Iterator[Priced]:
    """Yield the ops between an attention layer's two products."""
    heads, kv_heads, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    if mixer.qk_norm is not None:
        for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
            rows, size = (tokens, count * dim) if mixer.qk_norm_whole else (tokens * count, dim)
            yield name, norm_cost(rows, size, itemsize=p.item, kind=mixer.qk_norm.kind)
    if mixer.v_norm:
        yield "v_norm", norm_cost(tokens * kv_heads, dim, itemsize=p.item, kind="rms")
    if mixer.rope is not None:
        yield "rope", rope_cost(tokens, heads, kv_heads, dim, mixer.rope.rotary_dim, itemsize=p.item)
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
            window=mixer.window,
            shared=shape.shared,
        ),
    )


def mlp(spec: MLPSpec, tokens: int, p: Precision) -> Iterator[Priced]:
    """Yield the activation between a feed-forward's two products."""
    name = "gated_activation" if spec.gated else "activation"
    width, kind = spec.intermediate_size, spec.activation
    yield name, activation_cost(tokens, width, kind=kind, itemsize=p.item, gated=spec.gated)


def experts(spec: ExpertsSpec, tokens: int, p: Precision) -> Iterator[Priced]:
    """Yield the activations between a mixture's products. The choice of experts moves next to nothing."""
    if spec.shared is not None:
        yield from (("shared." + name, cost) for name, cost in mlp(spec.shared, tokens, p))
    pairs, width = tokens * spec.routing.top_k, spec.intermediate_size
    yield "gated_activation", activation_cost(pairs, width, kind=spec.activation, itemsize=p.item, gated=True)
