"""The model that ships with the package writes on a GPU what it writes on a CPU, up to ties that rounding decides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.text.outputs import CompletionOutput

pytestmark = pytest.mark.gpu

PROMPTS = [
    "def read_json(path):",
    "class LRUCache:\n    def __init__(self, size):",
    "import os\nimport sys\n\n\ndef walk(root):",
    "def quicksort(items):\n    if len(items) < 2:",
    "    def __repr__(self):\n        return",
    "@pytest.mark.parametrize(",
    "try:\n    value = int(text)\nexcept",
    "for key, value in sorted(",
]
LENGTH = 96
# How far apart the CPU's best two logits may be where a GPU takes the second: both are about ten and end a chain of
# some thirty rounded results, whose errors add up like a random walk. As in float32 and bfloat16, times eps.
NEAR = {"float32": 1e-4, "bfloat16": 0.3}


def write(device: str, dtype: str) -> list[CompletionOutput]:
    """Greedy completions with the two likeliest tokens at every place."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_memory": 1 << 27, "max_model_len": 512}
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    with LLM(device=device, dtype=dtype, **limits) as llm:
        return [result.outputs[0] for result in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def on_cpu() -> list[CompletionOutput]:
    return write("cpu", "float32")


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_is_the_cpus_until_a_near_tie(on_cpu: list[CompletionOutput], dtype: str) -> None:
    for expected, output in zip(on_cpu, write("cuda", dtype), strict=True):
        assert expected.logprobs is not None
        at = first_difference(output.token_ids, expected.token_ids)
        if at == LENGTH:
            continue
        best, second = sorted((entry.logprob for entry in expected.logprobs[at].values()), reverse=True)[:2]
        print(f"{dtype}: token {at}, {best - second:.2g} between the best two, {expected.text[:20]!r}")
        assert best - second < NEAR[dtype]
        assert output.token_ids[at] in expected.logprobs[at], "neither of the best two"


def test_an_engine_that_was_shut_down_leaves_the_gpu_to_others() -> None:
    """The cache alone had twice as much as may be left."""
    before = torch.cuda.memory_reserved()
    write("cuda", "bfloat16")
    assert torch.cuda.memory_reserved() - before < 1 << 26
