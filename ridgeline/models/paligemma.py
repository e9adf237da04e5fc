"""PaliGemma 1 and 2: Gemma 1 or 2 behind SigLIP's tower, with prompts whose tokens all see each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.gemma import Gemma, Gemma2, seeing_ahead
from ridgeline.models.llama import Llama
from ridgeline.models.names import named
from ridgeline.models.siglip import siglip_tower, siglip_weights
from ridgeline.models.wrapped import text_config, text_weights


class PaliGemma:
    """A prefix-LM: the prompt's tokens see each other both ways, and what is written sees what lies before it."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        text = {**text_config(config), "use_bidirectional_attention": None}
        known = {"gemma": Gemma.spec, "gemma2": Gemma2.spec}
        if not isinstance(kind := text.get("model_type", "gemma"), str) or kind not in known:
            raise wrong("model_type", kind, f"{' or '.join(known)} in the text_config of PaliGemma")
        own = replace(seeing_ahead(known[kind](text)), architecture="PaliGemmaForConditionalGeneration")
        own = replace(own, logits_softcap=None)  # transformers leaves Gemma 2's out here
        vision = Config(config).section("vision_config")
        head = ("vision_tower.head.", "vision_tower.vision_model.head.")
        tower = siglip_tower(vision, ProjectorSpec(outputs=own.hidden_size))
        return replace(own, tower=tower, both_ways="prompt", unused=(*own.unused, *head))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        found = text_weights(Llama.weights(spec), whole=True) | siglip_weights(spec.tower, "vision_tower")
        return found | named("tower.projector", "multi_modal_projector", {"down": "linear"}, bias=True)
