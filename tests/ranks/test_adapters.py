"""Adapters on ranks that divide matrices, beside PEFT. The tolerance is that of tests/test_lora.py: sums over two ranks
round as those of one device do, in another order."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("peft")

from ridgeline import LoRARequest, SamplingParams
from ridgeline.core.errors import ModelLoadError
from ridgeline.core.plan.adapters import HoldsAdapters, UsedAdapter
from tests.driving import ask, disturbed, rig
from tests.peft_adapters import PeftAdapter, PlainModel
from tests.test_lora import (
    FAMILIES,
    PARAMS,
    PROMPTS,
    TOLERANCE,
    check,
    check_factors,
    check_quantized,
    compare,
    expect,
    open_llm,
    words,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")

TinyModel = Callable[[str], Path]
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "kv_cache_memory": 1 << 19}

# One of each way in which ranks divide outputs: q, k, v apart; fused in one tensor; head by head; pairs of rows that
# neighbour each other; several things in one projection; shared experts beside experts that stay as they are
THOROUGH = [family for family in FAMILIES if family not in ("llama", "phi3", "neox", "qwen3_next")]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.thorough) if family in THOROUGH else family for family in FAMILIES],
)
def test_logprobs_on_two_ranks_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    check_ranks(family, tiny_model(family), tmp_path, **RANKS)


def check_ranks(family: str, model: Path, folder: Path, **ranks: Any) -> None:
    """Compare adapters of unlike ranks and the model itself, in one batch, in chunks, with hits of the prefix cache."""
    adapters = [
        PeftAdapter(family, folder / "one", **FAMILIES[family]),
        PeftAdapter(family, folder / "two", seed=1, r=9, lora_alpha=5, use_rslora=True, **FAMILIES[family]),
    ]
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    oracles = [PlainModel(family), *adapters]
    with open_llm(model, **ranks) as llm:
        asked = [(prompt, which) for prompt in PROMPTS for which in range(3)]
        for _ in range(2):  # once more, from the cache
            prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in asked]
            outputs = llm.generate(prompts, PARAMS, lora_request=[named[which] for _, which in asked], use_tqdm=False)
            for output, (_, which) in zip(outputs, asked, strict=True):
                check(output, oracles[which])


STAGES = {"pipeline_parallel_size": 2, "kv_cache_memory": 1 << 19}
APART = {"data_parallel_size": 2, "enable_expert_parallel": True, "kv_cache_memory": 1 << 19}


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", STAGES),
        pytest.param("falcon_h1", STAGES, marks=pytest.mark.thorough),
        pytest.param("qwen3", STAGES | RANKS, marks=pytest.mark.thorough),
        ("qwen2_moe", APART),
        pytest.param("olmoe", APART, marks=pytest.mark.thorough),
        pytest.param("qwen2_moe", RANKS | {"enable_expert_parallel": True}, marks=pytest.mark.thorough),
    ],
    ids=["stages", "stages of states", "stages of ranks", "apart", "apart without shared", "experts"],
)
def test_logprobs_of_stages_and_of_ranks_with_requests_of_their_own(
    family: str, ranks: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    check_ranks(family, tiny_model(family), tmp_path, **ranks)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", STAGES),
        ("qwen2", RANKS),
        pytest.param("gpt2", RANKS, marks=pytest.mark.thorough),
        pytest.param("phi3", STAGES | RANKS, marks=pytest.mark.thorough),
    ],
    ids=["stages", "biases", "biases of divided inputs", "stages of ranks"],
)
def test_magnitudes(family: str, ranks: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    """Ranks that divide the inputs of a map have parts of its rows, of which norms are taken."""
    adapters = [
        PeftAdapter(family, tmp_path / "dora", use_dora=True),
        PeftAdapter(family, tmp_path / "lora", seed=1),
        PeftAdapter(family, tmp_path / "more", seed=2, use_dora=True, use_rslora=True),
    ]
    compare(family, tiny_model(family), adapters, **ranks)


def test_magnitudes_of_quantized_models_on_two_ranks(tmp_path: Path) -> None:
    check_quantized("awq", tmp_path, {"use_dora": True}, enable_lora_factors=True, **RANKS)


@pytest.mark.parametrize("name", ["awq", pytest.param("bnb nf4", marks=pytest.mark.thorough)])
def test_adapters_of_quantized_models_on_two_ranks(name: str, tmp_path: Path) -> None:
    check_quantized(name, tmp_path, **RANKS)


@pytest.mark.parametrize("family", ["phi3", pytest.param("falcon_h1", marks=pytest.mark.thorough)])
def test_factors_on_two_ranks_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    check_factors(family, tiny_model(family), tmp_path, **RANKS)


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [RANKS, STAGES], ids=["matrices", "stages"])
def test_waits_preemption_and_folders_that_change(ranks: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    """Adapters share two places and a host's memory for two of them, while requests are preempted by chance. Then one
    changes, whose requests end alone, and both ranks go on."""
    adapters = [PeftAdapter("llama", tmp_path / str(i), seed=i, r=1 + 3 * i) for i in range(4)]
    settings = {
        "enable_lora": True,
        "enable_lora_factors": True,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "max_num_batched_tokens": 16,
        **ranks,
    }
    with rig(tiny_model("llama"), **settings) as own:
        assert isinstance(own.worker, HoldsAdapters)
        for index, broken in enumerate(("adapter_model.safetensors", "adapter_config.json")):
            shutil.copytree(adapters[0].folder, folder := tmp_path / f"broken{index}")
            (folder / broken).unlink()
            with pytest.raises(ModelLoadError, match=broken):
                own.worker.add_adapter(9, folder)
        own.add(ask("meanwhile", words(5), max_tokens=12))
        with ThreadPoolExecutor(1) as thread:  # as servers do, while steps run
            reading = [thread.submit(own.worker.add_adapter, i, each.folder) for i, each in enumerate(adapters, 1)]
            own.run()
        used = [None, *(UsedAdapter(i, each.result().key) for i, each in enumerate(reading, 1))]
        requests = {}
        for number in range(10):
            request, adapter = ask(f"{number}", words(number // 5), max_tokens=6), used[number % 5]
            requests[request.id] = request if adapter is None else adapter.of(request)
        own.add(*requests.values())
        disturbed(own, Random(1), gives_way=0.3, leaves=0)
        assert not own.errors
        oracles = [PlainModel("llama"), *adapters]
        for number, request in enumerate(requests.values()):
            expect(own.outcomes[request.id].tokens, list(request.prompt_token_ids), oracles[number % 5])
        for number in (2, 3, 4):  # take the places and the memory of the first
            own.run(used[number].of(ask(f"evict {number}", words(7), max_tokens=2)))
        adapters[0].write_config(r=5)
        own.add(ask("plain", words(9), max_tokens=12), used[1].of(ask("lost", words(9), max_tokens=3)))
        own.run(used[3].of(ask("kept", words(9), max_tokens=3)))
        assert own.outcomes["lost"].finish_reason == "error"
        for name, which in ("plain", 0), ("kept", 3):
            expect(own.outcomes[name].tokens, words(9), oracles[which])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", {"prefill_context_parallel_size": 2}),
        pytest.param("falcon_h1", {"prefill_context_parallel_size": 2}, marks=pytest.mark.thorough),
        pytest.param("qwen3", {"prefill_context_parallel_size": 2, **RANKS}, marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", {"prefill_context_parallel_size": 2}, marks=pytest.mark.thorough),
    ],
    ids=["stripes", "stretches", "stripes of ranks", "experts, tables"],
)
def test_divided_contexts(family: str, ranks: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    """Ranks run their shares of a step's tokens, which have the adapters of two requests and none."""
    how: dict[str, Any] = FAMILIES.get(family, {**EXPERTS, "target_modules": ["q_proj", "embed_tokens", "lm_head"]})
    adapters = [PeftAdapter(family, tmp_path / f"{i}", seed=i, r=1 + 3 * i, **how) for i in range(2)]
    if family not in FAMILIES:
        ranks = {**ranks, "enable_lora_experts": True, "enable_lora_vocabulary": True}
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    settings = {"prefill_context_parallel_threshold": 6, "kv_cache_memory": 1 << 19, **ranks}
    prompts = [words(1, 23), words(2, 40), words(3, 17)]
    with open_llm(tiny_model(family), **settings) as llm:
        for _ in range(2):
            asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(asked, params, lora_request=named, use_tqdm=False)
            for output, oracle in zip(outputs, [PlainModel(family), *adapters], strict=True):
                [completion] = output.outputs
                exact = oracle.logprobs([*output.prompt_token_ids, *completion.token_ids])
                for place, token in enumerate(completion.token_ids, len(output.prompt_token_ids) - 1):
                    assert completion.logprobs is not None
                    found = completion.logprobs[place + 1 - len(output.prompt_token_ids)][token].logprob
                    assert found == pytest.approx(float(exact[place, token]), abs=TOLERANCE)


EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": ["q_proj", "o_proj"]}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3_moe", RANKS),
        ("qwen3_moe", RANKS | {"enable_expert_parallel": True}),
        pytest.param("gpt_oss", RANKS, marks=pytest.mark.thorough),
        pytest.param("deepseek_v2", RANKS | {"enable_expert_parallel": True}, marks=pytest.mark.thorough),
        pytest.param("mixtral", STAGES, marks=pytest.mark.thorough),
        pytest.param("mixtral", STAGES | RANKS, marks=pytest.mark.thorough),
    ],
    ids=["columns", "whole", "columns that alternate", "whole beside shared", "stages", "columns of stages"],
)
def test_experts_of_ranks_are_those_of_peft(
    family: str, ranks: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Ranks have parts of every expert, or some experts."""
    adapters = [
        PeftAdapter(family, tmp_path / "all", **EXPERTS),
        PeftAdapter(family, tmp_path / "down", seed=1, r=7, **{**EXPERTS, "target_parameters": ["experts.down_proj"]}),
        PeftAdapter(family, tmp_path / "none", seed=2, r=3, target_modules=["q_proj"]),
    ]
    compare(family, tiny_model(family), adapters, enable_lora_factors=False, enable_lora_experts=True, **ranks)
