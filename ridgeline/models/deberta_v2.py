"""DeBERTa-v2 and v3: BERT whose scores also have products with vectors of the distance between two tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ridgeline.core.specs.model import Disentangled, LayerSpec, ModelSpec, NormSpec, WeightMap
from ridgeline.models.bert import DEFAULTS, Bert
from ridgeline.models.config import Config, wrong
from ridgeline.models.names import named, single

# The only values that entries may have, as published models of version 3 have them
ONLY: Mapping[str, Any] = {
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "pooler_hidden_act": "gelu",
    "conv_kernel_size": 0,
}


class DebertaV2(Bert):
    name = "DebertaV2Model"
    base = "deberta"
    defaults: ClassVar = {
        **DEFAULTS,
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
        "max_relative_positions": -1,
        "position_biased_input": True,
        "pooler_hidden_act": "gelu",
        "conv_kernel_size": 0,
    }
    before_labels = "gelu"
    unplaced = True
    unused = ("pooler.", "classifier.", "lm_predictions.", "mask_predictions.", "cls.")
    names: ClassVar = {
        **Bert.names,
        "mixer.qkv": "attention.self.query_proj attention.self.key_proj attention.self.value_proj",
    }

    @classmethod
    def check(cls, config: Config) -> None:
        for name, value in ONLY.items():
            if config.raw(name) != value:
                raise wrong(name, config.raw(name), f"{value!r}, as published models of version 3 have it")
        kinds = config.raw("pos_att_type")
        if sorted(kinds.split("|") if isinstance(kinds, str) else kinds or ()) != ["c2p", "p2c"]:
            raise wrong("pos_att_type", kinds, "p2c and c2p, as published models of version 3 have it")
        for name, own in (("embedding_size", "hidden_size"), ("pooler_hidden_size", "hidden_size")):
            if name in config and config.integer(name) != config.integer(own):
                raise wrong(name, config.raw(name), f"{own}, as published models of version 3 have it")

    @classmethod
    def stack(cls, config: Config, norm: NormSpec) -> tuple[LayerSpec, ...]:
        given = config.raw("max_relative_positions")
        distance = config.integer("max_position_embeddings") if given in (None, -1, 0) else None
        distance = distance or config.integer("max_relative_positions", at_least=3)
        apart = Disentangled(config.integer("position_buckets", at_least=2), distance, norm.eps)
        if apart.buckets // 2 >= distance - 1:
            raise wrong("position_buckets", apart.buckets, f"less than twice the farthest distance, {distance}")
        layers = super().stack(config, norm)
        scale = (3 * layers[0].attention.head_dim) ** -0.5
        return tuple(
            replace(layer, mixer=replace(layer.attention, disentangled=apart, relative_owner=index == 0, scale=scale))
            for index, layer in enumerate(layers)
        )

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        ours, theirs = "layers.0.mixer.distances", f"{cls.base}.encoder"
        found = super().weights(spec) | single(ours, theirs, {"weight": "rel_embeddings.weight"})
        return found | named(ours, theirs, {"norm": "LayerNorm"}, bias=True)


class DebertaV2Classifier(DebertaV2):
    name = "DebertaV2ForSequenceClassification"
    head = ("pooler.dense", "classifier")
