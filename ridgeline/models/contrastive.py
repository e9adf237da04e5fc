"""CLIP, SigLIP and SigLIP 2: A tower for pictures and a network for texts, whose vectors lie in one space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.pooling import HeadSpec, PoolingSpec
from ridgeline.core.specs.tower import PoolerSpec, ProjectorSpec, TowerSpec
from ridgeline.models.clip import LAYER, clip_tower, clip_weights, vit_layers
from ridgeline.models.config import Config
from ridgeline.models.names import named

CLIP_TEXT = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
TEXT, PICTURES = "text_model", "vision_model"


class ClipEmbedder:
    """CLIP: A text's vector is that of its last token, and a picture's that of the class token."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, {"projection_dim": 512})
        width, vision = values.integer("projection_dim"), values.section("vision_config")
        tower = clip_tower(vision, ProjectorSpec(outputs=width, bias=False), clip_layers(vision))
        head = (HeadSpec(outputs=width, biasless=True),)
        pooling = PoolingSpec(kind="last", task="embed", width=width, head=head, apart=True)
        tower = replace(tower, pooler=PoolerSpec(), final_norm=tower.embed_norm)
        return texts("CLIPModel", Config(values.section("text_config").entries, CLIP_TEXT), pooling, tower)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        return {
            **text_weights(spec),
            **named("head.maps.0", "", {"dense": "text_projection"}),
            **clip_weights(spec.tower, PICTURES),
            **named("tower", PICTURES, {"final_norm": "post_layernorm"}, bias=True),
            **named("tower.projector", "", {"down": "visual_projection"}),
        }


def clip_layers(vision: Config) -> int:
    """Return the number of layers of CLIP's tower."""
    return Config(vision.entries, {"num_hidden_layers": 12}).integer("num_hidden_layers")


def texts(name: str, text: Config, pooling: PoolingSpec, tower: TowerSpec, *, both_ways: bool = False) -> ModelSpec:
    """Return the network for texts, with a tower beside it. both_ways: tokens see those behind them."""
    norm, positions = NormSpec(kind="layer", eps=text.number("layer_norm_eps")), text.integer("max_position_embeddings")
    layers = vit_layers(text, norm, text.integer("num_hidden_layers"))
    if not both_ways:
        layers = tuple(map(_causal, layers))
    return ModelSpec(
        architecture=name,
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        layers=layers,
        final_norm=norm,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        learned_positions=positions,
        pooling=pooling,
        tower=tower,
        unused=("logit_scale", "logit_bias", f"{TEXT}.embeddings.position_ids", f"{PICTURES}.embeddings.position_ids"),
    )


def text_weights(spec: ModelSpec) -> WeightMap:
    """Return the weight map of the network for texts, without what stands behind its pooling."""
    inner = f"{TEXT}.embeddings"
    found: WeightMap = {
        "embed.weight": (Source(name=f"{inner}.token_embedding.weight"),),
        "position_embed.weight": (Source(name=f"{inner}.position_embedding.weight"),),
    }
    found |= named("", TEXT, {"final_norm": "final_layer_norm"}, bias=True)
    for index in range(len(spec.layers)):
        found |= named(f"layers.{index}", f"{TEXT}.encoder.layers.{index}", LAYER, bias=True)
    return found


def _causal(layer: LayerSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, bidirectional=False))
