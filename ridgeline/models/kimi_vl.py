"""Kimi-VL and Kimi K2.5: DeepSeek-V3 behind MoonViT, a tower for pictures of any size.

Videos are not seen: their frames would attend to each other, and would be averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, NormSpec, RopeSpec, Source, WeightMap
from ridgeline.core.specs.tower import GridSpec, ProjectorSpec, TowerSpec
from ridgeline.models.clip import checked_layers, vit_layers
from ridgeline.models.config import Config, head_width, wrong
from ridgeline.models.deepseek_mla import V3_DEFAULTS, v3_like
from ridgeline.models.latent import latent_weights
from ridgeline.models.names import named, square_patches
from ridgeline.models.wrapped import text_config, text_weights

TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 14,
    "pos_emb_height": 64,
    "hidden_act": "gelu_pytorch_tanh",
}
SPELLED = {  # entries of Kimi K2.5's files, and of Kimi-VL's → the names above
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}
LAYER = {
    "mixer_norm": "norm0",
    "mixer.out": "wo",
    "feed_forward_norm": "norm1",
    "feed_forward.up": "mlp.fc0",
    "feed_forward.down": "mlp.fc1",
}
VL_PROJECTOR = "multi_modal_projector", {"norm": "pre_norm", "up": "linear_1", "down": "linear_2"}
K25_PROJECTOR = "mm_projector", {"norm": "pre_norm", "up": "proj.0", "down": "proj.2"}
NORM = NormSpec(kind="layer", eps=1e-5)
VL, K25 = "KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration"


class KimiVL:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec(VL, config)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return _weights(spec, VL_PROJECTOR)


class KimiK25:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec(K25, config)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return _weights(spec, K25_PROJECTOR)


def _spec(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    spec = v3_like(architecture, Config(text_config(config), V3_DEFAULTS))
    vision = Config(config).section("vision_config").entries
    tower = _tower(Config({SPELLED.get(name, name): value for name, value in vision.items()}), spec.hidden_size)
    return replace(spec, tower=tower, unused=tuple(f"language_model.{name}" for name in spec.unused))


def _tower(vision: Config, outputs: int) -> TowerSpec:
    config = vision.filled(TOWER)
    merge = config.raw("merge_kernel_size") or [2, 2]
    if not isinstance(merge, list | tuple) or len(merge) != 2 or merge[0] != merge[1] or type(merge[0]) is not int:
        raise wrong("merge_kernel_size", merge, "two equal whole numbers")
    side, width = config.integer("pos_emb_height"), config.integer("hidden_size")
    if (columns := config.raw("pos_emb_width")) not in (None, side):
        raise wrong("pos_emb_width", columns, f"{side}, as pos_emb_height")
    head_dim = head_width(config, "hidden_size", "num_attention_heads")
    if head_dim % 4:
        raise ModelLoadError(
            f"config.json has heads of {head_dim} in its tower; rows and columns need a multiple of 4."
        )
    rope = RopeSpec(theta=10_000.0, rotary_dim=head_dim)
    count = checked_layers(config, config.integer("num_hidden_layers"))
    layers = vit_layers(config, NORM, count)
    return TowerSpec(
        width=width,
        patch_width=3 * config.integer("patch_size") ** 2,
        patch_bias=True,
        layers=tuple(replace(each, mixer=replace(each.attention, rope=rope)) for each in layers),
        projector=ProjectorSpec(outputs=outputs, merge=merge[0], norm=NORM, hidden=width * merge[0] ** 2),
        grid=GridSpec(side=side, fit="cubic"),
        final_norm=NORM,
    )


def _weights(spec: ModelSpec, projector: tuple[str, dict[str, str]]) -> WeightMap:
    assert spec.tower is not None
    assert spec.tower.grid is not None
    theirs = "vision_tower"
    table = Source(name=f"{theirs}.patch_embed.pos_emb.weight", columns=spec.tower.grid.side)
    found: WeightMap = {
        "tower.patch.weight": square_patches(spec.tower, f"{theirs}.patch_embed.proj.weight"),
        "tower.patch.bias": (Source(name=f"{theirs}.patch_embed.proj.bias"),),
        "tower.positions": (table,),
    }
    found |= named("tower", theirs, {"final_norm": "encoder.final_layernorm"}, bias=True)
    for index, layer in enumerate(spec.tower.layers):
        ours, inner = f"tower.layers.{index}", f"{theirs}.encoder.blocks.{index}"
        found |= named(ours, inner, LAYER, bias=True)
        for kind in ("weight", "bias"):
            fused = Source(name=f"{inner}.wqkv.{kind}", turns=layer.attention.num_heads)
            found[f"{ours}.mixer.qkv.{kind}"] = (fused,)
    found |= named("tower.projector", *projector, bias=True)
    return text_weights(latent_weights(spec), whole=True) | found
