"""Classifier-free guidance against transformers, in float32 with debug checks on.

float32 on logits of order ten, which guidance multiplies by up to three: 1e-3 is three hundred roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.text.outputs import CompletionOutput
from tests import tiny_models
from tests.driving import ask, rig
from tests.test_token_masks import Alternating, parities

TOLERANCE = 1e-3
SHARED = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83]
PROMPTS = ([5, 6, 7], [9] * 30 + [3], SHARED, [*SHARED, 100], [*SHARED, 100, 102], [8], list(range(10, 60)))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# by prompt: with and without a negative prompt (one begins as its prompt does, others are longer or shorter), unguided
GUIDANCE: tuple[dict, ...] = (
    {"guidance_scale": 1.5, "negative_prompt": [50, 51, 52, 53, 54, 55, 56]},
    {"guidance_scale": 3.0},
    {"guidance_scale": 2.0, "negative_prompt": SHARED[:17]},
    {},
    {"guidance_scale": 0.0, "negative_prompt": list(range(100, 140))},
    {"guidance_scale": -1.0, "negative_prompt": [6]},
    {"guidance_scale": 0.5, "negative_prompt": [3, 200]},
)
TIGHT: dict = {"max_num_batched_tokens": 16, "block_size": 4, "max_num_seqs": 5, "max_model_len": 96}

oracle = cache(tiny_models.build)


@pytest.fixture
def open_llm(tiny_model: Callable[[str], Path]):
    """`open_llm(family, **settings)`: an LLM that is shut down when the test ends."""
    opened: list[LLM] = []

    def build(family: str, **settings: object) -> LLM:
        options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "debug_checks": True, **settings}
        opened.append(LLM(tiny_model(family), **options))
        return opened[-1]

    yield build
    for llm in opened:
        llm.shutdown()


def generated(family: str, prompt: Sequence[int], guidance: dict, **options: object) -> list[int]:
    """What transformers generates greedily. Its guidance runs the model beside the one it steers."""
    ids, negative = torch.tensor([list(prompt)]), guidance.get("negative_prompt")
    output = oracle(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        guidance_scale=guidance.get("guidance_scale"),
        negative_prompt_ids=None if negative is None else torch.tensor([negative]),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist()


def run(llm: LLM, params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]] = PROMPTS) -> list:
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)


def check_logprobs(family: str, prompt: Sequence[int], output: CompletionOutput, guidance: dict) -> None:
    """Those reported are transformers' guided scores, made to probabilities."""
    scale = guidance.get("guidance_scale", 1.0)
    negative = guidance.get("negative_prompt", prompt[-1:])
    with torch.inference_mode():
        for i, entry in enumerate(output.logprobs):
            after = output.token_ids[:i]
            plain = oracle(family)(torch.tensor([[*prompt, *after]])).logits[:, -1]
            process = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(
                scale, oracle(family), torch.tensor([[*negative, *after]]), use_cache=False
            )
            expected = process(torch.tensor([[*prompt, *after]]), plain)[0].log_softmax(-1)
            for token, reported in entry.items():
                assert reported.logprob == pytest.approx(expected[token].item(), abs=TOLERANCE)


def check_left_clean(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert scheduler.cache.pool.free_pages == scheduler.cache.pool.num_pages
    assert scheduler.slots.num_free == scheduler.config.max_num_seqs


@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_guided_requests_are_transformers_among_unguided_ones(family: str, open_llm) -> None:
    """Chunks of prompts, few slots, prefixes found: in the second round by prompts and negative prompts alike."""
    llm, params = open_llm(family, **TIGHT), [GREEDY.replace(**guidance, logprobs=2) for guidance in GUIDANCE]
    plain = run(llm, [GREEDY] * len(PROMPTS))
    for _ in range(2):
        results = run(llm, params)
        for result, guidance, free in zip(results, GUIDANCE, plain, strict=True):
            [output] = result.outputs
            assert output.token_ids == generated(family, result.prompt_token_ids, guidance)
            assert (output.token_ids != free.outputs[0].token_ids) == bool(guidance)
            check_logprobs(family, result.prompt_token_ids, output, guidance)
            assert output.metrics.prompt_tokens == len(result.prompt_token_ids)
            assert output.metrics.output_tokens == 12
    check_left_clean(llm)
