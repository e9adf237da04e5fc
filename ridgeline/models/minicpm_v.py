"""MiniCPM-V 4.6: Qwen3.5's text model behind SigLIP's tower, which merges patches in its middle and behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ABSENT, LayerSpec, ModelSpec, NormSpec, WeightMap
from ridgeline.core.specs.tower import MiddleMerge, ProjectorSpec, TowerSpec
from ridgeline.models.clip import LAYER
from ridgeline.models.config import Config, wrong
from ridgeline.models.names import named
from ridgeline.models.qwen3_5 import Qwen3_5
from ridgeline.models.siglip import DEFAULTS as SIGLIP_DEFAULTS
from ridgeline.models.siglip import siglip_tower, siglip_weights
from ridgeline.models.wrapped import text_config, text_weights

DEFAULTS: dict[str, Any] = {
    "insert_layer_id": 6,
    "drop_vision_last_layer": False,
    "downsample_mode": "16x",
    "merge_kernel_size": [2, 2],
    "merger_times": 1,
}
FIXED = ("drop_vision_last_layer", "downsample_mode", "merge_kernel_size", "merger_times")  # other values do not run
TOWER, MERGER = "model.vision_tower", "model.merger.mlp.0"


class MiniCPMV:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values, text = Config(config, DEFAULTS), text_config(config)
        if (kind := text.get("model_type")) != "qwen3_5_text":
            raise wrong("model_type", kind, "qwen3_5_text in the text_config of MiniCPM-V 4.6")
        for name in FIXED:
            value = values.raw(name)
            if (list(value) if isinstance(value, tuple) else value) != DEFAULTS[name]:
                raise values.wrong(name, value, str(DEFAULTS[name]))
        own = Qwen3_5.spec(text)
        vision = values.section("vision_config")
        tower = _tower(vision, values.integer("insert_layer_id", at_least=0), own.hidden_size)
        return replace(own, architecture="MiniCPMV4_6ForConditionalGeneration", tower=tower)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        maps, theirs = {"norm": "pre_norm", "up": "linear_1", "down": "linear_2"}, f"{TOWER}.vit_merger"
        mixer = {**{name: LAYER[name] for name in ("mixer.qkv", "mixer.out")}, "mixer_norm": "layer_norm1"}
        return {
            **text_weights(Qwen3_5.weights(spec)),
            **siglip_weights(spec.tower, TOWER),
            **named("tower.middle.layer", theirs, mixer, bias=True),
            **named("tower.middle.projector", theirs, maps, bias=True),
            **named("tower.projector", MERGER, maps, bias=True),
        }


def _tower(vision: Config, behind: int, outputs: int) -> TowerSpec:
    config = vision.filled(SIGLIP_DEFAULTS)
    if (kernel := config.raw("window_kernel_size")) not in (None, [2, 2], (2, 2)):
        raise config.wrong("window_kernel_size", kernel, "[2, 2]")
    width = config.integer("hidden_size")
    norm = NormSpec(kind="layer", eps=1e-6)
    last = ProjectorSpec(outputs=outputs, merge=2, norm=norm, norm_merged=True, hidden=4 * width)
    tower = siglip_tower(config, last)
    if behind >= len(tower.layers):
        raise wrong("insert_layer_id", behind, f"the number of one of the tower's {len(tower.layers)} layers")
    first: LayerSpec = tower.layers[0]
    squares = ProjectorSpec(
        outputs=width,
        merge=2,
        norm=first.norm,
        norm_merged=True,
        hidden=4 * config.integer("intermediate_size"),
        activation="gelu_tanh",
    )
    middle = MiddleMerge(behind=behind, layer=replace(first, feed_forward=ABSENT), projector=squares)
    assert tower.grid is not None
    return replace(tower, grid=replace(tower.grid, fit="nearest"), middle=middle)
