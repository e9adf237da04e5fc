"""GTE (new): BERT whose queries and keys rotate, with gated feed-forwards."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ridgeline.core.specs.model import MLPSpec, ModelSpec, RopeSpec, Source, WeightMap
from ridgeline.models.bert import DEFAULTS, Bert
from ridgeline.models.config import Config, wrong
from ridgeline.models.rope import rope

ONLY = {
    "layer_norm_type": "layer_norm",
    "position_embedding_type": "rope",
    "pack_qkv": True,
    "logn_attention_scale": False,
}


class Gte(Bert):
    name = "NewModel"
    base = "new"
    defaults: ClassVar = {
        **DEFAULTS,
        "vocab_size": 30528,
        "max_position_embeddings": 2048,
        "type_vocab_size": 1,
        "rope_theta": 10000.0,
        **ONLY,
    }
    gated, rotates = True, True
    layers = "encoder.layer"
    unused = ("classifier.", "lm_head.", "mlm_head.")
    names: ClassVar = {
        "mixer.qkv": "attention.qkv_proj",
        "mixer.out": "attention.o_proj",
        "feed_forward.down": "mlp.down_proj",
    }
    norms: ClassVar = {"mixer_post_norm": "attn_ln", "feed_forward_post_norm": "mlp_ln"}

    @classmethod
    def check(cls, config: Config) -> None:
        for name, value in ONLY.items():
            if config.raw(name) != value:
                raise wrong(name, config.raw(name), f"{value!r}, as published models have it")

    @classmethod
    def mlp(cls, config: Config) -> MLPSpec:
        return replace(super().mlp(config), first_biasless=True)

    @staticmethod
    def rope(config: Config, head_dim: int) -> RopeSpec | None:
        """Return the rotation. "ntk" with a factor s multiplies the base by s and divides frequencies by s^(2/d)."""
        scaling = config.section("rope_scaling")
        if scaling.raw("type") != "ntk":
            return rope(config, head_dim)
        scaling.refuse("mixed_b", "only the scaling without it runs")
        factor = scaling.number("factor")
        linear = (("rope_type", "linear"), ("factor", factor ** (2 / head_dim)))
        return RopeSpec(theta=config.number("rope_theta") * factor, rotary_dim=head_dim, scaling=linear)

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        found = super().weights(spec)
        for ours, theirs in cls.places(spec):
            name = f"{cls.base}.{theirs}.mlp.up_gate_proj.weight"
            found[f"{ours}.feed_forward.gate_up.weight"] = (Source(name=name, heads=1, shares=(1, 1), backwards=True),)
        return found


class GteClassifier(Gte):
    name = "NewForSequenceClassification"
    head = ("new.pooler.dense", "classifier")
