"""ELECTRA: BERT whose tables may be narrower than its layers."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.models.bert import DEFAULTS, Bert


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
    embed_project = "embeddings_project"
    unused = ("generator_", "discriminator_", "classifier.")


class ElectraClassifier(Electra):
    name = "ElectraForSequenceClassification"
    head = ("classifier.dense", "classifier.out_proj")
