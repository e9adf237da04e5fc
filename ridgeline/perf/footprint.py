"""The size of a model, from its spec alone: parameters, bytes of weights, bytes of cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.latent import LatentSpec
from ridgeline.core.specs.model import ABSENT, FeedForwardSpec, LayerSpec, MLPSpec, ModelSpec, Product
from ridgeline.core.specs.norm import parameters_of
from ridgeline.core.specs.state import DTYPE_BYTES, KVSpec, StateSpec
from ridgeline.perf.precision import ITEM_BYTES, Precision, dtype_name, kv_itemsize


class Parameters(NamedTuple):
    """Numbers of parameters.

    products: those of the layers' matrices, and all of a tower.
    unembed: 0 if it is the embedding's own table.
    embed: those of the token and position tables, and of the map that widens their rows.
    vectors: those of norms and biases.
    """

    products: int
    unembed: int
    embed: int
    vectors: int

    @property
    def total(self) -> int:
        return sum(self)


def parameters(model: ModelSpec) -> Parameters:
    """Count every parameter once; tied embeddings count under `embed`. A stage of a pipeline has only the tables that
    it needs."""
    width, products, vectors = model.hidden_size, 0, 0
    if model.ends_normed and (model.scores or model.pooling is not None):
        vectors += parameters_of(model.final_norm, width)
    for layer in own_layers(model):
        for product in layer.products(width).values():
            products += product.copies * product.inputs * product.outputs
            vectors += product.copies * product.outputs * product.bias
        present = (layer.mixer is not ABSENT) + (layer.feed_forward is not ABSENT)
        norms = 1 if layer.norms == "feed_forward" else present * (2 if layer.norms == "both" else 1)
        vectors += (norms - layer.one_norm) * parameters_of(layer.norm, width)
        vectors += sum(parameters_of(norm, norm_width) for norm, norm_width in layer.mixer.norms) + layer.mixer.vectors
        vectors += _single(layer, width)
        vectors += parameters_of(layer.norm, width) if layer.inputs is not None else 0
        if layer.streams is not None:
            vectors += layer.streams.count * (width + layer.streams.count + layer.streams.count**2)
            vectors += width + 2 * parameters_of(layer.norm, width)
        vectors += _routing_vectors(layer.feed_forward)
    if model.embed_norm is not None and model.embeds:
        vectors += parameters_of(model.embed_norm, model.embed_width or width)
    embed = 0
    if (own := model.layer_inputs) is not None and model.embeds:
        columns = own.width * len(model.layers)
        embed, vectors = columns * (own.rows + width), vectors + parameters_of(own.norm, own.width)
    if model.streams is not None:
        embed += 2 * (model.streams.count - 1) * width**2
    if model.pooling is not None:
        inputs = width
        for each in model.pooling.head:
            products += inputs * each.outputs * (not each.tied)
            norms = 0 if each.norm_eps is None else 2 - each.norm_biasless
            vectors += ((not each.biasless) + norms) * each.outputs
            inputs = each.outputs
    if model.encoder is not None:  # which has the same table of tokens
        read = parameters(model.encoder)
        products, vectors = products + read.products, vectors + read.vectors
        embed += read.embed - model.encoder.vocab_size * model.encoder.hidden_size * model.encoder.embeds
    if model.stem is not None:
        matrices, table, biases = model.stem.parameters(width)
        products, embed, vectors = products + matrices, embed + table, vectors + biases
    if model.tower is not None and model.embeds:
        products += model.tower.parameters
    if model.listener is not None and model.embeds:
        products += model.listener.parameters
    vectors += model.vocab_size * (model.unembed_bias and model.scores)
    tabled, learned = model.embed_width or width, 0 if model.sines is not None else model.learned_positions
    widening = width * (model.embed_width + 1) if model.embed_width else 0
    table, extra = model.vocab_size * tabled, model.extra_rows * tabled
    return Parameters(
        products=products,
        unembed=0 if model.tie_word_embeddings or not model.scores else table,
        embed=embed + (table + extra + (learned + model.token_types) * tabled + widening) * model.embeds,
        vectors=vectors,
    )


def own_layers(model: ModelSpec) -> Iterator[LayerSpec]:
    """Yield the layers that have weights of their own."""
    return (layer for layer in model.layers if layer.same_as is None)


def expert_parameters(model: ModelSpec) -> int:
    """Return the number of parameters in experts, of which a token uses some."""
    return sum(product.copies * _copy(product) for product in _chosen(model))


def active_parameters(model: ModelSpec) -> int:
    """Return the number of parameters that one token uses: all of them but those of experts that it did not choose."""
    return parameters(model).total - sum((product.copies - product.used) * _copy(product) for product in _chosen(model))


def step_bytes_per_token(model: ModelSpec, itemsize: float) -> float:
    """Return an upper estimate of the bytes of a step's intermediate tensors per token: the widest layer's input,
    residual, norm, fused projections and attention output, and a float32 row for each expert of a token, since these
    are written before they are added up."""
    width = model.hidden_size
    scratch = (max(layer.mixer.scratch, layer.feed_forward.scratch) for layer in model.layers)
    streams = 1 if model.streams is None else model.streams.count
    inputs = 0 if model.layer_inputs is None else 3 * len(model.layers) * model.layer_inputs.width
    inputs += 0 if model.stem is None else model.stem.scratch(width)
    widest = 4 * width * streams + inputs + max(scratch, default=0)
    rows = max((4 * product.used * width for product in _chosen(model)), default=0)
    return widest * itemsize + rows


def _chosen(model: ModelSpec) -> Iterator[Product]:
    """Yield the products of which a token uses some copies."""
    for layer in model.layers:
        yield from (product for product in layer.products(model.hidden_size).values() if product.copies > 1)


def _copy(product: Product) -> int:
    return product.outputs * (product.inputs + product.bias)


def _routing_vectors(feed_forward: FeedForwardSpec) -> int:
    if not isinstance(feed_forward, ExpertsSpec):
        return 0
    how = feed_forward.routing
    return how.experts * (how.correction + how.expert_scale)


def weight_bytes(model: ModelSpec, precision: Precision) -> float:
    """Return the bytes of all parameters on the device."""
    count, table = parameters(model), model.vocab_size * (model.embed_width or model.hidden_size)
    products = sum(
        product.copies * product.inputs * product.outputs * precision.weight_of(product_name(name, product))
        for layer in (*own_layers(model), *(own_layers(model.encoder) if model.encoder is not None else ()))
        for name, product in layer.products(model.hidden_size).items()
    )
    if model.tower is not None and model.embeds:
        products += model.tower.parameters * precision.item
    if model.listener is not None and model.embeds:
        products += model.listener.parameters * precision.item
    own = precision.weight_of("unembed", precision.item if count.unembed else 0.0)  # a tied one may have its own copy
    return products + table * own + (count.embed + count.vectors) * precision.item


def product_name(name: str, product: Product) -> str:
    """Return the name of a layer's product among all ops."""
    return f"grouped_{name}" if product.copies > 1 else name


def kv_bytes_per_token(model: ModelSpec, kv_dtype: str) -> float:
    """Return the bytes that one more cached token takes in all layers (in layers with a window, until the window is
    full)."""
    states = (state for layer in model.layers for state in layer.mixer.states)
    return sum(_token_bytes(state, kv_dtype) for state in states if not (model.crosses and state.encoded))


def kv_bytes(
    model: ModelSpec,
    tokens: int,
    kv_dtype: str,
    *,
    block_size: int = 1,
    max_chunk: int = 1,
    encoded: int | None = None,
) -> float:
    """Return the most bytes, in whole blocks, that a request of `tokens` ever holds when at most `max_chunk` tokens run
    per step. encoded: the tokens of its encoder input (default: as many, or the keys of one picture)."""
    read = encoded if encoded is not None else model.crosses or tokens
    return sum(
        group.spec.blocks_needed(read if group.spec.encoded else tokens, max_chunk, block_size)
        * len(group.layers)
        * _block_bytes(group.spec, block_size, kv_dtype)
        for group in model.cache_groups
    )


def state_bytes(model: ModelSpec) -> float:
    """Return the bytes of a request's states of constant size."""
    return sum(state.unit_bytes(1, "bfloat16") for layer in model.layers for state in layer.mixer.states if state.exact)


def _block_bytes(spec: StateSpec, block_size: int, kv_dtype: str) -> float:
    """Return the bytes of one layer's block, with what grows held in `kv_dtype`."""
    a_token = _token_bytes(spec, kv_dtype)
    return block_size * a_token if a_token else spec.unit_bytes(block_size, _activations(kv_dtype))


def _activations(kv_dtype: str) -> str:
    """Return the dtype of the activations of a model with such a cache: the cache's own, unless that has fewer bits."""
    name = dtype_name(kv_dtype)
    return name if ITEM_BYTES[name] >= 2 else "bfloat16"


def _token_bytes(spec: StateSpec, kv_dtype: str) -> float:
    """Return the bytes that one more token takes; 0 for a state that does not grow."""
    if isinstance(spec, KVSpec):
        return 2 * spec.num_kv_heads * spec.head_dim * kv_itemsize(kv_dtype, spec.head_dim)
    if isinstance(spec, LatentSpec):  # beside an indexer latents are never held in 8 bits, and rotated parts nowhere
        held = spec.index_width or spec.rank
        own = spec.format.itemsize(held, "bfloat16") if spec.format.quantized else None
        plain = spec.width if spec.index_width else spec.width - spec.rank
        return plain * DTYPE_BYTES[_activations(kv_dtype)] + held * (own or kv_itemsize(kv_dtype, held))
    grows = spec.unit_bytes(2, "float32") - spec.unit_bytes(1, "float32")
    return grows / DTYPE_BYTES["float32"] * ITEM_BYTES[dtype_name(kv_dtype)]


def _single(layer: LayerSpec, width: int) -> int:
    """Return the parameters that few models have: norms of a mixture's parts, and the layer's own number,
    and those of its activation."""
    own = layer.feed_forward.own_norms if isinstance(layer.feed_forward, ExpertsSpec) else None
    learns = isinstance(layer.feed_forward, MLPSpec) and layer.feed_forward.activation == "xielu"
    return (
        (4 * parameters_of(own, width) if own else 0) + layer.scalar + 2 * (width * layer.scaled + layer.gated + learns)
    )


def check_shape(**sizes: int) -> None:
    """Raise InvalidConfig if a size is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise InvalidConfig(f"{name} must be at least 1, got {value!r}.")
