"""The recipes of models without attention: gated linear attention, and retention. Each is trained beside attention of
the same shape, on the same tokens in the same order, so that their losses compare.

The shape is small enough for a laptop. Key heads are half as wide as value heads, so that a mixer has hardly more
weights than attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.training.embedded import EMBEDDED, llama_config
from ridgeline.training.recipe import ModelRecipe, Recipe
from ridgeline.weights.folder import EMBEDDED_MODEL

CONTEXT = 1024
HEAD = 64
_ATTENTION = llama_config(hidden=128, intermediate=256, layers=4, heads=2, kv_heads=2) | {
    "max_position_embeddings": CONTEXT
}
_LINEAR = _ATTENTION | {"key_dim": HEAD // 2, "value_dim": HEAD}
GLA_CONFIG: dict[str, Any] = _LINEAR | {
    "architectures": ["GatedLinearAttentionForCausalLM"],
    "model_type": "gla",
    "gate_low_rank_dim": 16,
    "gate_logit_normalizer": 16,
}
RETNET_CONFIG: dict[str, Any] = _LINEAR | {"architectures": ["RetNetForCausalLM"], "model_type": "retnet"}


def _recipe(name: str, purpose: str, config: dict[str, Any]) -> Recipe:
    models = (
        ModelRecipe(name=name, purpose=purpose, config=config, lr=4e-3, share=1 / 2),
        ModelRecipe(name="attention", purpose="Attention, to compare with.", config=_ATTENTION, lr=4e-3, share=1.0),
    )
    return replace(
        EMBEDDED,
        models=models,
        corpus=replace(EMBEDDED.corpus, held_out_packages=()),
        context=CONTEXT,
        stride=CONTEXT // 4,
        tokenizer=EMBEDDED_MODEL,
    )


GLA = _recipe("gla", "Gated linear attention: a state of constant size in place of keys and values.", GLA_CONFIG)
RETNET = _recipe(
    "retnet", "Retention: linear attention in which every head forgets at a rate of its own.", RETNET_CONFIG
)
