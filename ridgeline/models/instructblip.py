"""InstructBLIP: Llama behind BLIP-2's tower, whose learned queries read the prompt's text too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.core.specs.queries import QueriesSpec
from ridgeline.models.blip2 import blip_tower, blip_weights
from ridgeline.models.config import Config
from ridgeline.models.llama import Llama
from ridgeline.models.names import named
from ridgeline.models.wrapped import text_weights

WORD_LAYER = {
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_post_norm": "output.LayerNorm",
}


class InstructBlip:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, {"num_query_tokens": 32})
        text = values.section("text_config", required=True)
        if (kind := text.raw("model_type")) != "llama":
            raise ModelLoadError(f"config.json has an InstructBLIP of {kind!r}, of which only Llama runs here.")
        own = Llama.spec(text.entries)
        tower = blip_tower(values, own.hidden_size, reads=True)
        return replace(own, architecture="InstructBlipForConditionalGeneration", tower=tower)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        assert isinstance(spec.tower.projector, QueriesSpec)
        tables = {"words": "word_embeddings", "places": "position_embeddings"}
        found = text_weights(Llama.weights(spec), whole=True) | blip_weights(spec.tower, "qformer.embeddings.layernorm")
        for ours, theirs in tables.items():
            found[f"tower.projector.{ours}"] = (Source(name=f"qformer.embeddings.{theirs}.weight"),)
        for index in range(len(spec.tower.projector.word_layers)):
            ours, theirs = f"tower.projector.word_layers.{index}", f"qformer.encoder.layer.{index}"
            found |= named(ours, theirs, WORD_LAYER, bias=True)
        return found
