"""Idefics 3 and SmolVLM: Llama with SigLIP's tower, whose squares of patches become tokens by one linear map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import Llama, decoder_weights
from ridgeline.models.names import named
from ridgeline.models.siglip import DEFAULTS as SIGLIP_DEFAULTS
from ridgeline.models.siglip import siglip_tower, siglip_weights
from ridgeline.models.wrapped import text_config, text_weights

DEFAULTS = {**SIGLIP_DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
TEXT = {  # what text_config leaves out
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


class Idefics3Vision:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values, text = Config(config, {"scale_factor": 2}), text_config(config, TEXT)
        if (kind := text.get("model_type", "llama")) != "llama":
            raise wrong("model_type", kind, "llama in the text_config of Idefics 3 and SmolVLM")
        own = Llama.spec(text)
        projector = ProjectorSpec(outputs=own.hidden_size, merge=values.integer("scale_factor"), bias=False)
        tower = siglip_tower(values.section("vision_config"), projector, defaults=DEFAULTS)
        assert tower.grid is not None
        if tower.grid.side % projector.merge:
            raise ModelLoadError(
                f"config.json has {tower.grid.side} patches to a side of a picture, of which squares of "
                f"{projector.merge} are merged; see scale_factor."
            )
        return replace(own, architecture="Idefics3ForConditionalGeneration", tower=tower)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        return {
            **text_weights(decoder_weights(spec), part="text_model"),
            **siglip_weights(spec.tower, "model.vision_model"),
            **named("tower.projector", "model.connector.modality_projection", {"down": "proj"}),
        }
