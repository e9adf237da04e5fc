"""T5 (1.0, 1.1, Flan): An encoder and a decoder, whose scores have a number for each range of distances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ridgeline.core.specs.model import (
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    Relative,
    Source,
    WeightMap,
)
from ridgeline.models.config import Config, wrong
from ridgeline.models.encoder_decoder import Layers, decoder_layers, encoder_of
from ridgeline.models.names import named

DEFAULTS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "n_positions": 512,
    "tie_word_embeddings": True,
}


class T5:
    """T5. own_biases: each layer has numbers of distances of its own, and not the first alone."""

    name: ClassVar[str] = "T5ForConditionalGeneration"
    own_biases: ClassVar[bool] = False

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        width, tied = values.integer("d_model"), values.boolean("tie_word_embeddings")
        # Newer configs say it apart, and then that tables are tied where they need not be
        scaled = tied if values.raw("scale_decoder_outputs") is None else values.boolean("scale_decoder_outputs")
        norm, mlp = NormSpec(eps=values.number("layer_norm_epsilon")), _mlp(values)
        count = values.integer("num_layers")
        deep = values.integer("num_decoder_layers") if "num_decoder_layers" in values else count
        like = LayerSpec(mixer=_attention(values), feed_forward=mlp, norm=norm)
        spec = ModelSpec(
            architecture=cls.name,
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=decoder_layers(cls.attentions(values, deep, causal=True), _attention(values), mlp, like),
            final_norm=replace(norm, multiplier=width**-0.5) if scaled else norm,  # rounded less than scores would be
            max_position_embeddings=values.integer("n_positions"),
            tie_word_embeddings=tied,
            unused=("encoder.embed_tokens.", "decoder.embed_tokens.", FIRST_CROSS),
        )
        attentions = cls.attentions(values, count, causal=False)
        layers: Layers = tuple(replace(like, mixer=replace(each, bidirectional=True)) for each in attentions)
        return replace(spec, encoder=encoder_of(spec, layers, norm))

    @classmethod
    def attentions(cls, config: Config, count: int, *, causal: bool) -> list[AttentionSpec]:
        """Return the self-attention of so many layers."""
        relative = Relative(
            config.integer("relative_attention_num_buckets", at_least=4),
            config.integer("relative_attention_max_distance"),
            causal,
        )
        return [
            replace(
                _attention(config),
                relative=relative._replace(own=index) if cls.own_biases else relative,
                relative_owner=cls.own_biases or index == 0,
            )
            for index in range(count)
        ]

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        assert spec.encoder is not None
        found: WeightMap = {"embed.weight": (Source(name="shared.weight"),)}
        if not spec.tie_word_embeddings:
            found["unembed.weight"] = (Source(name="lm_head.weight"),)
        found |= named("", "decoder", {"final_norm": "final_layer_norm"})
        for index in range(len(spec.layers) // 2):
            block = f"decoder.block.{index}.layer"
            found |= _self_attention(spec.layers[2 * index], f"layers.{2 * index}", f"{block}.0")
            found |= named(f"layers.{2 * index + 1}", f"{block}.1", ACROSS)
            found |= _feed_forward(spec.layers[1], f"layers.{2 * index + 1}", f"{block}.2")
        return found | cls.encoder_weights(spec.encoder, "encoder.")

    @staticmethod
    def encoder_weights(encoder: ModelSpec, prefix: str) -> WeightMap:
        """Return the encoder's own tensors. prefix: what its parameters' names begin with."""
        found = named("", "encoder", {f"{prefix}final_norm": "final_layer_norm"})
        for index, layer in enumerate(encoder.layers):
            block, ours = f"encoder.block.{index}.layer", f"{prefix}layers.{index}"
            found |= _self_attention(layer, ours, f"{block}.0") | _feed_forward(layer, ours, f"{block}.1")
        return found


FIRST_CROSS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias."  # in old files, and never used
ACROSS = {
    "mixer_norm": "layer_norm",
    "mixer.q": "EncDecAttention.q",
    "mixer.kv": "EncDecAttention.k EncDecAttention.v",
    "mixer.out": "EncDecAttention.o",
}


def _attention(config: Config) -> AttentionSpec:
    heads = config.integer("num_heads")
    return AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=config.integer("d_kv"), scale=1.0)


def _mlp(config: Config) -> MLPSpec:
    kind = config.raw("feed_forward_proj")
    if not isinstance(kind, str):
        raise wrong("feed_forward_proj", kind, "relu, or gated- and an activation")
    gated, name = kind.startswith("gated-"), kind.removeprefix("gated-")
    chosen = Config({"feed_forward_proj": "gelu_new" if kind == "gated-gelu" else name})
    activation = chosen.activation if gated else chosen.ungated_activation
    return MLPSpec(intermediate_size=config.integer("d_ff"), activation=activation("feed_forward_proj"), gated=gated)


def _self_attention(layer: LayerSpec, ours: str, theirs: str) -> WeightMap:
    attention = "SelfAttention"
    names = {
        "mixer_norm": "layer_norm",
        "mixer.qkv": f"{attention}.q {attention}.k {attention}.v",
        "mixer.out": f"{attention}.o",
    }
    if layer.attention.relative_owner:
        names["mixer.position_bias"] = f"{attention}.relative_attention_bias"
    return named(ours, theirs, names)


def _feed_forward(layer: LayerSpec, ours: str, theirs: str) -> WeightMap:
    inside = {"gate_up": "wi_0 wi_1"} if layer.mlp.gated else {"up": "wi"}
    names = {f"feed_forward.{one}": _inside(each) for one, each in {**inside, "down": "wo"}.items()}
    return named(ours, theirs, {"feed_forward_norm": "layer_norm", **names})


def _inside(names: str) -> str:
    return " ".join(f"DenseReluDense.{each}" for each in names.split())


class UMT5(T5):
    name = "UMT5ForConditionalGeneration"
    own_biases = True


class T5Encoder(T5):
    """The encoder alone, which embeds."""

    name = "T5EncoderModel"

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        found = super().spec(config)
        assert found.encoder is not None
        return replace(found.encoder, architecture=cls.name, unused=("encoder.embed_tokens.", "decoder.", "lm_head."))

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        found: WeightMap = {"embed.weight": (Source(name="shared.weight"),)}
        return found | cls.encoder_weights(spec, "")


class UMT5Encoder(T5Encoder):
    name = "UMT5EncoderModel"
    own_biases = True
