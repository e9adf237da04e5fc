"""ELECTRA: BERT whose tables may be narrower than its layers."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.models.bert import DEFAULTS, Bert
from ridgeline.models.names import named


class Electra(Bert):
    name = "ElectraModel"
    base = "electra"
    defaults: ClassVar = {
        **DEFAULTS,
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    before_labels = "gelu"
    unused = ("generator_", "discriminator_", "classifier.")

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        found = super().weights(spec)
        if spec.embed_width:
            found |= named("", cls.base, {"embed_project": "embeddings_project"}, bias=True)
        return found


class ElectraClassifier(Electra):
    name = "ElectraForSequenceClassification"
    head = ("classifier.dense", "classifier.out_proj")
