"""Adapters of models that embed, classify and rank, beside PEFT, in float32.

float32 on numbers of order one: 1e-5 is a hundred roundings.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline import LLM, LoRARequest
from ridgeline.core.errors import InvalidRequest

pytest.importorskip("peft")

from tests import pooled_models
from tests.peft_adapters import PeftAdapter
from tests.pooled_models import hidden, logits

TOLERANCE = 1e-5
ATTENTION = {
    "bert": ["query", "key", "value", "intermediate.dense", "output.dense"],
    "modernbert": ["Wqkv", "Wo", "Wi"],
    "deberta": ["intermediate.dense", "output.dense"],
    "t5_encoder": ["q", "k", "v", "o", "wi", "wo"],
    "embedding_gemma": "all-linear",
    "qwen3": "all-linear",
}
PROMPTS = [[2, *(Random(seed).randrange(4, 25) for _ in range(4 + 7 * seed)), 3] for seed in range(4)]


def adapters_of(family: str, folder: Path, **options: Any) -> list[PeftAdapter]:
    return [
        PeftAdapter.of(pooled_models.build(family), folder / str(seed), seed=seed, r=4 + 3 * seed, **options)
        for seed in range(2)
    ]


def open_llm(folder: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "debug_checks": True}
    return LLM(folder, **{**settings, "runner": "pooling", "enable_lora": True, "max_loras": 2, **options})


def asked() -> tuple[list[Any], list[int]]:
    """Return every prompt with each of two adapters and with none."""
    return [{"prompt_token_ids": ids} for ids in PROMPTS for _ in range(3)], [0, 1, 2] * len(PROMPTS)


@pytest.mark.parametrize("family", ATTENTION)
def test_embeddings_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """Two adapters of unlike ranks and the model itself, in one batch; each token's vector."""
    model = pooled_models.save(family, tmp_path / "model")
    adapters = adapters_of(family, tmp_path, target_modules=ATTENTION[family])
    oracles = [each.model for each in adapters] + [pooled_models.build(family)]
    named = [*(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1)), None]
    prompts, which = asked()
    with open_llm(model) as llm:
        found = llm.encode(
            prompts, pooling_task="token_embed", lora_request=[named[each] for each in which], use_tqdm=False
        )
    for output, prompt, each in zip(found, prompts, which, strict=True):
        wanted = hidden(oracles[each], prompt["prompt_token_ids"])
        wanted = torch.nn.functional.normalize(wanted, dim=-1)
        np.testing.assert_allclose(output.outputs.data.numpy(), wanted.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("family", ["bert_classifier", "roberta_classifier"])
def test_scores_are_those_of_peft_with_the_heads_that_adapters_have(family: str, tmp_path: Path) -> None:
    """PEFT saves a classifier's last maps whole. BERT's first one is adapted as a linear layer."""
    model = pooled_models.save(family, tmp_path / "model")
    adapters = adapters_of(family, tmp_path, target_modules=["query", "value", "pooler.dense"], task_type="SEQ_CLS")
    oracles = [each.model for each in adapters] + [pooled_models.build(family)]
    named = [*(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1)), None]
    prompts, which = asked()
    with open_llm(model, max_loras=1) as llm:
        found = llm.encode(
            prompts, pooling_task="classify", lora_request=[named[each] for each in which], use_tqdm=False
        )
        activation = torch.sigmoid if family.startswith("roberta") else lambda x: x.softmax(-1)
        for output, prompt, each in zip(found, prompts, which, strict=True):
            wanted = activation(logits(oracles[each], prompt["prompt_token_ids"]))
            np.testing.assert_allclose(output.outputs.data.numpy(), wanted.numpy(), atol=TOLERANCE)


def test_what_no_head_or_bias_is_gets_a_sentence(tmp_path: Path) -> None:
    """Of DeBERTa, whose queries and keys multiply vectors of distances too, and of labels that are others."""
    deberta = pooled_models.save("deberta", tmp_path / "deberta")
    [adapter, _] = adapters_of("deberta", tmp_path / "a", target_modules=["query_proj"])
    with open_llm(deberta) as llm, pytest.raises(InvalidRequest, match="that adapters cannot change here"):
        llm.encode({"prompt_token_ids": PROMPTS[0]}, lora_request=LoRARequest("a", 1, adapter.folder), use_tqdm=False)
    ranks = pooled_models.save("bert_reranker", tmp_path / "reranker")
    [adapter, _] = adapters_of("bert_classifier", tmp_path / "b", target_modules=["query"], task_type="SEQ_CLS")
    with open_llm(ranks) as llm, pytest.raises(InvalidRequest, match="with other labels"):
        llm.encode({"prompt_token_ids": PROMPTS[0]}, lora_request=LoRARequest("a", 1, adapter.folder), use_tqdm=False)
