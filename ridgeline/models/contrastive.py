"""CLIP, SigLIP and SigLIP 2: A tower for pictures and a network for texts, whose vectors lie in one space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.pooling import HeadSpec, PoolingSpec
from ridgeline.core.specs.tower import GridSpec, PoolerSpec, ProjectorSpec, TowerSpec
from ridgeline.models.clip import LAYER, clip_tower, clip_weights, vit_layers
from ridgeline.models.config import Config
from ridgeline.models.names import named
from ridgeline.models.siglip import DEFAULTS as SIGLIP_PICTURES
from ridgeline.models.siglip import siglip_tower, siglip_weights

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
SIGLIP_TEXT = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "pad_token_id": 1,
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


class SiglipEmbedder:
    """SigLIP: A text's vector is that of its last token, which is mostly padding, and a picture's what a learned query
    sees of its patches."""

    name: ClassVar[str] = "SiglipModel"

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config)
        text, vision = (values.section(f"{kind}_config") for kind in ("text", "vision"))
        text = text.filled(SIGLIP_TEXT)
        tower = cls.tower(vision)
        width = text.integer("projection_size" if "projection_size" in text else "hidden_size")
        if width != tower.width:
            raise text.wrong("projection_size", width, f"{tower.width}, the width of pictures' vectors")
        layer, head = tower.layers[-1], (HeadSpec(outputs=width),)
        pooler = PoolerSpec(heads=layer.attention.num_heads, norm=layer.norm, mlp=layer.mlp)
        pooling = PoolingSpec(
            kind="last",
            task="embed",
            width=width,
            head=head,
            apart=True,
            filled=text.integer("max_position_embeddings"),
            filler=text.integer("pad_token_id", at_least=0),
        )
        return texts(cls.name, text, pooling, replace(tower, pooler=pooler), both_ways=True)

    @staticmethod
    def tower(vision: Config) -> TowerSpec:
        """Return the tower without its end."""
        width = Config(vision.entries, SIGLIP_PICTURES).integer("hidden_size")
        return siglip_tower(vision, ProjectorSpec(outputs=width, absent=True))

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        end = f"{PICTURES}.head"
        found = {
            **text_weights(spec),
            **named("head.maps.0", TEXT, {"dense": "head"}, bias=True),
            **siglip_weights(spec.tower, PICTURES),
            "tower.pooler.query": (Source(name=f"{end}.probe", row=2),),
            "tower.pooler.qkv.weight": (Source(name=f"{end}.attention.in_proj_weight"),),
            "tower.pooler.qkv.bias": (Source(name=f"{end}.attention.in_proj_bias"),),
        }
        parts = {"out": "attention.out_proj", "norm": "layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
        return found | named("tower.pooler", end, parts, bias=True)


class Siglip2Embedder(SiglipEmbedder):
    """SigLIP 2 for pictures of any shape (NaFlex), whose patches get positions of a resized table."""

    name = "Siglip2Model"

    @staticmethod
    def tower(vision: Config) -> TowerSpec:
        """Return the tower without its end."""
        own = Config(vision.entries, {**SIGLIP_PICTURES, "num_patches": 256})
        count = own.integer("num_patches")
        side = math.isqrt(count)
        if side**2 != count:
            raise own.wrong("num_patches", count, "a square number, as positions lie in a square")
        tower = SiglipEmbedder.tower(own.changed(image_size=side * own.integer("patch_size")))
        return replace(tower, grid=GridSpec(side=side, fit="means"))

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        patch = (Source(name=f"{PICTURES}.embeddings.patch_embedding.weight"),)
        return {**super().weights(spec), "tower.patch.weight": patch}
