"""The recipe of the embedded model and its draft.

Fast kernels (and groups of 128 quantized weights) want heads of 64 and widths that are powers of two. The large model
stays under 8 M parameters (16 MB in bfloat16). It is wide rather than deep, because on a CPU every layer costs a fixed
overhead. A vocabulary of 4096 leaves most parameters to the layers. The draft, about a tenth as large, has the same
tokenizer and two layers, the fewest that can copy from context.
"""

from __future__ import annotations

from typing import Any

from ridgeline.training.corpus import CorpusConfig
from ridgeline.training.recipe import ModelRecipe, Recipe
from ridgeline.training.tokenizer import SEPARATOR_ID

VOCAB_SIZE = 4096
CONTEXT = 2048


def llama_config(*, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return a Hugging Face config.json for a Llama with heads of 64 and tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": SEPARATOR_ID,
        "eos_token_id": SEPARATOR_ID,
        "torch_dtype": "bfloat16",
    }


EMBEDDED = Recipe(
    models=(
        ModelRecipe(
            name="embedded",
            purpose="The model inside Ridgeline: it lets the engine run, be tested and be measured without a download.",
            config=llama_config(hidden=256, intermediate=1024, layers=7, heads=4, kv_heads=2),
            lr=4e-3,
            share=0.86,
        ),
        ModelRecipe(
            name="embedded-draft",
            purpose="A draft for speculative decoding: the embedded model's small sibling, with the same tokenizer.",
            config=llama_config(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1),
            lr=8e-3,
            share=1.0,
        ),
    ),
    corpus=CorpusConfig(
        held_out_modules=("asyncio", "email", "http", "json", "logging", "unittest"),
        held_out_packages=("httpx", "seaborn"),
    ),
    vocab_size=VOCAB_SIZE,
    context=CONTEXT,
    stride=512,
)
