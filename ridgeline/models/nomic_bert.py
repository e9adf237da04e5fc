"""Nomic BERT: BERT whose queries and keys rotate, with gated feed-forwards and without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ridgeline.core.specs.model import ModelSpec, RopeSpec
from ridgeline.models.bert import DEFAULTS, Bert
from ridgeline.models.config import Config, wrong
from ridgeline.models.rope import rope

# Entries of the first checkpoints' configs, and the only value that they may have
ONLY = {
    "activation_function": "swiglu",
    "rotary_emb_fraction": 1.0,
    "moe_every_n_layers": 0,
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm"), False),
    **dict.fromkeys(("prenorm", "parallel_block", "rotary_emb_interleaved"), False),
}


class NomicBert(Bert):
    name = "NomicBertModel"
    base = "nomic_bert"
    defaults: ClassVar = {
        **DEFAULTS,
        "vocab_size": 30528,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": 1000.0,
    }
    spellings: ClassVar = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
    }
    biases, gated, rotates = False, True, True
    embed_norm, layers = "emb_ln", "encoder.layers"
    names: ClassVar = {
        "mixer.qkv": "attn.Wqkv",
        "mixer.out": "attn.out_proj",
        "feed_forward.gate_up": "mlp.fc12 mlp.fc11",
        "feed_forward.down": "mlp.fc2",
    }
    norms: ClassVar = {"mixer_post_norm": "norm1", "feed_forward_post_norm": "norm2"}

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        for name, value in ONLY.items():
            if config.raw(name) not in (None, value):
                raise wrong(name, config.raw(name), f"{value!r}, with which published models run here")
        config.refuse("rotary_scaling_factor", "only unscaled positions run")

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Return the spec. The first checkpoints name more positions than they were trained with."""
        trained = Config(config, {"max_trained_positions": None})
        if "max_trained_positions" in trained and "n_positions" in trained:
            least = min(trained.integer("max_trained_positions"), trained.integer("n_positions"))
            config = {**config, "n_positions": least}
        return super().spec(config)

    @staticmethod
    def rope(config: Config, head_dim: int) -> RopeSpec | None:
        return rope(config, head_dim)


class NomicBertClassifier(NomicBert):
    name = "NomicBertForSequenceClassification"
    head = ("nomic_bert.pooler.dense", "classifier")
