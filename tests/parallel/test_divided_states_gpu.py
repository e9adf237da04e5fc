"""Recurrent models over two GPUs, by heads, by tokens and by layers: one device's tokens, from graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from ridgeline import LLM, SamplingParams
from tests import tiny_models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
# a delta rule, norms that span ranks, sums inside of a mixer, two mixers side by side
FAMILIES = ("qwen3_5", "granite_hybrid", "jamba", "falcon_h1")
SIZES = ("tensor_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size")
PROMPTS = [
    {"prompt_token_ids": [(7 * n + k) % 290 + 5 for n in range(length)]} for k, length in enumerate((3, 40, 90, 150))
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A tiny model, and what one device writes."""
    folder = tiny_models.save(request.param, tmp_path_factory.mktemp(request.param))
    return folder, written(folder)


def written(folder: Path, **sizes: Any) -> list[Any]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 128,
        "kv_cache_memory": 1 << 26,
    }
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(folder, device="cuda", skip_tokenizer_init=True, max_num_seqs=4, **options, **sizes) as llm:
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("size", SIZES)
def test_two_gpus_write_what_one_writes(model: tuple[Path, list[Any]], size: str) -> None:
    folder, want = model
    more = {"prefill_context_parallel_threshold": 32} if size == SIZES[1] else {}
    assert written(folder, **{size: 2}, **more) == want
