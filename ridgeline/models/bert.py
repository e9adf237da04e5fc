"""BERT: Bidirectional attention, learned positions, token types, and LayerNorm behind every sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


class Bert:
    """BERT, and what encoders of its kind may have otherwise.

    base: what tensors' names begin with.
    head: the names of the head's maps. before_labels: the activation behind the first of them.
    defaults, spellings: as `Config` takes them.
    biases: projections have biases. gated: feed-forwards have a gate. rotates: queries and keys rotate, and there is no
        table of positions. unplaced: there is no such table either.
    embed_norm, layers: the names of the embeddings' norm and of what holds the layers.
    embed_project: the name of what widens tables that are narrower than the layers.
    unused: beginnings of names of heads that checkpoints hold and embeddings do not use.
    names: our modules of a layer → theirs. norms: likewise for norms, which have biases in any case.
    """

    name: ClassVar[str] = "BertModel"
    base: ClassVar[str] = "bert"
    head: ClassVar[tuple[str, ...]] = ()
    before_labels: ClassVar[Any] = "tanh"
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    spellings: ClassVar[Mapping[str, str]] = {}
    biases: ClassVar[bool] = True
    gated: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    unplaced: ClassVar[bool] = False
    embed_norm: ClassVar[str] = "embeddings.LayerNorm"
    embed_project: ClassVar[str] = ""
    layers: ClassVar[str] = "encoder.layer"
    unused: ClassVar[tuple[str, ...]] = ("cls.", "lm_head.", "classifier.")
    names: ClassVar[Mapping[str, str]] = {
        "mixer.qkv": "attention.self.query attention.self.key attention.self.value",
        "mixer.out": "attention.output.dense",
        "feed_forward.up": "intermediate.dense",
        "feed_forward.down": "output.dense",
    }
    norms: ClassVar[Mapping[str, str]] = {
        "mixer_post_norm": "attention.output.LayerNorm",
        "feed_forward_post_norm": "output.LayerNorm",
    }

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, cls.defaults, cls.spellings)
        for name in ("is_decoder", "add_cross_attention"):
            values.refuse(name, "only encoders of this family run")
        cls.check(values)
        norm, width = NormSpec(kind="layer", eps=values.number("layer_norm_eps")), values.integer("hidden_size")
        positions, offset = values.integer("max_position_embeddings"), cls.offset(values)
        types = values.integer("type_vocab_size", at_least=0)
        embeds = values.integer("embedding_size") if "embedding_size" in values else width
        return ModelSpec(
            architecture=cls.name,
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=cls.stack(values, norm),
            final_norm=norm,
            max_position_embeddings=positions - offset,
            tie_word_embeddings=True,
            learned_positions=0 if cls.rotates or cls.unplaced else positions,
            position_offset=offset,
            token_types=types,
            embed_width=0 if embeds == width else embeds,
            embed_norm=norm,
            unused=(*_either(cls.base, "pooler.", "embeddings.position_ids"), *cls.unused),
            pooling=cls.pooling(values, width, types),
        )

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ModelLoadError for what does not run."""
        if config.raw("position_embedding_type") not in (None, "absolute"):
            config.refuse("position_embedding_type", "only absolute positions run")

    @classmethod
    def stack(cls, config: Config, norm: NormSpec) -> tuple[LayerSpec, ...]:
        """Return the layers."""
        layer = LayerSpec(mixer=cls.attention(config), feed_forward=cls.mlp(config), norm=norm, norms="around")
        return (layer,) * config.integer("num_hidden_layers")

    @classmethod
    def attention(cls, config: Config) -> AttentionSpec:
        heads, head_dim = (
            config.integer("num_attention_heads"),
            head_width(config, "hidden_size", "num_attention_heads"),
        )
        return AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=cls.biases,
            out_bias=cls.biases,
            rope=cls.rope(config, head_dim) if cls.rotates else None,
            bidirectional=True,
        )

    @classmethod
    def mlp(cls, config: Config) -> MLPSpec:
        activation = config.activation("hidden_act") if cls.gated else config.ungated_activation("hidden_act")
        size = config.integer("intermediate_size")
        return MLPSpec(intermediate_size=size, activation=activation, gated=cls.gated, bias=cls.biases)

    @staticmethod
    def rope(config: Config, head_dim: int) -> RopeSpec | None:
        """Return the rotation of queries and keys."""
        return None

    @staticmethod
    def offset(config: Config) -> int:
        """Return the row of the table of positions that the first token gets."""
        return 0

    @classmethod
    def pooling(cls, config: Config, width: int, types: int) -> PoolingSpec:
        if not cls.head:
            return PoolingSpec(kind="cls", task="embed", width=width, token_types=types)
        before = HeadSpec(outputs=width, activation=cls.before_labels)
        return classification(config, "cls", before=(before,), token_types=types)

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        words = {"embed": "word_embeddings"}
        if spec.learned_positions:
            words["position_embed"] = "position_embeddings"
        if spec.token_types:
            words["type_embed"] = "token_type_embeddings"
        found: WeightMap = {
            f"{ours}.weight": (Source(name=f"{cls.base}.embeddings.{theirs}.weight"),) for ours, theirs in words.items()
        }
        found |= named("", cls.base, {"embed_norm": cls.embed_norm}, bias=True)
        if spec.embed_width:
            found |= named("", cls.base, {"embed_project": cls.embed_project}, bias=True)
        for ours, theirs in cls.places(spec):
            found |= named(ours, f"{cls.base}.{theirs}", cls.names, bias=cls.biases)
            found |= named(ours, f"{cls.base}.{theirs}", cls.norms, bias=True)
        for index, name in enumerate(cls.head):
            found |= named(f"head.maps.{index}", name.rpartition(".")[0], {"dense": name.rpartition(".")[2]}, bias=True)
        return found

    @classmethod
    def places(cls, spec: ModelSpec) -> Iterator[tuple[str, str]]:
        """Yield the name of each layer that has weights of its own, and the checkpoint's name of it."""
        for index in range(len(spec.layers)):
            yield f"layers.{index}", f"{cls.layers}.{index}"


def _either(base: str, *names: str) -> tuple[str, ...]:
    """Return names with and without the base's name in front."""
    return tuple(f"{prefix}{name}" for prefix in ("", f"{base}.") for name in names)


class BertClassifier(Bert):
    name = "BertForSequenceClassification"
    head = ("bert.pooler.dense", "classifier")
