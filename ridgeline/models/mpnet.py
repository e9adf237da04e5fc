"""MPNet: RoBERTa without token types, which adds to scores a number for each range of distances."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec, Relative, Source, WeightMap
from ridgeline.models.bert import DEFAULTS
from ridgeline.models.config import Config, wrong
from ridgeline.models.roberta import Roberta

RANGES = Relative(buckets=32, distance=128)  # whatever a config says, transformers computes with these


class MPNet(Roberta):
    name = "MPNetModel"
    base = "mpnet"
    defaults: ClassVar = {
        **DEFAULTS,
        "vocab_size": 30527,
        "type_vocab_size": 0,
        "pad_token_id": 1,
        "relative_attention_num_buckets": RANGES.buckets,
    }
    names: ClassVar = {
        "mixer.qkv": "attention.attn.q attention.attn.k attention.attn.v",
        "mixer.out": "attention.attn.o",
        "feed_forward.up": "intermediate.dense",
        "feed_forward.down": "output.dense",
    }
    norms: ClassVar = {"mixer_post_norm": "attention.LayerNorm", "feed_forward_post_norm": "output.LayerNorm"}

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if (found := config.raw("relative_attention_num_buckets")) != RANGES.buckets:
            raise wrong("relative_attention_num_buckets", found, f"{RANGES.buckets}, as all published models have it")

    @staticmethod
    def offset(config: Config) -> int:
        return 2  # whatever the padding token's id is

    @classmethod
    def stack(cls, config: Config, norm: NormSpec) -> tuple[LayerSpec, ...]:
        return tuple(
            replace(layer, mixer=replace(layer.attention, relative=RANGES, relative_owner=index == 0))
            for index, layer in enumerate(super().stack(config, norm))
        )

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        table = Source(name="mpnet.encoder.relative_attention_bias.weight")
        return super().weights(spec) | {"layers.0.mixer.position_bias.weight": (table,)}


class MPNetClassifier(MPNet):
    name = "MPNetForSequenceClassification"
    head = ("classifier.dense", "classifier.out_proj")
