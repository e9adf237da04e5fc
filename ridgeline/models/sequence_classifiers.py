"""Classifiers on decoders: A decoder whose last token is mapped to the scores of labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.labels import classification
from ridgeline.models.llama import Llama
from ridgeline.models.qwen2 import Qwen2
from ridgeline.models.qwen3 import Qwen3


class LlamaClassifier:
    decoder: ClassVar[type[Llama | Qwen2 | Qwen3]] = Llama
    name: ClassVar[str] = "LlamaForSequenceClassification"

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        pooling = classification(Config(config), "last", biasless=True, whole=False)
        return replace(cls.decoder.spec(config), architecture=cls.name, pooling=pooling, unused=("lm_head.",))

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        found = cls.decoder.weights(spec)
        found.pop("unembed.weight", None)
        return found | {"head.maps.0.dense.weight": (Source(name="score.weight"),)}


class Qwen2Classifier(LlamaClassifier):
    decoder = Qwen2
    name = "Qwen2ForSequenceClassification"


class Qwen3Classifier(LlamaClassifier):
    decoder = Qwen3
    name = "Qwen3ForSequenceClassification"
