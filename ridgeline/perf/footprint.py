"""What a model occupies: parameters, weight bytes, cache bytes. From its spec alone."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.core.cache_spec import CacheSpec
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.model_spec import LayerSpec, ModelSpec, NormSpec
from ridgeline.perf.precision import ITEM_BYTES, Precision, dtype_name


class Parameters(NamedTuple):
    """Numbers of parameters. products: the layers' matrices; unembed: 0 where it is the embedding's own table."""

    products: int
    unembed: int
    embed: int
    vectors: int

    @property
    def total(self) -> int:
        return sum(self)


def layer_products(layer: LayerSpec, width: int) -> dict[str, tuple[int, int, bool]]:
    """Name → (inputs, outputs, has a bias) of a layer's matrix products, in order."""
    mixer, mlp = layer.mixer, layer.feed_forward
    first, outputs = ("gate_up", 2 * mlp.intermediate_size) if mlp.gated else ("up", mlp.intermediate_size)
    return {
        "qkv": (width, mixer.q_size + 2 * mixer.kv_size, mixer.qkv_bias),
        "out": (mixer.q_size, width, mixer.out_bias),
        first: (width, outputs, mlp.bias),
        "down": (mlp.intermediate_size, width, mlp.bias),
    }


def parameters(model: ModelSpec) -> Parameters:
    """Every parameter once; tied embeddings are counted under `embed`."""
    width, products, vectors = model.hidden_size, 0, _norm(model.final_norm, model.hidden_size)
    for layer in model.layers:
        for inputs, outputs, bias in layer_products(layer, width).values():
            products += inputs * outputs
            vectors += outputs * bias
        vectors += (4 if layer.norms == "both" else 2) * _norm(layer.norm, width)
        mixer = layer.mixer
        if mixer.qk_norm is not None and mixer.qk_norm_whole:
            vectors += _norm(mixer.qk_norm, mixer.q_size + mixer.kv_size)
        elif mixer.qk_norm is not None:
            vectors += 2 * _norm(mixer.qk_norm, mixer.head_dim)
    if model.embed_norm is not None:
        vectors += _norm(model.embed_norm, width)
    table = model.vocab_size * width
    return Parameters(
        products=products,
        unembed=0 if model.tie_word_embeddings else table,
        embed=table + model.learned_positions * width,
        vectors=vectors,
    )


def weight_bytes(model: ModelSpec, precision: Precision) -> float:
    """Bytes of all parameters on the device."""
    count = parameters(model)
    return count.products * precision.weight + (count.total - count.products) * precision.item


def kv_bytes_per_token(model: ModelSpec, kv_dtype: str) -> float:
    """Bytes one more cached token takes in all layers (in those with a window: until the window is full)."""
    return sum(_token_bytes(layer.mixer.cache, kv_dtype) for layer in model.layers)


def kv_bytes(model: ModelSpec, tokens: int, kv_dtype: str, *, block_size: int = 1, max_chunk: int = 1) -> float:
    """Most bytes a request of `tokens` ever holds when at most `max_chunk` tokens run per step, in whole blocks."""
    return sum(
        group.spec.blocks_needed(tokens, max_chunk, block_size)
        * (block_size * len(group.layers) * _token_bytes(group.spec, kv_dtype))
        for group in model.cache_groups
    )


def _token_bytes(spec: CacheSpec, kv_dtype: str) -> float:
    return 2 * spec.num_kv_heads * spec.head_dim * ITEM_BYTES[dtype_name(kv_dtype)]


def _norm(norm: NormSpec, width: int) -> int:
    return width * (2 if norm.kind == "layer" else 1)


def check_shape(**sizes: int) -> None:
    """Raise InvalidConfig for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise InvalidConfig(f"{name} must be at least 1, got {value!r}.")
