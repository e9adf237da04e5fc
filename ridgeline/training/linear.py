"""The recipes of models without attention: gated linear attention, retention, and Mamba-2. Each is trained beside
attention of as many parameters, on the same tokens in the same order, so that their losses compare.

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


# As many parameters, to a percent, in twice as many layers, of which none has a feed-forward
MAMBA2_CONTEXT = 2048
MAMBA2_ATTENTION = llama_config(hidden=256, intermediate=952, layers=4, heads=4, kv_heads=2)
MAMBA2_CONFIG: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": MAMBA2_ATTENTION["vocab_size"],
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_heads": 8,
    "head_dim": HEAD,
    "n_groups": 1,
    "state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": MAMBA2_CONTEXT,
    "bos_token_id": MAMBA2_ATTENTION["bos_token_id"],
    "eos_token_id": MAMBA2_ATTENTION["eos_token_id"],
    "torch_dtype": "bfloat16",
}


def _recipe(
    name: str,
    purpose: str,
    config: dict[str, Any],
    attention: dict[str, Any] = _ATTENTION,
    context: int = CONTEXT,
) -> Recipe:
    models = (
        ModelRecipe(name=name, purpose=purpose, config=config, lr=4e-3, share=1 / 2),
        ModelRecipe(name="attention", purpose="Attention, to compare with.", config=attention, lr=4e-3, share=1.0),
    )
    return replace(
        EMBEDDED,
        models=models,
        corpus=replace(EMBEDDED.corpus, held_out_packages=()),
        context=context,
        stride=context // 4,
        tokenizer=EMBEDDED_MODEL,
    )


GLA = _recipe("gla", "Gated linear attention: a state of constant size in place of keys and values.", GLA_CONFIG)
RETNET = _recipe(
    "retnet", "Retention: linear attention in which every head forgets at a rate of its own.", RETNET_CONFIG
)
MAMBA2 = _recipe(
    "mamba2",
    "Mamba-2: a state of constant size in every layer.",
    MAMBA2_CONFIG,
    MAMBA2_ATTENTION,
    MAMBA2_CONTEXT,
)
