"""LLaVA-1.5: Llama with the tower of CLIP, whose patches become tokens by two linear maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec
from ridgeline.models.clip import clip_tower, clip_weights
from ridgeline.models.config import Config
from ridgeline.models.llama import Llama, decoder_weights
from ridgeline.models.names import named
from ridgeline.models.wrapped import text_config, text_weights

DEFAULTS = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True, "vision_feature_layer": -2}
TEXT = {  # what text_config leaves out
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
TOWER = "vision_tower"


class Llava:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        text, vision = values.section("text_config", required=True), values.section("vision_config", required=True)
        for section, kinds in ((text, ("llama",)), (vision, ("clip_vision_model",))):
            if (kind := section.raw("model_type")) not in kinds:
                raise ModelLoadError(
                    f"config.json has a LLaVA of {kind!r}, of which only Llama with CLIP's tower runs here."
                )
        if (strategy := values.raw("vision_feature_select_strategy")) not in (None, "default"):
            raise values.wrong("vision_feature_select_strategy", strategy, "default")
        own = Llama.spec(text_config(config, TEXT))
        total = Config(vision.entries, {"num_hidden_layers": 12}).integer("num_hidden_layers")
        layer = values.raw("vision_feature_layer")
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise values.wrong("vision_feature_layer", layer, "the number of one layer")
        projector = ProjectorSpec(
            outputs=own.hidden_size,
            hidden=own.hidden_size,
            activation=values.ungated_activation("projector_hidden_act"),
            bias=values.boolean("multimodal_projector_bias"),
        )
        tower = clip_tower(vision, projector, layer if layer >= 0 else total + 1 + layer)
        later = [f"encoder.layers.{index}." for index in range(len(tower.layers), total)]
        unused = [f"{TOWER}.{inner}{name}" for inner in ("", "vision_model.") for name in (*later, "post_layernorm.")]
        ids = tuple(f"{TOWER}.{inner}embeddings.position_ids" for inner in ("", "vision_model."))
        return replace(
            own, architecture="LlavaForConditionalGeneration", tower=tower, unused=(*own.unused, *unused, *ids)
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        maps = {"up": "linear_1", "down": "linear_2"}
        bias = spec.tower.projector.bias
        return {
            **text_weights(decoder_weights(spec), whole=True),
            **clip_weights(spec.tower, TOWER),
            **named("tower.projector", "multi_modal_projector", maps, bias=bias),
        }
