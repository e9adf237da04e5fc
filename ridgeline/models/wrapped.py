"""The text model inside a checkpoint that also has towers for images or sounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.models.config import Config

TOWERS = (
    *("model.vision_tower.", "model.multi_modal_projector.", "model.audio_tower."),
    *("vision_tower.", "multi_modal_projector.", "mm_projector."),
)


def text_config(config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the config of the text model. If the whole one says whether embeddings are tied, its word counts.

    defaults: what the family's text model has where its config says nothing. A nested config often leaves out what is
        its class's default.
    """
    Config(config).section("text_config", required=True)
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**(defaults or {}), **config["text_config"], **tied}


def text_spec(spec: ModelSpec, towers: tuple[str, ...]) -> ModelSpec:
    """Return a text model that stands inside such a checkpoint. Its towers are not used."""
    own = (name.replace("model.", "model.language_model.", 1) for name in spec.unused)
    return replace(spec, unused=(*towers, *own))


def text_weights(weights: WeightMap, *, whole: bool = False, part: str = "language_model") -> WeightMap:
    """Return a text model's weight map with the names that its tensors have inside such a checkpoint.

    whole: the text model is there with its output layer, as "language_model." (default: without, inside "model.").
    part: its name there.
    """

    def within(name: str) -> str:
        if whole:
            return f"{part}.{name}"
        return f"model.{part}.{name.removeprefix('model.')}" if name.startswith("model.") else name

    return {
        parameter: tuple(replace(source, name=within(source.name)) for source in sources)
        for parameter, sources in weights.items()
    }
