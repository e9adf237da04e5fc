"""Model folders and GGUF files with something wrong in them: whole ones, and what a seed makes of each.

A case is one file of a whole model replaced. Values are damaged where they stand in the structure (a number made huge,
negative or no number, an entry gone, nested or of another type), and bytes where they lie.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.weights.loader import export_checkpoint, fill_dummy
from tests.text import sample_tokenizers

VOCAB = 320

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": [2],
    "torch_dtype": "float32",
}
_ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]
_GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "eos_token_id": 2}
_SMALL = {"moe_intermediate_size": 8}
_WINDOWS = {"sliding_window": 8, "head_dim": 8}
_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DELTA_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 8,
    **_SMALL,
}
_MAMBA: dict[str, Any] = {"mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False},
    "MistralForCausalLM": {"sliding_window": 8},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 8, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": {**_WINDOWS, "query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": {**_WINDOWS, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "Phi3ForCausalLM": {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
    "Olmo2ForCausalLM": {},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0], "tie_word_embeddings": False},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5, "hidden_act": "gelu"},
    "GraniteForCausalLM": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.5},
    "GPT2LMHeadModel": _GPT2,
    "GptOssForCausalLM": {"sliding_window": 8, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma4ForCausalLM": {**_WINDOWS, "hidden_size_per_layer_input": 0, "global_head_dim": 16},
    "Gemma4ForConditionalGeneration": {
        "text_config": {
            **_SIZES,
            **_WINDOWS,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 16,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 8,
            "attention_k_eq_v": True,
        }
    },
    "BloomForCausalLM": {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2, "seq_length": 64},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {"num_experts": 4, "shared_expert_intermediate_size": 8, "mlp_only_layers": [0], **_SMALL},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "head_dim": 8, "num_experts_per_tok": 2, **_SMALL},
    "DeepseekForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, **_SMALL},
    "OlmoeForCausalLM": {"num_experts": 8},
    "GraniteMoeForCausalLM": {"num_local_experts": 4},
    "GraniteMoeSharedForCausalLM": {"num_local_experts": 4, "shared_intermediate_size": 8},
    "Glm4MoeForCausalLM": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, **_SMALL},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "conv_L_cache": 3},
    "Lfm2MoeForCausalLM": {
        "layer_types": ["full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **_SMALL,
    },
    "JambaForCausalLM": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_dt_rank": 3,
        "use_mamba_kernels": False,
        **_MAMBA,
    },
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 16,
        "mamba_n_heads": 4,
        "key_multiplier": 0.5,
        "mlp_multipliers": [0.5, 2.0],
        **_MAMBA,
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["hybrid", "hybrid"],
        "adapter_rank": 4,
        "n_mamba_heads": 4,
        "num_key_value_heads": 2,
        "use_shared_attention_adapter": True,
        "use_mamba_kernels": False,
        **_MAMBA,
    },
    "Qwen3NextForCausalLM": {**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [0]},
    "Qwen3_5ForCausalLM": _DELTA,
    "Qwen3_5MoeForConditionalGeneration": {"text_config": {**_SIZES, **_DELTA, **_DELTA_EXPERTS}},
}

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GENERATION = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "eos_token_id": [2, 3], "repetition_penalty": 1.1}


@dataclass(frozen=True)
class Case:
    """base: the whole model. name: the file of it that is replaced ("" where the base is one file), by these bytes.
    without: another file that is taken away, so that the replaced one is read."""

    base: str
    name: str
    content: bytes
    without: str = ""


def architectures() -> list[str]:
    return list(CONFIGS)


@cache
def config_of(architecture: str) -> dict[str, Any]:
    own = CONFIGS[architecture]
    common = {} if "n_layer" in own else _SIZES
    return {"architectures": [architecture], **common, **own}


@cache
def tensors_of(architecture: str) -> dict[str, torch.Tensor]:
    model = model_config(config_of(architecture))
    cpu = Ops(Platform(device_type="cpu"))
    decoder = Decoder(model.spec, cpu, dtype=torch.float32, device=torch.device("cpu"))
    fill_dummy(decoder, 0)
    return export_checkpoint(decoder, model.weights)


@cache
def tokenizer_of(family: str) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(sample_tokenizers.FAMILIES[family]().to_str())
    return spec


def write_base(name: str, folder: Path) -> Path:
    """The whole model of that name, in a new folder; returns what to load."""
    folder.mkdir(parents=True)
    if name == "gguf":
        path = folder / "model.gguf"
        path.write_bytes(Gguf.whole().encoded())
        return path
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    save_file(tensors_of(name), folder / "model.safetensors", metadata={"format": "pt"})
    family = list(sample_tokenizers.FAMILIES)[architectures().index(name) % len(sample_tokenizers.FAMILIES)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_of(family)))
    names = {**sample_tokenizers.NAMES, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


# ---- damage ---------------------------------------------------------------------------------------------------------

_NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    10**4,
    10**6,
    2**24,
    2**24 + 1,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63,
    2**64,
    10**30,
]
_NUMBERS_TOO: list[Any] = [0.0, -0.0, 0.5, 1e-9, 1e-45, 1e38, 3.4e38, 1e300, -1e300, float("nan"), float("inf"), 1.5]
_OTHERS: list[Any] = [
    None,
    True,
    False,
    "",
    "x",
    "1",
    "\x00",
    "\ud800",
    "é" * 40,
    "a" * 3000,
    [],
    {},
    [[]],
    [0],
    [None],
    {"a": {}},
]


def _value(rng: random.Random) -> Any:
    return rng.choice(rng.choice([_NUMBERS, _NUMBERS_TOO, _OTHERS]))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _shallow(value: Any, rng: random.Random) -> tuple[Any, Any] | None:
    """A place chosen level by level, so that a vocabulary's thousand entries do not drown the rest."""
    place = None
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        place = value, key
        if rng.random() < 0.35:
            break
        value = value[key]
    return place


def damaged_json(whole: Any, rng: random.Random, additions: dict[str, list[Any]] | None = None) -> bytes:
    """One to three places of a JSON value changed; now and then its bytes instead."""
    if rng.random() < 0.08:
        return damaged_bytes(json.dumps(whole).encode(), rng)
    value = json.loads(json.dumps(whole))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if additions and isinstance(value, dict) and rng.random() < 0.5:
            name = rng.choice(list(additions))
            value[name] = rng.choice([*additions[name], _value(rng)]) if rng.random() < 0.7 else _value(rng)
            continue
        place = _shallow(value, rng)
        if place is None:
            break
        container, key = place
        _change(container, key, rng)
    if rng.random() < 0.02:
        value = _value(rng)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _change(container: Any, key: Any, rng: random.Random) -> None:
    old = container[key]
    is_number = isinstance(old, (int, float)) and not isinstance(old, bool)
    way = rng.randrange(6)
    if way == 0:
        del container[key]
    elif way == 1:
        container[key] = {"x": old} if rng.random() < 0.5 else [old] * rng.choice([1, 2, 5])
    elif way == 2 and is_number:
        container[key] = rng.choice([-old, old + 1, old - 1, old * 2, old * 10**6, old * 10**17, old / 2])
    elif way == 3 and isinstance(container, dict):
        container[rng.choice(list(container))] = old
    elif way == 4 and isinstance(old, str):
        container[key] = rng.choice([old[::-1], old * 2, old + "\n", old[:-1], old.upper(), f"\x1b[31m{old}"])
    elif is_number:
        container[key] = rng.choice(_NUMBERS + _NUMBERS_TOO) if rng.random() < 0.8 else _value(rng)
    else:
        container[key] = _value(rng)


def damaged_bytes(whole: bytes, rng: random.Random, within: int | None = None) -> bytes:
    """Bytes flipped, cut, doubled or overwritten. within: the first so many."""
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 8])):
        length = min(within or len(data), len(data))
        if not length:
            break
        at = rng.randrange(length)
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del data[at : at + rng.choice([1, 4, 8, 64, len(data)])]
            case 3:
                data[at:at] = data[at : at + rng.choice([1, 8, 64])]
            case 4:
                data[at : at + 8] = struct.pack("<Q", rng.choice(_NUMBERS) & (2**64 - 1))
    return bytes(data)


def _config(rng: random.Random) -> Case:
    architecture = rng.choice(architectures())
    additions: dict[str, list[Any]] = {
        "rope_scaling": _ROPES,
        "rope_parameters": [{**rope, "rope_theta": 1e4} for rope in _ROPES],
        "head_dim": [8, 10**6, 2**24],
        "partial_rotary_factor": [0.5, 0.25],
        "layer_types": [["full_attention", "sliding_attention"]],
        "architectures": [[name] for name in architectures()],
        "max_position_embeddings": [2**24, 10**6],
        "num_hidden_layers": [2**24, 10**6, 1000],
        "n_layer": [2**24],
        "no_rope_layer_interval": [1, 2**24],
        "quantization_config": [{"bits": 4}],
        "dtype": ["float16", "bfloat16", "int8"],
        "tie_word_embeddings": [True, False],
        **{key: [3, 4096, 4097] for key in ("num_experts", "num_local_experts", "n_routed_experts")},
        "num_experts_per_tok": [3, 5, 4096],
        "moe_intermediate_size": [7, 2**24],
        "mlp_only_layers": [[0, 1], [5, -1], [0.5], ["0"]],
        **{key: [0, 1, 2, 2**24] for key in ("decoder_sparse_step", "moe_layer_freq", "first_k_dense_replace")},
        **{key: [2, 3, 8] for key in ("n_group", "topk_group")},
        **{key: [0, 1000, 4096] for key in ("n_shared_experts", "num_nextn_predict_layers", "num_mtp_modules")},
        "attn_type_list": [[1, 1], [0, 1]],
        **{f"linear_num_{kind}_heads": [3, 2**20] for kind in ("key", "value")},
        **{f"linear_{kind}_head_dim": [3, 2**24] for kind in ("key", "value")},
        "linear_conv_kernel_dim": [1, 1024, 2**20],
        "full_attention_interval": [0, 1, 1000],
        "attn_output_gate": [False, True],
        "conv_L_cache": [1, 1024, 2**20],
        "block_ffn_dim_multiplier": [1e30, 1e-9],
        "full_attn_idxs": [[0], ["0"], 3],
        "layers_block_type": [["mamba", "hybrid"], ["mamba", "mamba"], ["attention", "mamba"]],
        **{key: [0, 3, 2**24] for key in ("mamba_expand", "mamba_d_state", "mamba_n_heads", "n_mamba_heads")},
        **{key: [0, 3, 2**24] for key in ("mamba_d_ssm", "mamba_dt_rank", "adapter_rank", "num_mem_blocks")},
        **{key: [[1.0], [0.5] * 5, [1e38] * 2] for key in ("ssm_multipliers", "mlp_multipliers", "time_step_limit")},
        "clip_qkv": [8.0],
    }
    return Case(architecture, "config.json", damaged_json(config_of(architecture), rng, additions))


def _generation(rng: random.Random) -> Case:
    additions = {name: [0, -1, 2.0, 10**9] for name in ("temperature", "min_p", "top_k", "max_length", "do_sample")}
    return Case("LlamaForCausalLM", "generation_config.json", damaged_json(GENERATION, rng, additions))


_COMPONENTS: dict[str, list[Any]] = {
    "normalizer": [
        {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"},
        {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
        {"type": "Precompiled", "precompiled_charsmap": "AAAAgAAAAA=="},
        {"type": "Precompiled", "precompiled_charsmap": ""},
        {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaaaa"}] * 12,
        },
        {"type": "BertNormalizer"},
        {"type": "Prepend", "prepend": ""},
        {"type": "NFC"},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Removed", "invert": True},
        {"type": "FixedLength", "length": 0},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "CharDelimiterSplit", "delimiter": "e"},
        {"type": "Digits", "individual_digits": True},
        {"type": "Sequence", "pretokenizers": []},
        {"type": "UnicodeScripts"},
    ],
    "post_processor": [
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 4_000_000_000]},
        {"type": "RobertaProcessing", "sep": ["x", 2], "cls": ["y", 1], "trim_offsets": True, "add_prefix_space": True},
        {"type": "Sequence", "processors": []},
    ],
    "decoder": [
        {"type": "Strip", "content": " ", "start": 2**31, "stop": 2**31},
        {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC", "pad_token": "<unk>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Sequence", "decoders": []},
        {"type": "BPEDecoder", "suffix": ""},
        None,
    ],
    "model": [
        {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": True},
        {"type": "Unigram", "unk_id": None, "vocab": [["a", -1e300]]},
        {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]},
        {"type": "Unigram", "unk_id": 0, "vocab": []},
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"},
        {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 0,
        },
        {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
        {"type": "BPE", "vocab": {"a": 4294967295, "b": 2**31}, "merges": []},
        {"type": "BPE", "vocab": {}, "merges": [], "byte_fallback": True, "unk_token": "<unk>"},
        {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.5},
    ],
    "added_tokens": [
        [{"id": 4294967295, "content": "<big>", "special": True}],
        [{"id": 0, "content": "", "special": True}],
        [
            {
                "id": 5,
                "content": " ",
                "single_word": True,
                "lstrip": True,
                "rstrip": True,
                "normalized": True,
                "special": False,
            }
        ],
    ],
    "truncation": [{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}],
    "padding": [
        {
            "strategy": {"Fixed": 2**31},
            "direction": "Left",
            "pad_to_multiple_of": 0,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "",
        }
    ],
}


def _tokenizer(rng: random.Random) -> Case:
    spec = tokenizer_of(rng.choice(list(sample_tokenizers.FAMILIES)))
    return Case("LlamaForCausalLM", "tokenizer.json", damaged_json(spec, rng, _COMPONENTS))


def _tokenizer_config(rng: random.Random) -> Case:
    token = {"content": "<x>", "special": True, "lstrip": False}
    additions: dict[str, list[Any]] = {
        "added_tokens_decoder": [{"5": token}, {"-1": token}, {"x": token}, {"5": {"content": 5}}, {"5": {}}, [token]],
        "extra_special_tokens": [{"image_token": "<img>"}, ["<a>", token], {"a": 1}],
        "additional_special_tokens": [["<a>", ""], [token] * 3],
        "split_special_tokens": [True],
        "bos_token": ["<s>", token, "", {"content": None}],
        "chat_template": [[{"name": "default", "template": TEMPLATE}], {"default": TEMPLATE}],
    }
    whole = {**sample_tokenizers.NAMES, "chat_template": TEMPLATE}
    return Case("LlamaForCausalLM", "tokenizer_config.json", damaged_json(whole, rng, additions))


_JINJA = """
{% for m in messages %} {% endfor %} {{ m.content }} {% if %} {% endif %} {{ 2 ** 99999999 }} {{ 'a' * 9**9 }}
{% for i in range(99999) %}{% for j in range(99999) %}x {{ messages[0]['content'] * 9999 }}
{% macro f(x) %}{{ f(x) }}{% endmacro %} {{ f(1) }} {{ messages|tojson }} {{ ''.__class__ }} {{ bos_token }}
{% set x = messages %} {{ x[-1] }} {{ '%099999999d' % 1 }} {{ 1/0 }} {{ '%*d' % (10**9, 1) }} {{ 'x'|join(messages) }}
{{ raise_exception('no') }} {{ messages|map(attribute='a')|list }} {{ 'x'.center(10**12) }} {% include 'a' %}
{{ [1]*10**10 }} {{ strftime_now('%Y') }} {{ cycler('a').next() }} {{ lipsum(n=10**9) }} {{ namespace(a=1).a }}
{{ ('a'*999999)|replace('a','b'*99999) }} {{ "{:099999999999}".format(1) }} {{ 'a'|indent(10**9) }} {% generation %}
{% endgeneration %} {% break %} {{- -}} {{ }} {{ x
"""


def _template(rng: random.Random) -> Case:
    if rng.random() < 0.4:
        text = damaged_bytes(TEMPLATE.encode(), rng)
    else:
        words = _JINJA.split()
        start = rng.randrange(len(words))
        text = " ".join(words[start : start + rng.randrange(1, 24)]).encode()
    return Case("LlamaForCausalLM", "chat_template.jinja", text)


# ---- weights --------------------------------------------------------------------------------------------------------


def _safetensors(rng: random.Random) -> Case:
    """The header's entries, its length, the bytes."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors_of("LlamaForCausalLM").items():
        raw = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    if rng.random() < 0.3:
        entry = header[rng.choice(list(header))]
        rng.choice(
            [
                lambda: entry.update(
                    dtype=rng.choice(["I64", "BOOL", "F8_E4M3", "F4", "C64", "U8", "F64", "BF16", ""])
                ),
                entry["data_offsets"].reverse,
                lambda: entry.update(data_offsets=[0, entry["data_offsets"][1]]),
                lambda: entry.update(shape=[2**32, 2**32, *entry["shape"]]),
                lambda: entry.update(shape=[*entry["shape"], 1]),
                lambda: entry.update(shape=[0]),
                lambda: header.update({rng.choice(["a\nb", "é", "\x1b[31m", "", "x" * 5000]): entry}),
                lambda: header.update(__metadata__=rng.choice([{"format": "tf"}, {"a": "b" * 9999}, 5, {"a": 5}])),
            ]
        )()
        encoded = json.dumps(header).encode()
    else:
        encoded = damaged_json(header, rng)
    length = len(encoded) if rng.random() < 0.85 else rng.choice(_NUMBERS) & (2**64 - 1)
    content = struct.pack("<Q", length) + encoded + data
    return Case("LlamaForCausalLM", "model.safetensors", damaged_bytes(content, rng) if rng.random() < 0.1 else content)


def _index(rng: random.Random) -> Case:
    shards = dict.fromkeys(tensors_of("LlamaForCausalLM"), "model.safetensors")
    whole = {"metadata": {"total_size": 5}, "weight_map": dict.fromkeys(shards, "shard-1.safetensors")}
    paths = ["/etc/passwd", "../x.safetensors", "config.json", ".safetensors", "missing.safetensors", "a\n.safetensors"]
    additions: dict[str, list[Any]] = {"weight_map": [dict.fromkeys(shards, path) for path in paths]}
    content = damaged_json(whole, rng, additions)
    return Case("LlamaForCausalLM", "model.safetensors.index.json", content, without="model.safetensors")


# ---- GGUF -----------------------------------------------------------------------------------------------------------

_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class Gguf:
    """A file as its parts. values: name → (type, value; of an array its type and values). tensors: [name, dimensions
    in the file's order, type, offset]. counts: of tensors and values, where they are lies."""

    values: dict[str, tuple[int, Any]]
    tensors: list[list[Any]]
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None

    @staticmethod
    def whole() -> Gguf:
        """A llama without merges, of 64 tokens."""
        width, inner, vocab, layers = 16, 32, 64, 1
        numbers = {
            "block_count": layers,
            "embedding_length": width,
            "feed_forward_length": inner,
            "attention.head_count": 2,
            "attention.head_count_kv": 1,
            "context_length": 64,
            "rope.dimension_count": 8,
        }
        tokens = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(vocab - 3))]
        values: dict[str, tuple[int, Any]] = {"general.architecture": (_STRING, "llama")}
        values |= {f"llama.{name}": (_UINT32, value) for name, value in numbers.items()}
        values |= {
            "llama.attention.layer_norm_rms_epsilon": (_FLOAT32, 1e-5),
            "llama.rope.freq_base": (_FLOAT32, 1e4),
            "general.alignment": (_UINT32, 32),
            "tokenizer.ggml.model": (_STRING, "gpt2"),
            "tokenizer.ggml.pre": (_STRING, "gpt-2"),
            "tokenizer.ggml.tokens": (_ARRAY, (_STRING, tokens)),
            "tokenizer.ggml.token_type": (_ARRAY, (5, [2, 3, 3, *[1] * (vocab - 3)])),
            "tokenizer.ggml.scores": (_ARRAY, (_FLOAT32, [-float(i) for i in range(vocab)])),
            "tokenizer.ggml.merges": (_ARRAY, (_STRING, ["a b"][:0])),
            "tokenizer.ggml.bos_token_id": (_UINT32, 1),
            "tokenizer.ggml.eos_token_id": (_UINT32, 2),
            "tokenizer.chat_template": (_STRING, TEMPLATE),
        }
        shapes = {"token_embd": (width, vocab), "output_norm": (width,)}
        parts = {"attn_norm": (width,), "ffn_norm": (width,), "attn_q": (width, 16), "attn_k": (width, 8)}
        parts |= {
            "attn_v": (width, 8),
            "attn_output": (16, width),
            "ffn_gate": (width, inner),
            "ffn_up": (width, inner),
        }
        parts |= {"ffn_down": (inner, width)}
        shapes |= {f"blk.{layer}.{part}": shape for layer in range(layers) for part, shape in parts.items()}
        tensors, at = [], 0
        for name, shape in shapes.items():
            kind, size = (
                (8, 34 * shape[0] // 32 * (shape[1] if len(shape) > 1 else 1)) if name.endswith("down") else (0, 4)
            )
            size = size if kind else 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            tensors.append([f"{name}.weight", shape, kind, at])
            at += -(-size // 32) * 32
        rng = random.Random(0)
        data = b"".join(struct.pack("<f", rng.uniform(-0.1, 0.1)) for _ in range(at // 4))
        return Gguf(values, tensors, data)

    def encoded(self) -> bytes:
        num_tensors, num_values = self.counts or (len(self.tensors), len(self.values))
        out = b"GGUF" + struct.pack("<IQQ", self.version, num_tensors & _64, num_values & _64)
        for name, (kind, value) in self.values.items():
            out += _text(name) + struct.pack("<I", kind & _32) + _encoded(kind, value)
        for name, shape, kind, offset in self.tensors:
            out += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *(side & _64 for side in shape))
            out += struct.pack("<IQ", kind & _32, offset & _64)
        return out + bytes(-len(out) % 32) + self.data


_32, _64 = 2**32 - 1, 2**64 - 1


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _encoded(kind: int, value: Any) -> bytes:
    """Values that do not fit their type become whatever bytes come out."""
    if kind == _STRING:
        return _text(str(value))
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner & _32, len(items)) + b"".join(_encoded(inner, item) for item in items)
    form = _FORMS.get(kind, "I")
    try:
        return struct.pack("<" + form, value)
    except (struct.error, OverflowError):
        whole = 0 if not isinstance(value, int) else value
        return (whole & _64).to_bytes(8, "little")[: struct.calcsize("<" + form)]


def _gguf(rng: random.Random) -> Case:
    file = Gguf.whole()
    for _ in range(rng.choice([1, 1, 1, 2])):
        rng.choice([_damage_value, _damage_value, _damage_value, _damage_tensor, _damage_tensor, _damage_frame])(
            file, rng
        )
    content = file.encoded()
    return Case("gguf", "", damaged_bytes(content, rng, within=2048) if rng.random() < 0.2 else content)


def _damage_value(file: Gguf, rng: random.Random) -> None:
    extra = ["llama.expert_count", "llama.expert_used_count", "llama.expert_feed_forward_length"]
    extra += ["llama.attention.key_length", "llama.rope.scaling.factor", "llama.rope.scaling.type"]
    extra += ["split.count", "llama.attention.sliding_window", "llama.rope.scaling.original_context_length"]
    extra += ["tokenizer.chat_templates", "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.add_bos_token"]
    name = rng.choice([*file.values, *extra])
    kind, old = file.values.get(name, (_UINT32, 1))
    match rng.randrange(6):
        case 0:
            file.values.pop(name, None)
        case 1:
            file.values[name] = (
                _STRING,
                rng.choice(["", "llama", "gpt2", "t5", "qwen2", "gemma3", "phi3", "yarn", "linear", "x\ny"]),
            )
        case 2:
            file.values[name] = (rng.choice([4, 5, 10, 11, 7, 0]), rng.choice(_NUMBERS))
        case 3:
            file.values[name] = (rng.choice([6, 12]), rng.choice(_NUMBERS_TOO))
        case 4:
            inner = rng.choice([_STRING, 4, 5, 6, 7, _ARRAY, 13])
            items: list[Any] = [rng.choice([0, 1, 2, 3, -1, 7, 2**31 - 1]) for _ in range(rng.choice([0, 1, 2, 64]))]
            file.values[name] = (_ARRAY, (inner, [(4, [])] * 2 if inner == _ARRAY else items))
        case 5 if kind == _ARRAY:
            inner, items = old
            items = list(items)
            for _ in range(rng.choice([1, 2])):
                if items:
                    items[rng.randrange(len(items))] = rng.choice(["", "a b", " ", "<s>", "x" * 99, 5, -1, 2**30])
            file.values[name] = (_ARRAY, (inner, items[: rng.choice([len(items), 1, 0])]))
        case _:
            file.values[name] = (kind, rng.choice(_NUMBERS) if kind != _ARRAY else old)


def _damage_tensor(file: Gguf, rng: random.Random) -> None:
    tensor = rng.choice(file.tensors)
    match rng.randrange(6):
        case 0:
            file.tensors.remove(tensor)
        case 1:
            tensor[0] = rng.choice(
                [each[0] for each in file.tensors] + ["", "rope_freqs.weight", "output.weight", "a\nb"]
            )
        case 2:
            shape = list(tensor[1])
            shape[rng.randrange(len(shape))] = rng.choice([*_NUMBERS, 32, 16, 64])
            tensor[1] = tuple(shape)
        case 3:
            tensor[1] = rng.choice([(), (0,), (1,) * 5, (2**32, 2**32), tensor[1][::-1], (*tensor[1], 1)])
        case 4:
            tensor[2] = rng.choice([*range(35), 2**31])
        case 5:
            tensor[3] = rng.choice([*_NUMBERS, 1, 3, len(file.data) - 4])


def _damage_frame(file: Gguf, rng: random.Random) -> None:
    match rng.randrange(3):
        case 0:
            file.version = rng.choice([0, 1, 2, 4, 2**24, 2**31])
        case 1:
            file.counts = (rng.choice([*_NUMBERS, 1]), len(file.values))
        case 2:
            file.counts = (len(file.tensors), rng.choice([*_NUMBERS, 1]))


# ---- sentencepiece --------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    out = bytearray()
    number &= _64
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def _field(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _sentencepiece(rng: random.Random) -> Case:
    """Pieces, the trainer's kind and ids, the normalizer; each of them may be odd."""

    def odd(usual: Any, *others: Any) -> Any:
        return usual if rng.random() < 0.97 else rng.choice(others)

    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab", "é"]
    types = [2, 3, 3, *[6] * 256, *[1] * 7]
    pieces = b""
    for index, (text, kind) in enumerate(zip(texts, types, strict=True)):
        score = odd(-float(index), 0.0, float("nan"), float("inf"), -1e30) if rng.random() < 0.05 else -float(index)
        kind = odd(kind, 0, 1, 2, 3, 4, 5, 7, 2**63) if rng.random() < 0.05 else kind
        name = odd(text.encode(), b"", b"\xff", b"a", b"x" * 3000) if rng.random() < 0.05 else text.encode()
        pieces += _field(1, _field(1, name) + _field(2, score) + _field(3, kind))
    trainer = _field(3, odd(rng.choice([1, 2]), 0, 3, 4, 2**64 - 1)) + _field(40, odd(0, 1, 5, 2**40, -1))
    trainer += _field(41, odd(1, -1, 10**6)) + _field(42, odd(2, -1, 0))
    charsmap = odd(b"", b"\x00", struct.pack("<I", 4) + bytes(8), struct.pack("<I", 2**31), bytes(64))
    normalizer = _field(2, charsmap) + _field(3, odd(1, 0)) + _field(4, odd(1, 0)) + _field(5, odd(1, 0, b"x"))
    content = pieces + _field(2, trainer) + _field(3, normalizer)
    if rng.random() < 0.4:
        content = damaged_bytes(content, rng)
    return Case("LlamaForCausalLM", "tokenizer.model", content, without="tokenizer.json")


DAMAGES: dict[str, Callable[[random.Random], Case]] = {
    "config.json": _config,
    "generation_config.json": _generation,
    "tokenizer.json": _tokenizer,
    "tokenizer_config.json": _tokenizer_config,
    "tokenizer.model": _sentencepiece,
    "chat_template.jinja": _template,
    "model.safetensors": _safetensors,
    "model.safetensors.index.json": _index,
    "gguf": _gguf,
}
_SHARES = {"config.json": 5, "tokenizer.json": 4, "gguf": 5, "model.safetensors": 2, "tokenizer.model": 2}


def case(seed: int, number: int) -> tuple[str, Case]:
    """What is damaged, and the case: the same for the same numbers, whatever ran before."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(list(DAMAGES), [_SHARES.get(name, 1) for name in DAMAGES])[0]
    return kind, DAMAGES[kind](rng)
