"""Prompts that come as vectors in the place of tokens' embeddings, beside transformers' `inputs_embeds`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan.embeds import embeds_width
from tests import tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def embedding(text_model: Path) -> Iterator[LLM]:
    """An engine whose steps take eight tokens, and whose cache is too small for all that run at once."""
    with LLM(
        text_model, device="cpu", block_size=4, max_num_batched_tokens=8, max_num_seqs=4, kv_cache_memory=60_000,
        max_model_len=48, enable_prompt_embeds=True, debug_checks=True,
    ) as built:  # fmt: skip
        yield built


def vectors(length: int, seed: int) -> torch.Tensor:
    oracle = tiny_models.build("llama")
    return torch.randn(length, oracle.config.hidden_size, generator=torch.Generator().manual_seed(seed))


def by_transformers(x_TM: torch.Tensor, tokens: int) -> list[int]:
    oracle = tiny_models.build("llama")
    with torch.inference_mode():
        return oracle.generate(
            inputs_embeds=x_TM[None].float(),
            attention_mask=torch.ones(1, len(x_TM)),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()


def test_vectors_take_the_place_of_tokens(embedding: LLM) -> None:
    prompts = [vectors(length, seed) for seed, length in enumerate((3, 8, 21, 30, 13, 1))]  # most run in chunks
    outputs = embedding.generate([{"prompt_embeds": x_TM} for x_TM in prompts], GREEDY)
    for x_TM, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == by_transformers(x_TM, 6)
        assert output.prompt_token_ids == [0] * len(x_TM)
        assert output.num_cached_tokens == 0


@pytest.mark.usefixtures("crowded")
def test_preempted_requests_go_on_with_their_vectors(embedding: LLM) -> None:
    prompts = [vectors(24, seed) for seed in range(4)]
    before = sum(embedding.engine.scheduler.preemptions.values())
    params = GREEDY.replace(max_tokens=20)
    outputs = embedding.generate([{"prompt_embeds": x_TM} for x_TM in prompts], params)
    assert sum(embedding.engine.scheduler.preemptions.values()) > before
    for x_TM, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == by_transformers(x_TM, 20)


def test_vectors_of_tokens_give_what_the_tokens_give(embedding: LLM) -> None:
    ids = [5, 9, 3, 7, 11, 13, 2, 8, 21]
    table_VM = tiny_models.build("llama").get_input_embeddings().weight.detach()
    params = GREEDY.replace(repetition_penalty=1.0, presence_penalty=0.5)
    prompts = [{"prompt_token_ids": ids}, {"prompt_embeds": table_VM[ids]}, {"prompt_embeds": table_VM[ids][None]}]
    tokens, given, with_one = embedding.generate(prompts, params)
    assert given.outputs[0].token_ids == tokens.outputs[0].token_ids == with_one.outputs[0].token_ids
    again = embedding.generate({"prompt_token_ids": [0] * 9}, params)[0]  # the placeholders left nothing in the cache
    assert again.num_cached_tokens == 0
    (half,) = embedding.generate({"prompt_embeds": table_VM[ids].to(torch.bfloat16)}, GREEDY)
    assert half.outputs[0].token_ids == by_transformers(table_VM[ids].to(torch.bfloat16), 6)


def test_placeholders_do_not_count_as_tokens(embedding: LLM) -> None:
    x_TM = vectors(5, 3)
    only = GREEDY.replace(allowed_token_ids=[0, 7], repetition_penalty=1e6, max_tokens=1, logprobs=0)
    plain = embedding.generate({"prompt_embeds": x_TM}, only)[0].outputs[0].token_ids
    assert (
        plain
        == embedding.generate({"prompt_embeds": x_TM}, only.replace(repetition_penalty=1.0))[0].outputs[0].token_ids
    )
    worded = GREEDY.replace(allowed_token_ids=[7], bad_words=[[0, 7]], max_tokens=1)
    assert embedding.generate({"prompt_embeds": x_TM}, worded)[0].outputs[0].token_ids == [7]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, 5), "vectors of 5 numbers"),
        (torch.zeros(0, 64), "a tensor"),
        (torch.zeros(3), "a tensor"),
        (torch.zeros(2, 3, 64), "a tensor"),
        (torch.zeros(3, 64, dtype=torch.int32), "a tensor"),
        (torch.full((3, 64), torch.nan), "finite"),
        ("text", "a tensor"),
        (None, "a tensor"),
    ],
)
def test_wrong_vectors_are_refused(embedding: LLM, value: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        embedding.generate({"prompt_embeds": value}, GREEDY)  # type: ignore[typeddict-item]


def test_what_needs_tokens_is_refused(embedding: LLM, llm: LLM) -> None:
    x_TM = vectors(3, 1)
    for wrong in ({"prompt_logprobs": 1}, {"guidance_scale": 2.0}):
        with pytest.raises(InvalidRequest, match="needs a prompt of tokens"):
            embedding.generate({"prompt_embeds": x_TM}, GREEDY.replace(**wrong))
    with pytest.raises(InvalidRequest, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": x_TM}, GREEDY)
    with pytest.raises(InvalidRequest):
        embedding.generate({"prompt_embeds": vectors(60, 1)}, GREEDY)


def test_a_model_that_scales_its_embeddings_takes_none(embedding: LLM) -> None:
    from dataclasses import replace

    spec = replace(embedding.assembly.model.spec, embedding_multiplier=8.0)
    with pytest.raises(InvalidConfig, match="scales"):
        embeds_width(True, spec)
    assert embeds_width(False, spec) == 0
