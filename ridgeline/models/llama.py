"""Llama 2 and 3.x: RMS norms, rotary grouped-query attention, gated feed-forward. Its many descendants share this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import (
    ABSENT,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    Source,
    WeightMap,
)
from ridgeline.models.config import Config
from ridgeline.models.rope import context, rope

NORMS = {  # by the place of a layer's norms
    "before": {"mixer_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"},
    "after": {"mixer_post_norm": "post_attention_layernorm", "feed_forward_post_norm": "post_feedforward_layernorm"},
    "both": {
        "mixer_norm": "input_layernorm",
        "mixer_post_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
    },
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names that a family's checkpoints give to parts that are Llama's, those of layers below `layers`.N.

    norms: of a layer, by ours (default: Llama's for their place).
    gate_up: of gate and up, in two tensors or in one.
    interleaved: two neighbouring rows of queries and of keys rotate as a pair.
    """

    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    unembed: str = "lm_head"
    layers: str = "model.layers"
    norms: Mapping[str, str] | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    head_gates: str = "self_attn.g_proj"
    sinks: str = "self_attn.sinks"
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    interleaved: bool = False


DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048}


class Llama:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        return llama_like(
            "LlamaForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            mlp_bias=values.boolean("mlp_bias"),
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return decoder_weights(spec)


def decoder_weights(spec: ModelSpec, names: Names = Names()) -> WeightMap:
    """Return the weight map, with biases and query/key norms if the spec has them, but without mixers and feed-forwards
    of other kinds."""
    found: WeightMap = {"embed.weight": (Source(name=f"{names.embed}.weight"),)}
    found |= _stored("final_norm", (names.final_norm,), _norm_kinds(spec.final_norm))
    if not spec.tie_word_embeddings:
        found["unembed.weight"] = (Source(name=f"{names.unembed}.weight"),)
    if spec.unembed_bias:
        found["unembed.bias"] = (Source(name=f"{names.unembed}.bias"),)
    for index, layer in enumerate(spec.layers):
        found |= _layer_weights(f"layers.{index}", f"{names.layers}.{index}", layer, names)
    return found


def llama_like(
    architecture: str,
    config: Config,
    *,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: Sequence[int | None] | None = None,
    norm: NormSpec | None = None,
    gated: bool = True,
) -> ModelSpec:
    """Return a spec with RMS norms, rotary grouped-query attention and gated feed-forward.

    windows: one entry per layer; None is full attention. norm: another norm.
    """
    num_layers, num_heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads") if "num_key_value_heads" in config else num_heads
    head_dim = config.integer("head_dim") if "head_dim" in config else config.integer("hidden_size") // num_heads
    if not head_dim:
        raise ModelLoadError(
            f"config.json has hidden_size {config.integer('hidden_size')}, too little for {num_heads} attention heads."
        )
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json has {num_heads} attention heads and {num_kv_heads} key/value heads; "
            "the first must be a multiple of the second."
        )
    behind = config.raw("is_causal") is False
    if behind and any(window is not None for window in windows or ()):
        raise ModelLoadError("config.json sets is_causal to False, and layers with a window see no later tokens here.")
    norm = norm or NormSpec(kind="rms", eps=config.number("rms_norm_eps"))
    mlp = MLPSpec(
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act") if gated else config.ungated_activation("hidden_act"),
        gated=gated,
        bias=mlp_bias,
    )

    def layer(window: int | None) -> LayerSpec:
        mixer = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            qk_norm=norm if qk_norm else None,
            rope=rope(config, head_dim, "full_attention" if window is None else "sliding_attention"),
            window=window,
            bidirectional=behind,
        )
        return LayerSpec(mixer=mixer, feed_forward=mlp, norm=norm)

    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=tuple(layer(window) for window in windows or [None] * num_layers),
        final_norm=norm,
        max_position_embeddings=context(config),
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
    )


def changed(
    spec: ModelSpec, attention: Mapping[str, Any] | None = None, mlp: Mapping[str, Any] | None = None, **layer: Any
) -> ModelSpec:
    """Return the model with other values in all of its layers, in their attention and in their feed-forwards."""

    def each(old: LayerSpec) -> LayerSpec:
        mixer = replace(old.attention, **attention) if attention else old.mixer
        feed_forward = replace(old.mlp, **mlp) if mlp else old.feed_forward
        return replace(old, mixer=mixer, feed_forward=feed_forward, **layer)

    return replace(spec, layers=tuple(map(each, spec.layers)))


def _layer_weights(ours: str, theirs: str, layer: LayerSpec, names: Names) -> WeightMap:
    found: WeightMap = {}

    def add(name: str, parts: Sequence[str], *kinds: str) -> None:
        found.update(_stored(f"{ours}.{name}", [f"{theirs}.{part}" for part in parts], kinds))

    for norm, name in (NORMS[layer.norms] if names.norms is None else names.norms).items():
        part = layer.mixer if norm.startswith("mixer") else layer.feed_forward
        if part is not ABSENT and not (layer.one_norm and norm == "feed_forward_norm"):
            add(norm, (name,), *_norm_kinds(layer.norm))
    if isinstance(layer.mixer, AttentionSpec):
        if layer.mixer.qk_norm is not None and not layer.mixer.qk_norm.weightless:
            add("mixer.q_norm", (names.q_norm,), *_norm_kinds(layer.mixer.qk_norm))
            if layer.mixer.borrows is None:
                add("mixer.k_norm", (names.k_norm,), *_norm_kinds(layer.mixer.qk_norm))
        qkv = names.qkv[:2] if layer.mixer.values_are_keys else names.qkv
        qkv = qkv if layer.mixer.borrows is None else qkv[:1]
        qkv = (*qkv, names.head_gates) if layer.mixer.head_gates else qkv
        add("mixer.qkv", qkv, *_kinds(layer.mixer.qkv_bias))
        add("mixer.out", (names.out,), *_kinds(layer.mixer.out_bias))
        if layer.mixer.sinks:
            found[f"{ours}.mixer.sinks"] = (Source(name=f"{theirs}.{names.sinks}"),)
        if names.interleaved and layer.mixer.rope is not None:
            for kind in _kinds(layer.mixer.qkv_bias):
                found[f"{ours}.mixer.qkv.{kind}"] = _in_pairs(found[f"{ours}.mixer.qkv.{kind}"], layer.mixer)
    if isinstance(layer.feed_forward, MLPSpec):
        kinds = _kinds(layer.mlp.bias)
        add("feed_forward.gate_up" if layer.mlp.gated else "feed_forward.up", _first(layer.mlp, names), *kinds)
        add("feed_forward.down", (names.down,), *kinds)
    return found


def _stored(ours: str, theirs: Sequence[str], kinds: Sequence[str]) -> WeightMap:
    return {f"{ours}.{kind}": tuple(Source(name=f"{part}.{kind}") for part in theirs) for kind in kinds}


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _norm_kinds(norm: NormSpec) -> tuple[str, ...]:
    return () if norm.weightless else _kinds(norm.kind == "layer" and not norm.biasless)


def _first(mlp: MLPSpec, names: Names) -> tuple[str, ...]:
    return names.gate_up if mlp.gated else (names.up,)


def _in_pairs(sources: Sequence[Source], mixer: AttentionSpec) -> tuple[Source, ...]:
    """Return the sources of queries, keys and values, of which the first two have pairs as neighbours."""
    assert mixer.rope is not None
    rotated = mixer.rope.rotary_dim if mixer.rope.rotary_dim < mixer.head_dim else None
    heads = (mixer.num_heads, mixer.num_kv_heads)
    pairs = (replace(source, interleaved=count, rotated=rotated) for source, count in zip(sources, heads, strict=False))
    return (*pairs, *sources[2:])
