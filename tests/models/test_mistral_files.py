"""Mistral's own form of a folder: params.json, consolidated.safetensors and tekken.json, as Mistral Large 3 has them.
The oracle of the scores is transformers' Mistral 4, which is the same network, and tiktoken that of the ids."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.cli.models import describe
from ridgeline.cli.sizes import read_config
from ridgeline.core.errors import ModelLoadError
from ridgeline.models import model_config
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import resolve_model
from ridgeline.weights.formats.mistral_files import config_of_params
from ridgeline.weights.loader import read_model_config
from tests.models import near_configs
from tests.models.test_near_families import TOLERANCE, check_written, made, prompt
from tests.text.test_tiktoken_tokenizer import SENTENCES, trained
from tests.weights.loading import dense_logits, load

ORIGINAL = 16
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "attention_factor": 1.0, "llama_4_scaling_beta": 0.3}
PARAMS: dict[str, Any] = {
    **{"dim": 80, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 112, "head_dim": 40, "norm_eps": 1e-6},
    **{"vocab_size": 307, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16},
    **{"v_head_dim": 20, "tied_embeddings": False, "rope_theta": 1e4, "max_position_embeddings": 256},
    "yarn": {"factor": 16, "apply_scale": False, "beta": 32, "alpha": 1, "original_max_position_embeddings": ORIGINAL},
    "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": ORIGINAL},
    "moe": {
        **{"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1, "expert_hidden_dim": 40},
        **{"first_k_dense_replace": 1, "route_every_n": 1, "routed_scale": 1.5, "expert_parallel": 1},
        **{"num_expert_groups": 1, "num_expert_groups_per_tok": 1},
    },
    "vision_encoder": {"hidden_size": 16},
}
NAMES = [  # as in the checkpoint, and as in transformers' class
    ("wq_a", "self_attn.q_a_proj", "attention."),
    ("q_a_norm", "self_attn.q_a_layernorm", "attention."),
    ("wq_b", "self_attn.q_b_proj", "attention."),
    ("wkv_a_with_mqa", "self_attn.kv_a_proj_with_mqa", "attention."),
    ("kv_a_norm", "self_attn.kv_a_layernorm", "attention."),
    ("wkv_b", "self_attn.kv_b_proj", "attention."),
    ("wo", "self_attn.o_proj", "attention."),
    ("attention_norm", "input_layernorm", ""),
    ("ffn_norm", "post_attention_layernorm", ""),
]
PARTS = [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")]


@cache
def oracle() -> Any:
    rope = {**ROPE, "original_max_position_embeddings": ORIGINAL}
    return made(
        "mistral4",
        **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "rope_parameters": rope},
    )


def tensors() -> dict[str, Tensor]:
    """The oracle's weights under Mistral's names."""
    held = oracle().state_dict()
    found = {
        "tok_embeddings.weight": held["model.embed_tokens.weight"],
        "norm.weight": held["model.norm.weight"],
        "output.weight": held["lm_head.weight"],
        "vision_encoder.patch_conv.weight": torch.ones(2),
        "patch_merger.merging_layer.weight": torch.ones(2),
    }
    for layer in range(3):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        found |= {f"{ours}{room}{name}.weight": held[f"{theirs}{other}.weight"] for name, other, room in NAMES}
        if layer == 0:
            found |= {f"{ours}feed_forward.{a}.weight": held[f"{theirs}mlp.{b}.weight"] for a, b in PARTS}
            continue
        found[f"{ours}gate.weight"] = held[f"{theirs}mlp.gate.weight"]
        found |= {f"{ours}shared_experts.{a}.weight": held[f"{theirs}mlp.shared_experts.{b}.weight"] for a, b in PARTS}
        both, down = held[f"{theirs}mlp.experts.gate_up_proj"], held[f"{theirs}mlp.experts.down_proj"]
        for expert in range(8):
            gate, up = both[expert].chunk(2)
            each = {"w1": gate, "w2": down[expert], "w3": up}
            found |= {f"{ours}experts.{expert}.{name}.weight": tensor for name, tensor in each.items()}
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def write(folder: Path, held: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    (folder / "params.json").write_text(json.dumps({**PARAMS, **changes}))
    save_file(tensors() if held is None else held, folder / "consolidated.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("large"))


@torch.inference_mode()
def test_a_folder_in_mistrals_own_form_scores_as_transformers(folder: Path) -> None:
    ids = torch.tensor([prompt(48, 1), prompt(48, 2)])
    torch.testing.assert_close(dense_logits(load(folder), ids), oracle()(ids).logits, atol=TOLERANCE, rtol=0)
    model = read_model_config(folder)
    assert (model.dtype, model.bos_token_id, model.eos_token_ids) == ("bfloat16", 1, (2,))
    assert describe(str(folder))["context"] == 256


@torch.inference_mode()
def test_its_requests_are_cut_mixed_and_preempted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = prompt(21, 3)
    prompts = [prompt(1, 4), prompt(40, 5), [*shared, 7], [*shared, 8, 9], prompt(30, 6)]
    settings = {"max_num_batched_tokens": 24, "block_size": 4, "max_num_seqs": 4, "kv_cache_memory": 1 << 16}
    monkeypatch.setattr("tests.models.test_near_families.oracle", lambda _: oracle())
    check_written("mistral4", folder, prompts, **settings, device="cpu")


@pytest.mark.parametrize("activations", ["TENSOR", "NO_SCALES"])
@torch.inference_mode()
def test_weights_of_eight_bits_are_read_with_their_scales(activations: str, tmp_path: Path) -> None:
    """As the published folders have them: a scale of each matrix, and one of its inputs if these are rounded by it."""
    held, plain = {}, {}
    for name, tensor in tensors().items():
        held[name] = plain[name] = tensor
        if tensor.ndim == 2 and name.split(".")[-2] in ("wq_a", "wq_b", "wo", "w1", "w2", "w3"):
            scale = tensor.abs().max() / 448
            held[name] = (tensor / scale).to(torch.float8_e4m3fn)
            plain[name] = held[name].float() * scale
            held[name.replace(".weight", ".qscale_weight")] = scale
            if activations == "TENSOR":
                held[name.replace(".weight", ".qscale_act")] = torch.tensor(0.5)
    (tmp_path / "plain").mkdir(), (tmp_path / "held").mkdir()
    said = {"qformat_weight": "fp8_e4m3", "qscheme_act": activations}
    of_numbers = write(tmp_path / "plain", plain)
    of_codes = write(tmp_path / "held", held, quantization=said)
    ids = torch.tensor([prompt(40, 1)])
    torch.testing.assert_close(dense_logits(load(of_codes), ids), dense_logits(load(of_numbers), ids))


def test_weights_in_this_form_are_fetched_where_a_hub_has_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def download(repo: str, **options: Any) -> str:
        asked.append(options)
        (tmp_path / "params.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("someone/some-model", "abc") == tmp_path
    assert [("consolidated*" in options.get("ignore_patterns", ()), options["revision"]) for options in asked] == [
        (True, "abc"),
        (False, "abc"),
    ]
    asked.clear()
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("someone/some-model", "abc") == tmp_path
    assert len(asked) == 1


def test_a_plan_needs_no_more_than_its_params(folder: Path) -> None:
    assert read_config(str(folder)).spec == read_model_config(folder).spec


def test_the_text_of_mistral_4_is_read_out_of_its_wrapper() -> None:
    text = {**near_configs.MISTRAL_4, "model_type": "mistral4"}
    wrapped = model_config({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    alone = model_config(text)
    assert wrapped.spec.layers == alone.spec.layers
    names = {source.name for sources in alone.weights.values() for source in sources}
    assert {s.name for each in wrapped.weights.values() for s in each} == {f"language_model.{name}" for name in names}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe": None}, "Mistral Large 3"),
        ({"yarn": 7}, "yarn"),
        ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8}}, "must be equal"),
        ({"quantization": {"qformat_weight": "int4"}}, "int4"),
        ({"q_lora_rank": "x"}, "q_lora_rank"),
    ],
)
def test_params_that_are_not_read_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        model_config(config_of_params({**PARAMS, **changes}))


WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
CONFIG: dict[str, Any] = {"pattern": WORDS, "default_vocab_size": 310, "default_num_special_tokens": 10}


def write_tekken(folder: Path, tokens: list[bytes], **changes: Any) -> Path:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*tokens, b"left out"])
    ]
    listed = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    config = {**CONFIG, "default_vocab_size": len(tokens) + 10}
    content = {"config": config, "vocab": vocab, "special_tokens": listed, **changes}
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def test_ids_of_tekken_equal_tiktoken_behind_the_special_ones(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    tokens = trained(400)
    ours = Tokenizer.from_folder(write_tekken(tmp_path, tokens))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    oracle = tiktoken.Encoding("tekken", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})
    for text in SENTENCES:
        ids = [rank + 10 for rank in oracle.encode_ordinary(text)]
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == text
    assert ours.encode("[INST] a</s>", add_special_tokens=False)[0] == 3
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, {2}, len(tokens) + 10)


@pytest.mark.parametrize(
    "changes",
    [
        *({"special_tokens": None}, {"special_tokens": [{"rank": 10, "token_str": "x"}]}, {"vocab": [7]}),
        *({"config": {}}, {"config": {**CONFIG, "pattern": "("}}, {"config": {**CONFIG, "pattern": "\ud800"}}),
        {"config": {**CONFIG, "pattern": None}},
        {"config": {**CONFIG, "default_vocab_size": 5}},
    ],
)
def test_a_damaged_tekken_file_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tekken\.json"):
        Tokenizer.from_folder(write_tekken(tmp_path, trained(300), **changes))
