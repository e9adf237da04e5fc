"""BART: An encoder and a decoder with learned positions, and LayerNorm behind every sum (mBART: before each part)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any, ClassVar

from ridgeline.core.specs.model import (
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    Sines,
    Source,
    WeightMap,
)
from ridgeline.models.config import Config, head_width, wrong
from ridgeline.models.encoder_decoder import decoder_layers, encoder_of
from ridgeline.models.names import named

DEFAULTS = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "d_model": 1024,
    "tie_word_embeddings": True,
}
UNUSED = ("embed_tokens.", "version")
OFFSET = 2  # rows of the tables of positions that no token gets
NORM = NormSpec(kind="layer", eps=1e-5)  # torch's own


class Bart:
    """BART, and what its descendants have otherwise.

    before: norms stand before each part, and behind the last one.
    embed_norm: a norm follows the embeddings.
    biased: scores have a bias. Without it a stored one must be zero.
    defaults: as `Config` takes them.
    """

    name: ClassVar[str] = "BartForConditionalGeneration"
    before: ClassVar[bool] = False
    embed_norm: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS

    @staticmethod
    def positions(positions: int, width: int) -> tuple[int, int, Sines | None]:
        """Return the rows of the tables of positions, the row of the first token, and how rows are computed."""
        return positions + OFFSET, OFFSET, None

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, cls.defaults)
        width, positions = values.integer("d_model"), values.integer("max_position_embeddings")
        rows, offset, sines = cls.positions(positions, width)
        if sines is not None and width % 2:
            raise wrong("d_model", width, "even, since half of a position's numbers are sines")
        attention, mlp = side_attention(values, "decoder"), side_mlp(values, "decoder")
        like = LayerSpec(mixer=attention, feed_forward=mlp, norm=NORM, norms="before" if cls.before else "around")
        spec = ModelSpec(
            architecture=cls.name,
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=decoder_layers([attention] * values.integer("decoder_layers"), attention, mlp, like),
            final_norm=NORM,
            max_position_embeddings=positions,
            tie_word_embeddings=values.boolean("tie_word_embeddings"),
            learned_positions=rows,
            position_offset=offset,
            sines=sines,
            embedding_multiplier=sqrt(width) if values.boolean("scale_embedding") else 1.0,
            embed_norm=NORM if cls.embed_norm else None,
            unembed_bias=cls.biased,
            unused=tuple(f"model.{side}.{name}" for side in ("encoder", "decoder")
                         for name in (*UNUSED, *(() if sines is None else ("embed_positions.",)))),
        )  # fmt: skip
        own = replace(side_attention(values, "encoder"), bidirectional=True)
        layer = replace(like, mixer=own, feed_forward=side_mlp(values, "encoder"))
        return replace(spec, encoder=encoder_of(spec, (layer,) * values.integer("encoder_layers"), NORM))

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        assert spec.encoder is not None
        found: WeightMap = {"embed.weight": (Source(name="model.shared.weight"),)}
        if not spec.tie_word_embeddings:
            found["unembed.weight"] = (Source(name="lm_head.weight"),)
        if cls.biased:
            found["unembed.bias"] = (Source(name="final_logits_bias", row=1),)
        for ours, theirs in (("", "model.decoder"), ("encoder", "model.encoder")):
            if spec.sines is None:
                found |= named(ours, theirs, {"position_embed": "embed_positions"})
            if cls.embed_norm:
                found |= named(ours, theirs, {"embed_norm": "layernorm_embedding"}, bias=True)
            if cls.before:
                found |= named(ours, theirs, {"final_norm": "layer_norm"}, bias=True)
        return found | layer_weights(spec, "norm" if cls.before else "post_norm")


SELF = {
    "mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "mixer.out": "self_attn.out_proj",
}
ACROSS = {
    "mixer.q": "encoder_attn.q_proj",
    "mixer.kv": "encoder_attn.k_proj encoder_attn.v_proj",
    "mixer.out": "encoder_attn.out_proj",
}
FED = {"feed_forward.up": "fc1", "feed_forward.down": "fc2"}


def layer_weights(spec: ModelSpec, place: str) -> WeightMap:
    """Return the tensors of all layers. place: how the norms' names end here: norm, or post_norm."""
    assert spec.encoder is not None
    found: WeightMap = {}
    own = {f"mixer_{place}": "self_attn_layer_norm", **SELF}
    fed = {f"feed_forward_{place}": "final_layer_norm", **FED}
    across = {f"mixer_{place}": "encoder_attn_layer_norm", **ACROSS}
    for index in range(len(spec.layers) // 2):
        theirs = f"model.decoder.layers.{index}"
        found |= named(f"layers.{2 * index}", theirs, own, bias=True)
        found |= named(f"layers.{2 * index + 1}", theirs, across | fed, bias=True)
    for index in range(len(spec.encoder.layers)):
        found |= named(f"encoder.layers.{index}", f"model.encoder.layers.{index}", own | fed, bias=True)
    return found


def side_attention(config: Config, side: str) -> AttentionSpec:
    """Return the attention of the encoder or the decoder."""
    heads = config.integer(f"{side}_attention_heads")
    head_dim = head_width(config, "d_model", f"{side}_attention_heads")
    return AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, qkv_bias=True, out_bias=True
    )


def side_mlp(config: Config, side: str) -> MLPSpec:
    """Return the feed-forward of the encoder or the decoder."""
    activation = config.ungated_activation("activation_function")
    size = config.integer(f"{side}_ffn_dim")
    return MLPSpec(intermediate_size=size, activation=activation, gated=False, bias=True)


class MBart(Bart):
    name = "MBartForConditionalGeneration"
    before = True
