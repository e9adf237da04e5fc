"""InternVL 3: Qwen's text models behind a tower of scaled layers, whose squares of patches merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.tower import GridSpec, ProjectorSpec, TowerSpec
from ridgeline.models.clip import vit_layers
from ridgeline.models.config import Config, check_colors, wrong
from ridgeline.models.llama import decoder_weights
from ridgeline.models.names import named, square_patches
from ridgeline.models.qwen2 import Qwen2
from ridgeline.models.qwen3 import Qwen3
from ridgeline.models.wrapped import text_config, text_weights

DEFAULTS = {
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
ALWAYS = {  # what the config of a tower may say, and the one value that runs here
    "norm_type": "layer_norm",
    "use_qk_norm": False,
    "use_absolute_position_embeddings": True,
    "use_mask_token": False,
    "use_mean_pooling": True,
}
LAYER = {
    "mixer_norm": "layernorm_before",
    "mixer.qkv": "attention.q_proj attention.k_proj attention.v_proj",
    "mixer.out": "attention.projection_layer",
    "feed_forward_norm": "layernorm_after",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
}


class InternVL3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values, text = Config(config, DEFAULTS), text_config(config)
        known = {"qwen2": Qwen2.spec, "qwen3": Qwen3.spec}
        if not isinstance(kind := text.get("model_type", "qwen2"), str) or kind not in known:
            raise wrong("model_type", kind, f"{' or '.join(known)} in the text_config of InternVL")
        for name in ("vision_feature_layer", "vision_feature_select_strategy", "downsample_ratio"):
            if (value := values.raw(name)) != DEFAULTS[name]:
                raise values.wrong(name, value, str(DEFAULTS[name]))
        own = known[kind](text)
        projector = ProjectorSpec(
            outputs=own.hidden_size,
            merge=2,
            norm=NormSpec(kind="layer", eps=1e-5),
            norm_merged=True,
            hidden=own.hidden_size,
            activation=values.ungated_activation("projector_hidden_act"),
        )
        tower = _tower(values.section("vision_config", required=True), projector)
        return replace(own, architecture="InternVLForConditionalGeneration", tower=tower)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        tower = spec.tower
        assert tower is not None
        inner = "vision_tower.embeddings"
        found: WeightMap = {
            "tower.patch.weight": square_patches(tower, f"{inner}.patch_embeddings.projection.weight"),
            "tower.patch.bias": (Source(name=f"{inner}.patch_embeddings.projection.bias"),),
            "tower.class_token": (Source(name=f"{inner}.cls_token", row=2),),
            "tower.positions": (Source(name=f"{inner}.position_embeddings", row=1),),
        }
        for index, layer in enumerate(tower.layers):
            ours, theirs = f"tower.layers.{index}", f"vision_tower.encoder.layer.{index}"
            found |= named(ours, theirs, LAYER, bias=True)
            if not layer.attention.qkv_bias:
                del found[f"{ours}.mixer.qkv.bias"]
            found[f"{ours}.mixer_scale"] = (Source(name=f"{theirs}.lambda_1"),)
            found[f"{ours}.feed_forward_scale"] = (Source(name=f"{theirs}.lambda_2"),)
        maps = {"norm": "layer_norm", "up": "linear_1", "down": "linear_2"}
        return {
            **text_weights(decoder_weights(spec), whole=True),
            **found,
            **named("tower.projector", "multi_modal_projector", maps, bias=True),
        }


def _tower(vision: Config, projector: ProjectorSpec) -> TowerSpec:
    config = vision.filled({**ALWAYS, **TOWER})
    for name, value in ALWAYS.items():
        if (found := config.raw(name)) != value:
            raise wrong(name, found, f"{value!r} in the vision_config of InternVL")
    check_colors(config)
    patch, picture = (_side(config, name) for name in ("patch_size", "image_size"))
    if picture % (2 * patch):
        raise ModelLoadError(
            f"config.json has pictures of {picture} pixels a side and patches of {patch}; squares of 2 x 2 must fit."
        )
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_eps"))
    layers = vit_layers(config, norm, config.integer("num_hidden_layers"))
    biased = config.boolean("attention_bias")
    return TowerSpec(
        width=config.integer("hidden_size"),
        patch_width=3 * patch**2,
        patch_bias=True,
        layers=tuple(replace(each, mixer=replace(each.attention, qkv_bias=biased), scaled=True) for each in layers),
        projector=projector,
        class_token=True,
        grid=GridSpec(side=picture // patch),
    )


def _side(config: Config, name: str) -> int:
    """Return the side of a square that the config has as one number or two equal ones."""
    value = config.raw(name)
    pair = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(pair) != 2 or pair[0] != pair[1]:
        raise config.wrong(name, value, "two equal numbers")
    return Config({name: pair[0]}).integer(name)
