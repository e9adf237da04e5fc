"""Classifiers on decoders: the last token is mapped to the scores of labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.models.config import Architecture, Config
from ridgeline.models.labels import classification


@dataclass(frozen=True)
class Classifier:
    """The architecture of a classifier on a decoder.

    name: config.json's.
    decoder: the decoder's own architecture.
    """

    name: str
    decoder: Architecture

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        found = self.decoder.spec(config)
        pooling = classification(Config(config), "last", biasless=True, whole=found.sees_behind)
        return replace(found, architecture=self.name, pooling=pooling, unused=(*found.unused, "lm_head."))

    def weights(self, spec: ModelSpec) -> WeightMap:
        found = self.decoder.weights(spec)
        kept = {name: sources for name, sources in found.items() if not name.startswith("unembed.")}
        return kept | {"head.maps.0.dense.weight": (Source(name="score.weight"),)}
