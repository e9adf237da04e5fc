"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen's text models, whose positions have three axes, behind towers of any size.

Qwen2.5's tower has windows in most layers. Qwen3's adds vectors of some of its layers behind the decoder's first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
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
from ridgeline.core.specs.tower import GridSpec, ProjectorSpec, TowerSpec
from ridgeline.models.config import Config, check_colors, wrong
from ridgeline.models.experts import expert_weights
from ridgeline.models.llama import changed, decoder_weights
from ridgeline.models.names import named
from ridgeline.models.qwen2 import Qwen2
from ridgeline.models.qwen3 import Qwen3
from ridgeline.models.qwen3_moe import Qwen3Moe
from ridgeline.models.rope import axes
from ridgeline.models.wrapped import text_weights

DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "in_channels": 3,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_heads": 16,
    "rope_theta": 10000.0,
}
DEFAULTS_2 = {**DEFAULTS, "embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
DEFAULTS_2_5 = {
    **DEFAULTS,
    "hidden_size": 3584,
    "out_hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
DEFAULTS_3 = {
    **DEFAULTS,
    "depth": 27,
    "hidden_size": 1152,
    "out_hidden_size": 3584,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
LAYER = {
    "mixer_norm": "norm1",
    "mixer.qkv": "attn.qkv",
    "mixer.out": "attn.proj",
    "feed_forward_norm": "norm2",
}


class Qwen2VL:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        text = Qwen2.spec(_text(config))
        vision = Config(_vision(config), DEFAULTS_2)
        width = vision.integer("embed_dim")
        norm = NormSpec(kind="layer", eps=1e-6)
        mlp = MLPSpec(
            intermediate_size=int(width * vision.number("mlp_ratio")),
            activation=vision.ungated_activation("hidden_act"),
            gated=False,
            bias=True,
        )
        if (outputs := vision.integer("hidden_size")) != text.hidden_size:
            raise vision.wrong("hidden_size", outputs, f"the text model's {text.hidden_size}")
        tower = _tower(vision, width, norm, mlp, _merger(vision, width, norm, text.hidden_size))
        return _whole("Qwen2VLForConditionalGeneration", text, config, tower)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        names = {"feed_forward.up": "mlp.fc1", "feed_forward.down": "mlp.fc2"}
        return {**decoder_weights(spec), **_tower_weights(spec, "visual", names, MERGER_2)}


class Qwen2_5VL:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        text = Qwen2.spec(_text(config))
        vision = Config(_vision(config), DEFAULTS_2_5)
        width, merge, patch = (vision.integer(n) for n in ("hidden_size", "spatial_merge_size", "patch_size"))
        norm = NormSpec(kind="rms", eps=1e-6)
        mlp = MLPSpec(
            intermediate_size=vision.integer("intermediate_size"), activation=vision.activation("hidden_act"), bias=True
        )
        if (outputs := vision.integer("out_hidden_size")) != text.hidden_size:
            raise vision.wrong("out_hidden_size", outputs, f"the text model's {text.hidden_size}")
        tower = _tower(vision, width, norm, mlp, _merger(vision, width, norm, text.hidden_size))
        window, whole = vision.integer("window_size") // merge // patch, _layers(vision, "fullatt_block_indexes")
        if not window:
            raise vision.wrong("window_size", vision.integer("window_size"), f"at least {merge * patch} pixels")
        tower = replace(tower, window=window, whole=whole)
        return _whole("Qwen2_5_VLForConditionalGeneration", text, config, tower)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        names = {"feed_forward.gate_up": "mlp.gate_proj mlp.up_proj", "feed_forward.down": "mlp.down_proj"}
        return {**decoder_weights(spec), **_tower_weights(spec, "visual", names, MERGER_2)}


class Qwen3VL:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        text = Qwen3.spec(_text(config))
        return _whole("Qwen3VLForConditionalGeneration", text, config, qwen3_tower(config, text))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return {**text_weights(decoder_weights(spec)), **qwen3_tower_weights(spec)}


class Qwen3VLMoe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        text = Qwen3Moe.spec({"norm_topk_prob": True, **_text(config)})
        return _whole("Qwen3VLMoeForConditionalGeneration", text, config, qwen3_tower(config, text))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = text_weights(expert_weights(spec))
        for index, layer in enumerate(spec.layers):
            if isinstance(layer.feed_forward, ExpertsSpec):
                theirs = f"model.language_model.layers.{index}.mlp.experts"
                for ours, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
                    source = Source(name=f"{theirs}.{name}", stacked=True, transpose=True)
                    found[f"layers.{index}.feed_forward.{ours}.weight"] = (source,)
        return {**found, **qwen3_tower_weights(spec)}


def qwen3_tower(config: Mapping[str, Any], text: ModelSpec) -> TowerSpec:
    """Return the tower of Qwen3-VL and of what descends from it."""
    vision = Config(_vision(config), DEFAULTS_3)
    width, positions = vision.integer("hidden_size"), vision.integer("num_position_embeddings")
    norm = NormSpec(kind="layer", eps=1e-6)
    mlp = MLPSpec(
        intermediate_size=vision.integer("intermediate_size"),
        activation=vision.ungated_activation("hidden_act"),
        gated=False,
        bias=True,
    )
    if (outputs := vision.integer("out_hidden_size")) != text.hidden_size:
        raise vision.wrong("out_hidden_size", outputs, f"the text model's {text.hidden_size}")
    if (side := isqrt(positions)) ** 2 != positions:
        raise vision.wrong("num_position_embeddings", positions, "a square, as the table is a grid")
    merger = _merger(vision, width, norm, outputs)
    deep = _layers(vision, "deepstack_visual_indexes")
    if len(deep) > len(text.layers):
        raise vision.wrong("deepstack_visual_indexes", list(deep), f"of at most {len(text.layers)} layers")
    return replace(
        _tower(vision, width, norm, mlp, merger),
        patch_bias=True,
        grid=GridSpec(side=side, fit="corners"),
        deep=deep,
        deep_projector=replace(merger, norm_merged=True) if deep else None,
    )


def qwen3_tower_weights(spec: ModelSpec) -> WeightMap:
    """Return the weight map of that tower."""
    assert spec.tower is not None
    names = {"feed_forward.up": "mlp.linear_fc1", "feed_forward.down": "mlp.linear_fc2"}
    found = _tower_weights(spec, "model.visual", names, MERGER_3)
    found["tower.patch.bias"] = (Source(name="model.visual.patch_embed.proj.bias"),)
    found["tower.positions"] = (Source(name="model.visual.pos_embed.weight"),)
    for index in range(len(spec.tower.deep)):
        theirs = f"model.visual.deepstack_merger_list.{index}"
        found |= named(f"tower.deep.{index}", theirs, MERGER_3, bias=True)
    return found


MERGER_2 = {"norm": "ln_q", "up": "mlp.0", "down": "mlp.2"}
MERGER_3 = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's config. The first checkpoints have it outside of any section."""
    own = config.get("text_config")
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**own, **tied} if isinstance(own, Mapping) else config


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tower's config, with the base of its rotation if that stands apart."""
    own = Config(config).section("vision_config", required=True)
    base = own.section("rope_parameters")
    return {**own.entries, **({"rope_theta": base.number("rope_theta")} if "rope_theta" in base else {})}


def _whole(architecture: str, text: ModelSpec, config: Mapping[str, Any], tower: TowerSpec) -> ModelSpec:
    """Return a text model, whose heads rotate by three axes, with its tower."""
    rope = text.layers[0].attention.rope
    assert rope is not None
    turned = replace(rope, axes=axes(Config(_text(config)), rope.rotary_dim // 2))
    return replace(changed(text, {"rope": turned}), architecture=architecture, tower=tower)


def _tower(vision: Config, width: int, norm: NormSpec, mlp: MLPSpec, merger: ProjectorSpec) -> TowerSpec:
    heads = vision.integer("num_heads")
    if width % heads or (width // heads) % 4:
        raise vision.wrong("num_heads", heads, f"so many that heads of a width of {width} have a multiple of 4")
    check_colors(vision, "in_channels")
    head_dim = width // heads
    rope = RopeSpec(theta=vision.number("rope_theta"), rotary_dim=head_dim)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=True,
        out_bias=True,
        rope=rope,
        bidirectional=True,
    )
    return TowerSpec(
        width=width,
        patch_width=3 * vision.integer("temporal_patch_size") * vision.integer("patch_size") ** 2,
        layers=(LayerSpec(mixer=attention, feed_forward=mlp, norm=norm),) * vision.integer("depth"),
        projector=merger,
    )


def _merger(vision: Config, width: int, norm: NormSpec, outputs: int) -> ProjectorSpec:
    merge = vision.integer("spatial_merge_size")
    return ProjectorSpec(outputs=outputs, merge=merge, norm=norm, hidden=width * merge**2)


def _layers(vision: Config, name: str) -> tuple[int, ...]:
    """Return the numbers of layers that an entry lists."""
    found, depth = vision.raw(name) or [], vision.integer("depth")
    if not isinstance(found, list) or not all(isinstance(each, int) and 0 <= each < depth for each in found):
        raise wrong(name, found, f"a list of layers from 0 to {depth - 1}")
    return tuple(found)


def _tower_weights(
    spec: ModelSpec, theirs: str, feed_forward: Mapping[str, str], merger: Mapping[str, str]
) -> WeightMap:
    tower = spec.tower
    assert tower is not None
    patch = isqrt(tower.patch_width // 6)
    kernel = (tower.patch_width // (3 * patch**2), patch, patch)
    found: WeightMap = {"tower.patch.weight": (Source(name=f"{theirs}.patch_embed.proj.weight", kernel=kernel),)}
    rms = tower.layers[0].norm.kind == "rms"
    for index in range(len(tower.layers)):
        ours, own = f"tower.layers.{index}", f"{theirs}.blocks.{index}"
        found |= named(ours, own, {**LAYER, **feed_forward}, bias=True)
        if rms:
            del found[f"{ours}.mixer_norm.bias"], found[f"{ours}.feed_forward_norm.bias"]
    found |= named("tower.projector", f"{theirs}.merger", merger, bias=True)
    if rms:
        del found["tower.projector.norm.bias"]
    return found
