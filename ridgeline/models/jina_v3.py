"""Jina embeddings v3: XLM-RoBERTa whose queries and keys rotate."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.core.specs.model import RopeSpec
from ridgeline.models.bert import Bert
from ridgeline.models.config import Config
from ridgeline.models.roberta import ROBERTA_DEFAULTS
from ridgeline.models.rope import rope


class JinaV3(Bert):
    name = "JinaEmbeddingsV3Model"
    base = "roberta"
    defaults: ClassVar = {
        **ROBERTA_DEFAULTS,
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "rope_theta": 20000.0,
    }
    rotates = True
    embed_norm, layers = "emb_ln", "encoder.layers"
    names: ClassVar = {
        "mixer.qkv": "mixer.Wqkv",
        "mixer.out": "mixer.out_proj",
        "feed_forward.up": "mlp.fc1",
        "feed_forward.down": "mlp.fc2",
    }
    norms: ClassVar = {"mixer_post_norm": "norm1", "feed_forward_post_norm": "norm2"}

    @staticmethod
    def rope(config: Config, head_dim: int) -> RopeSpec | None:
        return rope(config, head_dim)


class JinaV3Classifier(JinaV3):
    name = "JinaEmbeddingsV3ForSequenceClassification"
    head = ("classifier.dense", "classifier.out_proj")
