"""Mistral and Ministral 3, alone or with a tower for images: Llama with a sliding window on every layer, or on none.

The queries of Ministral 3 grow with their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.core.specs.model import ModelSpec, NormSpec, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, changed, llama_like
from ridgeline.models.mistral4 import Mistral4
from ridgeline.models.names import named
from ridgeline.models.pixtral import pixtral_tower, pixtral_weights
from ridgeline.models.rope import growth
from ridgeline.models.windows import listed_windows
from ridgeline.models.wrapped import TOWERS, text_config, text_weights

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


DEFAULTS_3 = {  # of Ministral 3
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

WITH_TOWER = {
    "vision_feature_layer": -1,
    "spatial_merge_size": 2,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
}


class Mistral:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        values.refuse("layer_types", "MistralForCausalLM has one sliding_window for all layers")
        window = values.integer("sliding_window") if "sliding_window" in values else None
        return llama_like("MistralForCausalLM", values, windows=[window] * values.integer("num_hidden_layers"))

    weights = staticmethod(Llama.weights)


class Ministral:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        count, window = values.integer("num_hidden_layers"), None
        if "sliding_window" in values:
            window = values.integer("sliding_window")
        types = values.layer_types(count) or ["sliding_attention"] * count
        windows = listed_windows(types, window)
        return llama_like("MinistralForCausalLM", values, windows=windows)

    weights = staticmethod(Llama.weights)


class Ministral3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS_3)
        window = values.integer("sliding_window") if "sliding_window" in values else None
        windows = [window] * values.integer("num_hidden_layers")
        spec = changed(llama_like("Ministral3ForCausalLM", values, windows=windows), {"growth": growth(values)})
        return replace(spec, max_position_embeddings=values.integer("max_position_embeddings"))

    weights = staticmethod(Llama.weights)


class Mistral3Multimodal:
    """Mistral 3 with Pixtral's tower, whose squares of patches are merged. A config without a tower is the text model
    alone."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        text = text_config(config)
        known = {"mistral": Mistral.spec, "ministral3": Ministral3.spec, "mistral4": Mistral4.spec}
        if not isinstance(kind := text.get("model_type", "mistral"), str) or kind not in known:
            raise wrong("model_type", kind, f"{' or '.join(known)} in the text_config of Mistral3")
        spec = known[kind]({"sliding_window": None, **text})
        values = Config(config, WITH_TOWER)
        if "vision_config" not in values:
            return replace(spec, architecture="Mistral3ForConditionalGeneration", unused=TOWERS)
        vision = values.section("vision_config")
        if (tower := vision.entries.get("model_type", "pixtral")) != "pixtral":
            raise wrong("model_type", tower, "pixtral in the vision_config of Mistral3")
        if (layer := values.raw("vision_feature_layer")) != -1:
            raise values.wrong("vision_feature_layer", layer, "-1, the last layer of the tower")
        projector = ProjectorSpec(
            outputs=spec.hidden_size,
            merge=values.integer("spatial_merge_size"),
            norm=NormSpec(eps=Config(text, LLAMA_DEFAULTS).number("rms_norm_eps")),
            joined="map",
            hidden=spec.hidden_size,
            activation=values.ungated_activation("projector_hidden_act"),
            bias=values.boolean("multimodal_projector_bias"),
        )
        own = pixtral_tower(vision, projector)
        return replace(spec, architecture="Mistral3ForConditionalGeneration", tower=own, unused=())

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        latent = isinstance(spec.layers[0].mixer, LatentAttentionSpec)
        text = text_weights(Mistral4.weights(spec) if latent else Llama.weights(spec), whole=True)
        if spec.tower is None:
            return text
        theirs = "multi_modal_projector"
        return {
            **text,
            **pixtral_weights(spec.tower, "vision_tower"),
            **named("tower.projector", theirs, {"norm": "norm", "merger": "patch_merger.merging_layer"}),
            **named("tower.projector", theirs, {"up": "linear_1", "down": "linear_2"}, bias=spec.tower.projector.bias),
        }
