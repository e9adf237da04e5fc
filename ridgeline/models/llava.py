"""LLaVA-1.5, 1.6 and OneVision, and Pixtral: a text model with a tower, whose patches become tokens by two linear maps.

From 1.6 on a vector of its own ends each line of a picture's patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec, TowerSpec
from ridgeline.models.clip import clip_tower, clip_weights
from ridgeline.models.config import Config
from ridgeline.models.llama import Llama, decoder_weights
from ridgeline.models.mistral import Mistral
from ridgeline.models.names import named
from ridgeline.models.pixtral import pixtral_tower, pixtral_weights
from ridgeline.models.qwen2 import Qwen2
from ridgeline.models.siglip import siglip_tower, siglip_weights
from ridgeline.models.wrapped import text_config, text_weights

DEFAULTS: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
ONEVISION = {**DEFAULTS, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
SIZES: dict[str, int] = {  # what text_config leaves out
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
TEXTS: dict[str, tuple[Callable[[Mapping[str, Any]], ModelSpec], dict[str, int]]] = {
    "llama": (Llama.spec, SIZES),
    "mistral": (Mistral.spec, {**SIZES, "intermediate_size": 14336, "sliding_window": 4096}),
    "qwen2": (Qwen2.spec, {**SIZES, "intermediate_size": 22016, "vocab_size": 151936}),
}
TOWERS = {"clip_vision_model": 12, "siglip_vision_model": 12, "pixtral": 24}  # with the layers of its class
TOWER = "vision_tower"


class Llava:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec("LlavaForConditionalGeneration", Config(config, DEFAULTS), ("llama", "clip_vision_model"))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        tower = spec.tower
        assert tower is not None
        found = text_weights(decoder_weights(spec), whole=True)
        found |= _tower_weights(tower)
        maps = {"up": "linear_1", "down": "linear_2"}
        return found | named("tower.projector", "multi_modal_projector", maps, bias=tower.projector.bias)


class LlavaNext:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return with_lines(
            _spec("LlavaNextForConditionalGeneration", Config(config, DEFAULTS), ("llama", "clip_vision_model"))
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return {**Llava.weights(spec), "tower.newline": (Source(name="image_newline"),)}


class LlavaOnevision:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        kinds = "qwen2", "siglip_vision_model"
        return with_lines(_spec("LlavaOnevisionForConditionalGeneration", Config(config, ONEVISION), kinds))

    weights = staticmethod(LlavaNext.weights)


def with_lines(spec: ModelSpec) -> ModelSpec:
    """Return the model whose tower has a vector that ends lines."""
    assert spec.tower is not None
    if spec.tower.grid is None:
        raise ModelLoadError(f"config.json has a {spec.architecture} with Pixtral's tower, which has no tiles.")
    return replace(spec, tower=replace(spec.tower, newline=True))


def _spec(architecture: str, values: Config, kinds: tuple[str, str]) -> ModelSpec:
    """Return a text model with a tower. kinds: theirs, where the config does not say."""
    text, vision = values.section("text_config", required=True), values.section("vision_config", required=True)
    found = text.entries.get("model_type", kinds[0]), vision.entries.get("model_type", kinds[1])
    if found[0] not in TEXTS or found[1] not in TOWERS:
        raise ModelLoadError(
            f"config.json has a LLaVA of {found[0]!r} and {found[1]!r}; the text model must be one of "
            f"{', '.join(TEXTS)}, and the tower one of {', '.join(TOWERS)}."
        )
    spec, defaults = TEXTS[found[0]]
    own = spec(text_config(values.entries, defaults))
    wanted = "default" if found[1] == "clip_vision_model" else "full"
    if (strategy := values.raw("vision_feature_select_strategy")) != wanted:
        raise values.wrong("vision_feature_select_strategy", strategy, f"{wanted} with a tower {found[1]}")
    total = Config(vision.entries, {"num_hidden_layers": TOWERS[found[1]]}).integer("num_hidden_layers")
    layer = values.raw("vision_feature_layer")
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise values.wrong("vision_feature_layer", layer, "the number of one layer")
    projector = ProjectorSpec(
        outputs=own.hidden_size,
        hidden=own.hidden_size,
        activation=values.ungated_activation("projector_hidden_act"),
        bias=values.boolean("multimodal_projector_bias"),
    )
    tower = _tower(found[1], vision, projector, layer if layer >= 0 else total + 1 + layer)
    return replace(
        own, architecture=architecture, tower=tower, unused=(*own.unused, *_unused(len(tower.layers), total))
    )


def _tower(kind: str, vision: Config, projector: ProjectorSpec, layers: int) -> TowerSpec:
    if kind == "clip_vision_model":
        return clip_tower(vision, projector, layers)
    if kind == "siglip_vision_model":
        return siglip_tower(vision, projector, layers)
    tower = pixtral_tower(vision, projector)
    if layers != len(tower.layers):
        raise vision.wrong("num_hidden_layers", len(tower.layers), f"{layers}, as vision_feature_layer says")
    return tower


def _tower_weights(tower: TowerSpec) -> WeightMap:
    if tower.class_token:
        return clip_weights(tower, TOWER)
    return siglip_weights(tower, TOWER) if tower.grid is not None else pixtral_weights(tower, TOWER)


def _unused(layers: int, total: int) -> list[str]:
    """Return the names of tensors of towers behind the layer that is taken, and of their pooled output."""
    later = [f"encoder.layers.{index}." for index in range(layers, total)]
    parts = (*later, "post_layernorm.", "head.", "embeddings.position_ids")
    return [f"{TOWER}.{inner}{name}" for inner in ("", "vision_model.") for name in parts]
