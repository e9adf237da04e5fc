"""BERT: Bidirectional attention, learned positions, token types, and LayerNorm behind every sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.pooling import HeadSpec, PoolingSpec
from ridgeline.models.config import Config, head_width
from ridgeline.models.labels import classification
from ridgeline.models.names import named

DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}

_LAYER = {
    "mixer.qkv": "attention.self.query attention.self.key attention.self.value",
    "mixer.out": "attention.output.dense",
    "mixer_post_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_post_norm": "output.LayerNorm",
}


class Bert:
    name: ClassVar[str] = "BertModel"
    base: ClassVar[str] = "bert"  # what tensors' names begin with
    head: ClassVar[tuple[str, ...]] = ()  # the names of the head's maps
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, cls.defaults)
        for name in ("is_decoder", "add_cross_attention"):
            values.refuse(name, "only encoders of this family run")
        if values.raw("position_embedding_type") not in (None, "absolute"):
            values.refuse("position_embedding_type", "only absolute positions run")
        norm, width = NormSpec(kind="layer", eps=values.number("layer_norm_eps")), values.integer("hidden_size")
        heads = values.integer("num_attention_heads")
        head_dim = head_width(values, "hidden_size", "num_attention_heads")
        layer = LayerSpec(
            mixer=AttentionSpec(
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                qkv_bias=True,
                out_bias=True,
                bidirectional=True,
            ),
            feed_forward=MLPSpec(
                intermediate_size=values.integer("intermediate_size"),
                activation=values.activation("hidden_act"),
                gated=False,
                bias=True,
            ),
            norm=norm,
            norms="around",
        )
        positions, offset = values.integer("max_position_embeddings"), cls.offset(values)
        types = values.integer("type_vocab_size")
        return ModelSpec(
            architecture=cls.name,
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=(layer,) * values.integer("num_hidden_layers"),
            final_norm=norm,
            max_position_embeddings=positions - offset,
            tie_word_embeddings=True,
            learned_positions=positions,
            position_offset=offset,
            token_types=types,
            embed_norm=norm,
            unused=(*_either(cls.base, "pooler.", "embeddings.position_ids"), "cls.", "lm_head.", "classifier."),
            pooling=cls.pooling(values, width, types),
        )

    @staticmethod
    def offset(config: Config) -> int:
        """Return the row of the table of positions that the first token gets."""
        return 0

    @classmethod
    def pooling(cls, config: Config, width: int, types: int) -> PoolingSpec:
        if not cls.head:
            return PoolingSpec(kind="cls", task="embed", width=width, token_types=types)
        return classification(config, "cls", before=(HeadSpec(outputs=width, activation="tanh"),), token_types=types)

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        words = {"embed": "word_embeddings", "position_embed": "position_embeddings"}
        if spec.token_types:
            words["type_embed"] = "token_type_embeddings"
        found: WeightMap = {
            f"{ours}.weight": (Source(name=f"{cls.base}.embeddings.{theirs}.weight"),) for ours, theirs in words.items()
        }
        for kind in ("weight", "bias"):
            found[f"embed_norm.{kind}"] = (Source(name=f"{cls.base}.embeddings.LayerNorm.{kind}"),)
        for index in range(len(spec.layers)):
            found |= named(f"layers.{index}", f"{cls.base}.encoder.layer.{index}", _LAYER, bias=True)
        for index, name in enumerate(cls.head):
            for kind in ("weight", "bias"):
                found[f"head.maps.{index}.dense.{kind}"] = (Source(name=f"{name}.{kind}"),)
        return found


def _either(base: str, *names: str) -> tuple[str, ...]:
    """Return names with and without the base's name in front."""
    return tuple(f"{prefix}{name}" for prefix in ("", f"{base}.") for name in names)


class BertClassifier(Bert):
    name = "BertForSequenceClassification"
    head = ("bert.pooler.dense", "classifier")
