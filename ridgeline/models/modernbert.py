"""ModernBERT: Bidirectional rotary attention, with a window on most layers, and gated feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ridgeline.core.specs.model import (
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    Source,
    WeightMap,
)
from ridgeline.core.specs.pooling import HeadSpec, PoolingSpec
from ridgeline.models.config import Config, head_width, wrong
from ridgeline.models.labels import classification
from ridgeline.models.names import named
from ridgeline.models.rope import rope

DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "classifier_pooling": "cls",
    "classifier_activation": "gelu",
}

_LAYER = {"mixer.qkv": "attn.Wqkv", "mixer.out": "attn.Wo"}
_FEED_FORWARD = {"feed_forward.gate_up": "mlp.Wi", "feed_forward.down": "mlp.Wo"}


class ModernBert:
    name: ClassVar[str] = "ModernBertModel"
    classifies: ClassVar[bool] = False

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        width, count = values.integer("hidden_size"), values.integer("num_hidden_layers")
        norm = NormSpec(kind="layer", eps=values.number("norm_eps"), biasless=not values.boolean("norm_bias"))
        every = values.integer("global_attn_every_n_layers")
        kinds = values.layer_types(count) or [
            "sliding_attention" if index % every else "full_attention" for index in range(count)
        ]
        mlp = MLPSpec(
            intermediate_size=values.integer("intermediate_size"),
            activation=values.activation("hidden_activation"),
            bias=values.boolean("mlp_bias"),
        )
        return ModelSpec(
            architecture=cls.name,
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=tuple(
                LayerSpec(
                    mixer=_attention(values, kind),
                    feed_forward=mlp,
                    norm=norm,
                    norms="before" if index else "feed_forward",  # the embeddings' norm is the first layer's
                )
                for index, kind in enumerate(kinds)
            ),
            final_norm=norm,
            max_position_embeddings=values.integer("max_position_embeddings"),
            tie_word_embeddings=True,
            embed_norm=norm,
            unused=("head.", "decoder.", "classifier."),
            pooling=cls.pooling(values, width, norm),
        )

    @classmethod
    def pooling(cls, config: Config, width: int, norm: NormSpec) -> PoolingSpec:
        if not cls.classifies:
            return PoolingSpec(kind="cls", task="embed", width=width)
        kind = config.raw("classifier_pooling")
        if kind not in ("cls", "mean"):
            raise wrong("classifier_pooling", kind, "cls or mean")
        first = HeadSpec(
            outputs=width,
            biasless=not config.boolean("classifier_bias"),
            activation=config.activation("classifier_activation"),
            norm_eps=norm.eps,
            norm_biasless=norm.biasless,
        )
        return classification(config, kind, before=(first,))

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        found: WeightMap = {"embed.weight": (Source(name="model.embeddings.tok_embeddings.weight"),)}
        assert spec.embed_norm is not None
        normed = not spec.embed_norm.biasless
        for ours, theirs in (("embed_norm", "model.embeddings.norm"), ("final_norm", "model.final_norm")):
            found |= _norm(ours, theirs, normed)
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            if layer.norms == "before":
                found |= _norm(f"{ours}.mixer_norm", f"{theirs}.attn_norm", normed)
            found |= _norm(f"{ours}.feed_forward_norm", f"{theirs}.mlp_norm", normed)
            found |= named(ours, theirs, _LAYER, bias=layer.attention.out_bias)
            found |= named(ours, theirs, _FEED_FORWARD, bias=layer.mlp.bias)
        if spec.pooling is not None and cls.classifies:
            first = spec.pooling.head[0]
            found |= named("head.maps.0", "head", {"dense": "dense"}, bias=not first.biasless)
            found |= _norm("head.maps.0.norm", "head.norm", normed)
            for kind in ("weight", "bias"):
                found[f"head.maps.1.dense.{kind}"] = (Source(name=f"classifier.{kind}"),)
        return found


class ModernBertClassifier(ModernBert):
    name = "ModernBertForSequenceClassification"
    classifies = True


def _attention(config: Config, kind: str) -> AttentionSpec:
    heads, head_dim = config.integer("num_attention_heads"), head_width(config, "hidden_size", "num_attention_heads")
    local, bias = kind == "sliding_attention", config.boolean("attention_bias")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        rope=_rope(config, head_dim, kind),
        bidirectional=True,
        window=config.integer("local_attention") // 2 + 1 if local else None,
    )


def _rope(config: Config, head_dim: int, kind: str) -> RopeSpec:
    """Return the rotation of a kind of layers, in either spelling."""
    if "rope_parameters" in config:
        return rope(config, head_dim, kind)
    which = "local" if kind == "sliding_attention" else "global"
    theta = config.number(f"{which}_rope_theta")
    config.refuse("rope_scaling", "only ModernBERT's own rotation runs")
    return RopeSpec(theta=theta, rotary_dim=head_dim)


def _norm(ours: str, theirs: str, bias: bool) -> WeightMap:
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{kind}": (Source(name=f"{theirs}.{kind}"),) for kind in kinds}
