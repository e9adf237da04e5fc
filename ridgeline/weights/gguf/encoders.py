"""Encoders in GGUF."""

from __future__ import annotations

from typing import Any

from ridgeline.weights.gguf.dialect import Dialect
from ridgeline.weights.gguf.values import Values

_NORMS = {"attention.output.LayerNorm": "attn_output_norm", "output.LayerNorm": "layer_output_norm"}
_PARTS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
}
_TOP = {
    "bert.embeddings.word_embeddings": "token_embd",
    "bert.embeddings.position_embeddings": "position_embd",
    "bert.embeddings.token_type_embeddings": "token_types",
    "bert.embeddings.LayerNorm": "token_embd_norm",
}


def _bert(values: Values) -> dict[str, Any]:
    types = values.gguf.tensors.get("token_types.weight")
    return {
        "num_attention_heads": values.whole("attention.head_count"),
        "intermediate_size": values.whole("feed_forward_length"),
        "max_position_embeddings": values.whole("context_length"),
        "layer_norm_eps": values["attention.layer_norm_epsilon"],
        "type_vocab_size": 0 if types is None else types.shape[0],
        "hidden_act": "gelu",
    }


ENCODERS = {"bert": Dialect("BertModel", _NORMS, config=_bert, parts=_PARTS, top=_TOP, attends=False)}
