"""Adapters served side by side, beside PEFT, in float32 with debug checks on.

float32 on logits of order ten: 1e-4 is a hundred roundings, and adapters add two products to each of some ten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.text.outputs import RequestOutput

pytest.importorskip("peft")

from tests.peft_adapters import Adapted, Plain

TOLERANCE = 2e-4
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 4, "max_num_seqs": 4}
SHARED = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67]
PROMPTS = ([5, 6, 7], list(range(10, 45)), [*SHARED, 100], [*SHARED, 101])
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)

# A fused projection, rows of heads, rows in pairs, Conv1D, biases, a mixture, latents, states, multipliers of muP
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FAMILIES: dict[str, Any] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "phi3": {},
    "neox": {},
    "gpt2": {},
    "qwen2_moe": {"exclude_modules": ["gate", "shared_expert_gate"]},
    "olmoe": {"target_modules": ATTENTION},
    "deepseek_v2": {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"]},
    "falcon_h1": {"target_modules": [*ATTENTION, "in_proj", "gate_proj", "up_proj", "down_proj"]},
    "qwen3_next": {"exclude_modules": ["gate", "shared_expert_gate"]},
    "mamba2": {"target_modules": ["in_proj"]},
    "bloom": {},
    "zamba2": {"target_modules": ["q_proj", "o_proj", "in_proj"]},
}


def open_llm(folder: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "debug_checks": True}
    return LLM(folder, **{**settings, "enable_lora": True, "max_loras": 2, **TIGHT, **options})


def check(output: RequestOutput, oracle: Adapted | Plain) -> None:
    """Compare the log-probability of every token of a prompt and of its output."""
    [completion] = output.outputs
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    exact = oracle.logprobs(tokens)
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    found = [*output.prompt_logprobs[1:], *completion.logprobs]
    for place, (token, reported) in enumerate(zip(tokens[1:], found, strict=True)):
        assert reported is not None
        assert reported[token].logprob == pytest.approx(float(exact[place, token]), abs=TOLERANCE), place


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_peft(family: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Several adapters of unlike ranks and the model itself, in one batch, in chunks, with hits of the prefix cache."""
    adapters = [
        Adapted(family, tmp_path / "one", **FAMILIES[family]),
        Adapted(family, tmp_path / "two", seed=1, r=9, lora_alpha=5, use_rslora=True, **FAMILIES[family]),
    ]
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    oracles = [Plain(family), *adapters]
    with open_llm(tiny_model(family)) as llm:
        asked = [(prompt, which) for prompt in PROMPTS for which in range(3)]
        for _ in range(2):  # once more, from the cache
            prompts: Sequence[Any] = [{"prompt_token_ids": prompt} for prompt, _ in asked]
            outputs = llm.generate(prompts, PARAMS, lora_request=[named[which] for _, which in asked], use_tqdm=False)
            for output, (_, which) in zip(outputs, asked, strict=True):
                check(output, oracles[which])
