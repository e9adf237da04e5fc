"""The recipe of the embedded mixture of experts, three times over: with no balancing, with an auxiliary loss, and with
a correction of the scores.

All three are alike but for their router. It has 16 experts a layer, of which a token runs two, so that a collapse would
show. The model is narrow, and trains in ten minutes on a laptop. It takes the embedded model's tokenizer, so that the
two compare by the token too. It holds out modules of the standard library alone, which every machine has.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.training import recipe
from ridgeline.training.balance import Balance
from ridgeline.training.embedded import EMBEDDED, llama_config
from ridgeline.training.load_plot import plot_loads
from ridgeline.training.recipe import ModelRecipe, Recipe, RecipeConfig, Report
from ridgeline.weights.folder import EMBEDDED_MODEL

CONTEXT = 1024
EXPERTS, USED, INNER = 16, 2, 64
PLOT = "mixture.png"


def _config(**router: Any) -> dict[str, Any]:
    """Return a config.json, in which `router` says what the family's own fields are."""
    dense = llama_config(hidden=128, intermediate=4 * INNER, layers=4, heads=2, kv_heads=1)
    common = {
        "max_position_embeddings": CONTEXT,
        "moe_intermediate_size": INNER,
        "num_experts_per_tok": USED,
        "norm_topk_prob": True,
    }
    return dense | common | router


QWEN3 = _config(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_experts=EXPERTS,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
GLM = _config(
    architectures=["Glm4MoeForCausalLM"],
    model_type="glm4_moe",
    n_routed_experts=EXPERTS,
    n_shared_experts=0,
    num_nextn_predict_layers=0,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    first_k_dense_replace=0,
    use_qk_norm=True,
    partial_rotary_factor=1.0,
)


def _model(name: str, purpose: str, config: dict[str, Any], share: float, balance: Balance) -> ModelRecipe:
    return ModelRecipe(name=name, purpose=purpose, config=config, lr=4e-3, share=share, balance=balance)


MIXTURE = Recipe(
    models=(
        _model("moe-none", "A mixture without balancing, to compare with.", QWEN3, 1 / 3, Balance()),
        _model(
            "embedded-moe",
            "The mixture of experts inside Ridgeline, balanced by an auxiliary loss: it lets routing be tested on a "
            "router that has learnt.",
            QWEN3,
            1 / 2,
            Balance(method="loss"),
        ),
        _model(
            "moe-correction",
            "A mixture of experts balanced without a loss, by a correction of the scores for the choice.",
            GLM,
            1.0,
            Balance(method="correction"),
        ),
    ),
    corpus=replace(EMBEDDED.corpus, held_out_packages=()),
    vocab_size=EMBEDDED.vocab_size,
    context=CONTEXT,
    stride=256,
    tokenizer=EMBEDDED_MODEL,
)


def run(config: RecipeConfig, console: Console) -> Report:
    """Make the mixtures, and draw them side by side: `out`/mixture.png."""
    reports = recipe.run(config, console)
    plot_loads(_logs(config.out, reports), reports, config.out / PLOT)
    config.tracker.artifact(config.out / PLOT)
    return reports


def _logs(out: Path, reports: Report) -> dict[str, list[dict[str, float]]]:
    return {name: [json.loads(row) for row in (out / f"{name}.jsonl").read_text().splitlines()] for name in reports}
