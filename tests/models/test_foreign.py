"""The way in through transformers' modules: what they serve equals what their classes write by themselves, and what
cannot be run so is refused by name. The oracle is the class, without our attention, cache or scheduler."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.assembly.foreign import check_agrees
from ridgeline.core.errors import InvalidConfig, InvalidRequest, ModelLoadError
from ridgeline.foreign.classes import offline
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.foreign.masks import Mask, mask_of
from ridgeline.foreign.spec import foreign_config, traced_class
from ridgeline.layers.dense import DenseCausal
from ridgeline.weights.loader import read_model_config
from tests.command import run_here
from tests.devices import DEVICES, placed
from tests.foreign_models import CWM, HELIUM, LLAMA, VOCAB, Kind, decoder_of, kind, oracle, saved

Folders = Callable[[Kind], Path]

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("foreign")

    def folder(of: Kind) -> Path:
        path = root / of.model
        return path if path.exists() else saved(oracle(of.model), path)

    return folder


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def written(model: Any, ids: list[int]) -> list[int]:
    with torch.inference_mode():
        found = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    return found[0, len(ids) :].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", [HELIUM, CWM], ids=lambda of: of.model)
def test_a_class_that_we_have_not_writes_in_any_company_what_it_writes_alone(
    of: Kind, device: str, folders: Folders
) -> None:
    prompts = [prompt(length, length) for length in (5, 40, 17, 23)]
    prompts.append(prompts[1] + prompt(3, 1))  # after a prefix hit
    expected = [written(oracle(of.model), ids) for ids in prompts]
    with LLM(folders(of), **SMALL, **placed(device)) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in outputs] == expected


@pytest.mark.parametrize("device", DEVICES)
def test_our_own_layers_and_transformers_write_the_same(device: str, folders: Folders) -> None:
    prompts = [{"prompt_token_ids": prompt(length, length)} for length in (9, 30)]
    found = []
    for impl in ("vllm", "transformers"):
        with LLM(folders(LLAMA), model_impl=impl, **SMALL, **placed(device)) as llm:
            found.append([list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_that_are_looked_up_and_8_bit_caches_go_with_it(device: str, folders: Folders) -> None:
    prompts = [{"prompt_token_ids": (prompt(6, seed) * 5)[: 20 + seed]} for seed in range(3)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(folders(CWM), **SMALL, **placed(device)) as llm:
        plain = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(folders(CWM), speculative_config=drafts, **SMALL, **placed(device)) as llm:
        drafted = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert drafted == plain
    with LLM(folders(CWM), kv_cache_dtype="fp8", **SMALL, **placed(device)) as llm:
        rounded = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert [len(each) for each in rounded] == [12] * 3


def test_prompts_of_vectors_and_scores_of_prompts_are_those_of_the_class(folders: Folders) -> None:
    decoder, ids = decoder_of(folders(HELIUM)), torch.tensor(prompt(20, 3))
    from ridgeline.layers.given import GivenRows

    with torch.inference_mode():
        rows = GivenRows(torch.arange(4, 9), decoder.table_rows(ids[4:9]))
        blank = ids.clone()
        blank[4:9] = 0
        found = decoder.logits(decoder(blank, torch.arange(20), DenseCausal(1), given=rows))
        assert torch.allclose(found, oracle(HELIUM.model)(ids[None]).logits[0], atol=1e-4)


def test_the_command_line_says_which_way_a_model_goes(folders: Folders, tmp_path: Path) -> None:
    described = json.loads(run_here("models", folders(HELIUM), "--json").stdout)
    assert described["layers of"].startswith("transformers")
    assert described["parameters"] == oracle(HELIUM.model).num_parameters()
    assert described["heads"] == "4 query, 2 key/value, 20 wide"
    assert "mixers" not in described
    assert json.loads(run_here("models", folders(LLAMA), "--json").stdout)["layers of"] == "Ridgeline"
    refused = run_here("models", folders(HELIUM), "--model-impl", "ridgeline")
    assert refused.returncode == 2
    assert "HeliumForCausalLM" in refused.stderr
    config = json.loads((folders(HELIUM) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    unknown = run_here("models", tmp_path)
    assert unknown.returncode == 2
    assert "does not list" in unknown.stderr


REFUSED: list[tuple[Kind, str]] = [
    (kind("BertLMHeadModel", "BertConfig", pad_token_id=0), "neither causal nor a window"),
    (kind("Llama4ForCausalLM", "Llama4TextConfig", head_dim=20), "'chunked_attention'"),
    (kind("DogeForCausalLM", num_experts=64), "a mask that it makes itself"),
    (kind("DiffLlamaForCausalLM"), "more than once for a token, so it attends over its own output"),
    (kind("XGLMForCausalLM", d_model=80, ffn_dim=112), "it has an attention of its own"),
    (kind("BartForCausalLM", d_model=80), "cross-attention"),
    (kind("OlmoHybridForCausalLM", layer_types=["linear_attention"] * 3 + ["full_attention"]), "recurrent"),
    (kind("DeepseekV32ForCausalLM"), "indices, an argument of its attention that we do not know"),
    (
        kind("HeliumForCausalLM", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "depend on the longest request of a step",
    ),
]


@pytest.mark.parametrize(("of", "words"), REFUSED, ids=lambda value: getattr(value, "model", ""))
def test_what_cannot_be_run_so_is_refused_by_name(of: Kind, words: str) -> None:
    config = getattr(transformers, of.config)(**of.values).to_dict()
    with pytest.raises(ModelLoadError, match=words):
        foreign_config({**config, "architectures": [of.model]}, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["AutoModelForCausalLM"]}, "does not list"),
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' of the model_type 'helium'"),
        ({"architectures": "HeliumForCausalLM"}, "it must name one"),
        ({"model_type": ["helium"]}, "does not list"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers to 1000000000; it must be at most 1000"),
        ({"num_hidden_layers": "many"}, "cannot read config.json"),
        ({"hidden_size": 2**30}, "it must be at most"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config"),
        ({"fusion_config": {"fuse_qkv": True}}, "has a fusion_config"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "depend on the longest request"),
    ],
)
def test_configs_that_ask_for_something_else_are_refused(changes: dict[str, Any], words: str, folders: Folders) -> None:
    config = json.loads((folders(HELIUM) / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=words):
        foreign_config({**config, **changes}, None)


def test_code_in_a_folder_never_runs_and_nothing_is_fetched(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(folders(HELIUM), folder)
    (folder / "modeling_trap.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/trap"}')
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_trap.Trap")
    config |= {"attn_implementation": "someone/kernel", "_attn_implementation": "someone/kernel", "use_kernels": True}
    (folder / "config.json").write_text(json.dumps(config))

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    decoder, ids = decoder_of(folder), torch.tensor(prompt(9, 1))
    assert not ran.exists()
    assert torch.allclose(decoder.plain_logits(ids), oracle(HELIUM.model)(ids[None]).logits[0], atol=1e-5)
    for name in ("model.safetensors",):
        (folder / name).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickled"):
        decoder_of(folder)


def test_meanwhile_the_hub_refuses_every_request() -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    with offline(), pytest.raises((OfflineModeIsEnabled, LocalEntryNotFoundError)):
        hf_hub_download("someone/model", "config.json")


@pytest.mark.parametrize(
    ("damage", "words"),
    [("lack", "lacks"), ("extra", "has no place for"), ("shape", "cannot load|misshaped"), ("few", "holds .* numbers")],
)
def test_tensors_that_the_class_does_not_want_are_refused(
    damage: str, words: str, folders: Folders, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders(HELIUM), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "extra":
        tensors["model.layers.1.mlp.more.weight"] = torch.zeros(3)
    elif damage == "shape":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors = {
            each: value for each, value in tensors.items() if each != name and (damage == "lack" or "mlp" not in each)
        }
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=words), LLM(tmp_path / "model", **SMALL):
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"quantization": "w8a8"}, "quantization"),
        (
            {"speculative_config": {"method": "layer_skip", "num_speculative_tokens": 2, "skip_layers": [1]}},
            "layer_skip",
        ),
        ({"runner": "pooling"}, "pool"),
        ({"model_impl": "ridgeline"}, "HeliumForCausalLM"),
    ],
)
def test_settings_that_it_has_not_are_refused_in_one_sentence(
    options: dict[str, Any], words: str, folders: Folders
) -> None:
    with (
        pytest.raises((InvalidConfig, ModelLoadError), match=words) as refused,
        LLM(folders(HELIUM), **{**SMALL, **options}),
    ):
        pass
    assert "\n" not in str(refused.value)


@pytest.fixture
def decoder(folders: Folders) -> ForeignDecoder:
    found = decoder_of(folders(CWM))
    check_agrees(found)
    return found


def test_the_check_at_start_finds_whatever_else_looks_at_several_tokens(decoder: ForeignDecoder) -> None:
    mlp = decoder.model.model.layers[2].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) + x.cumsum(1)  # as a recurrent layer does
    with pytest.raises(ModelLoadError, match="CwmForCausalLM scores eight tokens in chunks otherwise than by itself"):
        check_agrees(decoder)


def test_the_check_at_start_finds_what_counts_tokens_instead_of_positions(decoder: ForeignDecoder) -> None:
    mlp = decoder.model.model.layers[2].mlp
    inner = mlp.forward
    counted = torch.arange(300.0)  # which differs from the positions behind the eighth alone
    mlp.forward = lambda x: inner(x) + (counted[: x.shape[1], None] > 7)  # as a growth with positions may
    with pytest.raises(ModelLoadError, match="beside another request otherwise than by itself"):
        check_agrees(decoder)
    body = decoder.model.model
    rotary = body.rotary_emb.forward

    def clamped(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return rotary(x, position_ids.clamp(max=100) if x.shape[1] > 8 else position_ids)  # in larger steps alone

    mlp.forward, body.rotary_emb.forward = inner, clamped
    with pytest.raises(ModelLoadError, match="at the context's end otherwise than by itself"):
        check_agrees(decoder)


def test_the_check_at_start_finds_what_a_module_keeps(decoder: ForeignDecoder) -> None:
    mlp = decoder.model.model.layers[2].mlp
    inner = mlp.forward

    def counting(x: torch.Tensor) -> torch.Tensor:
        mlp.seen = getattr(mlp, "seen", 0) + x.shape[1]
        return inner(x)

    mlp.forward = counting
    with pytest.raises(ModelLoadError, match=r"keeps model\.layers\.2\.mlp\.seen from one step to the next"):
        check_agrees(decoder)


def test_the_check_at_start_finds_what_a_class_changes_for_all_models(decoder: ForeignDecoder) -> None:
    mlp = decoder.model.model.layers[2].mlp
    inner, before = mlp.forward, torch.get_float32_matmul_precision()

    def changing(x: torch.Tensor) -> torch.Tensor:
        torch.set_float32_matmul_precision("medium")
        return inner(x)

    mlp.forward = changing
    try:
        with pytest.raises(ModelLoadError, match="changes torch's float32 precision"):
            check_agrees(decoder)
    finally:
        torch.set_float32_matmul_precision(before)


def test_another_window_than_the_traced_one_is_found(folders: Folders) -> None:
    """The oracle of the oracle: wrong attention is not within the tolerance."""
    decoder, ids = decoder_of(folders(CWM)), torch.tensor(prompt(24, 5))
    with torch.inference_mode():
        expected = decoder.plain_logits(ids)
        found = decoder.logits(decoder(ids, torch.arange(24), DenseCausal(1)))
        assert torch.allclose(found, expected, atol=1e-4)
        for layer in decoder.model.model.layers:
            carried = layer.self_attn._ridgeline_attends
            spec = carried.heads.spec
            object.__setattr__(spec, "window", 4 if spec.window else None)
        assert not torch.allclose(decoder.logits(decoder(ids, torch.arange(24), DenseCausal(1))), expected, atol=0.1)


@given(window=st.integers(1, 5000), context=st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_masks_are_told_apart_by_what_they_show(window: int, context: int) -> None:
    def causal(_: Any, __: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= q

    def windowed(_: Any, __: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (k > q - window)

    def chunked(_: Any, __: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (k // window == q // window)

    def prefixed(_: Any, __: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) | (k < window)

    assert mask_of(causal, context) == Mask(None)
    assert mask_of(windowed, context) == Mask(window if window < context else None)
    if window < context:
        assert mask_of(chunked, context) == (Mask(1) if window == 1 else None)
    if window > 1 and context > 1:
        assert mask_of(prefixed, context) is None
    assert mask_of(lambda *_: torch.ones(1, 1, dtype=torch.bool), context) == (Mask(None) if context == 1 else None)


def test_a_class_is_traced_once(folders: Folders) -> None:
    config = read_model_config(folders(HELIUM), impl="auto")
    assert config.foreign is not None
    assert traced_class(config.foreign) is traced_class(config.foreign)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["products", "magnitudes"])
def test_adapters_are_those_of_peft(options: dict[str, Any], folders: Folders, tmp_path: Path) -> None:
    """In one batch with requests without, in chunks and after a prefix hit. What runs once for all tokens is adapted;
    the output layer is not."""
    pytest.importorskip("peft")
    from tests.peft_adapters import PeftAdapter

    plain = oracle(HELIUM.model)
    adapters = [
        PeftAdapter.of(deepcopy(plain), tmp_path / "all", **options),
        PeftAdapter.of(deepcopy(plain), tmp_path / "some", 1, r=9, target_modules=["q_proj", "down_proj"]),
    ]
    head = PeftAdapter.of(deepcopy(plain), tmp_path / "head", target_modules=["lm_head"])
    named = [None, *(LoRARequest(f"a{i}", i, each.folder) for i, each in enumerate(adapters, 1))]
    settings = {"enable_lora": True, "max_loras": 2, "enable_lora_factors": bool(options), "device": "cpu"}
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    prompts: list[Any] = [{"prompt_token_ids": prompt(length, length)} for length in (40, 23, 17)]
    with LLM(folders(HELIUM), **SMALL, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, lora_request=named, use_tqdm=False)
            for output, model in zip(outputs, [plain, *(each.model for each in adapters)], strict=True):
                tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                with torch.inference_mode():
                    exact = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
                reported = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
                for place, (token, found) in enumerate(zip(tokens[1:], reported, strict=True)):
                    assert found is not None
                    assert found[token].logprob == pytest.approx(float(exact[place, token]), abs=2e-4)
        with pytest.raises(InvalidRequest, match="lm_head"):
            llm.generate(prompts[:1], params, lora_request=LoRARequest("head", 3, head.folder))
