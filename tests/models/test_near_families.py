"""Families that are near others: each is a few changes to Llama. Their oracles are transformers' classes, at shapes
that no kernel prefers (heads of 20, 307 tokens), in one piece, and as requests that are cut, mixed and preempted.

tests/models/test_decoder.py and tests/test_oracle.py ask more of the families that have mechanisms of their own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ridgeline import LLM, SamplingParams
from ridgeline.cli.models import describe
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.specs.model import lender_of
from ridgeline.layers.rotary import inverse_frequencies
from ridgeline.models import model_config
from ridgeline.parallel.mesh import Mesh
from ridgeline.perf.footprint import kv_bytes_per_token, parameters
from ridgeline.weights.loader import export_checkpoint, read_model_config
from ridgeline.worker.state import expanding, latent
from tests.devices import DEVICES, placed
from tests.models import near_configs
from tests.parallel.divided import divides, loaded, logits
from tests.parallel.test_stages import numbers_held, passed_through, stages_of
from tests.parallel.threads import on_ranks
from tests.weights.loading import dense_logits, load

Folders = Callable[[str], Path]

TOLERANCE = 2e-4  # float32 logits of order ten: some hundred roundings
WIDTH, HEADS, VOCAB, WINDOW = 80, 4, 307, 8
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MANY = {"num_hidden_layers": 4, "sliding_window": WINDOW}  # such that a layer of four sees everything
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GPTJ: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 256}
FALCON: dict[str, Any] = {
    **{name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    **{name: COMMON[name] for name in ("max_position_embeddings", "bos_token_id", "eos_token_id")},
}
GROWS = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GROWS["llama_4_scaling_beta"] = 0.3
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


class Family(NamedTuple):
    model: str  # the class of transformers
    config: str
    values: dict[str, Any]


def near(name: str, values: dict[str, Any], config: str = "") -> Family:
    return Family(name, config or name.removesuffix("ForCausalLM") + "Config", values)


FAMILIES = {
    "gemma": near("GemmaForCausalLM", {**COMMON, "head_dim": 20}),
    "gemma3": near(
        "Gemma3ForCausalLM",
        {**COMMON, "head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": WINDOW},
        "Gemma3TextConfig",
    ),
    "apertus": near("ApertusForCausalLM", {**COMMON, "head_dim": 20, "rope_parameters": {"rope_theta": 1e4}}),
    "arcee": near("ArceeForCausalLM", {**COMMON, "attention_bias": True, "mlp_bias": True}),
    "seed_oss": near("SeedOssForCausalLM", {**COMMON, "head_dim": 40}),
    "ernie": near("Ernie4_5ForCausalLM", {**COMMON, "head_dim": 40, "use_bias": True}),
    "ernie_moe": near(
        "Ernie4_5_MoeForCausalLM",
        {
            **{**COMMON, "num_hidden_layers": 3},
            **{"moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 1, "moe_intermediate_size": 40},
        },
    ),
    "cohere": near("CohereForCausalLM", {**COMMON, "attention_bias": True, "logit_scale": 0.5}),
    "cohere2": near("Cohere2ForCausalLM", {**COMMON, **MANY, "logit_scale": 0.5}),
    "glm": near("GlmForCausalLM", {**COMMON, "head_dim": 20, "num_key_value_heads": 4}),
    "glm4": near("Glm4ForCausalLM", {**COMMON, "head_dim": 40}),
    "exaone4": near("Exaone4ForCausalLM", {**COMMON, **MANY}),
    "exaone4_small": near(
        "Exaone4ForCausalLM", {**COMMON, "sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "exaone_moe": near(
        "ExaoneMoeForCausalLM",
        {
            **{**COMMON, **MANY},
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1},
        },
    ),
    "starcoder2": near("Starcoder2ForCausalLM", {**COMMON, "sliding_window": WINDOW}),
    "stablelm": near("StableLmForCausalLM", {**COMMON, "head_dim": 20, "partial_rotary_factor": 0.3}),
    "stablelm_parallel": near(
        "StableLmForCausalLM",
        {**COMMON, "use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.3},
    ),
    "phi": near("PhiForCausalLM", {**COMMON, "partial_rotary_factor": 0.4}),
    "phimoe": near(
        "PhimoeForCausalLM",
        {
            **{**COMMON, "num_local_experts": 6, "intermediate_size": 48, "attention_bias": True, "lm_head_bias": True},
            **{"router_jitter_noise": 0.4},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.3},
                **{"short_factor": [1.0, *[1.5] * 9], "long_factor": [4.0] * 10},
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "mimo_v2": near(
        "MiMoV2FlashForCausalLM",
        {
            **{**COMMON, **MANY, "head_dim": 20, "v_head_dim": 12, "attention_bias": True, "num_key_value_heads": 1},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "step3p7": near(
        "Step3p7ForConditionalGeneration",
        {
            "text_config": {
                **{**COMMON, "pad_token_id": 0, "num_hidden_layers": 3, "head_dim": 20, "sliding_window": WINDOW},
                **{"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
                **{"mlp_layer_types": ["dense", "sparse", "sparse"], "num_sliding_attention_heads": 6},
                **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
                **{"share_expert_dim": 24, "moe_router_scaling_factor": 1.5},
                **{"swiglu_limits": [0.0, 7.0, 16.0], "swiglu_limits_shared": [16, None, 7.0]},
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                },
            },
            "vision_config": {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14},
        },
        "Step3p7Config",
    ),
    "gemma4_e": near(
        "Gemma4ForCausalLM",
        {
            **{**COMMON, "num_hidden_layers": 6, "head_dim": 20, "global_head_dim": 40, "sliding_window": WINDOW},
            **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 3},
            **{"use_double_wide_mlp": True, "tie_word_embeddings": True},
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        "Gemma4TextConfig",
    ),
    "llama4": near(
        "Llama4ForCausalLM",
        {
            **{**COMMON, "num_hidden_layers": 4, "head_dim": 20, "intermediate_size": 48, "intermediate_size_mlp": 64},
            **{"num_local_experts": 6, "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "floor_scale": 16},
            **{"attn_scale": 0.3, "rope_parameters": {"rope_theta": 1e4}},
        },
        "Llama4TextConfig",
    ),
    "llama4_plain": near(
        "Llama4ForCausalLM",
        {
            **{**COMMON, "num_hidden_layers": 3, "head_dim": 20, "use_qk_norm": False, "attention_bias": True},
            **{"no_rope_layers": [1, 1, 0], "attn_temperature_tuning": False, "intermediate_size": 48},
        },
        "Llama4TextConfig",
    ),
    "gemma3n": near(
        "Gemma3nForCausalLM",
        {
            **{**COMMON, "num_hidden_layers": 5, "head_dim": 20, "sliding_window": WINDOW, "laurel_rank": 6},
            **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2},
            **{"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"], "altup_num_inputs": 3},
            **{"activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.5], "tie_word_embeddings": True},
            **{"intermediate_size": [112, 112, 96, 112, 112]},
        },
        "Gemma3nTextConfig",
    ),
    "longcat": near(
        "LongcatFlashForCausalLM",
        {
            **{name: value for name, value in COMMON.items() if name not in ("num_hidden_layers", "intermediate_size")},
            **{"num_layers": 2, "ffn_hidden_size": 112, "num_key_value_heads": 4, "head_dim": 16},
            **{"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
            **{"v_head_dim": 20, "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 4},
            **{"expert_ffn_hidden_size": 40, "routed_scaling_factor": 2.0},
        },
    ),
    "gptj": near("GPTJForCausalLM", {**GPTJ, "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2}),
    "gptj_whole": near("GPTJForCausalLM", {**GPTJ, "rotary_dim": 20, "bos_token_id": 1, "eos_token_id": 2}),
    "opt": near(
        "OPTForCausalLM",
        {**COMMON, "ffn_dim": 112, "word_embed_proj_dim": WIDTH, "pad_token_id": 1},
    ),
    "falcon_7b": near("FalconForCausalLM", FALCON),
    "falcon_40b": near("FalconForCausalLM", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_11b": near(
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_in_line": near("FalconForCausalLM", {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True}),
    "mpt": near(
        "MptForCausalLM",
        {
            **{"d_model": WIDTH, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 256, "vocab_size": VOCAB},
            **{"bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "olmo": near("OlmoForCausalLM", COMMON),
    "olmo3": near(
        "Olmo3ForCausalLM",
        {**COMMON, **MANY, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}},
    ),
    "ministral": near("MinistralForCausalLM", {**COMMON, "sliding_window": WINDOW, "head_dim": 20}),
    "ministral3": near(
        "Ministral3ForCausalLM",
        {**COMMON, "head_dim": 20, "rope_parameters": {**GROWS, "original_max_position_embeddings": 16}},
    ),
    "mistral4": near(
        "Mistral4ForCausalLM",
        {
            **{**COMMON, **EXPERTS, "num_key_value_heads": 4, "first_k_dense_replace": 0},
            **{"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
            **{"v_head_dim": 20, "rope_parameters": {**GROWS, "original_max_position_embeddings": 16}},
        },
    ),
    "hunyuan": near("HunYuanDenseV1ForCausalLM", {**COMMON, "head_dim": 20, "attention_bias": True}),
    "hunyuan_alpha": near(
        "HunYuanDenseV1ForCausalLM",
        {
            **COMMON,
            "head_dim": 40,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan_moe": near(
        "HunYuanMoEV1ForCausalLM", {**COMMON, "num_experts": 6, "moe_topk": 2, "head_dim": 20, "intermediate_size": 48}
    ),
    "glm_moe_dsa": near(
        "GlmMoeDsaForCausalLM",
        {
            **{**COMMON, **EXPERTS, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "index_topk": 12},
            **{"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
            **{"v_head_dim": 20, "mlp_layer_types": ["dense", "sparse"], "index_n_heads": 16, "index_head_dim": 32},
        },
    ),
    "glm_moe_dsa_shared": near(
        "GlmMoeDsaForCausalLM",
        {
            **{**COMMON, **EXPERTS, "num_hidden_layers": 4, "num_key_value_heads": 4, "index_topk": 12},
            **{"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
            **{"v_head_dim": 20, "index_n_heads": 16, "index_head_dim": 32},
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "deepseek_v32": near(
        "DeepseekV32ForCausalLM",
        {
            **{**COMMON, **EXPERTS, "num_hidden_layers": 3, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
            **{"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
            **{"v_head_dim": 20, "index_topk": 10, "index_n_heads": 20, "index_head_dim": 24},
        },
    ),
    "minimax": near(
        "MiniMaxForCausalLM",
        {
            **{**COMMON, "num_local_experts": 6, "intermediate_size": 48, "head_dim": 20, "block_size": 16},
            **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            **{f"{part}_alpha_factor": 3.5 for part in ("full_attn", "linear_attn", "mlp")},
            **{f"{part}_beta_factor": 0.75 for part in ("full_attn", "linear_attn", "mlp")},
        },
    ),
    "dots1": near("Dots1ForCausalLM", {**COMMON, **EXPERTS, "sliding_window": WINDOW, "max_window_layers": 1}),
}


@cache
def oracle(family: str) -> Any:
    return made(family)


def made(family: str, **changes: Any) -> Any:
    """The model in float32 with random norms and biases, the same on every call. changes: to its config."""
    found = FAMILIES[family]
    config = getattr(transformers, found.config)(**{**found.values, **changes}, attn_implementation="eager")
    model = getattr(transformers, found.model)(config).eval()
    generator = torch.Generator().manual_seed(sum(family.encode()))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randint(-32, 33, buffer.shape, generator=generator) / 64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and name.endswith("weight")
            deep = parameter.ndim > 1 and any(part in name for part in ("layers.", "h.", "blocks."))
            if name.endswith("e_score_correction_bias"):
                parameter.copy_(torch.randint(-32, 33, parameter.shape, generator=generator) / 64)
            else:
                parameter.normal_(float(norm), 0.3 if deep else 0.2, generator=generator)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("near")

    def folder(family: str) -> Path:
        if not (path := root / family).exists():
            oracle(family).save_pretrained(path)
        return path

    return folder


@torch.inference_mode()
def expected(family: str, ids: list[list[int]]) -> torch.Tensor:
    return oracle(family)(torch.tensor(ids)).logits


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


IDS = [prompt(48, 1), prompt(48, 2)]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_transformers_in_float32_and_no_worse_in_bfloat16(family: str, folders: Folders) -> None:
    found = dense_logits(load(folders(family)), torch.tensor(IDS))
    torch.testing.assert_close(found, expected(family, IDS), atol=TOLERANCE, rtol=0)
    theirs = copy.deepcopy(oracle(family)).to(torch.bfloat16)
    exact = copy.deepcopy(theirs).float()(torch.tensor(IDS)).logits

    def error(logits: torch.Tensor) -> float:
        return (logits.float() - exact).square().mean(-1).sqrt().median().item()

    ours = dense_logits(load(folders(family), torch.bfloat16), torch.tensor(IDS))
    assert error(ours) < 1.2 * error(theirs(torch.tensor(IDS)).logits)


@pytest.mark.few(18)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_are_cut_mixed_and_preempted_write_what_the_oracle_would(
    family: str, device: str, folders: Folders
) -> None:
    """The cache holds some 100 tokens: fewer than these requests want, of which two begin alike."""
    shared = prompt(21, 3)
    prompts = [prompt(1, 4), prompt(40, 5), [*shared, 7], [*shared, 8, 9], prompt(30, 6)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 4, "max_num_seqs": 4}
    spec = read_model_config(folders(family)).spec
    states = (state for layer in spec.layers for state in layer.mixer.states if state.exact)
    memory = int(100 * kv_bytes_per_token(spec, "float32")) + 5 * sum(each.unit_bytes(4, "float32") for each in states)
    check_written(family, folders(family), prompts, **settings, device=device, kv_cache_memory=memory)


@pytest.mark.few(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "family", ["mimo_v2", "step3p7", "phimoe", "minimax", "gemma4_e", "gemma3n", "llama4", "longcat", "deepseek_v32"]
)
def test_drafts_from_the_prompt_change_nothing_that_is_written(family: str, device: str, folders: Folders) -> None:
    """Prompts that repeat themselves, so that drafts are made, of which few are right."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    prompts = [prompt(7, seed) * 4 for seed in (7, 8)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 4, "max_num_seqs": 4}
    settings |= {"device": device, "kv_cache_memory": 1 << 22, "speculative_config": drafts}
    check_written(family, folders(family), prompts, **settings)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["glm_moe_dsa_shared", "deepseek_v32"])
def test_rows_with_a_mask_of_the_choice_write_what_others_do(
    family: str, device: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows that gather what is chosen, rows without a choice and decoding ones, in the same steps."""
    steps = list[set[bool]]()

    def some(tokens_R: np.ndarray, kv_len_R: np.ndarray, **_: int) -> np.ndarray:
        found: np.ndarray = (tokens_R >= 2) & (kv_len_R % 2 == 0)
        steps.append(set(found[kv_len_R > 12].tolist()))
        return found

    monkeypatch.setattr(latent, "worth_masking", some)
    monkeypatch.setattr(expanding, "worth_expanding", lambda tokens_R, kv_len_R, **_: tokens_R >= 3)
    prompts = [prompt(length, length) for length in (5, 30, 41, 24, 33)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 26, "block_size": 4, "max_num_seqs": 4}
    check_written(family, folders(family), prompts, **settings, device=device, kv_cache_memory=1 << 22)
    assert {False, True} in steps


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_scores_of_a_gpu_in_bfloat16_are_no_worse_than_transformers(family: str, eager: bool, folders: Folders) -> None:
    """Of prompts in chunks, and of what was written behind them and behind prefixes that were found: each for itself,
    so that many right prompts hide no wrong decode steps. The median over some 100 tokens allows for the experts that a
    rounding chooses otherwise, and half as much again for its spread."""
    prompts = [prompt(40, seed) for seed in range(4)]
    prompts += [[*prompts[0][:33], 7], [*prompts[1][:37], 8, 9]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    limits: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 64, "block_size": 16}
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    with LLM(
        folders(family), **placed("cuda"), **limits, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=eager
    ) as llm:
        results = llm.generate(asked, params, use_tqdm=False)
        again = llm.generate(asked, params.replace(prompt_logprobs=None), use_tqdm=False)
    assert any(each.outputs[0].metrics.cached_tokens for each in again)
    theirs = copy.deepcopy(oracle(family)).to(torch.bfloat16)
    exact, errors = (
        copy.deepcopy(theirs).float(),
        {True: list[tuple[float, float]](), False: list[tuple[float, float]]()},
    )
    for result in [*results, *again]:
        ids, own = [*result.prompt_token_ids, *result.outputs[0].token_ids], len(result.prompt_token_ids)
        entries = [*(result.prompt_logprobs or [None] * own), *result.outputs[0].logprobs]
        want, other = (model(torch.tensor([ids])).logits[0].float().log_softmax(-1) for model in (exact, theirs))
        for at, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            if entry is not None:
                scores = (entry[token].logprob, other[at - 1, token].item())
                found = tuple(abs(score - want[at - 1, token].item()) for score in scores)
                errors[at > own].append(found)  # type: ignore[arg-type]
    for some in errors.values():  # the first token of an output comes from the prompt's step
        ours, transformers_own = torch.tensor(some).median(0).values.tolist()
        assert len(some) > 100
        assert ours < 1.5 * transformers_own


def check_written(family: str, folder: Path, prompts: list[list[int]], **settings: Any) -> None:
    """Raise AssertionError unless the engine writes what the oracle would, with its probabilities."""
    llm = LLM(folder, **settings, dtype="float32", skip_tokenizer_init=True, debug_checks=True, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    try:
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    finally:
        llm.shutdown()
    for ids, result in zip(prompts, results, strict=True):
        [output] = result.outputs
        scores = expected(family, [[*ids, *output.token_ids]])[0].log_softmax(-1)[len(ids) - 1 : -1]
        assert output.logprobs is not None
        for at, token, entry in zip(scores, output.token_ids, output.logprobs, strict=True):
            assert at[token] >= at.max() - TOLERANCE
            assert entry[token].logprob == pytest.approx(at[token].item(), abs=TOLERANCE)


def test_an_engine_runs_layers_that_keep_no_parameters(folders: Folders) -> None:
    """OLMo's norms have none, and a CPU packs the products' matrices."""
    with LLM(folders("olmo"), dtype="bfloat16", device="cpu", skip_tokenizer_init=True) as llm:
        assert llm.assembly.memory.weights >= 2 * parameters(llm.assembly.model.spec).total
        llm.generate({"prompt_token_ids": IDS[0]}, SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.few(24)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_two_ranks_or_a_stage_for_every_layer_score_as_one_device(family: str, folders: Folders) -> None:
    folder = folders(family)
    want = logits(folder, Mesh())
    spec = read_model_config(folder).spec
    if spec.layer_inputs is not None or any(
        layer.late_addend or lender_of(layer.mixer) is not None for layer in spec.layers
    ):  # a stage would need more than the output of the one before
        with pytest.raises(InvalidConfig, match=r"pipeline_parallel_size is 2, .* inputs of their own"):
            stages_of(folder, 2)
        assert numbers_held(loaded(folder, Mesh())) == parameters(spec).total
    else:
        stages = stages_of(folder, len(spec.layers))
        torch.testing.assert_close(passed_through(stages), want, rtol=0, atol=0)
        twice = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
        assert sum(map(numbers_held, stages)) == parameters(spec).total + twice
    if not divides(folder, 2):  # one head of keys, say
        return
    for got in on_ranks(2, lambda axis: logits(folder, Mesh(tp=axis))):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.few(24)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_read_is_written_again_as_it_was(family: str, folders: Folders) -> None:
    folder = folders(family)
    written = export_checkpoint(load(folder), read_model_config(folder).weights)
    stored = load_file(folder / "model.safetensors")
    plain = {name for name in stored if "experts." not in name}  # transformers holds a layer's experts as one
    unused = read_model_config(folder).spec.unused
    assert {name for name in plain if not name.startswith(("lm_head.", *unused))} <= written.keys()
    for name, tensor in written.items():
        if name not in stored and "experts." in name:
            continue
        # A norm's offset was added and is taken off again
        torch.testing.assert_close(tensor, stored[name], rtol=0, atol=2e-7)


@pytest.mark.parametrize("form", ["hub", "newer", "text alone"])
@torch.inference_mode()
def test_the_text_model_is_read_out_of_a_larger_one(form: str, folders: Folders, tmp_path: Path) -> None:
    """A tower's tensors are passed over, under any of the names that such checkpoints give to the text model's."""
    names: dict[str, Callable[[str], str]] = {
        "hub": "language_model.{}".format,
        "newer": lambda name: name.replace("model.", "model.language_model.", 1),
        "text alone": str,
    }
    folder = folders("gemma3")
    stored = {names[form](name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**stored, "vision_tower.patch.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = dense_logits(load(tmp_path), torch.tensor(IDS))
    torch.testing.assert_close(found, expected("gemma3", IDS), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "mistral3_multimodal",
            {"text_config": {**near_configs.MISTRAL_SMALL_3_1["text_config"], "model_type": []}},
            "model_type",
        ),
        ("mistral3_multimodal", {"text_config": 7}, "text_config"),
        ("ministral3", {"rope_parameters": "x"}, "rope_parameters"),
        ("olmo3", {"rope_scaling": ["x"]}, "rope_scaling"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type"),
        ("mpt", {"n_heads": 12}, "power of two"),
        ("falcon", {"alibi": True}, "alibi"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LGLG"}, "sliding_window_pattern"),
        ("hunyuan_moe", {"moe_topk": [1, 2]}, "moe_topk"),
        ("minimax", {"postnorm": False}, "postnorm"),
        ("minimax", {"layernorm_mlp_alpha": 2.0}, "layernorm_mlp_alpha"),
        ("minimax", {"layer_types": None, "attn_type_list": [2] * 80}, "attn_type_list"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("mimo_v2", {"v_head_dim": 256}, "v_head_dim"),
        ("mimo_v2", {"hybrid_layer_pattern": [1]}, "hybrid_layer_pattern"),
        ("mimo_v2", {"moe_layer_freq": 1}, "moe_layer_freq"),
        ("step3p7", {"text_config": near_configs.STEP_3_5_FLASH | {"swiglu_limits": [5.0] * 45}}, "swiglu_limits"),
        *(
            ("step3p7", {"text_config": near_configs.STEP_3_5_FLASH | {"gating": gating}}, "gating")
            for gating in (False, None, 1, "per-element", ["per-head"])
        ),
        ("step3p7", {"text_config": near_configs.STEP_3_5_FLASH | {"moe_layers_enum": "a"}}, "moe_layers_enum"),
        ("step3p7", {"text_config": near_configs.STEP_3_5_FLASH | {"rope_theta": [1.0]}}, "rope_theta"),
        (
            "step3p7",
            {"text_config": near_configs.STEP_3_5_FLASH | {"use_bidirectional_attention": True}},
            "use_bidirectional_attention",
        ),
        ("glm_moe_dsa", {"index_topk": 0}, "index_topk"),
        ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs"),
        ("gemma3n", {"altup_active_idx": 4}, "altup_active_idx"),
        ("gemma3n", {"intermediate_size": [8192]}, "intermediate_size"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 30}, "activation_sparsity_pattern"),
        ("gemma3n", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
        ("longcat", {"zero_expert_type": "copy"}, "zero_expert_type"),
        ("longcat", {"router_bias": True}, "router_bias"),
        ("longcat", {"zero_expert_num": 2**20}, "n_routed_experts"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("llama4", {"moe_layers": [48]}, "moe_layers"),
        ("llama4", {"layer_types": ["sliding_attention"] * 48}, "layer_types"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        model_config(near_configs.NEAR[name] | changes)


_MIMO = {"partial_rotary_factor": 0.334}
_STEP = near_configs.STEP_3_5_FLASH


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            near_configs.MIMO_V2_FLASH,
            {"full_attention": {"rope_theta": 5e6, **_MIMO}, "sliding_attention": {"rope_theta": 1e4, **_MIMO}},
        ),
        (
            _STEP,
            {
                "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.5, **_STEP["rope_scaling"]},
                "sliding_attention": {"rope_theta": 1e4},
            },
        ),
        (
            near_configs.NEAR["gemma3n"],
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        ),
    ],
    ids=["mimo_v2", "step3p5", "gemma3n"],
)
def test_rotations_of_layers_with_windows_have_two_spellings(old: dict[str, Any], new: dict[str, Any]) -> None:
    spelled = {name: value for name, value in old.items() if "rope" not in name and "partial" not in name}
    assert model_config(spelled | {"rope_parameters": new}).spec == model_config(old).spec


def test_a_token_beyond_the_table_of_layer_inputs_has_the_first_row(folders: Folders) -> None:
    """As in Gemma 3n, where these are the tokens of images and sounds."""
    decoder = load(folders("gemma3n"))
    assert decoder.layer_inputs is not None
    decoder.layer_inputs._known = 300
    token_ids, x_TM = torch.tensor([0, 299, 300, 306]), torch.zeros(4, WIDTH)
    first, _, *beyond = decoder.layer_inputs(token_ids, x_TM)
    for each in beyond:
        torch.testing.assert_close(each, first)


def test_drafts_cannot_skip_a_layer_to_whose_keys_others_attend(folders: Folders) -> None:
    for layers, sentence in (([2], "layer 2 by skip_layers of speculative_config"), (None, r"layer \d by its default")):
        speculative = {"method": "layer_skip", "num_speculative_tokens": 2} | (
            {"skip_layers": layers} if layers else {}
        )
        with pytest.raises(InvalidConfig, match=sentence):
            LLM(folders("gemma4_e"), speculative_config=speculative, device="cpu", skip_tokenizer_init=True)


def test_chunks_of_attention_have_whole_blocks_and_no_trees_of_drafts(folders: Folders) -> None:
    with pytest.raises(InvalidConfig, match=r"block_size 32 .*chunks of 16 \(attention_chunk_size\)"):
        LLM(folders("llama4"), block_size=32, device="cpu", skip_tokenizer_init=True)
    tree = {"method": "lookahead"}
    with pytest.raises(InvalidConfig, match="trees of drafts are not for attention inside chunks"):
        LLM(folders("llama4"), speculative_config=tree, device="cpu", skip_tokenizer_init=True)
    published = model_config(near_configs.NEAR["llama4"]).spec
    assert [layer.attention.chunk for layer in published.layers[:4]] == [8192, 8192, 8192, None]
    whole = model_config(near_configs.NEAR["llama4"] | {"attention_chunk_size": 2**24}).spec
    assert {layer.attention.chunk for layer in whole.layers} == {None}
    assert describe(str(folders("llama4")))["chunks"] == [16]


def test_a_router_whose_experts_are_weighed_in_turn_has_magnitudes_for_both_reaches() -> None:
    """Beyond the original context the table has the long factors and their magnitude."""
    scaling = near_configs.PHI_3_5_MOE["rope_scaling"] | {"long_mscale": 1.5}
    rope = model_config(near_configs.PHI_3_5_MOE | {"rope_scaling": scaling}).spec.layers[0].mixer.rope
    assert rope is not None
    found = {length: inverse_frequencies(rope, length) for length in (4096, 4097)}
    assert (found[4096][1], found[4097][1]) == (1.243163121016122, 1.5)
    torch.testing.assert_close(found[4096][0] / found[4097][0], torch.tensor(scaling["long_factor"]))


def test_the_first_configs_of_falcon_say_it_in_other_words() -> None:
    first = {"architectures": ["RWForCausalLM"], "hidden_size": 8192, "n_layer": 2, "n_head": 128, "n_head_kv": 8}
    layer = model_config({**first, "vocab_size": 65024}).spec.layers[0]
    assert (layer.attention.num_heads, layer.attention.num_kv_heads, layer.one_norm) == (128, 8, False)
    odd = {**near_configs.GPT_J_6B, "n_embd": 1600, "rotary_dim": 58}
    rope = model_config(odd).spec.layers[0].mixer.rope
    assert rope is not None
    assert rope.rotary_dim == 58


def searched(config: transformers.LlamaConfig, blocks: list[dict[str, Any]]) -> Any:
    """transformers' Llama with the layers of an architecture search, for which it has no class."""

    class Nothing(torch.nn.Module):
        def forward(self, x: torch.Tensor, **_: Any) -> Any:
            return x

    class Layer(LlamaDecoderLayer):
        def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
            if not isinstance(self.self_attn, Nothing):
                x = x + self.self_attn(hidden_states=self.input_layernorm(x), **more)[0]
            return x if isinstance(self.mlp, Nothing) else x + self.mlp(self.post_attention_layernorm(x))

    model = transformers.LlamaForCausalLM(config)
    for index, block in enumerate(blocks):
        own = copy.deepcopy(config)
        group, mult = block["attention"]["n_heads_in_group"], block["ffn"]["ffn_mult"]
        own.num_key_value_heads = HEADS // (group or 1)
        own.intermediate_size = -(-int(2 * (mult or 1) * WIDTH / 3) // 256) * 256
        layer = Layer(own, index)
        if group is None:
            layer.self_attn = layer.input_layernorm = Nothing()
        if mult is None:
            layer.mlp = layer.post_attention_layernorm = Nothing()
        model.model.layers[index] = layer
    return model.eval()


@torch.inference_mode()
def left_by_search() -> Any:
    """Layers of which each part may have a size of its own, or be absent, that save themselves as a DeciLM."""
    parts = [(2, 3.5), (None, 8.0), (4, 1.0), (1, None)]
    blocks = [
        {"attention": {"n_heads_in_group": group, "no_op": not group}, "ffn": {"ffn_mult": mult, "no_op": not mult}}
        for group, mult in parts
    ]
    config = transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 4}, attn_implementation="eager")
    config.block_configs = blocks
    torch.manual_seed(0)
    model = searched(config, blocks)
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)

    def save(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        told = {**config.to_dict(), "architectures": ["DeciLMForCausalLM"]}
        told |= {"num_key_value_heads": None, "intermediate_size": None}
        (folder / "config.json").write_text(json.dumps(told))

    model.save_pretrained = save
    return model


@torch.inference_mode()
def test_layers_that_a_search_left_differ_in_heads_and_width_or_lack_a_part(tmp_path: Path) -> None:
    model = left_by_search()
    model.save_pretrained(tmp_path)
    want = model(torch.tensor(IDS)).logits
    torch.testing.assert_close(dense_logits(load(tmp_path), torch.tensor(IDS)), want, atol=TOLERANCE, rtol=0)
    llm = LLM(tmp_path, dtype="float32", device="cpu", skip_tokenizer_init=True, kv_cache_memory=1 << 22)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    try:
        [result] = llm.generate([{"prompt_token_ids": IDS[0]}], params, use_tqdm=False)
    finally:
        llm.shutdown()
    written = result.outputs[0].token_ids
    scores = model(torch.tensor([[*IDS[0], *written]])).logits[0, len(IDS[0]) - 1 : -1]
    assert (scores.gather(1, torch.tensor(written)[:, None])[:, 0] >= scores.amax(1) - TOLERANCE).all()
