"""Phi-4-multimodal: Phi-4-mini with SigLIP's tower, whose squares of patches are averaged, and with a conformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec, TowerSpec
from ridgeline.models.config import Config
from ridgeline.models.names import named
from ridgeline.models.phi3 import Phi3
from ridgeline.models.phi4_sounds import phi4_listener, phi4_listener_weights
from ridgeline.models.siglip import DEFAULTS as SIGLIP_DEFAULTS
from ridgeline.models.siglip import siglip_tower, siglip_weights

DEFAULTS = {
    **{"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
VISION = {
    **SIGLIP_DEFAULTS,
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"image_size": 448, "patch_size": 14, "crop_size": 448, "feature_layer": -2},
}
PICTURES, SOUNDS = "model.embed_tokens_extend.image_embed", "model.embed_tokens_extend.audio_embed"


class Phi4Multimodal:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        own = Phi3.spec({**DEFAULTS, **{name: value for name, value in config.items() if value is not None}})
        vision = Config(config).section("vision_config").entries
        values = Config({**VISION, **{name: value for name, value in vision.items() if value is not None}})
        total, layer = values.integer("num_hidden_layers"), values.raw("feature_layer")
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise values.wrong("feature_layer", layer, "the number of one layer")
        tower = _tower(values, own.hidden_size, layer if layer >= 0 else total + 1 + layer)
        later = [f"encoder.layers.{index}." for index in range(len(tower.layers), total)]
        parts = [f"{PICTURES}.img_processor.{name}" for name in (*later, "post_layernorm.", "head.")]
        listener = phi4_listener(Config(config).section("audio_config"), own.hidden_size)
        return replace(
            own,
            architecture="Phi4MultimodalForCausalLM",
            tower=tower,
            listener=listener,
            unused=(*own.unused, *parts),
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        assert spec.listener is not None
        maps = {"up": "img_projection_up", "down": "img_projection_down"}
        rows = {"global": 2, "sub": 3}  # with so many dimensions of size 1
        return {
            **Phi3.weights(spec),
            **siglip_weights(spec.tower, f"{PICTURES}.img_processor"),
            **named("tower.projector", PICTURES, maps, bias=True),
            **phi4_listener_weights(spec.listener, SOUNDS),
            **{
                f"tower.ends.{number}": (Source(name=f"{PICTURES}.{name}_img_feature_extensor", row=row),)
                for number, (name, row) in enumerate(rows.items())
            },
        }


def _tower(vision: Config, outputs: int, layers: int) -> TowerSpec:
    projector = ProjectorSpec(outputs=outputs, merge=2, joined="mean", hidden=outputs)
    tower = siglip_tower(vision, projector, layers, defaults=VISION)
    assert tower.grid is not None
    if tower.grid.side % 2 or vision.integer("crop_size") != vision.integer("image_size"):
        raise ModelLoadError(
            f"config.json has tiles of {vision.integer('crop_size')} pixels and {tower.grid.side} patches to a side; "
            f"Phi-4's tiles have image_size, and an even number of patches."
        )
    return replace(tower, grid=replace(tower.grid, fit="nearest"), ends=2, covered=True)
