"""Adapters of the tokens' table and of the output layer, beside PEFT, by the tolerance of tests/test_lora.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("peft")

from ridgeline import BeamSearchParams, LoRARequest, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.adapters import UsedAdapter
from tests.driving import ask, disturbed, rig
from tests.peft_adapters import PeftAdapter, PlainModel
from tests.test_lora import PARAMS, PROMPTS, TOLERANCE, check, compare, expect, open_llm, words

TinyModel = Callable[[str], Path]
VOCABULARY: dict[str, Any] = {"enable_lora_factors": False, "enable_lora_vocabulary": True}
TABLES = {**VOCABULARY, "enable_lora_tables": True}

# Names of the layers' maps, the table and the output layer: two tables; one, multiplied; beside Conv1D; with a norm
FAMILIES = {
    "llama": ("q_proj", "embed_tokens", "lm_head"),
    "gemma2": ("q_proj", "embed_tokens", "lm_head"),
    "gpt2": ("c_attn", "wte", "lm_head"),
    "neox": ("query_key_value", "embed_in", "lm_head"),
    "bloom": ("query_key_value", "word_embeddings", "lm_head"),
}


def adapters_of(family: str, folder: Path) -> list[PeftAdapter]:
    """Return adapters of both tables, of the table and of the layers, and of the output layer alone."""
    layer, table, head = FAMILIES[family]
    return [
        PeftAdapter(family, folder / "both", target_modules=[layer, table, head]),
        PeftAdapter(family, folder / "table", seed=1, r=7, use_rslora=True, target_modules=[layer, table]),
        PeftAdapter(family, folder / "head", seed=2, r=3, target_modules=[head]),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    compare(family, tiny_model(family), adapters_of(family, tmp_path), **VOCABULARY)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whole_tables_and_rows_of_tokens_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Where both are one table, rows of tokens are those of both, and whole tables are apart."""
    layer, table, head = FAMILIES[family]
    adapters = [
        PeftAdapter(family, tmp_path / "whole", modules_to_save=[table, head], target_modules=[layer]),
        PeftAdapter(family, tmp_path / "rows", seed=1, trainable_token_indices=[7, 300, 11, 5], target_modules=[layer]),
        PeftAdapter(
            family,
            tmp_path / "both",
            seed=3,
            trainable_token_indices={table: [9, 4], head: [9, 4]},
            target_modules=[layer],
        ),
        PeftAdapter(family, tmp_path / "mixed", seed=2, modules_to_save=[table], target_modules=[layer, head]),
    ]
    compare(family, tiny_model(family), adapters, **TABLES)


def test_beams_samples_drafts_chunks_and_hits(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Each score of a draft, of a chunk's last token and of a beam is that of its own request's adapter."""
    adapters = adapters_of("llama", tmp_path)
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    oracles = [PlainModel("llama"), *adapters]
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with open_llm(tiny_model("llama"), enable_lora_vocabulary=True, max_loras=3, speculative_config=drafts) as llm:
        for _ in range(2):
            for output, oracle in zip(
                llm.generate(prompts, PARAMS, lora_request=named, use_tqdm=False), oracles, strict=True
            ):
                check(output, oracle)
        sampled = SamplingParams(n=2, temperature=1, max_tokens=5, seed=3, logprobs=0, prompt_logprobs=0)
        for output, oracle in zip(
            llm.generate(prompts, sampled, lora_request=named, use_tqdm=False), oracles, strict=True
        ):
            for completion in output.outputs:
                tokens = [*output.prompt_token_ids, *completion.token_ids]
                exact = oracle.logprobs(tokens)[len(output.prompt_token_ids) - 1 :]
                assert completion.logprobs is not None
                for place, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                    assert found[token].logprob == pytest.approx(float(exact[place, token]), abs=TOLERANCE)
        beams = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
        for prompt, request, oracle in zip(PROMPTS, named, oracles, strict=True):
            [output] = llm.beam_search([{"prompt_token_ids": prompt}], beams, lora_request=request, use_tqdm=False)
            best = output.outputs[0]
            tokens = [*prompt, *best.token_ids]
            exact = oracle.logprobs(tokens)
            total = sum(float(exact[at - 1, tokens[at]]) for at in range(len(prompt), len(tokens)))
            assert best.cumulative_logprob == pytest.approx(total, abs=3 * TOLERANCE)


def test_refusals_name_what_is_lacking(tiny_model: TinyModel, tmp_path: Path) -> None:
    both, *_ = adapters_of("llama", tmp_path)
    whole = PeftAdapter("llama", tmp_path / "whole", modules_to_save=["lm_head"], target_modules=["q_proj"])
    rows = PeftAdapter("llama", tmp_path / "rows", trainable_token_indices=list(range(20)), target_modules=["q_proj"])
    magnitudes = PeftAdapter("llama", tmp_path / "dora", use_dora=True, target_modules=["embed_tokens"])
    other = PeftAdapter("llama", tmp_path / "other", modules_to_save=["lm_head"], target_modules=["q_proj"])
    path = other.folder / "adapter_model.safetensors"
    save_file({name: torch.cat((x, x)) if "lm_head" in name else x for name, x in load_file(path).items()}, path)
    tables = {"embed_tokens": [9, 4], "lm_head": [9, 4]}
    halved = PeftAdapter("llama", tmp_path / "halved", trainable_token_indices=tables, target_modules=["q_proj"])
    path = halved.folder / "adapter_model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if "lm_head" not in name}, path)
    wide = PeftAdapter("llama", tmp_path / "wide", trainable_token_indices=[4], target_modules=["q_proj"])
    path = wide.folder / "adapter_model.safetensors"
    save_file({name: torch.full_like(x, 1e5) if "delta" in name else x for name, x in load_file(path).items()}, path)
    vocabulary = {"enable_lora_vocabulary": True}
    for adapter, settings, said in (
        (both, {}, "enable_lora_vocabulary"),
        (rows, {"enable_lora_factors": True}, "enable_lora_vocabulary"),
        (whole, vocabulary, "enable_lora_tables"),
        (rows, vocabulary, "max_lora_rank 16"),
        (magnitudes, {**vocabulary, "enable_lora_factors": True}, "a table of embeddings with use_dora"),
        (other, {**vocabulary, "enable_lora_tables": True}, "another vocabulary"),
        (halved, vocabulary, "lacks the rows of lm_head"),
        (wide, {**vocabulary, "dtype": "float16"}, "not finite in float16"),
    ):
        with open_llm(tiny_model("llama"), **settings) as llm, pytest.raises(InvalidRequest, match=said):
            llm.generate({"prompt_token_ids": [5]}, PARAMS, lora_request=LoRARequest("a", 1, adapter.folder))


def test_magnitudes_of_the_output_layer(tiny_model: TinyModel, tmp_path: Path) -> None:
    adapters = [
        PeftAdapter("llama", tmp_path / "dora", use_dora=True, target_modules=["q_proj", "lm_head"]),
        *adapters_of("llama", tmp_path)[1:],
    ]
    compare("llama", tiny_model("llama"), adapters, **{**VOCABULARY, "enable_lora_factors": True})


def test_tables_that_are_the_models_take_no_memory(tiny_model: TinyModel, tmp_path: Path) -> None:
    """PEFT saves them beside products. What stays are the products, and no view of the file."""
    [both, *_] = adapters_of("llama", tmp_path)
    with rig(tiny_model("llama"), enable_lora=True, enable_lora_vocabulary=True) as own:
        facts = own.worker.add_adapter(1, both.folder)
        found = own.worker.runner.adapters.store.take(1)
        kept = {each.untyped_storage().data_ptr(): each.untyped_storage() for pair in found.pairs for each in pair[1:3]}
        assert sum(each.nbytes() for each in kept.values()) == found.nbytes == facts.num_bytes
        assert found.nbytes < (both.folder / "adapter_model.safetensors").stat().st_size / 2


def test_places_are_taken_and_left_and_preemption_changes_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Rows of tables are those of the adapter that has the place, also where the one before changed more of it."""
    adapters = adapters_of("gemma2", tmp_path)
    settings = {"enable_lora": True, "enable_lora_vocabulary": True, "max_loras": 2, "max_num_batched_tokens": 16}
    with rig(tiny_model("gemma2"), **settings) as own:
        used = [None, *(UsedAdapter(i, own.worker.add_adapter(i, a.folder).key) for i, a in enumerate(adapters, 1))]
        requests = {}
        for number in range(20):
            request, adapter = ask(f"{number}", words(number), max_tokens=5), used[number % 4]
            requests[request.id] = request if adapter is None else adapter.of(request)
        own.add(*requests.values())
        disturbed(own, Random(1), gives_way=0.3, leaves=0)
        assert not own.errors
        assert own.engine.scheduler.running.adapters.loads > 3
        for number, request in enumerate(requests.values()):
            oracle = [PlainModel("gemma2"), *adapters][number % 4]
            expect(own.outcomes[request.id].tokens, list(request.prompt_token_ids), oracle)
