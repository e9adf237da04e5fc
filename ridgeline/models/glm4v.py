"""GLM-4.1V and 4.5V: GLM-4's text models, whose positions have three axes, behind a tower of any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from ridgeline.core.specs.tower import GatedProjectorSpec, GridSpec, TowerSpec
from ridgeline.models.config import Config, check_colors
from ridgeline.models.glm4 import Glm4
from ridgeline.models.glm4_moe import Glm4Moe
from ridgeline.models.llama import changed
from ridgeline.models.names import named
from ridgeline.models.rope import axes
from ridgeline.models.wrapped import text_config, text_weights

VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
    "rope_theta": 10000.0,
}
DENSE = {  # what text_config leaves out
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
}
MIXTURE = {
    **DENSE,
    "vocab_size": 151424,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
    "attention_bias": True,
}
LAYER = {
    "mixer_norm": "norm1",
    "mixer.qkv": "attn.qkv",
    "mixer.out": "attn.proj",
    "feed_forward_norm": "norm2",
    "feed_forward.gate_up": "mlp.gate_proj mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
MERGER = {
    "mixed": "proj",
    "norm": "post_projection_norm",
    "mlp.gate_up": "gate_proj up_proj",
    "mlp.down": "down_proj",
}
TOWER = "model.visual"


class Glm4vVision:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        text = _text(config, DENSE)
        return _seeing("Glm4vForConditionalGeneration", Glm4.spec(text), text, config)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return {**text_weights(Glm4.weights(spec)), **_tower_weights(spec)}


class Glm4vMoeVision:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        text = _text(config, MIXTURE)
        return _seeing("Glm4vMoeForConditionalGeneration", Glm4Moe.spec(text), text, config)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return {**text_weights(Glm4Moe.weights(spec)), **_tower_weights(spec)}


def _text(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's config, in which heads share the width if it does not say theirs."""
    text = Config(text_config(config, defaults))
    width = text.integer("hidden_size") // max(1, text.integer("num_attention_heads"))
    return {"head_dim": width, **text.entries}


def _seeing(architecture: str, text: ModelSpec, entries: Mapping[str, Any], config: Mapping[str, Any]) -> ModelSpec:
    """Return a text model, whose heads rotate by three axes, with its tower."""
    rope = text.layers[0].attention.rope
    assert rope is not None
    turned = changed(text, {"rope": replace(rope, axes=axes(Config(entries), rope.rotary_dim // 2))})
    unused = tuple(name.replace("model.", "model.language_model.", 1) for name in text.unused)
    tower = _tower(config, text.hidden_size)
    return replace(turned, architecture=architecture, tower=tower, unused=unused)


def _tower(config: Mapping[str, Any], outputs: int) -> TowerSpec:
    section = Config(config).section("vision_config", required=True)
    base = section.section("rope_parameters")
    vision = Config({**({"rope_theta": base.number("rope_theta")} if "rope_theta" in base else {}), **section.entries})
    vision = Config(vision.entries, VISION)
    width, heads, patch = (vision.integer(name) for name in ("hidden_size", "num_heads", "patch_size"))
    if width % heads or (width // heads) % 4:
        raise vision.wrong("num_heads", heads, f"so many that heads of a width of {width} have a multiple of 4")
    if (own := vision.integer("out_hidden_size")) != outputs:
        raise vision.wrong("out_hidden_size", own, f"the text model's {outputs}")
    check_colors(vision, "in_channels")
    norm, activation = NormSpec(eps=vision.number("rms_norm_eps")), vision.activation("hidden_act")
    rope = RopeSpec(theta=vision.number("rope_theta"), rotary_dim=width // heads)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        scale=(width // heads) ** -0.5,
        qkv_bias=vision.boolean("attention_bias"),
        rope=rope,
        bidirectional=True,
    )
    layer = LayerSpec(
        mixer=attention, feed_forward=MLPSpec(intermediate_size=outputs, activation=activation), norm=norm
    )
    return TowerSpec(
        width=width,
        patch_width=3 * vision.integer("temporal_patch_size") * patch**2,
        patch_bias=True,
        patch_norm=norm,
        layers=(layer,) * vision.integer("depth"),
        grid=GridSpec(side=vision.integer("image_size") // patch, fit="cubic"),
        final_norm=norm,
        projector=GatedProjectorSpec(
            outputs=outputs,
            merge=vision.integer("spatial_merge_size"),
            norm=NormSpec(kind="layer", eps=1e-5),
            hidden=vision.integer("intermediate_size"),
            activation=activation,
        ),
    )


def _tower_weights(spec: ModelSpec) -> WeightMap:
    tower = spec.tower
    assert tower is not None
    merge, attention = tower.projector.merge, tower.layers[0].attention
    patch = round((tower.patch_width // 6) ** 0.5)
    convolution = (tower.patch_width // (3 * patch**2), patch, patch)
    found: WeightMap = {
        "tower.patch.weight": (Source(name=f"{TOWER}.patch_embed.proj.weight", kernel=convolution),),
        "tower.patch.bias": (Source(name=f"{TOWER}.patch_embed.proj.bias"),),
        "tower.positions": (Source(name=f"{TOWER}.embeddings.position_embedding.weight"),),
        "tower.projector.merger.weight": (Source(name=f"{TOWER}.downsample.weight", kernel=(merge, merge)),),
        "tower.projector.merger.bias": (Source(name=f"{TOWER}.downsample.bias"),),
        "tower.projector.norm.bias": (Source(name=f"{TOWER}.merger.post_projection_norm.bias"),),
    }
    found |= named("tower", TOWER, {"patch_norm": "post_conv_layernorm", "final_norm": "post_layernorm"})
    found |= named("tower.projector", f"{TOWER}.merger", MERGER)
    for index in range(len(tower.layers)):
        ours, theirs = f"tower.layers.{index}", f"{TOWER}.blocks.{index}"
        found |= named(ours, theirs, LAYER)
        if attention.qkv_bias:
            found[f"{ours}.mixer.qkv.bias"] = (Source(name=f"{theirs}.attn.qkv.bias"),)
    return found
