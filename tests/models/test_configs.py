"""config.json → ModelSpec: what transformers would build, or one clear sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.model_spec import RopeSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.rotary import cos_sin_table, inverse_frequencies
from ridgeline.models import ARCHITECTURES, model_config
from ridgeline.models.config import ModelConfig
from ridgeline.worker.loader import checkpoint_views
from tests.models.loading import OPS

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}

PUBLISHED = {"llama": LLAMA_3_1_8B, "qwen3": QWEN3_0_6B, "mistral": MISTRAL_7B, "gpt2": GPT2}


def rope_of(config: ModelConfig, layer: int = 0) -> RopeSpec:
    rope = config.spec.layers[layer].mixer.rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_published_sizes_hold_exactly_the_tensors_transformers_would(config: dict[str, Any]) -> None:
    ours = model_config(config)
    meta = torch.device("meta")
    decoder = Decoder(ours.spec, OPS, dtype=torch.bfloat16, device=meta, max_positions=1)
    views = checkpoint_views(decoder, ours.weights)
    with meta:
        oracle = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    wanted = {name: tuple(parameter.shape) for name, parameter in oracle.named_parameters()}
    assert {name: tuple(view.shape) for name, view in views.items()} == wanted
    assert ours.weights.keys() == dict(decoder.named_parameters()).keys()


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, QWEN3_0_6B, MISTRAL_7B], ids=["llama3", "qwen3", "mistral"])
def test_rotary_table_equals_transformers(config: dict[str, Any]) -> None:
    """Angles are float32 products of up to 4096 * 1 rad in both; equal products give equal cosines."""
    oracle_config = transformers.AutoConfig.for_model(**config)
    oracle = LlamaRotaryEmbedding(oracle_config)
    rope = rope_of(model_config(config))
    torch.testing.assert_close(inverse_frequencies(rope), oracle.inv_freq, rtol=1e-6, atol=0)
    cos, sin = oracle(torch.empty(1, dtype=torch.float32), torch.arange(4096)[None])
    half = rope.rotary_dim // 2
    want = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    torch.testing.assert_close(cos_sin_table(rope, 4096), want, rtol=0, atol=4096 * 2.0**-23)


def test_rope_parameters_and_rope_scaling_are_one_thing() -> None:
    new = {key: value for key, value in LLAMA_3_1_8B.items() if not key.startswith("rope")}
    new["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}
    assert model_config(new) == model_config(LLAMA_3_1_8B)


def test_rope_parameters_may_differ_by_layer_type() -> None:
    config = model_config(
        {
            **QWEN3_0_6B,
            "use_sliding_window": True,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 14,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert [rope_of(config, layer).theta for layer in (0, 1, 2)] == [1e4, 1e6, 1e4]
    assert [config.spec.layers[layer].mixer.window for layer in (0, 1, 2)] == [512, None, 512]


def test_llama3_scaling_without_an_original_length_takes_the_models_own() -> None:
    scaling = {**LLAMA_3_1_8B["rope_scaling"], "original_max_position_embeddings": None}
    rope = rope_of(model_config({**LLAMA_3_1_8B, "rope_scaling": scaling}))
    assert dict(rope.scaling or ())["original_max_position_embeddings"] == 131072


@pytest.mark.parametrize("first_window_layer", [0, 1, 28])
def test_qwen3_windows_start_at_max_window_layers(first_window_layer: int) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": first_window_layer}
    oracle = transformers.AutoConfig.for_model(**{**QWEN3_0_6B, **changes}).layer_types
    spec = model_config({**QWEN3_0_6B, **changes}).spec
    assert [layer.mixer.window == 64 for layer in spec.layers] == [kind == "sliding_attention" for kind in oracle]


@pytest.mark.parametrize(
    ("kind", "absent"),
    [
        (
            "llama",
            ["num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act", "attention_bias"],
        ),
        ("mistral", ["num_key_value_heads", "sliding_window", "rope_theta", "rms_norm_eps", "max_position_embeddings"]),
        ("qwen3", ["num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "max_position_embeddings"]),
        ("gpt2", ["layer_norm_epsilon", "n_positions", "activation_function"]),
    ],
)
def test_absent_entries_take_transformers_defaults(kind: str, absent: list[str]) -> None:
    config = {key: value for key, value in PUBLISHED[kind].items() if key not in absent}
    config |= {"num_attention_heads": 32} if kind == "qwen3" else {}
    oracle = transformers.AutoConfig.for_model(**config)
    spec = model_config(config).spec
    mixer = spec.layers[0].mixer
    assert mixer.head_dim == getattr(oracle, "head_dim", oracle.hidden_size // oracle.num_attention_heads)
    assert mixer.num_kv_heads == getattr(oracle, "num_key_value_heads", oracle.num_attention_heads)
    assert mixer.window == (oracle.sliding_window if kind == "mistral" else None)
    assert spec.max_position_embeddings == oracle.max_position_embeddings
    assert spec.tie_word_embeddings == oracle.tie_word_embeddings
    assert spec.final_norm.eps == (oracle.layer_norm_epsilon if kind == "gpt2" else oracle.rms_norm_eps)
    if kind != "gpt2":
        assert mixer.rope is not None
        assert mixer.rope.theta == oracle.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("base", "generation", "want"),
    [
        (2, None, (2,)),
        ([5, 6, 5], None, (5, 6)),
        (None, None, ()),
        (7, {"eos_token_id": [8, 7]}, (8, 7)),
        (7, {"eos_token_id": None}, (7,)),
        (0, {}, (0,)),
    ],
)
def test_end_of_sequence_ids(base: Any, generation: dict[str, Any] | None, want: tuple[int, ...]) -> None:
    assert model_config({**GPT2, "eos_token_id": base}, generation).eos_token_ids == want


@pytest.mark.parametrize(
    ("entries", "want"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_checkpoint_dtype(entries: dict[str, str], want: str) -> None:
    assert model_config({**GPT2, **entries}).dtype == want


def test_generation_defaults_keep_only_sampling_numbers() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None, "bos_token_id": 1}
    assert model_config(GPT2, generation).sampling_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architectures": ["BertModel"]}, "BertModel.*none of which we know; known: GPT2LMHeadModel, Llama"),
    ("llama", {"architectures": None}, "None, none of which we know"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaling 'yarn'.*known: default, llama3"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaling 'linear'"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
    ("llama", {"rope_scaling": "yes"}, "rope_scaling to 'yes'; it must be an object"),
    ("llama", {"rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "low_freq_factor": 4.0}}, "below high_freq_factor"),
    ("llama", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "no full_attention"),
    ("llama", {"partial_rotary_factor": 0.26}, "rotates 33 of 128"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act to 'relu2'.*gelu_new"),
    ("llama", {"hidden_size": None}, "has no hidden_size"),
    ("llama", {"hidden_size": "4096"}, "hidden_size to '4096'; it must be a whole number"),
    ("llama", {"num_hidden_layers": 0}, "at least 1"),
    ("llama", {"num_key_value_heads": 5}, "32 attention heads and 5 key/value heads"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps to -1"),
    ("llama", {"attention_bias": "no"}, "attention_bias to 'no'; it must be true or false"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.*only unquantized"),
    ("llama", {"torch_dtype": "float64"}, "dtype to 'float64'; it must be one of float32"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id to '</s>'"),
    ("mistral", {"layer_types": ["full_attention"] * 32}, "layer_types.*one sliding_window for all"),
    ("mistral", {"sliding_window": 0}, "sliding_window to 0"),
    ("qwen3", {"layer_types": ["full_attention"]}, "must be 28 entries"),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["linear_attention"] * 28}, "each full_attention or sliding"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 28}, "use_sliding_window is false"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention.*without an encoder"),
    ("gpt2", {"n_head": 7}, "n_embd 768, which its 7 heads"),
]


@pytest.mark.parametrize(("kind", "changes", "sentence"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_we_cannot_run_is_refused_in_one_sentence(kind: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        model_config({**PUBLISHED[kind], **changes})
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


def test_a_generation_config_with_words_for_numbers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="temperature to 'hot'; it must be a number"):
        model_config(GPT2, {"temperature": "hot"})


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_registered_architecture_loads_under_its_own_name(name: str) -> None:
    config = next(config for config in PUBLISHED.values() if config["architectures"] == [name])
    assert ARCHITECTURES[name].spec(config).architecture == name
