"""Adapters served side by side, beside PEFT, in float32 with debug checks on.

float32 on logits of order ten: 1e-4 is a hundred roundings, and adapters add two products to each of some ten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, BeamSearchParams, LoRARequest, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.adapters import UsedAdapter
from ridgeline.text.outputs import RequestOutput

pytest.importorskip("peft")

from tests.driving import ask, disturbed, rig
from tests.peft_adapters import PeftAdapter, PlainModel
from tests.weights.quantized_files import MATRICES, ROUNDED, SCHEMES, quantize

TinyModel = Callable[[str], Path]

TOLERANCE = 2e-4
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 4, "max_num_seqs": 4}
SHARED = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67]
PROMPTS = ([5, 6, 7], list(range(10, 45)), [*SHARED, 100], [*SHARED, 101])
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)

# Fused and unfused projections, rows head by head, Conv1D, biases, gates of shared experts, latents, states, and muP's
# multipliers
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FAMILIES: dict[str, Any] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "phi3": {},
    "neox": {},
    "gpt2": {},
    "qwen2_moe": {"target_modules": [*ATTENTION, "shared_expert_gate", "shared_expert.down_proj"]},
    "olmoe": {"target_modules": ATTENTION},
    "deepseek_v2": {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "falcon_h1": {"target_modules": [*ATTENTION, "in_proj", "gate_proj", "up_proj", "down_proj"]},
    "qwen3_next": {"target_modules": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    "mamba2": {"target_modules": ["in_proj"]},
    "bloom": {},
}


def open_llm(folder: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "debug_checks": True}
    return LLM(folder, **{**settings, "enable_lora": True, "max_loras": 2, **TIGHT, **options})


def check(output: RequestOutput, oracle: PeftAdapter | PlainModel, tolerance: float = TOLERANCE) -> None:
    """Compare the log-probability of every token of a prompt and of its output."""
    [completion] = output.outputs
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    exact = oracle.logprobs(tokens)
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    found = [*output.prompt_logprobs[1:], *completion.logprobs]
    for place, (token, reported) in enumerate(zip(tokens[1:], found, strict=True)):
        assert reported is not None
        assert reported[token].logprob == pytest.approx(float(exact[place, token]), abs=tolerance), place


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Several adapters of unlike ranks and the model itself, in one batch, in chunks, with hits of the prefix cache."""
    adapters = [
        PeftAdapter(family, tmp_path / "one", **FAMILIES[family]),
        PeftAdapter(family, tmp_path / "two", seed=1, r=9, lora_alpha=5, use_rslora=True, **FAMILIES[family]),
    ]
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    oracles = [PlainModel(family), *adapters]
    with open_llm(tiny_model(family)) as llm:
        asked = [(prompt, which) for prompt in PROMPTS for which in range(3)]
        for _ in range(2):  # once more, from the cache
            prompts: Sequence[Any] = [{"prompt_token_ids": prompt} for prompt, _ in asked]
            outputs = llm.generate(prompts, PARAMS, lora_request=[named[which] for _, which in asked], use_tqdm=False)
            for output, (_, which) in zip(outputs, asked, strict=True):
                check(output, oracles[which])


STACKS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss"])
def test_experts_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """One adapter has all of an expert's matrices, the second one of them, the third none."""
    attention = {"target_modules": ["q_proj", "o_proj"]}
    adapters = [
        PeftAdapter(family, tmp_path / "all", target_parameters=STACKS, **attention),
        PeftAdapter(family, tmp_path / "down", seed=1, r=7, target_parameters=STACKS[1:], use_rslora=True, **attention),
        PeftAdapter(family, tmp_path / "none", seed=2, r=3, **attention),
    ]
    compare(family, tiny_model(family), adapters, enable_lora_factors=False, enable_lora_experts=True)


def test_experts_one_by_one_are_those_of_peft(tiny_model: TinyModel, tmp_path: Path) -> None:
    """As other programs store them: two matrices for each projection of an expert. Those that are not there are as
    the model has them."""
    adapted = PeftAdapter("qwen3_moe", tmp_path / "a", target_parameters=STACKS, target_modules=["q_proj"])
    path = adapted.folder / "adapter_model.safetensors"
    found = {}
    for name, tensor in load_file(path).items():
        module, half = name.split(".lora_")
        if ".experts" not in module:
            found[name] = tensor
            continue
        first, rank = module.endswith(".base_layer"), 4
        owner = module.removesuffix(".base_layer")
        for expert in range(8):
            if half.startswith("A"):
                own = [tensor[expert * rank : (expert + 1) * rank]] * (2 if first else 1)
            else:
                own = list(tensor[:, expert::8].chunk(2 if first else 1))
            for kind, each in zip(("gate", "up") if first else ("down",), own, strict=True):
                found[f"{owner}.{expert}.{kind}_proj.lora_{half}"] = each.clone()
    save_file(found, path)
    adapted.write_config(target_parameters=None, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    others = [PeftAdapter("qwen3_moe", tmp_path / f"{seed}", seed=seed, target_modules=["q_proj"]) for seed in (1, 2)]
    model = tiny_model("qwen3_moe")
    compare("qwen3_moe", model, [adapted, *others], enable_lora_factors=False, enable_lora_experts=True)
    with open_llm(model) as llm, pytest.raises(InvalidRequest, match="enable_lora_experts"):
        llm.generate("", PARAMS, lora_request=LoRARequest("a", 1, adapted.folder))


# Vectors of outputs and of inputs: of fused and unfused projections, of Conv1D, and beside muP's multipliers
FACTORS: dict[str, Any] = {
    "llama": {"target_modules": [*ATTENTION, "up_proj", "down_proj"], "feedforward_modules": ["o_proj", "down_proj"]},
    "phi3": {"target_modules": ["qkv_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]},
    "falcon_h1": {"target_modules": ["k_proj", "in_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
}


def check_factors(family: str, model: Path, folder: Path, **options: Any) -> None:
    """Compare IA3, LoRA and the model itself in one batch with PEFT. Another adapter takes the place of the first."""
    adapters = [
        PeftAdapter(family, folder / "ia3", **FACTORS[family]),
        PeftAdapter(family, folder / "lora", **FAMILIES[family]),
        PeftAdapter(family, folder / "more", seed=1, **FACTORS[family]),
    ]
    compare(family, model, adapters, **options)


def compare(family: str, model: Path, adapters: list[PeftAdapter], **options: Any) -> None:
    """Compare adapters and the model itself in one batch with PEFT."""
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    oracles = [PlainModel(family), *adapters]
    with open_llm(model, **{"enable_lora_factors": True, **options}) as llm:
        asked = [(prompt, which) for prompt in PROMPTS[1:3] for which in range(4)]
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        outputs = llm.generate(prompts, PARAMS, lora_request=[named[which] for _, which in asked], use_tqdm=False)
        for output, (_, which) in zip(outputs, asked, strict=True):
            check(output, oracles[which])


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt2", "falcon_h1"])
def test_magnitudes_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """DoRA beside LoRA and the model itself; two of the families have biases."""
    options = FAMILIES.get(family, {})
    adapters = [
        PeftAdapter(family, tmp_path / "dora", use_dora=True, **options),
        PeftAdapter(family, tmp_path / "lora", seed=1, **options),
        PeftAdapter(family, tmp_path / "more", seed=2, use_dora=True, use_rslora=True, **options),
    ]
    compare(family, tiny_model(family), adapters)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"bias": "all"}),
        ("gpt2", {"bias": "lora_only", "use_dora": True}),
        ("llama", {"lora_bias": True}),
        ("qwen2", {"bias": "lora_only", "lora_bias": True, "use_rslora": True}),
    ],
    ids=["all", "those of adapted layers", "of thin maps", "both"],
)
def test_biases_are_those_of_peft(family: str, options: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    """In the model's place, and of the thin maps; the others have none."""
    adapters = [
        PeftAdapter(family, tmp_path / "biased", **options),
        PeftAdapter(family, tmp_path / "lora", seed=1),
        PeftAdapter(family, tmp_path / "more", seed=2, **options),
    ]
    compare(family, tiny_model(family), adapters)


def test_norms_are_those_of_weights_in_any_layout(tiny_model: TinyModel, tmp_path: Path) -> None:
    """In bfloat16 some platforms keep plain weights in layouts of their own. A rounding is 2**-9 of a number there, and
    of a norm less."""
    adapted = PeftAdapter("llama", tmp_path / "a", use_dora=True)
    found = []
    for dtype in ("float32", "bfloat16"):
        settings = {"enable_lora": True, "enable_lora_factors": True}
        with rig(tiny_model("llama"), dtype=dtype, debug_checks=False, **settings) as own:
            own.worker.add_adapter(1, adapted.folder)
            found.append(own.worker.runner.adapters.store.take(1).factors)
    assert len(found[0]) == 14
    for wide, narrow in zip(*found, strict=True):
        torch.testing.assert_close(narrow.output_O1, wide.output_O1, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", ["awq", "bnb nf4", "fp8 static"])
def test_magnitudes_of_quantized_models_are_those_of_their_numbers(name: str, tmp_path: Path) -> None:
    check_quantized(name, tmp_path, {"use_dora": True}, enable_lora_factors=True)


@pytest.mark.parametrize("family", FACTORS)
def test_factors_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    check_factors(family, tiny_model(family), tmp_path)


EXACT = ("coded_linear", "coded_norm_linear", "fp8_linear", "fp8_norm_linear")  # others round less, or otherwise


def check_quantized(name: str, folder: Path, how: dict[str, Any] | None = None, **options: Any) -> None:
    """Compare an adapter on a quantized model with PEFT's on the numbers that the model stands for. Where a format
    rounds activations, PEFT's base layers get rounded ones, and the adapter those that they are made of."""
    scheme = SCHEMES[name]
    model, numbers = quantize("llama", scheme, folder / "model")
    adapted = PeftAdapter.of(numbers, folder / "adapter", **(how or {}))
    if scheme.rounds is not None:
        rounded = ROUNDED[scheme.rounds]
        for path, module in adapted.model.named_modules():
            base = MATRICES.search(f"{path.removesuffix('.base_layer')}.weight")
            if base and isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))
    with open_llm(model, kernels=dict.fromkeys(EXACT, "reference"), **options) as llm:
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        request = LoRARequest("a", 1, adapted.folder)
        # Activations that are rounded fall to the other side by the last bits of a product, which CPUs have otherwise:
        # that moves a log-probability by some 0.02. Without the adapter it moves by more.
        tolerance = TOLERANCE if scheme.rounds is None else 0.05
        plain = llm.generate(prompts, PARAMS, use_tqdm=False)
        with pytest.raises(AssertionError):
            check(plain[0], adapted, tolerance)
        for output in llm.generate(prompts, PARAMS, lora_request=request, use_tqdm=False):
            check(output, adapted, tolerance)


@pytest.mark.parametrize("name", ["fp8 static", "fp8 blocks", "gptq order", "awq", "bnb nf4 nested", "auto-round"])
def test_adapters_of_quantized_models_are_those_of_their_numbers(name: str, tmp_path: Path) -> None:
    """The last one has plain numbers, codes of four bits and of eight in one fused projection."""
    check_quantized(name, tmp_path)


def test_factors_of_quantized_models_are_those_of_their_numbers(tmp_path: Path) -> None:
    """The format rounds what the factors have multiplied."""
    check_quantized("fp8 static", tmp_path, FACTORS["llama"], enable_lora_factors=True)


def words(seed: int, count: int = 20) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 300) for _ in range(count)]


def test_ranks_from_1_to_256_run_in_one_batch(tiny_model: TinyModel, tmp_path: Path) -> None:
    adapters = [PeftAdapter("llama", tmp_path / str(rank), seed=rank, r=rank, lora_alpha=2) for rank in (1, 48, 256)]
    compare("llama", tiny_model("llama"), adapters, enable_lora_factors=False, max_lora_rank=256, max_loras=3)


def test_requests_wait_for_a_place_and_preemption_changes_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Four adapters and the model itself share two places, while requests are preempted by chance."""
    adapters = [PeftAdapter("llama", tmp_path / str(i), seed=i, r=1 + 3 * i) for i in range(4)]
    with rig(tiny_model("llama"), enable_lora=True, max_loras=2, max_num_batched_tokens=16) as own:
        used = [None, *(UsedAdapter(i, own.worker.add_adapter(i, a.folder).key) for i, a in enumerate(adapters, 1))]
        requests = {}
        for number in range(15):
            request = ask(f"{number}", words(number // 5), max_tokens=6)
            adapter = used[number % 5]
            requests[request.id] = request if adapter is None else adapter.of(request)
        own.add(*requests.values())
        disturbed(own, Random(1), gives_way=0.3, leaves=0)
        assert not own.errors
        assert own.engine.scheduler.running.adapters.loads > 4
        for number, request in enumerate(requests.values()):
            oracle = PlainModel("llama") if number % 5 == 0 else adapters[number % 5 - 1]
            tokens = list(request.prompt_token_ids)
            for token in own.outcomes[request.id].tokens:
                assert token == int(oracle.logprobs(tokens)[-1].argmax())
                tokens.append(token)


def test_nothing_is_found_of_what_another_adapter_cached(tiny_model: TinyModel, tmp_path: Path) -> None:
    adapters = [PeftAdapter("llama", tmp_path / str(i), seed=i) for i in range(2)]
    with rig(tiny_model("llama"), enable_lora=True, max_loras=1) as own:
        used = [UsedAdapter(i, own.worker.add_adapter(i, each.folder).key) for i, each in enumerate(adapters, 1)]
        used.append(UsedAdapter(3, own.worker.add_adapter(3, adapters[0].folder).key))  # the same once more

        def hits(name: str, adapter: UsedAdapter | None) -> int:
            before, request = own.engine.scheduler.cache.hit_tokens, ask(name, words(3), max_tokens=2)
            own.run(request if adapter is None else adapter.of(request))
            return own.engine.scheduler.cache.hit_tokens - before

        assert [hits(f"first {i}", each) for i, each in enumerate((None, *used))] == [0, 0, 0, 19]
        assert [hits(f"again {i}", each) for i, each in enumerate((None, *used))] == [19, 19, 19, 19]


def test_rows_without_an_adapter_keep_their_bits(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Beside rows with adapters, and beside an engine without adapters."""
    adapter = LoRARequest("a", 1, PeftAdapter("llama", tmp_path / "a").folder)
    prompts: list[Any] = [{"prompt_token_ids": words(i)} for i in range(4)]

    def found(lora: list[LoRARequest | None] | None, **options: Any) -> list[Any]:
        with open_llm(tiny_model("llama"), enable_prefix_caching=False, **options) as llm:
            outputs = llm.generate(prompts, PARAMS, lora_request=lora, use_tqdm=False)
            return [
                (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs
            ]

    plain = found(None, enable_lora=False, max_loras=1)
    assert found(None) == plain
    mixed = found([None, adapter, None, adapter])
    assert [mixed[0], mixed[2]] == [plain[0], plain[2]]
    assert mixed[1] != plain[1]


def test_samples_beams_and_drafts_follow_the_adapter(tiny_model: TinyModel, tmp_path: Path) -> None:
    adapted = PeftAdapter("llama", tmp_path / "a")
    adapter = LoRARequest("a", 1, adapted.folder)
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with open_llm(tiny_model("llama"), speculative_config=drafts) as llm:
        prompt: Any = {"prompt_token_ids": [*words(1), *words(1)]}
        params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, logprobs=0)
        [output] = llm.generate(prompt, params, lora_request=adapter, use_tqdm=False)
        [greedy] = llm.generate(prompt, PARAMS, lora_request=adapter, use_tqdm=False)
        check(greedy, adapted)
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids]
            exact = adapted.logprobs(tokens)
            for place, reported in enumerate(completion.logprobs or (), len(output.prompt_token_ids)):
                found = reported[tokens[place]].logprob
                assert found == pytest.approx(float(exact[place - 1, tokens[place]]), abs=TOLERANCE)
        [best] = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=4), lora_request=adapter)
        tokens = [*best.prompt_token_ids, *best.outputs[0].token_ids]
        exact = adapted.logprobs(tokens)
        total = sum(float(exact[place - 1, tokens[place]]) for place in range(len(best.prompt_token_ids), len(tokens)))
        assert best.outputs[0].cumulative_logprob == pytest.approx(total, abs=4 * TOLERANCE)


@pytest.mark.parametrize("method", ["layer_skip", "draft_model"])
def test_drafts_of_networks_are_verified_with_the_adapter(method: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """They are made without it, also where they are made by the model's own layers."""
    adapted = PeftAdapter("llama", tmp_path / "a")
    named = [LoRARequest("a", 1, adapted.folder), None]
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    drafts |= {"skip_layers": [1]} if method == "layer_skip" else {"model": str(tiny_model("llama"))}
    with open_llm(tiny_model("llama"), speculative_config=drafts) as llm:
        prompts: list[Any] = [{"prompt_token_ids": words(i)} for i in range(4)]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
        outputs = llm.generate(prompts, params, lora_request=named * 2, use_tqdm=False)
        for output, which in zip(outputs, (adapted, PlainModel("llama")) * 2, strict=True):
            check(output, which)


def test_the_bytes_of_adapters_in_the_host_memory_are_bounded(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Two of three are there: what was used least lately is read again, and every request has its own adapter."""
    adapters = [PeftAdapter("llama", tmp_path / str(i), seed=i) for i in range(3)]
    with rig(tiny_model("llama"), enable_lora=True) as own:
        each = own.worker.add_adapter(1, adapters[0].folder).num_bytes
    with rig(tiny_model("llama"), enable_lora=True, max_cpu_lora_bytes=3 * each - 1) as own:
        facts = [own.worker.add_adapter(i, each.folder) for i, each in enumerate(adapters, 1)]
        assert [each] * 3 == [own_facts.num_bytes for own_facts in facts]
        reads = []
        for turn, which in enumerate((2, 1, 2, 0, 1)):
            own.run(UsedAdapter(which + 1, facts[which].key).of(ask(f"{turn}", words(turn), max_tokens=3)))
            expect(own.outcomes[f"{turn}"].tokens, words(turn), adapters[which])
            reads.append(own.worker.runner.adapters.store.reads)
        assert reads == [3, 3, 3, 4, 5]


def test_large_adapters_leave_the_host_memory_before_small_ones(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Bytes of a large one bring back fewer reads. A small one that nobody uses leaves too, in the end."""
    ranks = {1: 1, 2: 16, 3: 1, 4: 16}
    adapters = {number: PeftAdapter("llama", tmp_path / str(number), r=rank) for number, rank in ranks.items()}
    with rig(tiny_model("llama"), enable_lora=True) as own:
        size = {n: own.worker.add_adapter(n, each.folder).num_bytes for n, each in adapters.items()}
    with rig(tiny_model("llama"), enable_lora=True, max_cpu_lora_bytes=size[2] + 2 * size[1]) as own:
        store = own.worker.runner.adapters.store
        for number, each in adapters.items():
            own.worker.add_adapter(number, each.folder)
        assert set(store._held) == {1, 3, 4}  # the first large one left, though a small one is older
        for _ in range(64):
            store.take(2)
            store.take(4)
        assert not {1, 3} & set(store._held)


def test_hundreds_of_adapters_page_through_few_places(tiny_model: TinyModel, tmp_path: Path) -> None:
    adapters = [PeftAdapter("llama", tmp_path / str(seed), seed=seed, target_modules=["q_proj"]) for seed in range(3)]
    with rig(tiny_model("llama"), enable_lora=True, max_loras=2, max_cpu_loras=4) as own:
        used = [UsedAdapter(n, own.worker.add_adapter(n, adapters[n % 3].folder).key) for n in range(1, 301)]
        store = own.worker.runner.adapters.store
        assert (len(store._folders), len(store._held)) == (300, 4)
        draw = Random(1)
        for turn, each in enumerate(draw.sample(used, 24)):
            own.add(each.of(ask(f"{turn} {each.number}", words(turn % 4), max_tokens=2)))
        own.run()
        assert not own.errors
        for name, outcome in own.outcomes.items():
            turn, number = map(int, name.split())
            expect(outcome.tokens, words(turn % 4), adapters[number % 3])
        assert store.reads > 310
        assert len(store._held) == 4


def expect(found: list[int], tokens: list[int], oracle: PeftAdapter | PlainModel) -> None:
    """Compare greedy tokens behind others."""
    for token in found:
        assert token == int(oracle.logprobs(tokens)[-1].argmax())
        tokens = [*tokens, token]


def test_a_folder_that_is_gone_ends_its_own_requests_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The host's memory holds two of three adapters, so that the first is read again, and then cannot be."""
    adapters = [PeftAdapter("llama", tmp_path / str(i), seed=i) for i in range(3)]
    with rig(tiny_model("llama"), enable_lora=True, max_loras=1, max_cpu_loras=2) as own:
        used = [UsedAdapter(i, own.worker.add_adapter(i, each.folder).key) for i, each in enumerate(adapters, 1)]
        for number, each in enumerate(used):
            own.run(each.of(ask(f"{number}", words(number), max_tokens=3)))
        assert not own.errors
        adapters[0].write_config(r=5)
        own.add(ask("plain", words(9), max_tokens=12), used[0].of(ask("lost", words(9), max_tokens=3)))
        own.run(used[2].of(ask("kept", words(9), max_tokens=3)))
        assert own.outcomes["lost"].finish_reason == "error"
        assert "adapter_model.safetensors" in (own.outcomes["lost"].error or "")
        for name, oracle, count in (("plain", PlainModel("llama"), 12), ("kept", adapters[2], 3)):
            tokens = words(9)
            for _ in range(count):
                tokens.append(int(oracle.logprobs(tokens)[-1].argmax()))
            assert own.outcomes[name].tokens == tokens[20:]


def test_the_adapter_that_ships_is_found_by_its_name() -> None:
    """`embedded-coder` is no folder here. Rewards taught it to end a function early."""
    doc = '"""Return the first item, or 0."""'
    text = f"def first(items: list[int]) -> int:\n    {doc}\n    if not items:\n        return 0"
    with LLM("embedded", device="cpu", dtype="float32", enable_lora=True, max_lora_rank=32, max_model_len=256) as llm:
        coder = LoRARequest("coder", 1, "embedded-coder")
        asked = SamplingParams(temperature=0, max_tokens=16)
        alone, rewarded = (llm.generate(text, asked, lora_request=each)[0].outputs[0].text for each in (None, coder))
        assert alone.startswith("\n    if ")
        assert rewarded.startswith("\n    return ")
        with pytest.raises(InvalidRequest, match="embedded-nobody is not a folder"):
            llm.generate(text, asked, lora_request=LoRARequest("nobody", 2, "embedded-nobody"))
