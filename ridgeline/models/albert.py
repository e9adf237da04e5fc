"""ALBERT: BERT whose tables are narrower than its layers, which all have the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec
from ridgeline.models.bert import DEFAULTS, Bert
from ridgeline.models.config import Config, wrong


class Albert(Bert):
    name = "AlbertModel"
    base = "albert"
    defaults: ClassVar = {
        **DEFAULTS,
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
    }
    embed_project = "encoder.embedding_hidden_mapping_in"
    unused = ("predictions.", "sop_classifier.", "classifier.")
    names: ClassVar = {
        "mixer.qkv": "attention.query attention.key attention.value",
        "mixer.out": "attention.dense",
        "feed_forward.up": "ffn",
        "feed_forward.down": "ffn_output",
    }
    norms: ClassVar = {"mixer_post_norm": "attention.LayerNorm", "feed_forward_post_norm": "full_layer_layer_norm"}

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if (inner := config.raw("inner_group_num")) != 1:
            raise wrong("inner_group_num", inner, "1, as all published models have it")

    @classmethod
    def stack(cls, config: Config, norm: NormSpec) -> tuple[LayerSpec, ...]:
        """Return the layers. Those of a group of neighbours have the first one's weights."""
        layers, groups = super().stack(config, norm), config.integer("num_hidden_groups")
        group_of = [int(index / (len(layers) / groups)) for index in range(len(layers))]
        firsts = [group_of.index(group) for group in group_of]
        return tuple(
            layer if first == index else replace(layer, same_as=first)
            for index, (layer, first) in enumerate(zip(layers, firsts, strict=True))
        )

    @classmethod
    def places(cls, spec: ModelSpec) -> Iterator[tuple[str, str]]:
        own = (index for index, layer in enumerate(spec.layers) if layer.same_as is None)
        for group, index in enumerate(own):
            yield f"layers.{index}", f"encoder.albert_layer_groups.{group}.albert_layers.0"


class AlbertClassifier(Albert):
    name = "AlbertForSequenceClassification"
    head = ("albert.pooler", "classifier")
